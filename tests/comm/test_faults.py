"""Each fault is provoked, ends the job in seconds, with a status, a message and nothing left behind; what users see
then is docs/faults.md, written by

    python -m tests.comm.test_faults
"""

import glob
import inspect
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks

from ..quick import asked
from . import faulty

PROGRAM = Path(faulty.__file__)
DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
SECONDS = 10
ENVIRONMENT = {"MINITORCH_STALL_SECONDS": "1"}
AFTER_SECONDS = {"waits in another communicator": {"MINITORCH_STALL_SECONDS": "60"}}     # told after 5 s
WAITS = "waits in all_reduce(float32[10]) on 'world' for rank 1, which has left the program", "# the others wait here"
WRONG = "ValueError: the value is wrong", "in broken"
DIFFER = "MismatchError: the ranks of 'world' don't agree on their collective number"
CIRCLE = "wait for each other in a circle", "the job ends"
STALLED = "the stall limit of 1 s", "the job ends", "This rank waits in"

IN_MPI_INIT = "has waited 5 s (MINITORCH_STALL_SECONDS) for all ranks to call comm.world()", "in joins_the_others"

# fault: (status, None for any but 0; the ranks that speak; what each of them says)
FAULTS = {
    "raises before comm.world()": (1, {1}, ("Traceback", *WRONG)),
    "sys.exit(3) before comm.world()": (3, {1}, ("sys.exit(3) was called", "in sys_exit_3_before")),
    "os._exit(0) before comm.world()": (1, {1}, ("os._exit(0) was called", "in os__exit_0_before")),
    "leaves before comm.world()": (None, {0}, IN_MPI_INIT),
    "never comes to comm.world()": (None, {0}, IN_MPI_INIT),
    "raises": (1, {1}, ("Traceback", *WRONG)),
    "raises in a gradient hook": (1, {1}, WRONG),
    "raises in a backward rule": (1, {1}, WRONG),
    "raises in a thread": (1, {1}, WRONG),
    "raises while a work is outstanding": (1, {1}, WRONG),
    "sys.exit(3)": (3, {1}, ("sys.exit(3) was called", "in sys_exit_3")),
    "sys.exit(text)": (1, {1}, ("'no such data'", "in sys_exit_text")),
    "raise SystemExit(3), while the others compute": (3, {1}, ("SystemExit(3) was raised", "in raise_systemexit_3")),
    "sys.exit(0)": (1, {0}, WAITS),
    "os._exit(0)": (1, {1}, ("os._exit(0) was called", "in os__exit_0")),
    "os._exit(3)": (3, {1}, ("os._exit(3) was called", "in os__exit_3")),
    "runs out of data early": (1, {0}, (WAITS[0], "in the fourth batch rank 0 is alone")),
    "SIGKILL": (None, set(), ()),
    "SIGSEGV": (None, {1}, ("Segmentation fault", "in sigsegv")),
    "SIGTERM": (None, set(), ()),
    "KeyboardInterrupt": (130, set(), ()),
    "Ctrl-C while all ranks wait": (None, set(), ()),
    "another shape": (1, {0, 1}, (DIFFER, "0     all_reduce(float32[10], sum)", "1     all_reduce(float32[5], sum)",
                                  "in another_shape: world.all_reduce(x if")),
    "another dtype": (1, {0, 1}, (DIFFER, "0     all_reduce(float32[10], sum)", "1     all_reduce(float64[10], sum)")),
    "another op": (1, {0, 1}, (DIFFER, "0     all_reduce(float32[10], sum)", "1     all_reduce(float32[10], max)")),
    "another root": (1, {0, 1}, (DIFFER, "0     broadcast(float32[10], src=0)", "1     broadcast(float32[10], src=1)")),
    "another order": (1, {0, 1}, (DIFFER, "0     all_reduce(float32[10], sum)", "1     barrier()",
                                  "in another_order: world.all_reduce(x)", "in another_order: world.barrier()")),
    "another shape, posted": (1, {0, 1}, (DIFFER, "second = world.all_reduce(")),
    "another shape, in a part of the ranks": (1, {0, 1}, ("the ranks of 'pair' don't agree", "all_reduce(float32[5]")),
    "waits in another communicator": (1, {0, 1}, (*CIRCLE, "all_reduce(float32[10]) on 'dp' for rank 0, which hasn't")),
    "never comes: computes for ever": (1, {0, 1}, (STALLED[0], "is in no call of a communicator", "time.sleep(60)")),
    "never comes: waits for a message that nobody sends": (1, {0, 1}, STALLED),
}
SAID_BY_0 = {   # where the two ranks say different things, `FAULTS` has rank 1's
    "waits in another communicator": (*CIRCLE, "waits in"),
    "never comes: computes for ever": (*STALLED, "all_reduce(float32[10]) on 'world'", "# the others wait here"),
    "never comes: waits for a message that nobody sends": (*STALLED, "all_reduce(float32[10])"),
}
WITHOUT_PREFIX = {"SIGSEGV", "leaves before comm.world()", "never comes to comm.world()"}     # Python's own dumps
TWO_SIGNALS = {"never comes to comm.world()"}      # rank 0 ends by one, mpirun ends rank 1 by another, and tells either
PLAIN = ("raises", "SIGKILL", "runs out of data early", "another shape", "another order", "another shape, posted",
         "never comes: computes for ever", "Ctrl-C while all ranks wait")
