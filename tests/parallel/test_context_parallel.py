"""Context parallelism: attention of sequences in parts is attention, counted and timed; and one curve.

As in test_collectives.py only the ranks import what enters ops into the table.
"""

import numpy as np
import pytest

from tests.crews import crews

CASES, MODELS = "tests.parallel.context_cases:", "tests.parallel.context_model_cases:"
BATCH, SIZE = 3, 5


def call(target, n, args=()):
    """What crews.call gives, by the first n of one crew of four ranks: starting others would take longer than all that
    they do."""
    return crews.call(CASES + "among", 4, args=(n, target, args))[:n]


def values(shape, *key):
    """As the ranks make them."""
    return np.random.default_rng(list(key)).standard_normal(shape)


def by_hand(heads, kv_heads, time, causal, times=1.0, window=None):
    """[y, dq, dk, dv] of attention, in NumPy."""
    shapes = (heads, 5), (kv_heads, 5), (kv_heads, 7), (heads, 7)
    q, k, v, u = (values((3, h, time, s), 1, i) for i, (h, s) in enumerate(shapes))
    q = q * times
    group = heads // kv_heads
    k_all, v_all = k.repeat(group, 1), v.repeat(group, 1)
    scores = np.einsum("bhtd,bhsd->bhts", q, k_all) / 5 ** 0.5
    if causal:
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
    if window is not None:
        scores = np.where(abs(np.arange(time) - np.arange(time)[:, None]) < window, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bhto,bhso->bhts", u, v_all)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / 5 ** 0.5

    def summed(x):
        return x.reshape(3, kv_heads, group, time, -1).sum(2)
    return [p @ v_all, ds @ k_all, summed(ds.swapaxes(2, 3) @ q), summed(p.swapaxes(2, 3) @ u)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("how, layout, heads, kv_heads, ns", [
    ("ring", "zigzag", 6, 2, (1, 2, 3, 4)), ("ring", "contiguous", 3, 3, (2, 3)),
    ("all_to_all", "zigzag", 8, 4, (1, 2, 4)), ("all_to_all", "contiguous", 6, 6, (3,))])
def test_attention_in_parts_is_attention(how, layout, heads, kv_heads, ns, causal):
    """Values and all gradients, random cotangents, heads of 5 and 7 numbers, and what is kept for backward."""
    for n in ns:
        time = 6 * n if n > 1 else 5        # alone, any number
        wanted = by_hand(heads, kv_heads, time, causal)
        for got, kept in call(CASES + "attention", n, args=(how, causal, layout, heads, kv_heads, time)):
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)
            if how == "ring":       # beside q, k and v: o, and L, of this rank's positions
                assert kept == 8 * BATCH * heads * (time // n) * (7 + 1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("how, layout, n, window, fewest", [
    ("ring", "zigzag", 2, 4, 64), ("ring", "zigzag", 4, 9, 64), ("ring", "contiguous", 3, 1, 64),
    ("ring", "contiguous", 4, 7, 64), ("ring", "contiguous", 4, 8, 64), ("ring", "contiguous", 2, 2, 1),
    ("ring", "zigzag", 2, 2, 1), ("all_to_all", "zigzag", 2, 5, 64), ("all_to_all", "zigzag", 2, 2, 1)])
def test_windows_in_parts_are_windows(how, layout, n, window, fewest, causal):
    """Of parts of 6 positions, or of chunks of 3; with fewest, also where pieces of a part are made by themselves."""
    wanted = by_hand(2, 2, 6 * n, causal, window=window)
    for got, _ in call(CASES + "attention", n, args=(how, causal, layout, 2, 2, 6 * n, 1.0, window, fewest)):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)


def test_scores_may_be_large():
    """Those behind the mask as well: exp of them, less what a row adds up to, would be inf."""
    wanted = by_hand(2, 1, 12, True, 1000.0)
    for got, _ in call(CASES + "attention", 2, args=("ring", True, "zigzag", 2, 1, 12, 1000.0)):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


