"""Losses against float64 closed forms; what doesn't fit raises."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn


def closed(z, labels):
    """Per-sample losses and their gradients, one sample at a time, in extended precision."""
    losses, grads = [], []
    for row, label in zip(z.astype(np.longdouble), labels, strict=True):
        top = row.max()
        total = np.exp(row - top).sum()
        losses.append(top - row[label] + np.log(total))
        grads.append(np.exp(row - top) / total - (np.arange(len(row)) == label))
    return np.array(losses, np.float64), np.array(grads, np.float64).reshape(z.shape)


def sample(n, classes, scale=1.0, dtype=np.float64, seed=0):
    random = np.random.default_rng(seed)
    return (random.standard_normal((n, classes)) * scale).astype(dtype), random.integers(0, classes, n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction, scale, dtype):
    z, labels = sample(7, 5, scale, dtype)
    z[0, labels[0]], z[1, labels[1]] = scale, -scale       # surely right and surely wrong
    losses, grads = closed(z, labels)
    logits = mt.tensor(z, requires_grad=True)
    loss = nn.cross_entropy(logits, labels, reduction)
    wanted = {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction]
    eps = np.finfo(dtype).eps
    assert loss.shape == wanted.shape and loss.dtype == dtype
    np.testing.assert_allclose(loss.numpy(), wanted, rtol=20 * eps, atol=20 * eps * max(1, scale))
    ct = np.random.default_rng(1).standard_normal(loss.shape).astype(dtype)
    loss.backward(mt.tensor(ct))
    weights = {"mean": ct / 7, "sum": ct, "none": ct[:, None] if ct.ndim else ct}[reduction]
    np.testing.assert_allclose(logits.grad.numpy(), grads * weights, atol=200 * eps)


def smooth(z, labels, part):
    """closed() towards labels of which a part is spread over all classes."""
    each = [closed(z, np.full(len(z), c)) for c in range(z.shape[1])]
    losses, grads = closed(z, labels)
    return ((1 - part) * losses + part * np.mean([losses for losses, _ in each], 0),
            (1 - part) * grads + part * np.mean([grads for _, grads in each], 0))


def held_near_1(z, weight):
    """What a z-loss adds, and its gradient: by the sums of exponentials as they stand."""
    sums = np.exp(z).sum(1, keepdims=True)
    return weight * np.log(sums[:, 0]) ** 2, 2 * weight * np.log(sums) * np.exp(z) / sums


@pytest.mark.parametrize(("part", "z_loss"), [(0.1, 0), (0.5, 0), (1.0, 0), (0, 1e-4), (0, 0.3), (0.2, 0.7)])
@pytest.mark.parametrize("ignored", [0, 2])
@pytest.mark.parametrize("make", [nn.cross_entropy, nn.linear_cross_entropy])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_label_smoothing_and_z_loss(part, z_loss, ignored, make, dtype):
    random = np.random.default_rng(0)
    x, weight, labels = random.standard_normal((7, 3)), random.standard_normal((5, 3)), random.integers(0, 5, 7)
    x, weight = (mt.tensor(a.astype(dtype), requires_grad=True) for a in (x, weight))
    z = x.numpy().astype(float) @ weight.numpy().astype(float).T
    losses, slopes = (a + b for a, b in zip(smooth(z, labels, part), held_near_1(z, z_loss), strict=True))
    counted, ct = np.arange(7) >= ignored, random.standard_normal(7)
    given = np.where(counted, labels, -100)
    of = (x @ weight.T,) if make is nn.cross_entropy else (x, weight)
    eps = np.finfo(dtype).eps
    more = {"label_smoothing": part, "z_loss": z_loss}
    found = make(*of, given, "none", **more)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.numpy(), losses * counted, rtol=50 * eps, atol=50 * eps)
    assert abs(make(*of, given, **more).item() - losses[counted].mean()) < 50 * eps
    found.backward(mt.tensor(ct.astype(dtype)))
    slopes *= (ct * counted)[:, None]
    np.testing.assert_allclose(x.grad.numpy(), slopes @ weight.numpy(), atol=100 * eps)
    np.testing.assert_allclose(weight.grad.numpy(), slopes.T @ x.numpy(), atol=100 * eps)


def test_smoothed_losses_compiled_and_in_16_bits():
    z, labels = sample(9, 5)
    wanted, slopes = smooth(z, labels, 0.2)

    def mean(logits, labels):
        return nn.cross_entropy(logits, labels, label_smoothing=0.2)
    logits = mt.tensor(z, requires_grad=True)
    loss = mt.compile(mean)(logits, mt.tensor(labels))
    loss.backward()
    assert abs(loss.item() - wanted.mean()) < 1e-14
    np.testing.assert_allclose(logits.grad.numpy(), slopes / 9, atol=1e-15)
    with mt.autocast("bfloat16"):
        short = mean(mt.tensor(z.astype(np.float32)).to("bfloat16"), labels)
    assert short.dtype == np.float32 and abs(short.item() - wanted.mean()) < 0.01


@pytest.mark.parametrize("loss", [
    nn.cross_entropy, mt.compile(nn.cross_entropy, emit="numpy"),
    lambda z, labels: nn.cross_entropy(z, np.where(np.arange(len(labels)), labels, -100)),
    lambda z, labels: nn.mse_loss(z[:, 0] * 3.0, z[:, 1]),
    lambda z, labels: nn.binary_cross_entropy_with_logits(z, np.zeros(z.shape))])
def test_a_mean_of_many_losses_of_float16(loss):
    """Their sum, some 10⁵, is beyond float16's numbers."""
    z, labels = np.random.default_rng(0).standard_normal((70_000, 2)), np.arange(70_000) % 2
    z = mt.tensor(z, dtype="float16", requires_grad=True)
    found, wanted = loss(z, labels), loss(mt.tensor(z.numpy(), dtype="float64"), labels)
    assert found.dtype == np.float16 and abs(found.item() - wanted.item()) < 1e-3 * wanted.item()
    found.backward()
    assert np.isfinite(z.grad.numpy()).all()


