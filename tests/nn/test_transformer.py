"""Attention, blocks and GPT against the same computation in plain NumPy float64, one head and one query at a time."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn
from minitorch_dist.nn.transformer import FAMILIES

random = np.random.default_rng


def values(layer):
    return {name: p.numpy().copy() for name, p in layer.named_parameters()}


def turned(x, base=10_000.0):
    """(time, size): features (j, j + size/2) as a complex number, multiplied by exp(i · time · base^(-2j/size))."""
    time, size = x.shape
    z = x[:, :size // 2] + 1j * x[:, size // 2:]
    z = z * np.exp(1j * np.arange(time)[:, None] * base ** (-2 * np.arange(size // 2) / size))
    return np.concatenate([z.real, z.imag], 1)


def attend(x, w, heads, kv_heads, causal, rotate, window=99):
    """x (time, dim) through the weights of a MultiHeadAttention."""
    time, dim = x.shape
    size = dim // heads
    h = linear(x, w, "qkv")
    parts = [h[:, i * size:(i + 1) * size] for i in range(h.shape[1] // size)]
    out = np.empty((time, dim))
    for head in range(heads):
        group = head // (heads // kv_heads)
        q, k, v = parts[head], parts[heads + group], parts[heads + kv_heads + group]
        if "q_norm.weight" in w:
            q, k = norm(q, w["q_norm.weight"]), norm(k, w["k_norm.weight"])
        if rotate:
            q, k = turned(q), turned(k)
        for t in range(time):
            seen = slice(max(0, t - window + 1), t + 1 if causal else t + window)
            scores = np.exp(k[seen] @ q[t] / np.sqrt(size))
            lost = np.exp(w["sinks.score"][head]) if "sinks.score" in w else 0
            found = scores @ v[seen] / (scores.sum() + lost)
            if parts[heads + 2 * kv_heads:]:
                found = found / (1 + np.exp(-parts[heads + 2 * kv_heads + head][t]))
            out[t, head * size:(head + 1) * size] = found
    return linear(out, w, "out")


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(x, w, b=None, eps=1e-5):
    if b is None:
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6) * w
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * w + b


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def mlp(x, w):
    """GELU, or LLaMA's: silu of the upper half, times the lower one."""
    h, hidden = linear(x, w, "mlp.0"), w["mlp.2.weight"].shape[1]
    if h.shape[-1] == hidden:
        return linear(gelu(h), w, "mlp.2")
    gate, up = h[..., :hidden], h[..., hidden:]
    return linear(gate / (1 + np.exp(-gate)) * up, w, "mlp.2")


def block(x, w, heads, kv_heads, causal, rotate):
    def below(name):
        return {k[len(name) + 1:]: v for k, v in w.items() if k.startswith(name + ".")}
    x = x + attend(norm(x, w["norm1.weight"], w.get("norm1.bias")), below("attention"), heads, kv_heads, causal, rotate)
    return x + mlp(norm(x, w["norm2.weight"], w.get("norm2.bias")), w)


ATTENTION = [(4, 4, False, False), (4, 4, True, False), (4, 2, True, True), (6, 2, False, True), (2, 1, True, False)]


@pytest.mark.parametrize(("heads", "kv_heads", "causal", "rotate"), ATTENTION)
def test_attention(heads, kv_heads, causal, rotate):
    mt.manual_seed(1)
    layer = nn.MultiHeadAttention(24, heads, kv_heads, causal, rotate, np.float64, std=0.6)
    with mt.no_grad():
        layer.qkv.bias[...] = random(5).standard_normal(layer.qkv.bias.shape)
    x = random(0).standard_normal((3, 7, 24))
    y = layer(mt.tensor(x)).numpy()
    wanted = [attend(sample, values(layer), heads, kv_heads, causal, rotate) for sample in x]
    np.testing.assert_allclose(y, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("heads", "kv_heads", "causal", "rotate"), ATTENTION)