FOUR = ("raises", "raise SystemExit(3), while the others compute", "runs out of data early", "another shape",
        "another shape, in a part of the ranks", "never comes: computes for ever")
TWO_NODES = "window on 2 nodes"
CASES = [*((fault, "window", 2) for fault in FAULTS), *((fault, "plain", 2) for fault in PLAIN),
         *((fault, place, 4) for place in ("window", TWO_NODES) for fault in FOUR)]
# In 4 ranks, all but rank 1 are like rank 0; the first to say why it can't go on ends the job.
FIRST_SPEAKS = {"runs out of data early"}


def provoke(case):
    fault, place, n = case
    nodes = {"MINITORCH_NODES": "2" if place == TWO_NODES else "1"}
    variables = ENVIRONMENT | AFTER_SECONDS.get(fault, {}) | nodes
    return ranks.launch([PROGRAM, fault, place.split()[0]], n, limit=2 * SECONDS, env=variables)


def shared_memory_files():
    return {path for kind in ("mpich_shm_*", "sm_segment.*", "minitorch_*") for path in glob.glob("/dev/shm/" + kind)}


@pytest.fixture(scope="module")
def runs(request):
    """{case: its Run} of those that are tested, three at a time, for most of them wait; under "left" the files they
    left behind."""
    before, tested = shared_memory_files(), asked(request, "fault", "place", "n")
    if any(getattr(item, "function", None) == test_the_document_shows_what_happens for item in request.session.items):
        tested = CASES
    with ThreadPoolExecutor(3) as pool:
        done = dict(zip(tested, pool.map(provoke, tested), strict=True))
    done["left"] = shared_memory_files() - before
    return done


OPEN_MPI_S_NOTICE = r"(?ms)^-{70,}\nMPI_ABORT was invoked on rank .*?^-{70,}$"


def spoken(run, rank):
    """The rank's lines, less what MPI itself and Python's end by sys.exit(text) say."""
    of_mpi = "Abort(", "MPI Error in NBC", "NBC_Progress: "
    text = re.sub(OPEN_MPI_S_NOTICE, "", run.stderr[rank])      # usually its launcher's
    return [line for line in text.splitlines()
            if not line.startswith(of_mpi) and line not in ("", "no such data")]


def test_every_fault_has_a_program():
    assert set(FAULTS) == set(faulty.FAULTS) - {"no fault"}


