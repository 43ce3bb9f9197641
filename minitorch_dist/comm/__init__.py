"""Ranks that talk to each other. `world()` is all of them; everything else is a method of Communicator."""

import functools
import os

from minitorch_dist.launch_env import is_rank, launched_rank, launched_size

from ..torch_names import of_module
from . import mpi
from .communicator import Communicator, name_of, world_of_one
from .guard import Guard
from .mesh import DeviceMesh
from .mismatch import MismatchError
from .state import state
from .work import Work

__getattr__ = of_module(__name__)
__all__ = ["Communicator", "DeviceMesh", "MismatchError", "Work", "launched_size", "name_of", "world"]


@functools.cache
def world():
    """The Communicator of all ranks that the launcher started. The first call is collective.

    One process, started without a launcher, is a world of one rank and never loads MPI. Of several, one that fails
    ends the job, before this call too, and so does one that doesn't come (comm/guard.py). RuntimeError where the
    launcher started several ranks that can't find each other.

    MINITORCH_COMM chooses who reduces (Communicator.algorithm; folder/file.py:name for a function of one's own),
    MINITORCH_NODES=2 pretends that the ranks live on two machines (comm/nodes.py), MINITORCH_CHECK=0 switches off the
    check that all ranks call the same collectives, and MINITORCH_STALL_SECONDS says after how long a wait is given up
    (comm/guard.py).
    """
    if "MINITORCH_RANK_STATE" in os.environ:
        state.record_in(os.environ["MINITORCH_RANK_STATE"], launched_rank())
    size = launched_size()
    algorithm = os.environ.get("MINITORCH_COMM", "auto")
    if size == 1 and not mpi.is_loaded():
        return world_of_one(algorithm)
    mpi.pretended_nodes()       # all ranks find the same, and can say so as long as none has joined
    with _guard.joining():
        MPI = mpi.load(size)
        if MPI.COMM_WORLD.size == 1:
            return world_of_one(algorithm)
        engine = mpi.MpiEngine(MPI, MPI.COMM_WORLD.Dup())   # messages of other users of mpi4py stay apart
        _guard.start(engine)
    return Communicator(engine, "world", algorithm=algorithm, token=1)


_guard = Guard(launched_rank(), launched_size(), world)
if is_rank():
    _guard.begin()
