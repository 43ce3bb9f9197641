"""What the launcher's environment says about this process, and how busy its machine is. Standard library only.

This module must be importable before NumPy (a BLAS reads its thread count once, when it is loaded) and without MPI
(one process needs none).
"""

import os
import sys
from contextlib import contextmanager

# Each launcher tells its processes how many they are, and which one each is, in variables of its own.
SIZE_VARIABLES = (
    "PMI_SIZE",               # MPICH, Intel MPI, srun --mpi=pmi2
    "OMPI_COMM_WORLD_SIZE",   # Open MPI
    "MV2_COMM_WORLD_SIZE",    # MVAPICH2
    "SLURM_STEP_NUM_TASKS",   # srun with any --mpi; a batch script before its first srun has SLURM_NTASKS but not this
)
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

RANK_PROCESS = "MINITORCH_RANK_PROCESS"     # the process that is the rank; set by itself, for the programs it starts

# A program that a rank starts is not itself a rank, and must not inherit these.
_OF_ONE_RANK = (RANK_PROCESS, "PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "MV2_COMM_WORLD_",
                "SLURM_STEP_", "SLURM_PROCID")


def _first_number(variables, default):
    for name in variables:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def launched_size():
    """Number of ranks that the launcher started, 1 without a launcher."""
    return _first_number(SIZE_VARIABLES, 1)


def launched_rank():
    """Which of them this process is, 0 without a launcher."""
    return _first_number(RANK_VARIABLES, 0)


def is_rank():
    """Whether this process is one of several ranks: not a program that a rank has started, nor a helper of
    multiprocessing, which inherit the launcher's variables. The first process of a rank that asks is the rank."""
    processes = sys.modules.get("multiprocessing.process")      # whose helpers have loaded it before anything else
    if launched_size() == 1 or processes is not None and processes.current_process().name != "MainProcess":
        return False
    return os.environ.setdefault(RANK_PROCESS, str(os.getpid())) == str(os.getpid())


def snapshot(environment):
    """A copy of os.environ. Its own copy() is a KeyError where another thread takes a variable away meanwhile."""
    found = {name: environment.get(name) for name in list(environment)}
    return {name: value for name, value in found.items() if value is not None}


def without_launcher(environment):
    """A copy of the environment in which a program is nobody's rank, so that it may start ranks of its own."""
    return {name: value for name, value in snapshot(environment).items() if not name.startswith(_OF_ONE_RANK)}


def patience():
    """By how much limits of time grow because the machine is busy with other things: processes per core, 1 to 10."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 10.0)


@contextmanager
def no_traceback_of_ctrl_c():
    """Who presses Ctrl-C inside ends the program as any other command: without a traceback, which would be of whatever
    was being done. An interactive Python shows it; where somebody else shows exceptions (comm/guard.py, a notebook), it
    is up to them."""
    try:
        yield
    except KeyboardInterrupt:
        if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
            sys.excepthook = _others_than_ctrl_c
        raise


def _others_than_ctrl_c(kind, error, trace):
    """Shows an exception that nobody has caught."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def default_blas_threads():
    """Under a launcher of several ranks, one BLAS thread per rank unless the user has set a number.

    Otherwise each rank's BLAS takes every core, and N ranks fight for them. A number in OMP_NUM_THREADS is the user's
    wish for all libraries. Call this before the first import of NumPy; later it limits the libraries already loaded.
    """
    if launched_size() == 1:
        return
    chosen_by_user = any(name in os.environ for name in THREAD_VARIABLES)
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", "1"))
    if "numpy" in sys.modules and not chosen_by_user:
        import threadpoolctl
        threadpoolctl.threadpool_limits(limits=1)
