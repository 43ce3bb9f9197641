"""The emulated GPUs under a real CuPy (tests/device/emulated): what needs no CuPy, and a program where there is one."""

import ctypes
import importlib.util
import re
import runpy
import subprocess
import sys
import threading

import numpy as np
import pytest

from .emulated import idle
from .emulated.cuda import API, gpus
from .emulated.machine import NULL, TOTAL, CudaError, Event, Gpus, Module, Stream, function_of
from .on_emulated import down, up

PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 at, .param .u32 count)
{
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [at];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r2, 10, %r3;
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r4, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd3], %f2;
DONE:
    ret;
}
"""


def started(machine, at, count, grid=(2, 1, 1), stream=NULL):
    """twice() on so many numbers, in blocks of 10."""
    arguments = [ctypes.c_uint64(at), ctypes.c_uint32(count)]
    machine.launch(function_of(Module(PTX), "twice"), grid, (10, 1, 1), 0, stream, [*map(ctypes.addressof, arguments)])


def pinned(machine, array):
    """A view of pinned memory that holds these numbers."""
    at = machine.allocate(array.nbytes, pinned=True)
    view = np.frombuffer((ctypes.c_char * array.nbytes).from_address(at), array.dtype)
    view[...] = array
    return view


X = np.random.default_rng(0).standard_normal(17).astype(np.float32)


def test_a_kernel_runs_when_it_is_waited_for():
    machine = Gpus()
    stream = machine.handle(Stream(blocking=False))
    at = up(machine, X)
    started(machine, at, X.size, stream=stream)
    np.testing.assert_array_equal(down(machine, at, X), X)          # the null stream doesn't wait for this one
    np.testing.assert_array_equal(down(machine, at, X, stream), 2 * X)
    assert machine.launches == [("twice", (2, 1, 1), (10, 1, 1))]


def test_memory_begins_as_nan_and_arguments_are_read_at_the_start():
    machine = Gpus()
    assert np.isnan(down(machine, machine.allocate(68), X)).all()


def test_pinned_memory_is_read_late_and_pageable_at_once():
    machine = Gpus()
    stream = machine.handle(Stream())
    for source, seen in ((pinned(machine, X), -1), (X.copy(), X)):
        at = machine.allocate(X.nbytes)
        machine.copy(at, source.ctypes.data, X.nbytes, stream)
        source[...] = -1
        np.testing.assert_array_equal(down(machine, at, X, stream), np.broadcast_to(seen, X.shape))


def test_blocking_streams_and_the_null_stream_keep_their_order():
    for blocking, factor in ((True, 4), (False, 2)):
        machine = Gpus()
        at, stream = up(machine, X), machine.handle(Stream(blocking))
        machine.synchronize()
        started(machine, at, X.size, stream=stream)
        started(machine, at, X.size)
        np.testing.assert_array_equal(down(machine, at, X), factor * X)


def test_a_stream_waits_for_an_event_of_another():
    for waits, factor in ((True, 2), (False, 1)):
        machine = Gpus()
        one, other = (machine.handle(Stream(blocking=False)) for _ in range(2))
        event, at = machine.handle(Event()), up(machine, X, one)
        started(machine, at, X.size, stream=one)
        machine.record(event, one)
        started(machine, at, X.size, stream=one)        # behind the event: it isn't waited for
        machine.synchronize_event(event)
        at = up(machine, X, one)
        started(machine, at, X.size, stream=one)
        machine.record(event, one)
        if waits:
            machine.wait_event(other, event)
        else:
            machine.copy(at, X.ctypes.data, X.nbytes, other)
        np.testing.assert_array_equal(down(machine, at, X, other), factor * X)


def test_a_recording_does_nothing_until_it_is_launched_and_then_all_of_it():
    machine = Gpus()
    stream, at = machine.handle(Stream(blocking=False)), up(machine, X)
    machine.synchronize()
    machine.begin_capture(stream, relaxed=True)
    started(machine, at, X.size, stream=stream)
    machine.release(machine.allocate(100))
    started(machine, at, X.size, stream=stream)
    graph = machine.end_capture(stream)
    np.testing.assert_array_equal(down(machine, at, X, stream), X)
    for times in (4, 16):
        machine.start_graph(graph, stream)
        np.testing.assert_array_equal(down(machine, at, X, stream), times * X)


def test_a_stream_that_waits_for_a_recorded_one_is_recorded_too():
    machine = Gpus()
    (one, other), event = (machine.handle(Stream(blocking=False)) for _ in range(2)), machine.handle(Event())
    at = up(machine, X)
    machine.synchronize()
    machine.begin_capture(one, relaxed=True)
    started(machine, at, X.size, stream=one)
    machine.record(event, one)
    machine.wait_event(other, event)
    started(machine, at, X.size, stream=other)
    graph = machine.end_capture(one)
    np.testing.assert_array_equal(down(machine, at, X, other), X)
    machine.start_graph(graph, one)
    np.testing.assert_array_equal(down(machine, at, X, one), 4 * X)
    with pytest.raises(CudaError, match="a recording that has ended"):
        machine.wait_event(other, event)


@pytest.mark.parametrize("what, relaxed", [
    (lambda m, stream: m.allocate(10), False), (lambda m, stream: m.synchronize(stream), True),
    (lambda m, stream: m.synchronize(), True), (lambda m, stream: API["cudaStreamQuery"][2](stream), True)],
    ids=["memory", "its stream", "all", "a query"])
def test_what_spoils_a_recording(what, relaxed):
    stream = gpus.handle(Stream(blocking=False))
    gpus.begin_capture(stream, relaxed)
    with pytest.raises(CudaError, match="while a stream is recorded"):
        what(gpus, stream)
    with pytest.raises(CudaError, match="spoilt"):
        gpus.end_capture(stream)
    assert gpus.allocate(10)


def test_what_is_refused():
    machine = Gpus(2)
    at = up(machine, X)
    with pytest.raises(CudaError, match="a copy of 69 bytes at 0 of memory of 68 bytes"):
        machine.copy(at, X.ctypes.data, 69)
    with pytest.raises(CudaError, match="was never allocated"):
        machine.release(at + 512)
    with pytest.raises(CudaError, match="are free"):
        machine.allocate(TOTAL)
    with pytest.raises(CudaError, match=r"a grid of \(0, 1, 1\)"):
        started(machine, at, 1, grid=(0, 1, 1))
    started(machine, at, 18)                    # one more than there is
    out = np.zeros_like(X)
    with pytest.raises(CudaError, match=r"twice.*thread 7.*reads 4 bytes"):
        machine.copy(out.ctypes.data, at, out.nbytes)
    machine.synchronize()
    assert not out.any()        # nothing is written late to an array that may be gone
    machine.current = 1
    started(machine, at, 17)                    # another GPU's memory
    with pytest.raises(CudaError, match="and there is no array"):
        machine.synchronize()


def test_each_gpu_has_a_null_stream_of_its_own():
    """Whose order its blocking streams keep; those of the other GPU don't."""
    machine = Gpus(2)
    at, blocking = up(machine, X), machine.handle(Stream())
    machine.synchronize()
    machine.current = 1
    there = up(machine, X)
    machine.queue(NULL, broken)                 # on GPU 1's
    with pytest.raises(CudaError, match="broken"):
        machine.synchronize()
    machine.queue(NULL, broken)
    machine.current = 0
    started(machine, at, X.size, stream=blocking)
    started(machine, at, X.size)
    np.testing.assert_array_equal(down(machine, at, X), 4 * X)
    machine.synchronize()                       # and who waits for a GPU waits for that one
    machine.current = 1
    with pytest.raises(CudaError, match="broken"):
        down(machine, there, X)


