"""Which parameters are gathered, used and freed together: a model's modules, as units (units.py)."""

from ...nn.containers import ModuleList
from ...nn.module import Module


def trained(parameter):
    """Whether it wants a gradient."""
    return parameter.requires_grad


def frozen(parameter):
    """Whether it wants none."""
    return not parameter.requires_grad


def either(parameter):
    """Each is."""
    return True


def default_units(module, which=trained, least=2):
    """The modules that become units of their own: those in the outermost Sequentials and ModuleLists of `least` or
    more, if they have such parameters."""
    if isinstance(module, ModuleList) and len(module) >= least:
        return [m for m in module if any(map(which, m.parameters()))]
    return [unit for child in module._modules.values() for unit in default_units(child, which, least)]


def group(module, units, which=trained, apart=None, caller="fully_shard", called=True):
    """[(module or None, name, [(name, tensor)])]: such parameters, each in the innermost unit that is around all
    modules that hold it; None is the rest's, which the whole model holds. One dtype and one Grid each.
    apart: as held_apart's, of those whose Grid isn't the others'. called: whether units must be modules that can be.
    ValueError, in caller's name, for what is no unit."""
    chosen, around, apart = {id(m) for m in units}, {}, apart or {}

    def walk(m, outside):
        if id(m) in chosen and id(m) not in outside:
            outside = (*outside, id(m))
        for p in m._parameters.values():
            if p is not None and which(p):
                before = around.get(id(p), outside)
                common = [a for a, b in zip(before, outside, strict=False) if a == b]
                around[id(p)] = tuple(common)
        for child in m._modules.values():
            walk(child, outside)
    walk(module, ())
    paths = {id(m): (path, m) for path, m in module.named_modules()}
    if strangers := [type(m).__name__ for m in units if id(m) not in paths]:
        raise ValueError(f"{caller}: units must be modules of the model; {', '.join(strangers)} is none")
    if idle := [paths[id(m)][0] for m in units if called and getattr(m.forward, "__func__", None) is Module.forward]:
        raise ValueError(f"{caller}: units must be modules that are called, as their parameters come with that; "
                         f"{', '.join(idle)} is only there to hold others: give these, as in units=list(model.blocks)")
    groups = {}
    for name, p in module.named_parameters():
        if which(p):
            place = around[id(p)][-1] if around[id(p)] else None
            tied = p.leaf.tied if p.leaf is not None else None      # by itself: cut alike in each stage that has it
            groups.setdefault((place, p.dtype, apart.get(id(p)), tied and tied.name), []).append((name, p))
    found = []
    for (place, dtype, divided, tied), named in groups.items():
        path, m = paths[place] if place is not None else ("", None)
        text = path or ("the rest" if m is None else "the model")
        text += f" ({dtype})" if len({key[1] for key in groups if key[0] == place}) > 1 else ""
        text += f" (experts over {divided[1].size} ranks)" if divided else ""
        text += f" (tied: {tied})" if tied else ""
        found.append((m, text, named))
    return found
