"""Losses after pretraining: on answers that the model wrote itself and somebody gave rewards, and on pairs of answers
of which one is preferred.

    log_probs = token_log_probs(model(tokens), targets)         # (n, time), 0 where the target is ignored
    loss = grpo_loss(log_probs, old, advantages, targets != IGNORED, reference) / TOKENS
    loss = dpo_loss(chosen, rejected, reference_chosen, reference_rejected, reduction="sum") / PAIRS

TOKENS and PAIRS are numbers of the GLOBAL batch: the losses are sums, and their gradients are summed over ranks. A mean
over each answer's tokens first, and then over answers, would make a token of a long answer count less than one of a
short answer, so that long wrong answers pay (Liu), and a mean over each rank's would depend on the number of ranks.

Sources: Shao et al. 2024, "DeepSeekMath" (GRPO); Yu et al. 2025, "DAPO" (clip_high, sums over tokens); Liu et al. 2025,
"Understanding R1-Zero-like training" (Dr. GRPO: the length bias); Schulman 2020, "Approximating KL divergence" (k3);
Rafailov et al. 2023, "Direct preference optimization".
"""

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import module_of, number, xp
from .loss import _reduced, cross_entropy, log_sigmoid

EPSILON = 1e-4      # added to a group's standard deviation, as TRL does


def token_log_probs(logits, targets, ignore_index=-100):
    """log softmax(logits)[target]: logits (…, classes), targets (…) integers -> (…); 0 where target is ignore_index.
    Of a policy that samples at a temperature, give logits / temperature."""
    return -cross_entropy(logits, targets, "none", ignore_index)


def group_advantages(rewards, group, scale_rewards=True):
    """How much better each answer is than the others to its question: (questions · group,) float64, of that shape.

    rewards        those of a question's `group` answers one after another
    scale_rewards  divide by the group's standard deviation (of a sample: group - 1, as torch's std), + 1e-4. False:
                   leave it out, since it weighs questions that are almost always right, or wrong, more (Liu)
    A group of equal rewards teaches nothing: exactly 0, and never NaN. ValueError where the groups are not whole, or
    a reward isn't finite.
    """
    rewards = module_of(rewards).asarray(rewards, xp.float64)
    if rewards.ndim != 1 or group < 2 or len(rewards) % group:
        raise ValueError(f"group_advantages: rewards {rewards.shape} in groups of {group}: one reward per answer, two "
                         "or more answers to a question, and all of them here")
    if not module_of(rewards).isfinite(rewards).all():
        raise ValueError("group_advantages: a reward that is inf or NaN says nothing of the others: give finite ones")
    rewards = rewards.reshape(-1, group)
    centred = rewards - rewards.mean(1, keepdims=True)
    centred[(rewards == rewards[:, :1]).all(1)] = 0     # the mean of equal numbers may be rounded to another one
    if scale_rewards:
        centred /= rewards.std(1, ddof=1, keepdims=True) + EPSILON
    return centred.reshape(-1)


def kl_k3(log_probs, reference):
    """An estimate of KL(policy ‖ reference) from tokens that the policy drew, one per token: r - 1 - log r, where r =
    reference / policy. Never below 0, and of the right mean; log_probs and reference of one shape."""
    log_ratio = reference - log_probs
    return ops.exp(log_ratio) - log_ratio - 1.0


def grpo_loss(log_probs, old, advantages, counted, reference=None, clip_low=0.2, clip_high=None, beta=0.04,
              reduction="sum"):
    """-Σ min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) + beta · KL over the counted tokens, ρ = policy / old policy.

    log_probs   (n, time): of the answers' tokens, by the policy that is trained
    old         (n, time): by the policy that drew them, constants. In the first step after that, ρ is 1
    advantages  (n,): of the answers; see group_advantages
    counted     (n, time), bool: which tokens are the answers'
    reference   (n, time): by the policy that the KL (k3) keeps it close to, constants. None: no such term
    clip_low, clip_high  what gains nothing more: a good answer's token (A > 0) that has become 1 + clip_high times as
                likely, a bad one's that has become 1 - clip_low times. clip_high None: clip_low (DAPO: 0.28)
    reduction   "sum", to be divided by the number of counted tokens of the GLOBAL batch, or "none", (n, time)
    ValueError where shapes differ, or clips are below 0.
    """
    clip_low, clip_high, beta = map(number, (clip_low, clip_low if clip_high is None else clip_high, beta))
    if not (0 <= clip_low and 0 <= clip_high):
        raise ValueError(f"grpo_loss: clip_low={clip_low}, clip_high={clip_high}: ratios are clipped to 1 - clip_low … "
                         "1 + clip_high, and neither is below 0")
    old, advantages, counted = lower(old), lower(advantages), lower(counted)
    others = [old, counted] + ([] if reference is None else [lower(reference)])
    if len(log_probs.shape) != 2 or any(x.shape != log_probs.shape for x in others) or \
            advantages.shape != log_probs.shape[:1]:
        raise ValueError(f"grpo_loss: log_probs {log_probs.shape} must be (n, time), old, counted and reference of "
                         f"that shape, with an advantage per row; they are "
                         f"{', '.join(str(x.shape) for x in others)} and {advantages.shape}")
    if counted.dtype != bool:
        raise TypeError(f"grpo_loss: counted of dtype {counted.dtype}; it must be bool, True at the answers' tokens")
    if reduction not in ("sum", "none"):
        raise ValueError(f"grpo_loss: reduction {reduction!r}: use 'sum', divided by the tokens of the GLOBAL batch, "
                         "or 'none'")
    log_probs = ops.where(counted, log_probs, old)      # else a ratio of inf, which doesn't count, has gradients of NaN
    ratio = ops.exp(log_probs - old)
    a = advantages.astype(ratio.dtype)[:, None]
    losses = -ops.minimum(ratio * a, ops.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    if reference is not None:
        losses = losses + beta * kl_k3(log_probs, lower(reference))
    losses = ops.where(counted, losses, 0.0)
    return losses if reduction == "none" else ops.sum(losses)


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.1, reduction="mean"):
    """-log σ(margin), margin = beta · ((chosen - reference_chosen) - (rejected - reference_rejected)).

    chosen, rejected      (pairs,): the log-probabilities of the preferred and of the other answer, whole: the sums of
                          their tokens'
    reference_…           the same by the model that training began with, constants
    reduction             "mean", "sum" or "none"; in data-parallel training take the sum, and divide by the GLOBAL
                          number of pairs
    By chosen its derivative is -beta · σ(-margin): pairs that are in the right order already count less. ValueError
    where shapes differ.
    """
    shapes = [x.shape for x in (chosen, rejected, reference_chosen, reference_rejected)]
    if len(set(shapes)) > 1:
        raise ValueError(f"dpo_loss: chosen, rejected and their references must have one shape, not "
                         f"{', '.join(map(str, shapes))}")
    margin = (chosen - lower(reference_chosen)) - (rejected - lower(reference_rejected))
    return _reduced(-log_sigmoid(number(beta) * margin), reduction)