@pytest.mark.parametrize("window, more", [(1, {}), (3, {"qk_norm": True}), (4, {"sinks": True}), (5, {"gated": True}),
                                          (2, {"gated": True, "qk_norm": True, "sinks": True})], ids=str)
def test_attention_with_a_window_norms_sinks_and_gates(heads, kv_heads, causal, rotate, window, more):
    mt.manual_seed(1)
    layer = nn.MultiHeadAttention(24, heads, kv_heads, causal, rotate, np.float64, std=0.6, window=window, **more)
    for name, p in layer.named_parameters():
        p.data[...] = (p.data + ("sinks" in name)) * random(len(name)).uniform(0.5, 1.5, p.shape)
    x = random(0).standard_normal((3, 7, 24))
    wanted = [attend(sample, values(layer), heads, kv_heads, causal, rotate, window) for sample in x]
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), wanted, rtol=1e-10, atol=1e-11)
    far = abs(np.arange(7) - np.arange(7)[:, None]) >= window
    assert (layer.weights(x)[..., far] == 0).all() and f"window={window}" in repr(layer)


def test_windows_go_round_the_blocks():
    def windows(*args, **options):
        return [block.attention.window for block in nn.GPT(5, 9, 5, 2, 4, *args, **options).blocks]
    assert windows() == [None] * 5 and windows(window=3) == [3] * 5
    assert windows(window=(4, 4, None)) == [4, 4, None, 4, 4] and windows(window=[2]) == [2] * 5
    ahead = nn.MultiTokenPrediction(nn.GPT(5, 9, 2, 2, 4, window=(1, 2, None)), 3)
    assert [further.block.attention.window for further in ahead.further] == [None, 1, 2]
    for wrong, words in ((0, "MultiHeadAttention: window=0 must be 1 or more"), ((), r"window=\(\) has none")):
        with pytest.raises(ValueError, match=words):
            windows(window=wrong)
    with pytest.raises(ValueError, match="multi-head latent attention has norms of its own, and no window, not qk_"):
        windows(positions="rotary", latent={}, window=4)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("rotate", [False, True])
def test_block(norm, rotate):
    mt.manual_seed(2)
    layer = nn.TransformerBlock(8, 4, 2, True, rotate, norm=norm, dtype=np.float64, std=0.5)
    x = random(0).standard_normal((2, 5, 8))
    wanted = [block(sample, values(layer), 4, 2, True, rotate) for sample in x]
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), wanted, rtol=1e-10, atol=1e-11)


def small(**options):
    """A tiny float64 GPT whose weights are large enough to matter."""
    mt.manual_seed(3)
    model = nn.GPT(11, 9, layers=2, heads=4, dim=8, dtype=np.float64, **options)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = random(60 + i).standard_normal(p.shape) * 0.6
    return model


GPTS = [{}, {"positions": "rotary", "kv_heads": 2}, {"norm": "rms", "tied": False},
        {"positions": "rotary", "norm": "rms", "kv_heads": 1, "tied": False}, {"mlp": "swiglu"},
        FAMILIES["llama"] | {"kv_heads": 2, "tied": False, "hidden": 5}]


