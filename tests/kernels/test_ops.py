"""The engine's own ops served by kernels: values and gradients against the same ops on NumPy arrays in float64."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, kernels, ledger
from minitorch_dist.autodiff.tensor import Tensor
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.kernels import dropout, launch, matmul, softmax_cross_entropy
from minitorch_dist.parallel.tensor.vocabulary import Shares

from .harness import TOLERANCE, poison, random
from .test_registry import DeviceLike

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
ROWS = np.array([[2, 0, -1], [2, 5, 0]])
LABELS = np.array([2, 0, 6, 6, 3])
MASK = np.array([True, False, True, True])
DOCUMENTS = np.array([[0, 0, 1, 1, 1], [4, 2, 4, 2, 4]])


class Alone:
    """The second of two ranks, the first of which has nothing to say."""

    rank, size = 1, 2

    def all_reduce(self, x, op="sum"):
        pass


# op -> (function, shapes, the kernels of forward and backward)
BY_INDEX = "segment_order segment_sums"
CASES = {
    "softmax_cross_entropy": (lambda x: mt.softmax_cross_entropy(x, on_device(LABELS, x)), [(5, 7)],
                              "cross_entropy cross_entropy_backward"),
    "linear_cross_entropy": (lambda x, w: mt.linear_cross_entropy(x, w, on_device(LABELS, x)), [(5, 4), (7, 4)],
                             "cross_entropy cross_entropy_backward"),
    "linear_cross_entropy of a share of the classes": (
        lambda x, w: mt.linear_cross_entropy(x, w, on_device(LABELS + 8, x), 8, Shares(Alone(), 15)), [(5, 4), (8, 4)],
        "cross_entropy cross_entropy_backward"),
    "linear_cross_entropy of mixed dtypes": (
        lambda x, w: mt.linear_cross_entropy(x, mt.astype(w, np.float64), on_device(LABELS, x)), [(5, 4), (7, 4)], ""),
    "linear_cross_entropy of nothing": (
        lambda x, w: mt.linear_cross_entropy(x[:0], w, on_device(LABELS[:0], x)), [(5, 4), (7, 4)], ""),
    "layer_norm": (lambda x, w, b: mt.layer_norm(x, 6, w, b), [(3, 5, 6), (6,), (6,)],
                   "norm norm_backward column_sums"),
    "layer_norm over two axes": (lambda x, w: mt.layer_norm(x, (5, 6), w), [(3, 5, 6), (5, 6)],
                                 "norm norm_backward column_sums"),
    "layer_norm alone": (lambda x: mt.layer_norm(x, 6), [(4, 6)], "norm norm_backward"),
    "rms_norm": (lambda x, w: mt.rms_norm(x, 6, w), [(3, 5, 6), (6,)], "norm norm_backward column_sums"),
    "gelu": (lambda x: mt.gelu(x), [(3, 5)], "bias_gelu bias_gelu_backward"),
    "gelu of a view": (lambda x: mt.gelu(mt.transpose(x)), [(3, 5)], "bias_gelu bias_gelu_backward"),
    "gelu by tanh": (lambda x: mt.gelu(x, "tanh"), [(3, 5)], "bias_gelu bias_gelu_backward"),
    "linear": (lambda x, w, b: mt.linear(x, w, b), [(3, 7, 4), (5, 4), (5,)], "column_sums"),
    "linear of a transposed cotangent": (lambda x, w, b: mt.transpose(mt.linear(x, w, b)), [(7, 4), (5, 4), (5,)], ""),
    "linear of nothing": (lambda x, w, b: mt.linear(x[:0], w, b), [(7, 4), (5, 4), (5,)], ""),
    "linear_gelu": (lambda x, w, b: mt.linear_gelu(x, w, b), [(7, 4), (5, 4), (5,)],
                    "bias_gelu bias_gelu_backward column_sums"),
    "linear_gelu by tanh, of views": (
        lambda x, w, b: mt.linear_gelu(mt.transpose(x, (1, 0, 2)), mt.transpose(w), b[::2], "tanh"),
        [(3, 2, 4), (4, 5), (10,)], "bias_gelu bias_gelu_backward column_sums"),
    "linear_gelu of mixed dtypes": (lambda x, w, b: mt.linear_gelu(x, mt.astype(w, np.float64), b),
                                    [(7, 4), (5, 4), (5,)], "column_sums"),
    "linear_gelu of nothing": (lambda x, w, b: mt.linear_gelu(x[:0], w, b), [(7, 4), (5, 4), (5,)], ""),
    "linear_gelu to nothing": (lambda x, w, b: mt.linear_gelu(x, w[:0], b[:0]), [(7, 4), (5, 4), (5,)], ""),
    "swiglu": (lambda x, y: mt.swiglu(x, y), [(3, 4, 7), (3, 4, 7)], "swiglu swiglu_backward"),
    "swiglu of halves": (lambda x: mt.nn.SwiGLU()(x), [(3, 2, 8)], "swiglu swiglu_backward"),
    "swiglu of views": (lambda x, y: mt.swiglu(mt.transpose(x), y[:, ::2]), [(5, 3), (3, 10)],
                        "swiglu swiglu_backward"),
    "rows": (lambda x: x[on_device(ROWS, x)], [(7, 5)], BY_INDEX),
    "rows of a vector": (lambda x: x[on_device(ROWS, x)], [(7,)], BY_INDEX),
    "rows of more axes": (lambda x: mt.embedding(on_device(np.abs(ROWS), x), x), [(7, 2, 3)], BY_INDEX),
    "one row": (lambda x: x[on_device(np.array(-3), x)], [(7, 5)], BY_INDEX),
    "no rows": (lambda x: mt.concatenate([x[on_device(np.zeros((0, 2), int), x)], x[None, :2]]), [(7, 2)], ""),
    "take": (lambda x: mt.take(x, on_device(ROWS, x)), [(3, 5)], BY_INDEX),
    "elements by two arrays": (lambda x: x[on_device(LABELS, x), on_device(LABELS % 3, x)], [(7, 3)], BY_INDEX),
    "rows by two arrays": (lambda x: x[on_device(LABELS[:, None], x), on_device(ROWS.ravel()[:3] % 2, x)], [(7, 2, 5)],
                           BY_INDEX),
    "columns": (lambda x: x[:, on_device(ROWS, x)], [(3, 7)], BY_INDEX),
    "columns of two axes": (lambda x: x[:, :, on_device(LABELS % 3, x), on_device(np.array(-1), x)], [(3, 2, 4, 5, 2)],
                            BY_INDEX),
    "columns of a part": (lambda x: x[:2, on_device(ROWS, x)], [(3, 7)], ""),
    "every line by itself": (lambda x: mt.take_along_axis(x, on_device(np.abs(ROWS[:, :1, None]) % 4, x), 1),
                             [(len(ROWS), 4, 3)], BY_INDEX),
    "one row added to several": (lambda x: mt.scatter_add(x, on_device(ROWS, x), (7, 5)), [(5,)], BY_INDEX),
    "topk": (lambda x: mt.topk(x, 2)[0], [(3, 7)], BY_INDEX),
    "attention": (lambda q, k, v: mt.scaled_dot_product_attention(q, k, v), [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3)],
                  "flash_attention flash_attention_queries flash_attention_sources"),
    "causal attention of views": (
        lambda q, k, v: mt.scaled_dot_product_attention(*[mt.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)],
                                                        is_causal=True, scale=0.7),
        [(2, 5, 4, 4), (2, 6, 2, 4), (2, 6, 2, 4)], "flash_attention flash_attention_queries flash_attention_sources"),
    "attention with documents": (
        lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, documents=on_device(DOCUMENTS, q)),
        [(2, 2, 5, 4), (2, 1, 5, 4), (2, 1, 5, 3)], "flash_attention flash_attention_queries flash_attention_sources"),
    "attention with a window": (
        lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, window=2),
        [(2, 2, 5, 4), (2, 1, 5, 4), (2, 1, 5, 3)], "flash_attention flash_attention_queries flash_attention_sources"),
    "attention with a scale below 0": (
        lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.7),
        [(2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3)], ""),
    "masked attention": (
        lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, attn_mask=on_device(MASK, q), is_causal=True),
        [(2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3)], ""),
    "layer_norm of mixed dtypes": (lambda x, w: mt.layer_norm(x, 6, mt.astype(w, np.float64)), [(4, 6), (6,)], ""),
}


def on_device(array, like):
    """A constant where `like` is."""
    return array.view(DeviceLike) if isinstance(mt.autodiff.primitive.lower(like), DeviceLike) else array


@pytest.fixture
def device(monkeypatch):
    """Outputs of kernels are on the stand-in for a GPU too, and full of NaN before."""
    def empty(shape, dtype, like):
        out = np.empty(shape, dtype)
        out.fill(poison(dtype))
        return out.view(DeviceLike)
    monkeypatch.setattr(launch, "empty", empty)
    return DeviceLike


def pulled(f, arrays, ct):
    """f's value, and the cotangents of its inputs for a cotangent `ct`."""
    leaves = [Tensor(a).requires_grad_() for a in arrays]
    y = f(*leaves)
    y.backward(Tensor(ct.astype(y.dtype)))
    return [np.asarray(y.data), *(np.asarray(leaf.grad.data) for leaf in leaves)]


