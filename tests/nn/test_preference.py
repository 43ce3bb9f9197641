"""The losses after pretraining against plain NumPy, one token at a time, closed forms and finite differences."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.data.text import IGNORED
from minitorch_dist.nn import preference as pref

random = np.random.default_rng


def made(seed=0, n=6, time=5):
    """log_probs, old, advantages, counted, reference, of which ratios lie within and beyond what is clipped."""
    rng = random(seed)
    old = -rng.exponential(1.0, (n, time))
    return (old + rng.normal(0, 0.5, (n, time)), old, rng.standard_normal(n), rng.random((n, time)) < 0.7,
            old + rng.normal(0, 0.3, (n, time)))


def by_token(log_probs, old, advantages, counted, reference, low, high, beta):
    """The objective as the papers write it, and its derivative by log_probs."""
    losses, gradient = np.zeros(old.shape), np.zeros(old.shape)
    for i, t in zip(*np.nonzero(counted), strict=True):
        ratio, a = np.exp(log_probs[i, t] - old[i, t]), advantages[i]
        stopped = ratio > 1 + high if a > 0 else ratio < 1 - low
        surrogate = (1 + high if a > 0 else 1 - low) * a if stopped else ratio * a
        r = np.exp(reference[i, t] - log_probs[i, t])
        losses[i, t] = -surrogate + beta * (r - np.log(r) - 1)
        gradient[i, t] = -(0 if stopped else ratio * a) + beta * (1 - r)
    return losses, gradient


def test_log_probs_of_tokens():
    logits, targets = random(0).standard_normal((3, 4, 7)), random(1).integers(0, 7, (3, 4))
    targets[0, 1] = targets[2] = IGNORED
    found = np.asarray(pref.token_log_probs(logits, targets))
    for i, t in np.ndindex(3, 4):
        wanted = 0 if targets[i, t] == IGNORED else logits[i, t, targets[i, t]] - np.log(np.exp(logits[i, t]).sum())
        assert abs(found[i, t] - wanted) < 1e-12
    mt.check_grads(lambda x: pref.token_log_probs(x, targets), [logits])


@pytest.mark.parametrize("low, high, beta", [(0.2, 0.28, 0.04), (0.3, 0.1, 1.0), (0.2, 0.2, 0.0)])
def test_grpo_is_the_papers_objective(low, high, beta):
    log_probs, *rest = made()
    losses, gradient = by_token(log_probs, *rest, low, high, beta)
    assert ((gradient == 0) & rest[2]).any() == (beta == 0)     # some are clipped
    options = {"clip_low": low, "clip_high": high, "beta": beta}
    x = mt.tensor(log_probs, requires_grad=True)
    loss = pref.grpo_loss(x, *rest, **options)
    loss.backward()
    assert abs(loss.item() - losses.sum()) < 1e-12
    np.testing.assert_allclose(x.grad.numpy(), gradient, atol=1e-12)
    np.testing.assert_allclose(pref.grpo_loss(x, *rest, **options, reduction="none").numpy(), losses, atol=1e-12)
    mt.check_grads(lambda x: pref.grpo_loss(x, *rest, **options), [log_probs])


@pytest.mark.parametrize("rubbish", [-1e4, 1e4, -np.inf, np.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_counted_may_be_anything(rubbish):
    log_probs, old, advantages, counted, reference = made()
    wanted, found = (mt.tensor(log_probs, requires_grad=True) for _ in range(2))
    losses = [pref.grpo_loss(wanted, old, advantages, counted, reference)]
    old, reference = np.where(counted, old, rubbish), np.where(counted, reference, -rubbish)
    losses.append(pref.grpo_loss(found, old, advantages, counted, reference))
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item() and not found.grad.numpy()[~counted].any()
    np.testing.assert_array_equal(found.grad.numpy(), wanted.grad.numpy())


def test_grpo_of_the_policy_that_drew():
    """There ρ is 1, and the gradient that of -Σ A log p, REINFORCE with a baseline; the KL's is 0 at the reference."""
    _, old, advantages, counted, _ = made()
    x = mt.tensor(old, requires_grad=True)
    loss = pref.grpo_loss(x, old, advantages, counted, reference=old, beta=10.0)
    loss.backward()
    np.testing.assert_allclose(x.grad.numpy(), -advantages[:, None] * counted, atol=1e-12)
    assert abs(loss.item() + (advantages[:, None] * counted).sum()) < 1e-12
    assert pref.grpo_loss(x, old, advantages, counted).item() == loss.item()


