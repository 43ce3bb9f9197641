"""Every collective against what NumPy makes of the data that each rank is known to hold."""

import numpy as np
import pytest

from minitorch_dist.comm.local import aligned_zeros
from minitorch_dist.testing import ranks

from .cases import DTYPES, SIZES, data_of

CASES = "tests.comm.cases:"
MPICH_RING = {   # sums in an order that isn't the tree's; MPICH's usual one happens to be
    "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring", "MPIR_CVAR_DEVICE_COLLECTIVES": "none"}
EVERY_N = pytest.mark.parametrize("n", [1, 2, 3, 4])


def held(n, size, dtype):
    return [data_of(rank, size, dtype) for rank in range(n)]


def close_to_sum(result, parts, scale=1.0):
    """result within the rounding of n-1 additions in its dtype of the float64 sum."""
    wide = np.array(parts, np.float64 if result.dtype.kind == "f" else np.int64)
    bound = len(parts) * np.finfo(result.dtype).eps * abs(wide).sum(0) if result.dtype.kind == "f" else 0
    return (abs(result - wide.sum(0) * scale) <= bound * scale).all()


def balanced_tree(parts):
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return balanced_tree(parts[:half]) + balanced_tree(parts[half:])


@EVERY_N
def test_all_reduce(n):
    results = ranks.call(CASES + "all_reduce_everything", n)
    assert set(results[0]) >= {(size, dtype, "sum", window) for size in SIZES for dtype in DTYPES
                               for window in (True, False)}
    for key, result in results[0].items():
        size, dtype, op, _ = key
        assert result.dtype == dtype
        for other in results[1:]:
            assert other[key].tobytes() == result.tobytes(), f"{key}: ranks differ"
        parts = held(n, size, dtype)
        if op in ("sum", "mean"):
            assert close_to_sum(result, parts, 1 / n if op == "mean" else 1), key
        else:
            assert (result == (np.max if op == "max" else np.min)(parts, axis=0)).all(), key


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_exact_sum_is_the_balanced_tree_to_the_last_bit(n):
    for results in ranks.call(CASES + "exact_bits", n, env=MPICH_RING):
        for (size, dtype, window), result in results.items():
            tree = balanced_tree(held(n, size, dtype))
            assert result.tobytes() == tree.tobytes(), (size, dtype, window)
    if n >= 4:   # the data can tell the tree from a sum in rank order
        parts = held(n, 4097, "f4")
        assert balanced_tree(parts).tobytes() != sum(parts[1:], parts[0]).tobytes()


def test_view_of_a_window_array_is_reduced_in_the_window_and_nothing_else():
    n = 3
    for rank, (whole, in_window) in enumerate(ranks.call(CASES + "views", n)):
        assert in_window
        parts = [part.reshape(3, 1000) for part in held(n, 3000, "f4")]
        assert close_to_sum(whole[1], [part[1] for part in parts])
        assert (whole[[0, 2]] == parts[rank][[0, 2]]).all()


@pytest.mark.parametrize("n", [2, 3])
def test_works_outstanding_and_waited_for_in_another_order(n):
    values = ranks.call(CASES + "outstanding", n)
    assert values[0][1], "posting in the window must not touch the data"
    for arrays, _ in values:
        for x in arrays:
            assert close_to_sum(x, held(n, x.size, "f8"))
    for arrays in ranks.call(CASES + "polling", n):
        for x in arrays:
            assert close_to_sum(x, held(n, x.size, "f8"))


@EVERY_N
def test_data_movers(n):
    for rank, results in enumerate(ranks.call(CASES + "data_movers", n)):
        whole = held(n, 100 * n, "f4")
        mine = [part.reshape(n, 100)[rank] for part in whole]
        gathered = np.array(held(n, 100, "f4"))
        for window in (True, False):
            assert close_to_sum(results["reduce_scatter", window], mine)
            assert close_to_sum(results["reduce_scatter into itself", window], mine, 1 / n)
            assert (results["all_gather", window] == gathered).all()
            assert (results["all_gather from itself", window] == gathered).all()
        sent = [part.reshape(n, 2, 3) for part in held(n, 6 * n, "f8")]
        assert (results["all_to_all"] == np.concatenate([part[rank] for part in sent])).all()
        expected = []
        for i in range(n):
            rows = data_of(i, 3 * sum(i + j for j in range(n)), "f8").reshape(-1, 3)
            first = sum(i + j for j in range(rank))
            expected.append(rows[first:first + i + rank])
        assert (results["all_to_all with counts"] == np.concatenate(expected)).all()
        for src in range(n):
            assert (results["broadcast", src] == data_of(src, 9, "f2")).all()


