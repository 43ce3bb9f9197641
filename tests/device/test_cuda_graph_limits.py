"""What cuda_graph refuses, what it says of itself, and what it leaves behind."""

import collections
import copy
import gc
import pickle
import threading

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import cuda_graphs, ledger, nn

from . import fake_cuda
from .graph_programs import assert_equal, grads, net
from .test_cuda_graphs import gpu, made, on_gpu  # noqa: F401


def yielding(x):
    yield x


def write(x):
    x[...] = x * 2
    return x


def write_raw(x):
    x.data[...] = 1


def keep_the_tape(leaf):
    def f(x):
        leaf.grad = None
        (leaf ** 3 * x).sum().backward(create_graph=True)
    return f


def backward_on_the_host(x):
    leaf = mt.tensor([1.0], requires_grad=True)
    (leaf * 2).sum().backward()


COUNTER = mt.zeros(3)


def write_on_the_host(x):
    COUNTER[0] = 1.0


@pytest.mark.parametrize("function, error, what", [
    (yielding, TypeError, "returns a generator"),
    (lambda x: {x.data.ndim}, TypeError, "returns a set"),
    (lambda x: np.arange(3), TypeError, r"an array of shape \(3,\) on the cpu"),
    (lambda x: mt.zeros(3), TypeError, r"an array of shape \(3,\) on the cpu"),
    (write, RuntimeError, r"written into its input of shape \(2,\)"),
    (write_raw, RuntimeError, r"written into its input of shape \(2,\)"),
    (backward_on_the_host, RuntimeError, r"gradient of a tensor of shape \(1,\) on the cpu"),
    (write_on_the_host, RuntimeError, "in-place assignment on the cpu inside of cuda_graph"),
    (lambda x: mt.sort(mt.concatenate([x] * 129)), RuntimeError, r"a sort of 258 elements.*inside of cuda_graph"),
], ids="generator set array tensor write write_raw backward_on_the_host write_on_the_host long_sort".split())
def test_what_a_graph_cannot_repeat_is_refused_at_the_first_call(function, error, what):
    graphed = mt.cuda_graph(function)
    with pytest.raises(error, match=what):
        graphed(on_gpu(made(2)))
        mt.zeros(1, device="cuda").item()


def test_gradients_on_the_tape_are_refused():
    leaf = on_gpu(made(2), requires_grad=True)
    with pytest.raises(RuntimeError, match="leaves gradients that are on the tape"):
        mt.cuda_graph(keep_the_tape(leaf))(on_gpu(made(2)))


def check_many_joined():
    """More arrays than CuPy joins without a copy from the host, and their gradients; on a GPU, too."""
    shares = [on_gpu(made(2, 3, seed=seed), requires_grad=True) for seed in range(70)]

    def passes(x):
        for share in shares:
            share.grad = None
        loss = (mt.concatenate([share * x for share in shares], 1) ** 2).sum()
        loss.backward()
        return loss
    graphed = mt.cuda_graph(passes)
    for seed in range(3):
        x = on_gpu(made(2, 3, seed=100 + seed))
        found = [graphed(x).item(), *(share.grad.tolist() for share in shares)]
        wanted = [passes(x).item(), *(share.grad.tolist() for share in shares)]
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
        assert found[1:] == wanted[1:]
    assert graphed.graphs == 1


def test_many_arrays_are_joined():
    check_many_joined()


def test_nan_is_no_write_into_an_input():
    f = mt.cuda_graph(lambda x: x + 1)
    assert np.isnan(f(on_gpu(np.array([np.nan, 1.0], "f4"))).tolist()[0])


# ---------------------------------------------------------------- around the graphs

def test_a_tape_is_told_that_gradients_without_an_optimizer_are_overwritten():
    model = net()

    @mt.cuda_graph
    def passes(x):
        model.zero_grad()
        model(x).sum().backward()
    for i in range(3):
        passes(on_gpu(made(5, 4, seed=i)))
    leaf = on_gpu(made(3, 4), requires_grad=True)
    y = (leaf * model.weight.grad).sum()
    passes(on_gpu(made(5, 4, seed=9)))
    with pytest.raises(RuntimeError, match=r"cuda_graph\(passes\) has overwritten it"):
        y.backward()


def test_every_graph_has_memory_of_its_own(monkeypatch):
    """Else a graph works in what another one's gradients live in."""
    pools = []
    monkeypatch.setattr(fake_cuda.cuda, "MemoryPool", lambda: pools.append(fake_cuda.MemoryPool()) or pools[-1])
    f = mt.cuda_graph(lambda x: x + 1)
    for shape in (2, 3):
        for _ in range(3):
            f(on_gpu(made(shape)))
    kept = [graph.pool for case in f._cases.values() for graph in case.graphs]
    assert len(pools) == 2 and kept == pools


