"""Nested tuples, lists and dicts of arrays: taken apart and put together again."""

from copy import copy


def skeleton(tree):
    """The nesting alone: equal for two trees that differ in their leaves only."""
    if isinstance(tree, dict):
        return type(tree), *((key, skeleton(value)) for key, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(skeleton, tree)
    return None if tree is None else 0


def flatten(tree, order=sorted):
    """(leaves in order, rebuild): rebuild(leaves) gives the same nesting, and itself holds no leaf. Dicts go in key
    order (order=list: in their own); None has no leaves."""
    kind = type(tree)
    if tree is None:
        return [], lambda leaves: None
    if isinstance(tree, dict):
        keys = order(tree)
        children, empty = [tree[k] for k in keys], copy(tree)
        empty.clear()

        def make(values):
            new = copy(empty)       # a defaultdict stays one
            for key, value in zip(keys, values, strict=True):
                new[key] = value
            return new
    elif isinstance(tree, (tuple, list)):
        children, named = list(tree), hasattr(tree, "_fields")

        def make(values):
            return kind(*values) if named else kind(values)
    else:
        return [tree], lambda leaves: leaves[0]

    parts = [flatten(child, order) for child in children]
    sizes, builds = [len(leaves) for leaves, _ in parts], [build for _, build in parts]

    def rebuild(leaves):
        leaves, at, values = list(leaves), 0, []
        for size, build in zip(sizes, builds, strict=True):
            values.append(build(leaves[at:at + size]))
            at += size
        return make(values)

    return [leaf for leaves, _ in parts for leaf in leaves], rebuild


def refuse_sharded(values, what):
    """TypeError where one of the values lies on several ranks (parallel/sharding): inside a transform it would pass for
    a constant. what: they are, for the message."""
    if found := [v for v in values if hasattr(v, "comms")]:
        raise TypeError(f"{what} is {found[0]!r}, of which a rank has a part: annotate arrays inside the function, and "
                        "take and return whole values, x.full()")
