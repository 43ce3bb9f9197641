"""Launch arguments against a recording driver: all samples' launches with their PTX, then the launcher's own rules."""

import ctypes
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import kernels, ledger
from minitorch_dist.autodiff.ops.attention import ALL, CAUSAL
from minitorch_dist.kernels import build, flash_attention, interpret, launch, norms, show
from minitorch_dist.kernels.add import ADD

from . import PATIENCE, harness
from .recording import DeviceArray, RecordingDriver, Variant, fake_build

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
ROOT = Path(__file__).parents[2]
SAMPLES = harness.samples()


# ---------------------------------------------------------------- every launch of every sample

@pytest.fixture(scope="module")
def launches():
    """{sample's id: [(kernel, args, grid, a call as recorded)]}: what each sample's entry would start on a GPU."""
    found, now = {}, []
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "build", fake_build())

    def record(kernel, grid, args, options):
        gpu = RecordingDriver()
        on_gpu = [DeviceArray(a) if isinstance(a, np.ndarray) else a for a in args]
        launch._functions.clear()
        patch.setattr(launch, "_driver", gpu)
        launch.launch(kernel, grid, tuple(on_gpu), options)
        now.append((kernel, args, grid, *gpu.calls))

    patch.setattr(interpret, "interpret", record)
    for sample in SAMPLES:
        now = found[sample.id] = []
        with suppress(AssertionError):      # of an entry that looks at its results: nothing has run
            sample.entry(*harness.copied(sample.args))
    patch.undo()
    launch._functions.clear()
    return found


