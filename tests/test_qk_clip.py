"""QK-clip in one process: what scores are, and what they are after a clip."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.autodiff.ops import attention
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.compress import lora
from minitorch_dist.nn.cross_attention import CrossAttention
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.latent import LatentAttention
from minitorch_dist.qk_clip import QKClip, factors
from tests.device.fake_cupy import installed

RANDOM = np.random.default_rng(4)
X, MEMORY = RANDOM.standard_normal((3, 7, 12)), RANDOM.standard_normal((3, 9, 10))
ATTENTIONS = {
    "whole": lambda: nn.MultiHeadAttention(12, 3, dtype=np.float64, std=1.0),
    "causal, turned, without biases": lambda: nn.MultiHeadAttention(12, 3, causal=True, rotary=True, bias=False,
                                                                    dtype=np.float64, std=1.0),
    "heads that share keys, gated": lambda: nn.MultiHeadAttention(12, 6, 2, causal=True, window=3, dtype=np.float64,
                                                                  std=1.0, gated=True),
    "latent": lambda: LatentAttention(12, 3, causal=True, dtype=np.float64, std=1.0, q_rank=5, value_size=3),
    "of a memory": lambda: CrossAttention(12, 3, memory_dim=10, dtype=np.float64, std=1.0),
    "of a memory, shared": lambda: CrossAttention(12, 4, 2, memory_dim=10, dtype=np.float64, std=1.0),
}


def made(name):
    """(the attention, with biases that aren't 0, what it is called with)."""
    mt.manual_seed(7)
    layer = ATTENTIONS[name]()
    for p in layer.parameters():
        if p.ndim == 1:
            p.data[...] += RANDOM.standard_normal(p.shape)
    return layer, (X, MEMORY) if isinstance(layer, CrossAttention) else (X,)


def scores_of(layer, *inputs):
    """(batch, heads, time, sources) of a layer's own queries and keys, in plain loops; -inf where it doesn't look."""
    q, k, *_ = (np.asarray(lower(each)) for each in layer._queries_keys_values(*inputs))
    found = np.full((*q.shape[:3], k.shape[2]), -np.inf)
    for b, h, t, s in np.ndindex(found.shape):
        ahead = t - s
        if (not getattr(layer, "causal", False) or ahead >= 0) and (layer.window is None or abs(ahead) < layer.window):
            found[b, h, t, s] = q[b, h, t] @ k[b, h // (layer.heads // layer.kv_heads), s] * layer._scale()
    return found


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("batch, times, sources, heads, groups", [(2, 5, 5, 4, 2), (1, 1, 1, 1, 1), (3, 70, 70, 2, 2),
                                                                 (2, 130, 67, 3, 1), (0, 4, 4, 2, 2), (2, 0, 0, 2, 1)])
def test_the_greatest_of_all_scores(monkeypatch, batch, times, sources, heads, groups, at_once):
    """Against all of them; at_once: also some queries at a time. Causal, with a window, documents, masks."""
    monkeypatch.setattr(attention, "AT_ONCE", at_once)
    random = np.random.default_rng([batch, times])
    q, k = (random.standard_normal((batch, n, t, 3)) for n, t in ((heads, times), (groups, sources)))
    documents = random.integers(0, 3, (batch, times))
    ahead = np.arange(times)[:, None] - np.arange(sources)
    every = np.einsum("bhtd,bhsd->bhts", q, np.repeat(k, heads // groups, 1)) * 0.3
    mask = random.random((batch, 1, times, sources)) < 0.5
    floats = np.where(mask, random.standard_normal(mask.shape), -np.inf)
    for more, seen in (({}, True), ({"is_causal": True}, ahead >= 0), ({"window": 2}, abs(ahead) < 2),
                       ({"is_causal": True, "window": 3}, (ahead >= 0) & (ahead < 3)), ({"attn_mask": mask}, mask),
                       ({"attn_mask": floats, "is_causal": True}, mask & (ahead >= 0)),
                       *([({"documents": documents}, (documents[:, :, None] == documents[:, None])[:, None])]
                         if times == sources else [])):
        wanted = np.where(seen, every, -np.inf).max(axis=(0, 2, 3), initial=-np.inf)
        for dtype, atol in (("f8", 1e-12), ("f4", 1e-5), ("f2", 0.02)):
            got = attention.greatest_scores(q.astype(dtype), k.astype(dtype), scale=0.3, **more)
            assert got.dtype == max(np.dtype(dtype), np.dtype("f4")) and got.shape == (heads,)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_scores_of_clipped_heads_are_multiplied(name):
    """Of each head all scores, by its own factor; other heads' to the bit, and values always."""
    layer, inputs = made(name)
    before, values = scores_of(layer, *inputs), lower(layer._queries_keys_values(*inputs)[2]).copy()
    greatest = before.max(axis=(0, 2, 3))
    threshold = np.sort(greatest)[-2] * 0.8        # some heads are above it
    clip = QKClip(layer, threshold)
    layer(*inputs)
    found = clip.step()
    assert list(found) == [""] and found.threshold == threshold
    np.testing.assert_allclose(found[""], greatest, rtol=1e-12)
    gamma = np.minimum(1, threshold / greatest)
    assert found.clipped == [("", h) for h in np.flatnonzero(gamma < 1)] and 2 <= len(found.clipped)
    assert found.greatest == found[""].max()
    after = scores_of(layer, *inputs)
    seen = np.isfinite(before)
    np.testing.assert_allclose(after[seen], (before * gamma[:, None, None])[seen], rtol=1e-12, atol=1e-12)
    assert (after == before)[:, gamma == 1].all()
    assert (lower(layer._queries_keys_values(*inputs)[2]) == values).all()
    layer(*inputs)
    np.testing.assert_allclose(clip.step()[""], np.minimum(greatest, threshold), rtol=1e-12)


def test_what_is_below_the_threshold_stays_to_the_bit():
    layer, inputs = made("whole")
    before = layer.state_dict()
    clip = QKClip(layer, 1e6)
    layer(*inputs)
    assert not clip.step().clipped
    assert all((value == before[name]).all() for name, value in layer.state_dict().items())


def test_what_is_frozen_stays():
    """A layer of which any part is, and no other."""
    mt.manual_seed(7)
    model = nn.Sequential(*(nn.MultiHeadAttention(12, 3, dtype=np.float64, std=1.0) for _ in range(3)))
    model[0].qkv.requires_grad_(False)
    model[2].qkv.bias.requires_grad_(False)
    before, clip = model.state_dict(), QKClip(model, 0.01)
    model(X)
    assert {path for path, _ in clip.step().clipped} == {"1"}
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert changed == {"1.qkv.weight"}      # biases are 0 there


def test_scores_of_no_number_are_left_alone():
    """inf and NaN: of weights that are 0 nothing would ever come again."""
    scores = np.array([np.inf, np.nan, -np.inf, 5.0, 0.5])
    assert factors(scores, 2.0).tolist() == [1, 1, 1, 0.4, 1]


def test_all_forwards_of_a_step_count_and_no_others():
    layer, _ = made("whole")
    clip = QKClip(layer, 1e9)
    first, second = X[:1], 3 * X[1:]
    greatest = [scores_of(layer, x).max(axis=(0, 2, 3)) for x in (first, second)]
    layer(second)
    layer(first)
    np.testing.assert_allclose(clip.step()[""], np.maximum(*greatest), rtol=1e-12)
    layer(first)
    np.testing.assert_allclose(clip.step()[""], greatest[0], rtol=1e-12)
    layer.eval()
    layer(second)
    layer.train()
    assert clip.step()[""].max() == -np.inf and clip.step().greatest == -np.inf
    layer(second)
    clip.forget()
    assert clip.step()[""].max() == -np.inf


def test_what_a_checkpoint_runs_again_is_not_noted_again():
    layer, _ = made("whole")
    clip = QKClip(layer, 1e9)
    y = mt.checkpoint(layer)(mt.tensor(X, requires_grad=True))
    clip.forget()
    y.sum().backward()
    assert clip.step()[""].max() == -np.inf


def test_writing_with_a_cache_notes_nothing():
    mt.manual_seed(1)
    gpt = nn.GPT(7, 6, layers=1, heads=2, dim=8)
    clip = QKClip(gpt)
    gpt.generate(np.zeros((1, 1), int), 4, temperature=0)
    assert clip.step().greatest == -np.inf
    gpt(np.zeros((1, 4), int))
    assert clip.step().greatest > -np.inf
    KeyValueCache(gpt).read(np.zeros((1, 4), int))       # of a model that is in training
    assert clip.step().greatest == -np.inf


def test_what_a_mask_hides_does_not_count():
    layer, inputs = made("of a memory")
    clip, scores = QKClip(layer, 1e9), scores_of(layer, *inputs)
    there = np.arange(9) != scores.max(axis=(0, 1, 2)).argmax()        # all but the most looked at
    layer(*inputs, mask=there)
    np.testing.assert_allclose(clip.step()[""], scores[..., there].max(axis=(0, 2, 3)), rtol=1e-12)


def test_a_backward_through_clipped_weights_says_so():
    layer, inputs = made("whole")
    clip = QKClip(layer, 0.1)
    y = layer(mt.tensor(X, requires_grad=True))
    clip.step()
    with pytest.raises(RuntimeError, match=r"QKClip\.step"):
        y.sum().backward()


def on(device):
    """(scores of three steps, parameters) of a model that has moved since the QKClip was made."""
    mt.manual_seed(2)
    model = nn.GPT(7, 6, layers=2, heads=4, kv_heads=2, dim=8, positions="rotary")
    clip = QKClip(model, 0.001)
    optimizer, found = optim.SGD(model.to(device).parameters(), 0.1), []
    for step in range(3):
        tokens = mt.tensor(np.random.default_rng(step).integers(0, 7, (3, 6)), device=device)
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()
        found.append(clip.step())
    return found, model.state_dict()


def test_on_a_gpu_the_numbers_of_the_host():
    with installed():
        (scores, state), (wanted, expected) = on("cuda"), on("cpu")
    assert all(each.clipped for each in wanted)
    for found, other in zip(scores, wanted, strict=True):
        for path, values in found.items():
            np.testing.assert_allclose(values, other[path], rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6)


def test_compiled_forwards_note_the_same():
    """In one graph, of a model that has run before scores were wanted, too."""
    found = {}
    for compiled in (False, True):
        mt.manual_seed(1)
        gpt = nn.GPT(7, 6, layers=2, heads=2, dim=8, dtype=np.float64)
        for block in gpt.blocks:
            block.attention.qkv.weight.data *= 40
        model = mt.compile(gpt) if compiled else gpt
        nn.cross_entropy(model(np.ones((3, 6), int)), np.ones((3, 6), int)).backward()
        optimizer, clip, found[compiled] = optim.SGD(model.parameters(), 0.3), QKClip(model, 0.5), []
        for step in range(4):
            tokens = np.random.default_rng(step).integers(0, 7, (3, 6))
            optimizer.zero_grad()
            nn.cross_entropy(model(tokens), np.roll(tokens, 1, 1)).backward()
            optimizer.step()
            found[compiled].append(clip.step())
        if compiled:
            assert not model.breaks, model.breaks
    assert any(scores.clipped for scores in found[False])
    for one, other in zip(*found.values(), strict=True):
        for path, scores in one.items():
            np.testing.assert_allclose(other[path], scores, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_16_bits(dtype):
    """Scores come to the threshold within the rounding of queries and keys, and the optimizer's master copies
    follow."""
    mt.manual_seed(7)
    layer = nn.MultiHeadAttention(12, 3, dtype=dtype, std=1.0)
    optimizer, clip = optim.AdamW(layer.parameters(), 1e-4), QKClip(layer, 2.0)
    assert layer.greatest.dtype == np.float32
    for _ in range(3):
        optimizer.zero_grad()
        layer(X.astype(layer.qkv.weight.dtype)).sum().backward()
        optimizer.step()
        scores = clip.step()
    assert scores.greatest < 2.0 * 1.03
    optimizer.zero_grad()
    layer(X.astype(layer.qkv.weight.dtype)).sum().backward()
    before = layer.qkv.weight.numpy().astype("f4")
    optimizer.step()
    assert abs(layer.qkv.weight.numpy().astype("f4") - before).max() < 0.05


def gpt(**options):
    return nn.GPT(7, 6, layers=1, heads=2, dim=8, **options)


def shared():
    model = nn.Sequential(nn.MultiHeadAttention(8, 2), nn.MultiHeadAttention(8, 2))
    model[1].qkv.weight = model[0].qkv.weight
    return model


@pytest.mark.parametrize("make, message", [
    (lambda: QKClip(nn.mlp((3, 4))), "has no MultiHeadAttention that makes scores"),
    (lambda: QKClip([]), "a list of no chunks"),
    (lambda: QKClip(gpt(window="linear")), "has no MultiHeadAttention that makes scores"),
    (lambda: QKClip(gpt(qk_norm=True)), "blocks.0.attention, of class MultiHeadAttention, has norms of queries"),
    (lambda: QKClip(lora.add(gpt(), 2)), "blocks.0.attention, of class MultiHeadAttention, has a LoRALinear as its"),
    (lambda: QKClip(shared()), "shares 1.qkv.weight with another layer"),
    *((functools.partial(QKClip, gpt(), value), "threshold=.*a number above 0") for value in (0, -1, np.inf, np.nan))])
def test_what_cannot_be_clipped(make, message):
    with pytest.raises(ValueError, match=f"QKClip: .*{message}" if "threshold" not in message else message):
        make()


def test_the_table():
    """As it prints, a star at what was clipped."""
    layer, inputs = made("whole")
    clip = QKClip(nn.Sequential(layer), 1e9)
    layer(*inputs)
    scores = clip.step()
    scores.clipped.append(("0", int(scores["0"].argmax())))
    lines = str(scores).splitlines()
    assert lines[0].startswith("attention  greatest scores, by head; * clipped to ") and lines[1].startswith("0 ")
    assert lines[1].count("*") == 1 and all(f"{score:.2f}" in lines[1] for score in scores["0"])
