"""einsum, convolution, pooling, padding, indexing: any shapes, against NumPy and naive loops."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minitorch_dist as mt
from minitorch_dist.autodiff.primitive import lower

rng = np.random.default_rng(5)
quick = settings(max_examples=40, deadline=None)


def identity_holds(f, *args):
    """⟨u, Jv⟩ = ⟨Jᵀu, v⟩, Jv against a central difference: cheap enough for many random shapes."""
    vs = [rng.standard_normal(a.shape) for a in args]
    y, jv = mt.jvp(f, args, vs)
    u = rng.standard_normal(np.shape(y))
    gs = mt.vjp(f, *args)[1](u)
    left, right = np.sum(u * jv), sum(np.sum(g * v) for g, v in zip(gs, vs, strict=True))
    assert abs(left - right) <= 1e-9 * max(1, abs(left))
    h = 1e-6
    up, down = (f(*[a + s * h * v for a, v in zip(args, vs, strict=True)]) for s in (1, -1))
    np.testing.assert_allclose(jv, (up - down) / (2 * h), rtol=1e-5, atol=1e-6)


def naive_conv2d(x, w, b, stride, padding, dilation, groups):
    """Seven loops."""
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    (n, _, height, width), (out, inner, kh, kw) = x.shape, w.shape
    oh, ow = ((e - d * (k - 1) - 1) // s + 1 for e, k, s, d in zip((height, width), (kh, kw), stride, dilation,
                                                                   strict=True))
    y = np.zeros((n, out, oh, ow)) + b[:, None, None]
    for i, o, r, c, m, p, q in itertools.product(*map(range, (n, out, oh, ow, inner, kh, kw))):
        channel = o // (out // groups) * inner + m
        y[i, o, r, c] += w[o, m, p, q] * x[i, channel, r * stride[0] + p * dilation[0], c * stride[1] + q * dilation[1]]
    return y


pairs = st.tuples(st.integers(1, 2), st.integers(1, 2))


@given(st.data())
@quick
def test_conv2d_against_seven_loops(data):
    groups, inner, per = (data.draw(st.integers(1, 2)) for _ in range(3))
    kernel, stride, dilation = (data.draw(pairs) for _ in range(3))
    padding = tuple(p - 1 for p in data.draw(pairs))
    extents = tuple(data.draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 5))
                    for k, d, p in zip(kernel, dilation, padding, strict=True))
    x = rng.standard_normal((data.draw(st.integers(0, 2)), groups * inner, *extents))
    w, b = rng.standard_normal((groups * per, inner, *kernel)), rng.standard_normal(groups * per)
    f = lambda x, w, b: mt.conv2d(x, w, b, stride, padding, dilation, groups)   # noqa: E731
    np.testing.assert_allclose(f(x, w, b), naive_conv2d(x, w, b, stride, padding, dilation, groups), atol=1e-12)
    identity_holds(f, x, w, b)


EINSUMS = ["ab,bc->ac", "ab,bc", "ab,ab->", "aab->b", "aa,ab->b", "abc->ca", "ab,cd->dcab", "abc,abd,bcd->a",
           "a,a,a->a", "ba,c->c", "...a,ab->...b", "a...,a...->...", "...,b->b...", "a...a->...", "abab->ba"]


@given(st.sampled_from(EINSUMS), st.lists(st.integers(0, 3), min_size=8, max_size=8))
@quick
def test_einsum_equals_numpy_for_any_extents(subscripts, extents):
    sizes = dict(zip("abcd", extents, strict=False))
    shapes = []
    for part in subscripts.split("->")[0].split(","):
        head, dots, tail = part.partition("...")
        shapes.append(tuple(sizes[c] for c in head) + (tuple(extents[5:7]) if dots else ())
                      + tuple(sizes[c] for c in tail))
    xs = [rng.standard_normal(s) for s in shapes]
    np.testing.assert_allclose(mt.einsum(subscripts, *xs), np.einsum(subscripts, *xs), atol=1e-12)
    identity_holds(lambda *xs: mt.einsum(subscripts, *xs), *xs)


@pytest.mark.parametrize("kinds", [*itertools.product(["float16", "float32", "uint8", "int16", "int64", "bool"],
                                                      repeat=2)], ids=" ".join)
@pytest.mark.parametrize("subscripts", ["ab,bc->c", "ab,bc->ac", "ba,ab->"])
def test_einsum_has_numpys_dtype(subscripts, kinds):
    x, y = (rng.integers(0, 90, s).astype(kind) for s, kind in zip(((2, 3), (3, 2)), kinds, strict=True))
    found, expected = mt.einsum(subscripts, x, y), np.einsum(subscripts, x, y)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-3 if expected.dtype == np.float16 else 1e-6)


def test_a_large_einsum_takes_the_matrix_product_and_agrees():
    x, y = rng.standard_normal((3, 40, 30)), rng.standard_normal((3, 30, 20))
    np.testing.assert_allclose(mt.einsum("bij,bjk->bik", x, y), x @ y, atol=1e-12)


@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), st.data())
@quick
def test_pad_equals_numpy(shape, data):
    width = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=len(shape),
                               max_size=len(shape)))
    x, value = rng.standard_normal(shape), data.draw(st.sampled_from([0, 1.5, -np.inf]))
    np.testing.assert_array_equal(mt.pad(x, width, constant_values=value), np.pad(x, width, constant_values=value))
    identity_holds(lambda x: mt.pad(x, width), x)


def test_pad_leaves_the_signs_of_zeros():
    np.testing.assert_array_equal(np.signbit(mt.pad(np.array([0.0, -0.0, -1.0]), 1, constant_values=5)),
                                  [False, False, True, True, False])


@given(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), st.data())
@quick
def test_any_index_reads_and_adds_back(shape, data):
    index = data.draw(st.one_of(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True),
                                hnp.integer_array_indices(shape), hnp.arrays(bool, shape)))
    x = rng.standard_normal(shape)
    np.testing.assert_array_equal(mt.ops.getitem(x, index), x[index])
    identity_holds(lambda x: mt.ops.getitem(x, index), x)


@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), st.booleans(), st.data())
@quick
def test_reductions_over_any_axes(shape, keepdims, data):
    axis = data.draw(st.one_of(st.none(), hnp.valid_tuple_axes(len(shape)), st.integers(-len(shape), len(shape) - 1)))
    x = rng.standard_normal(shape)
    for name in ("sum", "prod", "any", "all"):
        np.testing.assert_allclose(getattr(mt, name)(x, axis, keepdims), getattr(np, name)(x, axis, keepdims=keepdims))
    for name in ("sum", "prod"):
        identity_holds(lambda x, name=name: getattr(mt, name)(x, axis, keepdims), x)
    one = data.draw(st.integers(-len(shape), len(shape) - 1))
    np.testing.assert_allclose(mt.cumsum(x, one), np.cumsum(x, one))
    if x.size:
        for name in ("argmax", "argmin"):
            np.testing.assert_array_equal(getattr(mt, name)(x, one, keepdims),
                                          getattr(np, name)(x, one, keepdims=keepdims))


def naive_pool(x, kernel, stride, padding, function):
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=np.nan)
    oh, ow = ((e - kernel) // stride + 1 for e in wide.shape[2:])
    out = np.empty((*x.shape[:2], oh, ow))
    for i, j in itertools.product(range(oh), range(ow)):
        window = wide[:, :, i * stride:i * stride + kernel, j * stride:j * stride + kernel]
        out[:, :, i, j] = function(window)
    return out


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(3, 6))
@quick
def test_pooling_against_loops(kernel, stride, padding, side):
    padding = min(padding, kernel // 2)
    x = rng.standard_normal((2, 2, side, side + 1))
    np.testing.assert_allclose(mt.max_pool2d(x, kernel, stride, padding),
                               naive_pool(x, kernel, stride, padding, lambda w: np.nanmax(w, (2, 3))))
    np.testing.assert_allclose(mt.avg_pool2d(x, kernel, stride, padding),
                               naive_pool(x, kernel, stride, padding, lambda w: np.nan_to_num(w).mean((2, 3))))
    np.testing.assert_allclose(mt.avg_pool2d(x, kernel, stride, padding, count_include_pad=False),
                               naive_pool(x, kernel, stride, padding, lambda w: np.nanmean(w, (2, 3))))
    identity_holds(lambda x: mt.max_pool2d(x, kernel, stride, padding), x)
    identity_holds(lambda x: mt.avg_pool2d(x, kernel, stride, padding, False), x)


def test_ties_in_a_window_share_evenly_and_padding_never_wins():
    x = mt.tensor(np.full((1, 1, 2, 2), -7.0), requires_grad=True)
    y = mt.max_pool2d(x, 2)
    y.backward(mt.tensor(np.full((1, 1, 1, 1), 8.0)))
    np.testing.assert_array_equal(x.grad.numpy(), np.full((1, 1, 2, 2), 2.0))
    assert (mt.max_pool2d(np.full((1, 1, 3, 3), -7.0), 3, 1, 1) == -7.0).all()


@pytest.mark.parametrize("function", [mt.linear, mt.linear_gelu])
@pytest.mark.parametrize(("rows", "inside", "out"), [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_a_linear_layer_with_an_empty_axis(function, rows, inside, out):
    """Its gradients are zeros, but the bias's, which is a sum over the rows alone."""
    bias = rng.standard_normal(out)
    leaves = [mt.tensor(a, requires_grad=True) for a in (np.ones((2, rows, inside)), np.ones((out, inside)), bias)]
    y = function(*leaves)
    y.sum().backward()
    assert y.shape == (2, rows, out)
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    assert not leaves[0].grad.numpy().any() and not leaves[1].grad.numpy().any()
    gelu_slope = [(1 + math.erf(b / 2 ** 0.5)) / 2 + b * math.exp(-b * b / 2) / (2 * math.pi) ** 0.5 for b in bias]
    slope = gelu_slope if function is mt.linear_gelu else np.ones(out)
    np.testing.assert_allclose(leaves[2].grad.numpy(), 2 * rows * np.array(slope), rtol=1e-12)


