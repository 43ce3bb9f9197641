"""The algorithms for reading: their results, and every byte and step that they take, counted."""

import sys
from collections import defaultdict

import numpy as np
import pytest

from minitorch_dist.comm import Communicator, cost
from minitorch_dist.comm.algorithms import ALGORITHMS
from minitorch_dist.comm.local import LocalEngine
from minitorch_dist.testing import ranks
from tests.crews import crews

from .cases import data_of
from .test_collectives import close_to_sum

CASES = "tests.comm.reading_cases:"


def steps_taken(logs):
    """How many messages follow one another on the longest chain: a rank sends one and receives one at a time.

    Replays what the ranks have written down, each with a clock. A message arrives one step after its sender had come
    to sending it, and after the receiver was ready; `isend` takes no time of its own, for a receive goes with it.
    """
    clocks, places, sent = [0] * len(logs), [0] * len(logs), defaultdict(list)
    left = sum(map(len, logs))
    while left:
        before = left
        for rank, log in enumerate(logs):
            while places[rank] < len(log):
                what, peer = log[places[rank]]
                if what == "recv":
                    if not sent[peer, rank]:
                        break
                    clocks[rank] = max(clocks[rank], sent[peer, rank].pop(0)) + 1
                else:
                    sent[rank, peer].append(clocks[rank])
                    clocks[rank] += what == "send"
                places[rank] += 1
                left -= 1
        assert left < before, "messages that were never sent are received"
    return max(clocks)


# What the textbooks say of N a power of two, and of every rank where n divides: written down apart from the table.
STEPS = {"ring": {2: 2, 4: 6, 8: 14}, "recursive_doubling": {2: 1, 4: 2, 8: 3}, "halving_doubling": {2: 2, 4: 4, 8: 6},
         "tree": {2: 2, 3: 4, 4: 4, 5: 6, 8: 6}}
SENT_BY_ALL = {"ring": lambda N, M: 2 * (N - 1) * M, "recursive_doubling": lambda N, M: N * int(np.log2(N)) * M,
               "halving_doubling": lambda N, M: 2 * (N - 1) * M, "tree": lambda N, M: 2 * (N - 1) * M}


@pytest.mark.parametrize("n", range(1, 9))
def test_results_steps_and_bytes(n):
    results = crews.call(CASES + "every_algorithm", n)
    for key, (result, _, _) in results[0].items():
        name, length, op, dtype = key
        parts = [data_of(rank, length, dtype) for rank in range(n)]
        for other in results[1:]:
            assert other[key][0].tobytes() == result.tobytes(), f"{key}: ranks differ"
        if op in ("sum", "mean"):
            assert close_to_sum(result, parts, 1 / n if op == "mean" else 1), key
        else:
            assert (result == (np.max if op == "max" else np.min)(parts, axis=0)).all(), key
        sent = [each[key][1] for each in results]
        itemsize = np.dtype(dtype).itemsize
        assert sent == [itemsize * ALGORITHMS[name].sent(n, rank, length) if n > 1 else 0 for rank in range(n)], key
        steps = steps_taken([each[key][2] for each in results])
        assert steps == ALGORITHMS[name].steps(n), key
        if n in (2, 4, 8):
            assert steps == STEPS[name][n]
            assert sum(sent) == SENT_BY_ALL[name](n, itemsize * length)


def test_ring_sends_the_fewest_bytes_and_doubling_takes_the_fewest_steps():
    for n in range(2, 9):
        worst = {name: max(algorithm.sent(n, rank, 840) for rank in range(n)) for name, algorithm in ALGORITHMS.items()}
        assert worst["ring"] == min(worst.values()) == 2 * (n - 1) * 840 // n
        steps = {name: algorithm.steps(n) for name, algorithm in ALGORITHMS.items()}
        assert steps["recursive_doubling"] == min(steps.values())


def test_the_environment_chooses():
    for name in ("ring", "tree", "mpi"):
        for algorithm, of_part, in_window, posted, result, messages, again in ranks.call(
                CASES + "chosen", 2, env={"MINITORCH_COMM": name}):
            assert (algorithm, of_part, in_window, result, again) == (name, name, False, 3.0, True)
            assert name == "mpi" or posted in (1.0, 2.0)      # it runs inside wait
            assert messages == {"ring": 2, "tree": 1, "mpi": 0}[name]
    assert ranks.call(CASES + "chosen", 2, env={"MINITORCH_COMM": "shared"})[0][2]


OWN = """
import numpy as np
calls = 0

def star(wire, x, combine):
    global calls
    calls += 1
    if wire.rank:
        wire.send(x, 0)
        wire.recv(x, 0)
        return
    theirs = np.empty_like(x)
    for other in range(1, wire.size):
        wire.recv(theirs, other)
        combine(x, theirs, out=x)
    for other in range(1, wire.size):
        wire.send(x, other)
"""


