"""On a GPU: the op table against NumPy, models, CPU and GPU curves, ranks that share one. `make test-gpu` runs them."""

import gc
import importlib.util

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, comm, kernels, nn, optim
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.autodiff.tree import flatten
from minitorch_dist.data import Loader
from minitorch_dist.parallel.pipelines import Pipeline, schedule_of
from minitorch_dist.testing import ranks

from ..autodiff import samples
from ..kernels import eight_bit_cases
from . import test_cublas, test_cuda_graph_einsum, test_cuda_graph_limits, test_cuda_graphs, test_fake_cupy, test_steps
from .test_ops import COPIES, MOVING, constants_on_gpu, random_like


def gpus():
    """How many there are."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy
    return cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0


def can_start_ranks():
    """Whether there is an mpirun."""
    try:
        return bool(ranks.find_mpirun())
    except RuntimeError:
        return False


GPUS = gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU, or no CuPy to use it")]
WITH_TRITON = pytest.mark.skipif(not kernels.installed() or kernels.interpreting(), reason="no Triton that compiles")
# CUDA's exp, tanh and the like are within a few units in the last place; sums are added up in another order.
TOLERANCE = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 2e-5}


def assert_close(found, expected, what=""):
    """By relative norm."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    if found.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected, err_msg=what)
    else:
        error = np.linalg.norm((found - expected).ravel()) / max(np.linalg.norm(expected.ravel()), 1e-3)
        assert error <= TOLERANCE[found.dtype], f"{what}: relative error {error:.1e}"


def compare(function, *arguments):
    """function on arrays of the host and of the GPU."""
    expected = [np.asarray(lower(r)) for r in flatten(function(*arguments))[0]]
    with constants_on_gpu():
        found = [lower(r) for r in flatten(function(*[backend.to(a, "cuda") for a in arguments]))[0]]
    for number, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert backend.device_of(f) == "cuda:0"
        assert_close(backend.to(f, "cpu"), e, f"output {number}")


def test_cupy_does_what_the_stand_in_claims():
    test_fake_cupy.hold(backend.load_cupy())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sample", MOVING, ids=lambda s: s.id)
def test_ops(sample, dtype):
    """Forward, backward, forward mode and, in float64, a second derivative."""
    args = [a.astype(dtype) for a in sample.args]
    u, = (r.astype(dtype) for r in random_like(sample.function, *map(mt.tensor, args)))
    vs = [v.astype(dtype) for v in random_like(lambda *xs: list(xs), *args)]
    n = len(args)

    def everything(u, *given):
        args, vs = given[:n], given[n:]
        leaves = [mt.tensor(a, requires_grad=True) for a in args]
        y = sample.function(*leaves)
        y.backward(mt.tensor(u).to(y.dtype))
        out = [y, *(leaf.grad for leaf in leaves)]
        if dtype is np.float64:
            out.append(mt.jvp(lambda *xs: mt.vjp(sample.function, *xs)[1](u), args, vs))
        else:
            out.append(mt.jvp(sample.function, args, vs))
        return out
    compare(everything, u, *args, *vs)


@pytest.mark.parametrize("name", sorted(samples.CONSTANT))
def test_ops_without_a_derivative(name):
    function, two = samples.CONSTANT[name], len(mt.OPS[name].inputs) == 2
    x, y = np.array([[1.5, -0.5, 0.0], [2.0, -3.0, 0.5]]), np.array([[1.0, -0.5, 2.0]])
    x, y = (x > 0, y > 0) if name.startswith("logical") else (x, y)
    compare(lambda x, y: [function(mt.tensor(x), mt.tensor(y)) if two else function(mt.tensor(x))], x, y)


@pytest.mark.parametrize("name", test_steps.MODELS)
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "CuPy alone"])
def test_curves_of_cpu_and_gpu_agree(name, fused):
    """Three steps in float32, by SGD: Adam would blow last bits up."""
    model, data, _ = test_steps.MODELS[name]
    with kernels.enable() if fused else kernels.disable():
        here, there = (test_steps.train(device, model, data, "sgd") for device in ("cpu", "cuda"))
    np.testing.assert_allclose(there[0], here[0], rtol=1e-4)
    for parameter, value in here[1].items():
        error = np.linalg.norm(there[1][parameter] - value) / max(np.linalg.norm(value), 1e-3)
        assert error < 1e-4, f"{parameter}: {error:.1e}"


