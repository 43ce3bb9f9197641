"""linear_cross_entropy by several tiles of classes, against closed forms in extended precision and the ops it is."""

import tracemalloc

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.backend.tiled_cross_entropy import tiles

EDGES = [0, 255, 256, 257, 511, 512, 699]


@pytest.fixture
def narrow(monkeypatch):
    """As narrow as tiles get: 256 classes."""
    monkeypatch.setattr(tiled_cross_entropy, "HOST", 1)


def sample(classes, labels, size=5, scale=1.0, dtype=np.float64):
    rng = np.random.default_rng(classes)
    return [(rng.standard_normal(shape) * scale).astype(dtype) for shape in ((len(labels), size), (classes, size))]


def closed(x, weight, labels, ct):
    """Losses and the cotangents of x and weight, row by row."""
    x, weight = x.astype(np.longdouble), weight.astype(np.longdouble)
    losses, gx, gw = [], [], np.zeros_like(weight)
    for row, label, c in zip(x, labels, ct, strict=True):
        z = weight @ row
        e = np.exp(z - z.max())
        losses.append(z.max() - z[label] + np.log(e.sum()))
        g = c * (e / e.sum() - (np.arange(len(z)) == label))
        gx.append(g @ weight)
        gw += g[:, None] * row
    return [np.array(a, np.float64) for a in (losses, gx, gw)]


@pytest.mark.parametrize("rows, classes, most", [(1, 1, 1), (4096, 50257, 1 << 23), (7, 50257, 1 << 23), (3, 700, 1),
                                                 (0, 700, 1), (10 ** 6, 1000, 1 << 23), (1000, 256, 1 << 18)])
