"""One start of a job, and the keeper beside it: what is waited for, what is killed, and what is there afterwards."""

import os
import subprocess
import sys

import pytest

from minitorch_dist.supervise import Job
from minitorch_dist.testing import ranks

LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
sys.exit(5)
"""


def test_what_a_job_leaves_behind_is_killed(tmp_path, capsys):
    """A process in a session of its own, whose parent has gone."""
    job = Job([sys.executable, "-c", LEAVES], tmp_path / "steps", 0)
    assert job.wait(20) == 5
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    left = job.clear()
    assert [str(pid) for pid in left] == capsys.readouterr().out.split()
    assert not any(ranks.is_alive(pid) for pid in left) and ranks.is_alive(other.pid)
    other.kill()
    other.wait()


ENDS_LATER = """
import subprocess, sys
later = "import sys, time; time.sleep(0.4); open(sys.argv[1], 'w')"
subprocess.Popen([sys.executable, "-c", later, *sys.argv[1:]], start_new_session=True)
"""


def test_what_ends_by_itself_is_waited_for(tmp_path):
    """A rank that is still writing when its launcher has gone."""
    job = Job([sys.executable, "-c", ENDS_LATER, str(tmp_path / "written")], tmp_path / "steps", 0)
    assert job.wait(20) == 0 and job.processes()
    assert job.clear() == [] and (tmp_path / "written").exists()


def test_a_job_and_its_keeper_have_sessions_of_their_own_and_go_together(tmp_path):
    """So Ctrl-C in a terminal comes to the supervisor alone."""
    job = Job([sys.executable, "-c", "input()"], tmp_path / "steps", 0)
    pids = [job.process.pid, job.keeper.pid]
    assert len({os.getsid(0), *map(os.getsid, pids)}) == 3
    assert job.wait(20) == 1        # there is nothing to read
    assert ranks.is_alive(job.keeper.pid)
    job.clear()
    assert not any(map(ranks.is_alive, pids))


def test_what_cannot_be_started_leaves_nothing(tmp_path, monkeypatch):
    opened, begun = os.listdir("/proc/self/fd"), []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **more):
            begun.append(self)
            super().__init__(*args, **more)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(OSError, match="No such file"):
        Job([str(tmp_path / "nothing")], tmp_path / "steps", 0)
    keeper, _ = begun
    assert keeper.returncode is not None and os.listdir("/proc/self/fd") == opened
