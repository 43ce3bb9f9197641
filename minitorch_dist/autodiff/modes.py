"""Modes of recording: no_grad, enable_grad, saved_tensors_hooks, detect_anomaly.

Each is a context manager for this thread, and a decorator.
"""

from contextlib import contextmanager

from .. import ledger
from .primitive import mode, state


@contextmanager
def no_grad():
    """Record nothing. A transform (grad, vjp, …) begun inside still differentiates."""
    with mode(off=state.level):
        yield


@contextmanager
def enable_grad():
    """Record again, inside of no_grad."""
    with mode(off=-1):
        yield


def is_recomputing():
    """Whether a checkpointed segment is being run for the second time: what counts its calls, like running statistics,
    must not count this one."""
    return state.again


def as_at_first(make):
    """make(); where a checkpointed segment is being run for the second time, what it made in the first run: for what is
    read from outside and moves with each forward, like a range that is learnt."""
    return make() if state.notes is None else state.notes.note(make)


def is_grad_enabled():
    """Whether ops on tensors are being recorded here."""
    return state.off < state.level


@contextmanager
def saved_tensors_hooks(pack, unpack):
    """Ops recorded inside keep pack(array) instead of each array that backward needs, and backward works on
    unpack(packed): to compress, or to offload to disk. What a rule by hand keeps, and its arguments, go there too; what
    checkpoints keep is left as it is."""
    with mode(pack=(pack, unpack)):
        yield


@contextmanager
def detect_anomaly():
    """Raise FloatingPointError where an op makes inf or NaN out of finite inputs, in forward (at once) or in
    backward (of ops recorded inside), naming the op and the line that called it. Slow: for debugging."""
    with mode(anomaly=True):
        yield


@contextmanager
def count_kept_bytes():
    """Tell the ledger of every array that differentiation keeps: what ledger.record(memory=True) turns on."""
    with mode(counting=True):
        yield


ledger.watch_tape = count_kept_bytes     # the ledger lies below, and can't ask for it
