"""The cross-entropy of 16.4, whole, and what its mistakes would give."""

import numpy as np

from .tables import share


def whole(case):
    """(logits [rows, classes], labels) of all ranks."""
    return np.concatenate([rank["logits"] for rank in case], axis=1), case[0]["labels"]


def truth(case):
    """From the probabilities: row by row, by the differences to the label's logit."""
    logits, labels = whole(case)
    losses, grad = [], np.zeros_like(logits)
    for row, label in enumerate(labels):
        away = logits[row] - logits[row, label]
        top = away.max()
        losses.append(top + np.log(np.exp(away - top).sum()))
        grad[row] = np.exp(away - losses[-1])
        grad[row, label] = -np.exp(np.delete(away, label) - losses[-1]).sum()
    return outputs(case, [float(np.mean(losses))] * len(case), split(case, grad / len(labels)))


def split(case, grad):
    """A rank's columns of the gradient by all logits."""
    return [grad[:, share(grad.shape[1], rank, len(case))] for rank in range(len(case))]


def outputs(case, losses, grads):
    return [{"loss": loss, "grad": grad} for loss, grad in zip(losses, grads, strict=True)]


def total(values):
    return [sum(values)] * len(values)


def same(values):
    return values


def greatest(values):
    return [np.maximum.reduce(values)] * len(values)


def local(labels, first, own):
    """(rows whose label is this rank's, where it stands there)."""
    rows = np.flatnonzero((labels >= first) & (labels < first + own))
    return rows, labels[rows] - first


def all_rows(labels, first, own):
    return np.arange(len(labels))


def own_rows(labels, first, own):
    return local(labels, first, own)[0]


def above(labels, first, own):
    """Without the first class of each rank."""
    rows = np.flatnonzero((labels > first) & (labels < first + own))
    return rows, labels[rows] - first


def as_zero(labels, first, own):
    """Labels of other ranks are looked up at place 0."""
    return np.arange(len(labels)), np.where((labels >= first) & (labels < first + own), labels - first, 0)


def around(labels, first, own):
    """Labels of other ranks are looked up modulo the width."""
    return np.arange(len(labels)), (labels - first) % own


def around_below(labels, first, own):
    """The same of labels below the rank's classes; those above are known not to be its."""
    rows = np.flatnonzero(labels < first + own)
    return rows, (labels[rows] - first) % own


def by_width(case, width):
    """Labels looked up as if rank r's columns began at r times width(case, how many it has)."""
    starts = [share(case[0]["classes"], rank, len(case)).start for rank in range(len(case))]
    return lambda labels, first, own: local(labels, starts.index(first) * width(case, own), own)


def by_quotient(case):
    """… and as if each rank had classes//N of them: the last ones are nobody's."""
    starts, width = [share(case[0]["classes"], rank, len(case)).start for rank in range(len(case))], \
        case[0]["classes"] // len(case)
    return lambda labels, first, own: local(labels, starts.index(first) * width, width)


def without_first(labels, first, own):
    """Labels taken for numbers of this rank's columns."""
    rows = np.flatnonzero(labels < own)
    return rows, labels[rows]


@np.errstate(all="ignore")
def mistaken(case, maximum=greatest, sums=total, picks=total, pick=local, one_hot=None, unshifted=False, back=False,
             rows=True, added=same, mean=all_rows, grad_rows=all_rows):
    """What the ranks get with another function in a place.

    maximum, sums, picks  of all ranks' numbers per row; pick, one_hot: (rows, places) of labels, for loss and gradient
    unshifted             the maximum isn't added to the logarithm again;  back: the label's logit is shifted, and the
                          logarithm is not
    added                 of the maxima that were subtracted: what is added to the logarithm
    rows                  whether loss and gradient are divided by their number
    mean, grad_rows       the rows over which the loss is averaged, and by whose number the gradient is divided
    """
    parts, labels = [rank["logits"] for rank in case], case[0]["labels"]
    ranges = [share(case[0]["classes"], rank, len(case)) for rank in range(len(case))]
    tops = maximum([z.max(1) for z in parts])
    exps = [np.exp(z - top[:, None]) for z, top in zip(parts, tops, strict=True)]
    totals, found = sums([e.sum(1) for e in exps]), []
    for z, mine in zip(parts, ranges, strict=True):
        at, places = pick(labels, mine.start, z.shape[1])
        picked = np.zeros(len(labels))
        picked[at] = z[at, places]
        found.append(picked)
    losses, grads, tops = [], [], added(tops)
    for picked, sum_, top, e, mine in zip(picks(found), totals, tops, exps, ranges, strict=True):
        of_rows = (np.log(sum_) + (not unshifted) * top - picked + back * top)[mean(labels, mine.start, e.shape[1])]
        losses.append(float(np.sum(of_rows)) / (np.float64(len(of_rows)) if rows else 1))
        grad = e / sum_[:, None]
        at, places = (one_hot or pick)(labels, mine.start, e.shape[1])
        np.subtract.at(grad, (at, places), 1)
        grads.append(grad / (np.float64(len(grad_rows(labels, mine.start, e.shape[1]))) if rows else 1))
    return outputs(case, losses, grads)
