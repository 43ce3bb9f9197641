"""The op table in bfloat16: its dtype comes out in all modes, and the values are those of float64 but for rounding."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.tree import flatten

from .samples import SAMPLES

DTYPE = np.dtype(mt.bfloat16)
U = 2.0 ** -8       # rounding changes a number by this part of it at most
ROUNDINGS = 3       # of a sample's composition, one after another, or of a cotangent on its way
LEFT_OUT = {"astype": "a cast changes the dtype on purpose", "rms_norm-plain": "its eps is that of the dtype"}
by_id = pytest.mark.parametrize("sample", [s for s in SAMPLES if not {s.covers, s.id} & set(LEFT_OUT)],
                                ids=lambda s: s.id)


def distance(a, b):
    """‖a - b‖ / ‖b‖"""
    return np.linalg.norm(np.float64(a) - b) / max(np.linalg.norm(b), 1e-30)


@by_id
def test_values_and_gradients_are_those_of_float64_but_for_rounding(sample):
    args = [np.asarray(a).astype(DTYPE) for a in sample.args]
    short, exact = ([mt.tensor(a.astype(dtype), requires_grad=True) for a in args] for dtype in (DTYPE, np.float64))
    y, expected = sample.function(*short), sample.function(*exact)
    assert y.dtype == DTYPE
    assert distance(y.numpy(), expected.numpy()) < ROUNDINGS * U
    ct = np.random.default_rng(1).standard_normal(y.shape).astype(DTYPE)
    y.backward(mt.tensor(ct))
    expected.backward(mt.tensor(ct.astype(np.float64)))
    for a, b in zip(short, exact, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert a.grad.dtype == DTYPE and distance(a.grad.numpy(), b.grad.numpy()) < ROUNDINGS * U


@by_id
def test_bfloat16_goes_in_and_comes_out_of_all_transforms(sample):
    args = [np.asarray(a).astype(DTYPE) for a in sample.args]
    ones = [np.ones(a.shape, DTYPE) for a in args]
    value, pull = mt.vjp(sample.function, *args)
    found = [value, *pull(np.ones(np.shape(value), DTYPE)), mt.jvp(sample.function, args, ones)[1]]
    linear = mt.linearize(sample.function, *args)[1](*ones)
    assert all(x.dtype == DTYPE for x in flatten([found, linear])[0])
    leaves = [mt.tensor(a, requires_grad=True) for a in args]
    mt.sum(sample.function(*leaves)).backward(create_graph=True)
    assert all(leaf.grad.dtype == DTYPE for leaf in leaves if leaf.grad is not None)


@pytest.mark.parametrize("f", [
    lambda x: x * 2.0, lambda x: 0.5 - x, lambda x: 1 / x, lambda x: x ** 2, lambda x: x ** 0.5, lambda x: 2.0 ** x,
    lambda x: x - 1, lambda x: x % 3, lambda x: x + 2 ** 70, lambda x: x / 3.0, lambda x: mt.clip(x, 0.1, 5.0),
    lambda x: mt.where(x > 1, x, 0.0), lambda x: mt.where(x > 1, 0.5, x), lambda x: mt.maximum(x, 0.75),
    lambda x: mt.pad(x, 1, constant_values=2.5),
    lambda x: mt.dropout(x, 0.3), lambda x: mt.mean(x), lambda x: mt.var(x), lambda x: mt.reciprocal(x),
    lambda x: x.at[0].set(0.5), lambda x: x.masked_fill(np.array([True, False, True]), 0.1)])
def test_python_scalars_are_weak(f):
    x = mt.tensor([0.5, 1.5, 2.5], dtype=DTYPE, requires_grad=True)
    y = f(x)
    assert y.dtype == DTYPE
    y.sum().backward()
    assert x.grad.dtype == DTYPE


def test_a_python_float_is_rounded_before_it_is_used():
    """As float16 does in NumPy: 0.1 counts as the nearest bfloat16, on tensors, arrays and inside of no_grad."""
    x = np.array([3.0, 7.0, 11.0], np.float32)
    expected = (x * np.float32(np.float32(0.1).astype(DTYPE))).astype(DTYPE)
    low = x.astype(DTYPE)
    with mt.no_grad():
        inside = mt.tensor(low) * 0.1
    for found in (mt.tensor(low) * 0.1, 0.1 * mt.tensor(low), inside, mt.mul(low, 0.1), mt.mul(0.1, low)):
        np.testing.assert_array_equal(found.numpy() if isinstance(found, mt.Tensor) else found, expected)
        assert found.dtype == DTYPE


MIXED = {"float16": "float32", "float32": "float32", "float64": "float64", "int8": "bfloat16", "uint8": "bfloat16",
         "int16": "float32", "int32": "float64", "int64": "float64", "bool": "bfloat16"}


@pytest.mark.parametrize("other", MIXED)
def test_mixed_dtypes_promote_as_with_float16(other):
    assert other == "float16" or np.result_type(np.float16, other) == MIXED[other].replace("bfloat16", "float16")
    x = mt.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=DTYPE, requires_grad=True)
    y = mt.tensor(np.array([[1, 0], [1, 1]], other))
    results = [x * y, y + x, mt.where(np.array([True, False]), x, y), mt.concatenate([x, y]), x @ y, y @ x]
    if "float" in other:
        results += [mt.maximum(x, y), mt.linear(x, y), mt.einsum("ij,kj->ik", y, x)]
    for z in results:
        assert z.dtype == MIXED[other]
    mt.sum(results[0]).backward()
    assert x.grad.dtype == DTYPE
    np.testing.assert_array_equal(np.float32(x.grad.numpy()), [[1, 0], [1, 1]])


def test_an_engine_trains_in_pure_bfloat16():
    """Adam keeps float32 values of what it updates, so that small steps add up."""
    mt.manual_seed(1)
    model = mt.nn.Sequential(mt.nn.Linear(6, 20), mt.nn.GELU(), mt.nn.LayerNorm(20), mt.nn.Linear(20, 3)).to(DTYPE)
    optimizer = mt.optim.AdamW(model.parameters(), lr=0.01)
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((30, 6)).astype(DTYPE), rng.integers(0, 3, 30)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = mt.nn.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss.dtype == DTYPE and all(p.dtype == p.grad.dtype == DTYPE for p in model.parameters())
    assert losses[-1] < 0.2 * losses[0]
    for p, state in zip(model.parameters(), optimizer.state_dict()["state"], strict=True):
        np.testing.assert_array_equal(state["master"].astype(DTYPE), p.numpy())
        assert state["master"].dtype == np.float32 and (state["master"] != np.float32(p.numpy())).any()


def test_a_norm_that_has_been_trained():
    """Its scale is worked out of raw arrays."""
    norm = mt.nn.BatchNorm(3).to(DTYPE)
    norm(np.random.default_rng(0).standard_normal((20, 3)).astype(DTYPE))
    x = np.random.default_rng(1).standard_normal((5, 3)).astype(DTYPE)
    y, exact = norm.eval()(x), mt.nn.BatchNorm(3).eval()
    exact.load_state_dict({name: np.float32(value) for name, value in norm.state_dict().items()})
    assert y.dtype == DTYPE and distance(y.numpy(), exact(np.float32(x)).numpy()) < ROUNDINGS * U


@pytest.mark.parametrize("dtype, found", [("float16", "float64"), (DTYPE, "float64"), ("int16", "float64")])
def test_lists_beside_16_bits_are_float64(dtype, found):
    c, x = np.array([True, False]), mt.tensor(np.ones(2), dtype=dtype)
    y = mt.where(c, x, [1.0, 2.0])
    assert y.dtype == found and y.tolist() == [1.0, 2.0]


def test_compiled_functions_take_it():
    def f(x, w):
        return mt.sum(mt.tanh(x @ w) * 0.5 + mt.softmax(x, 1)[:, :3])
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal(shape).astype(DTYPE) for shape in ((5, 4), (4, 3)))
    compiled, leaf = mt.compile(f), mt.tensor(w, requires_grad=True)
    compiled(x, leaf).backward()
    found, leaf.grad = leaf.grad, None
    f(x, leaf).backward()
    assert found.dtype == DTYPE and not compiled.breaks
    assert distance(found.numpy(), np.float64(leaf.grad.numpy())) < ROUNDINGS * U


def test_gradients_are_checked_in_float64():
    mt.check_grads(lambda x: mt.sum(mt.sin(x) * x), [np.array([0.5, 1.5, -2.0], DTYPE)])


@pytest.mark.parametrize("function", [mt.gelu, lambda x: mt.gelu(x, "tanh"), lambda x: mt.swiglu(x, x), mt.softmax])
def test_a_sum_is_a_scalar_and_keeps_its_dtype_in_fused_ops(function):
    x = mt.tensor(np.array([0.5, 0.25], DTYPE), requires_grad=True)
    y = function(mt.sum(x))
    y.backward()
    assert y.dtype == x.grad.dtype == DTYPE
    assert distance(y.numpy(), function(np.array(0.75))) < U
