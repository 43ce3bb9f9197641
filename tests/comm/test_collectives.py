"""Every collective against what NumPy makes of the data that each rank is known to hold, on one node and on several."""

import os
import time

import numpy as np
import pytest

from minitorch_dist.comm import Communicator
from minitorch_dist.comm.local import LocalEngine, aligned_zeros
from minitorch_dist.testing import ranks
from tests.crews import crews

from .cases import DTYPES, SIZES, data_of, narrow

CASES = "tests.comm.cases:"
MPICH_RING = {   # sums in an order that isn't the tree's; MPICH's usual one happens to be
    "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring", "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM": "tsp_ring",
    "MPIR_CVAR_DEVICE_COLLECTIVES": "none"}
EVERYWHERE = pytest.mark.parametrize("n, nodes", [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (4, 2)])
SEVERAL = pytest.mark.parametrize("n, nodes", [(2, 1), (3, 1), (3, 2), (4, 2)])


def on(n, nodes, case, env=None):
    """What the case gives on n ranks that pretend to live on so many nodes."""
    return crews.call(CASES + case, n, env={"MINITORCH_NODES": str(nodes)} | (env or {}))


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


@EVERYWHERE
def test_sums_of_narrow_integers_wrap(n, nodes):
    """As NumPy's do. Open MPI's own saturate, on some processors and lengths."""
    for rank, results in enumerate(on(n, nodes, "narrow_sums")):
        for (dtype, what, *how), result in results.items():
            size = result.size * (n if what == "reduce_scatter" else 1)
            parts = [narrow(r, size, dtype) for r in range(n)]
            total = np.sum(parts, axis=0, dtype=dtype)
            share = slice(rank * result.size, (rank + 1) * result.size)
            expected = {"all_reduce": total, "reduce": parts[rank] if rank else total,
                        "reduce_scatter": total[share]}[what]
            np.testing.assert_array_equal(result, expected, err_msg=f"rank {rank}: {dtype} {what} {how}")


@EVERYWHERE
def test_all_reduce(n, nodes):
    results = on(n, nodes, "all_reduce_everything")
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


@pytest.mark.parametrize("n, nodes", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 3), (8, 4)])
def test_exact_sum_is_the_balanced_tree_to_the_last_bit(n, nodes):
    for results in on(n, nodes, "exact_bits", MPICH_RING):
        for (size, dtype, window), result in results.items():
            tree = balanced_tree(held(n, size, dtype))
            assert result.tobytes() == tree.tobytes(), (size, dtype, window)
    if n >= 4:   # the data can tell the tree from a sum in rank order
        parts = held(n, 4097, "f4")
        assert balanced_tree(parts).tobytes() != sum(parts[1:], parts[0]).tobytes()


@pytest.mark.parametrize("n, nodes", [(2, 1), (4, 2)])
def test_an_exact_reduce_scatter_comes_to_its_end_while_others_do_something_else(n, nodes):
    for part, of_whole in on(n, nodes, "asked_alone"):
        np.testing.assert_array_equal(part, of_whole)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (2, 3, 0, 1)])
def test_exact_sum_where_the_nodes_are_no_blocks_in_rank_order(order):
    """Two nodes, (0, 1) and (2, 3), of a world that is numbered anew: rank i is the world's rank order[i]."""
    for ranks_here, result, nearly in crews.call(CASES + "exact_in_order", 4, (order,), env={"MINITORCH_NODES": "2"}):
        assert ranks_here == list(order)
        parts = [data_of(rank, 4097, "f4") for rank in order]
        assert result.tobytes() == balanced_tree(parts).tobytes()
        assert close_to_sum(nearly, parts)


@pytest.mark.parametrize("nodes", [1, 2])
def test_view_of_a_window_array_is_reduced_in_the_window_and_nothing_else(nodes):
    n = 3
    for rank, (whole, in_window) in enumerate(on(n, nodes, "views")):
        assert in_window
        parts = [part.reshape(3, 1000) for part in held(n, 3000, "f4")]
        assert close_to_sum(whole[1], [part[1] for part in parts])
        assert (whole[[0, 2]] == parts[rank][[0, 2]]).all()


