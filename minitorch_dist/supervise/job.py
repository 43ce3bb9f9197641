"""One start of a job: mpirun and its ranks, of which none is left when it has ended."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from ..attempt import RESTARTS, SUPERVISED
from ..launch_env import RANK_VARIABLES, without_launcher
from ..testing.ranks import is_alive
from . import keeper

TAIL = 12           # lines that are the last words
KEPT = 60           # lines of each stream; behind a rank's words Open MPI has some twenty of its own
GONE_SECONDS = 2    # for ranks to go by themselves when mpirun has gone; they are killed then
READ_SECONDS = 2    # for what was written last to be read
LONGEST = 1 << 16   # bytes of a line that are held at once


class Job:
    """A job under way. Its output passes through; its last lines are kept.

    command   as a list; mpirun and what follows it
    steps     the file in which it notes its steps (attempt.py)
    restarts  how often it was started before
    grace     seconds that it has to end when this process, the supervisor, has gone (keeper.py)
    """

    def __init__(self, command, steps, restarts, grace=30.0):
        self.steps = Path(steps)
        self.line = f"{SUPERVISED}={steps}"     # of its processes' environment
        environment = without_launcher(os.environ) | {SUPERVISED: str(steps), RESTARTS: str(restarts)}
        streams, ends = zip(os.pipe(), os.pipe(), strict=True)      # of stdout and stderr, where they are read, written
        # Sessions of their own: Ctrl-C comes to the supervisor alone, which hands it on, once.
        self.keeper = subprocess.Popen([sys.executable, "-IS", keeper.__file__, self.line, str(grace),
                                        ",".join(map(str, streams)), *RANK_VARIABLES], stdin=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=streams)
        sources = [open(stream, "rb") for stream in streams]
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=ends[0],
                                            stderr=ends[1], start_new_session=True)
        except OSError:
            self._dismiss_keeper()
            for source in sources:
                source.close()
            raise
        finally:
            for end in ends:
                os.close(end)
        self.tails = deque(maxlen=KEPT), deque(maxlen=KEPT)
        self.readers = [threading.Thread(target=_copy, args=streams, daemon=True) for streams in
                        zip(sources, (sys.stdout, sys.stderr), self.tails, strict=True)]
        for reader in self.readers:
            reader.start()

    def wait(self, seconds):
        """The status, as shells have it (128 + the signal that has killed mpirun itself); None if it isn't over after
        so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(seconds)
            return 128 - status if status < 0 else status
        return None

    def signal(self, number):
        """Hand on a signal to this machine's ranks: Open MPI's mpirun would hand it on, and kill them a moment later,
        while they save. Where none is found, to what was started."""
        keeper.send(keeper.ranks(self.line, RANK_VARIABLES) or [self.process.pid], number)

    def kill(self):
        """End it at once, if it hasn't ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def clear(self):
        """When mpirun has ended: [pid] of processes that it has left, and that had to be killed."""
        end = time.monotonic() + GONE_SECONDS
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        keeper.send(left, signal.SIGKILL)
        end = time.monotonic() + GONE_SECONDS
        while any(is_alive(pid) for pid in left) and time.monotonic() < end:      # they still hold a run's folder
            time.sleep(0.02)
        for reader in self.readers:
            reader.join(READ_SECONDS)
        self._dismiss_keeper()
        return left

    def _dismiss_keeper(self):
        self.keeper.kill()
        self.keeper.communicate()

    def processes(self):
        """[pid] of this machine's living processes of the job."""
        return [pid for pid, *_ in keeper.found(self.line)]

    def said(self):
        """The last lines of its stderr, without Open MPI's notices if there are others; of its stdout, where MPICH's
        launcher speaks, if there are none."""
        out, err = (list(tail) for tail in self.tails)
        return [line for line in without_notices(err) or err or out if line.strip("=- ")][-TAIL:]


def without_notices(lines):
    """Without what stands between two lines of dashes, as all does that Open MPI's launcher says."""
    found, inside = [], False
    for line in lines:
        if len(line) >= 70 and not line.strip("-"):
            inside = not inside
        elif not inside and line:
            found.append(line)
    return found


def _copy(source, target, tail):
    """Copy a stream line by line, as it is; one without an end in pieces."""
    with source:
        for line in iter(lambda: source.readline(LONGEST), b""):
            tail.append(line.decode(errors="replace").rstrip())
            write(target, line)


def write(target, data):
    """Write bytes to one of our own streams. One that is closed (None), whose reader has gone (`| head`) or whose disk
    is full doesn't stop the job."""
    with contextlib.suppress(OSError, ValueError):
        if target is not None:
            target.buffer.write(data)
            target.buffer.flush()
