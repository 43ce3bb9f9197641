"""Which annotations of a model's parameters send the fewest bytes: a search over all of them, on paper.

By itself every op chooses for its own good (choice.py), and only between what its operands propose. What they propose
is decided here, for all parameters together: the ops of one run, in order, are run again for every way in which the
parameters that they meet can lie. What follows depends on no more than how the values lie that are still needed; so of
all that leads to the same layouts of these, the cheapest is kept (Bellman's dynamic programming):

    w, v             after x @ w         after gelu      after · @ v, of which one way is kept
    w (·, tp) …      y (·, tp)           y (·, tp)       z (·, ·) + Σtp: w (·, tp), v (tp, ·)
    w (tp, ·) …      y (·, ·) + Σtp      y (·, ·)        z (·, tp): w (tp, ·), v (·, tp)

It counts bytes alone, not memory: that matrices are to be cut, and not held whole by everybody, it takes for granted.

Source: Zheng et al. 2022, "Alpa", whose intra-operator pass asks this of an integer program.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from ...autodiff.modes import enable_grad, no_grad
from ...autodiff.primitive import bind
from ...autodiff.tree import flatten
from . import notes
from .layouts import WHOLE, Layout, Shard, inside, nested, scaled
from .sharded import Sharded, Values


@dataclass(frozen=True)
class Ref:
    """The place of a value among all; seen(it) is what the op met: itself, or the value as raw code sees it."""

    at: int
    seen: object


def _itself(value):
    return value


def _opened(value):
    return Values(value).opened()


class Line(NamedTuple):
    """An op of the run: its arguments and parameters, with Refs for the values, the places of its results, and whether
    gradients were recorded."""

    primitive: object
    args: object
    params: object
    results: list
    records: bool

    @property
    def refs(self):
        return [leaf for leaf in flatten((self.args, self.params))[0] if leaf.__class__ is Ref]


class State(NamedTuple):
    """A way to come so far. nbytes: (forward, backward); values: {place: Sharded} still needed; placed: {name:
    placement on the axis}; text: [(op, bytes forward, bytes backward)]."""

    nbytes: tuple
    values: dict
    placed: dict
    text: list

    @property
    def key(self):
        return tuple((at, str(value.layout)) for at, value in self.values.items())


def traced(run, known):
    """([Line], places of what run() returns); known: [Sharded], which have the first places. ValueError for a value
    that isn't one of these, nor made of them by ops, and for what isn't sent by ops."""
    with notes.looking(calls=True) as page:     # (which keeps the values: a place is known by its id)
        out = run()
    # (One number that is no float is whole however its operands lie: running.reduced.)
    if moved := [value for value in page.moved if value.shape or value.dtype.kind not in "iub"]:
        raise ValueError(f"plan: f brings {moved[0]} together, which no op asks for, so what that sends would not be "
                         "counted: leave full, numpy, item, bool and redistribute out, and running statistics "
                         "(model.eval()); out= says how what it returns is to lie")
    places = {id(value): at for at, value in enumerate(known)}

    def place(leaf):
        value, seen = (leaf.sharded, Values) if leaf.__class__ is Values else (leaf, _itself)
        if value.__class__ is not Sharded:
            return leaf
        while id(value) in page.raw:
            value, seen = page.raw[id(value)][0], _opened
        if id(value) not in places:
            raise ValueError(f"plan: f meets {value}, which is no argument of it, and which no op has made of these "
                             "and the parameters: annotate arguments before, and leave detach and redistribute out")
        return Ref(places[id(value)], seen)
    lines, count = [], itertools.count(len(known))     # (an argument that is given twice has two places)
    for primitive, args, params, results, records in page.calls:
        given = _each(place, tuple(args)), _each(place, tuple(params))
        places |= {id(value): next(count) for value in results}
        lines.append(Line(primitive, *given, [places[id(value)] for value in results], records))
    return lines, _ends(_each(place, out))


def _ends(out):
    """The places of what f returns. ValueError where it has none, or other values beside."""
    leaves, _ = flatten(out)
    if not leaves or [leaf for leaf in leaves if leaf.__class__ is not Ref]:
        raise ValueError(f"plan: f returns {', '.join(map(repr, leaves)) or 'nothing'}: it takes what backward is to "
                         "start at, Sharded values")
    return [ref.at for ref in leaves]


def _each(function, tree):
    leaves, rebuild = flatten(tree)
    return rebuild([function(leaf) for leaf in leaves])


def options(p, n, splits):
    """The placements on an axis of n ranks among which a parameter's is sought: along each dimension that has enough,
    inside of what other axes cut there, also in sections as those of `splits`, [sizes]. A matrix has to be cut, if it
    can."""
    found = []
    for dim, extent in enumerate(p.shape):
        ways = [(), *(scaled(sizes, extent, sum(sizes)) for sizes in splits if extent % sum(sizes) == 0)]
        found += [Shard(dim, own) for own in dict.fromkeys(ways) if nested(extent, [*others(p, dim), (own, n)])]
    return found if found and len(p.shape) > 1 else [WHOLE, *found]


def others(p, dim):
    """[(sections, n)] of the axes that cut a dimension already."""
    return [(shard.sections, p.sizes[axis]) for axis, shard in p.layout.cutting(dim).items()]


def sectioned(lines, given):
    """[sizes]: in which sections an axis may cut. What an op takes apart; the parts that other axes make of parameters,
    for what comes out of one that is cut inside of these meets the next."""
    found = [line.params[0] for line in lines if line.primitive.name == "split"]
    found += [inside(extent, others(p, dim)) for p in given for dim, extent in enumerate(p.shape)]
    return [sizes for sizes in dict.fromkeys(found) if len(sizes) > 1]


def search(lines, start, undecided, ends, out):
    """(the cheapest State, how many were looked at). start: {place: Sharded}; undecided: {place: (name, {placement:
    Sharded})}; ends: the places of what the run returns; out(value): this as it is to lie."""
    last = {ref.at: i for i, line in enumerate(lines) for ref in line.refs} | dict.fromkeys(ends, len(lines))
    states, looked = [State((0, 0), {at: v for at, v in start.items() if at in last}, {}, [])], 0
    for i, line in enumerate(lines):
        new = [at for at in dict.fromkeys(ref.at for ref in line.refs) if at in undecided]
        found = {}
        for state, picked in itertools.product(states, itertools.product(*(undecided[at][1].items() for at in new))):
            chosen = {at: value for at, (_, value) in zip(new, picked, strict=True)}
            placed = state.placed | {undecided[at][0]: p for at, (p, _) in zip(new, picked, strict=True)}
            after = _run(line, state._replace(values=state.values | chosen, placed=placed), last, i)
            looked += 1
            if after.key not in found or sum(after.nbytes) < sum(found[after.key].nbytes):
                found[after.key] = after
        undecided = {at: option for at, option in undecided.items() if at not in new}
        states = list(found.values())
    return min((_ended(state, ends, out) for state in states), key=lambda state: sum(state.nbytes)), looked


def _run(line, state, last, i):
    values = {at: _copy(value) for at, value in state.values.items()}    # a sum that is made is made in place

    def value(leaf):
        if leaf.__class__ is not Ref:
            return leaf
        return leaf.seen(values[leaf.at])
    with notes.looking() as page, enable_grad() if line.records else no_grad():
        out = bind(line.primitive, _each(value, line.args), _each(value, line.params))
    values |= zip(line.results, out if line.primitive.multi else (out,), strict=True)
    note = page.notes[0]
    return _after(state, {at: v for at, v in values.items() if last.get(at, -1) > i}, page, f"{note.op:14} {note.flow}")


def _ended(state, ends, out):
    with notes.looking() as page:
        values = {at: out(_copy(state.values[at])) for at in ends}
    there = " ".join(str(value.layout) for value in values.values())
    return _after(state, values, page, f"what is returned -> {there}")


def _after(state, values, page, op):
    spent = page.book.total_bytes_sent(), page.backward
    return state._replace(nbytes=tuple(a + b for a, b in zip(state.nbytes, spent, strict=True)), values=values,
                          text=[*state.text, (op, *spent)])


def _copy(value):
    return Sharded(value.local, value.shape, value.layout, value.comms)


class Plan:
    """The annotations that send the fewest bytes; it prints.

    annotations  {name of a parameter: Layout}, of those that are cut, for shard_parameters
    nbytes       (forward, backward): what a rank sends, by the closed forms of the ring
    ops          [(op, bytes forward, bytes backward)]
    looked       how many ops were tried on some layouts of their operands
    """

    def __init__(self, annotations, state, looked):
        self.annotations, self.nbytes, self.ops, self.looked = annotations, state.nbytes, state.text, looked

    def __str__(self):
        width = max(map(len, self.annotations), default=0)
        columns = max((len(op) for op, _, _ in self.ops), default=0)
        return "\n".join([
            *(f"{name:{width}}  {layout}" for name, layout in self.annotations.items()), "",
            f"{'':{columns}}{'forward':>14}{'backward':>14}",
            *(f"{op:{columns}}{forward:14,.0f}{backward:14,.0f}" for op, forward, backward in self.ops),
            f"{f'bytes of one rank, after {self.looked:,} tries':{columns}}"
            f"{self.nbytes[0]:14,.0f}{self.nbytes[1]:14,.0f}"])


def planned(run, args, given, axis, n, place, out):
    """A Plan of run(), which works with `args`, [Sharded], and parameters that are whole on the axis of n ranks: given,
    {name: Sharded}. place(name, layout): a parameter that lies so; out(value): what is returned, as it is to lie."""
    lines, ends = traced(run, [*given.values(), *args])
    met, splits = {ref.at for line in lines for ref in line.refs}, sectioned(lines, given.values())
    if alone := [name for at, name in enumerate(given) if at in ends and at not in met]:
        raise ValueError(f"plan: f returns {', '.join(alone)}, which none of its ops has met: leave it out")

    def layout(name, placement):
        p = given[name].layout
        return Layout(p.ndim, p.placements | {axis: placement})
    undecided = {at: (name, {placement: place(name, layout(name, placement))
                             for placement in options(value, n, splits)})
                 for at, (name, value) in enumerate(given.items())}
    state, looked = search(lines, {len(given) + i: value for i, value in enumerate(args)}, undecided, ends, out)
    found = {name: layout(name, placement) for name, placement in state.placed.items()}
    return Plan({name: where for name, where in found.items() if where.placements}, state, looked)
