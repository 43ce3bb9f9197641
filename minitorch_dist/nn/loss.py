"""Losses. Their arguments' shapes must be equal: broadcasting a loss is always a mistake."""

from .. import backend
from ..autodiff import ops
from ..autodiff.lists import taking_lists
from ..autodiff.ops.elementwise import floats, narrow, wide
from ..autodiff.ops.indexing import numbers_in
from ..autodiff.primitive import lower
from ..backend import Placeholder, on_host, to_device_of
from ..backend.tiled_cross_entropy import counted_labels

IGNORED = -100      # ignore_index, as in torch
EMPTY = "the mean loss of an empty batch, or where all labels are ignored, is undefined; use reduction='sum'"


def _array(target, beside):
    """A target as it is; a list, or a number, as an array of the other's dtype, where that is."""
    return target if hasattr(lower(target), "shape") else to_device_of(backend.xp.asarray(target, beside.dtype),
                                                                       lower(beside))


def _reduced(losses, reduction):
    if reduction == "none":
        return losses
    if reduction == "sum":
        return ops.sum(losses)
    if reduction != "mean":
        raise ValueError(f"reduction {reduction!r}: use 'mean', 'sum' or 'none'")
    if not losses.size:
        raise ValueError(EMPTY)
    return ops.mean(losses)


@taking_lists
def cross_entropy(logits, labels, reduction="mean", ignore_index=IGNORED, label_smoothing=0.0, z_loss=0.0):
    """-log softmax(logits)[label]: logits (…, classes), labels (…) integers.

    reduction     "mean" over the labels that count, "sum", or "none" -> (…), 0 where ignored.
                  In data-parallel training take the sum and divide by the GLOBAL count: the mean of
                  ranks' means is wrong as soon as the ranks hold different numbers of samples.
    ignore_index  labels with this number count for nothing
    label_smoothing  from 0 to 1: this part of each label is spread evenly over all classes (Szegedy et al. 2016), and
                  the loss is -Σ target · log softmax(logits) of such targets
    z_loss        so many times log² Σ exp(logits) is added to each loss, say 1e-4: it holds the sum near 1, while
                  logits could drift until training is unstable (Chowdhery et al. 2022, "PaLM", 5)
    Stable for logits of any finite size. Classes are the last axis (torch: the second). Raises ValueError where
    shapes or labels don't fit.
    """
    def of_labels(x, labels):
        return ops.take_along_axis(x, labels[:, None], 1)[:, 0]
    losses = with_more(ops.softmax_cross_entropy, of_labels, lambda x: ops.mean(x, 1), label_smoothing, z_loss)
    return by_labels(losses, logits, labels, reduction, ignore_index,
                     lambda shapes: f"cross_entropy: logits {shapes}: they must be (…, classes), (…)")


@taking_lists
def linear_cross_entropy(x, weight, labels, reduction="mean", ignore_index=IGNORED, label_smoothing=0.0, z_loss=0.0):
    """cross_entropy(linear(x, weight), labels), the logits of which never exist as a whole: x (…, in), weight (classes,
    in), labels (…) integers; see ops.linear_cross_entropy for what it keeps and costs, and cross_entropy for the rest.
    """
    def losses(x, labels, ignore=None):
        return ops.linear_cross_entropy(x, weight, labels, ignore)

    def of_labels(x, labels):
        return ops.sum(x * weight[labels], 1)
    losses = with_more(losses, of_labels, lambda x: ops.sum(x * ops.mean(weight, 0), 1), label_smoothing, z_loss)
    return by_labels(losses, x, labels, reduction, ignore_index, lambda shapes: f"linear_cross_entropy: x {shapes}, "
                     f"weight {tuple(weight.shape)}: they must be (…, in), (…), (classes, in)")


def smoothing(part):
    """A loss's label_smoothing as a float. ValueError unless it is from 0 to 1."""
    if not 0.0 <= part <= 1.0:
        raise ValueError(f"label_smoothing={part}: it is the part of each label that is spread over all classes, from "
                         "0 to 1")
    return float(part)


def weighted(z_loss):
    """A loss's z_loss as a float. ValueError for what is no weight."""
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss={z_loss}: it is the weight of log² Σ exp(logits), 0 or more, say 1e-4")
    return float(z_loss)


def wants_logits(targets, z_loss):
    """Whether a model that may be given targets is given none. ValueError for a z-loss, which is added to losses."""
    if targets is None and z_loss:
        raise ValueError(f"z_loss={z_loss} of a model without targets, which gives logits: give it to "
                         "cross_entropy(logits, labels, z_loss=…), or the targets to the model")
    return targets is None


