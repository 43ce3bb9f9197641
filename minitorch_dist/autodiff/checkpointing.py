"""Checkpointing: forget a segment's intermediate values, and compute them again in backward.

    stored without      x0 ─ x1 ─ x2 ─ x3 ─ x4 ─ x5 ─ x6 ─ x7 ─ x8      n values
    with √n segments    x0 ─ ·  ─ ·  ─ x3 ─ ·  ─ ·  ─ x6 ─ ·  ─ x8      √n, and one segment at a time

Memory falls from O(n) to O(√n) for one more forward pass. Most of that pass's time goes into a few ops, the products,
most of the memory into many cheap ones: who saves the products' results besides spares the time and has most of the
memory.

    save=("linear", "attention")        linear ─ gelu ─ linear ─ add        kept: what is underlined
                                        ======          ======

Sources: Griewank & Walther 2000; Chen et al. 2016, "Training deep nets with sublinear memory cost"; Korthikanti et al.
2022, "Reducing activation recomputation in large transformer models" (to choose what is computed again).
"""

from collections.abc import Iterable
from contextlib import nullcontext
from types import MethodType

from .. import backend
from .primitive import OPS, TRACED, forward_itself, lower, mode, state
from .reverse import ready_made, run
from .tensor import Leaf, Node, Tensor, count_kept, outputs
from .transforms import check_function
from .tree import flatten
from .writes import log, tick


def checkpoint(f, save=()):
    """f, storing only what it starts from for backward, and running again there. Results and gradients are f's, to
    the bit.

    save  names of ops (mt.OPS) whose results are stored, too, and not computed again: those that take long,
          ("matmul", "linear", "attention"), a Linear without a bias being a matmul. They go by no saved_tensors_hooks.
          ValueError for a name that isn't one

    f may close over parameters, return nested arrays, draw random numbers (the streams are set back for the second
    run) and hold checkpoints itself; it must do the same in both runs, and backward raises RuntimeError where it
    hasn't. In forward mode, and where nothing is recorded, f simply runs.
    """
    check_function("checkpoint", f)
    if hasattr(save, "dtype"):
        raise TypeError("checkpoint takes a function and gives one: checkpoint(f)(x), and not checkpoint(f, x); save= "
                        "are names of ops")
    save = frozenset(save if isinstance(save, Iterable) and not isinstance(save, str) else (save,))
    if unknown := sorted(map(str, save - set(OPS))):
        raise ValueError(f"checkpoint: save={', '.join(unknown)}: there is no such op; print(mt.OPS) lists the names "
                         "that it takes")

    return Checkpointed(f, save)


class Checkpointed:
    """What checkpoint gives. It is an object, for a function is never copied: where it stands in the place of a
    module's forward, and f is the module's own, a copy of the module, deep or pickled, has the copy's own."""

    def __init__(self, f, save):
        self.__wrapped__, self.save = f, save       # of the former inspect.signature tells the parameters
        self.__name__, self.__doc__ = getattr(f, "__name__", "checkpointed"), f.__doc__
        self.by_position = getattr(f, "by_position", False)     # nn/decoding.py

    def __get__(self, instance, owner=None):
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args, **kwargs):
        random_before, start, recall = backend.random_snapshot(), tick(), Recall(self.save)
        notes = Notes(state.notes)
        with mode(recall=recall if self.save else state.recall, notes=notes):
            out = self.__wrapped__(*args, **kwargs)
        values, rebuild = flatten(out)
        level = max((v.level for v in values if v.__class__ in TRACED), default=-1)
        recall.leave_out_written()
        recorded = [k for k, v in enumerate(values)
                    if isinstance(v, Tensor) and v.level == level and v.node is not None]
        if not recorded:
            return out
        results = [values[k] for k in recorded]
        frontier, leaves = outside(results, start)
        context, answers_for = (nullcontext, None) if state.again_in is None else state.again_in(start)
        leaves = [a for a in leaves if answers_for is None or not answers_for(a)]
        given = [lower(a) for a in flatten((args, kwargs))[0] if hasattr(lower(a), "strides")]
        stored = recall.arrays()
        segment = Segment(self.__wrapped__, recorded, results, random_before, level, context,
                          ("input",) * (len(leaves) + len(given)) + ("saved result",) * len(stored), recall, notes.kept)
        node = Node(segment, frontier, (*leaves, *given, *stored, args, kwargs, recall.found), None, None)
        if state.counting:
            count_kept([given, stored])
        for k, v in zip(recorded, outputs(node, [v.data for v in results], level), strict=True):
            values[k] = v
        return rebuild(values)


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


