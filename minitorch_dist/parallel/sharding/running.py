"""How an op runs on Sharded values.

It looks up which dimensions go together (rules.py), chooses which axes cut what (choice.py), brings its operands there
by differentiable collectives (resharding.py), and runs on the parts. So the ordinary tape records what happens, and
backward is the transposes of all that.
"""

import math
from typing import NamedTuple

from ...autodiff import ops
from ...autodiff.ops.indexing import outside
from ...autodiff.ops.shape import swap_last
from ...autodiff.primitive import OPS, TRACED, bind, lower
from ...autodiff.tensor import Tensor
from ...autodiff.tree import flatten
from ...backend import is_array, is_floating, is_short, module_of, refuse, to_device_of, xp
from . import choice, notes
from .layouts import COPIES, WHOLE, Layout, held
from .resharding import reshard
from .rules import REDUCED_BY, RULES, SHAPES, index_parts, is_full
from .sharded import Sharded, Values, as_sharded, merged


class Decision(NamedTuple):
    """What was decided of an op. cuts: {axis: (the factor that it cuts, in which sections)}."""

    factors: object
    cuts: dict
    comms: dict


def apply(primitive, args, params):
    """An op of the table, of whose arguments one at least is Sharded. Arrays among its parameters (labels, an index, a
    mask) are operands, too."""
    name, n = primitive.name, len(args)
    leaves, rebuild = flatten(tuple(params))
    inside = [i for i, leaf in enumerate(leaves) if leaf.__class__ is Values or is_array(leaf)]
    values = [as_sharded(a) for a in (*args, *(leaves[i] for i in inside))]
    comms = merged(name, values)
    sizes = {axis: comm.size for axis, comm in comms.items()}
    names = primitive.layout[1 + n:][:len(params)]
    factors = factors_of(name, values, dict(zip(names, params, strict=True)))
    operands = [operand(value) for value in values]
    if (definition := taken_apart(primitive, args)) and choice.stuck(factors, operands, sizes):
        with notes.noted(name + notes.APART, values) as note:
            out = definition(*[None if a is None else v.settle() for a, v in zip(args, values, strict=False)], *params)
            note.results = layouts_of(out if isinstance(out, tuple) else [out])
        return out

    with notes.noted(name, values) as note:
        note.choices = choice.choices(name, factors, operands, sizes)
        decision = Decision(factors, note.choices[0].cuts, comms)
        kept = [axis for axis in comms if axis not in decision.cuts and choice.passes(name, operands, axis)]
        here = []
        for value, target in zip(values, choice.targets(name, factors, operands, decision.cuts), strict=True):
            value = value.settle([axis for axis, new in target.items() if new in (WHOLE, COPIES)])
            here.append(reshard(value.local, value.shape, value.layout, target, comms))
        like = next((lower(x) for x in here if x.__class__ in TRACED), None)
        for i, x in zip(inside, here[n:], strict=True):
            leaves[i] = to_device_of(lower(x), like)
        try:
            out = run(primitive, [to_device_of(x, like) if is_array(x) else x for x in here[:n]],
                      dict(zip(names, rebuild(leaves), strict=True)), decision)
        except Exception as error:
            error.add_note(f"{name} ran on this rank's parts of {described(values)}")
            raise
        results = results_of(primitive, out if primitive.multi else (out,), decision, kept)
        note.results = layouts_of(results)
    return tuple(results) if primitive.multi else results[0]


def factors_of(name, values, params):
    """The Factors of an op of these values, by its rule."""
    if name not in RULES:
        raise NotImplementedError(f"{name}: no sharding rule says how to run it on {described(values)}; enter one into "
                                  "sharding.rules.RULES, or give it whole values, x.full()")
    try:
        factors = RULES[name]([value.shape for value in values], params)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; they lie {described(values)}") from None
    if name in ("max", "min") and any(value.requires_grad for value in values):
        return factors.holding(factors.lost)        # backward asks how many are the greatest
    return factors


