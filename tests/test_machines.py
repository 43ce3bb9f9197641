"""Runs over two machines that share neither memory nor processes (tests/machines.py), and what becomes of them when one
of the two is gone."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks
from tests.machines import Machines, NoMachines

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "mnist_demo" / "train.py"
SMALL = ["--data", "digits", "--hidden", "8", "--batch-size", "32"]


@pytest.fixture
def machines(tmp_path):
    if missing := [name for name in ("unshare", "nsenter", "hostname") if shutil.which(name) is None]:
        pytest.skip(f"no machines of namespaces without {', '.join(missing)}")
    try:
        both = Machines(["a", "b"], tmp_path / "disk").__enter__()
    except NoMachines as refused:       # a container's root may not, either
        pytest.skip(f"this user can't have machines of namespaces: {refused}")
    yield both
    both.__exit__()


def parameters(folder):
    return json.loads((folder / "summary.json").read_text())["parameters_sha256"]


def test_each_is_a_machine_of_its_own(machines, tmp_path):
    (tmp_path / "program.py").write_text(f"""
import os, socket
from minitorch_dist import comm
world = comm.world()
open(f"{tmp_path}/disk/{{world.rank}}", "w").close()
world.barrier()
found = world.all_gather_object((socket.gethostname(), sorted(os.listdir("{tmp_path}/disk"))))
x = world.empty(3, "f4")
x[:] = world.rank
world.all_reduce(x)
if world.rank == 0:
    print(found, x)
""")
    status, said = machines.run([tmp_path / "program.py"], 4)
    assert status == 0 and said.startswith(f"{[('a', ['0', '1'])] * 2 + [('b', ['2', '3'])] * 2} [6. 6. 6.]\n"), said


def test_they_have_the_curve_of_one_process(machines, tmp_path):
    flags = [*SMALL, "--exact", "--steps", "30", "--out"]
    ranks.launch([TRAIN, *flags, tmp_path / "one"], n=1, limit=60).check()
    status, said = machines.run([TRAIN, *flags, tmp_path / "two", "--save-every", "10"], 4)
    assert status == 0, said
    assert parameters(tmp_path / "one") == parameters(tmp_path / "two")


def test_what_no_rank_can_run_is_said_once(machines, tmp_path):
    status, said = machines.run([TRAIN, *SMALL, "--micro-shards", "2", "--exact", "--out", tmp_path / "run"], 4)
    assert status == 2 and said.count("train.py: ") == 1 and "not on 4" in said and "[rank" not in said, said


def test_a_disk_that_only_one_has(machines, tmp_path):
    """Is no place for checkpoints, and good enough for what rank 0 writes alone."""
    out = tmp_path / "disk" / "run"
    status, said = machines.run([TRAIN, *SMALL, "--steps", "9", "--save-every", "5", "--out", out], 4)
    assert status == 2 and said.startswith(f"train.py: {out}: rank 2 on b doesn't see this folder"), said
    assert "[rank" not in said
    status, said = machines.run([TRAIN, *SMALL, "--steps", "9", "--out", out], 4)
    assert status == 0 and "run written" in said, said


def test_a_machine_is_gone_and_the_job_goes_on(machines, tmp_path):
    flags = [TRAIN, *SMALL, "--exact", "--steps", "400", "--save-every", "20", "--out"]
    ranks.launch([*flags, tmp_path / "one"], n=1, limit=60).check()
    job = machines.start([sys.executable, "-m", "minitorch_dist", "supervise", "-n", "4,2", "--backoff", "0",
                          "--mpirun", " ".join(ranks.mpirun_command()), "--", *flags, tmp_path / "two"])
    while not list((tmp_path / "two").glob("checkpoints/step-*")) and job.poll() is None:
        time.sleep(0.01)
    machines.end("b")
    status, said = machines.finish(job)
    if len(ranks.mpirun_command()) > 1:     # Open MPI's starts something on all machines of its list, or nothing
        assert status == 1 and "a crash loop" in said, said
        return
    assert status == 0 and re.search(r"ranks 4 → (4 → )?2", said), said
    assert parameters(tmp_path / "one") == parameters(tmp_path / "two")
