"""Writes in place: what backward needs is never overwritten unseen, and nothing that is another's is written."""

import operator

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.writes import WriteLog, merged


def leaf(*shape, dtype=np.float64):
    return mt.tensor(np.random.default_rng(0).standard_normal(shape), dtype=dtype, requires_grad=True)


def test_writing_what_backward_needs_raises_and_names_op_and_write():
    x, u = leaf(4, 4), mt.tensor(np.ones((4, 4)))
    y = (x * u).sum()
    mt.Tensor(u.data.reshape(2, 8))[0] = 5.0      # through a view
    with pytest.raises(RuntimeError, match=r"backward of 'mul' needs its 'y' of shape \(4, 4\).*in-place assignment"):
        y.backward()


def test_a_write_to_another_part_of_the_same_buffer_is_no_alarm():
    buffer = mt.tensor(np.ones(100))
    x, u = leaf(50), mt.Tensor(buffer.data[:50])
    y = (x * u).sum()
    buffer[50:] = 7.0 if False else np.ones(50)    # the write is noted for the array that was written
    other = mt.Tensor(buffer.data[50:])
    y2 = (x * u).sum()
    other[...] = 3.0
    y2.backward()
    with pytest.raises(RuntimeError, match="overwritten"):
        y.backward()


def test_a_write_before_the_op_is_no_alarm():
    x, u = leaf(3), mt.tensor(np.ones(3))
    u[...] = 2.0
    (x * u).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [2.0] * 3)


def test_an_optimizer_step_between_forward_and_backward_raises():
    w = leaf(3)
    optimizer = mt.optim.SGD([w], lr=0.1)
    (w * w).sum().backward()
    late = (w * w).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="SGD.step has overwritten"):
        late.backward()


def test_in_place_assignment_while_recording_points_to_at():
    x = leaf(3)
    with pytest.raises(RuntimeError, match=r"x.at\[index\].set"):
        x[0] = 1.0
    with pytest.raises(RuntimeError, match=r"x.at\[index\].set"):
        mt.tensor(np.zeros(3))[0] = x[0]
    with mt.no_grad():
        x[0] = 1.0
    assert x.numpy()[0] == 1.0
    y = h = x * 1.0
    y += 1.0
    assert y is not h and h.numpy()[0] == 1.0     # += rebinds


@pytest.mark.parametrize("write", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow,
                                   operator.imod, operator.ifloordiv])
def test_a_parameter_is_not_bound_to_another_tensor_unasked(write):
    """p -= lr · p.grad outside of no_grad would train nothing."""
    p, x = leaf(3), mt.tensor([1.0])
    with pytest.raises(RuntimeError, match=r"in place, of a leaf that requires grad: .*no_grad\(\); for a new tensor"):
        write(p, 2.0)
    with mt.no_grad():
        before = p.numpy().copy()
        assert write(p, 2.0) is p and (p.numpy() != before).any()
    write(p.requires_grad_(False), 2.0), write(x, 2.0)
    mt.grad(lambda q: mt.sum(write(q, 2.0)))(np.ones(3))


def test_a_parameter_times_a_matrix_in_place():
    w, turn = mt.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), mt.tensor([[0.0, 1.0], [-1.0, 0.0]])
    same = w
    with pytest.raises(RuntimeError, match="matmul in place, of a leaf that requires grad"):
        w @= turn
    with mt.no_grad():
        w @= turn
        with pytest.raises(ValueError, match=r"matmul in place: the result of shape \(2, 1\) isn't of x's, \(2, 2\)"):
            w @= turn[:, :1]
    assert w is same and w.tolist() == [[-2.0, 1.0], [-4.0, 3.0]]


def test_write_log_against_a_plain_array_of_dates():
    """The interval log, driven at random, against one date per byte."""
    rng = np.random.default_rng(0)
    memory = np.zeros(400, np.uint8)
    log, dates = WriteLog(), np.zeros(400, int)
    for _ in range(2000):
        a, b = sorted(rng.integers(0, 401, 2))
        log.add(memory[a:b], "test")
        if a < b:
            dates[a:b] = log.newest
        c, d = sorted(rng.integers(0, 401, 2))
        since = max(0, int(log.newest) - int(rng.integers(0, 20)))
        newest = dates[c:d].max(initial=0)
        found = log.since(memory[c:d], since)
        assert (found[0] if found else None) == (newest if newest > since else None)
    assert len(log.starts) < 400


def test_merged_writes_have_the_last_author_of_every_byte():
    rng = np.random.default_rng(1)
    for _ in range(50):
        memory, ranges = np.zeros(60, "U1"), []
        for author in rng.choice(list("abc"), rng.integers(0, 12)):
            start, stop = sorted(rng.integers(0, 61, 2))
            if start < stop:
                memory[start:stop] = author
                ranges.append((start, stop, author))
        found, again = merged(ranges), np.zeros(60, "U1")
        for start, stop, author in found:
            assert not again[start:stop].any()
            again[start:stop] = author
        np.testing.assert_array_equal(again, memory)
        edges = memory[1:][(memory[1:] != memory[:-1]) & (memory[1:] != "")]
        assert len(found) == len(edges) + (memory[0] != "")


def test_a_parameter_is_written_in_place_under_no_grad():
    w, frozen, x = leaf(3), leaf(3).requires_grad_(False), mt.tensor(np.ones(3))
    before = w.data
    (w * w).sum().backward()
    late, expected = (w * w).sum(), ((w.numpy() - 0.5 * w.grad.numpy() + 1.0) * 1.5) ** 2
    with mt.no_grad():
        for p in (w, frozen):       # as a loop over model.parameters() does
            p -= 0.5 * w.grad
            p += 1.0
            p *= 3.0
            p /= 2.0
            p **= 2
        y = x
        y += 1.0
    assert w.data is before and y is not x and x.tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_allclose(w.numpy(), expected)
    np.testing.assert_allclose(frozen.numpy(), expected)
    assert w.requires_grad and not frozen.requires_grad
    with pytest.raises(RuntimeError, match="overwritten"):
        late.backward()


def test_a_transforms_value_is_never_written_in_place():
    """Its memory is the caller's: f may look at x in other units without anybody seeing it outside."""
    def f(x):
        with mt.no_grad():
            x *= 3.0
        return (x * x).sum()

    for a in (np.array([1.0, 2.0]), mt.tensor(np.array([1.0, 2.0])), leaf(2)):
        before = np.array(mt.tensor(a).numpy())
        got, value = mt.grad(f)(a), mt.jvp(f, (a,), (np.ones(2),))[0]
        assert np.array_equal(mt.tensor(a).numpy(), before)
        assert value.item() == pytest.approx(9 * (before ** 2).sum()) and not mt.tensor(got).numpy().any()


def test_a_tangent_is_never_lost_in_a_write():
    w = leaf(2)

    def f(x):
        nonlocal w
        with mt.no_grad():
            w *= x
        return w

    with pytest.raises(RuntimeError, match="a value with a tangent"):
        mt.jvp(f, (np.ones(2),), (np.ones(2),))


def test_a_gradient_is_an_array():
    p = leaf(3)
    for values in ([1.0, 2.0, 3.0], 1.0):
        with pytest.raises(TypeError, match=rf"grad is a tensor or an array, got a {type(values).__name__}: take mt"):
            p.grad = values
    p.grad = np.ones(3)
    assert p.grad.tolist() == [1.0, 1.0, 1.0]
