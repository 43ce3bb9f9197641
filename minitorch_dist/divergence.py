"""A training whose loss is a number no more: it ends at once, and keeps what it has.

    step 3: the loss is nan, at a learning rate of 1e+10: the training has diverged. Try a smaller learning rate, …

The loss that is looked at is the global batch's, equal on all ranks, so that all end in the same step, without a
message. training.train_step looks by itself; loops without it call `check`.
"""

import math
import sys
from contextlib import contextmanager

from .backend import xp


class Diverged(ValueError):
    """A loss, or a norm of gradients, is inf or NaN, on all ranks."""


def check(loss, step, optimizer=None, scaler=None, learned=None):
    """Diverged unless the loss of step number `step`, counted from 1, is finite.

    optimizer  whose learning rate is told, None where this rank has none
    scaler     a GradScaler: beyond float16's range a loss may be inf, and the step was left out, or will be
    learned    whether there was a step before: where `step` counts rounds of several; None: there was unless it is 1
    """
    if math.isfinite(loss) or math.isinf(loss) and scaler is not None and scaler.enabled:
        return
    rate = "" if optimizer is None else f", at a learning rate of {max(g['lr'] for g in optimizer.param_groups):g}"
    first = step == 1 if learned is None else not learned
    why = ("nothing has been learned yet: look for inf and NaN in the data and in the initial values" if first else
           "the training has diverged. Try a smaller learning rate, a longer warmup, gradients clipped to a norm")
    raise Diverged(f"step {step:,}: the loss is {loss}{rate}: {why}")


def quiet():
    """A context in which NumPy doesn't warn of inf and NaN: the loss, or a scaler, tells of those that matter."""
    return xp.errstate(over="ignore", invalid="ignore", divide="ignore")


@contextmanager
def ends(world=None):
    """Around a program's training: where it diverges, one line from rank 0, and status 1. None: one process alone."""
    try:
        yield
    except Diverged as error:
        if world is None or world.rank == 0:
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(1) from error
