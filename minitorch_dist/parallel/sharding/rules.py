"""Sharding rules: for each op of the table, which dimensions of operands and results go together.

As in an einsum a dimension has a factor, a letter. What cuts a factor in one operand must cut it in all of them, and
cuts it in the result; a factor that the result hasn't is summed, so that its parts give parts of a sum:

    matmul       …ik,…kj->…ij        k cut: the result is Partial
    linear       …k,ok,o->…o         k whole: the bias may be added once only
    max_pool     bc*->bc*            * and _: dimensions that can't be cut
    reshape      (12, 5) -> (4, 3, 5)     ab,c -> a,b,c: where two factors make up a dimension, the major one can be cut
    softmax      …                   the factor of its axis must be whole

Sources: Lepikhin et al. 2020, "GShard"; Xu et al. 2021, "GSPMD"; for factors, the Shardy project.
"""

import functools
import math
from dataclasses import dataclass, field, replace

from ...autodiff.ops.attention import ALL, CAUSAL
from ...autodiff.ops.indexing import is_basic
from ...autodiff.ops.reduction import normal_axes

FREE = ("_", "*")       # stand for dimensions without a factor


@dataclass(frozen=True)
class Factors:
    """What an op does to dimensions.

    operands    per operand, per dimension: its factors, the major one first; () where it can't be cut
    results     the same per result; None where nothing can be cut and only running the op tells how many there are
    extents     {factor: extent}
    whole       factors that can't be cut although they have a name
    sectioned   {factor: sections}: it can be cut in these sections only, of which each is then a result
    """

    operands: tuple
    results: tuple
    extents: dict
    whole: frozenset = frozenset()
    sectioned: dict = field(default_factory=dict)

    @property
    def lost(self):
        """The factors that no result has: over them the op adds up, or takes the greatest."""
        there = {f for result in self.results or () for dim in result for f in dim}
        return frozenset(f for operand in self.operands for dim in operand for f in dim) - there

    def holding(self, more):
        """With more factors that must be whole."""
        return replace(self, whole=self.whole | frozenset(more))

    def __str__(self):
        def text(dims):
            return "(" + ", ".join("".join(dim) or "·" for dim in dims) + ")"
        results = "?" if self.results is None else " ".join(map(text, self.results))
        return f"{' '.join(map(text, self.operands))} -> {results}" + (
            f", whole: {' '.join(sorted(self.whole))}" if self.whole else "")


def factors(operands, results, shapes, whole=(), **more):
    """Factors of operands and results that are given as lists of names, one per dimension. A dimension of one element
    has none: it broadcasts. ValueError where dimensions of one name have several extents."""
    extents = {}
    for names, shape in zip(operands, shapes, strict=True):
        for name, extent in zip(names, shape, strict=True):
            if name not in FREE and extent != 1 and extents.setdefault(name, extent) != extent:
                raise ValueError(f"shapes {', '.join(map(str, map(tuple, shapes)))} don't fit: {extents[name]} meets "
                                 f"{extent}")

    def dims(names, shape):
        return tuple((name,) if name in extents and extent != 1 else ()
                     for name, extent in zip(names, shape, strict=True))
    return Factors(tuple(dims(names, shape) for names, shape in zip(operands, shapes, strict=True)),
                   tuple(dims(names, [0] * len(names)) for names in results), extents,
                   frozenset(whole) & frozenset(extents), **more)


def named(text, shapes, whole=()):
    """Factors of "…ik,…kj->…ij": letters; … any leading dimensions, aligned on the right; * any that can't be cut."""
    inputs, _, outputs = text.partition("->")
    # (an operand that was left out has the shape of a number)
    inputs = ["" if shape == () else part for part, shape in zip(inputs.split(","), shapes, strict=True)]
    hidden = [len(shape) - sum(c not in "…*" for c in part) for part, shape in zip(inputs, shapes, strict=True)]
    width = max((h for h, part in zip(hidden, inputs, strict=True) if "…" in part), default=0)

    def names(part, more):
        found = []
        for c in part:
            found += [f"…{i}" for i in range(more, 0, -1)] if c == "…" else ["*"] * more if c == "*" else [c]
        return found
    return factors([names(part, more) for part, more in zip(inputs, hidden, strict=True)],
                   [names(part, hidden[0] if "*" in part else width) for part in outputs.split(",")], shapes, whole)


