"""Every kernel on a GPU against its definition in float64, and what only a GPU can show: streams, devices, events."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, kernels, ledger, optim
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.kernels import add, autotune, segment_sums

from . import harness, test_packing

pytestmark = pytest.mark.gpu
SAMPLES = harness.samples()


@pytest.fixture(scope="module")
def cupy():
    """CuPy on a machine where it finds a GPU."""
    if kernels.interpreting():
        pytest.skip("Triton interprets in this process: make test-gpu")
    cupy = pytest.importorskip("cupy", reason="no CuPy: python -m minitorch_dist doctor says what to install")
    if not cupy.is_available():
        pytest.skip("no GPU here")
    return cupy


def up(cupy, args):
    return tuple(cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
def test_as_defined(sample, cupy, monkeypatch):
    wanted = sample.definition(*map(harness.exact, harness.copied(sample.args)))
    guard, args = harness.guarded(monkeypatch), up(cupy, sample.args)
    with ledger.record() as book:
        got = sample.entry(*args)
    assert set(book.launches) == set(sample.names)
    harness.compare(sample, tuple(None if g is None else g.get() for g in harness.as_tuple(got)), wanted)
    guard.check()
    if not sample.in_place:
        for before, after in zip(sample.args, args, strict=True):
            if isinstance(before, np.ndarray):
                np.testing.assert_array_equal(before, after.get())


@pytest.mark.large
def test_a_kernel_runs_on_the_current_stream(cupy):
    """Work queued on one stream before it, and read on the same stream after it, without any synchronisation."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.zeros(1 << 24, cupy.float32)
        for _ in range(20):
            x += 1
        y = add.add(x, x)
        total = float(y[-1])
    stream.synchronize()
    assert total == 40


def test_each_device_has_its_own_machine_code(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    with cupy.cuda.Device(1):
        x = cupy.arange(1000, dtype=cupy.float32)
    y = add.add(x, x)       # launched from device 0's context
    assert cupy.cuda.runtime.getDevice() == 0 and y.device.id == 1 and y.get().sum() == 999_000


def test_the_optimizer_makes_one_launch_and_the_numbers_of_the_cpu(cupy):
    def model():
        rng = np.random.default_rng(3)
        return [mt.tensor(rng.standard_normal(shape), dtype=np.float32, requires_grad=True)
                for shape in ((70, 30), (30,), (513, 5))]
    cpu, gpu = model(), [p.to("cuda").detach().requires_grad_() for p in model()]
    optimizers = [optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "weight_decay": 0.0}], lr=1e-2)
                  for ps in (cpu, gpu)]
    for step in range(10):
        for k, (p, q) in enumerate(zip(cpu, gpu, strict=True)):
            p.grad = mt.tensor(np.random.default_rng([step, k]).standard_normal(p.shape), dtype=np.float32)
            q.grad = p.grad.to("cuda")
        optimizers[0].step()
        with ledger.record() as book:
            optimizers[1].step()
        assert dict(book.launches) == {"adam": 1}
    for p, q in zip(cpu, gpu, strict=True):
        np.testing.assert_allclose(q.cpu().numpy(), p.numpy(), rtol=1e-5, atol=1e-6)
    with kernels.disable():
        optimizers[1].step()
    assert optimizers[1].state_dict()["steps"] == [11, 11, 11]


@pytest.mark.large
@test_packing.each_sign
def test_numbers_pack_to_the_bytes_of_the_cpu(cupy, signed):
    """In all 2²⁰ cells, and in blocks of zeros, of subnormal numbers, of inf and of NaN."""
    test_packing.check_every_cell(cupy, signed)
    test_packing.check_odd_blocks(cupy, signed)


@pytest.mark.large
@pytest.mark.parametrize("rows, size", [(65, 129), (50_000, 64), (3, 1)])
def test_an_embedding_s_gradient_has_the_same_bits_on_every_run(cupy, rows, size):
    """Vocabularies of letters and of words; atomic additions differ here. Short segments give the host's bits."""
    rng = np.random.default_rng(0)
    index, ct = (rng.random(16_384) ** 3 * rows).astype(np.int64), rng.standard_normal((16_384, size), np.float32)

    def gradient(device):
        weight = mt.zeros(rows, size, device=device, requires_grad=True)
        y = mt.embedding(mt.tensor(index, device=device), weight)
        with ledger.record() as book:
            y.backward(mt.tensor(ct, device=device))
        assert dict(book.launches) == ({} if device == "cpu" else {"segment_sums": 1})
        return weight.grad.cpu().numpy()
    wanted, got = gradient("cpu"), gradient("cuda")
    for _ in range(10):
        np.testing.assert_array_equal(gradient("cuda"), got)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)
    short = np.bincount(index, minlength=rows) <= segment_sums.STRETCH
    np.testing.assert_array_equal(got[short], wanted[short])


