"""Faults on purpose, to see what becomes of them: what MINITORCH_FAULT says is done in training.train_step.

    MINITORCH_FAULT="kill rank=1 step=30 restart=0; sleep rank=3 seconds=0.05"

kills rank 1 in step 30 unless the job was started again before (supervise/), and slows rank 3 in every step. `rank`,
`step` (from 1 on) and `restart` say where; one that isn't given is any. FAULTS has the kinds, and what else each
takes.
"""

import os
import signal
import time
from typing import NamedTuple

from . import attempt
from .autodiff.primitive import lower
from .backend import xp

VARIABLE = "MINITORCH_FAULT"
WHERE = ("rank", "step", "restart")


class Fault(NamedTuple):
    """One fault: {name: number} of where it strikes, and of what else its kind takes."""

    kind: str
    where: dict
    options: dict

    def __str__(self):
        return " ".join([self.kind, *(f"{name}={value:g}" for name, value in {**self.where, **self.options}.items())])


def kill(model):
    """As the system kills, or a machine that loses its power: no Python runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(model):
    """An error of this rank's own."""
    raise RuntimeError(f"a fault on purpose, by {VARIABLE}")


def sleep(model, seconds=0.1):
    """A rank that is slow: it computes for longer."""
    time.sleep(seconds)


def flip(model, parameter=0, element=0, bit=20):
    """One bit of a parameter turns over, before the step."""
    _turn_over(lower(list(model.parameters())[int(parameter)]), element, bit)


def flip_gradient(model, parameter=0, element=0, bit=20):
    """One bit of a gradient turns over, after the gradients were reduced and before the optimizer takes them."""
    _turn_over(lower(list(model.parameters())[int(parameter)].grad), element, bit)


def miscompute(loss, share=1e-3):
    """Forward is wrong by this share of the loss, and so is each gradient, before they are summed over the ranks."""
    return loss * (1 + share)


def _turn_over(array, element, bit):
    width = 8 * array.dtype.itemsize
    if not 0 <= bit < width:
        raise ValueError(f"{VARIABLE}: bit {bit:g} of {array.dtype}, which has bits 0 to {width - 1}")
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    bits[int(element)] ^= xp.asarray(1 << int(bit), bits.dtype)


# kind -> (when in a step, what is done, what it takes)
FAULTS = {
    "kill": ("begin", kill, ()),
    "fail": ("begin", fail, ()),
    "sleep": ("begin", sleep, ("seconds",)),
    "flip": ("begin", flip, ("parameter", "element", "bit")),
    "miscompute": ("computed", miscompute, ("share",)),
    "flip-gradient": ("reduced", flip_gradient, ("parameter", "element", "bit")),
}


def planned():
    """[Fault] that MINITORCH_FAULT asks for. ValueError where it can't be read."""
    text = os.environ.get(VARIABLE, "")
    return [_read(one) for one in text.split(";") if one.strip()] if text else []


def _read(text):
    kind, *pairs = text.split()
    if kind not in FAULTS:
        raise ValueError(f"{VARIABLE}: {kind!r} is no fault; one of {', '.join(FAULTS)}")
    values = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        known = (*WHERE, *FAULTS[kind][2])
        try:
            values[name] = float(value) if name in ("seconds", "share") else int(value)
        except ValueError:
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {name} needs a number, as in {name}=1") from None
        if name not in known:
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {kind} takes {', '.join(known)}, not {name!r}")
    return Fault(kind, {name: values[name] for name in WHERE if name in values},
                 {name: value for name, value in values.items() if name not in WHERE})


def strike(when, world, step, subject):
    """Do what is planned for this moment to this rank, and return the subject, or what has become of it: the model at
    the "begin" of a step and when gradients are "reduced", a loss that was "computed"."""
    for fault in planned():
        moment, do, _ = FAULTS[fault.kind]
        here = {"rank": world.world_ranks[world.rank], "step": step, "restart": attempt.restarts()}
        if moment == when and all(here[name] == value for name, value in fault.where.items()):
            changed = do(subject, **fault.options)
            subject = subject if changed is None else changed
    return subject
