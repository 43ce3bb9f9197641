"""Which modules a plan of parallelize_module means, whether they can be cut so, and what all ranks must agree on before
(tensor_parallel.py)."""

import collections
import fnmatch

from ...nn.containers import Sequential
from ...nn.layers import GELU, Dropout, LeakyReLU, Linear, ReLU, Sigmoid, SwiGLU, Tanh
from ..same_model import told
from . import sequence_parallel as sequences

CUT_BY_HEADS = ("qkv", "q", "kv", "project", "out")
ACTIVATIONS = (GELU, LeakyReLU, ReLU, Sigmoid, Tanh)      # of each feature by itself


def chosen_by(plan, modules, ways, sequence_parallel):
    """{path: way} of {pattern: way}. ValueError where a pattern meets nothing, a way is unknown or a module is cut
    already; TypeError where it doesn't fit the module. ways: tensor_parallel.WAYS."""
    chosen = {}
    for pattern, way in plan.items():
        if way in (sequences.WAY, sequences.WHOLE) and not sequence_parallel:
            raise ValueError(f"parallelize_module: {pattern!r}: {way!r} needs sequence_parallel=True")
        if way not in ways:
            raise ValueError(f"parallelize_module: {pattern!r}: {way!r} is unknown; one of {', '.join(ways)}")
        found = [path for path in modules if path and fnmatch.fnmatchcase(path, pattern)]
        if not found:
            raise ValueError(f"parallelize_module: {pattern!r} meets no module; there are "
                             f"{', '.join(filter(None, modules))}")
        for path in found:
            if not isinstance(modules[path], ways[way][0]):
                raise TypeError(f"parallelize_module: {path} is a {type(modules[path]).__name__}; {way!r} cuts a "
                                f"{ways[way][0].__name__}")
        chosen |= dict.fromkeys(found, way)
    for path, way in chosen.items():
        parts = [m for m in modules[path].modules() if getattr(type(m), "is_part", False)]
        if parts and way not in ("experts", sequences.WHOLE):       # "experts" says so itself
            raise ValueError(f"parallelize_module: {path} is cut already, over {parts[0].comm.name!r}: a module is cut "
                             "once, over all ranks that are to share it")
        if way == "heads" and (other := [f"{path}.{name}" for name, m in modules[path]._modules.items()
                                         if name in CUT_BY_HEADS and not isinstance(m, Linear)]):
            raise TypeError(f"parallelize_module: {other[0]} is a {type(modules[other[0]]).__name__}; 'heads' cuts "
                            "Linears: cut the model first, then exchange its layers (lora.add, low_precision)")
        behind = _behind(modules, path)
        if way == "column, gated" and isinstance(behind, ACTIVATIONS):
            raise ValueError(f"parallelize_module: {path} is before a {type(behind).__name__}, and makes no gate: its "
                             "way is 'column'")
        if way == "column" and isinstance(behind, SwiGLU):
            raise ValueError(f"parallelize_module: {path} makes a gate and what passes it, side by side: its way is "
                             "'column, gated'")
    return chosen


def _behind(modules, path):
    """The layer behind this one in its Sequential, but for dropouts; None where there is none."""
    parent, _, name = path.rpartition(".")
    layers = modules[parent]._modules
    after = list(layers.values())[list(layers).index(name) + 1:] if isinstance(modules[parent], Sequential) else []
    return next((layer for layer in after if not isinstance(layer, Dropout)), None)


def check_separate(modules, chosen):
    """ValueError where a module that is to be cut is inside of another one, or shares a parameter with one that isn't
    to be cut."""
    for path in chosen:
        if inner := [other for other in chosen if other.startswith(f"{path}.")]:
            raise ValueError(f"parallelize_module: {path} and {', '.join(inner)} inside of it both stand in the plan: "
                             "leave one out")
    owners = collections.defaultdict(set)
    for path, owner in modules.items():
        for p in owner._parameters.values():
            owners[id(p)].add(path)
    for path in chosen:
        for p in modules[path].parameters():
            if others := {o for o in owners[id(p)] if o != path and not o.startswith(f"{path}.")}:
                raise ValueError(f"parallelize_module: {path} shares a parameter with {', '.join(sorted(others))}, "
                                 "which would keep all of it: untie them, or let one module, in one place, do for both")


def described(module, comm, chosen, **settings):
    """What has to be the same on all ranks of comm, as lines: settings, ways, parameters and buffers with their values.
    Of what was cut over some of these ranks before each has another part, and nothing is said."""
    if comm.size == 1:
        return []
    apart = {id(p) for m in module.modules() if getattr(type(m), "is_part", False) and meet(m.comm, comm)
             for p in m._parameters.values()}
    whole = [(name, p) for name, p in module.named_parameters() if id(p) not in apart and not is_apart(p.leaf, comm)]
    return [f"{name}={value!r}" for name, value in settings.items()] + [
        f"{path}: {way!r}" for path, way in chosen.items()] + [
        told(name, values) for name, values in (*whole, *module.named_buffers())]


def is_apart(leaf, comm):
    """Whether a parameter's leaf says that it is a piece of fully_shard's, or a part that was cut over comm's ranks."""
    return leaf is not None and (leaf.piece_of is not None or leaf.part is not None and meet(leaf.part.comm, comm))


def meet(one, other):
    """Whether two Communicators have ranks in common beside this one."""
    return len(set(one.world_ranks) & set(other.world_ranks)) > 1