@pytest.mark.parametrize("name", CASES)
def test_an_op_by_its_kernels_is_the_op(name, device):
    f, shapes, names = CASES[name]
    arrays = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    ct = random(*f(*[Tensor(a) for a in arrays]).shape, seed=9)
    wanted = pulled(f, [a.astype(np.float64) for a in arrays], ct.astype(np.float64))
    with ledger.record() as book:
        got = pulled(f, [a.view(device) for a in arrays], ct.view(device))
    assert set(book.launches) == set(names.split())
    for g, w in zip(got, wanted, strict=True):
        assert np.linalg.norm(g - w) <= 2e-6 * np.linalg.norm(w)


@pytest.mark.parametrize("name", ["softmax_cross_entropy", "linear_cross_entropy", "layer_norm", "gelu", "linear_gelu",
                                  "swiglu", "rows", "attention"])
def test_a_gradient_of_a_gradient_goes_by_the_definition(name, device):
    f, shapes, names = CASES[name]

    def slope(x, *rest):
        return mt.sum(mt.grad(lambda x: mt.sum(mt.sin(f(x, *rest))))(x) ** 2)
    arrays = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    wanted = mt.grad(slope)(*[a.astype(np.float64) for a in arrays])
    with ledger.record() as book:
        got = mt.grad(slope)(*[a.view(device) for a in arrays])
    assert set(book.launches) <= {*names.split(), *BY_INDEX.split()}       # by which a definition may pick its labels
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_tile_of_logits_has_a_launch_forward_and_one_backward(device, monkeypatch, dtype):
    """Of 700 classes in three tiles; the third label is ignored."""
    for name in ("HOST", "GPU"):
        monkeypatch.setattr(tiled_cross_entropy, name, 1)
    x, weight = (random(*shape, seed=k).astype(backend.as_dtype(dtype)) for k, shape in enumerate(((5, 4), (700, 4))))
    labels = np.array([699, 0, 255, 511, 256])

    def f(x, weight):
        return mt.linear_cross_entropy(x, weight, on_device(labels, x), 255)
    ct = np.arange(1.0, 6.0)
    wanted = pulled(f, [x.astype("f8"), weight.astype("f8")], ct)
    with ledger.record() as book:
        got = pulled(f, [x.view(device), weight.view(device)], ct.astype(x.dtype).view(device))
    assert book.launches == {"cross_entropy": 3, "cross_entropy_backward": 3}
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == x.dtype and np.linalg.norm(g.astype("f8") - w) <= TOLERANCE[dtype] * np.linalg.norm(w)


