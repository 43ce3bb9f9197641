"""The guard: a rank that fails ends the whole job, and says why. No rank waits for one that will never come.

What a plain `mpirun python` does when one rank fails is wait for ever, or end with status 0. Here:

    the rank                              what the guard does
    raises, in any thread                 prints the traceback, ends the job
    calls sys.exit(3)                     ends the job with status 3 (sys.exit() and sys.exit(0): see "leaves")
    calls os._exit                        prints where, ends the job, with a status other than 0
    leaves in the usual way               waits at the exit until all have left; a rank that waits for one that has
                                          left prints its own place and ends the job
    is interrupted from the keyboard      ends the job quietly with status 130
    is killed by a signal                 (the launcher ends the job)

Every message is one write to stderr, each line prefixed by `[rank R of N]`. That a rank has left is one word in
memory shared by the node's ranks; across nodes only the first three rows hold.
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback

from .memory import map_together
from .state import state

LOOK_EVERY = 0.1    # seconds between two looks of the watchdog
GRACE = 0.5         # seconds that a call may still take after its peer has left: the data may be on its way
ABORT_LIMIT = 5     # seconds for MPI_Abort, then the process ends itself by SIGALRM
PACKAGE = os.path.dirname(__file__)


def install(engine):
    """Guard this process, a rank of the engine's communicator (the world). Collective."""
    Guard(engine).start()


class Guard:
    """Hooks into every way in which a Python process ends."""

    def __init__(self, engine):
        self.engine, self.pid, self.exit_ends_job = engine, os.getpid(), None
        words = map_together(engine, 8) if engine.on_one_node else None
        self.gone = None if words is None else [word.cast("Q") for word in words]   # gone[r][0] = 1: rank r has left
        self.end_process, self.raise_exit = os._exit, sys.exit

    def start(self):
        self.engine.barrier()
        remove_segment_names()
        sys.excepthook = self.on_exception
        threading.excepthook = self.on_thread_exception
        os._exit, sys.exit = self.on_end_process, self.on_exit
        atexit.register(self.at_exit)
        if self.gone is not None:
            threading.Thread(target=self.watch, name="minitorch-guard", daemon=True).start()

    def is_rank(self):
        """False in a process forked by a rank, which ends as it likes."""
        return os.getpid() == self.pid

    def end_job(self, status, message):
        """Print the message, with this rank's prefix, and end all ranks."""
        signal.alarm(ABORT_LIMIT)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        prefix = f"[rank {self.engine.rank} of {self.engine.size}] "
        text = "".join(prefix + line + "\n" for line in message.rstrip().splitlines())
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        self.engine.abort(status)
        self.end_process(status)

    # ------------------------------------------------------------ ways to end

    def on_exception(self, kind, error, trace):
        if not self.is_rank():
            sys.__excepthook__(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            self.end_job(130, "")
        else:
            self.end_job(1, "".join(traceback.format_exception(kind, error, trace)))

    def on_thread_exception(self, args):
        if args.exc_type is not SystemExit:
            self.on_exception(args.exc_type, args.exc_value, args.exc_traceback)

    def on_end_process(self, status):
        if self.is_rank():
            self.end_job(status or 1, f"os._exit({status}) was called:\n" + _stack(sys._getframe(1)))
        self.end_process(status)

    def on_exit(self, status=None):
        """sys.exit: nothing happens yet, for the exception may be caught; at_exit looks."""
        if status not in (None, 0) and threading.current_thread() is threading.main_thread() and self.is_rank():
            self.exit_ends_job = status, f"sys.exit({status!r}) was called:\n" + _stack(sys._getframe(1))
        self.raise_exit(status)

    def at_exit(self):
        """Runs at the end of the program, before MPI is finalised."""
        if not self.is_rank():
            return
        if self.exit_ends_job:
            status, message = self.exit_ends_job
            self.end_job(status if isinstance(status, int) else 1, message)
        if self.gone is None:
            return
        self.gone[self.engine.rank][0] = 1
        while not all(word[0] for word in self.gone):
            self.engine.make_progress()
            time.sleep(0.002)

    # ------------------------------------------------------------ waiting for somebody who has left

    def watch(self):
        """The watchdog's thread. No MPI call here, except the abort."""
        while not self.gone[self.engine.rank][0]:
            time.sleep(LOOK_EVERY)
            call = state.call
            if call is None or not self.gone_among(call):
                continue
            time.sleep(GRACE)
            if state.call is call:
                self.end_job(1, self.describe(call))

    def gone_among(self, call):
        return [rank for rank in call.waits_for() if self.gone[rank][0]]

    def describe(self, call):
        gone = " and ".join(f"rank {rank}" for rank in self.gone_among(call))
        frame = sys._current_frames().get(state.thread)
        return f"waits in {call} for {gone}, which has left the program. It waits here:\n{_stack(frame)}"


def _stack(frame):
    """The stack that led to a frame, without the frames of this package: the last line is the user's call."""
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == PACKAGE:
        frame = frame.f_back
    return "".join(traceback.format_stack(frame))


def remove_segment_names():
    """Unlink MPICH's shared-memory files once all ranks have mapped them: an aborted job would leave them behind."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(r"/dev/shm/mpich_shm_\S+", maps.read())):
            with contextlib.suppress(OSError):
                os.unlink(path)
