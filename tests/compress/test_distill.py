"""The distillation loss against extended precision, finite differences and the paper's limits."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim
from minitorch_dist.compress.distill import distillation_loss, loss_sum
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.training import train_step


def logits(shape, scale=1.0, dtype=np.float64, seed=0):
    random = np.random.default_rng(seed)
    return [(random.standard_normal(shape) * scale).astype(dtype) for _ in range(2)]


def log_softmax(z, t):
    z = z.astype(np.longdouble) / t
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def closed(z_s, z_t, t):
    """Per-sample losses and their gradients by z_s, in extended precision."""
    p_t, log_s = np.exp(log_softmax(z_t, t)), log_softmax(z_s, t)
    return -t * t * (p_t * log_s).sum(-1), t * (np.exp(log_s) - p_t)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_and_its_gradient(reduction, temperature, scale, dtype):
    z_s, z_t = logits((7, 5), scale, dtype)
    losses, grads = closed(z_s, z_t, temperature)
    student, teacher = mt.tensor(z_s, requires_grad=True), mt.tensor(z_t, requires_grad=True)
    loss = distillation_loss(student, teacher, temperature, reduction=reduction)
    wanted = {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction]
    eps = np.finfo(dtype).eps
    assert loss.dtype == dtype and loss.shape == np.shape(wanted)
    size = temperature ** 2 * max(1, scale / temperature)
    np.testing.assert_allclose(loss.numpy(), wanted.astype(np.float64), rtol=50 * eps, atol=50 * eps * size)
    ct = np.random.default_rng(1).standard_normal(loss.shape).astype(dtype)
    loss.backward(mt.tensor(ct))
    weights = {"mean": ct / 7, "sum": ct, "none": ct[:, None] if ct.ndim else ct}[reduction]
    # the exponents' rounding is that of z/T
    np.testing.assert_allclose(student.grad.numpy(), (grads * weights).astype(np.float64), rtol=0,
                               atol=50 * eps * temperature * max(1, scale / temperature))
    assert teacher.grad is None


def test_whole_numbers_are_logits_too():
    """The teacher's probabilities would all be 0 in a student's dtype of integers."""
    z_s, z_t = np.array([[1, 2, 3], [0, 5, 1]]), np.array([[3, 2, 0], [1, 1, 4]])
    wanted = closed(z_s, z_t, 2.0)[0].astype(float)
    np.testing.assert_allclose(distillation_loss(z_s, z_t, 2.0, reduction="none"), wanted, rtol=1e-14)
    np.testing.assert_allclose(distillation_loss(z_s, z_t.astype(np.float32), 2.0, reduction="none"), wanted, rtol=1e-6)


def test_any_axes_before_the_classes():
    z_s, z_t = logits((2, 3, 4))
    got = distillation_loss(mt.tensor(z_s), z_t, 3.0, reduction="none")
    np.testing.assert_allclose(got.numpy(), closed(z_s, z_t, 3.0)[0].astype(float), rtol=1e-13)


def test_derivatives_are_those_of_central_differences():
    z_s, z_t = logits((3, 4))
    labels = np.array([2, 0, 3])
    mt.check_grads(lambda z: distillation_loss(z, z_t, 2.5, reduction="none"), [z_s])
    mt.check_grads(lambda z: distillation_loss(z, z_t, 2.5, labels, 0.3, "none"), [z_s])


def test_nothing_flows_into_the_teacher():
    z_s, z_t = logits((3, 4))
    assert not mt.grad(lambda z: distillation_loss(z_s, z, 2.0, reduction="sum"))(z_t).any()
    _, tangent = mt.jvp(lambda z: distillation_loss(z_s, z, 2.0, reduction="sum"), (z_t,), (np.ones_like(z_t),))
    assert not np.asarray(tangent).any()
    both = mt.grad(lambda z: distillation_loss(z, z * 2.0, 2.0, reduction="sum"))(z_s)
    np.testing.assert_allclose(both, closed(z_s, 2 * z_s, 2.0)[1].astype(float), atol=1e-13)


def test_at_high_temperature_it_matches_logits():
    """Hinton et al., eq. 4: without the factor T² the gradient is (z_s - z_t) / (N T²), for logits of mean 0."""
    z_s, z_t = (z - z.mean(-1, keepdims=True) for z in logits((6, 10)))
    for t, tolerance in ((1e2, 1e-2), (1e3, 1e-3), (1e4, 1e-4)):        # the next term is of order 1/T
        got = mt.grad(lambda z, t=t: distillation_loss(z, z_t, t, reduction="sum"))(z_s)
        np.testing.assert_allclose(got, (z_s - z_t) / 10, atol=tolerance)


def test_at_temperature_1_and_a_sure_teacher_it_is_cross_entropy():
    z_s, _ = logits((5, 4))
    labels = np.array([1, 3, 0, 2, 2])
    sure = np.where(np.arange(4) == labels[:, None], 0.0, -1e30)
    got, wanted = (f.item() for f in (distillation_loss(mt.tensor(z_s), sure, 1.0),
                                      nn.cross_entropy(mt.tensor(z_s), labels)))
    assert got == pytest.approx(wanted, rel=1e-14)


def test_its_least_value_is_the_teachers_entropy():
    _, z_t = logits((1, 4))
    log_p = log_softmax(z_t, 3.0)
    least = distillation_loss(mt.tensor(z_t), z_t, 3.0).item()
    assert least == pytest.approx(float(-9 * (np.exp(log_p) * log_p).sum()), rel=1e-14)
    assert distillation_loss(mt.tensor(z_t + 0.1 * np.eye(4)[:1]), z_t, 3.0).item() > least


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_labels_count_for_the_rest(alpha):
    z_s, z_t = logits((5, 4))
    labels = np.array([1, 3, 0, 2, 2])
    hard = -log_softmax(z_s, 1.0)[np.arange(5), labels]
    wanted = alpha * closed(z_s, z_t, 4.0)[0] + (1 - alpha) * hard
    got = distillation_loss(mt.tensor(z_s), z_t, 4.0, labels, alpha, "none")
    np.testing.assert_allclose(got.numpy(), wanted.astype(float), rtol=1e-13)


def test_a_wider_teacher_does_not_widen_the_student():
    student, teacher = logits((3, 5), dtype=np.float32)
    assert distillation_loss(mt.tensor(student), teacher.astype(np.float64), 2.0).dtype == np.float32


def test_the_teacher_is_in_evaluation_mode_whoever_trains_it():
    teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    ask = loss_sum(teacher)
    teacher.train()
    x = np.ones((5, 4), np.float32)
    shard = data.loader.Shard(0, x, np.zeros(5, int), (0, 5))
    student = nn.Linear(4, 3)
    assert ask(student, shard).item() == ask(student, shard).item()


def test_large_logits_stay_finite():
    z = np.array([[1e30, -1e30, 0, 3e4]], np.float32)
    student = mt.tensor(z, requires_grad=True)
    distillation_loss(student, z[:, ::-1].copy(), 2.0).backward()
    np.testing.assert_allclose(student.grad.numpy(), [[2, 0, 0, -2]])


@pytest.mark.parametrize(("change", "words"), [
    ({"teacher_logits": np.zeros((5, 3))}, r"student's logits \(5, 4\), teacher's \(5, 3\)"),
    ({"teacher_logits": np.zeros(4)}, r"teacher's \(4,\)"), ({"teacher_logits": np.zeros((1, 4))}, r"\(1, 4\)"),
    ({"temperature": 0.0}, "temperature=0.0"), ({"temperature": float("inf")}, "finite"),
    ({"temperature": float("nan")}, "nan"), ({"labels": np.zeros(5, int)}, "labels without alpha"),
    ({"alpha": 0.5}, "alpha without labels"), ({"alpha": 1.5, "labels": np.zeros(5, int)}, "alpha=1.5"),
    ({"alpha": -0.5, "labels": np.zeros(5, int)}, "alpha=-0.5"),
    ({"alpha": 0.5, "labels": np.zeros(4, int)}, "labels"), ({"reduction": "max"}, "'max'")], ids=str)
def test_what_does_not_fit_raises(change, words):
    settings = {"student_logits": mt.tensor(np.zeros((5, 4))), "teacher_logits": np.zeros((5, 4)), "temperature": 2.0}
    with pytest.raises(ValueError, match=words):
        distillation_loss(**settings | change)


def test_the_mean_of_nothing_raises():
    empty = mt.tensor(np.zeros((0, 4)))
    assert distillation_loss(empty, np.zeros((0, 4)), reduction="sum").item() == 0
    with pytest.raises(ValueError, match="empty batch"):
        distillation_loss(empty, np.zeros((0, 4)))


def test_train_step_divides_by_the_global_batch():
    """A step by loss_sum, in shards of 5 and 2 rows, against NumPy; the teacher has dropout, which is off."""
    mt.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 3, dtype=np.float64), nn.Dropout(0.5))
    student = nn.Linear(6, 3, False, dtype=np.float64)
    x, w = np.random.default_rng(0).standard_normal((7, 6)), student.weight.numpy().copy()
    targets = x @ teacher[0].weight.numpy().T + teacher[0].bias.numpy()
    shards = [data.Shard(0, x[:5], None, (0, 5)), data.Shard(1, x[5:], None, (5, 7))]
    batch = data.Batch(x, None, 14, (0, 7), shards)       # of 14 on all ranks
    world = comm.world()
    model = DistributedDataParallel(student, world)
    losses, grads = closed(x @ w.T, targets, 3.0)
    for shard in shards:
        student.load_state_dict({"weight": w})
        one = data.Batch(shard.inputs, None, 14, shard.rows, [shard])
        loss, _ = train_step(model, optim.SGD(model.parameters(), 1.0), one, loss_sum(teacher, 3.0), world, seed=0,
                             step=0)
        here = slice(*shard.rows)
        assert loss == pytest.approx(float(losses[here].sum() / 14), rel=1e-12)
        np.testing.assert_allclose(w - student.weight.numpy(), (grads[here].T @ x[here] / 14).astype(float), atol=1e-13)
    assert batch.count == 14 and not teacher.training and teacher[0].weight.grad is None