def dropped(x, ct, rows):
    """A layer's output and its input's gradient, in the second step of a run whose global batch has 13 samples."""
    layer = mt.nn.Dropout(0.3)
    x = Tensor(x).requires_grad_()
    with backend.random_scope(5, 2, 13, rows, micro_shards=4):
        y = layer(x)
        y.backward(Tensor(ct))
        again = layer(x.detach())
    return [np.asarray(v) for v in (y.data, x.grad.data, again.data)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(6, 35), (6,), (12, 3, 5)])
def test_dropouts_masks_are_the_ones_the_host_draws(shape, dtype, device):
    x, ct = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    wanted = dropped(x, ct, (5, 11))
    with ledger.record() as book:
        got = dropped(x.view(device), ct.view(device), (5, 11))
    assert set(book.launches) == {"dropout"}
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(g, w)
    assert (wanted[0] != wanted[2]).any() and (wanted[0] == 0).any()


def test_dropout_outside_of_a_scope_and_its_derivatives(device):
    x = random(40)

    def second(x):
        return mt.sum(mt.grad(lambda x: mt.sum(mt.dropout(x, 0.4) ** 3))(x) ** 2)
    found = []
    for a in (x.view(device), x):
        backend.manual_seed(3)
        found.append([np.asarray(v) for v in mt.jvp(lambda x: mt.dropout(x, 0.4), (a,), (a,))])
        found[-1].append(np.asarray(mt.grad(second)(a)))
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_kept_arrays_survive_the_hooks_on_saved_tensors(device):
    f, shapes, names = CASES["layer_norm"]
    arrays = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    with mt.saved_tensors_hooks(lambda a: a.copy(), lambda a: a), ledger.record() as book:
        pulled(f, [a.view(device) for a in arrays], random(*shapes[0]).view(device))
    assert set(book.launches) == set(names.split())


def test_a_label_out_of_range_makes_nan_and_reads_nothing_else():
    logits = random(3, 7)
    losses, _ = softmax_cross_entropy.softmax_cross_entropy(logits, np.array([-1, 7, 6]))
    assert np.isnan(losses).tolist() == [True, True, False]


@pytest.mark.parametrize("arguments, error, words", [
    ((random(3, 4), random(5, 6)), ValueError, r"\(m, k\)"),
    ((random(3, 4), random(4, 6), random(5)), ValueError, r"\(n,\)"),
    ((random(3, 4), random(4, 6, dtype="float16")), TypeError, "one dtype"),
    ((random(3, 4), random(4, 6), None, "tanh"), ValueError, "'tanh'"),
    ((random(3, 4), random(4, 6), None, "none", "bf16"), ValueError, "'bf16'")], ids=lambda v: None)
def test_a_product_says_what_does_not_fit(arguments, error, words):
    with pytest.raises(error, match=words):
        matmul.matmul(*arguments)


def test_a_stream_has_a_key_of_128_bits_and_begins_at_0():
    for key, offset in ((-1, 0), (1 << 128, 0), (0, -1)):
        with pytest.raises(ValueError, match="128 bits"):
            dropout.dropout(random(3), 0.5, key, offset)