def test_one_clip_both_ways():
    log_probs, old, advantages, counted, _ = made()
    both = [pref.grpo_loss(log_probs, old, advantages, counted, clip_low=0.1, **more).item()
            for more in ({}, {"clip_high": 0.1})]
    assert both[0] == both[1] != pref.grpo_loss(log_probs, old, advantages, counted, clip_low=0.1, clip_high=0.2).item()


def test_parts_of_a_batch_add_up():
    args = made(n=7)
    whole = pref.grpo_loss(*args).item()
    parts = [pref.grpo_loss(*(a[rows] for a in args)).item() for rows in (slice(0, 2), slice(2, 7))]
    assert abs(sum(parts) - whole) < 1e-12 and len({args[3][rows].mean() for rows in (slice(0, 2), slice(2, 7))}) == 2


def test_k3_has_the_mean_of_the_divergence():
    """Over all tokens that a policy may draw, by their probabilities: KL(p ‖ q), of the two directions this one."""
    p, q = (np.exp(x) / np.exp(x).sum() for x in random(3).standard_normal((2, 9)))
    found = pref.kl_k3(np.log(p), np.log(q))
    assert abs((p * found).sum() - (p * np.log(p / q)).sum()) < 1e-12 < abs((q * np.log(q / p)).sum()
                                                                           - (p * found).sum())
    assert (np.asarray(found) >= 0).all() and (np.asarray(pref.kl_k3(np.log(p), np.log(p))) == 0).all()


# ---------------------------------------------------------------- advantages

def test_advantages_are_of_their_group():
    rewards = random(0).standard_normal((5, 4)) * [[1], [10], [100], [1], [1]] + [[0], [5], [-50], [1], [2]]
    found = pref.group_advantages(rewards.reshape(-1), 4).reshape(5, 4)
    for row, of_row in zip(rewards, found, strict=True):
        mean = sum(row) / 4
        std = (sum((r - mean) ** 2 for r in row) / 3) ** 0.5
        np.testing.assert_allclose(of_row, [(r - mean) / (std + 1e-4) for r in row], rtol=1e-12)
    plain = pref.group_advantages(rewards.reshape(-1), 4, scale_rewards=False).reshape(5, 4)
    np.testing.assert_allclose(plain, rewards - rewards.mean(1, keepdims=True), rtol=1e-12)
    pair = pref.group_advantages([3.0, 5.0], 2)     # of a deviation of √2
    np.testing.assert_allclose(pair, np.array([-1, 1]) / (2 ** 0.5 + 1e-4), rtol=1e-12)


@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_teach_nothing(scale):
    rewards = np.array([0.1] * 7 + [1, 0, 1, 0, 0, 0, 1] + [0.0] * 7)
    assert rewards[:7].mean() != 0.1        # rounded
    found = pref.group_advantages(rewards, 7, scale).reshape(3, 7)
    assert (found[0] == 0).all() and (found[2] == 0).all() and np.isfinite(found).all() and (found[1] != 0).all()


@pytest.mark.parametrize("rewards, group", [(np.zeros(6), 4), (np.zeros((2, 3)), 3), (np.zeros(4), 1)])
def test_groups_that_are_not_whole(rewards, group):
    with pytest.raises(ValueError, match="all of them here"):
        pref.group_advantages(rewards, group)


def test_rewards_are_finite():
    for reward in (np.inf, np.nan):
        with pytest.raises(ValueError, match="inf or NaN"):
            pref.group_advantages([reward, reward, 1, 2], 2)


def test_advantages_are_kept_where_log_probs_are_whole_numbers():
    zeros, advantages = np.zeros((2, 3), int), np.array([0.5, -0.25])
    found = pref.grpo_loss(zeros, zeros, advantages, zeros == 0, reduction="none")
    np.testing.assert_array_equal(found, -advantages[:, None] * np.ones((2, 3)))