@pytest.mark.parametrize("fault, place, n", CASES)
def test_fault_ends_the_job_and_speaks(runs, fault, place, n):
    status, speakers, words = FAULTS[fault]
    run = runs[fault, place, n]
    assert not run.timed_out, run.report()
    assert run.returncode == status if status is not None else run.returncode != 0, run.report()
    if 'did not call "init" before exiting' in run.launcher_stderr:     # Open MPI's has noticed by itself
        speakers = set()
    if n == 4 and speakers == {0, 1} and "part" not in fault:
        speakers = {0, 1, 2, 3}
    if n == 4 and fault in FIRST_SPEAKS:
        speakers = {rank for rank in (0, 2, 3) if spoken(run, rank)}
        assert speakers, run.report()
    for rank in range(n):
        lines = spoken(run, rank)
        if status is not None or rank in (1, *speakers):   # if a rank dies by a signal, a survivor may speak or not
            assert (lines != []) == (rank in speakers), run.report()
        if fault not in WITHOUT_PREFIX:
            assert all(line.startswith(f"[rank {rank} of {n}] ") for line in lines), run.report()
    for rank in speakers:
        for word in SAID_BY_0.get(fault, words) if rank != 1 else words:
            if n == 2 or "rank 1, which" not in word and "float32[5]" not in word:
                assert word in run.stderr[rank], (word, run.report())
    if fault == "SIGKILL":
        assert "9" in run.launcher_stderr


def test_the_processes_are_gone(runs):
    for (fault, place, n), run in ((case, run) for case, run in runs.items() if case != "left"):
        for state in run.state:
            assert state is None or not is_program(state["pid"], fault), (fault, place, n)


def is_program(pid, fault):
    """The process still exists and runs this fault's program."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return fault.encode() in file.read()
    except OSError:
        return False


def test_faults_leave_no_shared_memory(runs):
    """Of another job on this machine, which has made a file and not mapped it yet, it does so in a moment."""
    end = time.monotonic() + 10
    while (left := {path for path in runs["left"] if not is_mapped(path)}) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left


def is_mapped(path):
    """Some process uses it: another job on this machine, which will remove it."""
    for maps in glob.glob("/proc/[0-9]*/maps"):
        try:
            if path in Path(maps).read_text():
                return True
        except OSError:
            continue
    return not Path(path).exists()


@pytest.mark.parametrize("place, nodes", [("window", 1), ("plain", 1), ("plain", 2)])
def test_what_is_no_fault_ends_well(place, nodes):
    run = ranks.launch([PROGRAM, "no fault", place], n=2, limit=SECONDS, env={"MINITORCH_NODES": str(nodes)}).check()
    assert "".join(run.stderr) == ""


@pytest.mark.parametrize("setting, words", [
    ({"MINITORCH_STALL_SECONDS": "soon"}, "MINITORCH_STALL_SECONDS='soon' must be a number of seconds"),
    ({"MINITORCH_COMM": "rong"}, "algorithm='rong' is unknown; one of auto, mpi, shared, ring")])
def test_wrong_settings_end_the_job(setting, words):
    run = ranks.launch([PROGRAM, "no fault", "plain"], n=2, limit=SECONDS, env=setting)
    assert run.returncode not in (0, None) and any(words in text for text in run.stderr), run.report()


BY_EXIT = "import sys; from minitorch_dist import comm; rank = comm.world().rank; {}; comm.world().barrier()"


@pytest.mark.parametrize("code, status", [("sys.exit(256)", 1), ("rank or sys.exit(512)", 1),
                                          ("rank or sys.exit((1 << 40) + 3)", 3), ("rank or sys.exit(-1)", 255)])
def test_a_status_of_more_than_eight_bits_is_none_of_success(code, status):
    run = ranks.launch(["-c", BY_EXIT.format(code)], n=2, limit=SECONDS)
    assert run.returncode == status and run.seconds < 5 and "was called" in "".join(run.stderr), run.report()


def test_ranks_that_end_by_statuses_of_their_own_are_told():
    run = ranks.launch(["-c", BY_EXIT.format("sys.exit(3 + rank)")], n=2, limit=SECONDS)
    assert run.returncode in (3, 4) and "was called" in "".join(run.stderr), run.report()


def test_a_thread_may_end_as_it_likes():
    """sys.exit ends the thread, in a program whose end the guard isn't told of, too."""
    code = "import threading; t = threading.Thread(target=sys.exit, args=(3 * rank,)); t.start(); t.join()"
    run = ranks.launch(["-c", BY_EXIT.format(code)], n=2, limit=SECONDS)
    assert run.returncode == 0 and "".join(run.stderr) == "", run.report()