def test_tiles_follow_each_other_and_are_of_one_width(rows, classes, most):
    found = tiles(rows, classes, most)
    assert [n for first, end in found for n in range(first, end)] == list(range(classes))
    widths = {end - first for first, end in found[:-1]}
    assert len(widths) <= 1 and all(width % 64 == 0 and (width == 256 or rows * width <= most) for width in widths)
    assert not widths or found[-1][1] - found[-1][0] <= widths.pop()


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_by_tiles_it_is_the_closed_form(narrow, dtype, scale):
    x, weight = sample(700, EDGES, scale=scale, dtype=dtype)
    ct = np.random.default_rng(1).standard_normal(len(EDGES)).astype(dtype)
    wanted = closed(x, weight, EDGES, ct)
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
    losses = mt.linear_cross_entropy(*leaves, np.array(EDGES, np.uint16))
    losses.backward(mt.tensor(ct))
    for got, want in zip((losses.detach(), leaves[0].grad, leaves[1].grad), wanted, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        # logits of some thousand have an error of that times eps, and so has what is exponentiated
        assert np.linalg.norm(got.numpy() - want) <= 20 * scale ** 2 * np.finfo(dtype).eps * np.linalg.norm(want)


@pytest.mark.parametrize("ignore", [-100, 300, 699])
def test_what_is_ignored_has_neither_a_loss_nor_a_gradient(narrow, ignore):
    labels = np.array([3, ignore, 699 if ignore != 699 else 5, ignore, 256])
    x, weight = sample(700, labels)
    x[1] = 1e4      # whatever its logits are
    counted = labels != ignore
    wanted = closed(x[counted], weight, labels[counted], np.arange(5.0)[counted])
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
    losses = mt.linear_cross_entropy(*leaves, labels, ignore)
    losses.backward(mt.tensor(np.arange(5.0)))
    np.testing.assert_allclose(losses.numpy()[counted], wanted[0], rtol=1e-13)
    np.testing.assert_allclose(leaves[0].grad.numpy()[counted], wanted[1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(leaves[1].grad.numpy(), wanted[2], rtol=1e-12, atol=1e-12)
    assert not losses.numpy()[~counted].any() and not leaves[0].grad.numpy()[~counted].any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_labels_of_few_bits_know_tiles_beyond_theirs(narrow, dtype):
    labels = np.array([0, 127, 3], dtype)
    x, weight = sample(700, labels)
    losses, *_ = closed(x, weight, labels, np.ones(3))
    np.testing.assert_allclose(mt.linear_cross_entropy(x, weight, labels, 3 if dtype == "int8" else None),
                               losses * (1, 1, dtype != "int8"), rtol=1e-13)


def test_one_gradient_alone(narrow):
    x, weight = sample(700, EDGES)
    ct = np.random.default_rng(1).standard_normal(len(EDGES))
    _, gx, gw = closed(x, weight, EDGES, ct)
    for which, wanted in enumerate((gx, gw)):
        leaf = mt.tensor((x, weight)[which], requires_grad=True)
        mt.linear_cross_entropy(*((leaf, weight), (x, leaf))[which], EDGES).backward(mt.tensor(ct))
        np.testing.assert_allclose(leaf.grad.numpy(), wanted, rtol=1e-12, atol=1e-14)


def test_eight_bytes_per_row_are_kept_and_one_tile_is_made_at_a_time(monkeypatch):
    """40,000 logits of 64 rows are 10 MB in float32; two gradients, a tile and what is made of it, 1.6 MB."""
    monkeypatch.setattr(tiled_cross_entropy, "HOST", 1 << 16)
    labels = np.arange(64) * 600
    arrays = sample(40_000, labels, 4, dtype=np.float32)

    def peak(f):
        leaves = [mt.tensor(a, requires_grad=True) for a in arrays]
        tracemalloc.start()
        try:
            with ledger.record(memory=True) as book:
                loss = f(*leaves)
                kept = book.live["activation"]
                loss.sum().backward()
            return kept, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    kept, most = peak(lambda x, w: mt.linear_cross_entropy(x, w, labels))
    whole, all_of_it = peak(lambda x, w: mt.softmax_cross_entropy(mt.linear(x, w), labels))
    assert kept == 8 * 64 + labels.nbytes and whole > 2 * 4 * 64 * 40_000
    assert most < 2_000_000 and all_of_it > 30_000_000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_under_autocast_products_have_16_bits_and_losses_32(narrow, dtype):
    x, weight = sample(700, EDGES, dtype=np.float32)
    found = []
    for f in (mt.linear_cross_entropy, lambda x, w, labels: mt.softmax_cross_entropy(mt.linear(x, w), labels)):
        leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
        with mt.autocast(dtype):
            losses = f(*leaves, EDGES)
        losses.sum().backward()
        assert losses.dtype == leaves[0].grad.dtype == leaves[1].grad.dtype == np.float32
        found.append([a.numpy() for a in (losses.detach(), leaves[0].grad, leaves[1].grad)])
    # The same roundings of the same logits: losses are alike, as far as their sums are. Cotangents of logits, too.
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for got, wanted in zip(found[0][1:], found[1][1:], strict=True):
        assert np.linalg.norm(got - wanted) <= (2e-3 if dtype == "float16" else 2e-2) * np.linalg.norm(wanted)


@pytest.mark.parametrize("x, weight, labels, error, message", [
    ((3, 4), (5, 3), [0, 1, 2], ValueError, r"x \(3, 4\), weight \(5, 3\) and labels \(3,\)"),
    ((3, 4), (5, 4), [0, 1], ValueError, r"labels \(2,\): they must be \(n, in\), \(classes, in\) and \(n,\)"),
    ((2, 3, 4), (5, 4), [0, 1], ValueError, r"x \(2, 3, 4\)"),
    ((0, 4), (0, 4), np.zeros(0, int), ValueError, "of a class or more"),
    ((3, 4), (5, 4), [0, 5, 1], ValueError, "labels from 0 to 5, but there are 5 classes: 0 to 4"),
    ((3, 4), (5, 4), [0.0, 1.0, 2.0], TypeError, "labels of dtype float64")])
def test_what_does_not_fit_is_refused(x, weight, labels, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        mt.linear_cross_entropy(np.ones(x), np.ones(weight), labels)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_loss_of_a_layer_is_that_of_its_logits(narrow, reduction, ignored):
    labels = np.array([EDGES[:6], EDGES[1:]]).reshape(3, 4)
    labels[0, 1] = -100 if ignored else 4
    x, weight = sample(700, labels.ravel())
    x = x.reshape(3, 4, 5)
    found = []
    for f in (nn.linear_cross_entropy, lambda x, w, *rest: nn.cross_entropy(mt.linear(x, w), *rest)):
        leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
        loss = f(*leaves, labels, reduction)
        loss.backward(mt.tensor(np.random.default_rng(2).standard_normal(loss.shape)))
        found.append([a.numpy() for a in (loss.detach(), leaves[0].grad, leaves[1].grad)])
    for got, wanted in zip(*found, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


def test_no_rows_have_a_sum_of_0_and_no_mean():
    x = mt.tensor(np.zeros((0, 4)), requires_grad=True)
    loss = nn.linear_cross_entropy(x, np.ones((5, 4)), np.zeros(0, int), "sum")
    loss.backward()
    assert loss.item() == 0 and x.grad.shape == (0, 4)
    with pytest.raises(ValueError, match="empty batch"):
        nn.linear_cross_entropy(x, np.ones((5, 4)), np.zeros(0, int))