def test_a_kernel_and_an_event_are_given_to_streams_of_their_gpu_alone():
    """Copies may go by any stream, and a stream may wait for any event."""
    machine = Gpus(2)
    at, mine, event = up(machine, X), machine.handle(Stream(False)), machine.handle(Event())
    machine.synchronize()
    machine.record(event, mine)
    machine.current = 1
    other = machine.handle(Stream(False, 1))
    with pytest.raises(CudaError, match="kernel twice of GPU 1 on a stream of GPU 0") as refused:
        started(machine, at, X.size, stream=mine)
    assert refused.value.args[0] == 400         # cudaErrorInvalidResourceHandle
    for stream in (other, NULL):
        with pytest.raises(CudaError, match="an event of GPU 0 on a stream of GPU 1"):
            machine.record(event, stream)
    machine.wait_event(other, event)
    np.testing.assert_array_equal(down(machine, at, X, other), X)
    assert not machine.launches


# ---------------------------------------------------------------- several threads

class Work:
    """Works on a stream that are done when they may; `order`: those that are."""

    def __init__(self, machine):
        self.machine, self.order, self.allowed = machine, [], set()
        self.handle = machine.handle(Stream(blocking=False))
        self.stream = machine.stream(self.handle)

    def queue(self, name):
        def work():
            self.machine.changed.wait_for(lambda: name in self.allowed)
            self.order.append(name)
        self.machine.queue(self.handle, work)
        return self.machine.number

    def allow(self, name):
        with self.machine.changed:
            self.allowed.add(name)
            self.machine.changed.notify_all()

    def beside(self):
        """A thread that runs all of it, once it is at the first."""
        thread = threading.Thread(target=self.machine.beside, args=(self.stream, self.machine.number), daemon=True)
        with self.machine.changed:
            thread.start()
            while self.stream.runner is None:
                self.machine.changed.wait(0.01)
        return thread