def run(primitive, args, params, decision):
    """The op on a rank's parts; params, {name: value}, are made to fit them."""
    if decision.cuts:
        fit_parameters(primitive.name, params, args, decision)
        if primitive.name == "matmul":
            return ops.matmul(*args)        # puts rows together, which a layout of the whole couldn't say
        if primitive.name == "getitem" and any(factor == "row" for factor, _ in decision.cuts.values()):
            return rows(args[0], params["index"], decision)
    return bind(primitive, args, tuple(params.values()))


def results_of(primitive, locals_, decision, kept):
    """What an op has given on this rank as Sharded."""
    factors, cuts, comms = decision
    if factors.results is None:
        return [Sharded(x, x.shape, Layout(len(x.shape)), comms) for x in locals_]
    sizes = {axis: comm.size for axis, comm in comms.items()}
    shapes = [whole_shape(dims, x.shape, factors, cuts, sizes)
              for dims, x in zip(factors.results, locals_, strict=True)]
    layouts = choice.results(factors, cuts, kept, shapes)
    return [reduced(primitive.name, *made, comms) for made in zip(locals_, shapes, layouts, strict=True)]


def described(values):
    """Layouts and shapes, for messages."""
    return ", ".join(f"{v.layout} of {v.shape}" for v in values if getattr(v, "local", None) is not None)


def layouts_of(results):
    """For a note."""
    return [result.layout for result in results]


def operand(value):
    """What choice.py wants to know of a value."""
    dtype = getattr(value.local, "dtype", None)
    nbytes, short = (0, False) if dtype is None else (math.prod(value.shape) * dtype.itemsize, is_short(dtype))
    return choice.Operand(value.shape, value.layout, nbytes, value.requires_grad, short)


def whole_shape(dims, local, factors, cuts, sizes):
    """The shape of a result of which a rank has this much."""
    cut_by = {factor: axis for axis, (factor, _) in cuts.items()}
    shape = list(local)
    for i, dim in enumerate(dims):
        if factor := next((f for f in dim if f in cut_by), None):   # (one axis alone cuts what is sectioned)
            shape[i] = local[i] * sizes[cut_by[factor]] if factor in factors.sectioned else \
                math.prod(factors.extents[f] for f in dim)
    return tuple(shape)


def reduced(name, local, shape, layout, comms):
    """A result as a Sharded. At once made whole: max, min, any and all, whose parts aren't to be added up; and what is
    no float, for a later cast would tell parts that wrap around, or bools, from their sum."""
    local = local if local.__class__ in TRACED else Tensor(local)
    if layout.pending and (name in REDUCED_BY or local.dtype.kind in "iub"):
        raw = lower(local)
        op = REDUCED_BY.get(name, "max" if raw.dtype == bool else "sum")
        ordered = raw.dtype.kind not in "iub"
        array = _sortable(raw, op) if ordered else module_of(raw).array(
            raw, dtype=xp.uint8 if raw.dtype == bool else raw.dtype, order="C")
        for axis in layout.pending:
            comms[axis].all_reduce(array, op)
        array = _flipped(array).view(raw.dtype) if ordered else array.astype(raw.dtype, copy=False)
        local, layout = Tensor(array), Layout(len(shape), layout.shards)
    return Sharded(local, shape, layout, comms)


def _sortable(x, op):
    """Floats as integers of as many bits that sort as they do, NaN beyond the greatest (op "max") or the least: MPI's
    MAX and MIN may lose a NaN, and know no floats of 16 bits."""
    nan = xp.where(xp.isnan(x), {"max": xp.nan, "min": -xp.nan}[op], x).astype(x.dtype)
    return _flipped(module_of(x).ascontiguousarray(nan).view(f"i{x.dtype.itemsize}").reshape(x.shape))