class Recall:
    """The results of the `ops` that a checkpoint saves: a first run finds them, in order; a second one, given them, is
    told them.

    sums  of what these ops were given, in both runs: a result that isn't computed again doesn't show that something
          before it has changed
    """

    def __init__(self, ops, found=None):
        self.ops, self.sums, self.told = ops, [], None if found is None else iter(found)
        self.found, self.dates = [] if found is None else found, []

    def forward(self, primitive, raw, params):
        """What run_forward gives."""
        self.sums += _sums(raw)
        if self.told is None:
            self.found.append((primitive, forward_itself(primitive, raw, params)))
            self.dates.append(tick())
            return self.found[-1][1]
        then, result = next(self.told, (None, None))
        if then is not primitive:
            raise RuntimeError(f"a second run came to {primitive.name!r} where the first had "
                               f"{'done' if then is None else repr(then.name)}: it must do the same in both")
        return forward_itself(primitive, raw, params) if result is None else result

    def leave_out_written(self):
        """What the first run has written into since isn't what the op gave: it is computed again after all."""
        self.found = [(primitive, None if any(log.since(a, date) for a in _arrays(result)) else result)
                      for (primitive, result), date in zip(self.found, self.dates, strict=True)]

    def arrays(self):
        """All arrays among the results."""
        return _arrays([result for _, result in self.found])


class Notes:
    """What a first run notes, in order (modes.as_at_first), and a second one is told.

    outer  the Notes of the segment around this one, which notes the same
    told   what the first run has noted; None: this is the first
    """

    def __init__(self, outer=None, told=None):
        self.outer, self.told, self.kept = outer, told, []

    def note(self, make):
        """make(), or what it gave in the first run."""
        if self.outer is not None:
            value = self.outer.note(make)
        elif self.told is None:
            value = make()
        elif len(self.kept) < len(self.told):
            value = self.told[len(self.kept)]
        else:
            raise RuntimeError("a second run came to more layers than the first: it must do the same in both")
        self.kept.append(value)
        return value


def _arrays(values):
    return [lower(v) for v in flatten(values)[0] if hasattr(lower(v), "strides")]


def _sums(values):
    """[(shape, dtype, sum)]: equal for equal arrays. (On a GPU the sums aren't waited for.)"""
    arrays = [v for v in map(lower, values) if hasattr(v, "strides")]
    with backend.xp.errstate(all="ignore"):
        return [(v.shape, str(v.dtype), v.sum() if isinstance(v, backend.ARRAY_TYPES) else None) for v in arrays]


def _fingerprint(sums):
    """Sums as text, in which NaN is itself. It tells a second run that went another way."""
    return [(shape, dtype, repr(total)) for shape, dtype, total in sums]


class Segment:
    """A function to run again; it stands where a Node has its primitive. What it starts from is in node.saved, so
    that it goes when backward has used it: the watched arrays, then f's arguments."""

    pulls, multi = None, True

    def __init__(self, f, recorded, results, random_before, level, context, layout, recall, notes):
        self.notes = notes
        self.f, self.recorded, self.context, self.layout, self.save = f, recorded, context, layout, recall.ops
        self.fingerprint = _fingerprint(_sums(results) + recall.sums)
        self.name = f"checkpoint({getattr(f, '__name__', type(f).__name__)})"
        # Levels below this one record again only if they did the first time.
        self.random_before, self.level, self.depth, self.off = random_before, level, state.level, state.off
        self.autocast = state.autocast

    def cotangents(self, node, saved, ct, wanted):
        """Run the segment again, recording, and pull the cotangents down to the nodes outside of it."""
        self.fresh = (False,) * len(node.parents)
        if ct is None:
            return ready_made([None] * len(node.parents))
        again = self.run_again(*saved[-3:])
        seeds = [(v.node, c) for v, c in zip(again, ct.parts, strict=True) if c is not None]
        del again       # the results themselves are needed no more
        create = self.level == 0 and any(c.__class__ in TRACED for _, c in seeds)
        found = {}
        run(seeds, create=create, retain=create, into=found, stops=set(node.parents))
        return ready_made([found.get(p) for p in node.parents])

    def run_again(self, args, kwargs, found):
        """The recorded results of f, with the random streams as they stood then. found: what its ops have saved."""
        random_now, recall = backend.random_snapshot(), Recall(self.save, found)
        backend.random_restore(self.random_before)
        try:
            # At least as deep as the first time, so that transforms inside get levels above its values' own.
            with mode(off=max(self.off, min(state.off, self.level - 1)), level=max(state.level, self.depth),
                      autocast=self.autocast and self.autocast.anew(), again=True,
                      recall=recall if self.save else None, notes=Notes(told=self.notes)), self.context():
                values, _ = flatten(self.f(*args, **kwargs))
        finally:
            backend.random_restore(random_now)
        results = [values[k] for k in self.recorded if k < len(values)]
        if (any(getattr(v, "node", None) is None for v in results)
                or _fingerprint(_sums(results) + recall.sums) != self.fingerprint):
            raise RuntimeError(f"{self.name}: the second run gave other values than the first. Either something that "
                               "it reads was changed in between, or it draws numbers from a generator of its own: pass "
                               "what changes as an argument, and draw from the library's streams")
        return results
