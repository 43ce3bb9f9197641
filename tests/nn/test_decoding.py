"""Generation with kept keys and values, against forwards of all tokens anew."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, compress, nn
from minitorch_dist.autodiff import ops
from minitorch_dist.autodiff.ops.attention import ALL, banded_attention
from minitorch_dist.compress import lora
from minitorch_dist.compress.low_precision import convert_to_low_precision_training
from minitorch_dist.nn import kept as kept_by_kind
from minitorch_dist.nn.decoding import KeyValueCache, likeliest, uncacheable
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel.tensor import tensor_parallel as tp

random = np.random.default_rng
ROOMY = {"experts": 4, "k": 2, "capacity_factor": 2, "group": "sequence", "shared": 1}
KINDS = {
    "gpt": {}, "grouped": {"kv_heads": 2}, "llama": dict(FAMILIES["llama"], tied=False, kv_heads=1),
    "mixture": {"moe": ROOMY}, "mixture without a capacity": {"moe": dict(ROOMY, capacity_factor=None, group=None)},
    "windows": {"window": (2, None)}, "states": {"window": ("linear", None, "delta")},
    "sinks": {"window": (3, None), "kv_heads": 2, "sinks": True},
    "gates": {**FAMILIES["llama"], "kv_heads": 2, "gated": True},
    "qwen": {**FAMILIES["llama"], "kv_heads": 2, "window": 3, "qk_norm": True},
    "sigmoid mixture": {"moe": dict(ROOMY, score="sigmoid", expert_bias=True, mlp="swiglu")},
}


def gpt(seed=1, **options):
    """Of length 9, with weights so large that what it writes depends on all it has read."""
    mt.manual_seed(seed)
    model = nn.GPT(11, 9, layers=2, heads=4, dim=16, **{"dtype": np.float64, "dropout": 0.3} | options)
    for p in model.parameters():
        p.data *= 4
    return model


def anew(model, tokens):
    """The logits of all tokens at once, in evaluation."""
    model.eval()
    with mt.no_grad():
        logits = model(tokens)
    return (logits[0] if isinstance(logits, tuple) else logits).numpy()


def tokens_of(batch, time, seed=0):
    return random(seed).integers(0, 11, (batch, time))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_all_tokens_at_once(kind):
    model, tokens = gpt(**KINDS[kind]), tokens_of(3, 9)
    wanted = anew(model, tokens)
    for cuts in ([1] * 9, [4, 1, 3, 1], [9]):
        cache = KeyValueCache(model)
        pieces = np.split(tokens, np.cumsum(cuts)[:-1], axis=1)
        found = np.concatenate([cache.read(piece).numpy() for piece in pieces], 1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
        heads = model.blocks[0].attention.kv_heads
        keys = [block.attention for block in model.blocks if block.attention.keeps == "keys"]
        windows, states = [m.window for m in keys], len(model.blocks) - len(keys)
        room = sum(9 if window is None else min(9, max(2 * window, max(cuts) + window - 1)) for window in windows)
        most = (2 * 3 * heads * room * 4 + states * 3 * heads * 4 * 4) * 8
        assert cache.past == 9 and cache.nbytes <= most
        assert cache.nbytes == most or any(windows)
    assert model.context is None and "context" not in vars(model.blocks[0].attention)


def exchanged(model, how):
    """The model with other layers, or compiled."""
    if how == "lora":
        lora.add(model, rank=2, alpha=8)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.data[...] = random(5).standard_normal(p.shape)
    elif how == "qlora":
        lora.add(model, rank=2, quantize="nf4")
    elif how == "weight-only":
        model = compress.quantize_model(model, "weight-only")
    elif how == "compiled":
        model = mt.compile(model)
    return model


@pytest.mark.parametrize("kind, how", [*((kind, None) for kind in KINDS), ("llama", "lora"), ("gpt", "qlora"),
                                       ("grouped", "weight-only"), ("gpt", "compiled")])
def test_it_writes_the_same_text(kind, how):
    model, tokens = exchanged(gpt(**KINDS[kind]), how), tokens_of(5, 3)
    for temperature in (0, 1.0, 0.3):       # 3 + 11 > 9: the window slides for the last five
        kept, all_anew = (model.generate(tokens, 11, temperature, backend.stream("t"), cache=cache)
                          for cache in (True, False))
        np.testing.assert_array_equal(kept, all_anew)
        assert len(np.unique(kept[:, 3:])) > 2
        np.testing.assert_array_equal(kept, model.generate(tokens, 11, temperature, backend.stream("t")))


def counted(monkeypatch, act):
    """How many elements the queries of each attention have had."""
    sizes = []

    def noting(plain):
        return lambda q, *rest, **options: (sizes.append(q.shape[2]), plain(q, *rest, **options))[1]
    for module, name in ((ops, "scaled_dot_product_attention"), (kept_by_kind, "banded_attention")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    act()
    monkeypatch.undo()
    return sizes[::2]       # of two layers


def test_a_token_costs_one_position(monkeypatch):
    model, tokens = gpt(), tokens_of(2, 3)
    assert counted(monkeypatch, lambda: model.generate(tokens, 5, 0)) == [3, 1, 1, 1, 1]
    assert counted(monkeypatch, lambda: model.generate(tokens, 5, 0, cache=False)) == [3, 4, 5, 6, 7]
    assert counted(monkeypatch, lambda: model.generate(tokens, 9, 0)) == [3, 1, 1, 1, 1, 1, 1, 9, 9]    # it slides
    assert counted(monkeypatch, lambda: model.generate(tokens_of(2, 12), 2, 0)) == [9, 9]


def test_what_is_kept_is_not_moved_for_each_token():
    cache = KeyValueCache(gpt())
    cache.read(tokens_of(2, 3))
    layers = [kept for _, kept in cache.layers.values()]
    places = [(kept.keys, kept.values) for kept in layers]
    cache.read(tokens_of(2, 6))
    assert all(kept.keys is keys and kept.values is values
               for kept, (keys, values) in zip(layers, places, strict=True))


@pytest.mark.parametrize("window", [1, 5])
def test_what_a_window_does_not_reach_is_forgotten(window):
    """However much is read at a time; of a long read all is kept until the next one."""
    mt.manual_seed(2)
    model, tokens = nn.GPT(11, 200, layers=1, heads=2, dim=8, dtype=np.float64, window=window), tokens_of(2, 200)
    wanted, cache, rooms = anew(model, tokens), KeyValueCache(model), []
    for cut in (90, 1, 1, 1, 3, 7, *[1] * 40, 12, 20, *[2] * 12):
        found = cache.read(tokens[:, cache.past:cache.past + cut]).numpy()
        np.testing.assert_allclose(found, wanted[:, cache.past - cut:cache.past], rtol=0, atol=1e-10)
        rooms.append(cache.nbytes // (2 * 2 * 8 * 8))
    assert cache.past == 199 and rooms[0] == 90 and max(rooms[1:]) <= 20 + window - 1 and rooms[3] == 2 * window


def test_a_token_looks_at_its_window_alone(monkeypatch):
    """Not at all that is kept, which may be twice as much."""
    model, seen = gpt(window=3), []
    monkeypatch.setattr(kept_by_kind, "banded_attention", lambda q, k, v, band, *rest: (
        seen.append((k.shape[2], band)), banded_attention(q, k, v, band, *rest))[1])
    model.generate(tokens_of(2, 4), 5, 0)
    assert seen == [(4, (2, 0))] * 2 + [(3, ALL)] * 8


def test_a_cache_of_windows_takes_back_what_the_last_read_brought():
    model, tokens = gpt(window=2), tokens_of(1, 9)
    wanted, cache = anew(model, tokens), KeyValueCache(model)
    for _ in range(6):
        cache.read(tokens[:, cache.past:cache.past + 1])
    cache.read(tokens[:, 6:9] * 0 + 5)
    cache.past -= 3
    found = cache.read(tokens[:, 6:9]).numpy()
    np.testing.assert_allclose(found, wanted[:, 6:9], rtol=0, atol=1e-10)
    cache.past = 1
    with pytest.raises(ValueError, match="window of 2 positions has forgotten those before [1-9]+, and was taken back"):
        cache.read(tokens[:, 1:2])


@pytest.mark.parametrize("cuts", [[1, 8], [2, 6, 1], [1, 1, 7], [0, 3, 0, 6], [1, 0, 8]])
@pytest.mark.parametrize("window", [1, 2, 3, 8, 10 ** 30, (None, 2), (2, "linear"), ("delta", 2)])
def test_a_window_may_be_read_in_any_pieces(window, cuts):
    """Of a first that is shorter than the window, and of no tokens at all."""
    model, tokens = gpt(window=window), tokens_of(2, 9)
    wanted, cache = anew(model, tokens), KeyValueCache(model)
    found = [cache.read(piece).numpy() for piece in np.split(tokens, np.cumsum(cuts)[:-1], axis=1)]
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_norms_of_keys_keep_no_more_under_autocast(positions):
    sizes = []
    for qk_norm in (False, True):
        cache = KeyValueCache(gpt(dtype=np.float32, positions=positions, qk_norm=qk_norm))
        with mt.autocast("bfloat16"):
            cache.read(tokens_of(2, 5))
        sizes.append(cache.nbytes)
    assert sizes == [2 * 2 * 2 * 16 * 9 * 2] * 2


@pytest.mark.parametrize("kind", [
    {"window": 2}, {"window": ("linear", 2)}, {"window": "delta"}, {"positions": "rotary", "latent": {}},
    {"positions": nn.Rotary(100, 3, 3)}, {"positions": nn.Rotary(100, 3, 3), "latent": {}}])
def test_a_cache_may_begin_anew_with_other_rows(kind):
    model = gpt(**kind)
    cache = KeyValueCache(model)
    for tokens in (tokens_of(2, 5), tokens_of(3, 4, seed=1)):
        wanted, cache.past = anew(model, tokens), 0
        found = [cache.read(piece).numpy() for piece in np.split(tokens, [2, 3], axis=1)]
        np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_colder_the_likelier(dtype):
    """Also where logits / temperature is beyond the model's dtype."""
    model, tokens = gpt(dtype=np.float32).to(dtype), tokens_of(5, 3)
    likeliest = model.generate(tokens, 9, 0)
    for temperature in (1e-5, 1e-39, 1e-200):
        np.testing.assert_array_equal(model.generate(tokens, 9, temperature, backend.stream("t")), likeliest)