# ---------------------------------------------------------------- pairs

def test_dpo_and_its_gradient():
    chosen, rejected, ref_chosen, ref_rejected = random(0).normal(-3, 4, (4, 8))
    beta, weights = 0.3, random(1).standard_normal(8)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    a, b = mt.tensor(chosen, requires_grad=True), mt.tensor(rejected, requires_grad=True)
    losses = pref.dpo_loss(a, b, ref_chosen, ref_rejected, beta, "none")
    np.testing.assert_allclose(losses.numpy(), np.log1p(np.exp(-margin)), rtol=1e-12)
    losses.backward(weights)
    sigma = 1 / (1 + np.exp(margin))        # σ(-margin)
    np.testing.assert_allclose(a.grad.numpy(), -beta * sigma * weights, rtol=1e-12)
    np.testing.assert_allclose(b.grad.numpy(), beta * sigma * weights, rtol=1e-12)
    for reduction, wanted in (("sum", losses.numpy().sum()), ("mean", losses.numpy().mean())):
        found = pref.dpo_loss(a, b, ref_chosen, ref_rejected, beta, reduction).item()
        assert abs(found - wanted) < 1e-12
    mt.check_grads(lambda a, b: pref.dpo_loss(a, b, ref_chosen, ref_rejected, beta, "none"), [chosen, rejected])


def test_dpo_of_far_pairs_is_finite():
    x = mt.tensor(np.array([1e4, -1e4]), requires_grad=True)
    loss = pref.dpo_loss(x, np.zeros(2), np.zeros(2), np.zeros(2), 1.0, "sum")
    loss.backward()
    assert loss.item() == 1e4 and x.grad.numpy().tolist() == [0, -1]


# ---------------------------------------------------------------- misuse

def grpo(**changed):
    names = "log_probs", "old", "advantages", "counted", "reference"
    return pref.grpo_loss(**dict(zip(names, made(), strict=True)) | changed)


@pytest.mark.parametrize("act, error, words", [
    (lambda: grpo(old=np.zeros((6, 4))), ValueError, r"\(6, 4\)"),
    (lambda: grpo(old=np.zeros((1, 5))), ValueError, r"\(1, 5\)"),
    (lambda: grpo(reference=np.zeros(5)), ValueError, r"of that shape.*\(5,\)"),
    (lambda: grpo(advantages=np.zeros(5)), ValueError, "an advantage per row"),
    (lambda: grpo(advantages=np.zeros((6, 5))), ValueError, "an advantage per row"),
    (lambda: pref.grpo_loss(*np.zeros((2, 6)), np.zeros(6), np.ones(6, bool)), ValueError,
     r"\(6,\) must be \(n, time\)"),
    (lambda: pref.grpo_loss(*np.zeros((2, 2, 3, 4)), np.zeros(2), np.ones((2, 3, 4), bool)), ValueError,
     r"\(2, 3, 4\) must be \(n, time\)"),
    (lambda: grpo(counted=np.ones((6, 5))), TypeError, "must be bool"),
    (lambda: grpo(clip_low=-0.1), ValueError, "clip_low=-0.1, clip_high=-0.1"),
    (lambda: grpo(clip_high=np.nan), ValueError, "clip_low=0.2, clip_high=nan"),
    (lambda: grpo(reduction="mean"), ValueError, "tokens of the GLOBAL batch"),
    (lambda: pref.dpo_loss(np.zeros(3), np.zeros(3), np.zeros(1), np.zeros(3)), ValueError, r"one shape, not .*\(1,\)"),
    (lambda: pref.dpo_loss(*np.zeros((4, 3)), reduction="max"), ValueError, "'max'"),
], ids=["old", "old broadcasting", "reference", "few advantages", "advantages per token", "a token each", "three axes",
        "floats", "clips below 0", "no clip", "a mean", "pairs", "no reduction"])
def test_what_is_refused(act, error, words):
    with pytest.raises(error, match=words):
        act()
