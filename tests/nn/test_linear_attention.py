"""Linear attention against its recurrence in plain NumPy, one position after the other; what it costs, and keeps."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.nn import states
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.multi_token import speculate
from minitorch_dist.nn.states import linear_attention, read_on
from minitorch_dist.nn.windows import as_text, read_windows
from minitorch_dist.optim import mup

from .test_transformer import linear, norm, values

random = np.random.default_rng
STATES = {"linear": nn.LinearAttention, "delta": nn.DeltaAttention}     # all of which do the same around their states
each_kind = pytest.mark.parametrize("kind", STATES)


def recurrence(q, k, v, logs, documents=None, state=None):
    """(y, the state at the end): S = a S + k vᵀ, y = Sᵀ q."""
    batch, heads, time, size = q.shape
    state = np.zeros((batch, heads, size, v.shape[3])) if state is None else state.copy()
    y = np.empty(v.shape)
    for b, h in np.ndindex(batch, heads):
        for t in range(time):
            if documents is not None and t and documents[b, t] != documents[b, t - 1]:
                state[b, h] = 0
            state[b, h] = np.exp(logs[b, h, t]) * state[b, h] + np.outer(k[b, h, t], v[b, h, t])
            y[b, h, t] = state[b, h].T @ q[b, h, t]
    return y, state


def arguments(time, size=1, batch=2, heads=3, seed=0):
    """q, k, v, logs; some of these forget nearly all."""
    rng = random(seed)
    q, k = rng.standard_normal((2, batch, heads, time, size))
    return q, k, rng.standard_normal((batch, heads, time, 2)), -rng.exponential(1, (batch, heads, time)) ** 2


def numbers(time, batch=2):
    """Of documents: stretches, some of one position."""
    return np.stack([np.cumsum(random(7 + row).random(time) < 0.4) for row in range(batch)])


def come_again(time):
    """Two numbers by turns."""
    return numbers(time) % 2


@pytest.mark.parametrize("documents", [None, numbers, come_again], ids=["one", "several", "by turns"])
@pytest.mark.parametrize("time", [0, 1, 2, 4, 7, 12, 13])
def test_in_stretches_it_is_the_recurrence(stretch, time, documents):
    given = arguments(time)
    rows = None if documents is None else documents(time)
    y = linear_attention(*map(mt.tensor, given), rows)
    np.testing.assert_allclose(y.numpy(), recurrence(*given, rows)[0], rtol=0, atol=1e-12)


def test_in_pieces_it_is_the_whole(stretch):
    """Also a piece of no positions."""
    given, state, found = arguments(13), None, []
    for piece in ((0, 5), (5, 5), (5, 6), (6, 13)):
        y, state = read_on(*(x[:, :, slice(*piece)] for x in given), state)
        found.append(y)
    wanted = recurrence(*given)
    np.testing.assert_allclose(np.concatenate(found, 2), wanted[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, wanted[1], rtol=0, atol=1e-12)
    start = random(1).standard_normal(state.shape)
    for found, right in zip(read_on(*given, start), recurrence(*given, state=start), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)


def test_gradients_in_every_mode():
    """Reverse, forward, second order, of a beginning as well."""
    state = random(3).standard_normal((1, 2, 2, 2))
    mt.check_grads(lambda *given: mt.concatenate([
        mt.reshape(part, (-1,)) for part in read_on(*given)], 0),
        [*arguments(5, 2, 1, 2), state])


@pytest.mark.parametrize("documents", [None, numbers], ids=["one", "several"])
def test_gradients_in_stretches(stretch, documents):
    """Those of one stretch, which are compared with finite differences."""
    rows, found = None if documents is None else documents(11), []
    for shortest in (states.SHORTEST, 64):
        states.SHORTEST = shortest
        given = [mt.tensor(x, requires_grad=True) for x in arguments(11)]
        parts = [linear_attention(*given, rows)] if rows is not None else read_on(*given)
        sum((part * random(5).standard_normal(part.shape)).sum() for part in parts).backward()
        found.append([x.grad.numpy() for x in given])
    for one, other in zip(*found, strict=True):
        assert abs(one).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


def test_what_is_forgotten_takes_no_digits_with_it():
    """In float32, behind positions that forget e⁻³⁰⁰⁰ each, where a difference of sums from the beginning would be off
    by 1e-4 and more."""
    q, k, v, logs = (x.astype(np.float32) for x in arguments(40, 3))
    logs[:, :, :20], logs[:, :, 20:] = -3000, -0.01
    found = linear_attention(q, k, v, logs)
    wanted, _ = recurrence(*(x.astype(np.float64) for x in (q, k, v, logs)))
    assert np.linalg.norm(found - wanted) < 3e-7 * np.linalg.norm(wanted)


def attend(x, w, heads, qk_norm=False):
    """x (time, dim) through a LinearAttention of parameters w."""
    time, dim = x.shape
    size, h, out = dim // heads, linear(x, w, "project"), np.empty(x.shape)
    for head in range(heads):
        here = slice(head * size, (head + 1) * size)
        q, k, v, gate = (h[:, i * dim:(i + 1) * dim][:, here] for i in range(4))
        if qk_norm:
            q, k = norm(q, w["q_norm.weight"]), norm(k, w["k_norm.weight"])
        kept = 1 / (1 + np.exp(-h[:, 4 * dim + head] - w["decay.bias"][head]))
        state = np.zeros((size, size))
        for t in range(time):
            state = kept[t] * state + np.outer(k[t], v[t])
            y = norm(q[t:t + 1] @ state / np.sqrt(size), w["norm.weight"])[0]
            out[t, here] = y * gate[t] / (1 + np.exp(-gate[t]))
    return linear(out, w, "out")


def drawn(kind, attend, bias, qk_norm, tolerance):
    """(A layer of 3 heads that is what `attend` says of each sample, an input of 2, what that is, its weights)."""
    mt.manual_seed(1)
    layer = kind(15, 3, np.float64, 0.6, bias, qk_norm)
    with mt.no_grad():
        for i, p in enumerate(layer.parameters()):
            if len(p.shape) == 1:
                p[...] = random(5 + i).standard_normal(p.shape)
    x = random(0).standard_normal((2, 7, 15))
    wanted = [attend(sample, values(layer), 3, qk_norm) for sample in x]
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), wanted, **tolerance)
    assert layer(mt.tensor(x[:0])).shape == (0, 7, 15) and layer(mt.tensor(x[:, :0])).shape == (2, 0, 15)
    weights = layer.weights(x)
    assert weights.shape == (2, 3, 7, 7) and not np.triu(weights, 1).any()
    return layer, x, wanted, weights


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer(stretch, bias, qk_norm):
    layer, x, wanted, weights = drawn(nn.LinearAttention, attend, bias, qk_norm, {"rtol": 1e-10, "atol": 1e-11})
    h = layer.project(mt.tensor(x)).numpy()
    v = h[..., 30:45].reshape(2, 7, 3, 5).transpose(0, 2, 1, 3)
    y = (norm(weights @ v, layer.norm.weight.numpy())).transpose(0, 2, 1, 3).reshape(2, 7, 15)
    gate = h[..., 45:60]
    np.testing.assert_allclose(layer.out(mt.tensor(y * gate / (1 + np.exp(-gate)))).numpy(), wanted, rtol=1e-10,
                               atol=1e-11)


def test_heads_remember_differently_at_first():
    """With an input of zeros: 1/e of a position is left about 2^2, 2^4, 2^6 and 2^8 positions later."""
    layer = nn.LinearAttention(8, 4)
    logs = layer.decay(mt.tensor(np.zeros((1, 1, 4), np.float32))).numpy()[0, :, 0]
    np.testing.assert_allclose(-1 / logs, [4, 16, 64, 256], rtol=0.15)
    assert layer.extra_repr() == "8, heads=4, causal" and layer.decay.extra_repr() == "4"


def gpt(window, dtype=np.float64, vocabulary=11, **options):
    """Of length 40, with weights so large that all matters."""
    mt.manual_seed(3)
    model = nn.GPT(vocabulary, 40, 2, 3, 12, dtype=dtype, window=window, **options)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = random(60 + i).standard_normal(p.shape) * 0.5
    return model


@each_kind
def test_gradients_along_random_directions(kind):
    """Of the loss by each parameter, beside central differences."""
    model, tokens, targets = gpt(kind), random(0).integers(0, 11, (2, 21)), random(1).integers(0, 11, (2, 21))

    def loss():
        return nn.cross_entropy(model(tokens), targets)
    loss().backward()
    for i, (name, p) in enumerate(model.named_parameters()):
        way, start, sides = random(90 + i).standard_normal(p.shape), p.numpy().copy(), []
        for h in (1e-6, -1e-6):
            with mt.no_grad():
                p[...] = start + h * way
                sides.append(loss().item())
                p[...] = start
        slope = (p.grad.numpy() * way).sum()
        assert abs(slope) > 1e-5 and slope == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8), name


@each_kind
def test_a_position_sees_those_before_it_alone(kind):
    model, tokens = gpt(kind).eval(), random(0).integers(0, 11, (1, 40))
    whole = model(tokens).numpy()
    other = tokens.copy()
    other[:, 23] = (other[:, 23] + 1) % 11
    changed = abs(model(other).numpy() - whole).max(2)[0]
    assert (changed[:23] == 0).all() and (changed[23:] > 1e-9).all()


@each_kind
@pytest.mark.parametrize("latent", [None, {}])
def test_a_gpt_has_such_blocks_where_it_is_told_to(latent, kind):
    model = nn.GPT(11, 8, 5, 2, 8, positions="rotary", window=(kind, kind, None), latent=latent)
    usual = nn.MultiHeadAttention if latent is None else nn.LatentAttention
    assert [type(block.attention) for block in model.blocks] == [STATES[kind]] * 2 + [usual] + \
        [STATES[kind]] * 2
    assert type(model.new_block(5).attention) is usual
    ends = [np.std(block.attention.out.weight.numpy()) for block in model.blocks]
    np.testing.assert_allclose(ends, 0.02 / np.sqrt(10), rtol=0.3)


@pytest.mark.parametrize("heads, length", [(2, 16), (1, 24)])       # a stretch has 16 positions or more
def test_work_is_in_proportion_to_the_length(heads, length):
    """FLOPs of products: within stretches, with states, and, quadratic in T, but only size² for the square of as many
    stretches, of states with each other."""
    size, dim = 24 // heads, 24
    model = nn.GPT(11, 480, 1, heads, dim, window="linear")
    for time in (240, 480):
        n = time // length
        wanted = heads * 2 * (n * length * length * 2 * size + n * length * 2 * size * size + n * n * size * size)
        found = {row.path: row.flops for row in nn.summary(model, np.zeros((1, time), int)).rows}
        assert found["blocks.0.attention"] == wanted
        assert found["blocks.0.attention.project"] == 2 * time * dim * (4 * dim + heads)


@each_kind
def test_a_cache_keeps_a_state_whatever_the_length(kind):
    model = gpt(kind).eval()
    tokens, sizes = random(0).integers(0, 11, (3, 40)), []
    wanted, cache = model(tokens).numpy(), KeyValueCache(model)
    for cut in (1, 2, 20, 1, 16):
        here = slice(cache.past, cache.past + cut)
        np.testing.assert_allclose(cache.read(tokens[:, here]).numpy(), wanted[:, here], rtol=0, atol=1e-10)
        sizes.append(cache.nbytes)
    assert sizes == [2 * 3 * 3 * 4 * 4 * 8] * 5
    cache.past = 39
    with pytest.raises(ValueError, match="40 tokens have made, was taken back to 39: what has gone into a state"):
        cache.read(tokens[:, 39:])
    cache.past = 0
    np.testing.assert_allclose(cache.read(tokens[:, :9]).numpy(), wanted[:, :9], rtol=0, atol=1e-10)
    cache.past = 0
    with pytest.raises(ValueError, match="of one document per row; it was given documents"), cache.reading(tokens):
        model(tokens, np.zeros((3, 40), int))


@each_kind
@pytest.mark.parametrize("take_back", [False, True])
def test_a_cache_holds_nothing_besides(take_back, kind):
    """A state is a view of those of all stretches of a long beginning, which would stay as long as it."""
    cache = KeyValueCache(gpt(kind).eval(), take_back=take_back)
    cache.read(random(0).integers(0, 11, (3, 40)))
    cache.past = 35 if take_back else 40
    for _ in range(2):
        held = [array for _, kept in cache.layers.values() for array in kept.arrays if array is not None]
        assert sum((array if array.base is None else array.base).nbytes for array in held) == cache.nbytes
        cache.read(np.zeros((3, 0), int))


@pytest.mark.parametrize("window", ["linear", ("linear", 3), (None, "linear"), ("delta", None),
                                    ("linear", "delta")])
def test_it_writes_the_same_with_a_cache(window):
    """Also beyond the length, where what is left of the beginning is read anew."""
    model, tokens = gpt(window).eval(), random(0).integers(0, 11, (2, 3))
    np.testing.assert_array_equal(model.generate(tokens, 45, 0, cache=True), model.generate(tokens, 45, 0, cache=False))


def test_guesses_are_taken_back():
    """The tokens of a model that guesses are those of one that doesn't. Of few tokens some guesses are right."""
    right = wrong = 0
    for window in ("linear", (None, "linear"), ("delta", 4)):
        model = nn.MultiTokenPrediction(gpt(window, vocabulary=5), 2).eval()
        for seed in range(6):
            tokens = random(seed).integers(0, 5, (1, 3))
            found = speculate(model, tokens, 30)
            np.testing.assert_array_equal(found.tokens, model.model.generate(tokens, 30, 0))
            right, wrong = right + found.right, wrong + found.guessed - found.right
    assert right > 20 and wrong > 20


