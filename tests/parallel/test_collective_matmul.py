"""Products that hide messages are products: values, gradients, bytes; times on a virtual clock; and one curve.

As in test_collectives.py only the ranks import what enters ops into the table.
"""

import functools

import numpy as np
import pytest

from minitorch_dist.testing import ranks
from tests.crews import crews
from tests.parallel import test_combinations as combinations

CASES = "tests.parallel.collective_matmul_cases:"
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
KINDS = [(GATHER, False), (GATHER, True), (SCATTER, False)]
BATCH, PART, IN, OUT = 2, 3, 5, 4


def call(target, n, *args):
    """What the first n of a crew of four ranks give."""
    return crews.call(CASES + "among", 4, args=(n, target, args))[:n]


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


def by_hand(op, n):
    """For each rank [y, dx, dW, db], in NumPy, of undivided products."""
    gathers = op == GATHER
    xs = [values((BATCH, PART if gathers else PART * n, IN + r * (not gathers)), 1, r) for r in range(n)]
    ws = [values((OUT + r * gathers, x.shape[-1]), 2, r) for r, x in enumerate(xs)]
    us = [values((BATCH, PART * n if gathers else PART, len(w)), 3, r) for r, w in enumerate(ws)]
    if gathers:
        whole = np.concatenate(xs, 1)
        back = np.split(sum(u @ w for u, w in zip(us, ws, strict=True)), n, 1)
        return [[whole @ w.T + values(len(w), 4, r), dx, np.einsum("bto,bti->oi", u, whole), u.sum((0, 1))]
                for r, (w, u, dx) in enumerate(zip(ws, us, back, strict=True))]
    whole = np.concatenate(us, 1)
    ys = np.split(sum(x @ w.T for x, w in zip(xs, ws, strict=True)), n, 1)
    return [[y, whole @ w, np.einsum("bto,bti->oi", whole, x)] for x, w, y in zip(xs, ws, ys, strict=True)]


@pytest.mark.parametrize(("op", "regather"), KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_products_in_parts_are_products(op, regather, n):
    """Values and all gradients; kept are the others' x with the own one, or, to gather again, the own alone."""
    for (got, kept), wanted in zip(call("product", n, op, regather), by_hand(op, n), strict=True):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)
        assert kept == (0 if regather or op == SCATTER else 8 * BATCH * PART * IN * (n - 1))


def test_sums_are_made_in_the_order_of_the_ring():
    """To the bit: for part r beginning with rank r + 1's product, for a weight with the own part, then that before."""
    n = 4
    ranks = range(n)
    xs, ws = ([values(shape(r), key, r) for r in ranks] for shape, key in (
        (lambda r: (BATCH, PART * n, IN + r), 1), (lambda r: (OUT, IN + r), 2)))

    def rows(a, part):
        return np.ascontiguousarray(a[:, part * PART:(part + 1) * PART]).reshape(BATCH * PART, -1)
    for r, ((y, _, dw), _) in enumerate(call("product", n, SCATTER)):
        order = [(r + 1 + step) % n for step in ranks]
        summed = functools.reduce(np.add, [rows(xs[s], r) @ ws[s].T for s in order])
        assert np.array_equal(y.reshape(summed.shape), summed)
        us = [values((BATCH, PART, OUT), 3, s) for s in ranks]
        products = [rows(us[s], 0).T @ rows(xs[r], s) for s in [(r - step) % n for step in ranks]]
        assert np.array_equal(dw, functools.reduce(np.add, products))
    kept, again = (call("product", n, GATHER, regather) for regather in (False, True))
    for (first, _), (second, _) in zip(kept, again, strict=True):
        assert all(map(np.array_equal, first, second))


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_floats_of_16_bits_are_added_up_in_float32(op):
    """Each product is rounded once, and their sum; in bfloat16, of 8 bits, where 256 + 1 is 256."""
    for (got, _), wanted in zip(call("product", 4, op, True, "bfloat16"), by_hand(op, 4), strict=True):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=3 * 2.0 ** -8 * abs(w).max())
    assert call("small_beside_large", 4) == [(260.0, 260.0)] * 4        # 259, to the nearest that there is


