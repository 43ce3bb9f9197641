"""Memory as theory says, counted by the ledger and, independently, by tracemalloc.

A layer is relu(h · w), h an array of N bytes. Reverse mode keeps h (for the gradient of w) and relu's result, which is
the next layer's h: n layers keep n + 1 arrays. With k checkpoints it keeps k segment inputs, and during a segment's
second run its n/k results: k + n/k. Two more are in flight, which nobody saves: the cotangents that go into relu's
backward and come out of it. So 64 layers take 65 + 2 = 67 arrays, and 20 + 2, 16 + 2, 20 + 2 with 4, 8, 16 segments.
(And an eighth of an array: relu's mask, of one byte per element.)
"""

import gc
import tracemalloc

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger
from minitorch_dist.autodiff.primitive import state

WIDTH = 16
N = 100 * WIDTH * 8         # bytes of one activation of 100 rows: the ledger counts to the byte
MEASURED = 40 * N           # tracemalloc sees the tape's own objects too; beside this they are small


class Chain:
    """n layers with weights of their own, in k checkpointed segments (k = 0: none), counting how often one runs."""

    def __init__(self, n, k=0):
        r = np.random.default_rng(0)
        self.ws = [mt.tensor(r.standard_normal((WIDTH, WIDTH)) / 3, requires_grad=True) for _ in range(n)]
        self.forwards = 0
        size = n // k if k else n
        self.segments = [self.segment(i, min(i + size, n)) for i in range(0, n, size)]
        if k:
            self.segments = [mt.checkpoint(s) for s in self.segments]

    def segment(self, first, last):
        def run(h):
            for w in self.ws[first:last]:
                self.forwards += 1
                h = mt.relu(mt.matmul(h, w))
            return h
        return run

    def __call__(self, h):
        for s in self.segments:
            h = s(h)
        return mt.sum(h)


