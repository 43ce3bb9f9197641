"""Attention to chosen blocks beside plain NumPy, one position after the other; what it costs, and keeps."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.autodiff.ops import chosen_blocks
from minitorch_dist.autodiff.ops.chosen_blocks import greatest_block_scores
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.multi_token import speculate
from minitorch_dist.nn.windows import as_text, read_windows
from minitorch_dist.qk_clip import QKClip

from .test_transformer import linear, norm, values

random = np.random.default_rng
SHAPES = [      # batch, heads, kv_heads, time, sources, features, out, size, count
    (2, 4, 2, 11, 17, 5, 3, 3, 3), (1, 2, 2, 9, 9, 4, 4, 2, 2), (3, 2, 1, 5, 20, 3, 2, 4, 1),
    (2, 3, 1, 1, 13, 2, 5, 4, 2), (1, 1, 1, 8, 8, 3, 3, 1, 3), (2, 2, 2, 12, 12, 3, 2, 4, 2),
    (0, 2, 1, 6, 9, 2, 2, 2, 2), (1, 2, 1, 0, 9, 2, 2, 2, 2)]


def positions(q, k, size, count, own):
    """The sources that a query (features,) at position `own` of keys (sources, features) looks at."""
    here = own // size
    means = [k[block * size:block * size + size].mean(0) @ q for block in range(here)]
    best = sorted(range(here), key=lambda block: -means[block])[:count - 1]
    return [s for block in best for s in range(block * size, block * size + size)] + list(range(here * size, own + 1))


def attend(q, k, v, size, count, scale):
    """Position after position."""
    (batch, heads, time, _), sources = q.shape, k.shape[2]
    y = np.empty((batch, heads, time, v.shape[3]))
    for b, h, t in np.ndindex(batch, heads, time):
        keys, rows = k[b, h // (heads // k.shape[1])], v[b, h // (heads // k.shape[1])]
        seen = positions(q[b, h, t], keys, size, count, sources - time + t)
        scores = keys[seen] @ q[b, h, t] * scale
        weights = np.exp(scores - scores.max())
        y[b, h, t] = weights @ rows[seen] / weights.sum()
    return y


def given(batch, heads, kv_heads, time, sources, features, out, dtype=np.float64):
    rng = random(3)
    return [rng.standard_normal(shape).astype(dtype) for shape in (
        (batch, heads, time, features), (batch, kv_heads, sources, features), (batch, kv_heads, sources, out))]


@pytest.fixture(params=[2 ** 20, 80, 1], ids="{} weights at a time".format)
def at_a_time(request, monkeypatch):
    monkeypatch.setattr(chosen_blocks, "AT_A_TIME", request.param)


@pytest.mark.usefixtures("at_a_time")
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: "-".join(map(str, case)))
def test_the_op(case):
    *shape, size, count = case
    q, k, v = given(*shape)
    y = mt.block_attention(q, k, v, size, count)
    np.testing.assert_allclose(y, attend(q, k, v, size, count, shape[5] ** -0.5), rtol=0, atol=1e-13)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float16, 2e-3)):
        # Of these the choice is made anew: their mean keys are others.
        small = [x.astype(dtype) for x in (q, k, v)]
        found = mt.block_attention(*small, size, count, scale=0.5)
        assert found.dtype == dtype
        wanted = attend(*(x.astype(np.float32 if dtype == np.float16 else dtype) for x in small), size, count, 0.5)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def test_where_there_are_no_more_blocks_it_is_causal_attention():
    q, k, v = given(2, 4, 2, 7, 10, 3, 2)
    for size, count in ((4, 3), (10, 1), (99, 2)):
        wanted = mt.scaled_dot_product_attention(q, k, v, np.tri(7, 10, 3, bool))
        np.testing.assert_allclose(mt.block_attention(q, k, v, size, count), wanted, rtol=0, atol=1e-14)


def test_scores_may_be_large():
    """Of which exp() is inf, or 0."""
    q, k, v = given(2, 4, 2, 11, 17, 5, 3)
    for scale in (400.0, -400.0):
        np.testing.assert_allclose(mt.block_attention(q, k, v, 3, 3, scale), attend(q, k, v, 3, 3, scale), atol=1e-12)


@pytest.mark.usefixtures("at_a_time")
@pytest.mark.parametrize("case", SHAPES[:6], ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_attention_with_a_mask(case):
    """Of the same scores, given as a mask; and each input's alone."""
    *shape, size, count = case
    (batch, heads, _, time, sources, *_), (q, k, v) = shape, given(*shape)
    mask = np.zeros((batch, heads, time, sources), bool)
    for b, h, t in np.ndindex(batch, heads, time):
        keys = k[b, h // (heads // k.shape[1])]
        mask[b, h, t, positions(q[b, h, t], keys, size, count, sources - time + t)] = True
    ct, found = random(5).standard_normal((batch, heads, time, v.shape[3])), []
    for attention in (lambda q, k, v: mt.block_attention(q, k, v, size, count),
                      lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, mask)):
        inputs = [mt.tensor(x, requires_grad=True) for x in (q, k, v)]
        attention(*inputs).backward(mt.tensor(ct))
        found.append([x.grad.numpy() for x in inputs])
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)
    for i in range(3):
        inputs = [mt.tensor(x, requires_grad=i == j) for j, x in enumerate((q, k, v))]
        mt.block_attention(*inputs, size, count).backward(mt.tensor(ct))
        np.testing.assert_array_equal(inputs[i].grad.numpy(), found[0][i])
    scores = greatest_block_scores(q, k, size, count, 0.3)
    all_scores = np.einsum("bhtf,bhsf->bhts", q, k.repeat(heads // k.shape[1], 1)) * 0.3
    np.testing.assert_allclose(scores, np.where(mask, all_scores, -np.inf).max((0, 2, 3)), rtol=1e-14)
    scores = greatest_block_scores(q, k, size, sources, 0.3)
    before = np.tri(time, sources, sources - time, bool)
    np.testing.assert_allclose(scores, np.where(before, all_scores, -np.inf).max((0, 2, 3)), rtol=1e-14)


def test_equal_blocks_are_chosen_in_their_order():
    """And a query of zeros agrees with all equally."""
    q, k = np.zeros((1, 1, 9, 1)), np.ones((1, 1, 9, 1))
    found = mt.block_attention(q, k, np.eye(9)[None, None], 2, 3)[0, 0]
    np.testing.assert_array_equal(found[8] > 0, [1, 1, 1, 1, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(found[5] > 0, [1, 1, 1, 1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("error, message, arguments", [
    (ValueError, r"as many sources as queries or more", [(1, 2, 5, 3), (1, 1, 4, 3), (1, 1, 4, 3), 2, 2]),
    (ValueError, r"kv_heads a divisor of heads", [(1, 3, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3), 2, 2]),
    (ValueError, r"size=0, count=2 must be 1 or more", [(1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3), 0, 2]),
    (ValueError, r"size=2, count=0 must be 1 or more", [(1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3), 2, 0]),
    (TypeError, r"size", [(1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3), 2.5, 2])])
def test_what_does_not_fit(error, message, arguments):
    *shapes, size, count = arguments
    with pytest.raises(error, match=message):
        mt.block_attention(*map(np.ones, shapes), size, count)


# ---------------------------------------------------------------- the layer

@pytest.mark.parametrize(("qk_norm", "gated"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_the_layer(kv_heads, qk_norm, gated):
    mt.manual_seed(1)
    layer = nn.BlockAttention(15, 3, 2, 4, kv_heads, dtype=np.float64, std=0.6, qk_norm=qk_norm, gated=gated)
    x, w = random(0).standard_normal((2, 14, 15)), values(layer)
    found = []
    for sample in x:
        h = linear(sample, w, "qkv").reshape(14, -1, 5).transpose(1, 0, 2)[None]
        q, k, v, gates = np.split(h, np.cumsum([3, kv_heads, kv_heads]), 1)
        if qk_norm:
            q, k = norm(q, w["q_norm.weight"]), norm(k, w["k_norm.weight"])
        y = attend(q, k, v, 4, 2, 5 ** -0.5) / (1 + np.exp(-gates) if gated else 1)
        found.append(linear(y[0].transpose(1, 0, 2).reshape(14, 15), w, "out"))
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), found, rtol=1e-10, atol=1e-11)
    weights = layer.weights(x)
    assert weights.shape == (2, 3, 14, 14) and ((weights > 0).sum(3) == [min(t + 1, 4 + t % 4 + 1) for t in range(14)]
                                                ).all()
    np.testing.assert_allclose(weights.sum(3), 1, rtol=1e-12)
    assert layer(mt.tensor(x[:0])).shape == (0, 14, 15) and layer(mt.tensor(x[:, :0])).shape == (2, 0, 15)
    assert layer.extra_repr() == (f"15, heads=3{', kv_heads=1' * (kv_heads == 1)}, causal{', gated' * gated}, "
                                  "2 blocks of 4")


def gpt(window="3x4", dtype=np.float64, vocabulary=11, **options):
    """Of length 40, with weights so large that all matters."""
    mt.manual_seed(3)
    model = nn.GPT(vocabulary, 40, 2, 3, 12, dtype=dtype, window=window, **options)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = random(60 + i).standard_normal(p.shape) * 0.5
    return model


def test_a_gpt_has_such_blocks_where_it_is_told_to():
    model = nn.GPT(11, 8, 5, 2, 8, positions="rotary", window=("3x4", "3x4", None))
    assert [type(block.attention) for block in model.blocks] == [nn.BlockAttention] * 2 + [nn.MultiHeadAttention] + \
        [nn.BlockAttention] * 2
    assert model.blocks[0].attention.extra_repr() == "8, heads=2, causal, 3 blocks of 4"
    assert model.new_block(1).attention.rotary is not None
    # Trained with the one, it may go on with the other.
    nn.GPT(11, 8, 5, 2, 8, positions="rotary").load_state_dict(model.state_dict())


def test_a_position_sees_those_before_it_alone():
    model, tokens = gpt().eval(), random(0).integers(0, 11, (1, 40))
    whole, other = model(tokens).numpy(), tokens.copy()
    other[:, 23] = (other[:, 23] + 1) % 11
    changed = abs(model(other).numpy() - whole).max(2)[0]
    assert (changed[:23] == 0).all() and (changed[23:28] > 1e-9).all()


@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (3, 3)])
def test_work_is_in_proportion_to_the_length(heads, kv_heads):
    """count · size scores per position and head, and one more per block; where they are all there are, all scores."""
    model = nn.GPT(11, 480, 1, heads, 24, kv_heads=kv_heads, window="3x16")
    for time in (40, 240, 480):
        pairs = time * (48 if time > 48 else time)
        wanted = 2 * 24 * (2 * pairs + (time * (time // 16) if time > 48 else 0))
        found = {row.path: row.flops for row in nn.summary(model, np.zeros((1, time), int)).rows}
        assert found["blocks.0.attention"] == wanted


def test_what_backward_keeps():
    """Beside q, k and v, which are the caller's: count · size weights of each query and head, where its pairs stand
    among all, twice, and where each block's end."""
    inputs = [mt.tensor(x, requires_grad=True) for x in given(2, 4, 2, 60, 60, 5, 3, np.float32)]
    with ledger.record(memory=True) as book:
        y = mt.block_attention(*inputs, 8, 3)
        assert book.live["activation"] == 2 * 4 * 60 * 3 * (8 * 4 + 2 * 8) + 2 * 2 * 8 * 8
    assert y.shape == (2, 4, 60, 3)


def test_a_cache_keeps_keys_and_their_means():
    model = gpt().eval()
    tokens = random(0).integers(0, 11, (3, 40))
    wanted, cache = model(tokens).numpy(), KeyValueCache(model)
    for past, stop in ((0, 1), (1, 3), (3, 23), (23, 24), (14, 26), (26, 26), (21, 40), (0, 9), (9, 40)):
        cache.past = past       # which may be back
        np.testing.assert_allclose(cache.read(tokens[:, past:stop]).numpy(), wanted[:, past:stop], rtol=0, atol=1e-10)
        assert cache.nbytes == 2 * 3 * 3 * (2 * 40 + 10) * 4 * 8
    cache.past = 0
    with pytest.raises(ValueError, match="of one document per row; it was given documents"), cache.reading(tokens):
        model(tokens, np.zeros((3, 40), int))


def test_a_cache_of_a_length_that_is_no_whole_blocks(monkeypatch):
    """Nor does what happened to lie in its memory matter."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **more: np.full(shape, 99, dtype) * np.array(
        np.nan if np.dtype(dtype).kind == "f" else 1, dtype))
    model = gpt("2x7").eval()
    tokens = random(0).integers(0, 11, (2, 23))
    cache, wanted = KeyValueCache(model, 23), model(tokens).numpy()
    for stop in (5, 22, 23):
        here = slice(cache.past, stop)
        np.testing.assert_allclose(cache.read(tokens[:, here]).numpy(), wanted[:, here], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_of_16_bits(dtype):
    low = gpt("2x4", vocabulary=5).eval()
    wanted, tokens = low, random(0).integers(0, 5, (2, 20))
    wanted = low.to(dtype)(tokens).numpy().astype(np.float32)
    cache, found = KeyValueCache(low), []
    for past in range(0, 20, 4):
        found.append(cache.read(tokens[:, past:past + 4]).numpy().astype(np.float32))
    # Where mean keys are nearly equal others may be chosen: most are the same.
    near = abs(np.concatenate(found, 1) - wanted) <= 0.1 * abs(wanted).max()
    assert near.mean() > 0.9


@pytest.mark.parametrize("window", ["2x4", ("3x3", 3), (None, "2x8"),
                                    ("delta", "1x4")])
def test_it_writes_the_same_with_a_cache(window):
    """Also beyond the length, where what is left of the beginning is read anew."""
    model, tokens = gpt(window).eval(), random(0).integers(0, 11, (2, 3))
    np.testing.assert_array_equal(model.generate(tokens, 45, 0, cache=True), model.generate(tokens, 45, 0, cache=False))


def test_guesses_are_taken_back():
    model = nn.MultiTokenPrediction(gpt("2x4", vocabulary=5), 2).eval()
    for seed in range(4):
        tokens = random(seed).integers(0, 5, (1, 3))
        np.testing.assert_array_equal(speculate(model, tokens, 30).tokens, model.model.generate(tokens, 30, 0))


def gradients(model, call, tokens, targets):
    nn.cross_entropy(call(tokens), targets).backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])


def test_compiled_checkpointed_and_in_16_bits():
    tokens, targets = random(0).integers(0, 11, (2, 21)), random(1).integers(0, 11, (2, 21))
    model = gpt()
    wanted = gradients(model, model, tokens, targets)
    other = gpt()
    compiled = mt.compile(other)
    np.testing.assert_allclose(gradients(other, compiled, tokens, targets), wanted, rtol=0, atol=1e-12)
    assert not compiled.breaks, compiled.breaks
    other = gpt()
    for block in other.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    np.testing.assert_array_equal(gradients(other, other, tokens, targets), wanted)
    low = gpt("1x8", np.float32)      # which leave no choice, that rounding could change
    other = gpt("1x8")
    wanted = gradients(other, other, tokens, targets)
    with mt.autocast("bfloat16"):
        found = gradients(low, low, tokens, targets)
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.1


def test_qk_clip_changes_no_choice():
    """Scores of a head become threshold / greatest of what they were, and so do those of its blocks."""
    model = gpt()
    clip, tokens = QKClip(model, 5.0), random(0).integers(0, 11, (2, 40))
    attention = model.blocks[0].attention
    x = model.norm(model.embed(tokens))         # any input of the first attention
    before, _ = attention.weights(x), model(tokens)
    scores = clip.step()
    assert scores.clipped and scores.greatest > 5
    after = attention.weights(x)
    np.testing.assert_array_equal(before > 0, after > 0)
    model(tokens)
    assert clip.step()["blocks.0.attention"].max() == pytest.approx(5)


def test_it_finds_what_a_window_of_as_many_positions_does_not():
    """A value that stands under a key far away: the copy of what came 32 positions before, of which a window of 16 sees
    nothing."""
    def train(window):
        mt.manual_seed(0)
        model = nn.GPT(8, 64, 2, 2, 32, positions="rotary", window=window)
        optimizer = optim.AdamW(model.parameters(), 3e-3)
        for step in range(150):
            half = random(step).integers(0, 8, (16, 32))
            tokens = np.concatenate([half, half], 1)
            optimizer.zero_grad()
            loss = nn.cross_entropy(model(tokens[:, :-1])[:, 32:], tokens[:, 33:])
            loss.backward()
            optimizer.step()
        return loss.item()
    assert train("4x4") < 0.7 * np.log(8)
    assert train(16) > 0.95 * np.log(8)


def test_as_text():
    windows = ("4x64", None, 16, "linear")
    assert as_text(windows) == "4x64,all,16,linear" and read_windows("4x64,all,16,linear") == windows
    for wrong in ("0x4", "4x0", "4x", "x4", "4x4x4", "-4x4", "4 x 4"):
        with pytest.raises(ValueError, match="numbers of positions, blocks like 4x64, linear, delta or all, separated"):
            read_windows(wrong)
        with pytest.raises(ValueError, match=f"window='{wrong}'; take a number of positions, linear, delta, or blocks"):
            gpt(wrong)
    with pytest.raises(ValueError, match="BlockAttention: count=0 must be 1 or more"):
        nn.BlockAttention(8, 2, 0, 4)
    with pytest.raises(TypeError, match="block_size"):
        nn.BlockAttention(8, 2, 2, 4.5)


@pytest.mark.parametrize("message, options", [
    ("window='3x4' with causal=True, attention_dropout=0.1, sinks=False: blocks are", {"attention_dropout": 0.1}),
    ("attention_dropout=0.0, sinks=True: blocks are chosen among those before", {"sinks": True}),
    ("multi-head latent attention has norms of its own, and no window", {"positions": "rotary", "latent": {}})])
def test_what_does_not_go_with_it(message, options):
    with pytest.raises(ValueError, match=message):
        gpt(**options)
    with pytest.raises(ValueError, match="window='3x4' with causal=False"):
        nn.TransformerBlock(12, 3, window="3x4")


def test_it_shows_what_is_wrong(monkeypatch):
    """Other choices are other results: of the nearest blocks, of the least alike, of the mean of all keys so far."""
    q, k, v = given(2, 4, 2, 30, 30, 3, 3)
    right = mt.block_attention(q, k, v, 4, 3)
    choices = chosen_blocks.choices
    wrong = {"the nearest": lambda q, means, *more: choices(np.ones_like(q), np.cumsum(np.ones_like(means), 2), *more),
             "the least alike": lambda q, means, *more: choices(-q, means, *more),
             "other heads'": lambda q, means, *more: choices(q[:, ::-1], means, *more)}
    for name, change in wrong.items():
        monkeypatch.setattr(chosen_blocks, "choices", change)
        assert abs(mt.block_attention(q, k, v, 4, 3) - right).max() > 0.1, name
