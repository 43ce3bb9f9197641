"""Is the model the same on all ranks? Asked once, when it is wrapped, so that no gradient meets another's."""

import functools
import hashlib
import inspect
from operator import is_

import numpy as np

from .. import nn
from ..autodiff.primitive import lower
from ..autodiff.tensor import Tensor
from ..autodiff.writes import wrote
from ..backend import is_array, to
from ..nn.absent import Absent

LAYERS = nn.__name__ + "."
LIBRARY = nn.__name__.partition(".")[0] + "."
PLAIN = int, float, str, tuple          # what a setting is; arrays, modules and communicators aren't


def describe(module, settings, apart=()):
    """What has to be equal on all ranks, one line each: the settings, then nn's layers in their order, each with its
    parameters and buffers; which part of a whole parameter it is, too, but for those in `apart` (ids). What else a
    module has been given, and all that those of other classes hold, is their own affair, and may be different on each
    rank."""
    part = {id(getattr(m, name)): f", {indices.tolist()} of {extent} along axis {axis}" for m in module.modules()
            if getattr(type(m), "is_part", False) for name, (axis, indices, extent) in m.parts.items()}
    inside = {}
    for name, p in module.named_parameters():
        inside.setdefault(name.rpartition(".")[0], []).append(
            f"parameter {name!r}: {p.dtype} {list(p.shape)}{'' if p.requires_grad else ', frozen'}"
            + ("" if id(p) in apart else part.get(id(p), "")))
    for name, b in module.named_buffers():
        inside.setdefault(name.rpartition(".")[0], []).append(f"buffer {name!r}: {b.dtype} {list(b.shape)}")
    lines = [f"{name}={value!r}" for name, value in settings.items()]
    for path, m in module.named_modules():
        if layer_class(type(m)):
            lines.append(f"{path or 'the model'}: {type(m).__name__}({settings_of(m)})")
        lines += inside.pop(path, ())
    return lines + sum(inside.values(), [])


def settings_of(layer):
    """The settings of one of nn's layers, as text: Dropout's p, the heads of attention, how many experts a token
    chooses."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(vars(layer).items())
                     if isinstance(value, PLAIN) and is_setting(layer_class(type(layer)), name))


def layer_class(cls):
    """The class of nn's layers that a class of this library is, or is made of, as dropouts of parts of sequences are;
    None for others."""
    return next((base for base in cls.__mro__ if base.__module__.startswith(LAYERS) and base is not nn.Module
                 and cls.__module__.startswith(LIBRARY)), None)


@functools.cache
def is_setting(cls, name):
    """Whether an attribute of the class's instances is one: what its constructor is called with, or what the class has
    a default for."""
    return not name.startswith("_") and (name in inspect.signature(cls).parameters or hasattr(cls, name))


def broadcast(comm, array, name=None):
    """Make rank 0's values everybody's, in place; `name` of what isn't surely an array to be written."""
    if name is not None and not (is_array(array) and getattr(array.flags, "writeable", True)):
        kind = "read-only" if is_array(array) else f"a {type(array).__name__}, no array"
        raise ValueError(f"{name!r} is {kind}, and can't be broadcast to the other ranks: make it an array with "
                         "np.array(…)")
    in_order = array if array.flags.c_contiguous else array.copy(order="C")
    comm.broadcast(in_order, src=0)
    if in_order is not array:
        array[...] = in_order
    wrote(array, "the broadcast from rank 0")


def from_rank_0(comm, module, names):
    """Make these buffers of the module rank 0's. What is so already isn't written: backward of a forward before this
    one, as of another micro-batch, may want it."""
    buffers = dict(module.named_buffers()) if names else {}     # by name: assigning makes another array
    for name in names:
        array = lower(buffers[name])
        received = array.copy(order="C")
        broadcast(comm, received, name)
        if (array != received).any():
            array[...] = received
            wrote(array, "the broadcast from rank 0")


