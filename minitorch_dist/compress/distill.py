"""Distillation: a student learns from a teacher's probabilities, which say more than labels do.

    teacher.eval()
    with mt.no_grad():
        targets = teacher(x)
    loss = distillation_loss(student(x), targets, 4.0, labels, alpha=0.9, reduction="sum") / batch.count

At a temperature T > 1 probabilities are softer: softmax(z/T) shows which wrong classes the teacher finds likely, and
which not. The gradient of the cross-entropy shrinks as 1/T² meanwhile, hence the factor T².

Source: Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network".
"""

import math

from ..autodiff import ops
from ..autodiff.custom import stop_gradient
from ..autodiff.modes import no_grad
from ..autodiff.primitive import lower
from ..backend import number
from ..nn.loss import cross_entropy


def distillation_loss(student_logits, teacher_logits, temperature=4.0, labels=None, alpha=None, reduction="mean"):
    """alpha · T² · CE(softmax(z_t/T), softmax(z_s/T)) + (1 - alpha) · cross_entropy(z_s, labels).

    student_logits, teacher_logits   (…, classes), of one shape; nothing flows into the teacher's
    temperature   T > 0
    labels        (…) integers, or None: the teacher alone is learned from. A label of -100 says nothing, and its loss
                  is 0; a mean counts it all the same
    alpha         the teacher's part, in [0, 1]; with labels it must be given, without it is 1
    reduction     "mean" over the samples, "sum", or "none" -> (…). In data-parallel training take the sum and divide
                  by the GLOBAL count, see nn.cross_entropy

    Stable as long as the logits' differences, over T, are finite. Its least value is not 0 but T² times the entropy of
    the teacher's probabilities. d/dz_s = alpha · T · (softmax(z_s/T) - softmax(z_t/T)) + …; for high T, and logits that
    are 0 on average over N classes, this is alpha · (z_s - z_t) / N. ValueError for what doesn't fit.
    """
    temperature, alpha = number(temperature), number(alpha)
    if student_logits.shape != teacher_logits.shape or not student_logits.shape:
        raise ValueError(f"distillation_loss: student's logits {student_logits.shape}, teacher's "
                         f"{teacher_logits.shape}: they must have one shape (…, classes)")
    if not 0 < temperature < math.inf:
        raise ValueError(f"distillation_loss: temperature={temperature}; it must be more than 0, and finite")
    if (labels is None) != (alpha is None):
        raise ValueError(f"distillation_loss: {'alpha without labels' if labels is None else 'labels without alpha'}: "
                         "alpha says how much the teacher counts beside the labels; give both, or neither")
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"distillation_loss: alpha={alpha}; the teacher's part must be in [0, 1]")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"distillation_loss: reduction {reduction!r}: use 'mean', 'sum' or 'none'")
    log_s = ops.log_softmax(student_logits / temperature)
    targets = ops.astype(ops.softmax(stop_gradient(teacher_logits) / temperature), log_s.dtype)
    losses = ops.sum(targets * log_s, axis=-1) * -temperature ** 2
    if labels is not None:
        losses = alpha * losses + (1 - alpha) * cross_entropy(student_logits, labels, "none")
    if reduction == "none":
        return losses
    if reduction == "mean" and not losses.size:
        raise ValueError("distillation_loss: the mean loss of an empty batch is undefined; use reduction='sum'")
    return ops.sum(losses) if reduction == "sum" else ops.mean(losses)


def loss_sum(teacher, temperature=4.0, alpha=1.0):
    """loss_sum(model, shard) for training.train_step: the sum of a shard's losses of a model that learns from teacher,
    a Module, which is asked in evaluation mode. alpha=1: the shard's labels are not looked at."""
    def of_shard(model, shard):
        teacher.eval()
        with no_grad():
            targets = lower(teacher(shard.inputs))
        labels = {} if alpha == 1 else {"labels": shard.labels, "alpha": alpha}
        return distillation_loss(model(shard.inputs), targets, temperature, **labels, reduction="sum")
    return of_shard
