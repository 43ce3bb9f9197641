"""Checkpointing: forget a segment's intermediate values, and compute them again in backward.

    stored without      x0 ─ x1 ─ x2 ─ x3 ─ x4 ─ x5 ─ x6 ─ x7 ─ x8      n values
    with √n segments    x0 ─ ·  ─ ·  ─ x3 ─ ·  ─ ·  ─ x6 ─ ·  ─ x8      √n, and one segment at a time

Memory falls from O(n) to O(√n) for one more forward pass.
Source: Griewank & Walther 2000; Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from .. import backend
from .primitive import TRACED, mode, state
from .reverse import ready_made, run
from .tensor import Leaf, Node, Tensor, outputs
from .tree import flatten
from .writes import tick


def checkpoint(f):
    """f, storing only what it starts from for backward, and running again there. Results and gradients are f's, to
    the bit.

    f may close over parameters, return nested arrays, draw random numbers (the streams are set back for the second
    run) and hold checkpoints itself; it must do the same in both runs. In forward mode, and where nothing is
    recorded, f simply runs.
    """
    def checkpointed(*args, **kwargs):
        random_before, start = backend.random_snapshot(), tick()
        out = f(*args, **kwargs)
        values, rebuild = flatten(out)
        level = max((v.level for v in values if v.__class__ in TRACED), default=-1)
        if not all(isinstance(v, Tensor) and v.level == level and v.node is not None for v in values) or not values:
            return out
        frontier, arrays = outside(values, start)
        segment = Segment(f, args, kwargs, random_before, level, len(arrays))
        return rebuild(outputs(Node(segment, frontier, tuple(arrays), None, None), [v.data for v in values], level))

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


class Segment:
    """A function to run again; it stands where a Node has its primitive."""

    name, pulls, multi = "checkpoint", None, True

    def __init__(self, f, args, kwargs, random_before, level, arrays):
        self.f, self.args, self.kwargs = f, args, kwargs
        self.random_before, self.level, self.depth = random_before, level, state.level
        self.layout = ("input",) * arrays

    def cotangents(self, node, saved, ct):
        """Run the segment again, recording, and pull the cotangents down to the nodes outside of it."""
        self.fresh = (False,) * len(node.parents)
        if ct is None:
            return ready_made([None] * len(node.parents))
        random_now = backend.random_snapshot()
        backend.random_restore(self.random_before)
        try:
            # At least as deep as the first time, so that transforms inside get levels above its values' own.
            with mode(off=-1, level=max(state.level, self.depth)):
                again, _ = flatten(self.f(*self.args, **self.kwargs))
        finally:
            backend.random_restore(random_now)
        seeds = [(v.node, c) for v, c in zip(again, ct.parts, strict=True) if c is not None]
        create = self.level == 0 and any(c.__class__ in TRACED for _, c in seeds)
        found = {}
        run(seeds, create=create, retain=create, into=found, stops=set(node.parents))
        return ready_made([found.get(p) for p in node.parents])
