"""NCCL between emulated GPUs, of this process and of others on this host: its functions.

Work on a stream is done when it is waited for, so that one process may wait for its GPU while another, whose part it
needs, waits for MPI: threads of each process answer the others, and run the work that is asked for (processes.py).
What real programs hang in or get wrong numbers from is an error: ranks whose calls differ, one whose process is gone.
Source: NVIDIA, "NCCL User Guide", version 2.25.
"""

import ctypes
import os
import threading

import numpy as np

from minitorch_dist.backend import as_dtype

from .cuda import INT, KINDS, POINTER, api, gpus, put, text_of
from .machine import CudaError
from .operations import ADDS, ARGUMENT, AVG, Call, Communicator, Operation, open_group, refuse_in_group, start, take
from .processes import REMOTE, USAGE, ask_all, leave, this_process

__all__ = ["leave"]      # for hooks.py

VERSION = 22501
CUDA = 1        # ncclUnhandledCudaError
TYPES = [*map(np.dtype, ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")), as_dtype("bfloat16")]


class UniqueId(ctypes.Structure):
    """128 bytes, handed over by value."""

    _fields_ = [("bytes", ctypes.c_char * 128)]


KINDS["U"] = UniqueId


def nccl(kinds, name):
    """api, for functions that give NCCL's errors."""
    def keep(function):
        def call(*arguments):
            try:
                return function(*arguments)
            except CudaError as error:
                status, words = error.args
                raise CudaError(status if status in (ARGUMENT, USAGE, REMOTE) else CUDA, words) from error
        api(kinds, name)(call)
        return function
    return keep


# ---------------------------------------------------------------- communicators

@nccl("p", "ncclGetVersion")
def version(out):
    put(out, INT, VERSION)


@api("i", "ncclGetErrorString", result=POINTER)
def error_string(status):
    return text_of(status)


@nccl("p", "ncclGetUniqueId")
def unique_id(out):
    here = this_process()
    here.ids += 1
    ctypes.memmove(out, f"{here.name}/{here.ids}".encode().ljust(128, b"\0"), 128)


def joined(identifier, size, rank, device):
    """A handle of a new communicator, once all ranks have come."""
    name, here = identifier.rstrip(b"\0").decode(errors="replace"), this_process()
    if not name.startswith("emulated-nccl-") or not 0 <= rank < size:
        raise CudaError(ARGUMENT, f"rank {rank} of {size}; the id begins with {identifier[:16]}")
    gpu = f"GPU {device} of {os.uname().nodename}"
    addresses, = ask_all([("\0" + name.split("/")[0], "join", name, size, rank, here.address, gpu)])
    if isinstance(addresses, CudaError):
        raise addresses
    return gpus.handle(Communicator(name, rank, addresses, device))


@nccl("piUip", "ncclCommInitRankConfig")
def init_rank(out, size, identifier, rank, config):
    refuse_in_group("ncclCommInitRankConfig")
    blocking = ctypes.c_int.from_address(config + 16).value if config else 1
    if blocking not in (1, -2 ** 31):
        raise CudaError(USAGE, "the emulated NCCL knows no communicators that don't block")
    put(out, POINTER, joined(bytes(identifier), size, rank, gpus.current))


@nccl("pip", "ncclCommInitAll")
def init_all(out, size, devices):
    devices = (ctypes.c_int * size).from_address(devices)[:] if devices else [*range(size)]
    identifier = ctypes.create_string_buffer(128)
    unique_id(ctypes.addressof(identifier))
    handles = [None] * size

    def join(rank):
        try:
            with gpus.changed:
                handles[rank] = joined(identifier.raw, size, rank, devices[rank])
        except CudaError as error:
            handles[rank] = error
        with gpus.changed:
            gpus.changed.notify_all()
    for rank in range(size):
        threading.Thread(target=join, args=(rank,), daemon=True).start()
    gpus.changed.wait_for(lambda: None not in handles)
    for rank, handle in enumerate(handles):
        if isinstance(handle, CudaError):
            raise handle
        put(out + 8 * rank, POINTER, handle)


@nccl("piipp", "ncclCommSplit")
def split(comm, color, key, out, config):
    raise CudaError(USAGE, "the emulated NCCL knows no ncclCommSplit")


@nccl("p", "ncclCommDestroy")
def destroy(comm):
    """It waits for what this communicator was given."""
    found = gpus.get(comm, Communicator)
    refuse_in_group("ncclCommDestroy")
    try:
        if found.last is not None:
            gpus.drain(*found.last)
    finally:
        forget(comm)


@nccl("p", "ncclCommAbort")
def abort(comm):
    gpus.get(comm, Communicator).aborted = True
    forget(comm)


def forget(comm):
    found = gpus.handles.pop(comm)
    this_process().gone.add((found.name, found.rank))
    gpus.changed.notify_all()


@nccl("pp", "ncclCommGetAsyncError")
def async_error(comm, out):
    put(out, INT, gpus.get(comm, Communicator).error)


@nccl("pp", "ncclCommCount")
def count(comm, out):
    put(out, INT, gpus.get(comm, Communicator).size)


@nccl("pp", "ncclCommUserRank")
def user_rank(comm, out):
    put(out, INT, gpus.get(comm, Communicator).rank)


@nccl("pp", "ncclCommCuDevice")
def cu_device(comm, out):
    put(out, INT, gpus.get(comm, Communicator).device)


# ---------------------------------------------------------------- operations

@nccl("", "ncclGroupStart")
def group_start():
    open_group.depth = getattr(open_group, "depth", 0) + 1
    if open_group.depth == 1:
        open_group.given = []


@nccl("", "ncclGroupEnd")
def group_end():
    if not getattr(open_group, "depth", 0):
        raise CudaError(USAGE, "ncclGroupEnd without ncclGroupStart")
    open_group.depth -= 1
    if not open_group.depth:
        start(open_group.given)


def call_of(name, count, dtype, op=None, root=None):
    if not 0 <= dtype < len(TYPES) or op is not None and op not in ADDS:
        raise CudaError(ARGUMENT, f"{name}: type {dtype}, operation {op}")
    if op == AVG and TYPES[dtype].kind in "iu":
        raise CudaError(ARGUMENT, f"{name}: the emulated NCCL knows no mean of {TYPES[dtype]}")
    return Call(name, count, str(TYPES[dtype]), op, root)


def disjoint(call, source, to, in_place):
    """Refuse input and output that overlap, but for what the guide calls in place: the one begins at the other's
    in_place-th element."""
    size = np.dtype(as_dtype(call.dtype)).itemsize
    low, high = sorted([source, to])
    apart = low[0] + low[1] * size <= high[0]
    larger, smaller = (source, to) if source[1] > to[1] else (to, source)
    if not apart and smaller[0] != larger[0] + in_place * size:
        raise CudaError(USAGE, f"{call}: input at {source[0]:#x} and output at {to[0]:#x} overlap, but not in place")


def collective(comm, call, source, to, stream, in_place=0):
    found = gpus.get(comm, Communicator)
    if call.root is not None:
        found.check_rank("root", call.root)
    if call.count:          # otherwise there is nothing to do
        if source and to:
            disjoint(call, source, to, in_place)
        take(Operation(found, call, source, to), stream)


def rank_of(comm):
    return gpus.get(comm, Communicator).rank


@nccl("ppziipp", "ncclAllReduce")
def all_reduce(source, to, count, dtype, op, comm, stream):
    collective(comm, call_of("ncclAllReduce", count, dtype, op), (source, count), (to, count), stream)


@nccl("ppziiipp", "ncclReduce")
def reduce(source, to, count, dtype, op, root, comm, stream):
    collective(comm, call_of("ncclReduce", count, dtype, op, root), (source, count),
               (to, count) if rank_of(comm) == root else None, stream)


@nccl("ppziipp", "ncclBroadcast")
def broadcast(source, to, count, dtype, root, comm, stream):
    collective(comm, call_of("ncclBroadcast", count, dtype, root=root),
               (source, count) if rank_of(comm) == root else None, (to, count), stream)


@nccl("pziipp", "ncclBcast")
def bcast(buffer, count, dtype, root, comm, stream):
    broadcast(buffer, buffer, count, dtype, root, comm, stream)


@nccl("ppzipp", "ncclAllGather")
def all_gather(source, to, count, dtype, comm, stream):
    collective(comm, call_of("ncclAllGather", count, dtype), (source, count),
               (to, count * gpus.get(comm, Communicator).size), stream, rank_of(comm) * count)


@nccl("ppziipp", "ncclReduceScatter")
def reduce_scatter(source, to, count, dtype, op, comm, stream):
    collective(comm, call_of("ncclReduceScatter", count, dtype, op),
               (source, count * gpus.get(comm, Communicator).size), (to, count), stream, rank_of(comm) * count)


def message(comm, count, dtype, peer, stream, **place):
    found = gpus.get(comm, Communicator)
    found.check_rank("peer", peer)
    if not count:
        raise CudaError(USAGE, "the emulated NCCL knows no messages of nothing")
    take(Operation(found, call_of("message", count, dtype), peer=peer, **place), stream)


@nccl("pziipp", "ncclSend")
def send(source, count, dtype, peer, comm, stream):
    message(comm, count, dtype, peer, stream, source=(source, count))


@nccl("pziipp", "ncclRecv")
def recv(to, count, dtype, peer, comm, stream):
    message(comm, count, dtype, peer, stream, to=(to, count))
