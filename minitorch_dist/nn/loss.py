"""Losses. Their arguments' shapes must be equal: broadcasting a loss is always a mistake."""

from .. import backend
from ..autodiff import ops
from ..autodiff.ops.indexing import numbers_in
from ..autodiff.primitive import lower
from ..backend import Placeholder, on_host

EMPTY = "the mean loss of an empty batch, or where all labels are ignored, is undefined; use reduction='sum'"


def _reduced(losses, reduction):
    if reduction == "none":
        return losses
    total = ops.sum(losses)
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction {reduction!r}: use 'mean', 'sum' or 'none'")
    if not losses.size:
        raise ValueError(EMPTY)
    return total / losses.size


def cross_entropy(logits, labels, reduction="mean", ignore_index=-100):
    """-log softmax(logits)[label]: logits (…, classes), labels (…) integers.

    reduction     "mean" over the labels that count, "sum", or "none" -> (…), 0 where ignored.
                  In data-parallel training take the sum and divide by the GLOBAL count: the mean of
                  ranks' means is wrong as soon as the ranks hold different numbers of samples.
    ignore_index  labels with this number count for nothing
    Stable for logits of any finite size. Classes are the last axis (torch: the second). Raises ValueError where
    shapes or labels don't fit.
    """
    labels = numbers_in(labels)
    shape = labels.shape
    if len(shape) != 1:
        if logits.shape[:-1] != shape:
            raise ValueError(f"cross_entropy: logits {logits.shape}, labels {shape}: they must be (…, classes), (…)")
        logits, labels = ops.reshape(logits, (labels.size, logits.shape[-1])), labels.reshape(-1)
    if not on_host(labels):     # how many count is known to the GPU alone: all stay, and those ignored become 0
        if isinstance(labels, Placeholder):     # a compiled kernel does this on its way
            counted = labels != ignore_index
            logits = ops.where(counted[:, None], logits, 0.0)
            if reduction == "mean":
                backend.refuse(backend.xp.logical_not(counted.any()), ValueError(EMPTY))
            losses = ops.where(counted, ops.softmax_cross_entropy(logits, backend.xp.where(counted, labels, 0)), 0.0)
        else:
            losses = ops.softmax_cross_entropy(logits, labels, ignore_index)
        if reduction == "mean" and labels.size:
            return ops.sum(losses) / (labels != ignore_index).sum().astype(losses.dtype)
        return _reduced(losses if len(shape) == 1 or reduction != "none" else ops.reshape(losses, shape), reduction)
    counted = labels != ignore_index
    if counted.all():
        losses = ops.softmax_cross_entropy(logits, labels)
        return _reduced(losses if len(shape) == 1 or reduction != "none" else ops.reshape(losses, shape), reduction)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"cross_entropy: logits {logits.shape}, labels {shape}: they must be (…, classes), (…)")
    losses = ops.softmax_cross_entropy(logits[counted], labels[counted])
    if reduction == "none":
        return ops.reshape(ops.scatter_add(losses, counted, labels.shape), shape)
    return _reduced(losses, reduction)


def mse_loss(prediction, target, reduction="mean"):
    """(prediction - target)² over arrays of one shape; reduction as in cross_entropy."""
    if prediction.shape != lower(target).shape:
        raise ValueError(f"mse_loss: prediction {prediction.shape} and target {lower(target).shape} must have one "
                         "shape: broadcasting them would average the wrong pairs")
    difference = prediction - target
    return _reduced(difference * difference, reduction)