def test_conv_makes_no_gradient_that_nobody_wants(monkeypatch):
    from minitorch_dist.autodiff.ops import convolution
    x, w = rng.standard_normal((2, 3, 5, 5)), mt.tensor(rng.standard_normal((4, 3, 3, 3)), requires_grad=True)
    y = mt.conv2d(x, w)
    monkeypatch.setattr(convolution, "add_windows", None)       # what the data's gradient would need
    y.sum().backward()
    assert w.grad.shape == w.shape


@pytest.mark.parametrize("call, message", [
    (lambda: mt.conv2d(np.ones((1, 3, 4, 4)), np.ones((2, 2, 3, 3))), "x has 3 channels"),
    (lambda: mt.conv2d(np.ones((1, 2, 2, 4)), np.ones((2, 2, 3, 3))), "doesn't fit"),
    (lambda: mt.conv2d(np.ones((1, 2, 4, 4)), np.ones((2, 2, 3, 3)), stride=0), "stride 0"),
    (lambda: mt.conv1d(np.ones((1, 2, 4)), np.ones((2, 2, 3)), np.ones(3)), r"bias \(3,\)"),
    (lambda: mt.conv_transpose2d(np.ones((1, 2, 1, 4)), np.ones((2, 1, 3, 3)), padding=(2, 0)), "leaves nothing"),
    (lambda: mt.max_pool2d(np.ones((1, 2, 4, 4)), 2, padding=2), "at most half"),
    (lambda: mt.einsum("ij,jk", np.ones((2, 3)), np.ones((2, 3))), "'j' is 3 in one place and 2"),
    (lambda: mt.einsum("ij->ik", np.ones((2, 3))), "'k'"),
    (lambda: mt.einsum("ii", np.ones((1, 3))), "different extents"),
    (lambda: mt.einsum("ij", np.ones(3)), "doesn't name the axes"),
    (lambda: mt.tensordot(np.ones((2, 3)), np.ones((3, 2)), ([5], [0])), r"tensordot: axis 5 is out of range"),
    (lambda: mt.tensordot(np.ones((2, 3)), np.ones((3, 2)), ([1], [-4])), r"axis -4 is out of range for shape \(3, 2"),
    (lambda: mt.tensordot(np.ones((2, 3)), np.ones((3, 2)), 3), "tensordot: axis 2 is out of range"),
    (lambda: mt.tensor(np.ones((2, 3))).gather(7, np.zeros((2, 1), int)), "gather: axis 7 is out of range"),
    (lambda: mt.tensordot(np.ones((2, 3)), np.ones((2, 3)), 1), "different extents"),
    (lambda: mt.take_along_axis(np.ones((2, 3)), np.ones(2, int), 0), "as many axes"),
    (lambda: mt.topk(np.ones(3), 4), "k is 4"),
    (lambda: mt.argmax(np.ones((2, 3)), (0, 1)), r"argmax: axis \(0, 1\): an index is of one axis"),
    (lambda: mt.argmin(np.ones((2, 3)), ()), r"argmin: axis \(\): an index is of one axis"),
    (lambda: mt.one_hot(np.array([0, 3]), 3), "0 to 2"),
    (lambda: mt.embedding(np.array([-1]), np.ones((3, 2))), "from -1"),
    (lambda: mt.layer_norm(np.ones((2, 3)), 2), "must be the last axes"),
    (lambda: mt.batch_norm(np.ones((0, 3))), "empty"),
    (lambda: mt.linear(np.ones((3, 4)), np.ones((5, 2)), np.ones(5)), r"^linear: x \(3, 4\).*must be 2"),
    (lambda: mt.linear_gelu(np.ones((3, 4)), np.ones((5, 2)), np.ones(5)), r"^linear_gelu: x \(3, 4\).*must be 2"),
    (lambda: mt.linear_gelu(np.ones((3, 4)), np.ones((5, 4)), np.ones(4)), r"^linear_gelu: .*bias \(4,\)"),
    (lambda: mt.linear_gelu(np.ones((3, 4)), np.ones((5, 4)), np.ones(5), "erf"), "^linear_gelu: approximate='erf'"),
    (lambda: mt.scaled_dot_product_attention(*[np.ones((1, 3, 2, 2))] + [np.ones((1, 2, 2, 2))] * 2), "divisor"),
    (lambda: mt.split(np.ones(5), 2), "don't divide"),
    (lambda: mt.grouped_matmul(np.ones((5, 2)), np.ones((3, 2, 4)), (3, 1)), r"counts \(3, 1\) of 3 groups"),
    (lambda: mt.grouped_matmul(np.ones((5, 2)), np.ones((2, 2, 4)), (3, 1)), "add up to the 5 rows"),
    (lambda: mt.grouped_matmul(np.ones((5, 2)), np.ones((2, 2, 4)), (6, -1)), "must be 0 or more"),
    (lambda: mt.grouped_matmul(np.ones((5, 2)), np.ones((2, 3, 4)), (3, 2)), r"shapes \(5, 2\) and \(2, 3, 4\)"),
    (lambda: mt.grouped_outer(np.ones((5, 2)), np.ones((4, 3)), (3, 2)), "add up to the 5 and 4 rows"),
    (lambda: mt.grouped_outer(np.ones((5, 2)), np.ones(5), (3, 2)), r"shapes \(5, 2\) and \(5,\)"),
    (lambda: mt.linear(np.ones((3, 4)), np.ones((5, 2))), r"^linear: x \(3, 4\), weight \(5, 2\) .*must be 2"),
    (lambda: mt.linear(np.ones(()), np.ones((5, 2))), r"^linear: x \(\), weight \(5, 2\)"),
    (lambda: mt.matmul([[1, 2]], 3), "0-d operands have no product"),
    (lambda: mt.concatenate([np.ones((2, 3)), np.ones(2)], 1), r"shapes \[\(2, 3\), \(2,\)\]; all need as many axes"),
    (lambda: mt.tensor(np.ones((2, 3))).expand(3), r"expand: sizes \(3,\) for shape \(2, 3\)"),
    (lambda: mt.pad(np.ones((2, 0)), 1, constant_values=(5, 6)), r"constant_values=\(5, 6\): one number for all sides"),
    (lambda: mt.pad(np.ones(3), -1), "negative"),
    (lambda: mt.squeeze(np.ones((2, 1)), 0), "axis 0"),
    (lambda: mt.dropout(np.ones(3), 1.5), "1.5"),
])
def test_errors_name_the_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), [
    *((lambda mask=mask: mt.dropout(np.ones(3), mask=mask), f"dropout: mask {said}; it must be an array of bools")
      for mask, said in ((True, "True"), ("ab", "'ab'"), (np.ones(3), "of dtype float64"), ([1], "of dtype int64"))),
    *((lambda draw=draw: draw(7), rf"{name}: stream=7; it must be a generator: mt.backend.stream\(.{name}., seed\)")
      for name, draw in (("dropout", lambda stream: mt.dropout(np.ones(3), 0.0, stream)),
                         ("uniform", lambda stream: mt.random.uniform(stream, 3)),
                         ("normal", lambda stream: mt.random.normal(stream, 3)),
                         ("bernoulli", lambda stream: mt.random.bernoulli(stream, 3))))])
