"""The mismatch check: before a collective runs, the ranks make sure that all of them mean the same one.

Each rank numbers the collectives that it calls on a communicator, and shows a fingerprint of each: of the operation,
dtype, shape, reduction and root. If the n-th ones differ, all ranks raise a MismatchError with the table of what each
has called and from where. On a node the fingerprints stand in the shared lines (comm/shared.py: one store, and a look
at the others' lines while waiting for them); across nodes they travel in a small all-reduce of (f, ~f), whose maxima
are the largest fingerprint and the complement of the smallest. The counts of an all_to_all, which are each rank's own,
are gathered and compared.

MINITORCH_CHECK=0 switches it off.
"""

import collections
import hashlib
import os
import time

import numpy as np

from .state import state
from .where import caller, line

FINGERPRINT_BITS = 48   # the upper 16 bits of a word hold the number of the call
TEXT_BYTES = 1024

SILENT = "(another one, posted and not waited for yet)"

_fingerprints = {}


class MismatchError(RuntimeError):
    """The ranks have called different collectives. The communicator can't be used any more."""

    __module__ = "minitorch_dist.comm"   # where users find it


def wanted():
    """Whether to check, by the environment."""
    return os.environ.get("MINITORCH_CHECK", "1") != "0"


def fingerprint(key):
    """48 bits that are equal on all ranks for equal keys. key: (op, dtype, shape, detail), None where there is none,
    and of_piece."""
    found = _fingerprints.get(key)
    if found is None:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=FINGERPRINT_BITS // 8).digest()
        if len(_fingerprints) > 10000:   # a program with ever new shapes
            _fingerprints.clear()
        found = _fingerprints[key] = int.from_bytes(digest, "little")
    return found


def describe(key, place):
    """A line for the table: what was called, and from where."""
    op, dtype, shape, detail = key[:4]
    arguments = [] if dtype is None else [f"{dtype}[{', '.join(map(str, shape))}]"]
    return f"{op}({', '.join(arguments + [detail] * bool(detail))})\n{line(place)}"


def of_piece(key, place):
    """The key of a collective on a piece of the window, which must be the same one on all ranks. place: (segment,
    offset)."""
    segment, offset = place
    return *key, (segment.number, offset)


def error(name, number, texts):
    """The MismatchError of call `number` on communicator `name`; texts[r] is what rank r says, or None."""
    rows = [("rank", "calls", "at")]
    for rank, text in enumerate(texts):
        rows.append((str(rank), *(text or f"{SILENT}\n").split("\n")))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = "\n".join(f"  {rank:{widths[0]}}  {call:{widths[1]}}  {place}".rstrip() for rank, call, place in rows)
    calls = {text and text.split("\n")[0] for text in texts}
    pieces = "They pass different pieces of the shared window (two arrays of one shape, in another order?). " \
        if len(calls) == 1 else ""
    return MismatchError(
        f"the ranks of {name!r} don't agree on their collective number {number}:\n{table}\n"
        f"{pieces}All ranks must call the same collectives in the same order, with the same dtype, shape, op and root")


class AcrossNodes:
    """The check of a communicator whose ranks live on several nodes. The same four calls as in shared.Window.

    Every rank posts the small all-reduce and hears its outcome by itself, the ranks of one node too: heard by one rank
    of each node, it would have to be passed on, by a rank that may be busy. (MPI goes through the node's memory
    within a node anyway.)
    """

    def __init__(self, engine, name):
        self.engine, self.name = engine, name
        self._texts = engine.split(0, engine.rank)    # a rank may have posted more checks than another when both speak
        self._posted, self._pending = 0, collections.deque()    # (number, key, place, words, request), oldest first
        self._error = None

    def post(self, key, place=None):
        """Say which collective this rank has come to; its number. place: the user's line, for a posted call."""
        if self._error is not None:
            raise self._error
        self._posted += 1
        mine = fingerprint(key)
        words = np.array([mine, ~mine & (1 << 64) - 1], np.uint64)
        request = self.engine.all_reduce(words, "max", async_op=True)
        self._pending.append((self._posted, key, place, words, request))
        return self._posted

    def arrived(self, number):
        """True once all ranks have come to call `number`. MismatchError if they mean different ones."""
        while self._pending and self._pending[0][0] <= number:
            if not self._pending[0][-1].test():
                return False
            self._compare(*self._pending.popleft())
        return True

    def meet(self, number):
        """Return when all ranks have come to call `number`. MismatchError if they mean different ones."""
        while self._pending and self._pending[0][0] <= number:
            self._pending[0][-1].wait()
            self._compare(*self._pending.popleft())

    def late(self, number=None):
        """Of ranks on other nodes nothing is known."""
        return []

    def pause(self, spins):
        """Between two looks."""
        time.sleep(1e-4)
        return spins + 1

    def _compare(self, number, key, place, words, request):
        mine = fingerprint(key)
        if int(words[0]) == mine and int(words[1]) == ~mine & (1 << 64) - 1:
            return
        text = np.zeros(TEXT_BYTES, np.uint8)
        said = describe(key, place or caller()).encode()[:TEXT_BYTES]
        text[:len(said)] = np.frombuffer(said, np.uint8)
        everything = np.empty((self.engine.size, TEXT_BYTES), np.uint8)
        self._texts.all_gather(everything, text)
        self._error = error(self.name, number, [row.tobytes().rstrip(b"\0").decode(errors="replace")
                                                for row in everything])
        raise self._error


class Counts:
    """The check of an all_to_all with counts, where all ranks mean one: what each sends to another is what that one has
    room for. (Where less comes, MPI leaves the rest of `out` as it was, and says nothing.) As AcrossNodes."""

    def __init__(self, engine, name, send_counts, recv_counts):
        self.name = name
        self._everybodys = np.empty((engine.size, 2, engine.size), np.int64)
        self._request = engine.all_gather(self._everybodys, np.array([send_counts, recv_counts]), async_op=True)

    def arrived(self, _=None):
        """True once all ranks have said their counts. MismatchError if they don't fit."""
        if self._request is not None and self._request.test():
            self._compare()
        return self._request is None

    def meet(self, _=None):
        """Return when all ranks have said their counts. MismatchError if they don't fit."""
        if self._request is not None:
            self._request.wait()
            self._compare()

    def pause(self, spins):
        """Between two looks."""
        time.sleep(1e-4)
        return spins + 1

    def _compare(self):
        self._request = None
        sent, room = self._everybodys[:, 0], self._everybodys[:, 1].T
        if odd := [f"rank {i} sends rank {j} {sent[i, j]} rows, which has room for {room[i, j]}"
                   for i, j in np.argwhere(sent != room)]:
            raise MismatchError(f"all_to_all on {self.name!r}: {'; '.join(odd[:4])}: send_counts[j] of rank i must be "
                                f"recv_counts[i] of rank j")


class Checked:
    """A posted operation of the engine, finished when it is and its check has passed."""

    def __init__(self, check, number, request):
        self.check, self.number, self.request = check, number, request

    def test(self):
        """True once finished; never waits."""
        return self.check.arrived(self.number) and self.request.test()

    def wait(self, timeout=None):
        """Finish it. False if that took more than `timeout` seconds."""
        if timeout is None:
            self.check.meet(self.number)
            state.met = True
            return self.request.wait()
        limit, spins = time.monotonic() + timeout, 0
        while not self.check.arrived(self.number):
            if time.monotonic() > limit:
                return False
            spins = self.check.pause(spins)
        state.met = True
        return self.request.wait(max(0.0, limit - time.monotonic()))
