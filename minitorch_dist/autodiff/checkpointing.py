"""Checkpointing: forget a segment's intermediate values, and compute them again in backward.

    stored without      x0 ─ x1 ─ x2 ─ x3 ─ x4 ─ x5 ─ x6 ─ x7 ─ x8      n values
    with √n segments    x0 ─ ·  ─ ·  ─ x3 ─ ·  ─ ·  ─ x6 ─ ·  ─ x8      √n, and one segment at a time

Memory falls from O(n) to O(√n) for one more forward pass.
Source: Griewank & Walther 2000; Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from contextlib import nullcontext

from .. import backend
from .primitive import TRACED, lower, mode, state
from .reverse import ready_made, run
from .tensor import Leaf, Node, Tensor, count_kept, outputs
from .tree import flatten
from .writes import tick


def checkpoint(f):
    """f, storing only what it starts from for backward, and running again there. Results and gradients are f's, to
    the bit.

    f may close over parameters, return nested arrays, draw random numbers (the streams are set back for the second
    run) and hold checkpoints itself; it must do the same in both runs, and backward raises RuntimeError where it
    hasn't. In forward mode, and where nothing is recorded, f simply runs.
    """
    def checkpointed(*args, **kwargs):
        random_before, start = backend.random_snapshot(), tick()
        out = f(*args, **kwargs)
        values, rebuild = flatten(out)
        level = max((v.level for v in values if v.__class__ in TRACED), default=-1)
        recorded = [k for k, v in enumerate(values)
                    if isinstance(v, Tensor) and v.level == level and v.node is not None]
        if not recorded:
            return out
        results = [values[k] for k in recorded]
        frontier, leaves = outside(results, start)
        context, answers_for = (nullcontext, None) if state.again_in is None else state.again_in()
        leaves = [a for a in leaves if answers_for is None or not answers_for(a)]
        given = [lower(a) for a in flatten((args, kwargs))[0] if hasattr(lower(a), "strides")]
        segment = Segment(f, recorded, results, random_before, level, context,
                          len(leaves) + len(given))
        node = Node(segment, frontier, (*leaves, *given, args, kwargs), None, None)
        if state.counting:
            count_kept(given)
        for k, v in zip(recorded, outputs(node, [v.data for v in results], level), strict=True):
            values[k] = v
        return rebuild(values)

    checkpointed.__name__, checkpointed.__doc__ = getattr(f, "__name__", "checkpointed"), f.__doc__
    return checkpointed


def outside(results, start):
    """What a segment's graph hangs on: all leaves, and every node older than its `start`.

    Returns (nodes, the leaves' arrays, whose overwriting would spoil the second run).
    """
    frontier, seen, stack = [], set(), [v.node for v in results]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(node, Leaf) or node.date < start:
                frontier.append(node)
            else:
                stack.extend(p for p in node.parents if p is not None)
    tensors = [n.tensor() for n in frontier if isinstance(n, Leaf) and n.tensor is not None]
    return frontier, [t.data for t in tensors if t is not None]


def _fingerprint(results):
    """Shapes, dtypes and sums: equal for equal arrays. It tells a second run that went another way."""
    values = [lower(v) for v in results]
    with backend.xp.errstate(all="ignore"):
        return [(v.shape, str(v.dtype), repr(v.sum()) if isinstance(v, backend.ARRAY_TYPES) else None) for v in values]


class Segment:
    """A function to run again; it stands where a Node has its primitive. What it starts from is in node.saved, so
    that it goes when backward has used it: the watched arrays, then f's arguments."""

    pulls, multi = None, True

    def __init__(self, f, recorded, results, random_before, level, context, arrays):
        self.f, self.recorded, self.fingerprint, self.context = f, recorded, _fingerprint(results), context
        self.name = f"checkpoint({getattr(f, '__name__', type(f).__name__)})"
        # Levels below this one record again only if they did the first time.
        self.random_before, self.level, self.depth, self.off = random_before, level, state.level, state.off
        self.autocast = state.autocast
        self.layout = ("input",) * arrays

    def cotangents(self, node, saved, ct, wanted):
        """Run the segment again, recording, and pull the cotangents down to the nodes outside of it."""
        self.fresh = (False,) * len(node.parents)
        if ct is None:
            return ready_made([None] * len(node.parents))
        again = self.run_again(*saved[-2:])
        seeds = [(v.node, c) for v, c in zip(again, ct.parts, strict=True) if c is not None]
        del again       # the results themselves are needed no more
        create = self.level == 0 and any(c.__class__ in TRACED for _, c in seeds)
        found = {}
        run(seeds, create=create, retain=create, into=found, stops=set(node.parents))
        return ready_made([found.get(p) for p in node.parents])

    def run_again(self, args, kwargs):
        """The recorded results of f, with the random streams as they stood then."""
        random_now = backend.random_snapshot()
        backend.random_restore(self.random_before)
        try:
            # At least as deep as the first time, so that transforms inside get levels above its values' own.
            with mode(off=max(self.off, min(state.off, self.level - 1)), level=max(state.level, self.depth),
                      autocast=self.autocast and self.autocast.anew(), again=True), self.context():
                values, _ = flatten(self.f(*args, **kwargs))
        finally:
            backend.random_restore(random_now)
        results = [values[k] for k in self.recorded if k < len(values)]
        if any(getattr(v, "node", None) is None for v in results) or _fingerprint(results) != self.fingerprint:
            raise RuntimeError(f"{self.name}: the second run gave other values than the first. Either something that "
                               "it reads was changed in between, or it draws numbers from a generator of its own: pass "
                               "what changes as an argument, and draw from the library's streams")
        return results