def test_scores_that_overflow_weigh_nothing():
    for y in call(CASES + "overflowing", 2):
        assert (y == 0.5).all()


def test_gradients_too_large_for_halves_are_inf_without_a_warning():
    """As a GradScaler's first steps make them."""
    assert call(CASES + "too_large", 2) == [(True, [])] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_derivatives_equal_finite_differences_across_ranks_to_second_order(n):
    for passed in call(CASES + "derivatives", n):
        assert len(passed) == 4


def test_ranks_that_disagree_are_told():
    """At once and on every rank, though a ring is messages; and before one of them is sent."""
    words = {"causal": ("causal=False", "causal=True"), "layout": ("zigzag", "contiguous"),
             "window": ("window=2", "window=3"),
             "shape": ("float64[2, 2, 4, 3]", "float64[1, 2, 8, 3]"), "scale": ("scale=1.0", "scale=2.0")}
    expected = {(how, name): said for how in ("ring", "all_to_all") for name, said in words.items()}
    expected["all_to_all", "shape"] = "float64[2, 2, 1, 4, 3]", "float64[2, 1, 1, 8, 3]"
    expected |= {("ring", "groups"): ("key (1, 2, 4, 3)", "key (1, 1, 4, 3)"),
                 ("ring", "way"): ("ring_attention(", "all_to_all("),
                 ("ring", "pass"): ("ring_attention, backward(", "ring_attention(")}
    first, second = call(CASES + "disagreements", 2)
    assert first == second and set(first) == set(expected)
    for name, said in expected.items():
        assert first[name] is not None, f"{name}: not noticed"
        for rank, line in enumerate(first[name].splitlines()[2:4]):
            assert line.split()[0] == str(rank) and said[rank] in line, first[name]


def test_the_dtype_stays():
    for found in call(CASES + "dtypes", 2):
        assert found.pop("mixed")
        assert len(found) == 3
        for (dtype, _), (names, error) in found.items():
            assert names == {dtype} and error < {"float32": 5e-6, "float16": 2e-2}[dtype]


def test_halves_travel_as_halves_and_are_computed_in_float32():
    for error, sent, elements in call(CASES + "halves", 2):
        assert error < 5e-3 and sent == 2 * elements


def test_on_a_gpu_it_is_what_it_is_on_the_host():
    for host, gpu in call(CASES + "by_devices", 2):
        assert len(host) == len(gpu) == 8
        for a, b in zip(host, gpu, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [None, [[0, 1, 1, 2]]], ids=["one", "documents"])
def test_blocks_are_made_by_flash_attention_where_there_is_a_gpu(documents):
    """On one rank, which has two chunks, and so three blocks to put together. Of documents, the last position sees
    nothing of the first chunk."""
    found, = crews.call(CASES + "by_kernels", 1, (documents,), env={"TRITON_INTERPRET": "1"})
    if found is None:
        pytest.skip("Triton is not installed")
    host, gpu, launches = found
    for a, b in zip(host, gpu, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=5e-6)
    assert launches == {"attention_block": 2 * 3, "flash_attention": 3, "flash_attention_queries": 3,
                        "flash_attention_sources": 3}


# ---------------------------------------------------------------- counts

@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_ring_sends_keys_and_values_to_all_others(n):
    """(N - 1) · 2 · batch · T/N · kv_dim forward; as much again, and their gradients, backward."""
    for kv_heads in (6, 2):
        once = (n - 1) * 2 * BATCH * 8 * kv_heads * SIZE * 8
        for found in call(CASES + "counted", n, args=("ring", kv_heads)):
            for (ops, _), times in ((found["forward"], 1), (found["backward"], 2)):
                assert ops.pop("send", (0, 0)) == (times * (n - 1), times * once)
                assert all(nbytes == 0 for _, nbytes in ops.values())


