"""Autocast: parameters are cast once in a region, and no cast is ever stale."""

import weakref

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.autodiff.autocast import Region
from minitorch_dist.autodiff.primitive import state
from minitorch_dist.autodiff.saved import Packed, note_cast
from minitorch_dist.autodiff.writes import log, tick, wrote
from minitorch_dist.backend import to_half

from .autocast_cases import draws, each_dtype, rounded


def low_weights(*ys):
    """What the last linear op of each value has saved as its weight."""
    return [y.node.saved[y.node.primitive.layout.index("weight")] for y in ys]


@each_dtype
def test_a_parameter_is_cast_once_in_a_region_and_anew_in_the_next(dtype):
    randn, leaf = draws()
    layer, x = nn.Linear(4, 3), randn(2, 4)
    with mt.autocast(dtype):
        with mt.autocast(dtype):
            first, second = low_weights(layer(x), layer(x))
        third, = low_weights(layer(x))
    assert first is second is third and first.dtype == dtype
    with mt.autocast(dtype):
        fourth, = low_weights(layer(x))
    assert fourth is not first
    np.testing.assert_array_equal(fourth, first)
    bare = nn.Linear(4, 3, bias=False)
    with mt.autocast(dtype):
        one, two = (bare(leaf(2, 4)).node.saved[2] for _ in range(2))       # the second operand of a product
    assert np.shares_memory(one, two)


@pytest.mark.parametrize("bias", [True, False])
@each_dtype
def test_no_cast_is_stale(bias, dtype):
    randn, _ = draws()
    layer, x = nn.Linear(4, 3, bias=bias), randn(2, 4)
    other, optimizer = nn.Linear(4, 3), optim.SGD(layer.parameters(), lr=0.5)
    with mt.autocast(dtype):
        cast = Region.lowered(state.autocast, layer.weight).data
        other(x)
        for _ in range(3):
            optimizer.zero_grad()
            mt.sum(layer(x)).backward()
            optimizer.step()            # also moves the weight into a flat buffer
            values = rounded(x, dtype) @ rounded(layer.weight.numpy(), dtype).T
            values += rounded(layer.bias.numpy(), dtype) if bias else 0
            np.testing.assert_array_equal(layer(x).numpy(), values.astype(dtype))
        with mt.no_grad():
            layer.weight[...] = 2 * np.ones((3, 4), np.float32)
        assert np.all(Region.lowered(state.autocast, layer.weight).numpy() == 2)
        unwritten = Region.lowered(state.autocast, other.weight).data
        with mt.no_grad():
            layer.weight[...] = 0
        assert Region.lowered(state.autocast, other.weight).data is unwritten is not cast
        layer.weight.data = np.full((3, 4), 3, np.float32)      # as who moves parameters does
        assert np.all(Region.lowered(state.autocast, layer.weight).numpy() == 3)


@each_dtype
def test_an_update_by_hand_is_seen_after_a_backward(dtype):
    w = mt.tensor(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), requires_grad=True)
    x = mt.tensor(np.linspace(1, 2, 8, dtype=np.float32).reshape(4, 2))
    with mt.autocast(dtype):
        before = mt.matmul(w, x)
        mt.sum(before).backward()
        w.data[...] -= 0.5
        after = mt.matmul(w, x)
    expected = mt.backend.matmul(w.numpy().astype(dtype), x.numpy().astype(dtype))
    np.testing.assert_array_equal(after.numpy(), expected)
    assert (after.numpy() != before.numpy()).any()


@each_dtype
def test_gradients_of_several_uses_add_up_in_float32(dtype):
    _, leaf = draws()
    w, x = leaf(3, 4), np.ones((1, 4), np.float32)
    with mt.autocast(dtype):
        for k in range(9):      # 2048 + 8 ones; no 16 bits have 2049
            mt.sum(mt.linear(x, w) * (2048.0 if k == 0 else 1.0)).backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full((3, 4), 2056))


@each_dtype
def test_activations_take_half_the_memory(dtype):
    randn, _ = draws()
    mt.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())))
    x = randn(500, 32)

    def kept(enabled):
        with ledger.record(memory=True) as book, mt.autocast(dtype, enabled):
            y = model(x)
            held = book.live["activation"]
        return held, y
    (wide, _), (low, _) = kept(False), kept(True)
    assert wide == 5 * x.nbytes
    assert low == wide // 2 + sum(2 * p.size for p in model.parameters())       # with the weights as they were cast


@each_dtype
def test_of_a_cast_that_hooks_leave_what_it_was_made_of_is_kept_instead(dtype):
    """Views of it come back at their places; where hooks leave the source too, and of other arrays, nothing changes."""
    randn, _ = draws()
    source = randn(6, 5)
    low = to_half(source, np.dtype(dtype))
    other = low.copy()
    note_cast(low, source)
    views = low, low[2:, 1::2].T, low[:, 3], other

    def pack(array):
        return ("away", array.copy()) if array.dtype == np.float32 else array

    def unpack(kept):
        return kept[1] if isinstance(kept, tuple) else kept
    wanted, date = [np.array(v) for v in views], tick()
    packed, as_is = Packed(views, pack, unpack), Packed(views, lambda a: a, lambda a: a)
    assert all(a is b for a, b in zip(as_is.open(None), views, strict=True))
    strides = [v.strides for v in views]
    gone = weakref.ref(low)
    del low, views, as_is
    assert gone() is None
    wrote(np.ones((6, 5), dtype), "somebody, at addresses that are free again")
    for value, want, there in zip(packed.open(None), wanted, strides, strict=True):
        assert value.dtype == dtype and value.strides == there and log.since(value, date) is None
        np.testing.assert_array_equal(value, want)
