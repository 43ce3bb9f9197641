"""Compiled functions on arrays of a GPU: on the stand-in for CuPy, with Triton's interpreter in its kernels' place."""

import json
import runpy
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import minitorch_dist as mt
from minitorch_dist import backend, kernels, ledger, nn, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.kernels import cublas
from tests.device import fake_cublas, test_cuda_graphs
from tests.device.fake_cupy import cupy, launches, transfers
from tests.device.test_ops import COPIES, MOVING, constants_on_gpu
from tests.kernels.harness import on_stand_in

from . import test_random_programs as test_random_programs_
from . import test_table
from .compare import near

MODELS = test_cuda_graphs.MODELS
SMALL = {"norms": (
    lambda: nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.GELU(), nn.BatchNorm(12), nn.Linear(12, 5)),
    lambda rng: (rng.standard_normal((6, 7)).astype("f4"), rng.integers(0, 5, 6)))}
pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(cublas, "load_library", fake_cublas.FakeCublas)
    with on_stand_in(cublas=fake_cublas.NAMES):
        yield
        assert backend.recording.graph is None


def train(name, *ways, steps=5, dropout=False, meddle=None):
    """(losses, parameters, the function) of steps on the GPU; ways: "compiled", "graph". Without them they are made on
    the host, op by op: what the others are compared with."""
    make, batch = (MODELS | SMALL)[name]
    device = "cuda" if ways else "cpu"
    mt.manual_seed(3)
    model = make().to(device)
    model = nn.Sequential(model, nn.Dropout(0.3)) if dropout else model
    optimizer = optim.AdamW(model.parameters(), 0.01)
    arrays = [backend.to(a, device) for a in batch(np.random.default_rng(0))]

    def loss_of(x, labels):
        return nn.cross_entropy(model(x), labels)
    inner = mt.compile(loss_of) if "compiled" in ways else loss_of

    def passes(x, labels):
        optimizer.zero_grad()
        loss = inner(x, labels)
        loss.backward()
        return loss
    passes = mt.cuda_graph(passes) if "graph" in ways else passes
    losses = []
    for step in range(steps):
        if meddle:
            meddle(model, step)
        with ExitStack() as stack:
            if dropout:
                stack.enter_context(backend.random_scope(0, step, len(arrays[0]), (0, len(arrays[0]))))
            loss = passes(*arrays)
        optimizer.step()
        losses.append(loss.detach().cpu().numpy())
    return losses, [p.detach().cpu().numpy() for p in model.parameters()], inner


def alike(found, expected):
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        near(a, b, rounding=3000)       # of Adam's, after some steps


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_the_function_does(name):
    found = train(name, "compiled", steps=2)
    assert not found[2].breaks and len(found[2].variants) == 1
    alike(found, train(name, steps=2))


@pytest.mark.thorough
def test_the_op_table():
    groups = [(s.id, s.function, s.args) for s in MOVING if s.id not in {*test_table.BREAK, *COPIES}]
    test_table.hold(groups, "triton", np.float32, "cuda", constants_on_gpu)


def test_random_programs():
    test_random_programs_.hold(5, "triton", 12, "cuda")


def test_dropout_draws_the_same_numbers():
    found = train("norms", "compiled", dropout=True)
    assert not found[2].breaks and "philox_uniform" not in found[2].show("fused")
    alike(found, train("norms", dropout=True))


@pytest.mark.parametrize("name", ["norms", "residual, batch norm"])
def test_inside_of_a_cuda_graph(name):
    found = train(name, "compiled", "graph", steps=5)
    assert not found[2].breaks
    alike(found, train(name))


@pytest.mark.parametrize("ways", [("compiled",), ("compiled", "graph")])
def test_what_changes_is_seen(ways):
    """A number that the function reads from a module becomes another one: by the compiled function, and by the graph
    that it has become a part of."""
    def meddle(model, step):
        if step == 3:
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = 0.5
    found = train("norms", *ways, meddle=meddle)
    expected = train("norms", meddle=meddle)
    alike(found, expected)
    assert not np.allclose(expected[0][-1], train("norms")[0][-1], rtol=1e-4)


def test_a_parameter_that_moves_is_seen_by_the_graph():
    def meddle(model, step):
        if step == 4:
            FlatBuffer(list(model.parameters())[::-1])
            with mt.no_grad():
                for p in model.parameters():
                    p *= 0.5
    alike(train("norms", "compiled", "graph", steps=7, meddle=meddle), train("norms", steps=7, meddle=meddle))


def test_half_precision_is_left_to_the_engines_own_kernels():
    """Which compute in float32: x² of 400 is too large for float16."""
    x = mt.tensor((400 * np.random.default_rng(0).standard_normal((4, 64))).astype(np.float16), device="cuda")
    made = mt.compile(lambda x: mt.layer_norm(x, 64))
    near(made(x).cpu().numpy(), mt.layer_norm(x, 64).cpu().numpy())
    assert not made.breaks and abs(made(x).cpu().numpy()).max() > 1