AS_PROGRAMS_DO = """
import sys
from minitorch_dist import comm
def main():
    world = comm.world()
    if world.rank == 1:
        return 3
    world.barrier()
sys.exit(main())
"""


def test_a_status_that_main_returns(tmp_path):
    """sys.exit is looked up before main() comes to comm.world()."""
    (tmp_path / "program.py").write_text(AS_PROGRAMS_DO)
    run = ranks.launch([tmp_path / "program.py"], n=2, limit=SECONDS)
    assert run.returncode == 3 and "sys.exit(3) was called" in run.stderr[1], run.report()
    assert "program.py" in run.stderr[1] and "sys.exit(main())" in run.stderr[1], run.report()


WITHOUT_WORLD = """
from mpi4py import MPI
import minitorch_dist
if MPI.COMM_WORLD.rank == 1:
    {}
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("code", ["oops", "import os; os._exit(0)"])
def test_a_program_that_uses_mpi4py_alone(tmp_path, code):
    """It never comes to comm.world(), and its failures end it all the same."""
    (tmp_path / "program.py").write_text(WITHOUT_WORLD.format(code))
    run = ranks.launch([tmp_path / "program.py"], n=2, limit=SECONDS)
    assert run.returncode == 1 and run.seconds < 4 and "[rank 1 of 2]" in run.stderr[1], run.report()


BROKEN_OFF = """
import numpy as np
from minitorch_dist import comm
world = comm.world()
x = world.empty(1000, "f4")
world.all_reduce(x)
if {again}:
    world.all_reduce(x)
x[:3] = 3e38      # in the part that rank 0 adds up
try:
    with np.errstate(over="raise" if world.rank == 0 else "ignore"):
        work = world.all_reduce(x, async_op={posted})
        if work:
            work.wait()
except FloatingPointError:
    print("caught")
    work.wait() if {posted} else world.all_reduce(x)
print("went on", x[:3])
"""


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("posted", [False, True])
def test_a_part_that_was_broken_off_counts_as_not_done(tmp_path, again, posted):
    (tmp_path / "program.py").write_text(BROKEN_OFF.format(again=again, posted=posted))
    run = ranks.launch([tmp_path / "program.py"], n=2, limit=SECONDS)
    assert run.returncode not in (0, None) and run.stdout[0] == "caught\n" and run.stdout[1] == "", run.report()
    assert "FloatingPointError" in run.stderr[0] and "can't be used any more" in run.stderr[0], run.report()


# ---------------------------------------------------------------- the document

HEAD = """# What you see when a rank fails

The tests run these faults on 2 ranks, with MPICH (`tests/comm/faulty.py`); `python -m tests.comm.test_faults` writes
this page, and a test fails when it is no longer true. In each, rank 1 does what the code shows and rank 0 goes on
reducing, unless the code is for both; a function without arguments runs before rank 1 comes to comm.world(). Every job
ends within seconds, with a status other than 0, and leaves no process and no shared memory behind.