@pytest.mark.parametrize("part", [-0.1, 1.5, float("nan")])
def test_parts_of_labels_that_cannot_be(part):
    z, labels = sample(7, 5)
    with pytest.raises(ValueError, match=f"label_smoothing={part}"):
        nn.cross_entropy(mt.tensor(z), labels, label_smoothing=part)
    with pytest.raises(ValueError, match=f"label_smoothing={part}"):
        nn.linear_cross_entropy(mt.tensor(z), mt.tensor(z), labels, label_smoothing=part)


@pytest.mark.parametrize("weight", [-1e-4, float("inf"), float("nan")])
def test_weights_of_z_losses_that_cannot_be(weight):
    z, labels = sample(7, 5)
    for make in (nn.cross_entropy, lambda z, *more, **kwargs: nn.linear_cross_entropy(z, z, *more, **kwargs)):
        with pytest.raises(ValueError, match=f"z_loss={weight}"):
            make(mt.tensor(z), labels, z_loss=weight)


def test_a_z_loss_brings_logits_back_that_have_drifted():
    """softmax doesn't see what is added to all logits, and nothing but the z-loss pulls at it."""
    z, labels = sample(6, 4)
    for weight, moved in ((0.0, 0.0), (1e-2, 1.0)):
        logits = mt.tensor(z + 50.0, requires_grad=True)
        nn.cross_entropy(logits, labels, z_loss=weight).backward()
        pull = 2 * weight * (np.log(np.exp(z).sum(1)) + 50).mean()
        assert abs(logits.grad.numpy().sum() - moved * pull) < 1e-12


