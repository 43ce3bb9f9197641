"""The launcher of ranks: values, output per rank, time limits, and reports."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import launch_env
from minitorch_dist.comm.state import Call, RankState, read_state
from minitorch_dist.testing import ranks

PROGRAMS = "tests.testing.programs:"


@pytest.mark.parametrize("n", [1, 3])
def test_call_gives_each_ranks_value(n):
    values = ranks.call(PROGRAMS + "rank_and", n, args=(np.arange(3), "x"))
    assert [value[0] for value in values] == list(range(n))
    assert all((args[0] == [0, 1, 2]).all() and args[1] == "x" for _, args, _ in values)


def test_a_raise_is_an_assertion_with_the_traceback():
    with pytest.raises(AssertionError, match="this key") as caught:
        ranks.call(PROGRAMS + "fails_on", n=2, args=(1,))
    assert "rank 1: between calls" in str(caught.value) and "fails_on" in str(caught.value)
    with pytest.raises(AssertionError, match="this key"):
        ranks.call(PROGRAMS + "fails_on", n=1, args=(0,))
    with pytest.raises(AssertionError, match=r"no value from ranks \[0, 1\]"):
        ranks.call(PROGRAMS + "leaves_without_a_value", n=2)
    with pytest.raises(AssertionError, match="status 5"):
        ranks.call(PROGRAMS + "fails_at_the_exit", n=1)


def test_a_timeout_fails_and_says_where_each_rank_waits():
    with pytest.raises(AssertionError) as caught:
        ranks.call(PROGRAMS + "never_comes", n=3, limit=4)
    report = str(caught.value)
    for words in ("reached its time limit", "rank 0: between calls", "recv on 'world' (dtype float32, shape [2, 3], "
                  "peer 0)", "all_reduce on 'world' (dtype float64, shape [7])", "programs.py"):
        assert words in report, report


def test_a_timeout_leaves_no_process_and_never_passes(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text("import os, signal, time\n"
                      "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                      "print(os.getpid(), flush=True)\n"
                      "time.sleep(100)\n")
    for n in (1, 2):
        run = ranks.launch([script], n, limit=1)
        assert run.timed_out and run.returncode is None and run.seconds < 6
        assert run.state == [None] * n and "never came to comm.world()" in run.report()
        pids = [int(text) for text in run.stdout]
        assert not [pid for pid in pids if ranks.is_alive(pid)]
        with pytest.raises(AssertionError, match="time limit"):
            run.check()


def test_launch_keeps_ranks_apart(tmp_path):
    script = tmp_path / "talk.py"
    script.write_text("import os, sys\nfrom minitorch_dist import comm\nw = comm.world()\n"
                      "print('out', w.rank, sys.argv[1], os.environ['COLOUR'], os.getcwd())\n"
                      "print('err', w.rank, file=sys.stderr)\n"
                      "w.barrier()\n")
    run = ranks.launch([script, "a b"], n=2, env={"COLOUR": "green"}, cwd=tmp_path).check()
    assert run.stdout == [f"out {rank} a b green {tmp_path}\n" for rank in range(2)]
    assert run.stderr == ["err 0\n", "err 1\n"]
    assert [state["calls"] for state in run.state] == [1, 1]
    assert run.seconds < 5 and run.launcher_stderr == ""


def test_a_launch_can_leave_the_environment_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "42")
    script = tmp_path / "show.py"
    script.write_text("import os\nprint(os.environ.get('A_SECRET'), os.environ['COLOUR'], 'PATH' in os.environ)\n")
    for n in (1, 2):
        for inherit, secret in ((True, "42"), (False, "None")):
            run = ranks.launch([script], n, env={"COLOUR": "green"}, inherit=inherit).check()
            assert run.stdout == [f"{secret} green True\n"] * n


def test_ranks_that_wait_for_each_other_end_before_the_limit(tmp_path, monkeypatch):
    script = tmp_path / "wait.py"
    script.write_text("import sys, time\nimport numpy as np\nfrom minitorch_dist import comm\n"
                      "w = comm.world()\nx = np.zeros(3)\n"
                      "if w.rank == 0 and sys.argv[1] == 'sleep':\n    time.sleep(1.2)\n    w.send(x, 1)\n"
                      "w.recv(x, 1 - w.rank) if w.rank or sys.argv[1] == 'wait' else None\n")
    for still, looked in ((29, ranks.LOOKED_SECONDS), (0.6, 29)):
        monkeypatch.setattr(ranks, "LOOKED_SECONDS", looked)
        run = ranks.launch([script, "wait"], 2, limit=30, still=still)
        assert run.timed_out and run.seconds < 10 and [state["op"] for state in run.state] == ["recv"] * 2
        assert all("wait.py" in stack for stack in run.stack)
    monkeypatch.undo()
    ranks.launch([script, "sleep"], 2, limit=30, still=0.6).check()      # one still computes: no deadlock


def test_a_failing_status_is_reported(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('a word'); sys.exit(4)")
    run = ranks.launch([script], n=1)
    assert run.returncode == 4 and "status 4" in run.report() and "a word" in run.report()


def test_no_mpirun_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="pip install mpich"):
        ranks.find_mpirun()


@pytest.mark.parametrize(("text", "words"), [
    ("#!/nowhere/sh\n", "mpirun can't be run: No such file"),
    ("#!/bin/sh\nexec sleep 60\n", "has said nothing for 0.1 s")])
def test_an_mpirun_that_can_not_say_which_it_is(monkeypatch, tmp_path, text, words):
    (tmp_path / "mpirun").write_text(text)
    (tmp_path / "mpirun").chmod(0o700)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(ranks, "VERSION_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=words):
        ranks.mpirun_command()


@pytest.mark.parametrize("environment, size, rank", [
    ({}, 1, 0),
    ({"PMI_SIZE": "4", "PMI_RANK": "3"}, 4, 3),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 2, 1),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, 0),                       # a batch script, before its srun
    ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, 8, 5),
])
def test_launcher_environment(monkeypatch, environment, size, rank):
    for name in launch_env.SIZE_VARIABLES + launch_env.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (launch_env.launched_size(), launch_env.launched_rank()) == (size, rank)
    assert not launch_env.without_launcher(os.environ).keys() & {*launch_env.SIZE_VARIABLES, *launch_env.RANK_VARIABLES}


HELPER_FIRST = """
import multiprocessing
def ask(queue):
    from minitorch_dist import launch_env
    queue.put(launch_env.is_rank())
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
helper = context.Process(target=ask, args=(queue,))
helper.start()
helper.join()
from minitorch_dist import launch_env
print(queue.get(), launch_env.is_rank())
"""


def test_a_helper_that_is_there_before_the_rank_asks_is_none():
    environment = launch_env.without_launcher(os.environ) | {"PMI_SIZE": "2", "PMI_RANK": "1"}
    said = subprocess.run([sys.executable, "-c", HELPER_FIRST], env=environment, capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("False True\n", "")


class OtherThreads(dict):
    """An environment from which another thread takes FLEETING away as soon as its names are listed."""

    def __iter__(self):
        names = list(super().__iter__())
        self.pop("FLEETING", None)
        return iter(names)

    def keys(self):
        return list(self)

    def items(self):
        return [(name, self[name]) for name in self]


def test_a_launch_beside_a_thread_that_unsets_a_variable():
    for copy in (launch_env.snapshot, launch_env.without_launcher):
        environment = OtherThreads(FLEETING="1", HOME="/", EMPTY="")
        assert copy(environment) == {"HOME": "/", "EMPTY": ""} and "FLEETING" not in environment


def test_one_blas_thread_per_rank_unless_chosen(monkeypatch):
    without = {name: value for name, value in os.environ.items() if name not in launch_env.THREAD_VARIABLES}
    for names, threads in (({}, {"1"}), ({"OMP_NUM_THREADS": "2"}, {"2"})):
        monkeypatch.setattr(os, "environ", without | names)
        assert {value[2] for value in ranks.call(PROGRAMS + "rank_and", n=2)} == threads
    assert {value[2] for value in ranks.call(PROGRAMS + "rank_and", n=1)} == {None}   # alone: all cores


LOADING = """       # Ctrl-C while a module is looked for
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        return name == {!r} and os.kill(os.getpid(), signal.SIGINT) or None
signal.signal(signal.SIGINT, signal.default_int_handler)        # also where a shell has it ignored
sys.meta_path.insert(0, Finder())
{}
"""
TRAIN = f"runpy.run_path({str(Path(__file__).parents[2] / 'mnist_demo' / 'train.py')!r}, run_name='__main__')"
MAIN = "from minitorch_dist import program\nwith program.reader_may_leave():\n    import wave"


def ended_by_ctrl_c(module, code):
    return subprocess.run([sys.executable, "-c", LOADING.format(module, code)], capture_output=True, timeout=60)


@pytest.mark.parametrize("module, code", [("numpy", TRAIN), ("minitorch_dist.training", TRAIN), ("wave", MAIN)])
def test_ctrl_c_while_modules_load_and_in_main_shows_no_traceback(module, code):
    ended = ended_by_ctrl_c(module, code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("before, then, shown", [
    ("", "1 / 0", b"ZeroDivisionError"), ("sys.ps1 = '>'", "raise", b"KeyboardInterrupt"),
    ("sys.excepthook = lambda *error: print('a hook', file=sys.stderr)", "raise", b"a hook")])
def test_other_errors_are_shown_and_ctrl_c_where_others_show_it(before, then, shown):
    ended = ended_by_ctrl_c("numpy", f"{before}\ntry: import minitorch_dist\nexcept KeyboardInterrupt: {then}")
    assert shown in ended.stderr


@pytest.mark.parametrize("size, chosen, wanted, limited", [
    (2, {}, ["1", "1", "1"], [1]), (2, {"OMP_NUM_THREADS": "4"}, ["4", "4", "4"], []),
    (2, {"OPENBLAS_NUM_THREADS": "3"}, ["1", "3", "1"], []), (1, {}, [None] * 3, [])])
def test_threads_of_libraries_that_are_loaded_already(monkeypatch, size, chosen, wanted, limited):
    found = []
    monkeypatch.setattr(os, "environ", dict(chosen))
    monkeypatch.setattr(launch_env, "launched_size", lambda: size)
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda limits: found.append(limits))
    launch_env.default_blas_threads()
    assert [os.environ.get(name) for name in launch_env.THREAD_VARIABLES] == wanted and found == limited


@pytest.mark.parametrize("load, cores, times", [(0.5, 2, 1), (2, 2, 1), (7, 2, 3.5), (90, 4, 10), (3, None, 3)])
def test_limits_grow_with_what_else_the_machine_does(monkeypatch, load, cores, times):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 100.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert launch_env.patience() == times


def writes_its_state(folder):
    """In a process of its own: long and short records by turns, as fast as they can be written."""
    own = RankState()
    own.record_in(folder, 0)
    while True:
        x = np.zeros((own.calls % 7 + 1, 2))
        own.enter(Call(SimpleNamespace(name="of a long name " * 50), "all_reduce", x, None))
        own.leave()


def test_a_state_that_is_read_while_it_is_written_is_whole(tmp_path):
    writer = multiprocessing.get_context("spawn").Process(target=writes_its_state, args=(tmp_path,), daemon=True)
    writer.start()
    path, seen = tmp_path / "rank-0.state", set()
    assert read_state(path) is None
    try:
        while not path.exists():
            time.sleep(0.01)
        for _ in range(20_000):
            found = read_state(path)
            assert found is None or found["waiting"] == ("op" in found)
            seen.add(found and found["waiting"])
            if found and found["waiting"]:
                assert found["shape"] == [(found["calls"] - 1) % 7 + 1, 2]
    finally:
        writer.kill()
        writer.join()
    assert {True, False} <= seen
    path.write_text("{")
    assert read_state(path) is None