def test_what_says_who_stays_is_bools_and_what_draws_a_generator(call, message):
    with pytest.raises(TypeError, match=message):
        call()
    assert mt.dropout(np.ones(3), mask=[True, False, True]).tolist() == [2, 0, 2]


def test_lists_and_numbers_are_as_good_as_arrays():
    x, pairs = mt.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 0.0], [5.0, -1.0]]
    for found, expected in ((x @ pairs, x @ np.array(pairs)), (pairs @ x, np.array(pairs) @ x),
                            (mt.matmul(pairs, [1.0, 2.0]), np.array([1.0, 3.0])),
                            (mt.concatenate([[1, 2], np.array([3])]), np.array([1, 2, 3])),
                            (mt.concatenate([x, [[7.0, 8.0]]]), np.array([[1, 2], [3, 4], [7, 8.0]])),
                            (mt.stack([1.5, mt.tensor(2.0), 3.0]), np.array([1.5, 2, 3]))):
        np.testing.assert_array_equal(lower(found), lower(expected))
        assert found.dtype == expected.dtype
    assert mt.embedding([], x).shape == (0, 2) and mt.one_hot([], 3).shape == (0, 3)
    assert mt.one_hot([1], 2, "bfloat16").dtype == mt.bfloat16


@pytest.mark.parametrize("counts", [(3, 0, 4), (0, 7, 0), (2, 2, 3)])
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-14), ("float32", 1e-5), ("float16", 1e-2)])
def test_each_row_meets_its_group_s_matrix(counts, dtype, tolerance):
    rng, whose = np.random.default_rng(3), np.repeat(np.arange(3), counts)
    x, w, y = (rng.standard_normal(shape).astype(dtype) for shape in ((7, 5), (3, 5, 4), (7, 4)))
    found = mt.grouped_matmul(x, w, counts), mt.grouped_outer(x, y, counts)
    wanted = (np.einsum("rn,rnm->rm", x, w[whose], dtype="float64"),
              np.einsum("rg,rn,rm->gnm", np.eye(3)[whose], x, y, dtype="float64"))
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == dtype and got.shape == right.shape
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)
    assert mt.grouped_matmul(np.ones((0, 5)), w.astype("float64"), (0, 0, 0)).shape == (0, 4)


def test_a_number_of_classes_is_whole():
    with pytest.raises(TypeError, match="num_classes=1.5: must be a whole number"):
        mt.one_hot(np.array([1]), 1.5)
    assert mt.one_hot(np.array([1]), np.int64(3)).tolist() == [[0, 1, 0]]