@pytest.mark.parametrize("make", [nn.cross_entropy, nn.linear_cross_entropy])
@pytest.mark.parametrize("ignored", [0, 1])
def test_a_z_loss_in_float16_whose_square_is_beyond_its_range(make, ignored):
    """Of logits of 1,000: 1e-4 · 1,000² = 100 on top of losses near 0, and a pull of 2 · 1e-4 · 1,000."""
    x, weight = (mt.tensor(np.array(a, np.float16), requires_grad=True) for a in ([[1000, 0], [0, 1000]], np.eye(2)))
    loss = make(*(x, weight) if make is nn.linear_cross_entropy else (x,), np.array([0, 1]), "sum", z_loss=1e-4,
                ignore_index=ignored - 1)
    loss.backward()
    assert loss.dtype == np.float16 and abs(loss.item() - 100 * (2 - ignored)) < 0.2
    np.testing.assert_allclose(x.grad.numpy(), [[0.2 * (1 - ignored), 0], [0, 0.2]], rtol=2e-3)


def test_gradient_is_that_of_central_differences():
    z, labels = sample(4, 3, seed=5)
    logits = mt.tensor(z, requires_grad=True)
    nn.cross_entropy(logits, mt.tensor(labels)).backward()
    for i in np.ndindex(z.shape):
        step = np.zeros_like(z)
        step[i] = 1e-6
        slope = (closed(z + step, labels)[0].mean() - closed(z - step, labels)[0].mean()) / 2e-6
        assert abs(slope - logits.grad.numpy()[i]) < 1e-8


