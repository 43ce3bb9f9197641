"""Operations of the emulated NCCL: each is two pieces of work on a stream.

    publish     keep this rank's input for whoever asks
    collect     ask the other ranks for theirs, write the output

All operations of a GPU run one at a time, in the order in which they were called: NCCL promises no more, and may hang
where ranks call those of several communicators in different orders.
"""

import threading
from typing import NamedTuple

import numpy as np

from minitorch_dist.backend import as_dtype

from .cuda import gpus
from .libraries import array_at
from .machine import CudaError
from .processes import REMOTE, USAGE, ask_all, this_process, words_of

ARGUMENT = 4        # ncclInvalidArgument
SUM, PROD, MAX, MIN, AVG = range(5)
ADDS = {SUM: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin, AVG: np.add}       # (NaN is no maximum)
OPERATIONS = ["sum", "product", "maximum", "minimum", "mean"]


class Call(NamedTuple):
    """What the ranks of a communicator must agree on. (A message's name is "message" for both ends.)"""

    name: str
    count: int
    dtype: str
    op: int | None = None
    root: int | None = None

    def __str__(self):
        op = "" if self.op is None else f", {OPERATIONS[self.op]}"
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.name} of {self.count} {self.dtype}{op}{root}"


class Published(NamedTuple):
    """A rank's part of an operation. data: its input, or None."""

    call: Call
    data: np.ndarray | None


class Communicator:
    """One rank's. device: its GPU. addresses: of the ranks' processes."""

    def __init__(self, name, rank, addresses, device):
        self.name, self.rank, self.size, self.device = name, rank, len(addresses), device
        self.addresses = [addresses[r] for r in range(self.size)]
        self.collectives, self.sent, self.received = 0, [0] * self.size, [0] * self.size
        self.error, self.aborted, self.last = 0, False, None    # last: (stream, number) of its last work

    def check_rank(self, what, rank):
        if not 0 <= rank < self.size:
            raise CudaError(ARGUMENT, f"{what} {rank} of {self.size} ranks")


class Operation:
    """A rank's call: from and to which addresses, of how many elements; None where it has nothing to do there."""

    def __init__(self, comm, call, source=None, to=None, peer=None):
        self.comm, self.call, self.dtype, self.peer = comm, call, np.dtype(as_dtype(call.dtype)), peer
        self.source, self.to = source, to
        for place in filter(None, (source, to)):
            gpus.check(place[0], place[1] * self.dtype.itemsize, comm.device)

    def number(self):
        """Count it: its key, and those of the other ranks' parts, {rank: key}."""
        comm, rank = self.comm, self.comm.rank
        if self.peer is None:
            self.key = comm.name, rank, "collective", comm.collectives
            self.others = {r: (comm.name, r, "collective", comm.collectives) for r in range(comm.size) if r != rank}
            comm.collectives += 1
        else:
            kind, counts = ("send", comm.sent) if self.source else ("receive", comm.received)
            self.key = comm.name, rank, kind, self.peer, counts[self.peer]
            other = "receive" if self.source else "send"
            self.others = {self.peer: (comm.name, self.peer, other, rank, counts[self.peer])}
            counts[self.peer] += 1

    def array(self, place):
        return array_at(place[0], self.dtype, (place[1],), (1,))

    def publish(self):
        self.mine = Published(self.call, self.array(self.source).copy() if self.source else None)
        this_process().published[self.key] = self.mine, [self.comm.addresses[rank] for rank in self.others]

    def collect(self, found):
        """found: {rank: Published, or CudaError} of the others."""
        comm, what = self.comm, words_of(self.key[2:])
        for rank, other in found.items():
            if isinstance(other, CudaError):
                raise CudaError(REMOTE, f"{what}: rank {comm.rank} calls {self.call}; rank {rank}: {other.args[1]}")
            if other.call != self.call:
                raise CudaError(USAGE, f"{what}: rank {comm.rank} calls {self.call}; rank {rank}: {other.call}")
        if self.to is not None:
            parts = {comm.rank: self.mine.data} | {rank: other.data for rank, other in found.items()}
            self.array(self.to)[...] = self.result(parts)

    def result(self, parts):
        comm, name = self.comm, self.call.name
        if self.peer is not None:
            return parts[self.peer]
        if name == "ncclBroadcast":
            return parts[self.call.root]
        if name == "ncclAllGather":
            return np.concatenate([parts[rank] for rank in range(comm.size)])
        if name == "ncclReduceScatter":
            parts = {rank: np.split(part, comm.size)[comm.rank] for rank, part in parts.items()}
        return added(parts, self.call.op, self.key[-1])


