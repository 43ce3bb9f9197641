"""NCCL between emulated GPUs (tests/device/emulated): of one process, which needs no CuPy, and of two."""

import ctypes
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from .emulated import machine, nccl, processes
from .emulated.cuda import API, as_c, gpus
from .emulated.machine import CudaError, Event, Stream
from .on_emulated import down, up

INT8, INT32, FLOAT16, FLOAT32, FLOAT64 = 0, 2, 6, 7, 8
A, B = (np.random.default_rng(rank).standard_normal(6).astype(np.float32) for rank in range(2))


def call(name, *arguments):
    """One of NCCL's functions, as C calls it but for errors, which are raised."""
    with gpus.changed:
        return API["nccl" + name][2](*arguments)


def asked(name, comm):
    """What a function says of a communicator."""
    out = ctypes.c_int()
    call(name, comm, ctypes.addressof(out))
    return out.value


def communicators(count=2, devices=None):
    out = (ctypes.c_void_p * count)()
    call("CommInitAll", ctypes.addressof(out), count, devices and ctypes.addressof((ctypes.c_int * count)(*devices)))
    return out[:]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "count", 2)
    monkeypatch.setattr(gpus, "memories", [machine.Memory(), machine.Memory()])
    monkeypatch.setattr(gpus, "nulls", [machine.Stream(device=0), machine.Stream(device=1)])
    gpus.failure = None
    yield
    with gpus.changed:
        for stream in gpus.streams():
            stream.work.clear()
        gpus.changed.notify_all()
        gpus.changed.wait_for(lambda: not any(stream.runner for stream in gpus.streams()), 5)
        gpus.failure, gpus.current = None, 0


class Rank:
    """A rank of this process: its communicator, a stream, arrays on its GPU."""

    def __init__(self, device, comm):
        self.device, self.comm = device, comm
        self.stream = gpus.handle(Stream(False, device))

    def __getattr__(self, name):
        """all_reduce(…) -> ncclAllReduce(…, communicator, stream)"""
        return lambda *arguments: call("".join(map(str.capitalize, name.split("_"))), *arguments, self.comm,
                                       self.stream)

    def up(self, array):
        gpus.current = self.device
        at = up(gpus, array, self.stream)
        gpus.synchronize(self.stream)
        return at

    def down(self, at, like):
        return down(gpus, at, like, self.stream)


def ranks(count=2):
    return [Rank(i, comm) for i, comm in enumerate(communicators(count))]