def test_sums_over_uneven_shards_divided_by_the_global_count_are_the_mean():
    z, labels = sample(13, 4)
    for ranks in (2, 3, 4, 16):
        edges = [13 * r // ranks for r in range(ranks + 1)]
        logits = mt.tensor(z, requires_grad=True)
        total = 0.0
        for lo, hi in zip(edges, edges[1:], strict=False):
            part = nn.cross_entropy(logits[lo:hi], labels[lo:hi], reduction="sum") / 13
            part.backward()
            total += part.item()
        losses, grads = closed(z, labels)
        assert abs(total - losses.mean()) < 1e-14
        np.testing.assert_allclose(logits.grad.numpy(), grads / 13, atol=1e-15)


def test_an_empty_batch_has_a_sum_but_no_mean():
    logits = mt.tensor(np.zeros((0, 4)), requires_grad=True)
    labels = np.zeros(0, np.int64)
    total = nn.cross_entropy(logits, labels, reduction="sum")
    assert total.item() == 0
    total.backward()
    assert logits.grad.shape == (0, 4)
    with pytest.raises(ValueError, match="empty"):
        nn.cross_entropy(logits, labels)


@pytest.mark.parametrize(("labels", "error", "says"), [
    (np.zeros(6, np.int64), ValueError, r"\(7, 5\).*\(6,\)"),
    (np.zeros((7, 1), np.int64), ValueError, r"\(7, 1\)"),
    (np.full(7, 5), ValueError, "5 classes"),
    (np.full(7, -1), ValueError, "-1"),
    (np.zeros(7), TypeError, "float64"),
])
def test_cross_entropy_arguments_that_do_not_fit(labels, error, says):
    z, _ = sample(7, 5)
    with pytest.raises(error, match=says):
        nn.cross_entropy(mt.tensor(z), labels)
    with pytest.raises(ValueError, match=r"cross_entropy: logits \(\), labels \(\)"):
        nn.cross_entropy(mt.tensor(1.0), 0)


def test_targets_may_be_lists_or_a_number():
    x = mt.tensor([0.5, -2.0])
    for loss in (nn.mse_loss, nn.binary_cross_entropy_with_logits):
        found = loss(x, [1, 0])
        assert found.dtype == np.float32 and found.item() == loss(x, mt.tensor([1.0, 0.0])).item()
        with pytest.raises(ValueError, match=r"\(2,\) and targets? \(3,\) must have one"):
            loss(x, [1, 0, 1])
    assert nn.mse_loss(x[0], 2).item() == 2.25


def test_an_unknown_reduction_raises():
    z, labels = sample(7, 5)
    with pytest.raises(ValueError, match="average"):
        nn.cross_entropy(mt.tensor(z), labels, reduction="average")
    with pytest.raises(ValueError, match="average"):
        nn.mse_loss(mt.tensor(z), z, reduction="average")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mse(reduction):
    a, _ = sample(7, 3)
    b, _ = sample(7, 3, seed=1)
    p, t = mt.tensor(a, requires_grad=True), mt.tensor(b, requires_grad=True)
    loss = nn.mse_loss(p, t, reduction)
    ct = np.random.default_rng(2).standard_normal(loss.shape)
    loss.backward(mt.tensor(ct))
    wanted = {"mean": ((a - b) ** 2).sum() / 21, "sum": ((a - b) ** 2).sum(), "none": (a - b) ** 2}[reduction]
    np.testing.assert_allclose(loss.numpy(), wanted, rtol=1e-14)
    slope = 2 * (a - b) * ct / (21 if reduction == "mean" else 1)
    np.testing.assert_allclose(p.grad.numpy(), slope, rtol=1e-13)
    np.testing.assert_allclose(t.grad.numpy(), -slope, rtol=1e-13)


def test_mse_in_float16_whose_squares_are_beyond_its_range():
    """400² = 160,000 of one of ten, of which the mean is a float16."""
    p = mt.tensor(np.array([400.0] + [0.0] * 9, np.float16), requires_grad=True)
    loss = nn.mse_loss(p, np.zeros(10, np.float16))
    loss.backward()
    assert loss.dtype == p.grad.dtype == np.float16 and loss.item() == 16_000 and p.grad.tolist() == [80] + [0] * 9


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_binary_cross_entropy(reduction, dtype, scale):
    random = np.random.default_rng(1)
    z, t = (random.standard_normal((4, 5)) * scale).astype(dtype), random.integers(0, 2, (4, 5))
    t = t * 0.9 + 0.05 if scale == 1 else t     # labels may be soft, and integers
    z[0, :2] = 0.0
    wide = z.astype(np.longdouble)
    s = 1 / (1 + np.exp(-wide))
    losses = np.logaddexp(0, wide) - t * wide
    wanted = np.asarray({"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction], float)
    logits, ct = mt.tensor(z, requires_grad=True), random.standard_normal(wanted.shape).astype(dtype)
    found = nn.binary_cross_entropy_with_logits(logits, t, reduction)
    eps = np.finfo(dtype).eps
    assert found.dtype == dtype
    np.testing.assert_allclose(found.numpy(), wanted, rtol=50 * eps, atol=50 * eps * scale)
    found.backward(mt.tensor(ct))
    np.testing.assert_allclose(logits.grad.numpy(), ((s - t) * ct / (20 if reduction == "mean" else 1)).astype(float),
                               rtol=1e-5, atol=50 * eps)


def test_binary_cross_entropy_to_second_order_and_misfits():
    z, t = np.array([0.0, -0.7, 2.0]), np.array([1.0, 0.0, 0.3])
    second = mt.hessian(lambda z: nn.binary_cross_entropy_with_logits(z, t, "sum"))(z)
    s = 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(second, np.diag(s * (1 - s)), rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match=r"logits \(3,\) and targets \(3, 1\) must have one shape"):
        nn.binary_cross_entropy_with_logits(z, t[:, None])


@pytest.mark.parametrize("shape", [(7,), (7, 1), (1, 3), (3, 7), ()])
def test_mse_never_broadcasts(shape):
    a, _ = sample(7, 3)
    with pytest.raises(ValueError, match=r"\(7, 3\)"):
        nn.mse_loss(mt.tensor(a), np.zeros(shape))
