"""All-reduce written on send and receive, four times, for reading: what an MPI library does inside.

    world.all_reduce(x, algorithm="ring")       # or MINITORCH_COMM=ring for all reductions of a program
    world.all_reduce(x, algorithm=mine)         # or MINITORCH_COMM=folder/file.py:mine: a function like those here

Each function is called on every rank with a flat array x, which becomes the reduction of all ranks' x. `combine` is
np.add, np.maximum or np.minimum. Any number of ranks, any length. The results have the same bits on all ranks, but
each algorithm adds in an order of its own. ALGORITHMS says how many steps each takes, one after the other, and how
many elements a rank sends; tests count both.

                          steps            elements sent per rank    best for
    ring                  2(N-1)           2(N-1)/N · n              long arrays: the fewest bytes, any N
    recursive_doubling    log₂N            log₂N · n                 short arrays: the fewest steps
    halving_doubling      2 log₂N          2(N-1)/N · n              long arrays on many ranks, N a power of two
    tree                  2⌈log₂N⌉         up to ⌈log₂N⌉ · n         what one would write first

Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; the ring:
Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms".
"""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .mpi import INTERNAL_TAG
from .reduction import cut


def ring(wire, x, combine):
    """Everybody sends one N-th to the right and receives one from the left, 2(N-1) times.

    First half, reduce-scatter: each piece travels once round and collects. With N = 3, and pieces a, b, c:

                 at the start         after step 1           after step 2
        rank 0   a0    a1    a2       a0    a1    ca2        a0    abc1  ca2       sends a0, then ca2
        rank 1   b0    b1    b2       ab0   b1    b2         ab0   b1    abc2      sends b1, then ab0
        rank 2   c0    c1    c2       c0    bc1   c2         abc0  bc1   c2        sends c2, then bc1

    piece p is complete after N - 1 steps, on rank p - 1.

    Second half, all-gather: the complete pieces travel once round, and overwrite.
    """
    n, me = wire.size, wire.rank
    right, left = (me + 1) % n, (me - 1) % n
    pieces = [x[slice(*cut(x.size, i, n))] for i in range(n)]
    theirs = np.empty(max(piece.size for piece in pieces), x.dtype)
    for step in range(n - 1):
        leaving, growing = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        arrived = theirs[:growing.size]
        wire.exchange(leaving, right, arrived, left)
        combine(arrived, growing, out=growing)
    for step in range(n - 1):
        wire.exchange(pieces[(me + 1 - step) % n], right, pieces[(me - step) % n], left)


def recursive_doubling(wire, x, combine):
    """Exchange everything with rank XOR 1, XOR 2, XOR 4 …: after step k, groups of 2^k ranks hold the same sum.

        rank     0     1     2     3
        XOR 1    01    01    23    23
        XOR 2   0123  0123  0123  0123
    """
    def doubling(me, real):
        theirs = np.empty_like(x)
        for distance in powers_below(power_of_two(wire.size)):
            peer = me ^ distance
            wire.exchange(x, real(peer), theirs, real(peer))
            combine(*((x, theirs) if me < peer else (theirs, x)), out=x)
    folded(wire, x, combine, doubling)


def halving_doubling(wire, x, combine):
    """Rabenseifner's: halve the array with every exchange of the first half, double it in the second.

        rank       0        1        2        3          the pieces that a rank still adds up:
        XOR 2    01..     01..     ..23     ..23         half of the array with the rank two away,
        XOR 1    0...     .1..     ..2.     ...3         a quarter with its neighbour: reduce-scatter is done
        XOR 1    01..     01..     ..23     ..23         and back again with complete pieces: all-gather
        XOR 2    0123     0123     0123     0123
    """
    def halving(me, real):
        p = power_of_two(wire.size)
        ends = [cut(x.size, i, p)[0] for i in range(p)] + [x.size]
        theirs = np.empty_like(x)
        for distance in reversed(powers_below(p)):
            peer = me ^ distance
            kept, given = group(ends, me, distance), group(ends, peer, distance)
            mine, arrived = x[kept], theirs[kept]
            wire.exchange(x[given], real(peer), arrived, real(peer))
            combine(*((mine, arrived) if me < peer else (arrived, mine)), out=mine)
        for distance in powers_below(p):
            peer = me ^ distance
            wire.exchange(x[group(ends, me, distance)], real(peer), x[group(ends, peer, distance)], real(peer))
    folded(wire, x, combine, halving)


