"""crews.call: what ranks.call does, by ranks that stay until the last test (minitorch_dist/testing/crew.py); and
launch: what ranks.launch does with a program, by the same ranks."""

import time

from minitorch_dist.testing import ranks
from minitorch_dist.testing.crew import Crews

crews = Crews()


def threads(n):
    """Environment for n ranks of exact mode: of BLAS threads a process alone has two, where several have one each."""
    return {"OMP_NUM_THREADS": "2"} if n == 1 else {}


def launch(arguments, n, limit=60, env=None, variables=None):
    """What `mpirun -n N python *arguments` does, without the start of N processes, most of a short run; a Run.

    env          what the ranks must have been started with, of which there may be few: BLAS threads, nodes
    variables    of the environment for this run alone

    For a program that is to raise, to hang or to be killed: ranks.launch.
    """
    begin = time.monotonic()
    file, *flags = map(str, arguments)
    ended = crews.call("tests.here:as_rank", n, (file, flags, variables or {}), limit, env)
    status = next((one.status for one in ended if one.status), 0)
    return ranks.Run([file, *flags], status, False, time.monotonic() - begin, [one.stdout for one in ended],
                     [one.stderr for one in ended], [{"waiting": False, "calls": one.calls} for one in ended],
                     [""] * n, "")