def test_sums_too_large_for_16_bits_are_inf_without_a_warning():
    """As a GradScaler's first steps make them."""
    assert call("too_large", 4) == [{GATHER: (True, []), SCATTER: (True, [])}] * 4


@pytest.mark.parametrize(("op", "regather"), KINDS)
def test_derivatives_equal_finite_differences_across_ranks_to_second_order(op, regather):
    assert call("gradients", 3, op, regather) == [True] * 3


def test_what_is_frozen_costs_nothing():
    """dx is a round; dW one only where x is gathered again; behind a scatter dx and dW share one."""
    messages = {(GATHER, False): (2, 0, 2), (GATHER, True): (2, 2, 4), (SCATTER, False): (2, 2, 2)}
    for found in call("alone", 3):
        for kind, counts in messages.items():
            (dx, dw), *_ = found[*kind, "both"]
            for which, wanted, count in (("x", [dx, None], counts[0]), ("weight", [None, dw], counts[1]),
                                         ("both", [dx, dw], counts[2])):
                got, products, sent = found[*kind, which]
                assert (products, sent) == (6 if which == "both" else 3, count), (kind, which)
                for g, w in zip(got, wanted, strict=True):
                    assert g is w is None or np.array_equal(g, w), (kind, which)


@pytest.mark.parametrize(("regather", "messages"), [(False, (2, 0)), (True, (2, 2))])
def test_a_backward_in_two_parts_leaves_the_weights_products_for_the_second(regather, messages):
    """As a pipeline without bubbles wants it."""
    for counts, same in call("halves", 3, regather):
        assert same and counts == [(3, messages[0]), (3, messages[1])]


# ---------------------------------------------------------------- time