@pytest.mark.parametrize("n", [1, 3])
def test_a_function_of_ones_own(tmp_path, n):
    (tmp_path / "own.py").write_text(OWN)
    slot = f"{tmp_path}/own.py:star"
    for rank, (sums, means, of_part, in_window, sent, shown) in enumerate(
            ranks.call(CASES + "own_algorithm", n, env={"MINITORCH_COMM": slot})):
        parts = [data_of(other, 35, "f8").reshape(5, 7) for other in range(n)]
        assert all(close_to_sum(result, parts) for result in sums) and len(sums) == 4
        assert close_to_sum(means, parts, 1 / n)
        assert of_part and not in_window
        assert sent == (0 if n == 1 else 35 * 8 * (n - 1 if rank == 0 else 1))
        assert shown is None or "all_reduce(float64[5], sum by star)" in shown and "sum by ring" in shown
        assert (shown is None) == (n == 1)


@pytest.mark.parametrize("slot, words", [("nowhere/own.py:star", "there is no file"),
                                         ("{}/own.py:star_", "has no function star_; it has star"),
                                         ("{}/own.py:calls", "calls is .*no function calls"),
                                         ("{}/own.py:np", "np is .*no function np"),
                                         ("{}/short.py:f", r"called as f\(wire, x, combine\)"),
                                         ("{}/builtin.py:f", r"called as f\(wire, x, combine\), .*no signature"),
                                         ("{}/own.txt:f", "own.txt is no Python file"),
                                         ("{}/oops.py:f", "importing .*oops.py raised NameError in line 3"),
                                         ("oops.py:f", "importing oops.py raised NameError in line 3")])
def test_a_slot_that_holds_no_function(tmp_path, monkeypatch, slot, words):
    monkeypatch.chdir(tmp_path)
    for name, text in {"own": OWN, "short": "def f(x): pass", "oops": "\n\noops", "builtin": "f = max"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own.txt").write_text(OWN)
    with pytest.raises(ValueError, match=words):
        Communicator(LocalEngine(), "alone", algorithm=slot.format(tmp_path))
    assert "oops" not in sys.modules        # half made


# ---------------------------------------------------------------- the cost model

def test_the_fit_finds_the_costs_that_made_the_times():
    costs = cost.Costs(3e-6, 4e-10, 1.5e-10)
    times = [(name, size, nbytes, cost.predict(name, size, nbytes, costs))
             for name in ALGORITHMS for size in (2, 4) for nbytes in (1 << 10, 1 << 16, 1 << 22)]
    np.testing.assert_allclose(cost.fit(times), costs, rtol=1e-6)
    slower = [(name, size, nbytes, t * (1.1 if i % 2 else 0.9)) for i, (name, size, nbytes, t) in enumerate(times)]
    found = cost.fit(slower)
    assert min(found) >= 0
    assert all(abs(cost.predict(name, size, nbytes, found) / t - 1) < 0.3 for name, size, nbytes, t in times)


def test_a_cost_that_would_be_negative_is_0_and_the_others_fit_best_without_it():
    times = [(name, size, nbytes, cost.predict(name, size, nbytes, cost.Costs(3e-6, 4e-10, -1e-10)))
             for name in ALGORITHMS for size in (2, 4) for nbytes in (1 << 10, 1 << 22)]
    found = cost.fit(times)
    rows = np.array([cost.terms(name, size, nbytes)[:2] / t for name, size, nbytes, t in times])
    np.testing.assert_allclose(found[:2], np.linalg.solve(rows.T @ rows, rows.sum(0)), rtol=1e-6)
    assert found.gamma == 0 < min(found[:2])


def test_predictions_by_hand():
    costs = cost.Costs(1.0, 0.01, 0.001)
    # 4 ranks, 1000 bytes: 6 steps of a quarter each, 3 quarters added up; 2 steps of everything, added up twice
    assert cost.predict("ring", 4, 1000, costs) == pytest.approx(6 + 15 + 0.75)
    assert cost.predict("recursive_doubling", 4, 1000, costs) == pytest.approx(2 + 20 + 2)
    assert cost.predict("recursive_doubling", 5, 1000, costs) == pytest.approx(4 + 40 + 3)
    assert cost.predict("tree", 5, 1000, costs) == pytest.approx(6 + 60 + 3)
    assert cost.fastest(8, 8, costs) == "recursive_doubling"
    assert cost.fastest(8, 1 << 20, costs) == "halving_doubling"
    assert cost.fastest(7, 1 << 20, costs) == "ring"


def test_too_few_measurements():
    with pytest.raises(ValueError, match="can't tell three costs apart"):
        cost.fit([("ring", 2, 1024, 1e-5)])
    two = [("tree", 4, 1024, 1e-5), ("ring", 4, 1 << 20, 1e-3)]
    # On one rank nothing costs anything; a ring of two adds up half of what it moves, however long the array is.
    for alike in ([("ring", 1, 1024, 1e-5)] * 5, [("ring", 2, 1024, 1e-5)] * 5, two, two * 3,
                  [("ring", 2, nbytes, 1e-5 + nbytes * 1e-9) for nbytes in (64, 1024, 1 << 20)]):
        with pytest.raises(ValueError, match=f"{len(alike)} measurements can't tell"):
            cost.fit(alike)
