"""Whatever ends a program while it saves, the checkpoint before can be loaded, and saving goes on from there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import nn, optim
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.testing import ranks
from tests.checkpoints import killed

ROOT = Path(__file__).parents[2]


def loaded(folder):
    """(step, what the parameters were set to) of the newest checkpoint, which must be of one piece."""
    model = nn.Linear(30, 20)
    optimizer = optim.SGD(model.parameters(), 0.5, momentum=0.5)
    step, _ = Checkpoints(folder).load(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    values = {float(v) for p in model.parameters() for v in np.unique(p.numpy())}
    assert len(values) == 1
    return step, *values


@pytest.mark.parametrize("async_op", [False, True])
def test_killed_at_every_instant(tmp_path, async_op):
    """By a process of its own, without threads: beside those that other tests have left a fork may hang."""
    program = f"from {__name__} import kill_at_every_instant as kill; kill({str(tmp_path)!r}, {async_op})"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", program], cwd=ROOT, check=True)


def kill_at_every_instant(folders, async_op):
    """Before the first thing that it asks of the file system, after it, before the second …"""
    seen = []
    for number in range(2, 200):
        folder = Path(folders, str(number))
        child = os.fork()
        if child == 0:
            try:
                killed.main(folder, number // 2, after=number % 2, async_op=async_op)
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        step, value = loaded(folder)
        assert step == value
        seen.append(step)
        again = Checkpoints(folder, keep=1)
        again.save(3, nn.Linear(30, 20))        # and what was left lying does no harm
        assert again.steps() == [3]
        assert not (folder / ".step-00000002.partial").exists() or status == 9
        if status == 0:
            break
    assert seen == sorted(seen) and seen[0] == 1 and seen[-1] == 2 and len(seen) > 20


@pytest.mark.parametrize("how", [[], ["async"]], ids=["waited for", "async"])
def test_all_ranks_are_killed(tmp_path, how):
    """Two ranks save as fast as they can, and get SIGKILL at times that nobody has chosen."""
    dice = random.Random(4)
    for round in range(3):
        folder = tmp_path / str(round)
        program = "tests.checkpoints.saving_for_ever"
        command = [*ranks.mpirun_command(), "-n", "2", sys.executable, "-m", program, folder, *how]
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as launcher:
            end = time.monotonic() + 60
            while not Checkpoints(folder).steps() and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(dice.random() / 4)
            os.killpg(launcher.pid, signal.SIGKILL)
        step, value = loaded(folder)
        assert step == value >= 1


@pytest.mark.parametrize("left", [".step-00000007.partial", ".step-00000005.deleted"])
def test_what_was_left_lying_is_no_checkpoint(tmp_path, left):
    (tmp_path / left).mkdir()
    (tmp_path / left / "index.json").write_text("{}")
    assert Checkpoints(tmp_path).steps() == []
    Checkpoints(tmp_path).save(7, nn.Linear(2, 3))
    assert Checkpoints(tmp_path).steps() == [7]