@pytest.mark.parametrize(("p", "h"), [(3.0, 2.0), (1.0, 5.0)], ids=["products take longer", "messages take longer"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_messages_hide_behind_products(op, n, p, h):
    """On a virtual clock, forward: p + (n - 1) max(p, h) instead of n p + (n - 1) h; backward with two products in the
    place of each. Of the time that messages are under way, min(1, p/h) isn't waited for; without overlap none."""
    for found in call("timed", n, op, False, p, h):
        assert found == {"forward": (pytest.approx(n * p + (n - 1) * h), 0.0),
                         "backward": (pytest.approx(2 * n * p + (n - 1) * h), 0.0)}
    for found in call("timed", n, op, True, p, h):
        assert found == {
            name: (pytest.approx(w + (n - 1) * max(w, h)), pytest.approx(min(1.0, w / h)))
            for name, w in (("forward", p), ("backward", 2 * p))}


def test_gathering_again_hides_too():
    """Two rounds of messages behind two of products; without overlap they come one after the other."""
    for found in call("timed", 4, GATHER, True, 3.0, 2.0, True):
        assert found["backward"] == (pytest.approx(2 * 4 * 3.0), pytest.approx(1.0))
    for found in call("timed", 4, GATHER, False, 3.0, 2.0, True):
        assert found["backward"] == (pytest.approx(2 * 4 * 3.0 + 2 * 3 * 2.0), 0.0)


# ---------------------------------------------------------------- models

@pytest.fixture(scope="module")
def one_process():
    """{model: parameters after training in one process}."""
    return {name: call("train", 1, name, None)[0] for name in ("gpt", "llama")}


@pytest.mark.parametrize(("name", "n", "kind"), [
    ("gpt", 2, True), ("gpt", 3, "regather"), ("llama", 3, True), ("llama", 2, "regather")])
def test_one_curve(one_process, name, n, kind):
    """Dropout, biases, tied weights; gates and hidden features that the ranks can't share equally: within 1e-10."""
    for state in call("train", n, name, kind):
        assert set(state) == set(one_process[name])
        for path, value in one_process[name].items():
            np.testing.assert_allclose(state[path], value, rtol=0, atol=1e-10, err_msg=path)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", [True, "regather"])
def test_a_block_sends_and_keeps_what_it_did(kind, n):
    """The bytes of sequence parallelism, to the byte, n - 1 messages for each collective; the same bytes are kept."""
    for (plain, kept), (found, kept_too) in zip(call("counted", n, kind, False), call("counted", n, kind, True),
                                                strict=True):
        assert kept_too == kept
        for way, gathers in (("forward", 2), ("backward", 4 if kind == "regather" else 2)):
            assert plain[way]["all_gather"][0] == gathers and plain[way]["reduce_scatter"][0] == 2
            sends = plain[way]["all_gather"][1] + plain[way]["reduce_scatter"][1]
            others = {op: count for op, count in plain[way].items() if op == "all_reduce"}
            assert found[way] == others | {"send": ((gathers + 2) * (n - 1), sends),
                                           "recv": ((gathers + 2) * (n - 1), 0)}


def test_summaries_count_the_same_products():
    assert call("flops", 2, True) == call("flops", 2, False)


JOBS = [        # forms, sizes of their axes, what is done besides, whether a mixture of experts
    (("sequence", "ZeRO 3"), {"dp": 2, "tp": 2}, "clip_grad_norm", False),
    (("sequence", "ZB-H1"), {"pp": 2, "dp": 1, "tp": 2}, None, False),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "Qwen3, recompute", False),
    (("sequence", "experts"), {"ep": 2, "tp": 2}, None, True),
    (("sequence", "DDP"), {"dp": 2, "tp": 2}, "bfloat16", False),
    (("sequence", "DDP"), {"dp": 2, "tp": 2}, "compile", False),
    (("sequence", "DDP"), {"dp": 2, "tp": 2}, "offload_activations", False),
    (("sequence", "ZeRO 2"), {"dp": 2, "tp": 2}, "GradScaler", False),
]


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
def test_it_goes_with_the_rest_of_the_library():
    found = zip(*crews.call(CASES + "combined", 4, (JOBS,), limit=120), strict=True)
    wrong = {job[:3:2]: problem for job, ranks in zip(JOBS, found, strict=True)
             if (problem := combinations.judged(job, ranks))}
    assert not wrong, wrong


def test_on_a_gpu_it_is_what_it_is_on_the_host():
    for results in ranks.call(CASES + "on_a_gpu", 2):
        for host, gpu in (results[:2], results[2:]):
            assert len(host) == len(gpu) > 20
            for a, b in zip(host, gpu, strict=True):
                np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def test_errors_say_what_to_do():
    expected = {
        "alone": ("ValueError", "parallelize_module: tp_comm_overlap=True is of what sequence_parallel gathers"),
        "kind": ("ValueError", "tp_comm_overlap='always' must be False or True"),
        "a layer alone": ("ValueError", "ColumnParallelLinear: tp_comm_overlap=True is of what sequence_parallel"),
        "adapters": ("ValueError", "lora.add: attention.qkv, attention.out, mlp.0, mlp.2: products that hide messages"),
        "few bits": ("ValueError", "convert_to_low_precision_training: attention.qkv, attention.out, mlp.0, mlp.2"),
        "column's product": ("ValueError", "ColumnParallelLinear: product <ufunc 'matmul'> can't be made in 2 parts"),
        "row's product": ("ValueError", "RowParallelLinear: product <ufunc 'matmul'> can't be made in 2 parts"),
        "axes": ("ValueError", "all_gather_matmul: shape (3, 5); sequence parallelism is for (batch, time, dim)"),
        "features": ("ValueError", "(2, 3, 5) and weight"),
        "a row of weights": ("ValueError", "(2, 3, 5) and weight (5,)"),
        "bias": ("ValueError", "all_gather_matmul: bias (1,) must be ("),
        "length": ("ValueError", "2 ranks can't share 5 positions equally"),
        "one rank without": ("MismatchError", "all_gather_matmul"),
        "one rank gathers again": ("MismatchError", "regather=True"),
        "other parts": ("MismatchError", "all_gather_matmul"),
        "other results": ("MismatchError", "matmul_reduce_scatter"),
        "one rank's weight is wider": ("MismatchError", "all_gather_matmul, backward"),
        "one rank's sum is wider": ("MismatchError", "matmul_reduce_scatter"),
        "one rank's x is frozen": ("MismatchError", "all_gather_matmul, backward"),
    }
    for found in call("errors", 2):
        assert set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and words in found[name][1], (name, found[name])
    for said in call("overwritten", 2):
        assert said and "overwritten" in said
