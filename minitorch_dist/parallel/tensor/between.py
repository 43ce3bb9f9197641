"""What lies between a column-parallel layer and the row-parallel one behind it has this rank's part of the features.

    x ─ copy_to ─ up, a column ── tanh ── · temp ── down, a row ─ reduce_from         temp: whole, alike on all ranks

So it must work element by element. A whole parameter would get the gradient of this part alone there, another one on
each rank, and the ranks' models would part: a row's first forward on the tape walks back to the last collective, once,
and finds it. A dropout must drop what one process drops in this part, not the same places in each: one in a Sequential
is told which part it has. Nobody can see the rest: other random numbers, softmax or a mean over the features.
"""

import weakref

from ...autodiff.primitive import Primitive
from ...nn.containers import Sequential
from ...nn.layers import Dropout, SwiGLU
from ..positions import is_known, of_part

waiting = weakref.WeakKeyDictionary()       # {row: [(name, its whole parameters, weakly)]}, until its first forward


def watch(rows, named):
    """Let the first forward of these rows look for these (name, parameter), whole and alike on all ranks."""
    named = [(name, weakref.ref(p)) for name, p in named]
    waiting.update(dict.fromkeys(rows, named))


def check(row, x):
    """RuntimeError where a whole parameter leads to a row's x past all collectives. Nothing where x isn't on the
    tape."""
    node = getattr(x, "node", None)
    if row not in waiting or node is None:
        return
    leaves = leaves_before(node)
    if found := [name for name, ref in waiting.pop(row) if id(ref()) in leaves]:
        several = len(found) > 1
        raise RuntimeError(
            f"RowParallelLinear: between it and the 'column' before it, where each rank has its part of the features, "
            f"{'stand' if several else 'stands'} {', '.join(found[:4])}, whose gradient{'s' * several} would be of "
            "this part alone, and the ranks' models would part. What lies there works element by element, and has no "
            f"parameters; one that scales all features may go in by copy_to({found[0]}, comm), which sums its gradient")


def leaves_before(node):
    """The ids of the tensors whose gradients come here by no collective, and no derivative given by hand."""
    seen, stack, found = {node}, [node], set()
    while stack:
        node = stack.pop()
        if node.primitive is None:
            found.add(id(node.tensor()))
        elif isinstance(node.primitive, Primitive) and "comm" not in node.primitive.layout:
            new = {parent for parent in node.parents if parent is not None} - seen
            seen |= new
            stack.extend(new)
    return found - {id(None)}       # of leaves that nobody holds any more


# ---------------------------------------------------------------- dropouts in a Sequential

def dropouts(modules, chosen):
    """{path of a Dropout between a column and a row of one Sequential: (the column's path, whether its gate has been
    passed)}, those too that a plan calls "sequence": there sequences are whole. ValueError where it stands elsewhere
    as well."""
    found = {}
    for column in (path for path, way in chosen.items() if way in ("column", "column, gated")):
        parent, _, own = column.rpartition(".")
        if isinstance(modules[parent], Sequential):
            layers, prefix, between, passed = modules[parent]._modules, f"{parent}.".lstrip("."), {}, False
            for name in list(layers)[list(layers).index(own) + 1:]:
                path = prefix + name
                passed = passed or isinstance(layers[name], SwiGLU)
                if chosen.get(path) == "row":
                    found |= between
                if isinstance(layers[name], Dropout) and is_known(layers[name]):
                    between[path] = column, passed
                elif path in chosen:
                    break
    for path in found:
        if others := [p for p, m in modules.items() if m is modules[path] and p not in found]:
            raise ValueError(f"parallelize_module: the Dropout {path} works on this rank's part of the features there, "
                             f"and stands in {others[0]} as well: give each place an nn.Dropout of its own")
    return found


def tell(dropout, column, passed):
    """Let a Dropout drop what one process drops in the column's part of the features."""
    _, rows, count = column.parts["weight"]
    if passed:      # of the gate's features, which are the first half
        rows, count = rows[:len(rows) // 2], count // 2
    of_part(dropout, features=(rows, count))
