"""Ends a job whose supervisor has gone without a word, as SIGKILL ends one: a small process beside each job.

    python keeper.py LINE GRACE STREAMS VARIABLE…
        LINE: MINITORCH_SUPERVISED=…, by which the job's processes are known; STREAMS: 3,4, where its output is read

Its standard input is a pipe that the supervisor holds open. When that ends, it does what the supervisor does at
SIGTERM: it hands the signal on to the ranks (those that have one of the VARIABLEs), which save, and kills what is left
after GRACE seconds. What they write meanwhile it reads, and drops: a line that nobody could read would be an error, and
end them before they have saved. It is run as a file, and imports nothing of the package, to be there at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path


def found(line):
    """(pid, its parent's, its environment as lines) of this machine's living processes that have the line in it,
    whoever is their parent. (mpirun starts ranks in sessions of their own.) None are found where there is no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")        # empty of one that has ended
            if os.fsencode(line) in environment:
                parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
                yield int(folder.name), int(parent), environment


def ranks(line, variables):
    """[pid] of those that a launcher has started as ranks."""
    names = {name.encode() for name in variables}
    parents = {pid: parent for pid, parent, environment in found(line)
               if any(entry.partition(b"=")[0] in names for entry in environment)}
    return [pid for pid, parent in parents.items() if parent not in parents]


def send(pids, number):
    """A signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def drain(stream):
    """Read a pipe to its end."""
    while os.read(stream, 1 << 16):
        pass


def main(line, grace, streams, *variables):
    drain(0)
    for stream in streams.split(","):
        threading.Thread(target=drain, args=(int(stream),), daemon=True).start()
    send(ranks(line, variables) or [pid for pid, *_ in found(line)], signal.SIGTERM)
    deadline = time.monotonic() + float(grace)
    while left := [pid for pid, *_ in found(line)]:
        if time.monotonic() > deadline:
            send(left, signal.SIGKILL)
        time.sleep(0.1)
    folder = Path(line.partition("=")[2]).parent
    with contextlib.suppress(OSError):      # the supervisor's, which can't clear it away any more
        for steps in folder.glob("attempt-*"):
            steps.unlink()
        folder.rmdir()


if __name__ == "__main__":
    main(*sys.argv[1:])
