"""The ledger: counters that tests, plots and benchmarks read instead of claims.

    with ledger.record() as book:
        train_one_step()
    book.calls["world", "all_reduce"]        # how many
    book.bytes_sent["world", "all_reduce"]   # bytes this rank put on the wire
    book.launches["adam"]                    # fused kernels started

Nothing is counted while no ledger is open, so that an idle ledger costs one
truth test per call. Ledgers nest: each open one counts.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts of one stretch of a program, on one rank.

    calls       {(axis, op): number of collectives or messages}; axis is the Communicator's name
    bytes_sent  {(axis, op): bytes that this rank sent, by the algorithm's own count}
    launches    {name: number of fused kernels started}
    events      [(name, detail)] in program order, e.g. ("post", "bucket 0"); for proofs about order
    """

    calls: Counter = field(default_factory=Counter)
    bytes_sent: Counter = field(default_factory=Counter)
    launches: Counter = field(default_factory=Counter)
    events: list = field(default_factory=list)

    def total_bytes_sent(self):
        """Bytes sent by this rank, all axes and operations together."""
        return sum(self.bytes_sent.values())


open_ledgers = []   # every Ledger now recording; callers may test its truth before working out what to count


@contextmanager
def record():
    """Count everything that happens inside the block into a new Ledger."""
    book = Ledger()
    open_ledgers.append(book)
    try:
        yield book
    finally:
        open_ledgers[:] = [other for other in open_ledgers if other is not book]


def message(axis, op, sent):
    """Count one collective or message `op` on `axis`, of which this rank sent `sent` bytes."""
    for book in open_ledgers:
        book.calls[axis, op] += 1
        book.bytes_sent[axis, op] += sent


def launch(name):
    """Count one start of the fused kernel `name`."""
    for book in open_ledgers:
        book.launches[name] += 1


def event(name, detail=""):
    """Append one event to the program order."""
    for book in open_ledgers:
        book.events.append((name, detail))