def check_same(comm, lines, problem, advice):
    """ValueError on every rank, with the first difference and who says what, unless all ranks have the same lines of
    text. problem, advice: what it begins and ends with. Collective."""
    if comm.size == 1:
        return
    digests = comm.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = comm.all_gather_object(lines)
    at = next(i for i in range(max(map(len, everyone))) if len({tuple(said[i:i + 1]) for said in everyone}) > 1)
    versions = {}
    for rank, said in enumerate(everyone):
        versions.setdefault(said[at] if at < len(said) else "nothing more", []).append(rank)
    told = [f"    rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {what}" for what, who in versions.items()]
    raise ValueError("\n".join([f"{problem}; the first difference:", *told, advice]))


def agreed(comm, look, problem, advice):
    """What look() has found, of (found, lines); ValueError on all ranks, as check_same's, unless all have the same
    lines. Where it raises on some, its error there, and a ValueError that tells it on the others. Collective."""
    found, lines, failure = None, [], None
    try:
        found, lines = look()
    except (TypeError, ValueError, RuntimeError) as error:
        failure = error
    everyone = comm.all_gather_object(failure and str(failure))
    if failure:
        raise failure
    for rank, error in enumerate(everyone):
        if error:
            raise ValueError(f"rank {rank}: {error}")
    check_same(comm, lines, problem, advice)
    return found


def told(name, p, lies=""):
    """What has to be the same of a parameter, or a buffer, on all ranks that are to cut it; its values too, unless they
    are absent. lies: how it lies on them."""
    array = lower(p)
    values = "" if isinstance(array, Absent) else f", values {digest(array)[:8]}"
    frozen = ", frozen" if isinstance(p, Tensor) and not p.requires_grad else ""
    return f"{name}: {lies}{array.dtype} {list(array.shape)}{frozen}{values}"


def digest(array):
    """SHA-256 of an array's values."""
    return hashlib.sha256(np.ascontiguousarray(to(array, "cpu")).reshape(-1).view(np.uint8)).hexdigest()


def check_same_model(module, comm, wrapper="DistributedDataParallel", apart=(), **settings):
    """check_same, of parameters (names, order, shapes, dtypes, which are frozen), buffers, the layers' settings and
    these settings. Collective."""
    check_same(comm, describe(module, settings, apart), f"{wrapper}: the ranks have wrapped different models",
               "Build the model from the same settings on all ranks (their values may differ: rank 0's are broadcast); "
               "one that is cut over some ranks is wrapped for those that hold the same part.")


def tables(module):
    """[(path, a module's table of parameters or of modules, what is in it)], to be compared by check_unchanged."""
    return [(path, table, list(table.values())) for path, m in module.named_modules()
            for table in (m._parameters, m._modules)]


def check_unchanged(frozen, tree):
    """RuntimeError if the model isn't what was wrapped. frozen: [(name, parameter)] of then; tree: its tables()."""
    if thawed := [name for name, p in frozen if p.requires_grad]:
        raise RuntimeError(f"{', '.join(thawed)}: frozen when the model was wrapped, and wants a gradient now, "
                           "which nobody would reduce: wrap the model while all that will be trained requires grad")
    for path, table, values in tree:
        if len(table) != len(values) or values and not all(map(is_, table.values(), values)):
            raise exchanged(path, table, values)


def exchanged(path, table, values):
    """The error for a module whose `table` {name: parameter or module} doesn't hold `values` any more."""
    old = {id(value) for value in values}
    new = [name for name, value in table.items() if id(value) not in old]
    what = f"{', '.join(new)} is new" if new else f"it has {', '.join(table) or 'nothing'} left"
    return RuntimeError(f"{path or 'the model'} was changed after it was wrapped ({what}), and the wrapper reduces the "
                        "gradients of the parameters that it was given: wrap the model when it is complete. To change "
                        "values, write to a parameter under no_grad()")
