"""What programs do beside the guard: hooks, streams, signals, files and processes of their own, before comm.world() and
after it. Each is run on 2 ranks; it ends with the status it should, within seconds, and says what it should.
"""

import glob
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from minitorch_dist.comm.guard import stall_seconds
from minitorch_dist.launch_env import RANK_PROCESS
from minitorch_dist.testing import ranks

from ..quick import asked
from .test_faults import is_mapped

HEAD = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from minitorch_dist import comm
from minitorch_dist.launch_env import launched_rank
rank = launched_rank()
"""
MEET = "\ncomm.world().barrier()\nprint('went on')\n"
FINALISES = "\nfrom mpi4py import MPI" + MEET + "MPI.Finalize()\ntime.sleep(0.3 * rank)"
HOOK = "sys.excepthook = lambda *error: print('a hook of the program')\n"
# A thread forks processes until the ranks have met: they hold the pipe open by which a rank tells that they have, and
# live longer than the limit of 8 s at which a rank that hasn't told it is killed.
FORKS = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)     # Python 3.12's, of forks beside threads
met = False
def fork():
    while not met:
        if not os.fork():
            time.sleep(10)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
threading.Thread(target=fork, daemon=True).start()
comm.world()
met = True
print("went on")
"""
MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [open(os.devnull) for _ in range(1100)]
comm.world()
time.sleep(0.5)
"""
HELPERS = """
def fails():
    sys.exit(3)
if __name__ == "__main__":
    for kind in "spawn", "forkserver", "fork":
        helper = multiprocessing.get_context(kind).Process(target=fails)
        helper.start()
        helper.join()
        assert helper.exitcode == 3, (kind, helper.exitcode)
    for code, status in ("sys.exit(3)", 3), ("1 / 0", 1), ("os._exit(4)", 4):
        said = subprocess.run([sys.executable, "-c", "import os, sys; from minitorch_dist import comm; " + code],
                              capture_output=True, text=True)
        assert said.returncode == status and "[rank" not in said.stderr, (code, said)
    comm.world().barrier()
    print("went on")
"""
NO_STDERR = """
if sys.stderr is not None:
    os.close(2)
    os.execv(sys.executable, [sys.executable, __file__])      # the same process: still the rank
"""
IN_A_CHILD = """
def train():
    if comm.world().rank == 1:
        raise ValueError("the value is wrong")
    comm.world().barrier()
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
"""
# Rank 1 sends when rank 0's last Python function has run and its memory is freed; MPI_Finalize finds the message.
IN_FINALIZE = """
import mmap, numpy as np
world = comm.world()
class Late:
    def __del__(self, rank=rank, engine=rank and world._engine, sleep=time.sleep, x=np.ones(1024, np.float32)):
        sleep(1 if rank else 2)
        if rank:
            engine.send(x, 0, 3)
late = Late()
if rank:
    time.sleep(0.5)     # meanwhile rank 0's watchdog ends, which would hold all that is posted
else:
    world.irecv(np.frombuffer(mmap.mmap(-1, 4096), np.float32), 1, 3)
print("went on")
"""
# Of a group that nobody holds any more; Python would let go of the memory at the next collection.
IN_A_GROUP = """
import gc, mmap, numpy as np
world = comm.world()
group = world.split(0)
if not rank:
    group.irecv(np.frombuffer(mmap.mmap(-1, 4096), np.float32), 1, 3)
    del group
    gc.collect()
world.barrier()
if rank:
    group.send(np.ones(1024, np.float32), 0, 3)
world.barrier()
for _ in range(3):
    world.send(np.ones(3), 1, 4) if rank == 0 else world.recv(np.ones(3), 0, 4)
    world.recv(np.ones(3), 1, 4) if rank == 0 else world.send(np.ones(3), 0, 4)