@pytest.mark.parametrize("temperature", [-1, np.nan, 1e-201])
def test_no_such_temperature(temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature}: 0, which takes .* or 1e-200 or more"):
        gpt().generate(tokens_of(2, 3), 2, temperature)


def stay(row, top_k, top_p):
    """Which of one row's logits may be drawn, one after the other."""
    order, kept, p = sorted(range(len(row)), key=lambda i: -row[i]), [], np.exp(row - row.max())
    for i in order[:top_k]:
        kept.append(i)
        if top_p is not None and p[kept].sum() >= top_p * p[order[:top_k]].sum():
            break
    return sorted(kept)


@pytest.mark.parametrize("top_k", [None, 1, 3, 12, 40])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 1.0])
def test_what_may_be_drawn(top_k, top_p):
    logits = np.random.default_rng(3).standard_normal((50, 12)) * 2
    found = likeliest(logits, top_k, top_p)
    for row, left in zip(logits, found, strict=True):
        assert np.flatnonzero(left > -np.inf).tolist() == stay(row, top_k, top_p)
    np.testing.assert_array_equal(np.where(found > -np.inf, logits, -np.inf), found)


def test_ties_with_the_last_that_may_be_drawn():
    logits = np.log([[0.4, 0.2, 0.2, 0.1, 0.1]])
    for settings, count in (((2, None), 3), ((None, 0.5), 3), ((None, 0.61), 3), ((None, 0.85), 5), ((3, 0.4), 1)):
        assert (likeliest(logits, *settings) > -np.inf).sum() == count


