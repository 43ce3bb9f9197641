"""Which parameters are gathered, used and freed together: a model's modules, as units (units.py)."""

from ..nn.module import Sequential


def default_units(module, frozen=False):
    """The modules that become units of their own: those in the outermost Sequentials of more than one, if they have
    parameters that want a gradient. frozen: or any."""
    if isinstance(module, Sequential) and len(module) > 1:
        return [m for m in module if any(p.requires_grad or frozen for p in m.parameters())]
    return [unit for child in module._modules.values() for unit in default_units(child, frozen)]


def group(module, units, frozen=False):
    """[(module or None, name, [(name, tensor)])]: the parameters that want a gradient, each in the innermost unit that
    is around all modules that hold it; None is the rest's, which the whole model holds. One dtype each. frozen: those
    too that want none."""
    chosen, around = {id(m) for m in units}, {}

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
            groups.setdefault((place, p.dtype), []).append((name, p))
    inside = {(place if place is not None else 0): sum(key[0] == place for key in groups) for place, _ in groups}
    found = []
    for (place, dtype), named in groups.items():
        path, m = paths[place] if place is not None else ("", None)
        several = f" ({dtype})" if inside[place or 0] > 1 else ""
        found.append((m, (path or ("the rest" if m is None else "the model")) + several, named))
    return found