@SEVERAL
def test_works_outstanding_and_waited_for_in_another_order(n, nodes):
    values = on(n, nodes, "outstanding")
    assert values[0][1], "posting in the window must not touch the data"
    for arrays, _ in values:
        for x in arrays:
            assert close_to_sum(x, held(n, x.size, "f8"))
    for arrays in on(n, nodes, "polling"):
        for x in arrays:
            assert close_to_sum(x, held(n, x.size, "f8"))


@pytest.mark.parametrize("n, nodes", [(2, 1), (3, 1), (3, 2)])
def test_a_wait_that_is_broken_off_is_no_part_left_out(n, nodes):
    """Rank 0 does its part when it comes to the next call."""
    sums = [{n * (n + 1) / 2}, {10 * n * (n + 1) / 2}]
    first, *others = ranks.call(CASES + "interrupted", n, limit=20, env={"MINITORCH_NODES": str(nodes)})
    assert first == ["broken off", *sums] * 2 and others == [sums * 2] * (n - 1)


@EVERYWHERE
def test_a_look_at_where_a_rank_is_keeps_no_array_alive(n, nodes):
    """The watchdog looks from a thread of its own, which may be put to sleep while it holds what it has seen."""
    for ops, alive in on(n, nodes, "looked_at"):
        assert ops >= {"all_reduce", "broadcast", "reduce_scatter", "all_gather"}
        assert not alive


@EVERYWHERE
def test_data_movers(n, nodes):
    for rank, results in enumerate(on(n, nodes, "data_movers")):
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
        for how in ("", ", asked about"):
            assert (results[f"all_to_all with counts{how}"] == np.concatenate(expected)).all()
        for src in range(n):
            assert (results["broadcast", src] == data_of(src, 9, "f2")).all()


@pytest.mark.parametrize("n", [2, 3])
def test_messages(n):
    for rank, arrived in enumerate(crews.call(CASES + "messages", n)):
        for x in arrived:
            assert (x == data_of((rank - 1) % n, x.size, "f8")).all()


@pytest.mark.parametrize("n", [1, 3])
def test_objects(n):
    everybody = [{"rank": rank, "text": "ü" * 1000 * rank} for rank in range(n)]
    for rank, (sent, gathered, all_gathered, nothing) in enumerate(crews.call(CASES + "objects", n)):
        assert sent == everybody[-1]
        assert gathered == (everybody if rank == n - 1 else None)
        assert all_gathered == everybody
        assert nothing == [None] * n


@pytest.mark.parametrize("nodes", [1, 2])
def test_groups(nodes):
    values = on(4, nodes, "groups")
    assert values == [
        (1, 2, "half", [2, 0], [2, 0], 101.0, None),
        (1, 2, "half", [3, 1], [3, 1], 1010.0, ("world/7", [1, 2, 3])),
        (0, 2, "half", [2, 0], [2, 0], 101.0, ("world/7", [1, 2, 3])),
        (0, 2, "half", [3, 1], [3, 1], 1010.0, ("world/7", [1, 2, 3])),
    ]