def _flipped(bits):
    """The bits of floats, or integers that sort as these: of negative ones all but the sign are the other way round."""
    return xp.where(bits < 0, bits ^ xp.iinfo(bits.dtype).max, bits)


def fit_parameters(name, params, args, decision):
    """Change those of an op's parameters that speak of shapes and places of the whole."""
    factors, cuts, comms = decision
    ranks = {axis: (comm.rank, comm.size) for axis, comm in comms.items()}
    if "index" in params:
        axes = iter(params["shape"])
        params["index"] = tuple(part if part is None else slice(None) if is_full(part, extent) else part
                                for part in index_parts(params["index"], len(params["shape"]))
                                for extent in ([None] if part is None else [next(axes)]))
    for param, which in SHAPES.get(name, {}).items():
        params[param] = tuple(args[0].shape) if which == 0 else choice.results(
            factors, cuts, (), [params[param]])[0].local_shape(params[param], ranks)
    if name == "split":
        n = math.prod(comms[axis].size for axis, (factor, _) in cuts.items() if factor in factors.sectioned)
        params["sizes"] = tuple(size // n for size in params["sizes"])


def rows(x, index, decision):
    """x[index] of an x that is cut along what the index's one array of integers takes: the rows that this rank has,
    zeros for others. Added up over the ranks they are all."""
    extent = decision.factors.extents["row"]
    cuts = [(sections, decision.comms[axis].rank, decision.comms[axis].size)
            for axis, (factor, sections) in decision.cuts.items() if factor == "row"]
    at = next(i for i, part in enumerate(index) if part is not None and not isinstance(part, slice))
    numbers = index[at]
    refuse(outside(numbers, -extent, extent), IndexError(f"getitem: an index is out of range for {extent} rows"))
    numbers = xp.where(numbers < 0, numbers + extent, numbers)
    here, place, first = numbers < 0, xp.zeros_like(numbers), 0
    for lo, hi in held(extent, cuts):
        inside = (lo <= numbers) & (numbers < hi)
        here, place = here | inside, xp.where(inside, numbers - lo + first, place)
        first += hi - lo
    y = ops.getitem(x, (*index[:at], place, *index[at + 1:]))
    here = here.reshape(here.shape + (1,) * (len(y.shape) - here.ndim - at))
    return ops.where(here, y, 0.0 if is_floating(y.dtype) else y.dtype.type(0))      # (bools beside 0 are no bools)


# ---------------------------------------------------------------- fused ops whose parts need each other

def _linear(x, weight, bias):
    return ops.matmul(x, swap_last(weight)) + bias


def _linear_gelu(x, weight, bias, approximate):
    return bind(OPS["gelu"], (ops.linear(x, weight, bias),), (approximate,))


def _conv(x, weight, bias, *params):
    return bind(OPS["conv"], (x, weight, None), params) + ops.reshape(bias, (bias.shape[0],) + (1,) * len(params[0]))


def _cross_entropy(logits, labels, ignore):
    classes = xp.arange(logits.shape[1], like=labels)
    picked = ops.sum(ops.where(labels[:, None] == classes, logits, 0.0), 1)
    losses = ops.logsumexp(logits, 1) - picked
    return losses if ignore is None else ops.where(labels != ignore, losses, 0.0)


def _linear_cross_entropy(x, weight, labels, ignore, wide, shares):
    return _cross_entropy(ops.linear(x, weight), labels, ignore)


DEFINITIONS = {"linear": _linear, "linear_gelu": _linear_gelu, "conv": _conv,
               "softmax_cross_entropy": _cross_entropy, "linear_cross_entropy": _linear_cross_entropy} | {
    name: OPS[name].definition for name in ("softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm")}


def taken_apart(primitive, args):
    """The op in others that can be cut where it must be whole, which sends sums in place of operands; or None."""
    if primitive.name == "conv" and args[2] is None:
        return None
    return DEFINITIONS.get(primitive.name)