@pytest.mark.parametrize("layout, window, hops, blocks", [     # parts of 8 positions on 4 ranks
    ("contiguous", 1, 0, [1, 1, 1, 1]), ("contiguous", 2, 1, [1, 2, 2, 2]), ("contiguous", 9, 1, [1, 2, 2, 2]),
    ("contiguous", 10, 2, [1, 2, 3, 3]), ("contiguous", 17, 2, [1, 2, 3, 3]), ("contiguous", 32, 3, [1, 2, 3, 4]),
    ("zigzag", 5, 3, [3, 4, 4, 4]), ("zigzag", 1, 0, [2, 2, 2, 2])])
def test_keys_go_as_far_as_a_window_reaches(layout, window, hops, blocks):
    """⌈(w - 1)/(T/N)⌉ hops: forward keys and values, backward these again and their gradients, which end at home."""
    once = hops * 2 * BATCH * 8 * 6 * SIZE * 8
    for rank, found in enumerate(call(CASES + "counted", 4, args=("ring", 6, layout, True, window))):
        for (ops, products), times in ((found["forward"], 1), (found["backward"], 2)):
            assert ops.pop("send", (0, 0)) == (times * hops, times * once)
            assert products == blocks[rank] and all(nbytes == 0 for _, nbytes in ops.values())


@pytest.mark.parametrize("n", [2, 3])
def test_ulysses_sends_four_all_to_alls(n):
    """4 · batch · T/N · dim · (N - 1)/N each way; two of the four are smaller with fewer key and value heads."""
    for kv_heads in (6, n):
        sent = BATCH * 8 * SIZE * 8 * 2 * (6 + kv_heads) * (n - 1) // n
        for found in call(CASES + "counted", n, args=("all_to_all", kv_heads)):
            assert found == {"forward": ({"all_to_all": (4, sent)}, 0), "backward": ({"all_to_all": (4, sent)}, 0)}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_zigzag_shares_the_products_equally(n):
    """2N + 1 products of (T/2N)² on each rank; contiguous 1 … N of (T/N)²; without a mask N of (T/N)²."""
    expected = {("zigzag", True): [2 * n + 1] * n, ("contiguous", True): [rank + 1 for rank in range(n)],
                ("zigzag", False): [n] * n}
    for (layout, causal), blocks in expected.items():
        found = call(CASES + "counted", n, args=("ring", 6, layout, causal))
        assert [one["forward"][1] for one in found] == [one["backward"][1] for one in found] == blocks


@pytest.mark.parametrize("block, hop", [(2.0, 0.5), (0.5, 2.0)])
def test_messages_travel_while_blocks_are_made(block, hop):
    """On 3 ranks: N blocks if a block takes longer than a hop, else N - 1 hops and a block. Backward the gradients
    travel, too, as far, and the last of them have nothing to hide behind."""
    for forward, backward, covered in call(CASES + "timed", 3, args=(block, hop)):
        assert covered and forward == pytest.approx(3 * block if block > hop else 2 * hop + block)
        assert backward == pytest.approx(3 * block + hop if block > hop else 4 * hop)