@each_kind
def test_what_the_last_read_has_brought_can_be_taken_back(kind):
    """All of it, or some, again and again, by a cache that was told: for a second state and what the read brought."""
    model, tokens = gpt(kind).eval(), random(0).integers(0, 11, (2, 40))
    wanted, cache = model(tokens).numpy(), KeyValueCache(model, take_back=True)

    def read(past, stop):
        cache.past = past
        found = cache.read(tokens[:, past:stop]).numpy()
        np.testing.assert_allclose(found, wanted[:, past:stop], rtol=0, atol=1e-10)
    for past, stop in ((0, 7), (0, 7), (4, 7), (5, 6), (6, 9), (6, 6), (6, 8)):     # each begins within the last
        read(past, stop)
    for past in (8, 9, 13, 20):
        cache.past = past
        cache.read(tokens[:, past:20] * 0 + 3)
        read(past, 20)
    read(20, 32)
    assert cache.nbytes == 2 * 2 * 3 * (2 * 4 * 4 + 12 * (4 + 4 + STATES[kind].numbers)) * 8
    cache.past = 19
    with pytest.raises(ValueError, match="32 tokens have made, was taken back to 19: .* what the last read has"):
        cache.read(tokens[:, 19:20])


@each_kind
def test_compiled_checkpointed_and_in_16_bits(kind):
    tokens, targets = random(0).integers(0, 11, (2, 21)), random(1).integers(0, 11, (2, 21))

    def gradients(model, call):
        nn.cross_entropy(call(tokens), targets).backward()
        return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    model = gpt(kind)
    wanted = gradients(model, model)
    other = gpt(kind)
    compiled = mt.compile(other)
    np.testing.assert_allclose(gradients(other, compiled), wanted, rtol=0, atol=1e-12)
    assert not compiled.breaks, compiled.breaks
    other = gpt(kind)
    for block in other.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    np.testing.assert_allclose(gradients(other, other), wanted, rtol=0, atol=1e-12)
    low = gpt(kind, np.float32)
    with mt.autocast("bfloat16"):
        found = gradients(low, low)
    # bfloat16 has 8 bits; norms of what is near 0 make more of it.
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.1


