"""cuda_graph on the stand-in: what a graph repeats, what it refuses, and what the host does beside it.

The stand-in computes nothing while it records, and a launch computes on the same memory again; so a number that the
host has put in, or an array that has moved, shows.
"""

from collections import deque

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, comm, cuda_graphs, ledger, nn, optim
from minitorch_dist.compress.low_precision import convert_to_low_precision_training
from minitorch_dist.kernels import cublas
from minitorch_dist.parallel import DistributedDataParallel

from . import fake_cublas, fake_cuda
from .fake_cupy import installed, launches, transfers
from .graph_programs import assert_equal, values

MODELS = {
    "mlp": (lambda: nn.mlp((16, 12)), lambda rng: (rng.standard_normal((5, 784)).astype("f4"), rng.integers(0, 10, 5))),
    "lenet": (nn.lenet, lambda rng: (rng.standard_normal((3, 784)).astype("f4"), rng.integers(0, 10, 3))),
    "residual, batch norm": (
        lambda: nn.Sequential(nn.Reshape(1, 28, 28), nn.AvgPool2d(4), nn.ResidualBlock(1, 3, 2), nn.Flatten(),
                              nn.Linear(48, 10)),
        lambda rng: (rng.standard_normal((4, 784)).astype("f4"), rng.integers(0, 10, 4))),
    "image transformer": (lambda: nn.ImageTransformer(layers=1, dim=8, heads=2),
                          lambda rng: (rng.standard_normal((2, 784)).astype("f4"), rng.integers(0, 10, 2))),
    "gpt": (lambda: nn.GPT(11, 7, layers=2, heads=2, dim=8), lambda rng: rng.integers(0, 11, (2, 3, 7))),
    "gpt, rotary": (lambda: nn.GPT(11, 7, layers=1, heads=4, kv_heads=2, dim=8, positions="rotary", norm="rms",
                                   tied=False), lambda rng: rng.integers(0, 11, (2, 3, 7))),
    "gpt, stretched": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, positions=nn.Rotary(100, 3, 4)),
                       lambda rng: rng.integers(0, 11, (2, 3, 7))),
    "gpt, linear": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, window="linear"),
                    lambda rng: rng.integers(0, 11, (2, 3, 7))),
    "gpt, delta": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, window="delta"),
                   lambda rng: rng.integers(0, 11, (2, 3, 7))),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    with installed(cublas=fake_cublas.NAMES) as cupy:
        monkeypatch.setattr(cublas, "load_library", fake_cublas.FakeCublas)
        fake_cublas.calls.clear()
        yield cupy
        assert fake_cuda.recorded() is None and backend.recording.graph is None


