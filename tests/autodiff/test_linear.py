"""linearize and linear_transpose: the program as a page of text, its two readings, its errors."""

import doctest
import functools
import gc
import sys

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff import linear
from minitorch_dist.autodiff.linear import trace_linear

rng = np.random.default_rng(0)


def array(*shape):
    return rng.standard_normal(shape)


def mlp(params, x):
    for w, b in params[:-1]:
        x = mt.tanh(mt.matmul(x, w) + b)
    w, b = params[-1]
    return {"logits": mt.matmul(x, w) + b, "size": mt.sum(x * x)}


# ---------------------------------------------------------------- the page

def test_the_example_in_the_docstring():
    result = doctest.testmod(linear)
    assert result.attempted > 2 and result.failed == 0


def test_a_layer_reads_like_this():
    x = array(4, 3)
    _, program = mt.linearize(lambda w, b: mt.sum(mt.relu(mt.matmul(x, w) + b), axis=1), array(3, 2), array(2))
    assert str(program) == """\
linear program of 2 inputs
  a : float64[3,2]
  b : float64[2]
  c : float64[4,2] = matmul(float64[4,3], a)
  d : float64[4,2] = broadcast(b)
  e : float64[4,2] = c + d
  f : float64[4,2] = scale(e; bool[4,2])
  g : float64[4]   = sum(f; 1)
  return g"""
    assert str(program.T) == """\
linear program of 1 input
  a : float64[4]
  b : float64[4,1] = reshape(a)
  c : float64[4,2] = broadcast(b)
  d : float64[4,2] = scale(c; bool[4,2])
  e : float64[2]   = sum(d; 0)
  f : float64[3,2] = matmul(float64[3,4], d)
  return f, e"""


def test_pieces_indices_and_outputs_that_depend_on_nothing():
    def f(x):
        left, right = mt.split(x[1:], [1])
        return left, right * 2.0, np.ones((2, 2)), x
    _, program = mt.linearize(f, array(4).astype(np.float32))
    assert str(program) == """\
linear program of 1 input
  a : float32[4]
  b : float32[3] = gather(a; 1:)
  c : float32[1] = cut[0](b; (1,2), 0)
  d : float32[2] = cut[1](b; (1,2), 0)
  e : float32[2] = scale(d; 2.0)
  return c, e, 0 : float64[2,2], a"""


def test_names_go_on_after_z():
    _, program = mt.linearize(lambda x: [x := mt.sin(x) for _ in range(30)][-1], np.float64(0.3))
    assert "\n  ab : float64[] = scale(aa; float64[])" in str(program) and str(program).endswith("return ae")


# ---------------------------------------------------------------- its two readings

def test_forwards_it_is_jvp_and_backwards_the_tape():
    params = [(array(3, 5), array(5)), (array(5, 5), array(5)), (array(5, 2), array(2))]
    x = array(4, 3)
    y, program = mt.linearize(mlp, params, x)
    tangents = [(array(*w.shape), array(*b.shape)) for w, b in params], array(4, 3)
    y2, t = mt.jvp(mlp, (params, x), tangents)
    got = program(*tangents)
    for key in ("logits", "size"):
        np.testing.assert_array_equal(y[key], y2[key])
        np.testing.assert_allclose(got[key], t[key], rtol=1e-12)
    u = {"logits": array(4, 2), "size": array()}
    by_tape = mt.vjp(mlp, params, x)[1](u)
    by_program = program.transpose(u)
    by_transposed_program = program.T(u)
    flat = lambda tree: mt.autodiff.tree.flatten(tree)[0]   # noqa: E731
    assert len(flat(by_tape)) == 7
    for a, b, c in zip(flat(by_tape), flat(by_program), flat(by_transposed_program), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12)
        np.testing.assert_allclose(c, a, rtol=1e-12)
    # <u, J t> = <Jᵀ u, t>
    left = sum((p * q).sum() for p, q in zip(flat(u), flat(got), strict=True))
    assert left == pytest.approx(sum((p * q).sum() for p, q in zip(flat(by_program), flat(tangents), strict=True)))


def test_the_function_runs_once_and_the_program_often():
    calls = []

    def f(x):
        calls.append(1)
        return mt.exp(x)
    x = array(3)
    _, program = mt.linearize(f, x)
    for e in np.eye(3):
        np.testing.assert_allclose(program(e), np.exp(x) * e)
        np.testing.assert_allclose(program.transpose(e)[0], np.exp(x) * e)
    assert len(calls) == 1


def test_dtypes_are_kept_through_mixed_precision():
    x = array(3).astype(np.float32)
    _, program = mt.linearize(lambda x: x.astype(np.float64) * np.ones(3) + x, x)
    assert program(x).dtype == np.float64
    assert program.transpose(np.ones(3))[0].dtype == np.float32
    np.testing.assert_allclose(program.transpose(np.ones(3))[0], 2 * np.ones(3))
    program = trace_linear(lambda x: x + np.zeros((2, 3)), x)       # wider by shape and dtype than what goes in
    assert (program(x).shape, program(x).dtype) == ((2, 3), np.float64)
    back, = program.transpose(np.ones((2, 3)))
    assert back.dtype == np.float32 and back.tolist() == [2.0, 2.0, 2.0]


