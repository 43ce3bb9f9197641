"""Learning-rate schedules: functions of the step (from 0) that give a factor, and the object that applies one."""

import math
from numbers import Real

from ..torch_names import NAMES, tell
from .settings import AT_LEAST_0, check_settings, holds


def constant(warmup=0):
    """Rise linearly over `warmup` steps, then 1."""
    _check_numbers("constant", warmup=warmup)
    return _warmed("constant", math.inf, warmup, lambda step: 1.0)


def cosine(total, warmup=0, final=0.0):
    """Rise linearly over `warmup` steps, then fall along half a cosine from 1 to `final` at step `total`.

    Source: Loshchilov & Hutter 2017, "SGDR".
    """
    _check_numbers("cosine", total=total, warmup=warmup, final=final)
    return _warmed("cosine", total, warmup, lambda step: final + (1 - final) * 0.5 * (
        1 + math.cos(math.pi * _share(step, warmup, total))))


def linear(total, warmup=0, final=0.0):
    """Rise linearly over `warmup` steps, then fall along a line from 1 to `final` at step `total`.

    Source: Defazio et al. 2023, "Optimal linear decay learning rate schedules and further refinements".
    """
    _check_numbers("linear", total=total, warmup=warmup, final=final)
    return _warmed("linear", total, warmup, lambda step: final + (1 - final) * (1 - _share(step, warmup, total)))


def warmup_stable_decay(total, warmup=0, decay=None, final=0.0):
    """Rise linearly over `warmup` steps, stay at 1, and fall over the last `decay` ones to `final` at step `total`, as
    1 less the square root of their share. Default: a fifth of all steps, and not those that rise.

    Until the fall the rates don't depend on `total`: what is trained there may be ended at any time, and a longer run
    go on from it. Sources: Hu et al. 2024, "MiniCPM"; of the root Hägele et al. 2024, "Scaling laws and
    compute-optimal training beyond fixed training durations".
    """
    _check_numbers("warmup_stable_decay", total=total, warmup=warmup, final=final,
                   decay=0 if decay is None else decay)
    if decay is None:
        decay = min(math.ceil(total / 5), total - warmup)
    if not 0 < decay <= total - max(0, warmup):
        raise ValueError(f"warmup_stable_decay: decay is {decay} and warmup {warmup} of {total} steps; it must be more "
                         "than 0, and both together no more than the total")
    return _warmed("warmup_stable_decay", total, warmup, lambda step: final + (1 - final) * (
        1 - math.sqrt(_share(step, total - decay, total))))


def _check_numbers(name, **given):
    for what, value in given.items():
        if not isinstance(value, Real):
            raise TypeError(f"{name}: {what} is {value!r}; it must be a number")


def _warmed(name, total, warmup, after):
    """The factor: a rise over `warmup` steps, then after(step)."""
    if not 0 <= warmup < total:
        raise ValueError(f"{name}: warmup is {warmup} of {total} steps; it must be at least 0 and less than the total")
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


def _share(step, begin, end):
    """Of a stretch of steps those that are through, 0 to 1."""
    return min(1.0, max(0.0, (step - begin) / (end - begin)))


# As programs name them: of (total, warmup, final).
SCHEDULES = {"cosine": cosine, "linear": linear,
             "wsd": lambda total, warmup=0, final=0.0: warmup_stable_decay(total, warmup, final=final),
             "constant": lambda total, warmup=0, final=0.0: constant(warmup)}


class LambdaLR:
    """lr = initial lr · lr_lambda(step), for every group; step() after each optimizer.step().

    A group's initial lr is the one that it has now. A run that goes on makes its schedule as at first, and then loads
    the optimizer's state, which has the lr of when it was saved, and calls go_to(steps). RuntimeError where the state
    has been loaded before. ValueError for a factor below 0, and for NaN.
    """

    def __init__(self, optimizer, lr_lambda):
        if not callable(lr_lambda) or not hasattr(optimizer, "param_groups"):
            raise TypeError("LambdaLR takes an optimizer, and one function of the step for all of its groups; got "
                            f"{type(optimizer).__name__} and {type(lr_lambda).__name__}")
        if getattr(optimizer, "loaded", False):
            raise RuntimeError(f"LambdaLR: the optimizer's state has been loaded, and its lr, {optimizer.lr:g}, is "
                               "that of when it was saved, not the initial one: make the schedule before, and "
                               "afterwards call go_to(steps), or go_to(0) for a new one")
        self.optimizer, self.lr_lambda, self.steps = optimizer, lr_lambda, 0
        self.initial = [group["lr"] for group in optimizer.param_groups]
        self._apply()

    def _apply(self):
        factor = self.lr_lambda(self.steps)
        check_settings(**{f"lr_lambda({self.steps})": (factor, holds(AT_LEAST_0[0], factor, None), AT_LEAST_0[1])})
        for group, lr in zip(self.optimizer.param_groups, self.initial, strict=True):
            group["lr"] = lr * factor

    def step(self):
        """Move on to the next step's rate."""
        self.go_to(self.steps + 1)

    def go_to(self, steps):
        """The rate after so many steps."""
        self.steps = steps
        self._apply()


tell(LambdaLR, NAMES["LambdaLR"])