@pytest.mark.parametrize("window", [None, (5, None), ("linear", "delta"), "2x4"], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "CuPy alone"])
def test_sequences_in_slices(window, fused):
    """Through the stage of a pipeline: keys of earlier slices are a part of an array, and queries begin behind them."""
    tokens = np.random.default_rng(0).integers(0, 11, (4, 25))
    batch = next(Loader(tokens[:, :-1], tokens[:, 1:], 4, shuffle=False).epoch(0))

    def trained(device):
        mt.manual_seed(1)
        model = nn.GPT(11, 24, layers=2, heads=2, dim=32, positions="rotary", window=window).to(device)
        pipeline = Pipeline([model], comm.communicator.world_of_one(), schedule_of("1f1b", 1, 2, slices=3), [10, 8, 6])
        loss = pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=0, step=0,
                            units=24)
        return loss, [backend.to(lower(p.grad), "cpu") for p in model.parameters()]
    loss, gradients = trained("cpu")
    with kernels.enable() if fused else kernels.disable():
        found = trained("cuda")
    assert found[0] == pytest.approx(loss, rel=1e-5)
    for mine, gradient in zip(found[1], gradients, strict=True):
        assert_close(mine, gradient)


@pytest.mark.parametrize("optimizer", test_steps.OPTIMIZERS)
def test_optimizers_agree_on_given_gradients(optimizer):
    """A matrix, and a vector, which Muon leaves to AdamW."""
    rng, ends = np.random.default_rng(4), []
    starts, *gradients = [[rng.standard_normal(shape) for shape in ((61, 67), (4097,))] for _ in range(6)]
    for device in ("cpu", "cuda"):
        params = [mt.tensor(start, dtype=np.float32, device=device, requires_grad=True) for start in starts]
        opt = test_steps.OPTIMIZERS[optimizer]([{"params": [p]} for p in params])
        for step in gradients:
            for p, g in zip(params, step, strict=True):
                p.grad = mt.tensor(g, dtype=np.float32, device=device)
            opt.step()
        ends.append([p.detach().cpu().numpy() for p in params])
    for here, there in zip(*ends, strict=True):
        assert_close(there, here)


@WITH_TRITON
@pytest.mark.parametrize("options", eight_bit_cases.OPTIONS, ids=str)
def test_adam_of_8_bits_takes_the_steps_of_the_cpu(options):
    """In one launch each: the kernel against the tiles."""
    eight_bit_cases.check_steps("cuda", 5, **options)