@pytest.mark.parametrize("options", GPTS, ids=str)
def test_gpt(options):
    model = small(**options)
    w = values(model)
    tokens = random(0).integers(0, 11, (3, 7))
    logits = model(tokens).numpy()
    assert logits.shape == (3, 7, 11)
    for row, got in zip(tokens, logits, strict=True):
        x = w["embed.weight"][row]
        if "positions" not in options:
            x = x + w["position.weight"][:7]
        for i in range(2):
            inner = {k[len(f"blocks.{i}."):]: v for k, v in w.items() if k.startswith(f"blocks.{i}.")}
            x = block(x, inner, 4, options.get("kv_heads", 4), True, "positions" in options)
        x = norm(x, w["norm.weight"], w.get("norm.bias"))
        np.testing.assert_allclose(got, x @ w["embed.weight" if options.get("tied", True) else "head.weight"].T,
                                   rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", GPTS, ids=str)
def test_the_future_does_not_change_the_past(options):
    model = small(**options)
    tokens = random(0).integers(0, 11, (2, 8))
    before = model(tokens).numpy()
    for t in range(1, 8):
        other = tokens.copy()
        other[:, t:] = (other[:, t:] + 1 + random(t).integers(0, 9, (2, 8 - t))) % 11
        after = model(other).numpy()
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.abs(after[:, t] - before[:, t]).max() > 1e-3
        np.testing.assert_allclose(model(tokens[:, :t]).numpy(), before[:, :t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", GPTS, ids=str)
def test_gradients_along_random_directions(options):
    """The loss's slope along three random directions in all parameters at once, by central differences."""
    model = small(**options)
    tokens = random(0).integers(0, 11, (2, 6))
    labels = random(1).integers(0, 11, (2, 6))

    def loss():
        return nn.cross_entropy(model(tokens), labels)
    model.zero_grad()
    loss().backward()
    start = values(model)
    for seed in range(3):
        direction = {name: random([seed, i]).standard_normal(v.shape) for i, (name, v) in enumerate(start.items())}
        got = sum((p.grad.numpy() * direction[name]).sum() for name, p in model.named_parameters())
        ends = []
        for step in (1e-5, -1e-5):
            model.load_state_dict({name: v + step * direction[name] for name, v in start.items()})
            with mt.no_grad():
                ends.append(loss().item())
        model.load_state_dict(start)
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- what each part promises

def test_grouped_heads_are_repeated_heads():
    mt.manual_seed(4)
    grouped = nn.MultiHeadAttention(12, 6, 2, causal=True, dtype=np.float64, std=0.5)
    full = nn.MultiHeadAttention(12, 6, causal=True, dtype=np.float64)
    w = values(grouped)
    rows = [*range(12), *(12 + (head // 3) * 2 + i for head in range(6) for i in range(2)),
            *(16 + (head // 3) * 2 + i for head in range(6) for i in range(2))]
    full.load_state_dict({**w, "qkv.weight": w["qkv.weight"][rows], "qkv.bias": w["qkv.bias"][rows]})
    x = mt.tensor(random(0).standard_normal((2, 5, 12)))
    np.testing.assert_allclose(grouped(x).numpy(), full(x).numpy(), rtol=1e-12)


def test_tied_weights_are_one_parameter_with_one_gradient():
    tied, free = small(), small(tied=False)
    names = [name for name, _ in tied.named_parameters()]
    assert "head.weight" not in names and "head.weight" in dict(free.named_parameters())
    assert len(names) == len(set(names)) and set(tied.state_dict()) == set(names)
    free.load_state_dict({**tied.state_dict(), "head.weight": tied.embed.weight.numpy().copy()})
    tokens, labels = random(0).integers(0, 11, (2, 2, 6))
    for model in (tied, free):
        nn.cross_entropy(model(tokens), labels).backward()
    both = free.embed.weight.grad.numpy() + free.head.weight.grad.numpy()
    assert np.abs(free.head.weight.grad.numpy()).max() > 1e-3 < np.abs(free.embed.weight.grad.numpy()).max()
    np.testing.assert_allclose(tied.embed.weight.grad.numpy(), both, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("heads", "kv_heads", "causal", "rotate"), ATTENTION)
def test_the_weights_to_look_at(heads, kv_heads, causal, rotate):
    """Rows add up to 1, the future has none, and with them and the values in hand attention is what forward gives."""
    mt.manual_seed(1)
    layer = nn.MultiHeadAttention(24, heads, kv_heads, causal, rotate, np.float64, std=0.6)
    x = random(0).standard_normal((2, 7, 24))
    p = layer.weights(mt.tensor(x))
    assert isinstance(p, np.ndarray) and p.shape == (2, heads, 7, 7)
    np.testing.assert_allclose(p.sum(-1), 1)
    assert (np.triu(p, 1) == 0).all() == causal and np.ptp(p[:, 0, 6]) > 1e-3
    w, size = values(layer), 24 // heads
    v = (x @ w["qkv.weight"].T)[..., (heads + kv_heads) * size:].reshape(2, 7, kv_heads, size)
    v = np.repeat(v, heads // kv_heads, axis=2)
    y = np.einsum("bhts,bshd->bthd", p, v).reshape(2, 7, 24) @ w["out.weight"].T + w["out.bias"]
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), y, rtol=1e-9, atol=1e-11)


def test_embedding():
    layer = nn.Embedding(5, 3, np.float64)
    indices = np.array([[1, 4], [1, 1]])
    y = layer(indices)
    np.testing.assert_array_equal(y.numpy(), layer.weight.numpy()[indices])
    ct = random(0).standard_normal((2, 2, 3))
    (y * ct).sum().backward()
    wanted = np.zeros((5, 3))
    for i, row in zip(indices.ravel(), ct.reshape(-1, 3), strict=True):
        wanted[i] += row
    np.testing.assert_allclose(layer.weight.grad.numpy(), wanted)
    assert repr(layer) == "Embedding(5, 3)"


def test_initial_values_of_gpt():
    mt.manual_seed(0)
    model = nn.GPT(65, 64, layers=8, dim=128)
    w = values(model)
    for name, wanted in [("embed.weight", 0.02), ("position.weight", 0.02), ("blocks.3.attention.qkv.weight", 0.02),
                         ("blocks.3.attention.out.weight", 0.02 / 4), ("blocks.7.mlp.2.weight", 0.02 / 4),
                         ("blocks.7.mlp.0.weight", 0.02)]:
        assert abs(w[name].std() / wanted - 1) < 0.05, name
    assert not any(v.any() for name, v in w.items() if name.endswith(".bias"))
    loss = nn.cross_entropy(model(random(0).integers(0, 65, (4, 64))), random(1).integers(0, 65, (4, 64))).item()
    assert abs(loss - np.log(65)) < 0.1     # it knows nothing yet


# ---------------------------------------------------------------- generation

def test_greedy_generation_takes_the_likeliest_step_by_step():
    model = small(dropout=0.5)
    tokens = random(0).integers(0, 11, (3, 4))
    written = model.generate(tokens, 12, temperature=0)     # longer than the model sees: 4 + 12 > 9
    assert written.shape == (3, 16) and written.dtype == np.int64
    model.eval()
    step = tokens
    for _ in range(12):
        step = np.concatenate([step, model(step[:, -9:]).numpy()[:, -1].argmax(1)[:, None]], 1)
    np.testing.assert_array_equal(written, step)
    assert len(np.unique(written[:, 4:])) > 2


def test_samples_follow_the_softmax():
    model = small()
    tokens = np.tile([[3, 1, 4]], (20_000, 1))
    for temperature in (1.0, 0.5):
        drawn = model.generate(tokens, 1, temperature, backend.stream("test"))[:, -1]
        logits = model(tokens[:1]).numpy()[0, -1] / temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        share = np.bincount(drawn, minlength=11) / len(drawn)
        assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / len(drawn)) + 1e-9).all()
        assert p.max() < 0.999


def test_generation_leaves_the_model_as_it_was():
    model = small(dropout=0.5)
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    model.generate(np.array([[1]]), 2, stream=backend.stream("a"))
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(Exception):  # noqa: B017, PT011
        model.generate(np.array([[11]]), 2, stream=backend.stream("a"))     # no such token
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    same = [model.generate(np.array([[1, 2]]), 6, stream=backend.stream("b")).tolist() for _ in range(2)]
    assert same[0] == same[1]


# ---------------------------------------------------------------- misuse

@pytest.mark.parametrize(("make", "words"), [
    (lambda: nn.MultiHeadAttention(10, 4), "4 heads must divide dim 10"),
    (lambda: nn.GPT(7, 8, window=(None, "delta"), sinks=True), "sinks=True with window='delta', latent=None"),
    (lambda: nn.GPT(7, 8, latent={}, positions="rotary", sinks=True), "sinks=True with window=None, latent={}"),
    (lambda: nn.GPT(7, 8, latent={}, positions="rotary", gated=True), "gated=True with latent={}: multi-head latent"),
    (lambda: nn.MultiHeadAttention(12, 6, 4), "4 kv_heads the heads"),
    (lambda: nn.MultiHeadAttention(8, 0), "MultiHeadAttention: heads=0 must be 1 or more"),
    (lambda: nn.MultiHeadAttention(8, 2, 0), "MultiHeadAttention: kv_heads=0 must be"),
    (lambda: nn.MultiHeadAttention(-8, -2), "MultiHeadAttention: dim=-8, heads=-2 must be"),
    (lambda: nn.LatentAttention(8, 0), "multi-head latent attention: heads=0 must be"),
    (lambda: nn.ImageTransformer(layers=0), "ImageTransformer: layers=0 must be"),
    (lambda: nn.Embedding(0, 3), "Embedding: num_embeddings=0 must be"),
    (lambda: nn.Linear(0, 3), r"shape \(3, 0\) has no fan-in .* of 1 or more"),
    (lambda: nn.Linear(-1, 3), r"shape \(3, -1\) has no fan-in"),
    (lambda: nn.Conv2d(4, 4, 3, groups=0), "Conv2d: groups=0 must be"),
    (lambda: nn.MoE(8, 0, 4), "MoE: hidden=0 must be"),
    (lambda: nn.GPT(5, 8, norm="batch"), "norm='batch'; use 'layer' or 'rms'"),
    (lambda: nn.GPT(5, 8, positions="none"), "learned.*rotary"),
    (lambda: nn.GPT(5, 8, dim=8, mlp="silu"), "mlp='silu'; use 'gelu' or 'swiglu'"),
    (lambda: nn.SwiGLU()(np.ones((2, 5))), "5 features are no two halves"),
    (lambda: nn.SwiGLU()(np.ones(())), "1 features are no two halves"),
    (lambda: nn.Flatten()(np.ones(())), "Flatten: x has no axis"),
    (lambda: nn.BatchNorm(3)(np.ones(3)), r"BatchNorm of 3 channels was given an input of shape \(3,\)"),
    (lambda: mt.swiglu(np.ones((2, 5)), np.ones(5)), r"gate \(2, 5\) and up \(5,\)"),
    (lambda: nn.GPT(5, 8, dim=8)(np.zeros((1, 9), int)), "length 8 was given 9"),
])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name, size", [("vocabulary", 0), ("length", -1), ("layers", 0), ("layers", -1), ("heads", 0),
                                        ("heads", -2), ("dim", 0), ("hidden", 0)])
def test_sizes_are_1_or_more(family, name, size):
    with pytest.raises(ValueError, match=f"{name}={size} must be 1 or more"):
        nn.GPT(**{"vocabulary": 5, "length": 8, "dim": 8, **FAMILIES[family], name: size})


def test_an_embedding_takes_a_slice_of_its_rows_as_it_takes_their_numbers():
    table = nn.Embedding(7, 3, np.float64)
    ct = np.random.default_rng(1).standard_normal((4, 3))
    grads = []
    for rows in (slice(2, 6), np.arange(2, 6)):
        table.weight.grad = None
        table(rows).backward(ct)
        grads.append(table.weight.grad.numpy())
    np.testing.assert_array_equal(*grads)
    np.testing.assert_array_equal(table(slice(2, 6)).numpy(), table(np.arange(2, 6)).numpy())


@pytest.mark.parametrize("more", [{}, {"moe": {"experts": 2}}, {"mlp": "swiglu"}])
def test_a_feed_forward_of_no_features_is_refused(more):
    for hidden in (0, -3):
        with pytest.raises(ValueError, match=f"hidden={hidden} must be 1 or more"):
            nn.GPT(5, 4, layers=1, heads=1, dim=4, hidden=hidden, **more)
