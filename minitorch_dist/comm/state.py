"""Where this rank is: the call that it waits in. The watchdog reads it, and so does the launcher of tests."""

import faulthandler
import json
import os
import signal
import threading
import time
import zlib
from typing import NamedTuple

LATE, MESSAGE = 1, 2     # what a rank hasn't done: called it, sent it

LOOKS = 50      # at a record that is being written, a millisecond apart


class Like(NamedTuple):
    """What is worth knowing of an array, without holding it."""

    dtype: object
    shape: tuple

    @classmethod
    def of(cls, x):
        """That of an array; None for None."""
        return None if x is None else cls(x.dtype, x.shape)


class Call(NamedTuple):
    """A blocking call that has begun and not yet returned. Other threads look at it whenever they like, and must not
    keep an array alive that the call's own thread has done with."""

    communicator: object
    op: str
    like: object = None     # the Like of its array, or None
    peer: object = None     # rank within the communicator, or None for a collective
    number: object = None   # which one of the communicator's collectives it is, or of the peer's messages with its tag;
                            # None: the collective posted last; 0: nobody can say, or it ends by itself
    tag: object = None      # of the message that it receives

    def awaited(self):
        """{world rank: LATE or MESSAGE (comm/circle.py)}: whose call or message must come before this call can return,
        as far as that is certain (of a message its sender must know, too)."""
        if self.number == 0:
            return {}
        if self.tag is not None:
            return {self.communicator.world_ranks[self.peer]: MESSAGE} if self.communicator.token else {}
        return dict.fromkeys(self.communicator.late(self.number), LATE)

    def waits_for(self):
        """World ranks without which this call can't return."""
        ranks = self.communicator.world_ranks
        if self.peer is not None and self.op in ("send", "recv", "isend", "irecv"):
            return [ranks[self.peer]]
        return [rank for i, rank in enumerate(ranks) if i != self.communicator.rank]

    def __str__(self):
        array = "" if self.like is None else f"{self.like.dtype}{list(self.like.shape)}"
        peer = "" if self.peer is None else f", peer {self.peer}"
        return f"{self.op}({array}{peer}) on {self.communicator.name!r}"


class RankState:
    """`call` is what this rank waits in (None: it computes), `calls` how many blocking calls it has begun, `thread`
    the identifier of the thread that has begun the last one, `turn` that of the thread whose turn it is to compute
    where several take turns (None: the main one computes). `met` is whether all ranks have come to the call that
    this one waits in, and MPI does the rest: who leaves then has done its part. `waited` are the seconds spent in
    calls, of one within another once; None as long as nobody has set it to 0.0, to be told.

    `threads` are the identifiers of those that have called. Of messages `sent` and `received` count, by (communicator's
    token, the other's world rank, tag), those that were posted; `groups` are the tokens that this process knows."""

    def __init__(self):
        self.call, self.calls, self.thread, self.turn, self.met = None, 0, None, None, False
        self.waited = self._since = None
        self._file = None
        self.threads, self.groups, self.sent, self.received = set(), set(), {}, {}
        self.look = lambda call: None       # the guard's, for calls that don't wait, but come again and again

    def enter(self, call):
        """A blocking call begins."""
        self.calls += 1
        thread = threading.get_ident()
        if thread != self.thread:
            self.thread = thread
            self.threads.add(thread)
        self.call, self.met = call, False
        if self.waited is not None:
            self._count()
            self._since = time.perf_counter()
        if self._file is not None:
            self._write()

    def leave(self):
        """The blocking call has returned, or raised."""
        self.call, self.met = None, False
        if self.waited is not None:
            self._count()
        if self._file is not None:
            self._write()

    def _count(self):
        if self._since is not None:
            self.waited += time.perf_counter() - self._since
            self._since = None

    def record_in(self, folder, rank):
        """From now on keep the state in `folder`/rank-R.state (JSON), and dump all stacks there upon SIGUSR1.

        The signal's dump works wherever the rank hangs, inside C code too.
        """
        self._file = os.open(os.path.join(folder, f"rank-{rank}.state"), os.O_RDWR | os.O_CREAT)
        self._stacks = open(os.path.join(folder, f"rank-{rank}.stack"), "w")   # faulthandler needs it open from now on
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
        self._write()

    def _write(self):
        call = self.call
        record = {"pid": os.getpid(), "calls": self.calls, "waiting": call is not None}
        if call is not None:
            record |= {"axis": call.communicator.name, "op": call.op, "peer": call.peer}
            if call.like is not None:
                record |= {"shape": list(call.like.shape), "dtype": str(call.like.dtype)}
        os.pwrite(self._file, _record(record), 0)


def _record(values):
    """A line, with a checksum before it; the next one is written over it, and what lies behind its end is old."""
    text = json.dumps(values).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_state(path):
    """dict of what a rank has last written into its state file; None if it has written nothing, or only a part of it.

    One may read while the rank writes, and Linux doesn't promise that a read sees a write whole or not at all: a
    record whose checksum is wrong is read again.
    """
    for _ in range(LOOKS):
        try:
            with open(path, "rb") as file:
                checksum, _, text = file.readline().rstrip(b"\n").partition(b" ")
        except FileNotFoundError:
            return None
        if checksum == b"%08x" % zlib.crc32(text):
            return json.loads(text)
        time.sleep(1e-3)
    return None


state = RankState()   # a process has one