def tree(wire, x, combine):
    """Binomial tree: reduce to rank 0, then broadcast along the same tree.

        0 ◄── 1        step 1: every odd rank sends to the one before it
        2 ◄── 3
        0 ◄── 2        step 2: every odd multiple of 2 to the one 2 before it, and so on; then everything backwards
    """
    me, theirs = wire.rank, np.empty_like(x)
    distances = powers_below(wire.size)
    for distance in distances:
        if me & distance:
            wire.send(x, me - distance)
            break
        if me + distance < wire.size:
            wire.recv(theirs, me + distance)
            combine(x, theirs, out=x)
    for distance in reversed(distances):
        if me % (2 * distance) == distance:
            wire.recv(x, me - distance)
        elif me % (2 * distance) == 0 and me + distance < wire.size:
            wire.send(x, me + distance)


# ---------------------------------------------------------------- what they share

def powers_below(n):
    """[1, 2, 4 …] up to the last one below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def power_of_two(n):
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def surplus(n):
    """How many ranks are more than a power of two."""
    return n - power_of_two(n)


def folded(wire, x, combine, among):
    """Run `among(me, real)` on a power of two of ranks, renumbered `me`; real(i) is who has number i.

    The first ranks form pairs: the even one hands its x to the odd one, and gets the result from it at the end. N = 5:

        rank     0 ──► 1    2    3    4
        me             0    1    2    3
    """
    more = surplus(wire.size)
    paired = wire.rank < 2 * more
    if paired and wire.rank % 2 == 0:
        wire.send(x, wire.rank + 1)
        wire.recv(x, wire.rank + 1)
        return
    if paired:
        theirs = np.empty_like(x)
        wire.recv(theirs, wire.rank - 1)
        combine(theirs, x, out=x)
    among(_number(wire.rank, more), lambda i: 2 * i + 1 if i < more else i + more)
    if paired:
        wire.send(x, wire.rank - 1)


def _number(rank, more):
    return rank // 2 if rank < 2 * more else rank - more


def group(ends, me, distance):
    """Of the pieces that end at `ends`: the slice of all those that the aligned group of `distance` ranks holds."""
    first = me // distance * distance
    return slice(ends[first], ends[first + distance])


class Wire:
    """Send and receive of a communicator, counted by its ledger, apart from the messages of its users. ValueError for
    what is no rank, or the calling one, and for an array that isn't C-contiguous."""

    def __init__(self, communicator):
        self.rank, self.size, self._comm = communicator.rank, communicator.size, communicator

    def send(self, x, to):
        """Send x, and return when it may be overwritten."""
        self._comm._send("send", x, to, INTERNAL_TAG)

    def recv(self, x, source):
        """Receive into x."""
        self._comm._recv("recv", x, source, INTERNAL_TAG)

    def isend(self, x, to):
        """Begin to send x; the Work's wait() returns when it may be overwritten."""
        return self._comm._send("isend", x, to, INTERNAL_TAG)

    def irecv(self, x, source):
        """Begin to receive into x; it is there after the Work's wait()."""
        return self._comm._recv("irecv", x, source, INTERNAL_TAG)

    def exchange(self, leaving, to, arriving, source):
        """Send and receive at the same time."""
        work = self.isend(leaving, to)
        self.recv(arriving, source)
        work.wait()


# ---------------------------------------------------------------- a function of one's own

