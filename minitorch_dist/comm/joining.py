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
LOOK_EVERY = 0.1        # seconds between two looks of the child
JOINED = b"!"           # what the child is told


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
    try:
        with warnings.catch_warnings():     # Python 3.12 has one for a fork beside other threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except RuntimeError:        # Python 3.12 forks no more when it runs atexit functions
        os.close(reads)
        os.close(writes)
        with _alarmed(seconds):
            yield
        return
    if child == 0:
        try:
            os.close(writes)
            _watch(rank, reads, seconds, report)
        finally:
            end_process(0)
    try:
        yield
    finally:
        os.write(writes, JOINED)
        os.close(writes)
        os.close(reads)
        with contextlib.suppress(ChildProcessError):    # SIGCHLD is ignored, or the program asks for all its children
            os.waitpid(child, 0)
        with contextlib.suppress(Exception):
            faulthandler.unregister(signal.SIGALRM)


@contextlib.contextmanager
def _alarmed(seconds):
    """This process ends by SIGALRM after so many whole seconds."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _watch(rank, reads, seconds, report):
    """The child's part: wait until the rank has written, or has died, or has taken too long."""
    os.setpgid(0, 0)        # else a launcher that kills the rank kills this process, too, before it has tidied up
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())    # the program's handlers are for the rank alone
    names, limit = set(), time.monotonic() + seconds
    while time.monotonic() < limit:
        if readable(reads, min(LOOK_EVERY, max(0, limit - time.monotonic()))):
            if os.read(reads, 1) == JOINED:
                return
            break
        if os.getppid() != rank:        # the pipe has no end yet: a process that the rank has forked holds it open
            break
        names |= segment_names(rank)
    else:
        if report:
            report()
        remove(segment_names(rank))
        os.kill(rank, signal.SIGALRM)
        time.sleep(GRACE)
        os.kill(rank, signal.SIGKILL)
    remove(names)


def readable(file, seconds):
    """Wait until there is something to read, or the end; False after so many seconds. For every number of a file,
    while select.select takes those below 1024."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(min(seconds * 1000, 2**31 - 1)))


def remove_segment_names():
    """Unlink the shared-memory files of MPI that this process has mapped: an aborted job would leave them behind.

    To be called when all ranks of the node have mapped them, or when they never will.
    """
    remove(segment_names("self"))


def segment_names(pid):
    """Paths of the shared-memory files of MPI that a process has mapped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        return set(re.findall(SEGMENTS, maps.read()))
    return set()


def remove(paths):
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