A rank that waits for longer than the stall limit ends the job. The limit is 600 s unless `MINITORCH_STALL_SECONDS` says
otherwise; here it was 1 s (comm.world() waits 5 s at least). Ranks that wait for each other in different communicators
are told after 5 s, whatever the limit (here 60 s), where that is certain. It isn't for a circle through ranks of
different nodes, a send, a message from anybody, or a part that another rank does in its own `wait`, nor, with
`MINITORCH_CHECK=0`, for one through collectives: such a circle ends at the stall limit.

| fault | status | who speaks |
|---|---:|---|
"""


def document(runs):
    """The text of docs/faults.md."""
    table, sections = [], []
    for fault in FAULTS:
        run = runs[fault, "window", 2]
        speakers = ", ".join(f"rank {rank}" for rank in sorted(FAULTS[fault][1]))
        signal = re.search(r"EXIT STRING: (.*)", run.launcher_stderr)
        if not speakers:
            speakers = f"mpirun: {signal[1]}" if signal else "nobody: it was wanted"
        elif signal:
            speakers += f", mpirun: {signal[1]}"
        status = run.returncode
        if fault in TWO_SIGNALS and status in (14, 15):
            status, speakers = "14 or 15", "rank 0, mpirun: Alarm clock or Terminated"
        table.append(f"| {fault} | {status} | {speakers} |\n")
        source = re.sub(r"^@.*\n", "", inspect.getsource(faulty.FAULTS[fault]), flags=re.M).rstrip()
        sections.append(f"\n## {fault}\n\n```python\n{source}\n```\n")
        said = [shortened(spoken(run, rank)) for rank in sorted(FAULTS[fault][1])]
        alike = len(said) == 2 and [line.replace("[rank 0", "[rank 1") for line in said[0]] == said[1]
        if said:
            lines = said[0] if alike else [line for lines in said for line in lines]
            sections.append("\n```text\n" + "\n".join(lines) + "\n```\n")
        if alike:
            sections.append("\nRank 1 says the same.\n")
    return HEAD + "".join(table) + "".join(sections)


C_STACK = ("Current thread's C stack", "  Binary file", "  <truncated")     # since Python 3.14, as are threads' names


def shortened(lines):
    """What is said, less the frames of other files and of the program's frame, and less Python's underlining."""
    kept, skipping = [], False
    for line in lines:
        prefix, text = re.fullmatch(r"(\[rank \d of \d\] )?(.*)", line).groups(default="")
        if re.fullmatch(r"[\s^~]*", text) or text.startswith(("Extension modules", "Thread 0x", *C_STACK)):
            continue
        text = re.sub(r"0x[0-9a-f]+ (\[python\] )?", "", text)
        if text.startswith("  File "):
            skipping = PROGRAM.name not in text or text.endswith(("in <module>", "in main"))
            if skipping and kept[-1] != prefix + "  …":
                kept.append(prefix + "  …")
        elif not text.startswith("    "):
            skipping = False
        if not skipping or "# the others wait here" in text:
            kept.append(prefix + text.replace(str(PROGRAM), PROGRAM.name).replace(f"{PROGRAM.parent}/", ""))
    return kept


def without_numbers(text):
    """Line numbers change with every edit."""
    return re.sub(r"(line |\.py:)\d+", r"\1N", text)


@pytest.mark.thorough
def test_the_document_shows_what_happens(runs):
    if len(ranks.mpirun_command()) > 1:
        pytest.skip("the document shows what MPICH's mpirun says")
    assert without_numbers(document(runs)) == without_numbers(DOCUMENT.read_text()), \
        "docs/faults.md isn't what happens; look at the difference, then: python -m tests.comm.test_faults"


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    with ThreadPoolExecutor(3) as pool:
        cases = [case for case in CASES if case[1:] == ("window", 2)]
        DOCUMENT.write_text(document(dict(zip(cases, pool.map(provoke, cases), strict=True))))
    print(f"written to {os.path.relpath(DOCUMENT)}")
