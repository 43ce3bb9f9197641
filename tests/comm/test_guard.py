"""A rank that fails ends the job in seconds, with a status, a message, and nothing left behind."""

import glob
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks

FAULTY = Path(__file__).with_name("faulty.py")
SECONDS = 10

# fault: (status or None for any but 0, the rank that speaks, what it says)
FAULTS = {
    "raises": (1, 1, ("Traceback", "in broken", "ValueError: the value is wrong")),
    "raises in a thread": (1, 1, ("in broken", "ValueError: the value is wrong")),
    "raises while a work is outstanding": (1, 1, ("ValueError: the value is wrong",)),
    "sys.exit(3)": (3, 1, ("sys.exit(3) was called", "in go_wrong")),
    "sys.exit(text)": (1, 1, ("'no such data'", "in go_wrong")),
    "SystemExit(3)": (1, 0, ("waits in all_reduce(float32[10]) on 'world'", "for rank 1", "# rank 0 waits here")),
    "leaves": (1, 0, ("waits in all_reduce(float32[10]) on 'world'", "for rank 1", "# rank 0 waits here")),
    "os._exit(0)": (1, 1, ("os._exit(0) was called", "in go_wrong")),
    "os._exit(3)": (3, 1, ("os._exit(3) was called",)),
    "SIGKILL": (None, None, ()),
    "SIGTERM": (None, None, ()),
    "KeyboardInterrupt": (130, None, ()),
}


CASES = [(fault, "window") for fault in FAULTS] + [(fault, "plain") for fault in ("raises", "leaves", "SIGKILL")]


def shared_memory_files():
    return set(glob.glob("/dev/shm/mpich_shm_*") + glob.glob("/dev/shm/minitorch_*"))


@pytest.fixture(scope="module")
def runs():
    """{(fault, where): its Run}, three at a time, for most of them wait; under "left" the files they left behind."""
    before = shared_memory_files()
    with ThreadPoolExecutor(3) as pool:
        done = dict(zip(CASES, pool.map(
            lambda case: ranks.launch([FAULTY, *case], n=2, limit=SECONDS), CASES), strict=True))
    done["left"] = shared_memory_files() - before
    return done


@pytest.mark.parametrize("fault, where", CASES)
def test_fault_ends_the_job_and_speaks(runs, fault, where):
    status, speaker, words = FAULTS[fault]
    run = runs[fault, where]
    assert not run.timed_out, run.report()
    assert run.returncode == status if status is not None else run.returncode != 0, run.report()
    for rank in range(2):
        said = [line for line in run.stderr[rank].splitlines()   # less what MPI and Python themselves say
                if not line.startswith("Abort(") and line != "no such data"]
        assert (said != []) == (rank == speaker), run.report()
        assert all(line.startswith(f"[rank {rank} of 2] ") for line in said), run.report()
    for word in words:
        assert word in run.stderr[speaker], (word, run.report())
    if fault == "SIGKILL":
        assert "9" in run.launcher_stderr


def test_faults_leave_no_shared_memory(runs):
    left = {path for path in runs["left"] if not is_mapped(path)}
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


def test_what_is_no_fault_ends_well():
    run = ranks.launch([FAULTY, "catches", "window"], n=2, limit=SECONDS).check()
    assert "".join(run.stderr) == ""


def test_the_first_of_four_to_fail_ends_all():
    run = ranks.launch([FAULTY, "raises", "window"], n=4, limit=SECONDS)
    assert run.returncode == 1 and "[rank 1 of 4] ValueError" in run.stderr[1], run.report()