def broken():
    raise CudaError(719, "broken")


def test_who_waits_for_work_of_another_thread_goes_on_when_that_is_done(monkeypatch):
    monkeypatch.setattr("tests.device.emulated.machine.PATIENCE", 5)
    machine = Gpus()
    work = Work(machine)
    first, _ = work.queue("first"), work.queue("second")
    thread = work.beside()
    timer = threading.Timer(0.05, work.allow, ["first"])
    timer.start()
    machine.drain(work.stream, first)
    assert work.order == ["first"] and work.stream.runner is not None       # the other thread is at the second
    work.allow("second")
    machine.synchronize(work.handle)
    assert work.order == ["first", "second"]
    thread.join(5)


def test_the_program_is_told_once_what_went_wrong_beside_it():
    machine = Gpus()
    stream = machine.handle(Stream(blocking=False))
    machine.queue(stream, broken)
    for _ in range(2):      # the second has nothing to do, and doesn't take the error from the program
        thread = threading.Thread(target=machine.beside, args=(machine.stream(stream), machine.number))
        thread.start()
        thread.join(5)
    with pytest.raises(CudaError, match="broken"):
        machine.synchronize(stream)
    machine.synchronize(stream)


def test_what_is_given_after_a_failure_is_done():
    machine = Gpus()
    work, other = Work(machine), machine.handle(Stream(blocking=False))
    work.queue("first")
    thread = work.beside()
    machine.queue(other, broken)
    with pytest.raises(CudaError, match="broken"):
        machine.synchronize(other)
    work.queue("after")
    for name in ("first", "after"):
        work.allow(name)
    thread.join(5)
    machine.synchronize(work.handle)
    assert work.order == ["first", "after"]


def test_work_in_whose_middle_python_collects_what_waits_for_all(monkeypatch):
    monkeypatch.setattr("tests.device.emulated.machine.PATIENCE", 0.2)
    machine = Gpus()
    machine.queue(NULL, machine.finish, waits=True)
    assert machine.done == 1


# ---------------------------------------------------------------- a program

PROGRAM = """
import cupy, numpy as np
import minitorch_dist as mt
from minitorch_dist.kernels import add
x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
on_gpu = cupy.asarray(x)
np.testing.assert_allclose((cupy.exp(on_gpu) @ on_gpu.T).get(), np.exp(x) @ x.T, rtol=1e-5)
np.testing.assert_array_equal(add.add(on_gpu, on_gpu).get(), x + x)
from tests.device.emulated.cuda import gpus
before = len(gpus.launches)     # a kernel each where CuPy doesn't ask CUB
found = on_gpu.sum(), on_gpu.max(1), on_gpu.argmin()
assert len(gpus.launches) == before + 1, gpus.launches[before:]     # argmin, to int64
for one, wanted in zip(found, (x.sum(), x.max(1), x.argmin())):
    np.testing.assert_allclose(one.get(), wanted, rtol=1e-5)
print(mt.tensor(x, device="cuda").sum().device, cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
"""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no CuPy: make test-emulated installs it")
def test_a_program_with_a_real_cupy():
    done = subprocess.run([sys.executable, "-m", "tests.device.emulated", "-c", PROGRAM], timeout=200,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "cuda:0 Emulated GPU\n"), done.stderr


def test_without_cupy_one_line_says_so_and_nothing_is_started(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if "cupy" in name else find(name, *more))
    monkeypatch.setattr("os.execve", lambda *args: pytest.fail("it was started"))
    monkeypatch.setattr(sys, "argv", ["", "-c", "print(1)"])
    with pytest.raises(SystemExit, match="^tests.device.emulated: there is no CuPy here: .*emulated-gpu") as ended:
        runpy.run_module("tests.device.emulated", run_name="__main__")
    assert "\n" not in ended.value.code


# ---------------------------------------------------------------- a GPU that takes no time

def test_an_idle_gpu_counts_what_is_asked_for_and_gives_zeros():
    before, there = idle.requests(), np.full(3, 7.0)
    assert idle.function("cuLaunchKernel")() == idle.function("cublasSgemm_v2")() == 0
    assert idle.requests() == before + 2
    address = ctypes.c_void_p(there.ctypes.data)
    for kind, expected in ((1, [7, 7, 7]), (2, [0, 0, 7])):      # up, and down
        assert idle.function("cudaMemcpy")(address, address, ctypes.c_size_t(16), kind) == 0
        assert there.tolist() == expected
    assert idle.function("cudaMalloc") is None      # memory is there, as ever


def test_what_is_idle_is_a_function_of_cuda_s():
    named = set(re.findall(r"\bcu[A-Za-z]\w+", idle.SOURCE))
    assert named <= set(API) and len(named) > 20