# what a call is given beside its arrays; elements of input and output; what each rank gets of a and b
OPERATIONS = {
    "all_reduce sum": ((6, FLOAT32, 0), 6, 6, lambda a, b: [a + b, a + b]),
    "all_reduce product": ((6, FLOAT32, 1), 6, 6, lambda a, b: [a * b, a * b]),
    "all_reduce maximum": ((6, FLOAT32, 2), 6, 6, lambda a, b: [np.maximum(a, b)] * 2),
    "all_reduce minimum": ((6, FLOAT32, 3), 6, 6, lambda a, b: [np.minimum(a, b)] * 2),
    "all_reduce mean": ((6, FLOAT32, 4), 6, 6, lambda a, b: [a / 2 + b / 2] * 2),
    "reduce": ((6, FLOAT32, 0, 1), 6, 6, lambda a, b: [None, a + b]),
    "broadcast": ((6, FLOAT32, 1), 6, 6, lambda a, b: [b, b]),
    "reduce_scatter": ((3, FLOAT32, 0), 6, 3, lambda a, b: [(a + b)[:3], (a + b)[3:]]),
    "all_gather": ((6, FLOAT32), 6, 12, lambda a, b: [np.concatenate([a, b])] * 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_collectives(name):
    """None happens before somebody waits: then both ranks' parts do. Later work on the input comes later."""
    given, _, size, expected = OPERATIONS[name]
    places = []
    for rank, x in zip(ranks(), (A, B), strict=True):
        source, to = rank.up(x), rank.up(np.full(size, np.nan, np.float32))
        getattr(rank, name.split()[0])(source, to, *given)
        gpus.fill(source, 0, x.nbytes, rank.stream)
        places.append((rank, to))
        raw = np.frombuffer((ctypes.c_char * (4 * size)).from_address(to), np.float32)
        assert np.isnan(raw).all()
    for (rank, to), wanted in zip(places, expected(A, B), strict=True):
        found = rank.down(to, np.empty(size, np.float32))
        np.testing.assert_array_equal(found, np.full(size, np.nan) if wanted is None else wanted)
        assert asked("CommGetAsyncError", rank.comm) == 0


def test_in_place_and_narrow_types():
    two = ranks()
    for dtype, number in (("i1", INT8), ("f2", FLOAT16), ("f8", FLOAT64)):
        a, b = (np.arange(5) * k + 100 for k in (1, 3))
        places = [rank.up(x.astype(dtype)) for rank, x in zip(two, (a, b), strict=True)]
        for rank, at in zip(two, places, strict=True):
            rank.all_reduce(at, at, 5, number, 0)
        for rank, at in zip(two, places, strict=True):
            np.testing.assert_array_equal(rank.down(at, a.astype(dtype)), (a + b).astype(dtype))
    whole = [rank.up(np.concatenate([A, B])) for rank in two]
    for rank, at in zip(two, whole, strict=True):
        rank.reduce_scatter(at, at + 24 * rank.device, 6, FLOAT32, 0)
        rank.all_gather(at + 24 * rank.device, at, 6, FLOAT32)
    for rank, at in zip(two, whole, strict=True):
        np.testing.assert_array_equal(rank.down(at, np.concatenate([A, B])), 2 * np.concatenate([A, B]))


def test_sums_of_three_are_in_no_order_that_one_could_rely_on():
    gpus.count, found = 3, set()
    gpus.memories.append(machine.Memory())
    gpus.nulls.append(machine.Stream(device=2))
    three = ranks(3)
    for _ in range(3):
        places = [rank.up(np.array([x], np.float32)) for rank, x in zip(three, (1e8, -1e8, 1), strict=True)]
        for rank, at in zip(three, places, strict=True):
            rank.all_reduce(at, at, 1, FLOAT32, 0)
        sums = {rank.down(at, np.empty(1, np.float32)).item() for rank, at in zip(three, places, strict=True)}
        assert len(sums) == 1       # every rank has the same
        found |= sums
    assert found == {0, 1}


def test_messages_of_a_group_go_together():
    """Also those to oneself; two to one rank arrive in their order."""
    two = ranks()
    places = [(rank.up(x), rank.up(np.zeros(9, np.float32))) for rank, x in zip(two, (A, B), strict=True)]
    for rank, (source, to) in zip(two, places, strict=True):
        other = 1 - rank.device
        call("GroupStart")
        for begin, peer in ((0, other), (3, other), (1, rank.device)):
            rank.send(source + 4 * begin, 3, FLOAT32, peer)
        for begin, peer in ((0, other), (3, other), (6, rank.device)):
            rank.recv(to + 4 * begin, 3, FLOAT32, peer)
        call("GroupEnd")
    for rank, (_, to), mine, others in zip(two, places, (A, B), (B, A), strict=True):
        np.testing.assert_array_equal(rank.down(to, np.empty(9, np.float32)), [*others, *mine[1:4]])


@contextmanager
def refused(words):
    """An error, of a wait that is short."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CudaError, match=words):
        patch.setattr(machine, "PATIENCE", 0.3)
        yield


def fails(words, rank):
    """An error where a rank waits for its stream."""
    with refused(words):
        gpus.synchronize(rank.stream)
    gpus.failure = None


def test_messages_that_are_no_match():
    one, other = ranks()
    at, to = one.up(A), other.up(B)
    one.send(at, 6, FLOAT32, 1)
    fails("send 0 to rank 1: rank 0 calls message of 6 float32; rank 1: .* not called receive 0 from rank 0", one)
    one, other = ranks()
    one.send(at, 5, FLOAT32, 1)
    other.recv(to, 6, FLOAT32, 0)
    fails("rank 1 calls message of 6 float32; rank 0: message of 5 float32", other)
    one, other = ranks()
    for rank, place in ((one, at), (other, to)):        # each waits for the other to receive
        rank.send(place, 6, FLOAT32, 1 - rank.device)
        rank.recv(place, 6, FLOAT32, 1 - rank.device)
    fails("work isn't done", one)


@pytest.mark.parametrize("first, second, words", [
    (("all_reduce", 6, FLOAT32, 0), ("all_reduce", 5, FLOAT32, 0),
     "rank 0 calls ncclAllReduce of 6 float32, sum; rank 1: ncclAllReduce of 5 float32, sum"),
    (("all_reduce", 6, FLOAT32, 0), ("all_reduce", 6, INT32, 0), "of 6 float32, sum; .* of 6 int32, sum"),
    (("all_reduce", 6, FLOAT32, 0), ("all_reduce", 6, FLOAT32, 2), "sum; .*maximum"),
    (("broadcast", 6, FLOAT32, 0), ("broadcast", 6, FLOAT32, 1), "root 0; .*root 1"),
    (("broadcast", 6, FLOAT32, 0), ("all_reduce", 6, FLOAT32, 0), "ncclBroadcast.*ncclAllReduce"),
    (("all_reduce", 6, FLOAT32, 0), None, "rank 1 has not called collective 0 after 0.3 seconds")],
    ids=["counts", "types", "operations", "roots", "calls", "none"])
def test_calls_that_differ(first, second, words):
    one, other = ranks()
    for rank, given in ((one, first), (other, second)):
        if given is not None:
            at = rank.up(A)
            getattr(rank, given[0])(at, at, *given[1:])
    fails(words, one)
    assert asked("CommGetAsyncError", one.comm) in (5, 6)


def test_a_communicator_s_collectives_and_messages_have_one_order():
    """Though they are on streams that wait for nothing."""
    one, other = ranks()
    aside = [gpus.handle(Stream(False, device)) for device in range(2)]
    at, to = one.up(A), other.up(B)
    one.all_reduce(at, at, 6, FLOAT32, 0)
    call("Recv", to, 6, FLOAT32, 0, other.comm, aside[1])
    call("Send", at, 6, FLOAT32, 1, one.comm, aside[0])
    other.all_reduce(to, to, 6, FLOAT32, 0)
    fails("work isn't done", one)


@pytest.mark.parametrize("same_order", [True, False])
def test_communicators_are_used_in_one_order(same_order):
    """Though they have streams of their own, which wait for nothing."""
    one, other = ranks()
    more = communicators()
    second = gpus.handle(Stream(False, 0)), gpus.handle(Stream(False, 1))
    for rank in (one, other):
        uses = [(rank.comm, rank.stream), (more[rank.device], second[rank.device])]
        rank.at = [rank.up(A), rank.up(B)]
        for i in (0, 1) if same_order or rank is one else (1, 0):
            call("AllReduce", rank.at[i], rank.at[i], 6, FLOAT32, 0, *uses[i])
    if same_order:
        np.testing.assert_array_equal(one.down(one.at[0], A), 2 * A)
    else:
        fails("work isn't done", one)


def test_the_null_stream_is_that_of_the_communicator_s_gpu():
    """Whichever is the current one: what rank 1 asks for there comes behind its GPU's own work, not behind GPU 0's."""
    one, other = ranks()
    at, to = one.up(A), other.up(B)
    gpus.current = 1
    gpus.fill(to, 0, A.nbytes)
    gpus.current = 0
    call("AllReduce", at, at, 6, FLOAT32, 0, one.comm, 0)
    call("AllReduce", to, to, 6, FLOAT32, 0, other.comm, 0)
    gpus.synchronize(0)
    np.testing.assert_array_equal(down(gpus, at, A), A)


def test_work_that_fails_is_known_to_both():
    def broken():
        raise CudaError(719, "broken")
    one, other = ranks()
    at, to = one.up(A), other.up(B)
    gpus.queue(other.stream, broken)
    other.all_reduce(to, to, 6, FLOAT32, 0)
    one.all_reduce(at, at, 6, FLOAT32, 0)
    fails("rank 1: broken", one)
    gpus.queue(other.stream, broken)
    other.all_reduce(to, to, 6, FLOAT32, 0)
    with pytest.raises(CudaError, match="broken"):
        gpus.synchronize(other.stream)
    one.all_reduce(at, at, 6, FLOAT32, 0)
    fails("rank 1 has failed before collective", one)


def test_what_is_refused_at_once():
    one, other = ranks()
    at, foreign = one.up(A), other.up(B)
    refused = {
        "overlap, but not in place": lambda: one.all_reduce(at, at + 4, 5, FLOAT32, 0),
        "are not in the GPU's memory": lambda: one.all_reduce(at, at, 7000, FLOAT32, 0),
        "4 bytes at .* are not in": lambda: one.all_reduce(foreign, foreign, 1, FLOAT32, 0),
        "root 2 of 2 ranks": lambda: one.broadcast(at, at, 6, FLOAT32, 2),
        "peer -1 of 2 ranks": lambda: one.send(at, 6, FLOAT32, -1),
        "messages of nothing": lambda: one.send(at, 0, FLOAT32, 1),
        "type 10": lambda: one.all_reduce(at, at, 6, 10, 0),
        "no mean of int32": lambda: one.all_reduce(at, at, 6, INT32, 4),
        "sends itself .*6 float32.* and receives \\[\\]": lambda: one.send(at, 6, FLOAT32, 0),
        "without ncclGroupStart": lambda: call("GroupEnd"),
        "a stream of GPU 1 for a communicator of 0": lambda: call("Bcast", at, 6, FLOAT32, 0, one.comm, other.stream),
        "ranks .* are on the same GPU": lambda: communicators(2, [1, 1]),
        "no ncclCommSplit": lambda: call("CommSplit", one.comm, 0, 0, 0, 0)}
    for words, action in refused.items():
        with pytest.raises(CudaError, match=words):
            action()
    one.all_reduce(0, 0, 0, FLOAT32, 0)     # nothing to do
    assert [asked(name, other.comm) for name in ("CommCount", "CommUserRank", "CommCuDevice")] == [2, 1, 1]
    gpus.begin_capture(one.stream, relaxed=True)
    with pytest.raises(CudaError, match="knows no recording"):
        one.all_reduce(at, at, 6, FLOAT32, 0)
    with pytest.raises(CudaError, match="spoilt"):
        gpus.end_capture(one.stream)


def test_ranks_that_come_otherwise_than_they_say():
    assert processes.refusal([(2, 0, "", "a"), (2, 1, "", "b")]) is None
    assert "(2, 3)" in processes.refusal([(2, 0, "", "a"), (3, 1, "", "b")])
    assert processes.refusal([(2, 1, "", "a"), (2, 1, "", "b")]) == "rank 1 has come twice"
    identifier = ctypes.create_string_buffer(128)
    call("GetUniqueId", ctypes.addressof(identifier))
    with refused(r"of 2 ranks only \[1\] have come"), gpus.changed:
        nccl.joined(identifier.raw, 2, 1, 0)
    with pytest.raises(CudaError, match="the id begins with"), gpus.changed:
        nccl.joined(bytes(128), 2, 1, 0)
    with pytest.raises(CudaError, match="rank 2 of 2"), gpus.changed:
        nccl.joined(identifier.raw, 2, 2, 0)


def test_who_only_asks_does_not_wait(monkeypatch):
    monkeypatch.setattr(machine, "LOOK", 0.05)
    one, other = ranks()
    at, to, event = one.up(A), other.up(B), gpus.handle(Event())
    one.all_reduce(at, at, 6, FLOAT32, 0)
    gpus.record(event, one.stream)
    asks = API["cudaEventQuery"][2]
    assert asks(event) == asks(event) == machine.NOT_READY      # the other has not called
    other.all_reduce(to, to, 6, FLOAT32, 0)
    while asks(event) == machine.NOT_READY:
        pass
    np.testing.assert_array_equal(np.frombuffer((ctypes.c_char * 24).from_address(at), np.float32), A + B)


def test_a_communicator_that_is_gone():
    one, other = ranks()
    at = one.up(A)
    one.all_reduce(at, at, 6, FLOAT32, 0)
    call("CommAbort", other.comm)
    fails("rank 1 has destroyed the communicator before collective 0", one)
    one.all_reduce(at, at, 6, FLOAT32, 0)
    call("CommAbort", one.comm)
    before = len(processes.process.published)
    np.testing.assert_array_equal(one.down(at, A), A)       # nothing was done, and nobody waited for
    assert len(processes.process.published) == before
    with pytest.raises(CudaError, match="is no Communicator"):
        other.all_reduce(at, at, 6, FLOAT32, 0)
    one, other = ranks()
    at, to = one.up(A), other.up(B)
    for rank, place in ((one, at), (other, to)):
        rank.all_reduce(place, place, 6, FLOAT32, 0)
    call("CommDestroy", one.comm)       # it waits for what was given before
    np.testing.assert_array_equal(np.frombuffer((ctypes.c_char * 24).from_address(at), np.float32), A + B)
    call("GroupStart")
    with pytest.raises(CudaError, match="no ncclCommDestroy in a group"):
        call("CommDestroy", other.comm)
    call("GroupEnd")


CHILD = """
import sys, ctypes, numpy as np
from tests.device import test_emulated_nccl as here
from tests.device.emulated import processes
here.gpus.count, here.gpus.current = 2, 1
here.gpus.memories.append(here.machine.Memory())
here.gpus.nulls.append(here.machine.Stream(device=1))
rank = here.Rank(1, here.initialised(bytes.fromhex(sys.argv[1]), 1))
for i in range(2):
    at = rank.up(here.B)
    rank.all_reduce(at, at, 6, here.FLOAT32, 0)
    print("called", flush=True)
    sys.stdin.readline()
processes.leave()       # what hooks.py has Python do at its end
"""


def initialised(identifier, rank):
    """A communicator by the C function, which takes 128 bytes by value."""
    comm = ctypes.c_void_p()
    assert as_c("ncclCommInitRankConfig")(ctypes.addressof(comm), 2, nccl.UniqueId.from_buffer_copy(identifier), rank,
                                          None) == 0
    return comm.value


def test_two_processes():
    """One waits for its GPU while the other waits for something else; at its end the other does what is left. Then it
    is gone, which is an error."""
    identifier = ctypes.create_string_buffer(128)
    call("GetUniqueId", ctypes.addressof(identifier))
    with subprocess.Popen([sys.executable, "-c", CHILD, identifier.raw.hex()], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as child:
        rank = Rank(0, initialised(identifier.raw, 0))
        for end in (False, True):
            at = rank.up(A)
            rank.all_reduce(at, at, 6, FLOAT32, 0)
            assert child.stdout.readline() == "called\n"
            if end:
                child.stdin.write("\n")
                child.stdin.flush()
                time.sleep(0.4)     # in which it would have gone
            np.testing.assert_array_equal(rank.down(at, A), A + B)
            if not end:
                child.stdin.write("\n")
                child.stdin.flush()
        assert child.wait(20) == 0
    rank.all_reduce(at, at, 6, FLOAT32, 0)
    fails("rank 1: its process has ended", rank)


def test_errors_have_nccl_s_numbers(capfd):
    comm, = communicators(1)
    broadcast = as_c("ncclBroadcast")
    assert broadcast(None, None, 6, FLOAT32, 0, comm, None) == nccl.CUDA
    assert broadcast(None, None, 6, FLOAT32, 0, comm + 1, None) == nccl.CUDA
    assert broadcast(None, None, 6, FLOAT32, 1, comm, None) == nccl.ARGUMENT
    assert ctypes.string_at(as_c("ncclGetErrorString")(nccl.ARGUMENT)) == b"root 1 of 1 ranks"
    assert "ncclBroadcast: root 1 of 1 ranks" in capfd.readouterr().err
