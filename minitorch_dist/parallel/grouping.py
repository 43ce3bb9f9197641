"""Which parameters are gathered, used and freed together: a model's modules, as units (units.py)."""

from ..nn.module import Sequential


def default_units(module, frozen=False):
    """The modules that become units of their own: those in the outermost Sequentials of more than one, if they have
    parameters that want a gradient. frozen: or any."""
    if isinstance(module, Sequential) and len(module) > 1:
        return [m for m in module if any(p.requires_grad or frozen for p in m.parameters())]
    return [unit for child in module._modules.values() for unit in default_units(child, frozen)]


def group(module, units, frozen=False, apart=None):
    """[(module or None, name, [(name, tensor)])]: the parameters that want a gradient, each in the innermost unit that
    is around all modules that hold it; None is the rest's, which the whole model holds. One dtype and one Grid each.
    frozen: those too that want none; apart: as held_apart's, of those whose Grid isn't the others'."""
    chosen, around, apart = {id(m) for m in units}, {}, apart or {}

    def walk(m, outside):
        if id(m) in chosen and id(m) not in outside:
            outside = (*outside, id(m))
        for p in m._parameters.values():
            if p is not None and (p.requires_grad or frozen):
                before = around.get(id(p), outside)
                common = [a for a, b in zip(before, outside, strict=False) if a == b]
                around[id(p)] = tuple(common)
        for child in m._modules.values():
            walk(child, outside)
    walk(module, ())
    paths = {}
    for path, m in module.named_modules():
        paths.setdefault(id(m), (path, m))
    if strangers := [type(m).__name__ for m in units if id(m) not in paths]:
        raise ValueError(f"fully_shard: units must be modules of the model; {', '.join(strangers)} is none")
    groups = {}
    for name, p in module.named_parameters():
        if p.requires_grad or frozen:
            place = around[id(p)][-1] if around[id(p)] else None
            groups.setdefault((place, p.dtype, apart.get(id(p))), []).append((name, p))
    found = []
    for (place, dtype, divided), named in groups.items():
        path, m = paths[place] if place is not None else ("", None)
        text = path or ("the rest" if m is None else "the model")
        text += f" ({dtype})" if len({key[1] for key in groups if key[0] == place}) > 1 else ""
        text += f" (experts over {divided[1].size} ranks)" if divided else ""
        found.append((m, text, named))
    return found
