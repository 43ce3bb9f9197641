"""The mismatch check finds every difference on every rank, and nothing else; the rooted and repeated collectives."""

import inspect
import os
import re

import numpy as np
import pytest

from minitorch_dist.comm import where
from minitorch_dist.comm.mismatch import fingerprint
from tests.crews import crews

from .cases import data_of
from .test_collectives import close_to_sum

CASES = "tests.comm.reading_cases:"

# name: what ranks 0 and 1 have called, and rank 2
CALLED = {
    "shape": ("all_reduce(float32[8], sum)", "all_reduce(float32[9], sum)"),
    "same size": ("all_reduce(float32[8], sum)", "all_reduce(float32[2, 4], sum)"),
    "dtype": ("all_reduce(float32[8], sum)", "all_reduce(int32[8], sum)"),
    "reduction": ("all_reduce(float32[8], sum)", "all_reduce(float32[8], mean)"),
    "algorithm": ("all_reduce(float32[8], sum)", "all_reduce(float32[8], sum by ring)"),
    "root": ("broadcast(float32[8], src=0)", "broadcast(float32[8], src=1)"),
    "operation": ("all_reduce(float32[8], sum)", "broadcast(float32[8], src=0)"),
    "gather": ("all_gather(float32[8])", "gather(float32[8], dst=0)"),
    "barrier": ("reduce_scatter(float32[24], sum)", "barrier()"),
    "empty": ("empty(float32[3])", "empty(float32[4])"),
    "messages": ("ring(float32[8], zigzag)", "ring(float32[9], zigzag)"),
    "said in words": ("ring(float32[8], zigzag)", "ring(float32[8], contiguous)"),
    "named": ("all_to_all(float32[6], zigzag)", "all_to_all(float32[6], contiguous)"),
    "split": ("split()", "all_reduce(float32[8], sum)"),
    "posted": ("all_reduce(float32[8], sum, posted)", "all_reduce(float32[9], sum, posted)"),
    "posted against not": ("all_reduce(float32[8], sum, posted)", "all_reduce(float32[8], sum)"),
    "third of three": ("barrier()", "all_reduce(float32[8], sum)"),
}


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_every_rank_raises_and_names_what_each_has_called(nodes):
    values = crews.call(CASES + "mismatches", 3, env={"MINITORCH_NODES": str(nodes)})
    for messages in values:
        assert set(messages) == set(CALLED)
        for name, (usual, odd) in CALLED.items():
            message = messages[name]
            if nodes == 3 and name == "empty":
                assert message is None      # plain memory: nothing to agree on
                continue
            assert message is not None, f"{name}: not noticed"
            assert f"'part' don't agree on their collective number {3 if name == 'third of three' else 1}" in message
            lines = message.splitlines()
            assert [line.split("  ")[1] for line in lines[2:5]] == ["0", "1", "2"], message
            assert all(f" {usual} " in line for line in lines[2:4]) and f" {odd} " in lines[4], message
            assert all("reading_cases.py:" in line and "in <lambda>" in line for line in lines[2:5]), message


@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (3, 3)])
def test_rows_that_are_sent_are_those_that_are_expected(n, nodes):
    for messages in crews.call(CASES + "other_counts", n, env={"MINITORCH_NODES": str(nodes)}):
        assert all("rank 0 sends rank 1 1 rows, which has room for 2: send_counts" in message
                   for message in messages[:3])
        assert len(messages) == 5 and "all_reduce" in messages[3] == messages[4]


def test_a_call_from_no_file_of_the_users_is_the_innermost_s_outside(monkeypatch):
    monkeypatch.setattr(where, "users", os.path.dirname(os.__file__) + "/nowhere/")
    assert where.caller()[::2] == (__file__, "test_a_call_from_no_file_of_the_users_is_the_innermost_s_outside")
    caller_of_tests = inspect.getfile(pytest.Function)
    monkeypatch.setattr(where, "users", caller_of_tests)
    assert where.caller()[0] == caller_of_tests


def test_a_file_beside_the_framework_is_the_users():
    path, found = where.COMM.replace(f"{os.sep}comm", "_mine.py"), {"caller": where.caller}
    exec(compile("def called():\n    return caller()", path, "exec"), found)
    assert found["called"]() == (path, 2, "called")


@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (4, 2)])
def test_every_rank_must_pass_the_same_piece_of_a_shared_array(n, nodes):
    for messages in crews.call(CASES + "other_pieces", n, env={"MINITORCH_NODES": str(nodes)}):
        for name, message in messages.items():
            assert message is not None, f"{name}: not noticed"
            assert "collective number 3:" in message and "different pieces of the shared window" in message
            assert message.count("in <lambda>") == n