@pytest.mark.thorough
@each_kind
def test_it_learns_to_remember_what_came_first(kind):
    """There is no way but through the states."""
    mt.manual_seed(0)
    model = nn.GPT(8, 24, 2, 4, 32, window=kind)
    optimizer, rng, losses = optim.AdamW(model.parameters(), lr=1e-2), random(0), []
    for _ in range(250):
        tokens = rng.integers(0, 8, (16, 12))
        loss = nn.cross_entropy(model(tokens)[:, 1:].reshape((-1, 8)), np.repeat(tokens[:, :1], 11, 1).reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 2 and max(losses[-20:]) < 0.1


def test_activations_are_in_proportion_to_the_length():
    kept = {}
    for window in ("linear", None):
        for time in (128, 256, 512):
            model = nn.TransformerBlock(32, 2, causal=True, window=window).attention
            with ledger.record(memory=True) as book:
                y = model(mt.tensor(np.zeros((1, time, 32), np.float32), requires_grad=True))
                kept[window, time] = book.live["activation"]
            del y
    assert kept["linear", 512] < 2.1 * kept["linear", 256] < 4.3 * kept["linear", 128]
    assert kept["linear", 512] < kept[None, 512] / 2


@each_kind
def test_mup_scales_its_scores(kind):
    def made(heads, dim):
        return nn.GPT(11, 8, 1, heads, dim, window=kind)
    model = made(2, 64)
    assert mup.scale(model, made(2, 16)).constants["blocks.0.attention.scale"] == model.blocks[0].attention.scale
    assert model.blocks[0].attention.scale == pytest.approx(8 ** -0.5 * 8 / 32)


def test_wrong_arguments():
    for arguments, words in (((12, 5), "5 heads must divide dim 12"), ((0, 1), "dim=0 must be 1 or more")):
        with pytest.raises(ValueError, match=words):
            nn.LinearAttention(*arguments)
    with pytest.raises(ValueError, match=r"x \(4, 8\) must be \(batch, time, dim\)"):
        nn.LinearAttention(8, 2)(np.zeros((4, 8)))
    for documents in (np.zeros((1, 3), int), np.zeros((2, 4), int)):        # not of each row, not of each position
        with pytest.raises(ValueError, match=r"documents \(\d, \d\) must be \(batch, time\), here \(2, 3\)"):
            nn.LinearAttention(8, 2)(np.zeros((2, 3, 8)), documents)
    with pytest.raises(TypeError, match="documents of dtype float64; they must be integers"):
        nn.LinearAttention(8, 2)(np.zeros((2, 3, 8)), np.zeros((2, 3)))
    for kind, layer in STATES.items():
        with pytest.raises(ValueError, match=f"window='{kind}' with causal=False: {layer.__name__} is causal"):
            nn.TransformerBlock(8, 2, window=kind)
        with pytest.raises(ValueError, match=f"{layer.__name__}: 5 heads must divide dim 12"):
            layer(12, 5)
    with pytest.raises(ValueError, match="numbers of positions, blocks like 4x64, linear, delta or all"):
        read_windows("linear,none")
    windows = ("linear", 4, None, "delta")
    assert read_windows("linear,4,all,delta") == windows and as_text(windows) == "linear,4,all,delta"