@pytest.mark.parametrize("n", [2, 3])
def test_messages(n):
    for rank, arrived in enumerate(ranks.call(CASES + "messages", n)):
        for x in arrived:
            assert (x == data_of((rank - 1) % n, x.size, "f8")).all()


@pytest.mark.parametrize("n", [1, 3])
def test_objects(n):
    everybody = [{"rank": rank, "text": "ü" * 1000 * rank} for rank in range(n)]
    for rank, (sent, gathered, all_gathered, nothing) in enumerate(ranks.call(CASES + "objects", n)):
        assert sent == everybody[-1]
        assert gathered == (everybody if rank == n - 1 else None)
        assert all_gathered == everybody
        assert nothing == [None] * n


def test_groups():
    values = ranks.call(CASES + "groups", 4)
    assert values == [
        (1, 2, "half", [2, 0], [2, 0], 101.0, None),
        (1, 2, "half", [3, 1], [3, 1], 1010.0, ("world/7", [1, 2, 3])),
        (0, 2, "half", [2, 0], [2, 0], 101.0, ("world/7", [1, 2, 3])),
        (0, 2, "half", [3, 1], [3, 1], 1010.0, ("world/7", [1, 2, 3])),
    ]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_in_the_ledger_are_the_formulas(n):
    values = ranks.call(CASES + "counted", n)
    M, odd = 16 * n * 100 * 4, 100003 * 4
    for rank, counts in enumerate(values):
        for name, (calls, _, keys) in counts.items():
            assert calls == (1 if name != "send" or rank < 2 else 0)
            assert all(axis == "world" and name.startswith((op, "send")) for axis, op in keys)
        sent = {name: bytes_sent for name, (_, bytes_sent, _) in counts.items()}
        for name in ("all_reduce window", "all_reduce plain", "all_reduce posted"):
            assert sent[name] == 2 * (n - 1) * M // n, name
        for name in ("reduce_scatter", "all_gather", "all_to_all"):
            assert sent[name] == (n - 1) * M // n, name
        assert sent["broadcast"] == (M if rank == 1 else 0)
        assert sent["send"] == (M if rank == 0 else 0)
        assert sent["barrier"] == 0
        if n != 3:
            assert sent["all_reduce exact plain"] == M * {2: 1, 4: 2}[n]
    for name in ("all_reduce odd window", "all_reduce odd plain"):
        assert sum(counts[name][1] for counts in values) == 2 * (n - 1) * odd
        assert all(abs(counts[name][1] - 2 * (n - 1) * odd / n) <= 2 * (n - 1) * 64 * n for counts in values)


def test_hooks_see_every_operation():
    for seen in ranks.call(CASES + "hooked", 2):
        assert seen == [
            ("before", "all_reduce", 10, None), ("after", "all_reduce", 10, None),
            ("before", "all_reduce", 11, None),
            ("before", "broadcast", 12, 1), ("after", "broadcast", 12, 1),
            ("after", "all_reduce", 11, None),
            ("before", "barrier", None, None), ("after", "barrier", None, None),
            ("before", "barrier", None, None), ("after", "barrier", None, None)]


def test_window_memory():
    for facts, segments, alive, after, mapped, dirty in ranks.call(CASES + "memory", 2):
        assert facts == [((3, 5), "<f4", 0, True, True), ((7,), "<f8", 0, True, True), ((), "<i8", 0, True, True),
                         ((0, 4), "<f4", 0, True, True)]
        assert (segments, alive, after) == (303, 4, 3)
        assert mapped <= 6   # three arrays, the window's own page, the guard's, and one to spare
        assert not dirty


def test_plain_memory_where_the_window_has_none():
    assert ranks.call(CASES + "without_memory", 2) == [(False, 3.0)] * 2


def test_memory_of_one_rank_is_aligned_too():
    for shape, dtype in ((1, "i1"), ((3, 5), "f4"), ((), "f8"), ((2, 0), "f4")):
        arrays = [aligned_zeros(shape, dtype) for _ in range(20)]   # all alive, so that they lie in different places
        assert all(x.shape == np.empty(shape).shape and x.dtype == dtype and not x.any() for x in arrays)
        assert all(x.ctypes.data % 64 == 0 for x in arrays if x.size)