@pytest.fixture(scope="module")
def compiled(launches, tmp_path_factory):
    """{(kernel, types): (Binary, types of the PTX's parameters)} for all that was asked for, compiled in another
    process. Constants and divisibility don't change the parameters, so one set of them is enough: an example's, where
    one has these types, for Triton keeps what it has compiled for test_compiled.py."""
    folder = tmp_path_factory.mktemp("variants")
    variants = {(v.kernel, v.types): v for calls in launches.values() for *_, call in calls for v in [call[1].name]}
    for kernel in kernels.table().values():
        for types, options in map(kernel.example, kernel.examples):
            if (key := (kernel.name, tuple(types.items()))) in variants:
                variants[key] = Variant(*key, tuple(show.divisible(kernel, types)), tuple(options.items()))
    (folder / "asked").write_bytes(pickle.dumps(list(variants.values())))
    done = subprocess.run([sys.executable, "-m", f"{__package__}.recording", folder / "asked", folder / "made"],
                          cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
                          timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return {(v.kernel, v.types): made for v, made in pickle.loads((folder / "made").read_bytes()).items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
def test_arguments_are_what_the_ptx_takes(sample, launches, compiled):
    assert launches[sample.id]
    for kernel, args, grid, (_, binary, at, block, packed, _) in launches[sample.id]:
        v = binary.name
        real, parameters = compiled[v.kernel, v.types]
        assert at == tuple(grid) and all(type(g) is int for g in at)
        assert block == (32 * kernel.settings(v.options)[1], 1, 1)
        assert (real.types, len(real.types) + real.scratch) == (binary.types, len(parameters))
        packed = packed[:len(real.types)] + (launch.NULL,) * real.scratch
        for value, kind in zip(packed, parameters, strict=True):
            letter = {"u": "u", "s": "i", "f": "f", "b": "u"}[kind[0]]
            assert isinstance(value, np.generic) and value.itemsize * 8 == int(kind[1:])
            assert value.dtype.kind == letter or (letter, value.dtype.kind) == ("u", "i")
        given = [(n, a) for n, a in zip(kernel.signature, args, strict=True) if a is not None]
        for (name, a), value in zip(given, packed, strict=False):
            assert value == (a.ctypes.data if isinstance(a, np.ndarray) else value.dtype.type(a))
            if name in v.divisible:
                assert value % 16 == 0


# ---------------------------------------------------------------- the launcher's rules

@pytest.fixture
def gpu(monkeypatch):
    """A RecordingDriver in the CupyDriver's place, and a build() that makes nothing."""
    gpu, gpu.asked = RecordingDriver(), []
    monkeypatch.setattr(launch, "_driver", gpu)
    monkeypatch.setattr(build, "build", fake_build(gpu.asked))
    monkeypatch.setattr(launch, "_functions", {})
    return gpu


def arrays(*shape, dtype=np.float32, device=0, count=3):
    return [DeviceArray(np.zeros(shape, dtype), device) for _ in range(count)]


@pytest.mark.parametrize("cc, dtype, blocks", [(75, "f2", (32, 32)), (80, "f2", (64, 64)), (80, "f4", (32, 32))])
def test_attention_takes_smaller_blocks_where_there_are_no_tensor_cores(gpu, monkeypatch, cc, dtype, blocks):
    gpu.cc = cc
    monkeypatch.setattr(launch, "empty", lambda shape, dtype, like: DeviceArray(np.empty(shape, dtype)))
    flash_attention.flash_attention(*arrays(1, 2, 100, 40, dtype=dtype), CAUSAL, 1.0)
    options, (_, _, grid, *_) = dict(gpu.asked[0].options), gpu.calls[0]
    assert (options["QUERIES"], options["SOURCES"]) == blocks and grid == (2 * -(-100 // blocks[0]),)


@pytest.mark.parametrize("documents, pointers, precision, blocks", [
    (False, 5, "ieee", (32, 32)), (True, 7, "ieee", (32, 16)), (False, 5, None, (64, 32)), (True, 7, None, (64, 32))])
def test_attention_of_documents_takes_two_pointers_more(gpu, monkeypatch, documents, pointers, precision, blocks):
    """And blocks of its own; without documents the launch is what it was before there were any."""
    monkeypatch.setattr(launch, "empty", lambda shape, dtype, like: DeviceArray(np.empty(shape, dtype)))
    numbers = arrays(1, 100, dtype=np.int64, count=2) if documents else None
    flash_attention.flash_attention(*arrays(1, 2, 100, 40), CAUSAL, 1.0, numbers, precision)
    options, (_, _, _, _, args, _) = dict(gpu.asked[0].options), gpu.calls[0]
    assert (options["QUERIES"], options["SOURCES"]) == blocks
    assert sum(isinstance(a, np.uint64) and a != 0 for a in args) == pointers      # Triton's own are NULL


def test_a_launch_word_for_word(gpu):
    x, y, out = arrays(1000)
    with ledger.record() as book:
        ADD((4,), x, y, out, 1000, BLOCK=256, num_warps=2)
    (device, _, grid, block, args, shared), = gpu.calls
    assert (device, grid, block, shared) == (0, (4,), (64, 1, 1), 1024)
    assert [(type(a), int(a)) for a in args] == [
        *[(np.uint64, a.data.ptr) for a in (x, y, out)], (np.int32, 1000), (np.uint64, 0), (np.uint64, 0)]
    asked, = gpu.asked
    assert asked.types == (("x", "*fp32"), ("y", "*fp32"), ("out", "*fp32"), ("n", "i32"))
    assert asked.options == (("BLOCK", 256), ("num_warps", 2))
    assert book.launches == {"add": 1}


def test_machine_code_is_made_once_per_types_alignment_options_and_device(gpu):
    for _ in range(3):
        ADD((1,), *arrays(16), 16)
        ADD((1,), *arrays(16), 15)                           # another alignment of n
        ADD((1,), *arrays(16, dtype=np.float16), 16)
        ADD((1,), *arrays(16), 16, BLOCK=64)
        ADD((1,), *arrays(16, device=1), 16)
    assert len(gpu.calls) == 15 and len(gpu.loaded) == 5
    assert [device for _, device in gpu.loaded] == [0, 0, 0, 0, 1]
    assert {"n" in v.divisible for v in gpu.asked} == {True, False}


def test_numbers_are_packed_once_and_each_value_by_itself(gpu, monkeypatch):
    """0.0 == -0.0 == False for Python, but not for a kernel."""
    packings, pack = [], gpu.packed
    monkeypatch.setattr(gpu, "packed", lambda numbers: packings.append(numbers) or pack(numbers))
    monkeypatch.setattr(launch, "_packed", {})
    x, y, scale = *arrays(1, 16, count=2), *arrays(1, count=1)
    for eps in (0.0, -0.0, 1e-5, 0.0, 1e-5):
        norms.FORWARD((1,), x, None, None, y, None, scale, 1, 16, eps, LAYER=False)
    given = [call[4][3:6] for call in gpu.calls]
    assert [[(type(n), float(n), np.signbit(n)) for n in numbers] for numbers in given] == [
        [(np.int32, 1.0, False), (np.int32, 16.0, False), (np.float32, float(np.float32(eps)), np.signbit(eps))]
        for eps in (0.0, -0.0, 1e-5, 0.0, 1e-5)]
    assert len([p for p in packings if p and type(p[0]) is np.int32]) == 3


def test_packed_numbers_do_not_pile_up(gpu, monkeypatch):
    monkeypatch.setattr(launch, "_packed", {})
    monkeypatch.setattr(launch, "MANY", 5)
    for n in range(16, 40):
        ADD((1,), *arrays(16), n)
    assert len(launch._packed) <= 5 and [int(call[4][3]) for call in gpu.calls] == list(range(16, 40))


def test_alignment_is_looked_at_not_believed(gpu):
    whole = np.zeros(64, np.float32)
    start = -whole.ctypes.data % 64 // 4
    for shift in (0, 1):
        ADD((1,), *[DeviceArray(whole[start + shift:start + shift + 16])] * 3, 16)
    aligned, shifted = gpu.asked
    assert aligned.divisible == ("x", "y", "out", "n") and shifted.divisible == ("n",)


def test_arrays_of_another_device_are_launched_there(gpu):
    ADD((1,), *arrays(16, device=2), 16)
    assert gpu.calls[0][0] == 2 and gpu.current() == 0


def test_outputs_are_made_where_the_inputs_are(monkeypatch):
    from ..device.fake_cupy import cupy, installed
    driver = SimpleNamespace(current=cupy.cuda.runtime.getDevice, using=cupy.cuda.Device)
    monkeypatch.setattr(launch, "_driver", driver)
    with installed():
        with cupy.cuda.Device(1):
            x = cupy.zeros(3, np.float32)
        assert [launch.empty((2,), np.int32, like).device.id for like in (x, cupy.zeros(3))] == [1, 0]
        assert cupy.cuda.runtime.getDevice() == 0
    assert type(launch.empty((2,), np.int32, np.zeros(3))) is np.ndarray


def test_an_empty_grid_starts_nothing(gpu):
    with ledger.record() as book:
        ADD((0,), *arrays(0), 0)
    assert not gpu.calls and not book.launches


def test_what_does_not_fit_is_named(gpu):
    x, y, out = arrays(16)
    with pytest.raises(TypeError, match="takes 4 arguments .x, y, out, n., got 3"):
        ADD((1,), x, y, out)
    with pytest.raises(TypeError, match="x must be an array, it is a float"):
        ADD((1,), 1.0, y, out, 16)
    with pytest.raises(ValueError, match="one device.*'cuda:1'"):
        ADD((1,), x, *arrays(16, device=1, count=2), 16)
    with pytest.raises(ValueError, match="one device.*the CPU"):
        ADD((1,), np.zeros(16, np.float32), y, out, 16)
    with pytest.raises(ValueError, match="strides"):
        ADD((1,), DeviceArray(np.zeros((4, 8))[:, ::2]), y, out, 16)
    with pytest.raises(TypeError, match="x has dtype complex64"):
        ADD((1,), *arrays(16, dtype=np.complex64), 16)
    with pytest.raises(TypeError, match="no constexprs.*BLOK"):
        ADD((1,), x, y, out, 16, BLOK=3)
    with pytest.raises(OverflowError):
        ADD((1,), x, y, out, 2 ** 31)
    with pytest.raises(ValueError, match="65,535"):
        ADD((1, 70_000), x, y, out, 16)
    assert not gpu.calls


# ---------------------------------------------------------------- the driver, on a stand-in for CuPy

class FakeCupy:
    """The parts of CuPy that CupyDriver uses, writing down what they are asked."""

    def __init__(self, limit=232_448):
        self.log = log = []

        class Function:
            ptr = 77

        class Module:
            def load(self, cubin):
                log.append(("load", cubin))

            def get_function(self, name):
                log.append(("function", name))
                return Function()

        class Device:
            def __init__(self, number):
                self.compute_capability = "90"

        class runtime:
            cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
            deviceGetAttribute = staticmethod(lambda attribute, device: limit if attribute == 97 else None)
            getDevice = staticmethod(lambda: 3)
            getDeviceProperties = staticmethod(lambda device: {"name": b"NVIDIA H200"})

        class driver:
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
            funcSetAttribute = staticmethod(lambda *args: log.append(("attribute", *args)))

        class cuda:
            pass

        cuda.runtime, cuda.Device, cuda.function = runtime, Device, type("function", (), {"Module": Module})
        self.cuda, self.driver = cuda, driver

    def driver_on_it(self):
        made = launch.CupyDriver.__new__(launch.CupyDriver)
        made.cupy, made.driver = self, self.driver
        return made


def test_a_packed_number_is_its_bytes_in_memory():
    driver = FakeCupy().driver_on_it()
    driver.pointer = lambda address: address
    numbers = np.int32(-7), np.float32(0.1), np.int64(-1 << 40), np.uint64(0)
    addresses, memory = driver.packed(numbers)
    assert [ctypes.string_at(at, n.itemsize) for at, n in zip(addresses, numbers, strict=True)] == [
        n.tobytes() for n in numbers]


@pytest.mark.parametrize("shared", [0, 49_152, 49_153, 232_448])
def test_shared_memory_above_48_kib_is_asked_for(shared):
    cupy = FakeCupy()
    cupy.driver_on_it().load(build.Binary("f", (), 2, shared, 4, b"code"), 0)
    raised = [("attribute", 77, 8, shared)] if shared > 49_152 else []
    assert cupy.log == [("load", b"code"), ("function", "f"), *raised]


def test_more_shared_memory_than_there_is_raises():
    with pytest.raises(RuntimeError, match="needs 232,449 bytes of shared memory per program, the device has 232,448"):
        FakeCupy().driver_on_it().load(build.Binary("f", (), 2, 232_449, 4, b""), 0)


def test_what_the_driver_says_of_devices():
    driver = FakeCupy().driver_on_it()
    assert (driver.current(), driver.capability(0), driver.name(0)) == (3, 90, "NVIDIA H200")


def test_the_names_that_the_driver_uses_exist_in_cupy():
    cupy = pytest.importorskip("cupy")      # it imports without a GPU
    driver = launch.CupyDriver()
    assert driver.cupy is cupy
    for owner, names in ((cupy.cuda.runtime, "getDevice deviceGetAttribute getDeviceProperties "
                                             "cudaDevAttrMaxSharedMemoryPerBlockOptin"),
                         (cupy.cuda, "Event Device get_elapsed_time"), (cupy.cuda.function, "Module Function"),
                         (cupy.cuda.function.Module, "load get_function"), (cupy.cuda.Event, "record synchronize"),
                         (cupy.cuda.Device, "compute_capability"),
                         (cupy.cuda.function, "CPointer"),
                         (driver.driver, "funcSetAttribute CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")):
        assert not [name for name in names.split() if not hasattr(owner, name)]


# ---------------------------------------------------------------- places counted in 32 bits


def split_heads(heads, times, size, apart=None):
    """(1, heads, times, size) of float16, split off rows of features; rows may be farther apart. It has no memory."""
    row = apart or heads * size
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (1, heads, times, size), (0, 2 * size, 2 * row, 2))


def test_attention_leaves_to_others_what_it_cannot_count():
    """The output lies as q does, and may have longer rows."""
    def fits(q, k, v):
        return flash_attention.OPS["attention"].fits(q, k, v, None, None, ALL, 0.1)
    far = split_heads(128, 1 << 17, 64, 1 << 14)
    q, k, v, far, backwards, blocks = map(DeviceArray, (        # of the last each head's rows are side by side
        split_heads(128, 1 << 17, 64), split_heads(1, 1 << 17, 64), split_heads(1, 1 << 17, 128), far, far[:, :, ::-1],
        np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (1, 128, 1 << 17, 64), (0, 1 << 24, 128, 2))))
    found = {"as far as q": fits(q, k, k), "longer rows": fits(q, k, v), "in blocks": fits(blocks, k, v),
             "far": fits(far, k, k), "backwards": fits(backwards, k, k)}
    assert found == {"as far as q": True, "longer rows": False, "in blocks": True, "far": False, "backwards": False}


def test_a_cotangent_of_attention_with_rows_too_far_apart_is_copied(monkeypatch):
    """A slice of anything, say of a row of many features."""
    given = []
    monkeypatch.setattr("minitorch_dist.kernels.kernel.launch", lambda _, grid, args, options: given.append(args[0]))
    monkeypatch.setattr(launch, "contiguous", lambda x: np.zeros(x.shape, x.dtype))
    q, logs = np.zeros((1, 1, 3, 16), np.float16), np.zeros((1, 3), np.float32)
    for apart, copied in ((1 << 20, False), (1 << 30, True)):
        ct = split_heads(1, 3, 16, apart)
        flash_attention.flash_attention_gradient(ct, q, q, q, ALL, 0.1, (q, logs))
        assert [x is not ct for x in given] == [copied] * 2
        given.clear()
