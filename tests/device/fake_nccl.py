"""A stand-in for cupy.cuda.nccl: the same calls on the same pointers, carried by MPI, and written down in
fake_cuda.events. With CuPy 14's signatures; types and operations have NCCL's own numbers."""

import ctypes
import hashlib
import types

import numpy as np
from mpi4py import MPI

from minitorch_dist.comm.mpi import wrapping_sum

from .fake_cuda import current, events

TYPES = {"INT8": 0, "UINT8": 1, "INT32": 2, "UINT32": 3, "INT64": 4, "UINT64": 5, "FLOAT16": 6, "FLOAT32": 7,
         "FLOAT64": 8}
OPERATIONS = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4}
MPI_OF = {0: MPI.SUM, 2: MPI.MAX, 3: MPI.MIN, 4: MPI.SUM}
DTYPES = {number: np.dtype(name.lower()) for name, number in TYPES.items()}
group = None        # the messages of an open group


def memory(pointer, count, datatype):
    """The elements at an address. It must be the communicator's GPU's, which is the current one."""
    dtype = DTYPES[datatype]
    assert pointer.device == current()
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


def mpi_op(op, datatype):
    narrow = op == OPERATIONS["SUM"] and DTYPES[datatype].itemsize == 1
    return wrapping_sum(MPI, DTYPES[datatype]) if narrow else MPI_OF[op]


def get_unique_id():
    return hashlib.shake_128(b"an identifier").digest(128)


class NcclCommunicator:

    def __init__(self, ndev, commId, rank):
        assert type(commId) is bytes and commId == get_unique_id()
        self.comm, self.device = MPI.COMM_WORLD.Dup(), current()
        assert (ndev, rank) == (self.comm.size, self.comm.rank)
        events.append(("init", rank))

    def _note(self, call, stream):
        assert type(stream) is int and current() == self.device
        events.append((call, stream))

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._note("allReduce", stream)
        out = memory(recvbuf, count, datatype)
        self.comm.Allreduce(memory(sendbuf, count, datatype).copy(), out, mpi_op(op, datatype))
        if op == OPERATIONS["AVG"]:
            out /= self.comm.size

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._note("reduce", stream)
        total = np.empty(count, DTYPES[datatype])
        self.comm.Reduce(memory(sendbuf, count, datatype).copy(), total, mpi_op(op, datatype), root)
        if self.comm.rank == root:
            memory(recvbuf, count, datatype)[...] = total / self.comm.size if op == OPERATIONS["AVG"] else total

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._note("reduceScatter", stream)
        x = memory(sendbuf, recvcount * self.comm.size, datatype).copy()
        out = memory(recvbuf, recvcount, datatype)
        self.comm.Reduce_scatter_block(x, out, mpi_op(op, datatype))
        if op == OPERATIONS["AVG"]:
            out /= self.comm.size

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._note("allGather", stream)
        self.comm.Allgather(memory(sendbuf, count, datatype).copy(),
                            memory(recvbuf, count * self.comm.size, datatype))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._note("broadcast", stream)
        x = memory(sendbuff, count, datatype).copy()
        self.comm.Bcast(x, root)
        memory(recvbuff, count, datatype)[...] = x

    def send(self, sendbuf, count, datatype, peer, stream):
        assert count > 0
        self._note("send", stream)
        group.append(self.comm.Isend(memory(sendbuf, count, datatype).copy(), peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        assert count > 0
        self._note("recv", stream)
        group.append(self.comm.Irecv(memory(recvbuf, count, datatype), peer))


def groupStart():
    global group
    group = []


def groupEnd():
    global group
    MPI.Request.Waitall(group)
    group = None


def module():
    """What `from cupy.cuda import nccl` gives."""
    return types.SimpleNamespace(
        available=True, get_unique_id=get_unique_id, NcclCommunicator=NcclCommunicator, groupStart=groupStart,
        groupEnd=groupEnd, **{f"NCCL_{name}": number for name, number in (TYPES | OPERATIONS).items()})