def test_what_a_model_keeps_is_divided():
    """With all_to_all exactly; with a ring, whose rank alone keeps no scores either, exactly too."""
    for how in ("ring", "all_to_all"):
        whole, = call(MODELS + "kept", 1, args=(how,))
        for n in (2, 4):
            assert call(MODELS + "kept", n, args=(how,)) == [whole // n] * n


# ---------------------------------------------------------------- models

@pytest.fixture(scope="module")
def one_process():
    """{setting: what training a whole model in one process gives}."""
    return call(MODELS + "train_whole", 1)[0]


def furthest(got, wanted):
    """The largest difference between two dictionaries of arrays."""
    assert set(got) == set(wanted)
    return max(abs(got[name] - value).max() for name, value in wanted.items())


@pytest.mark.parametrize("setting, n, sizes, more", [
    ("learned", 2, {"cp": 2}, {}), ("rotary", 4, {"cp": 4}, {"layout": "contiguous"}), ("rotary", 2, {"cp": 2}, {}),
    ("stretched", 4, {"cp": 4}, {}), ("stretched", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all"}),
    ("learned", 4, {"cp": 4}, {"how": "all_to_all"}), ("rotary", 4, {"cp": 2}, {"how": "all_to_all"}),
    ("learned", 4, {"cp": 2}, {"stage": 3}), ("rotary", 4, {"cp": 2, "tp": 2}, {}),
    ("learned", 4, {"cp": 2, "tp": 2}, {"tensor_first": False}), ("mixture", 2, {"cp": 2}, {}),
    ("mixture", 4, {"cp": 2, "ep": 2}, {}), ("mixture", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all"}),
    ("mixture", 4, {"cp": 2}, {"stage": 3}), ("learned", 4, {"cp": 2, "tp": 2}, {"sequence": True}),
    ("rotary", 4, {"cp": 2, "tp": 2}, {"sequence": "regather", "layout": "contiguous"}),
    ("learned", 4, {"cp": 2, "tp": 2}, {"sequence": True, "tensor_first": False, "overlap": True}),
    ("mixture", 4, {"cp": 2, "tp": 2}, {"sequence": True, "stage": 3, "tensor_first": False}),
    ("mixture", 4, {"cp": 2, "tp": 2}, {"sequence": "regather", "how": "all_to_all"}),
    ("dropped", 2, {"cp": 2}, {"how": "all_to_all"}), ("dropped", 4, {"cp": 4}, {"how": "all_to_all", "stage": 3}),
    ("dropped", 4, {"cp": 2}, {"how": "all_to_all", "layout": "contiguous"}),
    ("dropped", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all"}),
    ("dropped", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all", "tensor_first": False, "sequence": True}),
    ("latents dropped", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all"}),
    ("linear", 4, {"cp": 4}, {}), ("linear", 4, {"cp": 4}, {"layout": "contiguous"}),
    ("linear", 4, {"cp": 2}, {"stage": 3, "how": "all_to_all"}),
    ("linear", 4, {"cp": 2, "tp": 2}, {"sequence": True, "overlap": True, "layout": "contiguous"}),
    ("linear", 4, {"cp": 2, "tp": 2}, {"sequence": "regather", "tensor_first": False}),
    ("delta", 4, {"cp": 4}, {"layout": "contiguous"}), ("delta", 4, {"cp": 2}, {"stage": 3, "how": "all_to_all"}),
    ("delta", 4, {"cp": 2, "tp": 2}, {"sequence": True, "tensor_first": False}),
    ("blocks", 4, {"cp": 4}, {"how": "all_to_all"}), ("blocks", 4, {"cp": 2}, {"how": "all_to_all", "stage": 3}),
    ("blocks", 4, {"cp": 2, "tp": 2}, {"how": "all_to_all", "layout": "contiguous", "sequence": True})], ids=str)
def test_one_curve_on_any_mesh(one_process, setting, n, sizes, more):
    """AdamW, dropout, clipping, float64, unequal batches along dp: within 1e-10 of one process, on every rank."""
    losses, wanted = one_process[setting]
    for got_losses, got in call(MODELS + "train", n, args=(setting, sizes, *_positional(more))):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert furthest(got, wanted) < 1e-10


def _positional(more):
    return [more.get(name, default) for name, default in
            (("how", "ring"), ("layout", "zigzag"), ("stage", 0), ("tensor_first", True), ("sequence", False),
             ("overlap", False))]


def test_stages_of_a_pipeline_share_sequences_too(one_process):
    losses, wanted = one_process["stages"]
    for got_losses, got in call(MODELS + "train_stages", 4, args=(2,)):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert furthest(got, wanted) < 1e-10


def test_the_curve_shows_what_is_wrong(one_process):
    found = call(MODELS + "train_wrong", 2)[0]
    assert len(found) == 7
    for name, got in found.items():
        assert furthest(got, one_process["one step"][1]) > 1e-3, name


def test_it_goes_with_the_rest_of_the_library():
    for found in call(MODELS + "composed", 2):
        assert len(found) == 11 and all(found.values()), found


def test_who_has_which_positions():
    pieces = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    for rank, found in enumerate(call(MODELS + "parts", 4)):
        assert found == {"contiguous": ([4 * rank + i for i in range(4)], True), "zigzag": (pieces[rank], True)}


def test_errors_say_what_to_do():
    expected = {
        "length": ("ValueError", "2 ranks can't share 6 positions in layout='zigzag', which needs a multiple of 4: pad "
                                 "the sequences to 8, or cut them to 4"),
        "short": ("ValueError", "a multiple of 2: pad the sequences to 2"), "axis": ("ValueError", "shape (6,) has no"),
        "axis before the first": ("ValueError", "shape (6,) has no axis -2"),
        "layout": ("ValueError", "layout='striped' must be one of 'contiguous', 'zigzag'"),
        "how": ("ValueError", "how='gather' must be one of 'ring', 'all_to_all'"),
        "odd part": ("ValueError", "3 positions on each of 2 ranks are no 2 equal chunks; layout='zigzag' needs "
                                   "sequences of a multiple of 4"),
        "odd part by heads": ("ValueError", "3 positions on each of 2 ranks are no 2 equal chunks"),
        "shapes": ("ValueError", "query (1, 2, 4, 4), key (1, 2, 6, 4)"),
        "shapes: axes": ("ValueError", "query (2, 4, 4), key (2, 4, 4), value (2, 4, 4) must be"),
        "shapes: values": ("ValueError", "key (1, 2, 4, 4), value (1, 2, 6, 4) must be"),
        "shapes: batch": ("ValueError", "query (2, 2, 4, 4), key (1, 2, 4, 4)"),
        "shapes: size": ("ValueError", "query (1, 2, 4, 3), key (1, 2, 4, 4)"),
        "shapes: groups": ("ValueError", "query (1, 3, 4, 4), key (1, 2, 4, 4)"),
        "shapes: no groups": ("ValueError", "key (1, 0, 4, 4)"),
        "heads": ("ValueError", "ulysses_attention: 2 ranks must divide the 3 heads and the 3 kv_heads"),
        "kv heads": ("ValueError", "the 4 heads and the 1 kv_heads; a ring doesn't ask for that"),
        "heads of a model": ("ValueError", "attention: 2 ranks must divide the 3 heads"),
        "no attention": ("ValueError", "the Sequential has no MultiHeadAttention"),
        "mixture": ("ValueError", "blocks.0.mlp, of class MoE: ranks of 'world' share its sequences, and "
                                  "capacity_factor=1.25: who finds a place depends on tokens that other ranks have: "
                                  "take capacity_factor=None"),
        "convolution": ("ValueError", "1, of class Conv1d, looks at several positions"),
        "pooling": ("ValueError", "1, of class AvgPool2d, looks at several positions"),
        "flattened": ("ValueError", "1, of class Flatten, looks at several positions"),
        "own dropout": ("ValueError", "1, of class Noisy, is a Dropout of its own making"),
        "image": ("ValueError", "the model, of class ImageTransformer"),
        "twice": ("ValueError", "divided already, 'ring', 'zigzag'"),
        "generate": ("ValueError", "load the state_dict into a GPT that is not divided"),
        "weights": ("ValueError", "load the state_dict into a model that is not divided"),
        "longer": ("ValueError", "GPT of length 16 was given 32 tokens"),
        "blocks": ("ValueError", "blocks.0.attention chooses among all blocks of keys, of which a ring has a few at a "
                                 "time: take how='all_to_all'"),
        "copied": ("TypeError", "can't be copied or pickled"),
        "not summed": ("RuntimeError", "nobody sums the gradients of what they hold alike: wrap the whole model"),
        "not all ranks": ("ValueError", "lacks"), "not all ranks, sharded": ("ValueError", "fully_shard: "),
        "exact": ("ValueError", "exact mode can't be had of divided sequences"),
        "exact, sharded": ("ValueError", "exact mode can't be had of divided sequences"),
    }
    for found in call(MODELS + "errors", 2):
        assert found.pop("evaluated") == (2, 4, 13) and set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and words in found[name][1], found[name]
