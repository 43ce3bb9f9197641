"""The cross-entropy of 05.2 in other ways, and what its mistakes would give."""

import math

import numpy as np


def one_hot(case):
    return (case["labels"][:, None] == np.arange(case["logits"].shape[1])).astype(float)


def logs(case, axis=1):
    return case["logits"] - np.logaddexp.reduce(case["logits"], axis=axis, keepdims=True)


def probabilities(case, axis=1):
    return np.exp(logs(case, axis))


def entropy(case):
    """The right outputs, a row at a time, by logaddexp."""
    rows = zip(case["logits"], case["labels"], strict=True)
    return {"loss": math.fsum(np.logaddexp.reduce(row) - row[label] for row, label in rows),
            "gradient": probabilities(case) - one_hot(case)}


def scaled(case, factor):
    return {name: value * factor for name, value in entropy(case).items()}


def count(case):
    return max(len(case["labels"]), 1)


def mean_not_sum(case):
    return (f"the mean over the {count(case)} rows instead of the sum: who calls it divides by the number of samples "
            "of the global batch, so the mean would be taken twice")


def shifted_by(case, shift):
    """What comes of logits − shift without care for overflow, by the usual formulas."""
    with np.errstate(all="ignore"):
        moved = case["logits"] - shift
        exps = np.exp(moved)
        sums = exps.sum(axis=1, keepdims=True)
        right = moved[np.arange(len(moved)), case["labels"]]
        return {"loss": (np.log(sums[:, 0]) - right).sum(), "gradient": exps / sums - one_hot(case)}


def broken_rows(shift):
    """A predicate: the gradient is nan in just those rows that overflow or vanish after logits − shift(logits)."""
    def predicate(case, got):
        if not len(case["labels"]) or np.shape(got["gradient"]) != case["logits"].shape:
            return False
        with np.errstate(all="ignore"):
            sums = np.exp(case["logits"] - shift(case["logits"])).sum(axis=1)
        broken = ~np.isfinite(sums) | (sums == 0)
        return broken.any() and np.array_equal(np.isnan(got["gradient"]).any(axis=1), broken)
    return predicate


def right_gradient(case, got):
    return np.allclose(got["gradient"], entropy(case)["gradient"])


def number(value):
    """A loss as a float; nan for what is none."""
    return float(value) if np.ndim(value) == 0 and not isinstance(value, (str, type(None))) else math.nan
