"""Forked children are told what children that are started by themselves are told, and see what they see."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest

from exercises.frame import launch, starting
from exercises.frame.course import ROOT as COURSE
from exercises.frame.course import Exercise
from exercises.frame.starting import Starters
from minitorch_dist.testing import ranks

from .test_frame import FAILURES

EITHER_WAY = ["an exception", "an exception on one rank", "another name", "not begun", "mismatched collectives",
              "deadlock", "waits for one that computes", "endless", "outputs of 80 MB", "pipes for notes"]
# An answer reads them nowhere, and bash sets them where it is /bin/sh.
OF_A_SHELL = ("SHLVL", "OLDPWD", "_")
LAUNCHERS = ("PMI", "HYDI", "MPI", "OMPI", "PRTE", "PMIX")
# What an answer sees of its process; [2] is the environment.
SEEN = f"""
import json, os, sys, signal, threading
def f(*comm, x):
    hooks = [hook.__qualname__ for hook in (sys.excepthook, sys.exit, os._exit, threading.excepthook)]
    main = sys.modules["__main__"]
    names = sorted(name for name in os.environ if not name.startswith({LAUNCHERS}) and name not in {OF_A_SHELL})
    print(json.dumps([sys.argv[0], os.listdir("."), names, tuple(sys.flags), sys.path, main.__file__, main.__name__,
                      signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "minitorch_dist" in sys.modules,
                      "numpy.random" in sys.modules, os.getcwd() == os.environ["HOME"],
                      hooks, [thread.name for thread in threading.enumerate()], signal.set_wakeup_fd(-1) >= 0,
                      [(c.rank, c.size, c.name) for c in comm], "minitorch_dist.nn" in sys.modules,
                      os.environ.get("MINITORCH_RANK_PROCESS") == str(os.getpid())]))
    return 2 * x
"""
DRAWS = "import numpy as np\ndef f(comm, x):\n    return np.array([np.random.rand(), hash('a') % 1000])\n"


@pytest.fixture(scope="module")
def starters():
    with Starters() as found:
        yield found


def check(tmp_path, source, start, n=1, limit=1.0, **fields):
    path = tmp_path / "answer_file.py"
    path.write_text(source, encoding="utf-8")
    exercise = Exercise("99.1", "99_none", path.name, "f", "a test", kind="ranks" if n > 1 else "plain", **fields)
    return launch.launch(exercise, path, [[{"x": np.arange(3.0)} for _ in range(n)]], n, limit=limit, start=start)


@pytest.mark.parametrize("name", EITHER_WAY)
def test_a_failure_is_told_as_ever(name, starters, tmp_path):
    source, n, kind, texts = FAILURES[name]
    failure = check(tmp_path, source, starters.launch, n).failure
    said = "\n".join([failure.message, *failure.details])
    assert failure.kind == kind and all(text in said for text in texts), said
    assert "child.py" not in said and "starter" not in said and "Traceback" not in said


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_sees_what_it_sees_as_ever(starters, tmp_path, monkeypatch, n):
    monkeypatch.setenv("A_SECRET", "42")
    launched = [check(tmp_path, SEEN, start, n) for start in (starters.launch, ranks.launch)]
    assert [one.failure for one in launched] == [None, None]
    forked, usual = ([json.loads(lines[0]) for lines in one.printed] for one in launched)
    assert forked == usual and len(forked) == n and "A_SECRET" not in forked[0][2]


def test_no_two_children_draw_the_same_numbers(starters, tmp_path):
    """Not even where NumPy's generators are there before the fork."""
    found = [check(tmp_path, DRAWS, starters.launch, 2, allow=("numpy.random",)).outputs[0] for _ in range(2)]
    drawn, hashes = zip(*(rank["result"] for launched in found for rank in launched), strict=True)
    assert len(set(map(float, drawn))) == 4
    if len(ranks.mpirun_command()) == 1:       # Open MPI's ranks are started by themselves
        assert hashes[0] == hashes[2] != hashes[1], "hashes are a rank's own"


@pytest.mark.parametrize("source, status", [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -9),
                                            ("os.abort()", -signal.SIGABRT)])
def test_how_a_child_ends(starters, tmp_path, source, status):
    answer = f"import os, signal\ndef f(x):\n    {source}\n"
    assert f"(status {status})" in check(tmp_path, answer, starters.launch).failure.message