def test_linearize_under_other_transforms():
    x, v = np.float64(0.7), np.float64(1.0)

    def slope(z):       # the derivative of sin by a linear program, itself to be differentiated
        return mt.linearize(mt.sin, z)[1](v)
    assert mt.grad(slope)(x) == pytest.approx(-np.sin(x))
    assert mt.jvp(slope, (x,), (v,))[1] == pytest.approx(-np.sin(x))
    assert mt.linearize(slope, x)[1](v) == pytest.approx(-np.sin(x))
    assert mt.linearize(mt.grad(mt.sin), x)[1].transpose(v)[0] == pytest.approx(-np.sin(x))


# ---------------------------------------------------------------- linear_transpose

def test_the_transpose_of_a_linear_function():
    m = array(3, 2)
    t = mt.linear_transpose(lambda x: {"a": mt.matmul(x, m), "b": -x[1:]}, np.zeros((4, 3)))
    u = {"a": array(4, 2), "b": array(3, 3)}
    expected = u["a"] @ m.T
    expected[1:] -= u["b"]
    np.testing.assert_allclose(t(u)[0], expected)


def test_transposing_a_program_and_transposing_twice():
    x = array(3)
    _, program = mt.linearize(lambda x: mt.cumsum(x * x), x)
    back = mt.linear_transpose(program, x)
    forth = trace_linear(back, x)
    np.testing.assert_allclose(back(np.eye(3)[1])[0], [2 * x[0], 2 * x[1], 0])
    np.testing.assert_allclose(forth.transpose((x,))[0], program(x))


@pytest.mark.parametrize("f, message", [
    (lambda x: x * x, "'mul' is not linear in its input 0"),
    (lambda x: mt.sin(x), "'sin' is not linear in its input 0"),
    (lambda x: 1.0 / x, "'div' is not linear in its input 1"),
    (lambda x: x + 1.0, "'add' adds a constant"),
    (lambda x: np.ones(2) - x, "'sub' adds a constant"),
    (lambda x: np.ones(2), "returns a constant"),
    (lambda x: mt.maximum(x, 0.0), "'maximum' is not linear"),
])
def test_what_is_not_linear_is_refused_by_name(f, message):
    with pytest.raises(TypeError, match=message):
        mt.linear_transpose(f, np.zeros(2))
    assert mt.autodiff.primitive.state.level == 0


def test_misuse_is_named():
    _, program = mt.linearize(lambda x: (x, mt.exp(x)), array(3))
    with pytest.raises(ValueError, match=r"the tangent has shape \(2,\).*shape \(3,\)"):
        program(np.ones(2))
    with pytest.raises(ValueError, match="has 1 inputs, got 2 tangents"):
        program(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="has 2 outputs, got 1 cotangents"):
        program.transpose(np.ones(3))
    with pytest.raises(ValueError, match="the cotangent has .*float32.*float64"):
        program.transpose((np.ones(3), np.ones(3, np.float32)))
    with pytest.raises(TypeError, match="int64"):
        mt.linearize(mt.sum, np.arange(3))


def test_a_program_whose_residual_was_overwritten_raises_in_both_directions():
    w = mt.tensor(np.ones(3))
    _, program = mt.linearize(lambda x: x * w.data, np.ones(3))
    w[0] = 5.0
    with pytest.raises(RuntimeError, match="linear program's 'scale' needs its 'residual'.*in-place assignment"):
        program(np.ones(3))
    with pytest.raises(RuntimeError, match="backward of 'scale' needs its 'residual'.*in-place assignment"):
        program.transpose(np.ones(3))


# ---------------------------------------------------------------- size and memory

def test_10000_deep_and_wide():
    deep = 10_000
    assert sys.getrecursionlimit() < deep

    def chain(x):
        for _ in range(deep):
            x = mt.sin(x)
        return x
    x = np.float64(0.3)
    y, program = mt.linearize(chain, x)
    assert len(program.equations) == deep
    assert program(x) == pytest.approx(mt.jvp(chain, (x,), (x,))[1])
    assert program.transpose(x)[0] == pytest.approx(mt.vjp(chain, x)[1](x)[0])
    assert str(program).count("\n") == deep + 2
    _, wide = mt.linearize(lambda *xs: functools.reduce(mt.add, xs), *[x] * deep)
    assert wide(*[x] * deep) == pytest.approx(deep * x)
    assert len(wide.transpose(x)) == deep


def test_programs_are_freed_by_reference_counting():
    gc.collect()
    gc.disable()
    try:
        y, program = mt.linearize(mlp, [(array(3, 5), array(5)), (array(5, 2), array(2))], array(4, 3))
        program.T.transpose(*program.transpose(y))
        str(program)
        del y, program
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_running_a_program_forgets_what_it_no_longer_needs():
    import tracemalloc

    def chain(x):
        for _ in range(50):
            x = x * 1.01
        return x
    x = np.ones(20_000)
    _, program = mt.linearize(chain, x)
    tracemalloc.start()
    try:
        program(x)
        assert tracemalloc.get_traced_memory()[1] < 5 * x.nbytes
    finally:
        tracemalloc.stop()
