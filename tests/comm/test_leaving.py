"""Ranks that leave the program before the others: they are missed where they won't come any more, and nowhere else."""

import pytest

from minitorch_dist.testing import ranks

SECONDS = 10

LEAVES = """
import sys, time
import numpy as np
from minitorch_dist import comm
world, x = comm.world(), np.ones(5)
for _ in range({rounds}):           # the others wait, and look whether somebody has left
    time.sleep(1.2 * (world.rank == {leaver}))
    world.all_reduce(x)
if world.rank == {leaver}:
    sys.exit()
world.all_reduce(x)                 # for who has left
"""


@pytest.mark.parametrize("n, leaver, rounds", [(2, 0, 0), (2, 1, 0), (3, 2, 2)])
def test_a_rank_of_another_node_that_leaves_is_missed(tmp_path, n, leaver, rounds):
    """Long before the stall limit: it has sent a word. None comes of ranks that are only slow."""
    (tmp_path / "program.py").write_text(LEAVES.format(leaver=leaver, rounds=rounds))
    run = ranks.launch([tmp_path / "program.py"], n, limit=SECONDS, env={"MINITORCH_NODES": str(n)})
    assert not run.timed_out and run.returncode == 1, run.report()
    told = "".join(run.stderr)
    assert f"for rank {leaver}, which has left the program" in told and "# for who has left" in told, run.report()
    assert [state["calls"] for state in run.state] == [rounds + (rank != leaver) for rank in range(n)]


LEAVES_FIRST = """
import time
import numpy as np
from minitorch_dist import comm
from minitorch_dist.comm import mpi
world = comm.world()
def slow(call):
    def slowed(self, *args):
        if not isinstance(self, mpi.Request) or isinstance(self.buffers, tuple):     # not of the check
            time.sleep(2)
        return call(self, *args)
    return slowed
if world.rank == 0:         # as if there were gigabytes to be received
    mpi.MpiEngine.gather, mpi.Request.wait = slow(mpi.MpiEngine.gather), slow(mpi.Request.wait)
work = world.gather(np.empty((2, 5)) if world.rank == 0 else None, np.ones(5), async_op={posted})
if {posted}:
    work.wait()
print("went on")
"""


@pytest.mark.parametrize("posted, nodes", [(False, 2), (True, 1)])
def test_who_has_done_its_part_may_leave(tmp_path, posted, nodes):
    """While the others are still at theirs."""
    (tmp_path / "program.py").write_text(LEAVES_FIRST.format(posted=posted))
    run = ranks.launch([tmp_path / "program.py"], 2, limit=2 * SECONDS, env={"MINITORCH_NODES": str(nodes)}).check()
    assert run.stdout == ["went on\n"] * 2 and "".join(run.stderr) == "" and run.seconds > 2, run.report()


OTHERS_LEFT = """
import numpy as np
from minitorch_dist import comm
world = comm.world()
if world.rank < 2:
    world.recv(np.ones(1), 1 - world.rank)
"""


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_who_has_left_is_told_where_others_wait_too_long(tmp_path, nodes):
    """Of other nodes, too, by who has waited and ends the job."""
    (tmp_path / "program.py").write_text(OTHERS_LEFT)
    run = ranks.launch([tmp_path / "program.py"], 4, limit=2 * SECONDS,
                       env={"MINITORCH_STALL_SECONDS": "3", "MINITORCH_NODES": str(nodes)})
    assert not run.timed_out and run.returncode == 1, run.report()
    told = "".join(run.stderr)
    assert "the stall limit of 3 s" in told and "these ranks have left the program: [2, 3]" in told, run.report()
