"""Faults on purpose, to see what becomes of them: what MINITORCH_FAULT says is done in the steps of training programs.

    MINITORCH_FAULT="kill rank=1 step=30 restart=0; sleep rank=3 seconds=0.05"

kills rank 1 in step 30 unless the job was started again before (supervise/), and slows rank 3 in every step. `rank`,
`step` (from 1 on) and `restart` say where; one that isn't given is any. FAULTS has the kinds, and what else each
takes. A program refuses at its start what can't strike in its run, and says at the end what hasn't (checks.py).
"""

import math
import os
import signal
import time
from typing import NamedTuple

from . import attempt
from .autodiff.primitive import lower
from .backend import xp

VARIABLE = "MINITORCH_FAULT"
WHERE = ("rank", "step", "restart")
LEAST = {"step": 1, "share": float("-inf")}     # of the numbers; 0 of all others

struck = set()      # the faults, as text, that have struck this rank in the run under way


class Fault(NamedTuple):
    """One fault: {name: number} of where it strikes, and of what else its kind takes."""

    kind: str
    where: dict
    options: dict

    def __str__(self):
        return " ".join([self.kind, *(f"{name}={value}" for name, value in {**self.where, **self.options}.items())])


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
    _turn_over(_chosen(model, parameter, element, bit), element, bit)


def flip_gradient(model, parameter=0, element=0, bit=20):
    """One bit of a gradient turns over, after the gradients were reduced and before the optimizer takes them."""
    grad = _chosen(model, parameter, element, bit).grad
    if grad is None:
        raise ValueError(f"{VARIABLE}: parameter={parameter} has no gradient in this step")
    _turn_over(grad, element, bit)


def miscompute(loss, share=1e-3):
    """Forward is wrong by this share of the loss, and so is each gradient, before they are summed over the ranks."""
    return loss * (1 + share)


def _chosen(model, parameter=0, element=0, bit=20):
    """The parameter. ValueError where there is none of that number, or it has no such element or bit. model: a module,
    or a list of parameters."""
    parameters = list(model.parameters() if hasattr(model, "parameters") else model)
    _within("parameter", parameter, len(parameters), "of the model on this rank")
    p = parameters[parameter]
    _within("element", element, p.size, f"of parameter={parameter}")
    _within("bit", bit, 8 * p.dtype.itemsize, f"of {p.dtype}")
    return p


def _within(name, value, count, whose):
    if value >= count:
        raise ValueError(f"{VARIABLE}: {name}={value}: {whose} there are {count:,}")


def _turn_over(tensor, element, bit):
    array = lower(tensor)
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    bits[element] ^= xp.asarray(1 << bit, bits.dtype)


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
        if name in values:
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {name} is given twice; for two faults put ; between them")
        try:
            values[name] = float(value) if name in ("seconds", "share") else int(value)
        except ValueError:
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {name} needs a number, as in {name}=1") from None
        if name not in known:
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {kind} takes {', '.join(known)}, not {name!r}")
        if not (math.isfinite(values[name]) and values[name] >= LEAST.get(name, 0)):
            raise ValueError(f"{VARIABLE}: {text.strip()!r}: {name} must be finite, and at least "
                             f"{LEAST.get(name, 0)}")
    return Fault(kind, {name: values[name] for name in WHERE if name in values},
                 {name: value for name, value in values.items() if name not in WHERE})


def of_step(world, step):
    """strike(when, subject), for this rank's step of this number: does what is planned for the moment, and returns the
    subject, or what has become of it. These are the model (or a list of parameters) at the "begin" of the step and when
    gradients are "reduced", a loss that was "computed"."""
    due = [fault for fault in planned() if _is_of(fault, world, step)]
    if not due:
        return _untouched

    def strike(when, subject):
        for fault in due:
            moment, do, _ = FAULTS[fault.kind]
            if moment == when:
                struck.add(str(fault))
                changed = do(subject, **fault.options)
                subject = subject if changed is None else changed
        return subject
    return strike


def _is_of(fault, world, step):
    here = {"rank": world.world_ranks[world.rank], "step": step, "restart": attempt.restarts()}
    return all(here[name] == value for name, value in fault.where.items())


def _untouched(when, subject):
    return subject


def refuse(world, model, steps):
    """ValueError on all ranks for faults that can't strike in a run of so many steps. In a job that was started again
    nothing is refused: they may have struck before. Collective."""
    found = [why for fault in planned() if (why := _never(fault, world, model, steps))]
    if found := dict.fromkeys(why for part in world.all_gather_object(found) for why in part):
        raise ValueError("\n".join(found))


def _never(fault, world, model, steps):
    """Why a fault can't strike, as far as this rank knows; None where it can."""
    where = fault.where
    if where.get("restart") and not attempt.is_supervised():
        return f"{VARIABLE}: {fault}: nobody starts this job again; under minitorch-dist supervise it is"
    if attempt.restarts() or where.get("restart"):
        return None
    here, ranks = world.world_ranks[world.rank], world.world_ranks
    if where.get("rank", here) not in ranks:
        return f"{VARIABLE}: {fault}: the ranks are {ranks[0]} to {ranks[-1]}"
    if where.get("step", steps) > steps:
        return f"{VARIABLE}: {fault}: the run ends with step {steps:,}"
    if "parameter" in FAULTS[fault.kind][2] and where.get("rank", here) == here:
        try:
            _chosen(model, **fault.options)
        except ValueError as error:
            return str(error)
    return None


def spared(world, first):
    """[Fault] that have struck no rank, at the end of a run that began after step `first`; without those that may have
    struck in an earlier start of the job. Collective."""
    everywhere, now = set().union(*world.all_gather_object(struck)), attempt.restarts()

    def is_of_before(where):
        return where["restart"] < now if "restart" in where else now and where.get("step", first) <= first
    return [fault for fault in planned() if str(fault) not in everywhere and not is_of_before(fault.where)]
