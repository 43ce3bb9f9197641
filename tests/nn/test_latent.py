"""Multi-head latent attention against the papers' equations in plain NumPy, one head and one query at a time;
what a cache keeps of it, byte by byte."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress import lora
from minitorch_dist.data.packing import apart, pack
from minitorch_dist.nn.decoding import KeyValueCache, by_position
from minitorch_dist.nn.latent import sizes_of
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.optim import mup

from .test_documents import differ, one_by_one, texts, trained
from .test_transformer import linear, norm, turned, values

random = np.random.default_rng
SIZES = [{}, {"q_rank": 5}, {"nope_size": 3, "rope_size": 2, "value_size": 5, "kv_rank": 7},
         {"nope_size": 2, "rope_size": 6, "value_size": 3, "kv_rank": 4, "q_rank": 9}]


def attend(x, w, heads, nope, rope, value, kv_rank, causal):
    """x (time, dim) by equations 37 to 47 of DeepSeek-V2, and the norms of V3."""
    time = len(x)
    h = linear(x, w, "down")
    q_rank = h.shape[1] - kv_rank - rope
    queries = linear(norm(h[:, :q_rank], w["q_norm.weight"]) if q_rank else x, w, "q")
    latent, shared = norm(h[:, q_rank:-rope], w["kv_norm.weight"]), turned(h[:, -rope:])
    up = w["kv.weight"].reshape(heads, nope + value, kv_rank)
    out = np.empty((time, heads * value))
    for head in range(heads):
        own = queries[:, head * (nope + rope):(head + 1) * (nope + rope)]
        q = np.concatenate([own[:, :nope], turned(own[:, nope:])], 1)
        k = np.concatenate([latent @ up[head, :nope].T, shared], 1)
        v = latent @ up[head, nope:].T
        for t in range(time):
            seen = t + 1 if causal else time
            scores = np.exp(k[:seen] @ q[t] / np.sqrt(nope + rope))
            out[t, head * value:(head + 1) * value] = scores @ v[:seen] / scores.sum()
    return linear(out, w, "out")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention(sizes, causal):
    mt.manual_seed(1)
    layer = nn.LatentAttention(24, 3, causal, np.float64, std=0.6, **sizes)
    with mt.no_grad():
        for i, p in enumerate(layer.parameters()):
            if len(p.shape) == 1:       # biases, norms
                p[...] = random(5 + i).standard_normal(p.shape)
    x = random(0).standard_normal((2, 7, 24))
    given = [sizes.get(name, usual) for name, usual in (("nope_size", 8), ("rope_size", 4), ("value_size", 8),
                                                        ("kv_rank", 32))]
    wanted = [attend(sample, values(layer), 3, *given, causal) for sample in x]
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), wanted, rtol=1e-10, atol=1e-11)
    assert layer(mt.tensor(x[:0])).shape == (0, 7, 24)      # a rank may have no samples


def gpt(sizes=SIZES[3], dtype=np.float64, **options):
    """Of length 12 and 3 heads, with weights so large that all matters."""
    mt.manual_seed(3)
    model = nn.GPT(11, 12, 2, 3, 12, dtype=dtype, hidden=10,
                   **FAMILIES["deepseek"] | {"latent": sizes, "tied": False} | options)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = random(60 + i).standard_normal(p.shape) * 0.6
    return model


def test_gradients_along_random_directions():
    """Of the loss by each parameter, beside central differences."""
    model, tokens, targets = gpt(), random(0).integers(0, 11, (2, 6)), random(1).integers(0, 11, (2, 6))

    def loss():
        return nn.cross_entropy(model(tokens), targets)
    loss().backward()
    for i, (name, p) in enumerate(model.named_parameters()):
        way, start, sides = random(90 + i).standard_normal(p.shape), p.numpy().copy(), []
        for h in (1e-5, -1e-5):
            with mt.no_grad():
                p[...] = start + h * way
                sides.append(loss().item())
                p[...] = start
        slope = (p.grad.numpy() * way).sum()
        assert abs(slope) > 1e-4 and slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-5, abs=1e-8), name


def test_packed_rows_give_the_sums_over_their_documents_compiled_and_checkpointed_too():
    packed = pack(texts(), 12)
    samples, model = [(apart(packed.rows), packed.targets)], gpt()
    wanted = trained(model, one_by_one(packed))
    assert differ(trained(model, samples), wanted) < 1e-10
    assert differ(trained(model, [((packed.inputs,), packed.targets)]), wanted) > 0.1
    compiled = mt.compile(gpt())
    assert differ(trained(compiled, samples), wanted) < 1e-10
    assert not compiled.breaks, compiled.breaks
    for block in model.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    assert differ(trained(model, samples), wanted) < 1e-10


@pytest.mark.parametrize("other", [None, "lora", "nf4", "mixture"])
@pytest.mark.parametrize("sizes", SIZES[::3], ids=str)
def test_a_cache_keeps_latents_and_gives_the_logits_of_all_tokens_at_once(sizes, other):
    """kv_rank + rope_size numbers per token and layer; of what stands in the place of a Linear, too."""
    moe = {"experts": 4, "k": 2, "capacity_factor": 2, "group": "sequence", "shared": 1}
    model = gpt(sizes, moe=moe if other == "mixture" else None).eval()
    if other in ("lora", "nf4"):
        lora.add(model, 2, targets=["*attention.kv", "*attention.down"], quantize="nf4" if other == "nf4" else None)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.data[...] = random(5).standard_normal(p.shape)
    assert all(block.attention._is_matrix() for block in model.blocks)
    tokens = random(0).integers(0, 11, (3, 12))
    with mt.no_grad():
        wanted = model(tokens)
    wanted = (wanted[0] if other == "mixture" else wanted).numpy()
    assert abs(wanted).max() > 1
    for cuts in ([1] * 12, [4, 1, 3, 1, 3], [12]):
        cache = KeyValueCache(model)
        found = [cache.read(piece).numpy() for piece in np.split(tokens, np.cumsum(cuts)[:-1], axis=1)]
        np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-10)
        numbers = sizes.get("kv_rank", 16) + sizes.get("rope_size", 2)
        assert cache.nbytes == 2 * 3 * 12 * numbers * 8
        arrays = [a for _, kept in cache.layers.values() for a in vars(kept).values() if isinstance(a, np.ndarray)]
        assert sum(a.nbytes for a in arrays) == cache.nbytes and all(a.base is None for a in arrays)


def bias(attention):
    rng, rows = random(4), attention.kv.weight.shape[0]
    attention.kv._register(attention.kv._parameters, "bias", nn.Parameter(rng.standard_normal(rows)))


def hook(attention):
    attention.kv.register_forward_hook(by_position(lambda m, inputs, y: mt.tanh(y)))


def layers(attention):
    weight = attention.kv.weight
    attention.kv = nn.Sequential(attention.kv, nn.Tanh(), nn.Linear(len(weight), len(weight), False, weight.dtype))


@pytest.mark.parametrize("change", [bias, hook, layers])
def test_a_cache_is_right_where_more_than_a_matrix_makes_keys_of_latents(change):
    model, tokens = gpt(positions=nn.Rotary(100, 3, 4)).eval(), random(0).integers(0, 11, (3, 9))
    plain = model(tokens).numpy()
    for block in model.blocks:
        change(block.attention)
    wanted, cache = model(tokens).numpy(), KeyValueCache(model)
    assert abs(wanted - plain).max() > 0.1
    found = [cache.read(piece).numpy() for piece in np.split(tokens, [4, 5], axis=1)]
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-10)


def test_it_writes_the_same_text_with_a_cache_and_without():
    model, tokens = gpt(), random(2).integers(0, 11, (4, 3))
    kept, anew = (model.generate(tokens, 12, 0, cache=cache) for cache in (True, False))     # the window slides
    np.testing.assert_array_equal(kept, anew)
    assert len(np.unique(kept[:, 3:])) > 3


def test_the_papers_table():
    """DeepSeek-V2, table 1 and 2.1.4: 9/2 of a head's size per token and layer, as much as 2.25 groups of GQA."""
    with nn.without_values():
        v2 = nn.LatentAttention(5120, 128, nope_size=128, kv_rank=512, q_rank=1536)
    kept = v2.kv_rank + v2.rope_size
    assert v2.rope_size == 64 and sizes_of(18, 3) == (6, 2, 6, 24, None) and sizes_of(3, 3).rope_size == 2
    assert kept == 576 == 9 / 2 * 128 and kept / (2 * 128) == 2.25 and 2 * 128 * 128 == 32_768