def added(parts, op, first):
    """The parts of all ranks as one, beginning at another rank each time. A mean is a sum of parts of a mean."""
    total = None
    for i in range(len(parts)):
        part = parts[(first + i) % len(parts)]
        part = part * part.dtype.type(1 / len(parts)) if op == AVG else part
        total = part if total is None else ADDS[op](total, part).astype(part.dtype)
    return total


open_group = threading.local()      # depth: how many ncclGroupStart; given: [(Operation, stream)]
latest = {}     # GPU -> (stream, number) of the last operation that it was given


def refuse_in_group(what):
    if getattr(open_group, "depth", 0):
        raise CudaError(USAGE, f"the emulated NCCL knows no {what} in a group")


def take(operation, handle):
    """Take a call for a stream: now, or at the end of the group."""
    comm = operation.comm
    stream = gpus.stream(handle, comm.device)
    if stream.device != comm.device:
        raise CudaError(USAGE, f"{operation.call}: a stream of GPU {stream.device} for a communicator of {comm.device}")
    if stream.graph is not None:
        gpus.refuse_in_capture("calls NCCL, which the emulated one knows no recording of,", handle)
    if getattr(open_group, "depth", 0):
        open_group.given.append((operation, handle))
    else:
        start([(operation, handle)])


def start(given):
    """Queue operations that go together: first all publish, then all collect."""
    pieces = {}     # (communicator, stream) -> its operations
    for operation, handle in given:
        pieces.setdefault((operation.comm, handle), []).append(operation)
    if len({comm for comm, _ in pieces}) < len(pieces):
        raise CudaError(USAGE, "the emulated NCCL knows no groups of several streams for one communicator")
    for (comm, _), operations in pieces.items():
        to_itself = [[o.call for o in operations if o.peer == comm.rank and (o.source is None) == receives]
                     for receives in (False, True)]
        if to_itself[0] != to_itself[1]:
            raise CudaError(USAGE, f"rank {comm.rank} sends itself {[*map(str, to_itself[0])]} and receives "
                                   f"{[*map(str, to_itself[1])]} in a group")
    before = dict(latest)
    for (comm, handle), operations in pieces.items():
        for operation in operations:
            operation.number()
        queue(comm, handle, lambda comm=comm, operations=operations: publish(operations, before.get(comm.device)))
        for operation in operations:
            this_process().posted[operation.key] = gpus.stream(handle, comm.device), gpus.number
    for (comm, handle), operations in pieces.items():
        queue(comm, handle, lambda comm=comm, handle=handle, operations=operations: collect(comm, handle, operations))
        latest[comm.device] = comm.last = gpus.stream(handle, comm.device), gpus.number
    gpus.changed.notify_all()


def queue(comm, handle, work):
    outer, gpus.current = gpus.current, comm.device
    gpus.queue(handle, lambda: None if comm.aborted else work())
    gpus.current = outer


def publish(operations, before):
    """before: (stream, number) of the operation that the GPU was given before."""
    if before is not None:
        gpus.drain(*before)
    for operation in operations:
        operation.publish()


def collect(comm, handle, operations):
    wanted = [(operation, rank, key) for operation in operations for rank, key in operation.others.items()]
    stream = gpus.stream(handle, comm.device)
    stream.doing = f"rank {comm.rank} calls {', '.join(str(operation.call) for operation in operations)}"
    found = ask_all([(comm.addresses[rank], "give", key, this_process().address) for _, rank, key in wanted],
                    lambda: comm.aborted)
    stream.doing = ""
    if comm.aborted:
        return
    answers = {}
    for (operation, rank, _), answer in zip(wanted, found, strict=True):
        answers.setdefault(operation, {})[rank] = answer
    try:
        for operation in operations:
            operation.collect(answers.get(operation, {}))
    except CudaError as error:
        comm.error = error.args[0]
        raise