# ---------------------------------------------------------------- rules that look at parameters

def _letters(shape):
    return [f"d{i}" for i in range(len(shape))]


def _several(axes, ndim):
    axes = normal_axes(axes, ndim)
    return tuple(range(ndim)) if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _reduction(shapes, p):
    names = _letters(shapes[0])
    gone = _several(p["axes"], len(names))
    left = [("_" if i in gone else name) for i, name in enumerate(names) if p["keepdims"] or i not in gone]
    return factors([names], [left], shapes)


def _choosing(shapes, p):
    found = _reduction(shapes, {"axes": p.get("axis", p.get("axes")), "keepdims": p["keepdims"]})
    return found.holding(found.lost)


def _along(shapes, p):
    """All operands and the result have one shape, and lines along an axis stay whole."""
    names = _letters(shapes[0])
    return factors([names] * len(shapes), [names], shapes, [names[i] for i in _several(p["axis"], len(names))]
                   if names else ())


def _transpose(shapes, p):
    names = _letters(shapes[0])
    return factors([names], [[names[i] for i in p["perm"]]], shapes)


def _broadcast(shapes, p):
    names = _letters(shapes[0])
    return factors([names], [["_"] * (len(p["new"]) - len(names)) + names], shapes)


def _reshape(shapes, p):
    """Factors are what lies between two ends of dimensions, in row-major order, of the old or the new shape."""
    old, new = p["old"], p["new"]
    ends = sorted({math.prod(shape[i:]) for shape in (old, new) for i in range(len(shape) + 1)})
    if not math.prod(old) or any(b % a for a, b in zip(ends, ends[1:], strict=False)):
        return Factors((((),) * len(old),), (((),) * len(new),), {})
    extents = {f"r{b}": b // a for a, b in zip(ends, ends[1:], strict=False)}

    def dims(shape):
        found = []
        for i in range(len(shape)):
            low, high = math.prod(shape[i + 1:]), math.prod(shape[i:])
            found.append(tuple(f"r{end}" for end in reversed(ends) if low < end <= high))
        return tuple(found)
    return Factors((dims(old),), (dims(new),), extents)


def _concatenate(shapes, p):
    names = [[f"{p['axis']}of{k}" if i == p["axis"] else f"d{i}" for i in range(len(shape))]
             for k, shape in enumerate(shapes)]
    return factors(names, [["_" if i == p["axis"] else f"d{i}" for i in range(len(shapes[0]))]], shapes,
                   [f"{p['axis']}of{k}" for k in range(len(shapes))])


def _split(shapes, p):
    names = _letters(shapes[0])
    return factors([names], [names] * len(p["sizes"]), shapes, sectioned={
        names[p["axis"]]: tuple(p["sizes"]) if len(p["sizes"]) > 1 else ()})


def is_mask(part):
    """Whether a part of an index is an array of bools."""
    return hasattr(part, "dtype") and part.dtype.kind == "b"


def index_parts(index, ndim):
    """An index as a tuple with a part for each dimension it takes, and for each None: the Ellipsis written out."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(part.ndim if is_mask(part) else 1
                for part in parts if part is not None and part is not Ellipsis)
    if taken > ndim or sum(part is Ellipsis for part in parts) > 1:
        raise IndexError(f"getitem: an index for {taken} dimensions, of a value that has {ndim}, or more than one …")
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    if at is None:
        return tuple(parts) + (slice(None),) * (ndim - taken)
    return (*parts[:at], *(slice(None),) * (ndim - taken), *parts[at + 1:])


def is_full(part, extent):
    """Whether a slice takes all, in order."""
    return isinstance(part, slice) and part.indices(extent) == (0, extent, 1)


def _getitem(shapes, p):
    """x and the arrays of the index. Where one array of integers takes rows, x may be cut along them: each rank gives
    the rows that it has, and zeros for the others."""
    (shape, *arrays), parts = shapes, index_parts(p["index"], len(shapes[0]))
    if any(map(is_mask, parts)):
        return Factors(tuple(((),) * len(s) for s in shapes), None, {})
    width = max(map(len, arrays), default=0)
    taken = [[f"i{k}" for k in range(len(s), 0, -1)] for s in arrays]
    advanced = [i for i, part in enumerate(parts) if part is not None and not isinstance(part, slice)]
    together = bool(arrays) and advanced == list(range(advanced[0], advanced[-1] + 1))
    names, result, at, axis = [], [], 0, 0
    for i, part in enumerate(parts):
        if i == (advanced[0] if advanced else None):
            at = len(result)
        if part is None:
            result.append("_")
            continue
        if isinstance(part, slice):
            names.append(f"d{axis}" if is_full(part, shape[axis]) else "_")
            result.append(names[-1])
        else:
            names.append("row" if len(arrays) == 1 and len(advanced) == 1 else "_")
        axis += 1
    if arrays:
        at = at if together else 0
        result[at:at] = [f"i{k}" for k in range(width, 0, -1)]
    return factors([names, *taken], [result], shapes)


def _scatter_add(shapes, p):
    shape, parts = p["shape"], index_parts(p["index"], len(p["shape"]))
    left = [axis for axis, part in enumerate(parts) if isinstance(part, slice)]
    if not is_basic(p["index"]) or None in parts or len(left) != len(shapes[0]):
        return Factors(tuple(((),) * len(s) for s in shapes), (((),) * len(shape),), {})
    names = {axis: f"d{axis}" if is_full(parts[axis], shape[axis]) and shapes[0][k] == shape[axis] else "_"
             for k, axis in enumerate(left)}
    return factors([[names[axis] for axis in left]], [[names.get(axis, "_") for axis in range(len(shape))]], shapes)


def _windows(shapes, p, more):
    n = len(p["kernel"])
    lead = _letters(shapes[0])[:len(shapes[0]) - n * (1 if more else 2)]
    return factors([lead + ["_"] * (len(shapes[0]) - len(lead))], [lead + ["_"] * (2 * n if more else n)], shapes)


def _norm(shapes, p):
    names = _letters(shapes[0])
    last = names[len(names) - p["n"]:]
    return factors([names, *[last if s else [] for s in shapes[1:]]], [names], shapes, last)


def _conv(shapes, p):
    """With a bias, input channels are whole: it may be added once only. Groups of channels stay as they are."""
    if p["groups"] > 1:
        return named("b_*,__*,_->b_*", shapes)
    return named("bc*,oc*,o->bo*", shapes, "c" if shapes[2] else "")


def _attention(shapes, p):
    """Heads by groups that share keys: h = (g, s); a query's time may be cut where no mask is made from it."""
    (batch, heads, _, _), groups = shapes[0], shapes[1][1]

    def one(name, extent):
        return (name,) if extent > 1 else ()
    extents = {"b": batch, "g": groups, "s": heads // groups, "t": shapes[0][2], "e": shapes[2][3]}
    b, g, t, e = (one(name, extents[name]) for name in "bgte")
    h = g + one("s", heads // groups)
    documents = () if p["documents"] is None else ((b, t), (b, ()))
    mask = (tuple(dims if extent > 1 else () for dims, extent in zip(
        (b, h, t, ())[4 - len(shape):], shape, strict=True)) for shape in shapes[3:len(shapes) - len(documents)])
    return Factors(((b, h, t, ()), (b, g, (), ()), (b, g, (), e), *mask, *documents), ((b, h, t, e),), extents,
                   frozenset("t" if p["band"] != ALL else ""))


def _greatest_scores(shapes, p):
    """Attention's without values: of each head the greatest over all else."""
    found = _attention([*shapes[:2], *shapes[1:]], p)
    (_, heads, *_), (queries, keys, _, *more) = found.operands[0], found.operands
    return Factors((queries, keys, *more), ((heads,),), found.extents, found.whole)


def _by_blocks(rule):
    """Attention's of whole sequences, among whose blocks each position chooses."""
    return lambda shapes, p: rule(shapes, {"documents": None, "band": CAUSAL})


def _einsum(shapes, p):
    inputs, _, output = p["subscripts"].partition("->")
    return factors([list(part) for part in inputs.split(",")], [list(output)], shapes)


def _text(text, whole=""):
    return lambda shapes, p: named(text, shapes, whole)


ELEMENTWISE = (
    "add sub mul div neg power mod maximum minimum exp expm1 log log1p sqrt rsqrt square sin cos tanh abs sign floor "
    "ceil isnan isfinite sigmoid relu erf greater greater_equal less less_equal equal not_equal logical_and logical_or "
    "logical_xor logical_not floor_divide where astype to_device gelu swiglu").split()

# What each entry of the op table does: (shapes of operands and of arrays among the parameters; the parameters) ->
# Factors.
RULES = {
    **dict.fromkeys(ELEMENTWISE, lambda shapes, p: named(",".join(["…"] * len(shapes)) + "->…", shapes)),
    **dict.fromkeys(("sum", "max", "min", "any", "all"), _reduction),
    **dict.fromkeys(("argmax", "argmin", "prod"), _choosing),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "sort", "reorder"), _along),
    "reshape": _reshape, "transpose": _transpose, "broadcast_to": _broadcast, "concatenate": _concatenate,
    "split": _split, "getitem": _getitem, "scatter_add": _scatter_add,
    "matmul": _text("…ik,…kj->…ij"), "linear": _text("…k,ok,o->…o", "k"), "linear_gelu": _text("…k,ok,o->…o", "k"),
    "grouped_matmul": _text("_k,_kj->_j"), "grouped_outer": _text("_i,_j->_ij"),
    "einsum": _einsum, "attention": _attention, "greatest_scores": _greatest_scores, "conv": _conv,
    "block_attention": _by_blocks(_attention), "greatest_block_scores": _by_blocks(_greatest_scores),
    "max_pool": _text("bc*->bc*"), "avg_pool": _text("bc*->bc*"),
    "windows": functools.partial(_windows, more=True), "fold": functools.partial(_windows, more=False),
    "layer_norm": _norm, "rms_norm": _norm, "batch_norm": _text("bc*,c,c->bc*,c,c", "b"),
    "softmax_cross_entropy": _text("bc,b->b", "c"), "linear_cross_entropy": _text("bk,ck,b->b", "kc"),
}

# Which collective makes the whole of the parts where a factor is lost.
REDUCED_BY = {"max": "max", "min": "min", "any": "max", "all": "min", "greatest_scores": "max",      # others: "sum"
              "greatest_block_scores": "max"}

# Linear ops, through which a sum that is pending passes. "sum": what is no pending sum becomes one, if that makes it no
# larger; "product": the other operand is a constant; "quotient": of the first operand, by a constant.
LINEAR = {**dict.fromkeys(("neg", "reshape", "transpose", "sum", "split", "astype", "to_device", "add", "sub"), "sum"),
          "mul": "product", "div": "quotient"}

# Parameters that are a shape, of operand 0 or of the result: a rank's op has its own.
SHAPES = {"reshape": {"old": 0, "new": "result"}, "broadcast_to": {"old": 0, "new": "result"}, "sum": {"shape": 0},
          "max": {"shape": 0}, "min": {"shape": 0}, "getitem": {"shape": 0}, "split": {"shape": 0},
          "scatter_add": {"shape": "result"}}