def test_attention_by_latents_has_the_scale_of_mup():
    """Whose width is a head's queries'; with the cache's scores, too."""
    wide, base = (gpt({"nope_size": 2 * n, "rope_size": n, "kv_rank": 6}) for n in (4, 2))
    widths = mup.scale(wide, base)
    assert wide.blocks[0].attention.scale == pytest.approx(1 / np.sqrt(6) * 6 / 12)
    assert widths.parameters["blocks.0.attention.kv.weight"].kind == "input"        # of a rank as large as base's
    tokens = random(0).integers(0, 11, (2, 7))
    wide.eval()
    cache = KeyValueCache(wide)
    cache.read(tokens[:, :4])
    np.testing.assert_allclose(cache.read(tokens[:, 4:]).numpy(), wide(tokens).numpy()[:, 4:], rtol=0, atol=1e-10)


def test_the_weights_to_look_at_are_those_that_it_takes():
    mt.manual_seed(0)
    layer = nn.LatentAttention(12, 3, True, np.float64, 0.7, **SIZES[3])
    x = random(1).standard_normal((2, 5, 12))
    weights = layer.weights(mt.tensor(x))
    assert weights.shape == (2, 3, 5, 5) and not np.triu(weights, 1).any()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)


def test_it_learns():
    model = gpt(dtype=np.float32, moe={"experts": 3, "k": 1, "score": "sigmoid", "shared": 1})
    optimizer = optim.Adam(model.parameters(), 1e-2)
    tokens, losses = random(0).integers(0, 11, (4, 9)), []
    for _ in range(30):
        optimizer.zero_grad()
        logits, aux = model(tokens[:, :-1])
        loss = nn.cross_entropy(logits, tokens[:, 1:]) + aux
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


def test_what_does_not_fit_is_refused():
    for sizes in ({"rope_size": 3}, {"kv_rank": -1}, {"q_rank": 0}):
        with pytest.raises(ValueError, match="latent attention: nope_size=4.*must be 1 or more, and rope_size even"):
            nn.LatentAttention(8, 2, **sizes)
    with pytest.raises(ValueError, match="rotary=False, kv_heads=None"):
        nn.GPT(11, 9, dim=16, latent={})
    with pytest.raises(ValueError, match="rotary=True, kv_heads=2"):
        nn.GPT(11, 9, dim=16, kv_heads=2, positions="rotary", latent={})
    with pytest.raises(ValueError, match=r"LatentAttention: x \(2, 3\) must be"):
        nn.LatentAttention(3, 1, rope_size=2)(np.ones((2, 3), np.float32))
    cache = KeyValueCache(gpt().eval())
    with pytest.raises(ValueError, match="one document per row; it was given documents"), cache._told():
        cache.model.blocks(np.zeros((2, 3, 12)), np.zeros((2, 3), int))