def test_groups_of_a_rank_alone():
    alone = Communicator(LocalEngine(), "alone")
    assert alone.split(None) is None and (alone.split(7).name, alone.split(7).size) == ("alone/7", 1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_in_the_ledger_are_the_formulas(n):
    values = crews.call(CASES + "counted", n)
    M, odd = 16 * n * 100 * 4, 100003 * 4
    for rank, counts in enumerate(values):
        for name, (calls, _, between, keys) in counts.items():
            assert between == 0
            assert calls == (1 if rank in {"send": (0, 1), "send across": (0, n - 1)}.get(name, (rank,)) else 0)
            assert all(axis == "world" and name.startswith((op, "send")) for axis, op in keys)
        sent = {name: bytes_sent for name, (_, bytes_sent, _, _) in counts.items()}
        for name in ("all_reduce window", "all_reduce plain", "all_reduce posted"):
            assert sent[name] == 2 * (n - 1) * M // n, name
        for name in ("reduce_scatter", "all_gather", "all_to_all"):
            assert sent[name] == (n - 1) * M // n, name
        assert sent["broadcast"] == (M if rank == 1 else 0)
        assert sent["scatter"] == ((n - 1) * M // n if rank == 1 else 0)
        assert (sent["reduce"], sent["gather"]) == ((0, 0) if rank == 1 else (M, M // n))
        assert sent["send"] == (M if rank == 0 else 0)
        assert sent["barrier"] == 0
        if n != 3:
            assert sent["all_reduce exact plain"] == M * {2: 1, 4: 2}[n]
    for name in ("all_reduce odd window", "all_reduce odd plain"):
        assert sum(counts[name][1] for counts in values) == 2 * (n - 1) * odd
        assert all(abs(counts[name][1] - 2 * (n - 1) * odd / n) <= 2 * (n - 1) * 64 * n for counts in values)


def test_bytes_between_nodes():
    """All bytes are a ring's, in sum; between K nodes of n ranks go those of K rings of one rank per node."""
    n, M, odd = 4, 16 * 4 * 100 * 4, 100003 * 4
    values = on(n, 2, "counted")
    for rank, counts in enumerate(values):
        sent = {name: (bytes_sent, between) for name, (_, bytes_sent, between, _) in counts.items()}
        assert sent["all_reduce window"] == (2 * 3 * M // 4, M // 2)     # one of two lanes sends 2 · 1/2 of half of M
        assert sent["all_reduce plain"] == sent["all_reduce posted"] == (2 * 3 * M // 4, 0)     # as MPI likes
        assert sent["reduce_scatter window"] == sent["all_gather"] == (3 * M // 4, M // 4)
        assert sent["reduce_scatter"] == (3 * M // 4, 0)
        assert sent["all_reduce exact plain"] == (2 * M, 0)
        assert sent["send"] == (M if rank == 0 else 0, 0)
        assert sent["send across"] == (M if rank == 0 else 0, M if rank == 0 else 0)
    assert sum(counts["all_reduce odd window"][1] for counts in values) == 2 * 3 * odd
    assert sum(counts["all_reduce odd window"][2] for counts in values) == 2 * 1 * odd
    halves = 4 * (100003 // 2), 4 * (100003 - 100003 // 2)     # ranks 0 and 2 are the one lane of (0, 1) and (2)
    assert [counts["all_reduce odd window"][1:3] for counts in on(3, 2, "counted")] == [
        (2 * odd + 2 * halves[0], 2 * halves[0]), (0, 0), (2 * halves[1], 2 * halves[1])]


def test_hooks_see_every_operation():
    for seen in crews.call(CASES + "hooked", 2):
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
        assert 4 <= mapped <= 6   # three arrays, the window's own page, the guard's, and one to spare
        assert not dirty


@pytest.mark.parametrize("n, nodes, total", [(2, 1, 3.0), (3, 2, 6.0)])
def test_plain_memory_where_the_window_has_none(n, nodes, total):
    assert on(n, nodes, "without_memory") == [(False, total)] * n


@pytest.mark.parametrize("why", ["not on this system", "processes aren't seen", "another process has the number"])
def test_a_window_where_memory_without_a_name_cant_be_shared(why):
    for in_window, total, files in ranks.call(CASES + "memory_with_a_name", 2, args=(why,)):
        assert in_window and total == 3 and len(files) == 1 and not os.path.exists(files[0])


@pytest.mark.parametrize("nodes", ["two", "0", "-1"])
def test_a_wrong_number_of_pretended_nodes(nodes):
    with pytest.raises(AssertionError, match=f"MINITORCH_NODES='{nodes}' must be a number"):
        ranks.call(CASES + "views", 2, env={"MINITORCH_NODES": nodes})


def test_memory_of_one_rank_is_aligned_too():
    for shape, dtype in ((1, "i1"), ((3, 5), "f4"), ((), "f8"), ((2, 0), "f4")):
        arrays = [aligned_zeros(shape, dtype) for _ in range(20)]   # all alive, so that they lie in different places
        assert all(x.shape == np.empty(shape).shape and x.dtype == dtype and not x.any() for x in arrays)
        assert all(x.ctypes.data % 64 == 0 for x in arrays if x.size)


def test_a_wait_for_a_message_lasts_as_long_as_it_may():
    alone = Communicator(LocalEngine(), "alone")
    for timeout in (0, 0.05):
        begin = time.monotonic()
        assert alone.recv_any(timeout) is None and timeout <= time.monotonic() - begin < timeout + 1