def made(*shape, dtype="f4", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def on_gpu(array, **options):
    return mt.tensor(array, device="cuda", **options)


def train(name, graphed, forget="inside", steps=7, optimizer=optim.AdamW):
    """(losses, parameters and buffers, gradients, the function) after some steps."""
    model, batch = MODELS[name]
    mt.manual_seed(3)
    model = model().to("cuda")
    adam = optimizer(model.parameters(), 0.01)

    def passes(x, labels):
        if forget == "inside":
            adam.zero_grad()
        loss = nn.cross_entropy(model(x), labels)
        loss.backward()
        return loss
    passes = mt.cuda_graph(passes) if graphed else passes
    losses = []
    for step in range(steps):
        if forget == "outside" or forget == "every other" and step % 2 == 0:
            adam.zero_grad()
        losses.append(passes(*(on_gpu(part) for part in batch(np.random.default_rng(step)))))
        if forget != "every other" or step % 2:
            adam.step()
    grads = [p.grad.cpu().numpy() for p in model.parameters()]
    return [loss.item() for loss in losses], model.state_dict(), grads, passes


WAYS = [("inside", 1), ("outside", 1), ("every other", 2), ("never", 1)]


@pytest.mark.parametrize("name, forget, graphs", [(name, *way) for name in MODELS for way in WAYS
                                                  if way[0] == "inside" or name in ("mlp", "gpt")])
def test_training_is_the_same_to_the_last_bit(name, forget, graphs):
    steps = 9 if forget == "every other" else 7
    losses, state, grads, passes = train(name, True, forget, steps)
    expected = train(name, False, forget, steps)
    assert passes.graphs == graphs
    assert losses == expected[0] and len(set(losses)) == steps
    assert list(state) == list(expected[1])
    for found, wanted in zip((*state.values(), *grads), (*expected[1].values(), *expected[2]), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_smoothed_loss_of_labels_some_of_which_are_ignored():
    random = np.random.default_rng(3)
    weight, z, labels = random.standard_normal((5, 5)), random.standard_normal((6, 5)), random.integers(0, 5, 6)
    labels[2] = -100
    found = []
    for graphed in (False, True):
        w = mt.tensor(weight, requires_grad=True, device="cuda")

        def passes(x, labels, w=w):
            w.grad = None
            loss = nn.cross_entropy(x @ w, labels, label_smoothing=0.2)
            loss.backward()
            return loss
        passes = mt.cuda_graph(passes) if graphed else passes
        losses = [passes(on_gpu(z * scale), on_gpu(labels)).item() for scale in (1.0, 2.0, 3.0)]
        found.append((losses, w.grad.cpu().numpy()))
    assert passes.graphs == 1 and found[0][0] == found[1][0] and len(set(losses)) == 3
    np.testing.assert_array_equal(found[0][1], found[1][1])


def linear(graphed=True):
    """(a layer on the GPU, its passes, [how often Python ran them])."""
    mt.manual_seed(1)
    layer, runs = nn.Linear(4, 3).to("cuda"), deque([0])     # what stands in one is seen by nobody

    def passes(x, scale=1.0):
        runs[0] += 1
        layer.zero_grad()
        loss = (layer(x) * scale).sum()
        loss.backward()
        return loss
    return layer, mt.cuda_graph(passes) if graphed else passes, runs


def test_after_that_the_host_asks_for_nothing_but_copies_and_the_graph(gpu):
    layer, passes, runs = linear()
    xs = [on_gpu(made(5, 4, seed=i)) for i in range(6)]
    asked = []
    for x in xs:
        before = launches.total()
        passes(x)
        asked.append(launches.total() - before)
    assert list(runs) == [2]      # once, and recorded
    assert all(asked[:2]) and asked[2:] == [0, 0, 0, 0] and transfers["down"] == 0
    np.testing.assert_allclose(layer.weight.grad.cpu().numpy(), np.tile(xs[-1].cpu().numpy().sum(0), (3, 1)), rtol=1e-6)


def test_outputs_and_inputs_are_the_callers():
    layer, passes, _ = linear()
    xs = [on_gpu(made(5, 4, seed=i)) for i in range(5)]
    losses = [passes(x) for x in xs]
    assert all(loss.node is None for loss in losses)
    expected = [layer(x).sum().item() for x in xs]
    np.testing.assert_allclose([loss.item() for loss in losses], expected, rtol=1e-6)
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(x.cpu().numpy(), made(5, 4, seed=i))


def test_arguments_may_be_nested_come_from_the_host_and_be_constants():
    @mt.cuda_graph
    def f(batch, *, power, names=("a", "b")):
        a, b = (batch[name] for name in names)
        return {"sum": a + b, "parts": [(a if isinstance(a, mt.Tensor) else mt.Tensor(a)) ** power, "text", None]}

    for seed in range(4):
        a, b = made(2, 3, seed=seed), made(2, 3, seed=seed + 9)
        for power in (1, True, 2, 2.0):
            found = f({"a": a, "b": on_gpu(b)}, power=power)
            np.testing.assert_array_equal(found["sum"].cpu().numpy(), a + b)
            np.testing.assert_array_equal(found["parts"][0].cpu().numpy(), (mt.tensor(a) ** power).numpy())
            assert found["parts"][1:] == ["text", None]
    assert f.graphs == 4
    assert f({"a": a, "b": b}, power=2)["sum"].__class__ is not mt.Tensor      # two arrays of the host: arrays
    with pytest.raises(TypeError, match="can't take a set"):
        f({"a": a, "b": b}, power={1})


def test_other_shapes_dtypes_and_modes_are_other_graphs():
    layer = nn.Linear(4, 3).to("cuda")
    drop = nn.Sequential(layer, nn.Dropout(0.5))

    @mt.cuda_graph
    def f(x):
        return drop(x)

    drop.eval()
    for count in range(1, 4):
        for _ in range(3):
            x = made(count, 4)
            np.testing.assert_array_equal(f(on_gpu(x)).cpu().numpy(), layer(on_gpu(x)).cpu().numpy())
    assert f.graphs == 3
    with mt.no_grad():
        for _ in range(3):
            f(on_gpu(x))
    assert f.graphs == 4
    drop.train()
    with pytest.raises(RuntimeError, match=r"drawing random numbers inside of cuda_graph\(f\)"):
        f(on_gpu(x))
    drop.eval()
    before = launches.total()
    f(on_gpu(x))
    assert launches.total() == before       # the graph of evaluation is still there


def test_parameters_that_move_are_recorded_anew():
    layer, passes, runs = linear()
    x = on_gpu(made(5, 4))
    for _ in range(4):
        passes(x)
    assert (passes.graphs, *runs) == (1, 2)
    sgd = optim.SGD(layer.parameters(), 0.5)        # into a flat buffer
    for _ in range(4):
        before = [p.cpu().numpy().copy() for p in layer.parameters()]
        loss = passes(x).item()
        np.testing.assert_allclose(loss, layer(x).sum().item(), rtol=1e-6)
        sgd.step()
        for p, old in zip(layer.parameters(), before, strict=True):
            np.testing.assert_allclose(p.cpu().numpy(), old - 0.5 * p.grad.cpu().numpy(), rtol=1e-6)
    assert (passes.graphs, *runs) == (1, 4)


@pytest.mark.parametrize("replaced", ["by another", "by none"])
def test_gradients_are_added_to_what_the_user_has_put_there(replaced):
    x, found = on_gpu(made(5, 4)), []
    for graphed in (True, False):
        layer = nn.Linear(4, 3).to("cuda")

        def passes(x, layer=layer):
            layer(x).sum().backward()
        passes, sums = mt.cuda_graph(passes) if graphed else passes, []
        for step in range(8):
            if step in (4, 6):
                layer.weight.grad = on_gpu(made(3, 4, seed=step)) if replaced == "by another" else None
            passes(x)
            sums += [p.grad.cpu().numpy().copy() for p in layer.parameters()]
        found.append(sums)
    for graphed, eager in zip(*found, strict=True):
        np.testing.assert_array_equal(graphed, eager)


@pytest.mark.parametrize("call", range(4))
def test_checks_are_made_at_every_call(call):
    f = mt.cuda_graph(lambda labels: mt.one_hot(labels, 3))
    for _ in range(call):
        f(on_gpu([0, 2])).tolist()
    found = f(on_gpu([0, 3]))
    with pytest.raises(ValueError, match="out of range: there are 3 classes"):
        found.tolist()


def test_checks_are_repeated():
    table = nn.Embedding(5, 2).to("cuda")

    @mt.cuda_graph
    def f(tokens):
        return table(tokens).sum()

    for tokens in ([0, 4], [1, 2], [3, 3]):
        f(np.array(tokens)).item()
    f(np.array([0, 9]))             # nobody has asked yet
    later = f(np.array([1, 1]))
    with pytest.raises(ValueError, match="out of range: there are 5 rows"):
        later.item()
    assert f(np.array([1, 1])).item() == pytest.approx(2 * float(table.weight.cpu().numpy()[1].sum()), rel=1e-6)


def test_the_ledger_counts_every_call():
    @mt.cuda_graph
    def f(x):
        ledger.launch("mine")
        ledger.launch("mine", 2)
        return x + 1

    for _ in range(4):
        with ledger.record(timeline=True) as book:
            f(on_gpu(made(2)))
        assert book.launches == {"mine": 3}
    assert [span.name for span in book.spans] == ["cuda_graph(f)"]


def test_a_repetition_overwrites_what_a_tape_has_saved():
    layer, passes, _ = linear()
    optim.SGD(layer.parameters(), 0.1)
    x = on_gpu(made(5, 4))
    for _ in range(4):
        passes(x)
    leaf = on_gpu(made(3, 4), requires_grad=True)
    y = (leaf * layer.weight.grad).sum()
    passes(on_gpu(made(5, 4, seed=1)))
    with pytest.raises(RuntimeError, match="gradient accumulation has overwritten it"):
        y.backward()


def test_one_graph_inside_of_another_becomes_a_part_of_it():
    inner = mt.cuda_graph(lambda x: x * 2)
    outer = mt.cuda_graph(lambda x: inner(x) + 1)
    for seed in range(4):
        x = made(3, seed=seed)
        np.testing.assert_array_equal(outer(on_gpu(x)).cpu().numpy(), x * 2 + 1)
    assert (outer.graphs, inner.graphs) == (1, 0)


WORLD = comm.communicator.world_of_one
REFUSED = {     # what a function does -> what is said
    "item": (lambda x: x.sum().item(), "a copy from cuda:0 to cpu"),
    "truth": (lambda x: 1 if x.sum() > 0 else 2, "a copy from cuda:0 to cpu"),
    "numbers of the host": (lambda x: x + mt.tensor([1.0, 2.0], device="cuda"), "a copy from cpu to cuda:0"),
    "dropout": (lambda x: mt.dropout(x, 0.5), "drawing random numbers"),
    "randn": (lambda x: x + mt.randn((2,), device="cuda"), "drawing random numbers"),
    "all_reduce": (lambda x: WORLD().all_reduce(x.data), "all_reduce"),
    "barrier": (lambda x: WORLD().barrier(), "barrier"),
    "step": (lambda x: optim.SGD([mt.zeros((2,), device="cuda").requires_grad_()], 0.1).step(), "SGD.step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_hosts_work_is_refused_from_the_first_call_on(name):
    function, what = REFUSED[name]
    graphed = mt.cuda_graph(function)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=rf"^{what} inside of cuda_graph\(<lambda>\): a CUDA graph repeats"):
            graphed(on_gpu(made(2)))


def test_data_parallel_training_is_refused():
    net = DistributedDataParallel(nn.Linear(4, 3).to("cuda"), WORLD())
    passes = mt.cuda_graph(lambda x: net(x).sum().backward())
    with pytest.raises(RuntimeError, match="inside of cuda_graph"):
        passes(on_gpu(made(5, 4)))


@pytest.mark.parametrize("inside, error, what", [
    (lambda f: mt.grad(f)(on_gpu(made(2))), RuntimeError, "inside of a transform"),
    (lambda f: mt.detect_anomaly()(f)(on_gpu(made(2))), RuntimeError, "inside of detect_anomaly"),
    (lambda f: f(on_gpu(made(2), requires_grad=True)), ValueError, r"an input of shape \(2,\) is being differentiated"),
    (lambda f: f(on_gpu(made(2)), mt.tensor(made(2), device="cuda:1")), RuntimeError, "arrays of different devices"),
], ids="transform anomaly differentiated devices".split())
def test_calls_that_no_graph_can_serve(inside, error, what):
    with pytest.raises(error, match=what):
        inside(mt.cuda_graph(lambda *xs: (xs[0] * 2).sum()))


def test_what_cupy_refuses_to_record_is_said_and_nothing_is_lost():
    check_failure(False)
    check_failure(True)


def check_failure(forgets):
    """A recording that fails, twice."""
    layer = nn.Linear(4, 3).to("cuda")

    @mt.cuda_graph
    def passes(x):
        if forgets:
            layer.zero_grad()
        y = layer(x).sum()
        y.backward()
        return x.data @ x.data.T        # CuPy's own

    x = on_gpu(made(5, 4))
    for _ in range(1 if forgets else 2):
        passes(x)
    before = [p.grad.cpu().numpy().copy() for p in layer.parameters()]
    grads = [p.grad for p in layer.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cuda_graph\(passes\): this function can't be recorded as a CUDA graph"
                                               ": calling cuBLAS API during stream capture"):
            passes(x)
        for p, grad, old in zip(layer.parameters(), grads, before, strict=True):
            assert p.grad is grad
            np.testing.assert_array_equal(grad.cpu().numpy(), old)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_products_of_8_bits_are_recorded(recipe):
    ends = []
    for wrap in (mt.cuda_graph, lambda f: f):
        mt.manual_seed(0)
        layer = convert_to_low_precision_training(nn.Sequential(nn.Linear(48, 32)), recipe).to("cuda")

        def passes(x, layer=layer):
            layer.zero_grad()
            y = layer(x)
            (y * y).sum().backward()
            return y
        passes, x = wrap(passes), on_gpu(made(16, 48))
        ends.append([values([passes(x), *(p.grad for p in layer.parameters())]) for _ in range(4)][-1])
        assert wrap is not mt.cuda_graph or passes.graphs == 1
    assert_equal(*ends)


@pytest.mark.parametrize("kind, raised", [(RuntimeError, RuntimeError), (MemoryError, RuntimeError),
                                          (KeyboardInterrupt, KeyboardInterrupt)])
def test_what_cuda_refuses_to_record_is_said_whatever_type_it_comes_as(kind, raised):
    """Thrust, which sorts for CuPy, waits for the GPU and makes a bare RuntimeError of CUDA's answer."""
    why = "operation not permitted when stream is capturing"

    @mt.cuda_graph
    def f(x):
        fake_cuda.refuse_while_recording(kind(why))
        return x + 1

    f(on_gpu(made(2)))
    words = rf"cuda_graph\(f\): this function can't be recorded as a CUDA graph: {why}"
    with pytest.raises(raised, match=words if raised is RuntimeError else why):
        f(on_gpu(made(2)))
    assert fake_cuda.recorded() is None and f.graphs == 0


def test_an_error_of_the_functions_own_goes_through():
    ways = iter("fine fine wrong fine fine".split())

    @mt.cuda_graph
    def f(x):
        y = x + 1
        if next(ways) == "wrong":
            raise KeyError("mine")
        return y

    x = on_gpu(made(2))
    f(x)
    next(ways)
    with pytest.raises(KeyError, match="mine"):
        f(x)
    np.testing.assert_array_equal(f(x).cpu().numpy(), made(2) + 1)
    assert f.graphs == 1


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "load_cupy", lambda: (_ for _ in ()).throw(RuntimeError("a GPU needs CuPy")))
    monkeypatch.setattr(cuda_graphs, "load_cupy", backend.load_cupy)
    with pytest.raises(RuntimeError, match="a GPU needs CuPy"):
        mt.cuda_graph(lambda x: x)(mt.tensor([1.0]))
