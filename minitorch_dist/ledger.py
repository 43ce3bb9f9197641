"""The ledger: counters that tests, plots and benchmarks read instead of claims.

    with ledger.record(memory=True) as book:
        train_one_step()
    book.calls["world", "all_reduce"]        # how many
    book.bytes_sent["world", "all_reduce"]   # bytes this rank put on the wire
    book.launches["adam"]                    # fused kernels started
    book.peak["activation"]                  # the most bytes that the tape held for backward at any time
    book.spans                               # with timeline=True: what ran from when to when (see timeline.py)

Nothing is counted while no ledger is open, so that an idle ledger costs one
truth test per call. Ledgers nest: each open one counts.
"""

import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from .backend import is_array, recording

KINDS = ("parameter", "gradient", "optimizer", "activation", "buffer")


class Span(NamedTuple):
    """One stretch of time of one rank.

    track       "compute" (what the program does, or waits for) or "communication" (from posting to completion)
    name        e.g. "backward", "wait", "all_reduce"
    begin, end  seconds of `clock`
    detail      e.g. "bucket 0, 1,049,088 bytes"
    """

    track: str
    name: str
    begin: float
    end: float
    detail: str = ""


@dataclass
class Ledger:
    """Counts of one stretch of a program, on one rank.

    calls       {(axis, op): number of collectives or messages}; axis is the Communicator's name
    bytes_sent  {(axis, op): bytes that this rank sent, by the algorithm's own count, within its node or beyond}
    bytes_between_nodes  of those the ones to other nodes, of messages and of what goes through comm/nodes.py; MPI's own
                collectives don't tell, and count as 0 here
    launches    {name: number of fused kernels started}
    events      [(name, detail)] in program order, e.g. ("post", "bucket 0"); for proofs about order

    With memory=True, in bytes, by kind (see keep):

    live        what is held now; it goes on falling, as arrays die, after the block
    peak        the most that was held at any time
    course      [(kind, live bytes of it)] at each change, in order; a name of an event stands as (name, None)

    With timeline=True: spans, [Span], in the order in which they ended.
    """

    calls: Counter = field(default_factory=Counter)
    bytes_sent: Counter = field(default_factory=Counter)
    bytes_between_nodes: Counter = field(default_factory=Counter)
    launches: Counter = field(default_factory=Counter)
    events: list = field(default_factory=list)
    memory: bool = False
    timeline: bool = False
    spans: list = field(default_factory=list)
    live: dict = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    peak: dict = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    course: list = field(default_factory=list)
    _held: dict = field(default_factory=dict, repr=False)      # id of a storage -> (kind, bytes)

    def total_bytes_sent(self):
        """Bytes sent by this rank, all axes and operations together."""
        return sum(self.bytes_sent.values())

    def hold(self, storage, kind):
        """Count an array that owns its memory as live until it dies; the first kind named for it stays."""
        key = id(storage)
        if key not in self._held:
            self._held[key] = kind, storage.nbytes
            weakref.finalize(storage, self._release, key).atexit = False
            self._change(kind, storage.nbytes)

    def _release(self, key):
        kind, nbytes = self._held.pop(key)
        self._change(kind, -nbytes)

    def _change(self, kind, nbytes):
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak[kind], self.live[kind])
        self.course.append((kind, self.live[kind]))


open_ledgers = []           # every Ledger now recording; callers may test its truth before working out what to count
watch_tape = nullcontext    # inside of it this thread's tape calls keep(); set by autodiff, which lies above


@contextmanager
def record(memory=False, timeline=False):
    """Count everything that happens inside the block into a new Ledger.

    memory    count live and peak bytes too: what this thread's tape saves for backward ("activation"), the arrays that
              are differentiated by ("parameter"), and the gradients of leaves. Recording is slower meanwhile.
    timeline  note when forward, backward, optimizer steps, operations between ranks and waits begin and end
    """
    book = Ledger(memory=memory, timeline=timeline)
    open_ledgers.append(book)
    try:
        with ExitStack() as stack:
            if memory:
                stack.enter_context(watch_tape())
            yield book
    finally:
        open_ledgers[:] = [other for other in open_ledgers if other is not book]


def keep(array, kind):
    """Count the memory that `array` keeps alive as bytes of `kind`, one of KINDS, until that memory is freed.

    A view counts for all of the array that it looks into, and several views of one array count once.
    """
    if is_array(array):
        while is_array(array.base):
            array = array.base
        for book in open_ledgers:
            if book.memory:
                book.hold(array, kind)


def message(axis, op, sent, between_nodes=0):
    """Count one collective or message `op` on `axis`, of which this rank sent `sent` bytes, so many of them to other
    nodes."""
    for book in open_ledgers:
        book.calls[axis, op] += 1
        book.bytes_sent[axis, op] += sent
        book.bytes_between_nodes[axis, op] += between_nodes


def launch(name, times=1):
    """Count starts of the fused kernel `name`."""
    if recording.graph is not None and recording.graph.launched(name, times):
        return
    for book in open_ledgers:
        book.launches[name] += times


def event(name, detail=""):
    """Append one event to the program order."""
    for book in open_ledgers:
        book.events.append((name, detail))
        if book.memory:
            book.course.append((name, None))


# ---------------------------------------------------------------- time

clock = time.perf_counter       # what spans are timed by, in seconds; a simulation puts its own here (comm/link.py)
labels = []                     # what the innermost of `labelled` says about operations that begin now


def now():
    """The clock, if some ledger records a timeline; else None. To be passed to `span` later."""
    for book in open_ledgers:
        if book.timeline:
            return clock()
    return None


def span(track, name, begin, detail=""):
    """Note a stretch that began at `begin` (what `now` gave) and ends now."""
    if begin is not None:
        done = Span(track, name, begin, clock(), detail)
        for book in open_ledgers:
            if book.timeline:
                book.spans.append(done)


NOTHING = nullcontext()         # costs a tenth of a generator's


def spanning(track, name, detail=""):
    """Note the block as a Span."""
    return _spanning(track, name, detail) if open_ledgers else NOTHING


@contextmanager
def _spanning(track, name, detail):
    begin = now()
    try:
        yield
    finally:
        span(track, name, begin, detail)


def labelled(text):
    """Operations between ranks that begin inside carry this label in their Span's detail."""
    return _labelled(text) if open_ledgers else NOTHING


@contextmanager
def _labelled(text):
    labels.append(text)
    try:
        yield
    finally:
        labels.pop()