def named(algorithm):
    """What `algorithm` stands for: "folder/file.py:name" for that function, anything else for itself.

    ValueError where the file can't be found or imported, or has no such function of three arguments.
    """
    path, colon, name = algorithm.rpartition(":") if isinstance(algorithm, str) else ("", "", "")
    if not colon:
        return algorithm
    if not os.path.isfile(path):
        raise ValueError(f"algorithm={algorithm!r}: there is no file {os.path.abspath(path)}")
    module = _imported(algorithm, path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        what = f"{name} is {function!r}, " if hasattr(module, name) else ""
        raise ValueError(f"algorithm={algorithm!r}: {what}{path} has no function {name}; it has "
                         f"{', '.join(own) or 'none'}")
    try:
        inspect.signature(function).bind("wire", "x", "combine")
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm={algorithm!r}: {name} is called as {name}(wire, x, combine), and can't be: {error}"
                         ) from error
    return function


def _imported(algorithm, path):
    """The module of a file; under its name others find it too, unless they have one of that name."""
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ValueError(f"algorithm={algorithm!r}: {path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    new = sys.modules.setdefault(name, module) is module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if new:
            del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f" in line {lines[-1]}" if lines else ""
        raise ValueError(f"algorithm={algorithm!r}: importing {path} raised {type(error).__name__}{where}: {error}"
                         ) from error
    return module


# ---------------------------------------------------------------- how much they move

class Algorithm(NamedTuple):
    """function(wire, x, combine); steps(N), one after the other; sent(N, rank, n): elements that a rank sends, of n.

    The cost model (comm/cost.py) needs two more, counted along the longest chain of messages: how many times the
    array's length travels, `moved(N)`, and is added up, `added(N)`.
    """

    function: Callable
    steps: Callable
    sent: Callable
    moved: Callable
    added: Callable


def _length(n, piece, pieces):
    first, last = cut(n, piece % pieces, pieces)
    return last - first


def _in_fold(N, rank, n, sent):
    """What a rank sends when folded: `sent(p, me)` among the power of two, and x for the partner."""
    p, more = power_of_two(N), surplus(N)
    if rank < 2 * more and rank % 2 == 0:
        return n
    return sent(p, _number(rank, more)) + (n if rank < 2 * more else 0)


def _halving_doubling_sent(N, rank, n):
    def sent(p, me):
        held = [cut(n, me // d * d, p)[0] for d in powers_below(p)]
        ends = [cut(n, me // d * d + d - 1, p)[1] for d in powers_below(p)]
        return n - _length(n, me, p) + sum(ends) - sum(held)
    return _in_fold(N, rank, n, sent)


def _children(N, rank):
    """Of the binomial tree."""
    below = powers_below(N) if rank == 0 else powers_below(rank & -rank)
    return sum(rank + d < N for d in below)


def _log(N):
    return power_of_two(N).bit_length() - 1


def _folds(N):
    return int(surplus(N) > 0)


ALGORITHMS = {
    "ring": Algorithm(
        ring, lambda N: 2 * (N - 1),
        lambda N, rank, n: 2 * n - _length(n, rank + 1, N) - _length(n, rank + 2, N),   # all pieces but one, twice
        lambda N: 2 * (N - 1) / N, lambda N: (N - 1) / N),
    "recursive_doubling": Algorithm(
        recursive_doubling, lambda N: _log(N) + 2 * _folds(N),
        lambda N, rank, n: _in_fold(N, rank, n, lambda p, me: n * _log(p)),
        lambda N: _log(N) + 2 * _folds(N), lambda N: _log(N) + _folds(N)),
    "halving_doubling": Algorithm(
        halving_doubling, lambda N: 2 * _log(N) + 2 * _folds(N), _halving_doubling_sent,
        lambda N: 2 * (1 - 1 / power_of_two(N)) + 2 * _folds(N), lambda N: 1 - 1 / power_of_two(N) + _folds(N)),
    "tree": Algorithm(
        tree, lambda N: 2 * (N - 1).bit_length(),
        lambda N, rank, n: n * (_children(N, rank) + (rank > 0)),
        lambda N: 2 * (N - 1).bit_length(), lambda N: (N - 1).bit_length()),
}