def start(nbytes=N):
    return np.random.default_rng(1).standard_normal((nbytes // 8 // WIDTH, WIDTH))


def peak(n, k=0):
    """(peak of saved activations in arrays, layers run) of one forward and backward."""
    chain = Chain(n, k)
    with ledger.record(memory=True) as book:
        chain(mt.tensor(start())).backward()
    assert book.live["activation"] == 0
    return book.peak["activation"] / N, chain.forwards


# ---------------------------------------------------------------- the theory

def test_reverse_mode_grows_linearly_with_depth():
    assert [peak(n) for n in (4, 16, 64)] == [(5, 4), (17, 16), (65, 64)]


@pytest.mark.parametrize("k, arrays", [(4, 20), (8, 16), (16, 20)])
def test_k_checkpoints_hold_k_plus_n_over_k_for_one_more_forward(k, arrays):
    assert arrays == k + 64 // k
    assert peak(64, k) == (arrays, 128)


def test_the_best_number_of_checkpoints_is_the_root_of_the_depth():
    assert [peak(n, k)[0] for n, k in ((16, 4), (64, 8), (144, 12))] == [8, 16, 24]     # 2√n


def forward_mode_peak(n):
    chain = Chain(n)
    for w in chain.ws:
        w.requires_grad_(False)
    x = start()
    with ledger.record(memory=True) as book:
        mt.jvp(lambda h: chain(h), (x,), (x,))
    return book.peak["activation"] / N


def test_forward_mode_is_flat():
    assert forward_mode_peak(4) == forward_mode_peak(64) == 6       # what goes into an op and what comes out, doubled


def traced(n, k=0):
    """Peak of everything that NumPy allocates in forward and backward, in activation-sized arrays."""
    chain, x = Chain(n, k), mt.tensor(start(MEASURED))
    for w in chain.ws:
        w.grad = mt.from_numpy(np.zeros((WIDTH, WIDTH)))    # so that gradients are added into what is there already
    gc.collect()
    tracemalloc.start()
    try:
        chain(x).backward()
        return tracemalloc.get_traced_memory()[1] / MEASURED + 1      # and x itself
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("k, arrays", [(0, 67), (4, 22), (8, 18), (16, 22)])
def test_tracemalloc_sees_two_more_which_are_the_cotangents_in_flight(k, arrays):
    assert traced(64, k) == pytest.approx(arrays + 1 / 8, abs=0.3)      # the tape's own objects are the rest


def test_tracemalloc_sees_forward_mode_flat_too():
    def measured(n):
        chain, x = Chain(n), start(MEASURED)
        for w in chain.ws:
            w.requires_grad_(False)
        tracemalloc.start()
        try:
            mt.jvp(lambda h: chain(h), (x,), (x,))
            return tracemalloc.get_traced_memory()[1] / MEASURED
        finally:
            tracemalloc.stop()
    assert measured(64) == pytest.approx(measured(4), abs=0.2)
    assert measured(64) < 7


# ---------------------------------------------------------------- the book

def test_each_storage_counts_once_whole_and_until_it_dies():
    x = mt.tensor(np.ones((10, 10)), requires_grad=True)
    with ledger.record(memory=True) as book:
        h = mt.exp(x)                   # keeps its result
        y = h * h + h.T.reshape(4, 25)[:, :1].sum()     # a view of it, and it once more
        assert book.live["activation"] == 800
        part = np.ones((100, 10))
        z = (h * part[:10]).sum()       # ten rows keep a hundred alive
        assert book.live["activation"] == 800 + 8000
        del part, z
        assert book.live["activation"] == 800
        del h
        assert book.live["activation"] == 800
        del y
        assert book.live["activation"] == 0
    assert book.peak["activation"] == 8800
    assert book.live["parameter"] == 800
    del x
    assert book.live["parameter"] == 0


def test_parameters_and_gradients_have_kinds_of_their_own():
    w, b = mt.tensor(np.ones((3, 4)), requires_grad=True), mt.tensor(np.ones(3), requires_grad=True)
    x = mt.tensor(np.ones((5, 4)))
    with ledger.record(memory=True) as book:
        loss = mt.sum(mt.linear(x, w, b))
        assert book.live == {"parameter": 8 * 15, "gradient": 0, "optimizer": 0, "activation": 8 * 20, "buffer": 0}
        loss.backward()
        assert book.live["gradient"] == 8 * 15
        ledger.keep(np.ones(4), "optimizer")        # dies at once
    assert book.peak["optimizer"] == 32 and book.live["optimizer"] == 0
    assert book.course[:2] == [("parameter", 96), ("parameter", 120)]


def test_what_checkpoints_custom_rules_and_packing_keep_is_counted():
    x = mt.tensor(np.ones(100), requires_grad=True)
    with ledger.record(memory=True) as book:
        y = mt.checkpoint(lambda h: h + 1.0)(x + 1.0)       # what it starts from, though no op would save it
        assert book.live["activation"] == 800
        del y
        assert book.live["activation"] == 0
    f = mt.custom_vjp(lambda x: x * x).defvjp(lambda x: (x * x, [x * 3.0]), lambda r, ct: (ct * r[0],))
    with ledger.record(memory=True) as book:
        y = f(x)
        assert book.live["activation"] == 800
        del y
        with mt.saved_tensors_hooks(lambda a: a.astype(np.float16), lambda a: a.astype(np.float64)):
            y = mt.exp(x)
        assert book.live["activation"] == 200 and y.requires_grad


def test_events_stand_in_the_course_and_ledgers_nest():
    x = mt.tensor(np.ones(100), requires_grad=True)
    with ledger.record(memory=True) as outer:
        y = mt.exp(x)
        with ledger.record() as plain, ledger.record(memory=True) as inner:
            z = mt.sin(y)
            ledger.event("backward")
        assert state.counting
        del y, z
    assert outer.course == [("parameter", 800), ("activation", 800), ("backward", None), ("activation", 0)]
    assert inner.course == [("activation", 800), ("backward", None), ("activation", 0)]
    assert plain.course == [] and plain.events == [("backward", "")]


def test_nothing_is_counted_and_nothing_costs_when_it_is_off():
    x = mt.tensor(np.ones(100), requires_grad=True)
    with ledger.record() as book:
        assert not state.special
        y = mt.exp(x)
    assert not state.counting and not state.special and not ledger.open_ledgers
    assert book.peak["activation"] == 0 and y.requires_grad
    with pytest.raises(ZeroDivisionError), ledger.record(memory=True):
        1 / 0       # noqa: B018
    assert not state.special and not ledger.open_ledgers


def test_parameters_that_a_rule_of_ones_own_keeps_are_parameters():
    """Not activations: they live anyway."""
    @mt.custom_vjp
    def product(x, w):
        return x @ w
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))
    random = np.random.default_rng(0)
    w = mt.tensor(random.standard_normal((40, 30)), requires_grad=True)
    with ledger.record(memory=True) as book:
        y = product(random.standard_normal((7, 40)), w)
        assert (book.live["activation"], book.live["parameter"]) == (7 * 40 * 8, 40 * 30 * 8)
        assert y.shape == (7, 30)