@pytest.mark.parametrize("n", [1, 2])
def test_a_crash_is_told_as_ever(starters, tmp_path, n):
    """Its signal, and of its stack the answer's line, not those of this process's own files."""
    answer = "import ctypes\ndef f(*comm, x):\n    ctypes.string_at(0)\n"
    forked, usual = (check(tmp_path, answer, start, n).failure for start in (starters.launch, ranks.launch))
    assert forked.message == usual.message
    assert re.search(r"\(status -11\)" if n == 1 else r"\(status (11|139)\)", forked.message)
    for said in ("\n".join(failure.details) for failure in (forked, usual)):
        assert 'answer_file.py", line 3 in f' in said and "child.py" not in said and "starter" not in said, said


@pytest.mark.parametrize("n", [1, 2])
def test_no_process_outlives_its_limit(starters, tmp_path, monkeypatch, n):
    monkeypatch.setattr(launch, "STARTING_SECONDS", 2)
    source = ("import faulthandler, os, signal\nprint(os.getpid())\ndef f(*args, **inputs):\n"
              "    signal.setitimer(signal.ITIMER_REAL, 0)\n    faulthandler.cancel_dump_traceback_later()\n"
              "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True: pass\n")
    launched = check(tmp_path, source, starters.launch, n, limit=0.3)
    assert launched.failure.kind == "slow"
    pids, end = [int(lines[0]) for lines in launched.printed], time.monotonic() + 5
    while any(map(ranks.is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pids) == n and not [pid for pid in pids if ranks.is_alive(pid)]


def test_a_starter_that_is_killed_is_no_answer(tmp_path):
    with Starters() as starters:
        answer = "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return x\n"
        assert check(tmp_path, "def f(x):\n    return x\n", starters.launch).failure is None
        check(tmp_path, answer, starters.launch)
        assert check(tmp_path, "def f(x):\n    return x\n", starters.launch).failure is None


def test_starters_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Starters() as starters:
        check(tmp_path, "def f(x):\n    return x\n", starters.launch)
        pids = [process.pid for process in starters.processes.values()]
        assert pids and all(map(ranks.is_alive, pids))
    assert not any(map(ranks.is_alive, pids)) and os.listdir(tmp_path) == ["answer_file.py"]


def test_a_starter_that_is_stopped_ends_too(tmp_path, monkeypatch):
    with Starters() as starters:
        check(tmp_path, "def f(x):\n    return x\n", starters.launch)
        [process] = starters.processes.values()
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(starting, "SECONDS", 1)     # for its end: to begin it has as long as others
    assert not ranks.is_alive(process.pid) and not starters.folder.exists()


def test_starters_and_their_folder_end_with_the_process_that_started_them(tmp_path):
    program = ("import os\nfrom exercises.frame.launch import ENVIRONMENT, PYTHON_FLAGS\n"
               "from exercises.frame.starting import Starters\nstarters = Starters().__enter__()\n"
               "for rank in range(2): starters.begin(rank, PYTHON_FLAGS, ENVIRONMENT, [])\n"
               "print(starters.folder, *(one.pid for one in starters.processes.values()), flush=True)\nos._exit(0)\n")
    told = subprocess.run([sys.executable, "-c", program], cwd=COURSE, stdout=subprocess.PIPE, text=True, check=True)
    folder, *pids = told.stdout.split()
    end = time.monotonic() + 20
    while any(ranks.is_alive(int(pid)) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(ranks.is_alive(int(pid)) for pid in pids) and not Path(folder).exists()


@pytest.mark.parametrize("forked", [False, True])
def test_the_library_is_the_one_beside_the_course(forked, tmp_path, monkeypatch):
    """Whichever is installed: another checkout's, or none (make VENV=no)."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    [packages] = (tmp_path / "venv").glob("lib/*/site-packages")
    (packages / "numpy.pth").write_text(str(Path(np.__file__).parents[1]))
    (packages / "minitorch_dist.py").write_text("raise ImportError('another one')")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    source = "import sys\nimport minitorch_dist\ndef f(x):\n    return [minitorch_dist.__file__, *sys.path]\n"
    with Starters() as starters:
        launched = check(tmp_path, source, starters.launch if forked else ranks.launch, allow=["minitorch_dist"])
    assert launched.failure is None
    file, *paths = launched.outputs[0][0]["result"]
    assert file == str(COURSE / "minitorch_dist" / "__init__.py") and str(COURSE) not in paths
