"""Losses. Their arguments' shapes must be equal: broadcasting a loss is always a mistake."""

from ..autodiff import ops
from ..autodiff.primitive import lower


def _reduced(losses, reduction):
    if reduction == "none":
        return losses
    total = ops.sum(losses)
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction {reduction!r}: use 'mean', 'sum' or 'none'")
    if not losses.size:
        raise ValueError("the mean loss of an empty batch is undefined; use reduction='sum'")
    return total / losses.size


def cross_entropy(logits, labels, reduction="mean"):
    """-log softmax(logits)[label]: logits (n, classes), labels (n,) integers.

    reduction  "mean" over the n samples, "sum", or "none" -> (n,).
               In data-parallel training take the sum and divide by the GLOBAL count: the mean of
               ranks' means is wrong as soon as the ranks hold different numbers of samples.
    Stable for logits of any finite size. Raises ValueError where shapes or labels don't fit.
    """
    return _reduced(ops.softmax_cross_entropy(logits, labels), reduction)


def mse_loss(prediction, target, reduction="mean"):
    """(prediction - target)² over arrays of one shape; reduction as in cross_entropy."""
    if prediction.shape != lower(target).shape:
        raise ValueError(f"mse_loss: prediction {prediction.shape} and target {lower(target).shape} must have one "
                         "shape: broadcasting them would average the wrong pairs")
    difference = prediction - target
    return _reduced(difference * difference, reduction)