def test_another_thread_counts_for_itself():
    """Launches of a thread that computes while this one records: its ledger sees them, the graph's doesn't."""
    recording, counted = threading.Event(), threading.Event()
    books = []

    def other():
        recording.wait(10)
        with ledger.record() as book:
            books.append(book)
            ledger.launch("theirs")
            counted.set()
            finished.wait(10)
            ledger.launch("theirs")

    @mt.cuda_graph
    def f(x):
        ledger.launch("mine")
        if fake_cuda.recorded() is not None:
            recording.set()
            assert counted.wait(10)
        return x + 1

    finished, thread = threading.Event(), threading.Thread(target=other)
    thread.start()
    f(on_gpu(made(2)))
    with ledger.record() as book:
        f(on_gpu(made(2)))
        f(on_gpu(made(2)))
    finished.set()
    thread.join()
    assert book.launches == {"mine": 2, "theirs": 1} and books[0].launches == {"theirs": 2, "mine": 2}
    assert not ledger.open_ledgers


@pytest.mark.parametrize("interrupted", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_recorded(interrupted):
    """Nor is anything left behind by somebody who presses ^C then."""
    model, ways = net(), iter([False, interrupted, False, False])
    collected = collections.deque()     # what stands in it is seen by nobody

    @mt.cuda_graph
    def passes(x):
        collected.append(2 * (fake_cuda.recorded() is None) + gc.isenabled())
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        if next(ways):
            raise KeyboardInterrupt
        return loss
    x = on_gpu(made(5, 4))
    expected, first = passes(x).item(), grads(model)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            passes(x)
        assert gc.isenabled()
        assert_equal(grads(model), first)
    for _ in range(3):
        assert passes(x).item() == expected
        assert_equal(grads(model), first)
    assert passes.graphs == 1 and list(collected) == [3] + [0] * (1 + interrupted)


def test_memory_is_counted_as_without_a_graph():
    model, books = net(), []

    def passes(x):
        model.zero_grad()
        (model(x) ** 2).sum().backward()
    graphed = mt.cuda_graph(passes)
    for _ in range(3):
        graphed(on_gpu(made(5, 4)))
    for f in (graphed, passes):
        with ledger.record(memory=True) as book:
            f(on_gpu(made(5, 4)))
        books.append(book.peak)
    assert books[0] == books[1] and books[0]["activation"] > 0


def test_constants_that_differ_at_every_call_are_forgotten():
    f = mt.cuda_graph(lambda x, scale: x * scale)
    for step in range(2 * cuda_graphs.CASES):
        assert f(on_gpu(np.ones(1, "f4")), step / 7).item() == np.float32(step / 7)
    assert len(f._cases) == cuda_graphs.CASES


def test_graphs_of_situations_that_do_not_come_back_are_forgotten():
    model = net()
    f = mt.cuda_graph(lambda x: model(x))
    for step in range(30):
        model.note = step // 3
        f(on_gpu(made(5, 4)))
    assert f.graphs == cuda_graphs.SITUATIONS


def test_calls_keep_no_memory():
    model = net()

    @mt.cuda_graph
    def passes(x):
        model.zero_grad()
        loss = nn.cross_entropy(model(x), model(x).argmax(1))
        loss.backward()
        return loss
    x = on_gpu(made(5, 4))
    for _ in range(20):
        passes(x).item()
    counts = []
    for _ in range(2):
        gc.collect()
        counts.append(len(gc.get_objects()))
        for _ in range(100):
            passes(x).item()
    assert counts[1] - counts[0] < 100


class Trained(nn.Module):
    """A model that carries its graphed passes along."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @mt.cuda_graph
    def passes(self, x):
        self.zero_grad()
        loss = self.layer(x).sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["deepcopy", "pickle"])
def test_a_copied_model_has_graphs_of_its_own(twin_of):
    model = Trained().to("cuda")
    for i in range(3):
        model.passes(on_gpu(made(5, 4, seed=i)))
    twin = twin_of(model)
    with mt.no_grad():
        twin.layer.weight[...] = 2.0
    before = grads(model)
    for i in range(3):
        x = on_gpu(made(5, 4, seed=i))
        assert twin.passes(x).item() == twin.layer(x).sum().item() != model.layer(x).sum().item()
    assert_equal(grads(model), before)