def test_the_gradient_of_picked_elements_has_the_same_bits_on_every_run(cupy):
    """More elements than places that name them, and some named often."""
    rng = np.random.default_rng(0)
    index, ct = (rng.random((50, 40)) ** 5 * 513).astype(np.int64), rng.standard_normal((50, 40), np.float32)

    def gradient(device):
        x = mt.zeros(50, 513, device=device, requires_grad=True)
        mt.take_along_axis(x, backend.to(index, device), 1).backward(mt.tensor(ct, device=device))
        return x.grad.cpu().numpy()
    wanted, got = gradient("cpu"), gradient("cuda")
    for _ in range(10):
        np.testing.assert_array_equal(gradient("cuda"), got)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.large
def test_a_step_of_gpt_has_the_same_bits_on_every_run(cupy):
    tokens, labels = np.random.default_rng(0).integers(0, 65, (2, 16, 64))
    runs = []
    for _ in range(5):
        mt.manual_seed(0)
        model = mt.nn.GPT(65, 64, layers=2, heads=4, dim=128).to("cuda")
        mt.nn.cross_entropy(model(mt.tensor(tokens, device="cuda")), mt.tensor(labels, device="cuda")).backward()
        runs.append({name: p.grad.cpu().numpy() for name, p in model.named_parameters()})
    for run in runs[1:]:
        for name, gradient in run.items():
            np.testing.assert_array_equal(gradient, runs[0][name], err_msg=name)


def test_a_linear_layer_with_gelu(cupy):
    """One launch behind the product, and the numbers of the host."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 70, 33), (130, 33), (130,))]
    ends = []
    for device in ("cpu", "cuda"):
        leaves = [mt.tensor(a, device=device, requires_grad=True) for a in arrays]
        with ledger.record() as book:
            y = mt.linear_gelu(*leaves, "tanh")
        assert dict(book.launches) == ({} if device == "cpu" else {"bias_gelu": 1})
        y.backward(mt.tensor(np.random.default_rng(2).standard_normal(y.shape), dtype=np.float32, device=device))
        ends.append([t.cpu().numpy() for t in (y.detach(), *(leaf.grad for leaf in leaves))])
    for here, there in zip(*ends, strict=True):
        assert np.linalg.norm(there - here) <= 1e-5 * np.linalg.norm(here)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_a_loss_by_tiles(cupy, monkeypatch, dtype, tolerance):
    """Of 700 classes in three tiles, each with a launch forward and one backward; the host's numbers, in float64."""
    for name in ("HOST", "GPU"):
        monkeypatch.setattr(tiled_cross_entropy, name, 1)
    labels = np.array([699, 0, 255, 511, 256, 300, 77])
    arrays = [np.random.default_rng(k).standard_normal((n, 33)).astype(backend.as_dtype(dtype)) / 4
              for k, n in enumerate((7, 700))]
    ends = []
    for device, kind in (("cpu", "float64"), ("cuda", dtype)):
        leaves = [mt.tensor(a.astype(backend.as_dtype(kind)), device=device, requires_grad=True) for a in arrays]
        with ledger.record() as book:
            losses = mt.linear_cross_entropy(*leaves, backend.to(labels, device), 300)
            losses.backward(mt.tensor(np.arange(1.0, 8.0), dtype=losses.dtype, device=device))
        names = [name for name, count in book.launches.items() if count == 3]
        assert names == ([] if device == "cpu" else ["cross_entropy", "cross_entropy_backward"])
        ends.append([t.cpu().numpy().astype("f8") for t in (losses.detach(), *(leaf.grad for leaf in leaves))])
    for here, there in zip(*ends, strict=True):
        assert np.linalg.norm(there - here) <= tolerance * np.linalg.norm(here)


def test_swiglu(cupy):
    """One launch each way, which reads both halves where they lie, and the numbers of the host."""
    x, ct = (np.random.default_rng(k).standard_normal((3, 70, n)).astype(np.float32) for k, n in ((1, 132), (2, 66)))
    ends = []
    for device in ("cpu", "cuda"):
        leaf = mt.tensor(x, device=device, requires_grad=True)
        with ledger.record() as book:
            y = mt.nn.SwiGLU()(leaf)
            y.backward(mt.tensor(ct, device=device))
        assert dict(book.launches) == ({} if device == "cpu" else {"swiglu": 1, "swiglu_backward": 1})
        ends.append([t.cpu().numpy() for t in (y.detach(), leaf.grad)])
    for here, there in zip(*ends, strict=True):
        assert np.linalg.norm(there - here) <= 2e-6 * np.linalg.norm(here)


def test_configurations_are_timed_by_events(cupy, monkeypatch):
    monkeypatch.setenv("MINITORCH_AUTOTUNE", "1")
    monkeypatch.setattr(autotune, "recall", lambda path, kernel: None)      # what an earlier run has found is no test
    x = cupy.ones(1 << 20, cupy.float32)
    out = cupy.empty_like(x)

    def run(options):
        add.ADD((-(-x.size // options["BLOCK"]),), x, x, out, x.size, **options)
    best = autotune.best(add.ADD, (x.size,), x, run)
    assert best in add.ADD.configs and float(out.sum()) == 2 * x.size