def with_more(losses_of, of_labels, mean, label_smoothing, z_loss):
    """losses_of, and what label smoothing and the z-loss add: of_labels(x, labels) (n,) are the labels' logits, mean(x)
    (n,) those of all classes."""
    part, weight = smoothing(label_smoothing), weighted(z_loss)
    if not (part or weight):
        return losses_of

    def losses(x, labels, ignore=None):
        sharp = losses_of(x, labels, ignore)        # first: it looks at what the labels are
        counted, labels = counted_labels(to_device_of(labels, lower(x)), ignore)
        right, more = of_labels(x, labels), 0.0
        if part:        # of a target the spread part has the mean logit in the place of the label's
            more = (right - mean(x)) * part
        if weight:      # a loss is log Σ exp(logits) less the label's: the sum over the classes is known already
            more = more + ops.astype(ops.square(wide(sharp + right)) * weight, sharp.dtype)
        return sharp + (more if counted is None else ops.where(counted, more, 0.0))
    return losses


def by_labels(losses_of, x, labels, reduction, ignore_index, misfit):
    """The losses of rows of x (…, size), reduced. losses_of(x, labels, ignore=None) takes (n, size) and (n,)."""
    labels = numbers_in(labels)
    shape = labels.shape
    if not x.shape or x.shape[:-1] != shape:
        raise ValueError(misfit(f"{tuple(x.shape)}, labels {tuple(shape)}"))
    if len(shape) != 1:
        x, labels = ops.reshape(x, (labels.size, x.shape[-1])), labels.reshape(-1)
    if not on_host(labels):     # how many count is known to the GPU alone: all stay, and those ignored become 0
        if isinstance(labels, Placeholder):     # a compiled kernel does this on its way
            counted = labels != ignore_index
            x = ops.where(counted[:, None], x, 0.0)
            if reduction == "mean":
                backend.refuse(backend.xp.logical_not(counted.any()), ValueError(EMPTY))
            losses = ops.where(counted, losses_of(x, backend.xp.where(counted, labels, 0)), 0.0)
        else:
            losses = losses_of(x, labels, ignore_index)
        if reduction == "mean" and labels.size:
            total = ops.sum(wide(losses))       # as ops.mean adds them
            return ops.astype(total / (labels != ignore_index).sum().astype(total.dtype), losses.dtype)
        return _reduced(losses if len(shape) == 1 or reduction != "none" else ops.reshape(losses, shape), reduction)
    counted = labels != ignore_index
    if counted.all():
        losses = losses_of(x, labels)
        return _reduced(losses if len(shape) == 1 or reduction != "none" else ops.reshape(losses, shape), reduction)
    losses = losses_of(x[counted], labels[counted])
    if reduction == "none":
        return ops.reshape(ops.scatter_add(losses, counted, labels.shape), shape)
    return _reduced(losses, reduction)


def log_sigmoid(x):
    """log(1 / (1 + exp(-x))), which doesn't underflow; at 0, where a router of zeros is, with all its derivatives."""
    x = floats(x)
    positive = ops.greater_equal(x, 0.0)
    return ops.where(positive, 0.0, x) - ops.log1p(ops.exp(ops.where(positive, -x, x)))


@taking_lists
def binary_cross_entropy_with_logits(logits, targets, reduction="mean"):
    """-(t · log σ(z) + (1 - t) · log(1 - σ(z))) over logits z and targets t from 0 to 1, arrays of one shape; reduction
    as in cross_entropy. Stable for logits of any finite size."""
    logits = floats(logits)
    targets = _array(targets, logits)
    if logits.shape != lower(targets).shape:
        raise ValueError(f"binary_cross_entropy_with_logits: logits {tuple(logits.shape)} and targets "
                         f"{tuple(lower(targets).shape)} must have one shape: broadcasting would pair the wrong ones")
    targets = ops.astype(targets, logits.dtype)
    return _reduced(logits * (1.0 - targets) - log_sigmoid(logits), reduction)


@taking_lists
def mse_loss(prediction, target, reduction="mean"):
    """(prediction - target)² over arrays of one shape; reduction as in cross_entropy. Of 16 bits in float32,
    rounded once."""
    target = _array(target, prediction)
    if prediction.shape != lower(target).shape:
        raise ValueError(f"mse_loss: prediction {prediction.shape} and target {lower(target).shape} must have one "
                         "shape: broadcasting them would average the wrong pairs")
    if prediction.dtype.kind in "iub" and lower(target).dtype.kind in "iub":    # squares of few bits would overflow
        prediction = ops.astype(prediction, backend.xp.float64)
    difference = prediction - target
    squares = wide(difference)
    return narrow(_reduced(squares * squares, reduction), difference.dtype)
