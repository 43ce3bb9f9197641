"""What a supervisor (supervise/) and the job that it has started say to each other: two variables of the environment,
and a file of steps.

MINITORCH_SUPERVISED   the file; where it is set, a program's --resume is auto
MINITORCH_RESTARTS     how often the job was started before: 0, 1, …

The supervisor knows nothing else of the program, which has to go on by itself from what it has saved. From the steps
that it notes, it is told where it failed and what was lost; training.Run notes them. Of a program without a Run it
learns the steps of its checkpoints, from Checkpoints: whether it gets further. Beside the file of steps lies another
while a run is under way: Open MPI's mpirun may end with status 0 where a machine is lost in mid-run.
"""

import contextlib
import errno
import os
import sys
from typing import NamedTuple

SUPERVISED = "MINITORCH_SUPERVISED"
RESTARTS = "MINITORCH_RESTARTS"


def is_supervised():
    """Whether a supervisor will start this job again when it fails."""
    return bool(os.environ.get(SUPERVISED))


def restarts():
    """How often this job was started before; 0 without a supervisor."""
    return int(os.environ.get(RESTARTS, "0"))


class StepLog:
    """The file of steps, of one rank, written step by step so that a kill loses none; nothing without a supervisor.

    first   the step that the run goes on from; 0: it begins

    Where it can't be written (the disk is full; the rank's machine is another one than the supervisor's), the job says
    so on stderr and goes on: it is noted no further. StepLog.current is the one that is open.
    """

    current = None

    def __init__(self, first):
        self.path, self.file = os.environ.get(SUPERVISED), None
        StepLog.current = self
        if self.path:
            self.file = _opened(self.path)
            with contextlib.suppress(OSError):      # then a status of 0 is believed
                open(under_way(self.path), "w").close()
        self._write(f"from {first}\n")

    def done(self, seconds):
        """One more step is done, which has taken so long."""
        self._write(f"{seconds:.6f}\n")

    def saved(self, step):
        """A checkpoint of so many steps is on disk."""
        self._write(f"saved {step}\n")

    def close(self):
        """The run has ended, well or by an error, and not by being lost."""
        StepLog.current = None
        if self.path:
            with contextlib.suppress(OSError):      # it was never there
                os.unlink(under_way(self.path))
        self._close_file()

    def _close_file(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _write(self, line):
        if self.file is not None and not _written(self.file, line):
            self._close_file()


def checkpoint_written(step, log=None):
    """A checkpoint of so many steps is on disk. Noted where no StepLog is open, but that of the run whose it is."""
    if log is not None and log is StepLog.current:
        log.saved(step)
    elif is_supervised() and StepLog.current is None and (file := _opened(os.environ[SUPERVISED])) is not None:
        _written(file, f"saved {step}\n")
        os.close(file)


def _opened(path):
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        _untold(error)
        return None


def _written(file, line):
    """Whether the line is in the file; if not, stderr is told why."""
    try:
        if os.write(file, line.encode()) < len(line):       # the disk has become full by it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True
    except OSError as error:
        _untold(error)
        return False


def under_way(path):
    """The file beside that of steps. (None of its lines: these may be missing on a disk that is full.)"""
    return f"{path}.under-way"


def _untold(error):
    print(f"the supervisor isn't told of further steps, and will take failures for such without progress: {error}",
          file=sys.stderr, flush=True)


class Steps(NamedTuple):
    """What was noted.

    first       the step that the run went on from; None where no run has begun
    durations   seconds of each step since
    saved       the last step of which a checkpoint was written since, or None
    under_way   whether a run has begun and, as far as it tells, not ended
    """

    first: int | None
    durations: list
    saved: int | None = None
    under_way: bool = False


def read_steps(path):
    """The Steps of a file."""
    try:
        with open(path) as file:
            lines = file.read().split("\n")[:-1]      # whole ones
    except FileNotFoundError:
        lines = []
    begun = [i for i, line in enumerate(lines) if line.startswith("from ")]
    first, durations, saved = int(lines[begun[-1]].split()[1]) if begun else None, [], None
    for line in lines[begun[-1] + 1 if begun else 0:]:
        if line.startswith("saved"):
            saved = int(line.split()[1])
        else:
            durations.append(float(line))
    if first is None:
        return Steps(None, [], saved)
    return Steps(first, durations, saved, os.path.exists(under_way(path)))