@pytest.mark.parametrize("n, nodes, one_by_one", [(2, 1, True), (3, 1, True), (3, 1, False), (3, 2, True),
                                                  (4, 2, False)])
def test_posting_far_ahead_is_no_mismatch(n, nodes, one_by_one):
    total = n * (n + 1) / 2
    for values in crews.call(CASES + "many_posted", n, (one_by_one,), env={"MINITORCH_NODES": str(nodes)}):
        assert values == [total] * 150


@pytest.mark.parametrize("odd", [2, 10, 70, 199])
def test_a_mismatch_among_many_that_are_posted_is_found(odd):
    for count, message in crews.call(CASES + "posted_ahead", 2, (odd,)):
        assert count == 198 and f"collective number {odd}:" in message
        assert re.search(r"0 +all_reduce\(float32\[4\], sum\).*\n +1 +all_reduce\(float32\[4\], max\)", message)


def test_no_more_are_posted_than_can_be_compared():
    for count, message in crews.call(CASES + "posted_ahead", 2, (None,)):
        assert count == 1024 + 10
        assert "all_reduce on 'world/0': 1,024 collectives are posted, and none of them was waited for" in message


@pytest.mark.parametrize("n, nodes", [(2, 1), (3, 2)])
def test_the_check_can_be_switched_off(n, nodes):
    values = crews.call(CASES + "unchecked", n, env={"MINITORCH_CHECK": "0", "MINITORCH_NODES": str(nodes)})
    assert values == [(n ** 3, n ** 3)] * n


def test_fingerprints_are_the_same_in_every_process_and_differ_between_calls():
    assert fingerprint(("barrier", None, None, None)) == fingerprint(("barrier", None, None, None))
    keys = [("all_reduce", np.dtype(dtype), shape, op) for dtype in ("f4", "f8", "i4") for op in ("sum", "max")
            for shape in ((8,), (9,), (2, 4), (8, 1))]
    assert len({fingerprint(key) for key in keys}) == len(keys)
    assert all(0 <= fingerprint(key) < 1 << 48 for key in keys)


# ---------------------------------------------------------------- rooted and repeated

@pytest.mark.parametrize("n, nodes", [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2)])
def test_rooted_collectives(n, nodes):
    for rank, results in enumerate(crews.call(CASES + "rooted", n, env={"MINITORCH_NODES": str(nodes)})):
        for root in range(n):
            for window in (True, False):
                parts = [data_of(other, 1003, "f4") for other in range(n)]
                for op in ("sum", "mean", "max", "min"):
                    result = results["reduce", root, window, op]
                    if rank != root:
                        assert (result == parts[rank]).all()
                    elif op in ("sum", "mean"):
                        assert close_to_sum(result, parts, 1 / n if op == "mean" else 1)
                    else:
                        assert (result == (np.max if op == "max" else np.min)(parts, axis=0)).all()
            everything = [data_of(other, 50, "f8") for other in range(n)]
            if rank == root:
                assert (results["gather", root] == everything).all()
                assert (results["gather from itself", root] == everything).all()
            else:
                assert results["gather", root] is None
            mine = data_of(root, 50 * n, "f8").reshape(n, 50)[rank]
            assert (results["scatter", root] == mine).all()
            assert (results["scatter into itself", root] == mine).all()
            assert results["scatter_object", root] == {"to": rank, "text": "ü" * 100 * rank}


def test_bytes_of_the_rooted_collectives():
    n, share = 3, 16 * 4
    for rank, sent in enumerate(crews.call(CASES + "rooted_bytes", n)):
        assert sent == {"reduce": 0 if rank == 1 else n * share, "gather": 0 if rank == 1 else share,
                        "scatter": (n - 1) * share if rank == 1 else 0}


@pytest.mark.parametrize("n, nodes", [(2, 1), (3, 1), (3, 2)])
def test_arrays_reduced_again_and_again(n, nodes):
    for facts, known, after in crews.call(CASES + "repeated", n, env={"MINITORCH_NODES": str(nodes)}):
        for result, expected in facts:
            np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)
        assert known == (8 if nodes == 1 else 0) and after == 0    # three ops of two arrays, and two posted ones


@pytest.mark.parametrize("n", [2, 4])
def test_what_one_rank_remembers_is_no_mismatch(n):
    for results, expected in crews.call(CASES + "remembered_by_one", n):
        assert results == [expected] * 11