@pytest.mark.parametrize("cache", [True, False])
def test_drawn_from_the_likeliest(cache):
    model, tokens = gpt(), np.repeat(tokens_of(1, 3), 4000, 0)
    logits = anew(model, tokens[:1])[0, -1]
    np.testing.assert_array_equal(model.generate(tokens[:5], 0), tokens[:5])
    np.testing.assert_array_equal(model.generate(tokens[:5], 4, top_k=1, top_p=1), model.generate(tokens[:5], 4, 0))
    for top_k, top_p, temperature in ((3, None, 1.0), (None, 0.5, 0.7), (6, 0.8, 2.0)):
        drawn = model.generate(tokens, 1, temperature, backend.stream("t"), None, cache, top_k, top_p)[:, -1]
        kept = stay(logits / temperature, top_k, top_p)
        p = np.exp(logits[kept] / temperature)
        counts = np.bincount(drawn, minlength=len(logits))
        assert counts[kept].sum() == 4000
        expected = 4000 * p / p.sum()
        assert (np.abs(counts[kept] - expected) < 5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": np.nan}])
def test_no_such_part_of_the_likeliest(settings):
    (name, value), = settings.items()
    with pytest.raises(ValueError, match=f"generate: .*{name}={value}.*1 or more.*above 0, up to 1"):
        gpt().generate(tokens_of(2, 3), 2, **settings)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("tokens, count, words", [
    (np.zeros((2, 0), int), 3, r"tokens \(2, 0\), count=3: give \(batch, 1 or more\)"), ([[]], 0, r"tokens \(1, 0\)"),
    (np.zeros(3, int), 3, r"tokens \(3,\)"), (np.zeros((2, 3), int), -1, "count=-1: .*0 or more")], ids=str)
def test_nothing_to_begin_with(tokens, count, words, cache):
    with pytest.raises(ValueError, match="generate: .*" + words):
        gpt().generate(tokens, count, cache=cache)
    with pytest.raises(TypeError, match=r"count=1\.5: must be a whole number"):
        gpt().generate(tokens_of(2, 3), 1.5, cache=cache)


def test_tokens_may_be_a_tensor_or_lists():
    model, tokens = gpt().eval(), tokens_of(2, 3)
    for read in (model, KeyValueCache(model).read):
        np.testing.assert_array_equal(read(tokens.tolist()).numpy(), anew(model, tokens))
    np.testing.assert_array_equal(model.generate(mt.tensor(tokens), 3, 0), model.generate(tokens, 3, 0))
    documents = np.array([[0, 0, 1], [0, 1, 1]])
    np.testing.assert_array_equal(model(tokens.tolist(), documents.tolist()).numpy(), model(tokens, documents).numpy())


@pytest.mark.parametrize("dtype", ["u1", "i2", "u8"])
def test_what_is_written_is_int64(dtype):
    model, tokens = nn.GPT(7, 6, layers=1, heads=2, dim=8), np.array([[1, 2]])
    for count in (0, 3):
        found = model.generate(tokens.astype(dtype), count, 0)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, model.generate(tokens, count, 0))


