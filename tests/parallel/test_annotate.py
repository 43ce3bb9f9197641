"""Any legal annotation gives the dense result, forward and backward, and sends what the papers say.

As in test_collectives.py only the ranks import minitorch_dist.parallel.sharding.annotate.
"""

from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.testing import ranks
from tests.crews import crews

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharding.py"
CASES, MODEL_CASES = "tests.parallel.annotate_cases:", "tests.parallel.annotate_model_cases:"


@pytest.mark.parametrize(("n", "uneven", "axes"), [
    (2, False, {"tp": 2}), (3, True, {"tp": 3}), (4, True, {"dp": 2, "tp": 2})])
def test_every_op_gives_the_dense_result_however_it_is_cut(n, uneven, axes):
    for found, count, without in crews.call(CASES + "op_table", n, args=(uneven, axes)):
        assert count > {2: 450, 3: 70, 4: 20}[n] and not [item for item in found.items() if not item[1] < 1e-11]
        assert without == ["pick"]      # which only the tape makes


@pytest.mark.parametrize(("n", "axes"), [(2, {"tp": 2}), (3, {"tp": 3}), (4, {"dp": 2, "tp": 2})])
def test_random_programs_with_random_annotations_are_the_dense_ones(n, axes):
    for worst, where, sent in crews.call(CASES + "random_programs", n, args=(100 * n, 24 // n, axes)):
        assert worst < 1e-11, where
        assert sent > 4_000


@pytest.mark.parametrize(("n", "axes", "shape", "step"), [
    (2, {"tp": 2}, (8, 4, 12), 1), (4, {"dp": 2, "tp": 2}, (8, 4, 12), 23), (4, {"dp": 2, "tp": 2}, (7, 5, 9), 29)])
def test_from_layout_to_layout(n, axes, shape, step):
    for worst, wrong, count, sent in crews.call(CASES + "moves", n, args=(axes, shape, step)):
        assert worst < 1e-15 and not wrong and count > 30
        if shape[0] % n == 0:
            assert all(counted == expected for counted, expected in sent) and sum(n for n, _ in sent) > 9000


@pytest.mark.parametrize(("n", "axes"), [(3, {"tp": 3}), (4, {"dp": 2, "tp": 2})])
def test_unequal_parts_where_a_collective_needs_equal_ones(n, axes):
    assert max(crews.call(CASES + "unequal", n, args=(axes,))) < 1e-13


@pytest.mark.parametrize("n", [1, 2])
def test_transforms_of_a_function_that_cuts_its_argument(n):
    for differences in crews.call(CASES + "transforms", n):
        assert max(differences) < 1e-13


@pytest.mark.parametrize(("n", "dp", "ways"), [(1, 1, "sequence|features"), (2, 1, ""), (4, 2, "batch,|,.batch|four")])
def test_models_are_the_dense_ones_over_several_steps(n, dp, ways):
    """AdamW, dropout, float64; ways: which annotations of MODELS, all or those that this matches."""
    for found in crews.call(MODEL_CASES + "models", n, args=(dp, n // dp, ways)):
        assert len(found) == {1: 3, 2: 17, 4: 10}[n] and not [item for item in found.items() if not item[1] < 1e-10]


def test_whole_states_know_nothing_of_ranks():
    for same, shape, kind in crews.call(MODEL_CASES + "states", 2):
        assert same == [True] * 3 and shape == (6, 16) and kind == "Sharded"


# ---------------------------------------------------------------- what is sent

X, W, Y = 8 * 12 * 8, 12 * 16 * 8, 8 * 16 * 8       # bytes of x (8, 12), w (12, 16) and x @ w
MATMUL = {      # (what cuts x, what cuts w), as dimensions: {collective: in units of (n - 1)/n bytes}, the result
    (-1, -1): ({}, "(·, ·)"),
    (-1, 1): ({"all_reduce": 2 * X}, "(·, tp)"),                        # column parallel: x's gradient is summed
    (0, -1): ({"all_reduce": 2 * W}, "(tp, ·)"),                        # data parallel: w's gradient is
    (1, 0): ({"all_reduce": 2 * Y}, "(·, ·)"),                          # row parallel: the result is
    (-1, 0): ({"all_reduce": 2 * Y, "all_gather": X}, "(·, ·)"),        # x is cut for nothing, its gradient gathered
    (1, -1): ({"all_reduce": 2 * Y, "all_gather": W}, "(·, ·)"),
    (0, 1): ({"all_gather": X, "reduce_scatter": X}, "(·, tp)"),        # x is half as large as w: it travels
    (1, 1): ({"all_gather": X, "reduce_scatter": X}, "(·, tp)"),
}


@pytest.mark.parametrize("n", [2, 4])
def test_a_product_sends_what_its_closed_form_says_and_the_choice_expects(n):
    cuts = {cut: [["tp" if d == dim else -1 for d in (0, 1)] for dim in cut] for cut in [*MATMUL, (0, 0)]}
    for results in crews.call(MODEL_CASES + "matmul_bytes", n, args=({"tp": n}, list(cuts.values()))):
        found = dict(zip(cuts, results, strict=True))
        for cut, (units, layout) in MATMUL.items():
            sent, _, where = found[cut]
            assert where == layout
            assert sent == {(op, "tp"): pytest.approx(count * (n - 1) / n) for op, count in units.items()}, cut
        # x (tp, ·) @ w (tp, ·): w is gathered, or x's rows become columns and the results are summed
        assert sum(found[0, 0][0].values()) == pytest.approx(min(2 * W, 2 * X / n + 2 * Y) * (n - 1) / n)
        for sent, expected, _ in results:
            assert sum(sent.values()) == pytest.approx(expected)


def test_of_16_bits_a_product_sends_what_the_choice_expects():
    cuts = [[["tp" if d == dim else -1 for d in (0, 1)] for dim in cut] for cut in MATMUL]
    for results in crews.call(MODEL_CASES + "matmul_bytes", 2, args=({"tp": 2}, cuts, "float16")):
        for sent, expected, _ in results:
            assert sum(sent.values()) == expected
        assert results[1][1] == 2 * X / 4       # an all-reduce over 2 ranks, of x's gradient in float32
        assert results[4][1] == (2 * Y / 2 + X / 4) / 2


TWO = {     # on 2 x 2 ranks: what cuts x, what cuts w: what is sent, in bytes; the result
    # fully sharded beside tensor parallel: each rank gathers, over dp, its part for tp of w
    (("dp", -1), (-1, ("tp", "dp"))): ({("all_gather", "dp"): W / 4, ("reduce_scatter", "dp"): W / 4,
                                        ("all_reduce", "tp"): X / 2}, "(dp, tp)"),
    (("dp", -1), (-1, ("dp", "tp"))): ({("all_gather", "dp"): W / 4, ("reduce_scatter", "dp"): W / 4,
                                        ("all_reduce", "tp"): X / 2}, "(dp, tp:2)"),
    # data parallel over both
    ((("dp", "tp"), -1), (-1, -1)): ({("all_reduce", "dp"): W, ("all_reduce", "tp"): W}, "(dp × tp:2, ·)"),
    # row parallel over both; x or w over one of them
    ((-1, ("tp", "dp")), (("tp", "dp"), -1)): ({("all_reduce", "dp"): Y, ("all_reduce", "tp"): Y}, "(·, ·)"),
    ((-1, ("tp", "dp")), ("tp", -1)): ({("all_gather", "dp"): W / 4, ("all_reduce", "dp"): Y, ("all_reduce", "tp"): Y},
                                       "(·, ·)"),
}


def test_a_product_sends_what_its_closed_form_says_where_two_axes_cut_one_dimension():
    for results in crews.call(MODEL_CASES + "matmul_bytes", 4, args=({"dp": 2, "tp": 2}, list(TWO))):
        for (cut, (closed, layout)), (sent, expected, where) in zip(TWO.items(), results, strict=True):
            assert (where, sent) == (layout, closed), cut
            assert sum(sent.values()) == expected, cut


@pytest.mark.parametrize(("n", "options", "vectors", "parameters"), [
    (2, {}, 4, 12), (4, {}, 4, 12), (2, {"norm": "rms", "mlp": "swiglu", "hidden": 40, "bias": False}, 2, 6)])
def test_a_block_sends_what_megatron_sequence_and_data_parallelism_send(n, options, vectors, parameters):
    for found, x, weights, norms in crews.call(MODEL_CASES + "block_messages", n, args=(options,)):
        def ring(nbytes, calls, halves=2):
            return calls, calls * halves * (n - 1) * nbytes // n
        assert found["megatron"] == {"forward": {"all_reduce": ring(x, 2)}, "backward": {"all_reduce": ring(x, 2)}}
        # Korthikanti et al. 2022: the same bytes as halves, and small sums for the weights of the norms
        halves = {"all_gather": ring(x, 2, 1), "reduce_scatter": ring(x, 2, 1)}
        assert found["sequence"] == {"forward": halves, "backward": halves | {
            "all_reduce": ring(norms / vectors, vectors)}}
        assert found["data"] == {"forward": {}, "backward": {"all_reduce": (parameters, ring(weights, 1)[1])}}


@pytest.mark.parametrize("n", [2, 4])
def test_weights_cut_over_dp_are_zero_3(n):
    """Each weight is gathered where it is used, its gradient comes back scattered; the optimizer works on an n-th."""
    for sent, whole, held, layouts in crews.call(MODEL_CASES + "zero", n):
        half = (n - 1) * whole // n
        assert sent == {"all_gather": half, "reduce_scatter": half, "all_reduce": 2 * (n - 1) * 8 // n}
        assert held == whole // n and layouts == ["(dp, ·)", "(dp, ·)"]


def test_axes_cut_inside_of_those_that_cut_before():
    assert crews.call(CASES + "inside", 1)[0] == [
        "(dp × tp:2, ·)", "(dp × tp:2, ·)", "(tp × dp:2, ·)", "(dp × tp:2, ·)", "(tp × dp:2, ·)", "(tp:2, dp)",
        "(dp × tp:2, ·)", "(·, tp[4|12] × dp[2|2|6|6])", "(tp, dp)"]


def test_explain_prints_each_op_and_what_it_sends():
    text, count, rest = crews.call(CASES + "explained", 2)[0]
    assert count == 5 and rest == {}
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "matmul (·, ·) (·, tp) -> (·, tp)", "gelu (·, tp) -> (·, tp)", "matmul (·, tp) (tp, ·) -> (·, ·) + Σtp",
        "mul (·, ·) + Σtp (·, ·) + Σtp -> (·, ·) all_reduce tp 192 bytes", "sum (·, ·) -> ()",
        "backward, and what isn't Sharded: nothing sent"]


def test_the_example_shows_ops_and_a_table():
    lines = ranks.launch([EXAMPLE, "--explain", "data"], 2, limit=60).check().stdout[0].splitlines()
    assert lines[0] == "data: the batch over dp; DeviceMesh(dp=2)" and lines[2].startswith("layer_norm ")
    table = {name: (int(a), int(b), int(c)) for name, a, b, c, _ in (
        line.replace(",", "").split() for line in lines[-6:])}
    half = table["megatron"]
    assert half[0] == half[1] == table["sequence"][0] and table["data"][:2] == (0, table["data"][2])
    assert half[2] < 0.52 * table["data"][2]


def test_errors_say_what_to_do():
    expected = {
        "dimension": ("ValueError", "dimension 2 is out of range for shape (4, 6)"),
        "mapping": ("ValueError", "[0] for shape (4, 6): it must have one entry per dimension"),
        "axis": ("ValueError", "2 in dims_mapping [2, -1] is no axis of the mesh: there are 0 (dp), 1 (tp), and -1"),
        "name": ("ValueError", "'ep' in dims_mapping"), "twice": ("ValueError", "lets axis 'tp' cut twice"),
        "twice in one": ("ValueError", "lets axis 'tp' cut twice"),
        "inner sections": ("ValueError", "('dp', ('tp', (2, 2))) in dims_mapping [('dp', ('tp', (2, 2))), -1]: the"),
        "whole inside": ("ValueError", "-1 in dims_mapping [('tp', -1), -1] is no axis"),
        "a mesh": ("TypeError", "split: got a DeviceMesh where it takes a Communicator, mesh[\"dp\"]"),
        "an axis": ("TypeError", "mesh_split: got a Communicator where it takes a DeviceMesh"),
        "a list": ("TypeError", "a list, [1, 2], can't lie on a mesh"),
        "a name": ("TypeError", "dims_mapping 'tp' for shape (4, 6): it must be a list"),
        "no layout": ("TypeError", "['tp', -1] is no Layout; annotate.mesh_split"),
        "no placement": ("TypeError", "0 is no placement of an axis: Shard(dim)"),
        "a parameter": ("TypeError", "got a Sharded: of a model its parameters()"),
        "again": ("RuntimeError", "0.weight, 0.bias, 3.weight, 3.bias lies on a mesh already"),
        "no dict": ("TypeError ValueError", "must be a dict"),     # (on the rank where it happens, on others)
        "sharded fully": ("ValueError", "lies on a mesh, where gradients are summed already: leave fully_shard out"),
        "in context": ("ValueError", "annotated, the batch can be cut along time, as in annotate.split(x, 1"),
        "in parallel": ("ValueError", "parallelize_module: 0.weight, 0.bias, 3.weight, 3.bias of this model lies on a"),
        "other shape": ("ValueError", "0.weight has shape (14, 9), the values have shape (7, 9)"),
        "one section": ("ValueError", "Shard(0, (4,)): one section is the dimension: leave it out"),
        "a fraction": ("TypeError", "'float' object cannot be interpreted as an integer"),
        "a flag": ("ValueError", "True in dims_mapping [True, -1] is no axis of the mesh"),
        "no flag": ("ValueError", "False in dims_mapping [False, -1] is no axis of the mesh"),
        "another mesh": ("ValueError", "backward: two of its values lie on axes 'tp' of different meshes"),
        "too few": ("ValueError", "1 elements, fewer than the 2 ranks of axis 'tp'"),
        "sections": ("ValueError", "axis 'tp': sections (1, 3) of dimension 0 must add up to its 4 elements, and each"),
        "sum": ("ValueError", "(tp, ·) can't become (·, ·) + Σtp"),
        "same axis": ("ValueError", "add: two of its values lie on axes 'tp' of different meshes"),
        "same ranks": ("ValueError", "matmul: two of its values lie on axes 'all' and 'tp' of different meshes"),
        "no rule": ("NotImplementedError", "unheard: no sharding rule says how to run it on (tp, ·) of (4, 6)"),
        "index": ("IndexError", "out of range for 4 rows"), "no part": ("ValueError", "there are 4 rows"),
        "numbers": ("TypeError", "annotate the other operand, too, with replicate(x, mesh)"),
        "assignment": ("TypeError", "x.at[index].set(value)"),
        "shapes": ("ValueError", "matmul: shapes (4, 6), (4, 6) don't fit: 6 meets 4; they lie (tp, ·) of (4, 6)"),
        "part as large as": ("ValueError", "add: shapes (4, 6), (2, 6) don't fit: 4 meets 2"),
        "pattern": ("ValueError", "'7.weight' meets no parameter; there are 0.weight"),
        "annotation": ("ValueError", "0.weight: dims_mapping ['tp'] for shape (14, 9)"),
        "values": ("ValueError", "rank 1: weight: (tp, ·) of float32 [4, 4], values"),
        "ranks differ": ("ValueError", "rank 0: 0.weight: (·, tp) of float64 [14, 9]"),
        "late": ("RuntimeError", "annotate the model before making those"),
        "leaf": ("ValueError", "lies (·, ·) + Σtp"), "parameter": ("ValueError", "0.weight is to lie (·, ·) + Σtp"),
        "one rank": ("ValueError", "'wight' meets no parameter"),
        "frozen": ("ValueError", "rank 1: 0.weight: (·, ·) of "),
        "wrapped": ("ValueError", "0.weight, 0.bias, 3.weight, 3.bias of this model lies on a mesh"),
        "uncut": ("ValueError", "0.weight, 0.bias, 3.weight, 3.bias, 5.weight, 5.bias of this model lies on no mesh"),
        "missing": ("KeyError", "no values for"),
        "label": ("ValueError", "labels from 0 to 9, but there are 6 classes"),
        "returned": ("TypeError", "what the function has returned is Sharded(() + Σtp"),
        "linearized": ("TypeError", "what the function has returned is Sharded((tp, ·)"),
        "argument": ("TypeError", "primal 0 is Sharded((tp, ·)"), "by hand": ("TypeError", "whose derivative is given"),
        "layout": ("ValueError", "layout (·, ·) + Σep for shape (4, 6) on a mesh of axes tp"),
        "dimensions": ("IndexError", "an index for 3 dimensions, of a value that has 2"),
        "no scalar": ("RuntimeError", "of shape (2,)"),
        "cotangent": ("ValueError", "(3, 6) and dtype float64, the value has shape (4, 6)"),
        "pickle": ("TypeError", "full_state_dict"), "disagree": ("MismatchError", "all_gather(float64[3, 4])"),
    }
    for found in crews.call(MODEL_CASES + "errors", 2):
        assert set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] in kind.split() and words in found[name][1], found[name]


def test_a_pending_sum_is_made_once_and_looking_at_it_costs_no_gradient():
    for difference, pending, count in crews.call(CASES + "looked_at", 2):
        assert difference < 1e-13 and pending == "(·, ·) + Σtp" and count == 1


def test_extrema_of_parts_send_one_number_per_result():
    for found in crews.call(CASES + "extrema", 2):
        for name, axis, got, expected, sent in found:
            np.testing.assert_array_equal(got, expected)
            if name in ("max", "min"):      # (an axis' n-th of a byte is none)
                assert sent == (0 if axis == 1 else expected.nbytes), (name, axis)


def test_the_greatest_scores_of_parts_send_one_number_per_head():
    """Where batch or time are cut; heads stay apart, what is summed, and sources, are made whole first."""
    for found in crews.call(CASES + "scores", 2):
        for what, got, expected, sent in found:
            np.testing.assert_allclose(got, expected, rtol=1e-13, err_msg=str(what))
            if what[:2] in (("q", 0), ("k", 0), ("q", 2)) and what != ("q", 2, True):
                assert sent == expected.nbytes, what
            if what[:2] in (("q", 1), ("k", 1)):
                assert sent == 0, what


def test_sums_of_parts_are_what_their_narrow_dtypes_make_of_the_whole():
    for bools, integers, product, gradient, rows in crews.call(CASES + "narrow", 2):
        np.testing.assert_array_equal(*bools)
        np.testing.assert_array_equal(*rows)
        assert rows[0].dtype == bool
        np.testing.assert_array_equal(*integers)
        for got, expected in product, gradient:
            assert got.dtype == np.float16
            np.testing.assert_allclose(got, expected, rtol=4e-3, atol=4e-3)


def test_orders_of_bfloat16():
    for found in crews.call(CASES + "orders_of_16_bits", 2):
        for got, expected in found:
            np.testing.assert_array_equal(got, expected)


def test_nothing_sections_and_cotangents_that_lie_otherwise():
    for found in crews.call(CASES + "edges", 2):
        for got, expected in found.values():
            np.testing.assert_array_equal(got, expected)


def test_on_a_gpu_the_numbers_are_the_hosts():
    """On the stand-in for CuPy, which refuses arrays of two devices: parts, masks, indices and labels are on one."""
    for difference, places, goes_on in crews.call(MODEL_CASES + "on_gpu", 2):
        assert difference < 1e-10 and places == {"cuda:0"} and goes_on


def test_the_ranks_draw_the_same_mask():
    """Of dropout's mask each rank has its part: the mean over many elements says that none was drawn twice."""
    found = crews.call(CASES + "masks", 2)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][0], found[0][1])