@pytest.mark.parametrize("forget, graphs", test_cuda_graphs.WAYS)
@pytest.mark.parametrize("name", test_cuda_graphs.MODELS)
def test_a_graph_trains_as_the_function_does(name, forget, graphs):
    (losses, state, grads, passes), expected = (
        test_cuda_graphs.train(name, graphed, forget, 9, lambda ps, lr: optim.SGD(ps, lr)) for graphed in (True, False))
    assert passes.graphs == graphs
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    for found, wanted in zip((*state.values(), *grads), (*expected[1].values(), *expected[2]), strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-4 * max(np.linalg.norm(wanted), 1e-3)


@pytest.mark.parametrize("name", test_cublas.PRODUCTS)
@pytest.mark.parametrize("with_out", [False, True])
def test_products_by_cublas_itself(name, with_out):
    test_cublas.check_product(backend.load_cupy(), name, with_out)


@pytest.mark.parametrize("name", test_cuda_graph_einsum.FUNCTIONS)
def test_einsum_and_what_is_made_of_it_are_recorded(name):
    test_cuda_graph_einsum.check(name)


@WITH_TRITON
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_compiled_ops(dtype):
    from ..compiler import test_table
    groups = [(s.id, s.function, s.args) for s in MOVING if s.id not in {*test_table.BREAK, *COPIES}]
    test_table.hold(groups, "triton", dtype, "cuda", constants_on_gpu)


@WITH_TRITON
@pytest.mark.parametrize("group", range(4))
def test_compiled_random_programs(group):
    from ..compiler.test_random_programs import hold
    hold(group, "triton", device="cuda")


@WITH_TRITON
@pytest.mark.parametrize("ways", [("compiled",), ("compiled", "graph")], ids=" ".join)
@pytest.mark.parametrize("name", test_cuda_graphs.MODELS)
def test_compiled_models_train_as_the_function_does(name, ways):
    """Adam divides by a root, and so makes more of the last digits: parameters within 1e-3."""
    from ..compiler.test_on_gpu import train
    losses, parameters, compiled = train(name, *ways, steps=6)
    expected = train(name, steps=6)
    assert not compiled.breaks
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    for found, wanted in zip(parameters, expected[1], strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-3 * max(np.linalg.norm(wanted), 1e-3)


@WITH_TRITON
def test_compiled_units_of_stage_3():
    """Captured once, though their values come to another place on the GPU in each step."""
    from ..compiler.rank_cases import units_of_stage_3
    losses, state, *_, captures, breaks = units_of_stage_3(emit="triton", device="cuda")
    wanted = units_of_stage_3(compiled=False)
    assert captures == [1] * 3 and not breaks
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-10)
    for name, values in state.items():
        np.testing.assert_allclose(values, wanted[1][name], rtol=0, atol=1e-6, err_msg=name)


def test_a_recording_that_fails_leaves_a_gpu_that_works():
    test_cuda_graphs.check_failure(True)
    assert (mt.ones(3, device="cuda") + 1).sum().item() == 6


def test_a_graph_joins_many_arrays():
    test_cuda_graph_limits.check_many_joined()


def test_what_is_out_of_range_raises_late():
    y = mt.ones(4, 3, device="cuda")[np.array([0, 4])]
    with pytest.raises(IndexError, match=r"axis 0 of shape \(4, 3\)"):
        y.sum().item()
    with pytest.raises(RuntimeError, match=r"mul: arrays of different devices, \[2\] on cuda:0 and \[2\] on cpu"):
        mt.ones(2, device="cuda") * mt.ones(2)


def test_memory_info():
    backend.load_cupy()
    gc.collect()        # so that nothing of earlier tests is freed meanwhile
    before = backend.memory_info()["cuda:0"]
    x = mt.zeros(1 << 20, device="cuda")
    after = backend.memory_info()["cuda:0"]
    assert after["used"] - before["used"] >= x.data.nbytes and after["held"] >= after["used"]
    assert 0 < after["free"] <= after["total"]


@pytest.mark.skipif(not can_start_ranks(), reason="no mpirun: pip install mpich")
def test_two_ranks_share_a_gpu():
    """Staged through pinned memory: every call as on the host; training as on the host, and as on one rank."""
    for found, gpu_path, _ in ranks.call("tests.device.cases:every_call", 2, ("real",), limit=200):
        (host, *host_counts), (gpu, *gpu_counts) = found
        assert gpu_path == "staged: ranks 0, 1 share a GPU, which NCCL refuses" and host_counts == gpu_counts
        for name, arrays in host.items():
            for a, b in zip(arrays, gpu[name], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=str(name))
    alone, = ranks.call("tests.device.cases:trained", 1, ("real", False), limit=200)
    for both in ranks.call("tests.device.cases:trained", 2, ("real", False), limit=200):
        for losses, state in both:
            np.testing.assert_allclose(losses, alone[0][0], rtol=1e-9)
            for name, value in alone[0][1].items():
                np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.skipif(not can_start_ranks(), reason="no mpirun: pip install mpich")
@pytest.mark.parametrize("hook", ["fp16", "PowerSGD", "OneBit", "TopK"])
def test_compressed_gradients_are_those_of_the_host(hook):
    both = ranks.call("tests.device.cases:compressed", 2, ("real", hook), limit=200)
    for host, gpu in both:
        for name in host:
            np.testing.assert_allclose(gpu[name], host[name], rtol=1e-3, atol=1e-3, err_msg=name)
            np.testing.assert_array_equal(gpu[name], both[0][1][name], err_msg=name)


A_GPU_EACH = pytest.mark.skipif(GPUS < 2, reason="NCCL needs a GPU for each rank; there are fewer than two")


@A_GPU_EACH
@pytest.mark.skipif(not can_start_ranks(), reason="no mpirun: pip install mpich")
def test_two_ranks_with_a_gpu_each():
    for found, gpu_path, _ in ranks.call("tests.device.cases:every_call", 2, ("real nccl",), limit=200):
        (host, *host_counts), (gpu, *gpu_counts) = found
        assert gpu_path == "nccl: every rank owns a GPU" and host_counts == gpu_counts
        for name, arrays in host.items():
            for a, b in zip(arrays, gpu[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(name))


@A_GPU_EACH
@pytest.mark.skipif(not can_start_ranks(), reason="no mpirun: pip install mpich")
@pytest.mark.parametrize("exact", [False, True])
def test_training_by_nccl_is_that_of_the_host(exact):
    """(A bias before a batch norm has a gradient of rounding errors, which AdamW blows up.)"""
    for (host_losses, host), (gpu_losses, gpu) in ranks.call(
            "tests.device.cases:trained", 2, ("real nccl", exact), limit=200):
        np.testing.assert_allclose(gpu_losses, host_losses, rtol=1e-9)
        for name, value in host.items():
            np.testing.assert_allclose(gpu[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