@pytest.mark.parametrize("end", [1.5, "x"])
def test_an_end_that_is_no_token(end):
    with pytest.raises(TypeError, match=f"end={end!r}: must be a whole number"):
        nn.GPT(7, 6, layers=1, heads=2, dim=8).generate([[1, 2]], 3, 0, end=end)


def test_a_cache_is_of_one_document_per_row():
    """Or a token would look at those of others."""
    model, tokens, documents = gpt(), tokens_of(2, 4), np.array([[0, 0, 1, 1]] * 2)
    for act in (lambda: model(tokens, documents), lambda: model.blocks(np.zeros((2, 4, 16)), documents)):
        with pytest.raises(ValueError, match="of one document per row; it was given documents"), \
                KeyValueCache(model).reading(tokens):
            act()


def test_rows_end():
    model, tokens = gpt(), tokens_of(6, 2)
    whole = model.generate(tokens, 12, 1.0, backend.stream("e"))
    end = int(np.bincount(whole[:, 2:].ravel()).argmax())
    assert not (tokens == end).all(1).any()
    found = model.generate(tokens, 12, 1.0, backend.stream("e"), end=end)
    firsts = [next((t for t in range(2, 14) if row[t] == end), 13) for row in whole]
    assert len(set(firsts)) > 1 and found.shape[1] == max(firsts) + 1
    for row, text, first in zip(found, whole, firsts, strict=True):
        np.testing.assert_array_equal(row[:first + 1], text[:first + 1])
        assert (row[first + 1:] == end).all()
    np.testing.assert_array_equal(found, model.generate(tokens, 12, 1.0, backend.stream("e"), end=end, cache=False))


class Shift(nn.Module):
    """Looks at the position before."""

    def forward(self, x):
        return ops.concatenate([x[:, :1], x[:, :-1]], 1)


def shifted(model):
    model.blocks[1].norm2 = Shift()
    return model


def inherited(model):
    model.norm.__class__ = type("Other", (nn.LayerNorm,), {"forward": Shift.forward})
    return model