def test_a_graph_keeps_what_a_compiled_function_has_made():
    """The array of positions is the variant's; the graph has its address."""
    made = mt.compile(lambda x: x * np.arange(x.shape[0], like=x.data))
    graph = mt.cuda_graph(lambda x: made(x) * 1.0)
    x = mt.tensor(np.ones(5), device="cuda")
    for _ in range(3):
        graph(x)
    constant, (case,) = made.variants[0].elsewhere[0][0], graph._cases.values()
    assert any(array is constant for array in case.graphs[0].recorder.held)
    np.testing.assert_array_equal(graph(x).cpu().numpy(), np.arange(5.0))


def test_nothing_travels_and_nothing_waits():
    x = mt.tensor(np.ones((4, 6), np.float32), device="cuda", requires_grad=True)
    made = mt.compile(lambda x: mt.softmax(x * 2.0) @ x.T)
    for _ in range(2):
        transfers.clear()
        launches.clear()
        with ledger.record() as book:
            made(x).sum().backward()
    assert not transfers and not made.breaks
    assert sum(launches[name] for name in ("exp", "max", "multiply", "divide")) == 0 and book.launches.total() >= 2


def test_what_is_out_of_range_raises_late():
    made = mt.compile(lambda table, index: mt.embedding(index, table) * 2.0)
    table, index = mt.tensor(np.ones((3, 2), np.float32), device="cuda"), cupy.asarray(np.array([0, 3]))
    y = made(table, index)
    with pytest.raises(ValueError, match="3 rows"):
        y.cpu()
    assert not made.breaks


def eager_error(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return type(caught.value), str(caught.value)


def test_arrays_of_several_devices_are_named():
    def f(x, y):
        return mt.exp(x) + y
    x, y = mt.tensor(np.ones(3)), mt.tensor(np.ones(3), device="cuda")
    made = mt.compile(f)
    assert eager_error(made, x, y) == eager_error(f, x, y)


def test_a_parameter_on_the_host_is_named():
    model = nn.Linear(3, 2)
    x = mt.tensor(np.ones((4, 3), np.float32), device="cuda")
    assert eager_error(mt.compile(model), x) == eager_error(model, x)


@pytest.mark.parametrize("emit", ["c", "numpy"])
def test_other_kernels_are_not_for_a_gpu(emit):
    x = mt.tensor(np.arange(3.0), device="cuda")
    made = mt.compile(mt.softmax, emit=emit)
    with pytest.warns(UserWarning, match=f"the arguments are on cuda:0, where emit='{emit}' can't run"):
        near(made(x).cpu().numpy(), mt.softmax(x).cpu().numpy())


def test_without_triton_cupy_serves():
    x = mt.tensor(np.arange(3.0), device="cuda")
    made = mt.compile(mt.softmax)
    for _ in range(2):
        with kernels.disable(), ledger.record() as book:
            if not made.breaks:
                with pytest.warns(UserWarning, match="on a GPU, and Triton is disabled"):
                    made(x)
            near(made(x).cpu().numpy(), mt.softmax(x).cpu().numpy())
        assert not book.launches
        with ledger.record() as book:
            made(x)
        assert book.launches.total() > 0


def test_a_value_that_is_asked_for_breaks():
    x = mt.tensor(np.arange(3.0), device="cuda")

    def f(x):
        return x * float(mt.sum(x).item())
    made = mt.compile(f)
    with pytest.warns(UserWarning, match="asks for the value"):
        near(made(x).cpu().numpy(), f(x).cpu().numpy())


def test_host_and_gpu_have_graphs_of_their_own():
    made = mt.compile(mt.softmax)
    x = np.random.default_rng(0).standard_normal((3, 5))
    on_host, on_gpu = made(mt.tensor(x)), made(mt.tensor(x, device="cuda"))
    assert on_host.device == "cpu" and on_gpu.device == "cuda:0" and len(made.variants) == 2
    near(on_gpu.cpu().numpy(), on_host.numpy())


def test_the_demo_compiled(tmp_path):
    """The program itself: the losses that it has op by op, within rounding, by kernels of its own."""
    program, found = runpy.run_path(str(Path(backend.__file__).parents[2] / "mnist_demo" / "train.py")), {}
    for more in ((), ("--compile",)):
        out = tmp_path / "".join(("run", *more))
        with ledger.record() as book:
            assert program["main"](["--data", "digits", "--steps", "2", "--hidden", "9", "--device", "cuda", *more,
                                    "--out", str(out)]) == 0
        history = (out / "history.jsonl").read_text().splitlines()
        found[more] = [json.loads(line)["loss"] for line in history], book.launches
    np.testing.assert_allclose(found["--compile",][0], found[()][0], rtol=1e-5)
    assert set(found["--compile",][1]) - set(found[()][1])
