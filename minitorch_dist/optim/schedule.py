"""Learning-rate schedules: functions of the step (from 0) that give a factor, and the object that applies one."""

import math

from ..torch_names import NAMES, tell


def constant():
    """Always 1."""
    return lambda step: 1.0


def cosine(total, warmup=0, final=0.0):
    """Rise linearly over `warmup` steps, then fall along half a cosine from 1 to `final` at step `total`.

    Source: Loshchilov & Hutter 2017, "SGDR".
    """
    if not 0 <= warmup < total:
        raise ValueError(f"cosine: warmup is {warmup} of {total} steps; it must be at least 0 and less than the total")

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / (total - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
    return factor


class LambdaLR:
    """lr = initial lr · lr_lambda(step), for every group; step() after each optimizer.step().

    A group's initial lr is the one that it has now. A run that goes on makes its schedule as at first, and then loads
    the optimizer's state, which has the lr of when it was saved, and calls go_to(steps).
    """

    def __init__(self, optimizer, lr_lambda):
        self.optimizer, self.lr_lambda, self.steps = optimizer, lr_lambda, 0
        self.initial = [group["lr"] for group in optimizer.param_groups]
        self._apply()

    def _apply(self):
        for group, lr in zip(self.optimizer.param_groups, self.initial, strict=True):
            group["lr"] = lr * self.lr_lambda(self.steps)

    def step(self):
        """Move on to the next step's rate."""
        self.go_to(self.steps + 1)

    def go_to(self, steps):
        """The rate after so many steps."""
        self.steps = steps
        self._apply()


tell(LambdaLR, NAMES["LambdaLR"])