def patched(model):
    model.blocks[0].mlp.forward = lambda x: Shift.forward(None, x)
    return model


def hooked(model):
    model.blocks[0].register_forward_hook(lambda m, inputs, output: output - output.mean(1, keepdims=True))
    return model


def looking_ahead(model):
    model.blocks[0].attention.causal = False
    return model


def compiled_norm(model):
    model.norm = mt.compile(model.norm)
    return model


def parts_of_few_bits(model):
    tp.parallelize_module(model, mt.comm.world(), tp.plan_of(model))
    return convert_to_low_precision_training(model, "tensorwise")


UNCACHEABLE = {
    "a mixture that drops": (lambda: gpt(moe=dict(ROOMY, capacity_factor=1.25)), "mlp.*drops tokens.*experts/k = 2"),
    "groups of tokens": (lambda: gpt(moe=dict(ROOMY, group=2)), "routes 2 tokens together"),
    "somebody's module": (lambda: shifted(gpt()), "blocks.1.norm2, of class Shift, is not known"),
    "somebody's forward": (lambda: inherited(gpt()), "norm, of class Other, is not known"),
    "an exchanged forward": (lambda: patched(gpt()), "blocks.0.mlp, of class FeedForward, is not known"),
    "a hook": (lambda: hooked(gpt()), "blocks.0, of class TransformerBlock, has a hook"),
    "looking ahead": (lambda: looking_ahead(gpt()), "blocks.0.attention.*looks at later positions"),
    "one scale for all": (lambda: convert_to_low_precision_training(gpt(dtype=np.float32), "tensorwise"),
                          "LowPrecisionLinear, is not known"),
    "one scale for all, of parts": (lambda: parts_of_few_bits(gpt(dtype=np.float32)),
                                    "makes its products by .*which is not known"),
    "one range for all": (lambda: compress.quantize_model(gpt(), "dynamic"), "Dynamic, is not known"),
    "a compiled layer": (lambda: compiled_norm(gpt()), "CompiledModule, is not known"),
}


@pytest.mark.parametrize("kind", UNCACHEABLE)
def test_what_cannot_be_read_token_by_token(kind):
    make, words = UNCACHEABLE[kind]
    model, tokens = make(), tokens_of(2, 5)
    assert uncacheable(gpt()) is None
    with pytest.raises(ValueError, match=f"KeyValueCache: .*{words}"):
        model.generate(tokens, 5, 0, cache=True)
    np.testing.assert_array_equal(model.generate(tokens, 5, 0), model.generate(tokens, 5, 0, cache=False))


def test_checkpoints_of_blocks_are_read_token_by_token():
    """They do what the blocks do; of another forward a checkpoint is another forward, too."""
    model, tokens = gpt(), tokens_of(2, 5)
    wanted = model.generate(tokens, 4, 0, cache=False)
    for block in model.blocks:
        block.forward = mt.checkpoint(block.forward)
    np.testing.assert_array_equal(model.generate(tokens, 4, 0, cache=True), wanted)
    model.norm.forward = mt.checkpoint(lambda x: x)
    with pytest.raises(ValueError, match="norm, of class .* is not known"):
        KeyValueCache(model)


def test_more_than_its_length():
    cache = KeyValueCache(model := gpt().eval())
    cache.read(tokens_of(2, 8))
    with pytest.raises(ValueError, match="length 9 was given 10"):
        cache.read(tokens_of(2, 2))
    assert model.context is None        # and is what it was
    anew(model, tokens_of(2, 9))


def test_a_cache_with_little_room_and_other_rows():
    with pytest.raises(ValueError, match="KeyValueCache: length=0 must be 1 or more"):
        KeyValueCache(gpt(), 0)
    cache = KeyValueCache(gpt().eval(), 4)
    cache.read(tokens_of(2, 3))
    for tokens in (np.zeros(3, int), [1, 2, 3]):
        with pytest.raises(ValueError, match=r"tokens \(3,\) must be \(batch, time\)"):
            cache.read(tokens)
    with pytest.raises(ValueError, match="KeyValueCache of length 4 was given 5 tokens"):
        cache.read(tokens_of(2, 2))
    with pytest.raises(ValueError, match="1 rows of tokens, where 2 have been read"):   # would be broadcast
        cache.read(tokens_of(1, 1))
    assert cache.read(tokens_of(2, 1)).shape[:2] == (2, 1)
