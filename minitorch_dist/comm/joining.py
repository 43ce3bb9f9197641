"""The wait for the others in MPI_Init has a limit.

MPI_Init returns when all ranks have come to it, and until then no Python runs in this process: not in other threads
either, for the call keeps Python's lock. So a child of this process watches the time, as long as the wait lasts.
"""

import contextlib
import faulthandler
import os
import re
import select
import signal
import time
import warnings

from . import mpi

SEGMENTS = r"/dev/shm/(?:mpich_shm_|sm_segment\.|vader_segment\.)\S+"      # MPICH's and Open MPI's
GRACE = 0.5     # seconds for a process to write its stack, before it is killed


@contextlib.contextmanager
def limited(seconds, report, end_process):
    """Around MPI_Init. After `seconds` (None: no limit) comes report(), and this process writes its stack and ends by
    SIGALRM: every launcher takes a rank that ends by a signal for the end of the job.

    report is called in the child; None: nothing is written. end_process: os._exit, for the child. Where MPI is
    initialised already, nothing is watched.
    """
    if seconds is None or mpi.is_loaded():
        yield
        return
    with contextlib.suppress(Exception):      # a stderr without a file
        if report:
            faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
    reads, writes = os.pipe()
    rank = os.getpid()
    with warnings.catch_warnings():     # Python 3.12 has one for a fork beside other threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(writes)
            if not select.select([reads], [], [], seconds)[0]:
                if report:
                    report()
                remove_segment_names(rank)
                os.kill(rank, signal.SIGALRM)
                time.sleep(GRACE)
                os.kill(rank, signal.SIGKILL)
        finally:
            end_process(0)
    try:
        os.close(reads)
        yield
    finally:
        os.close(writes)      # that is what the child waits for, and it hears it, too, if this process dies
        os.waitpid(child, 0)
        with contextlib.suppress(Exception):
            faulthandler.unregister(signal.SIGALRM)


def remove_segment_names(pid="self"):
    """Unlink the shared-memory files of MPI that a process has mapped: a job that is aborted would leave them behind.

    To be called when all ranks of the node have mapped them, or when they never will.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        for path in set(re.findall(SEGMENTS, maps.read())):
            with contextlib.suppress(OSError):
                os.unlink(path)
