"""Remote calls: what comes out is what the function gives, whoever calls whom; what goes wrong says where."""

import re
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks
from tests.crews import crews, threads

CASES = "tests.parallel.rpc_cases:"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_ranks_call_each_other_at_once(n):
    for rank, seen in enumerate(crews.call(CASES + "calls", n, env=threads(n))):
        after = (rank + 1) % n
        assert seen.pop("next") == (after, (1,), {"two": 2})
        assert seen.pop("all") == [(to, (to,), {}) for to in range(n)]
        assert seen.pop("nested") == [after, rank] * 3
        # not those in which the call was waited for
        assert seen.pop("modes") == ((True, False, None), (False, True, "refuse"))
        assert seen.pop("large") == (1 << 19) * (rank + 1)
        assert len(seen) == 7 and all(all(checks) for checks in seen.values()), seen


@pytest.mark.parametrize("n", [1, 3])
def test_objects_that_another_rank_keeps(n):
    seen, *others = crews.call(CASES + "objects", n, env=threads(n))
    assert others == [{}] * (n - 1)
    assert seen["owner"] == (n - 1, n == 1)
    assert seen["add"] == [11, 13] and seen["by another"] == [113 + 100 * k for k in range(n)]
    assert seen["to_here"] == 13 + 100 * n
    assert seen["late"] == "late" and "a callback" in seen["callback"]
    assert seen["kept"] == 1 and ("can't start at -1" if n == 1 else "isn't its owner") in seen["bad here"]
    assert seen["snapshots"] == (2.0, 1.0)
    assert seen["not yet"] is False and seen["later"] == "then"
    assert "LookupError" in seen["never"] and "nothing came" in seen["never"]
    assert seen["replaced"] == seen["forgotten"]
    assert ("waits for what it must do itself: set the Future" in seen["alone"]) if n == 1 else ("alone" not in seen)
    assert seen["forgotten"].startswith("RuntimeError: the called function has given a Future that nobody has set, ")
    assert seen["bad"].startswith("ValueError: a counter can't start at -1")
    assert ("isn't its owner" if n > 1 else "keeps nothing under 'nothing'") in seen["not here"]
    assert "only be pickled by the Rpc" in seen["pickled"] and "set_result" in seen["waits"]
    assert "set twice" in seen["twice"]


@pytest.mark.parametrize("n", [1, 2])
def test_what_goes_wrong_there_is_raised_here(n):
    for rank, seen in enumerate(crews.call(CASES + "errors", n, env=threads(n))):
        after = (rank + 1) % n
        kind, text, notes = seen["raises"]
        assert kind == "KeyError" and "nothing of the kind" in text
        assert notes.startswith(f"It was raised on rank {after}:\nTraceback")
        assert "in refuse\n    raise KeyError" in notes
        assert seen["odd"][:2] == ("RuntimeError", "Odd: 1 and 2") and "in raise_odd" in seen["odd"][2]
        assert seen["a lambda"][0] == "TypeError" and "top of a module" in seen["a lambda"][1]
        assert "lambda" in seen["gives a lambda"][1] and f"on rank {after}" in seen["gives a lambda"][2]
        assert seen["no such rank"][0] == "ValueError" and f"to={n} is no rank" in seen["no such rank"][1]
        assert seen["unread"] == seen["still unread"] == ("KeyError", "'to be read'", seen["unread"][2])
        assert "unpickling" in seen["unread"][2] and "handed on" in seen["handed on"][1]
        assert seen["no such owner"][0] == "ValueError" and f"owner={n} is no rank" in seen["no such owner"][1]
        assert seen["no tuple"][0] == "TypeError" and "args is a ndarray" in seen["no tuple"][1]
        assert seen["of another"][0] == "TypeError" and "another Rpc ('other')" in seen["of another"][1]
        assert seen["deep"][0] == "RuntimeError" and "50 calls already" in seen["deep"][1]
        assert seen["then"][0] == seen["a second end"][0] == "nothing" and seen["freed"]
        assert seen["at the end"][:2] == ("KeyError", "'lost'")
        assert "after shutdown()" in seen["after the end"][1]
        assert seen["a block after the end"][:2] == ("KeyError", "'a block after the end'")


def test_a_rank_that_computes_may_serve_now_and_then():
    (said, looks, value), (served, then) = crews.call(CASES + "waits", 2)
    assert "rank 1 hasn't answered within 0.05 s" in said and looks < 1000 and value[0] == 1
    assert served == 1 and then == 0


def test_shutdown_waits_for_calls_that_served_functions_make():
    assert crews.call(CASES + "forwarded", 3) == [[], [9, 7, 5, 3, 1], [8, 6, 4, 2, 0]]


def test_who_leaves_a_block_by_an_error_tells_the_others():
    told, raised, other = crews.call(CASES + "abandoned", 3)
    assert raised == ("KeyError", "'to go on'") and told == other and told[0] == "RuntimeError"
    assert told[1].startswith("rank 1 has left 'rpc' by an error:\nTraceback") and "in refuse" in told[1]


def test_arrays_travel_as_they_are():
    (sent, short), (answered, _) = crews.call(CASES + "traffic", 2)
    assert sent["rpc", "send"] == answered["rpc", "send"] == 80_000 and short == 4096       # from 4 KiB on
    assert 800 < sent["rpc", "envelope"] < 1800 and answered["rpc", "envelope"] < 600


LEAVES = """
import sys
from minitorch_dist import comm
from minitorch_dist.parallel.servers.rpc import Rpc
def leave():
    sys.exit()
rpc = Rpc(comm.world())
if rpc.rank == 0:
    future = rpc.rpc_async(1, leave)        # it ends where it waits for calls
    for look in (future.is_completed, lambda: future.wait(timeout=0.01)):
        while True:
            try:
                look()
            except TimeoutError:
                pass
            except RuntimeError as error:
                print(error)
                break
    future.wait()
rpc.shutdown()
"""


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_who_waits_for_a_rank_that_has_left_ends_with_a_message(tmp_path, nodes):
    (tmp_path / "program.py").write_text(LEAVES)
    run = ranks.launch([tmp_path / "program.py"], 2, limit=20,
                       env={"PYTHONPATH": str(ROOT), "MINITORCH_NODES": nodes})
    assert not run.timed_out and run.returncode not in (0, None) and run.seconds < 10, run.report()
    assert run.stdout[0].count("looks in recv_any() on 'rpc' for rank 1, which has left the program") == 2, run.report()
    assert re.search(r"\[rank 0 of 2\] waits in recv_any\(\) on 'rpc' for rank 1, which has left(.|\n)*"
                     r"future.wait\(\)", run.stderr[0]), run.report()