print("went on")
"""

# what: (its text, the status, rank 1's output, what rank 1 says)
PROGRAMS = {
    "ignores the end of its children": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)" + MEET, 0, "went on", ""),
    "forks meanwhile": (FORKS, 0, "went on", ""),
    "has many files open": (MANY_FILES + MEET, 0, "went on", ""),
    "has helpers that fail": (HELPERS, 0, "went on", ""),
    "has no stderr": (NO_STDERR + MEET, 0, "went on", ""),
    "has another stderr": ("sys.stderr = open(2, 'w', closefd=False)\n" + "comm.world()\nif rank: raise SystemExit(7)" +
                           MEET, 7, "", "SystemExit(7) was raised"),
    "has a hook, and raises before comm.world()": (HOOK + "if rank: 1 / 0" + MEET, 1, "a hook of the program",
                                                   "ZeroDivisionError"),
    "has a hook, and raises after it": (HOOK + "comm.world()\nif rank: 1 / 0" + MEET, 1, "", "ZeroDivisionError"),
    "has a hook since, and raises": ("comm.world()\n" + HOOK + "if rank: 1 / 0" + MEET, 1, "a hook of the program",
                                     "ZeroDivisionError"),
    "ends by another status than it was about to": (
        "comm.world()\nif rank:\n    try: sys.exit(5)\n    except SystemExit: raise SystemExit(7)" + MEET, 7, "",
        "SystemExit(7) was raised"),
    "computes for longer than ranks may wait": ("comm.world()\ntime.sleep(9)" + MEET, 0, "went on", ""),
    "has a hook since, and ends well": ("comm.world()\n" + HOOK + MEET, 0, "went on", ""),
    "handles Ctrl-C, and computes on": (
        "comm.world()\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
        "except KeyboardInterrupt:\n    time.sleep(1.5)" + MEET, 0, "went on", ""),
    "fails at its exit, too": ("import atexit\natexit.register(lambda: 1 / 0)\nif rank: sys.exit(3)" + MEET, 3, "",
                               "sys.exit(3) was called"),
    "uses mpi4py alone, and sys.exit": ("from mpi4py import MPI\nif rank: sys.exit(3)\nMPI.COMM_WORLD.Barrier()", 3, "",
                                        "sys.exit(3) was called"),
    "has a wrong setting, in one rank": ("if rank: os.environ['MINITORCH_STALL_SECONDS'] = 'soon'" + MEET, 1, "",
                                         "'soon' must be a number"),
    "gets a message while MPI is finalised": (IN_FINALIZE, 0, "went on", ""),
    "gets a message of a group that it has forgotten": (IN_A_GROUP, 0, "went on", ""),
    "finalises MPI": (FINALISES, 0, "went on", ""),
    "finalises MPI, on nodes": ("os.environ['MINITORCH_NODES'] = '2'" + FINALISES, 0, "went on", ""),
    "trains in a forked child": (IN_A_CHILD, 1, "", "os._exit(1) was called"),
}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """{what: its Run} of those that are tested, three at a time."""
    folder = tmp_path_factory.mktemp("programs")

    def run(what):
        path = folder / f"program_{list(PROGRAMS).index(what)}.py"
        path.write_text(HEAD + PROGRAMS[what][0])
        return ranks.launch([path], n=2, limit=20, env={"MINITORCH_STALL_SECONDS": "8"})
    tested = [what for what, in asked(request, "what")]
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(tested, pool.map(run, tested), strict=True))


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_that(runs, what):
    _, status, output, said = PROGRAMS[what]
    run = runs[what]
    assert not run.timed_out and run.returncode == status, run.report()
    assert run.stdout[1].strip() == output and said in run.stderr[1], run.report()
    if status == 0:
        assert not any(run.stderr), run.report()


@pytest.mark.parametrize("whom", ["a rank", "mpirun"])
def test_killed_while_the_ranks_wait_for_each_other(whom, tmp_path):
    if len(ranks.mpirun_command()) > 1:
        pytest.skip("Open MPI's mpirun removes its files by itself")
    (tmp_path / "program.py").write_text(HEAD + "if rank: time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)" + MEET
                                         if whom == "a rank" else HEAD + "if rank: time.sleep(20)" + MEET)
    before = set(glob.glob("/dev/shm/mpich_shm_*"))
    process = subprocess.Popen([*ranks.mpirun_command(), "-n", "2", sys.executable, tmp_path / "program.py"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if whom == "mpirun":
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode != 0
    limit = time.monotonic() + 5
    while (left := left_behind(before)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left


def left_behind(before):
    """MPICH's files that weren't there before and that no process uses."""
    return {path for path in set(glob.glob("/dev/shm/mpich_shm_*")) - before if not is_mapped(path)}


@pytest.mark.parametrize("text", ["soon", "nan", "-1"])
def test_a_stall_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("MINITORCH_STALL_SECONDS", text)
    with pytest.raises(ValueError, match="at least 0"):
        stall_seconds()


def test_a_rank_s_programs_may_start_ranks(monkeypatch):
    """They inherit the variable that says which process is the rank; their ranks mustn't."""
    monkeypatch.setenv(RANK_PROCESS, "1")
    run = ranks.launch(["-c", HEAD + "if rank: 1 / 0" + MEET], n=2, limit=20)
    assert run.returncode == 1 and "[rank 1 of 2] ZeroDivisionError" in run.stderr[1], run.report()
