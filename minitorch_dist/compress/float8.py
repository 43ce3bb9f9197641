"""Training in 8 bits: products of numbers of 8 bits, with a scale for each group of them.

             exponent   fraction   largest   smallest
    e4m3       4 bits     3 bits       448       2⁻⁹      weights, activations
    e5m2       5          2         57,344       2⁻¹⁶     gradients, where all have one scale

    model = convert_to_float8_training(model, "rowwise")    # its Linears, in place; then as always

A number is kept to one part in 16 (8), over a range that no tensor fits into as it is: so each group of numbers is
multiplied by a scale s that brings the largest to 448 (57,344), rounded, and the sum of products divided by both
scales. A Linear has three products, and each rounds its operands anew, in groups along the axis that it sums over:

    y = x Wᵀ    dx = g W    dW = gᵀ x          tensorwise   one scale for all
                                               rowwise      one for each sum's numbers: a row of x, a row of W
    sums of blocks are added up in float32     blockwise    one for 128 of them; of W for 128 × 128

One large number costs all those of its group their digits, or makes them 0: the finer the groups, the fewer. (Sums over
tokens have groups of tokens: with batches cut over ranks dW is rounded otherwise, but for exact mode.)

Of a layer that tensor parallelism has cut each rank rounds its part to what one process has there. Where several ranks
have numbers of one group they need its largest: they ask for all of these at once, by an all-reduce for y and another
for dx and dW, or none. Of so many numbers, for x (tokens, in):

                                        tensorwise: y, dx and dW    rowwise: y, dx and dW       blockwise
    column parallel: out is cut             1          3               –         tokens + in    – where 128 divides
    row parallel:    in is cut              2          2          tokens + out        –           all ranks' parts

The rounding is that of an H100's hardware, the sums are those of float32, by BLAS: it is for seeing what becomes of a
training, not faster. What backward needs is kept as it was, in its own precision. Under autocast a layer takes and
gives 16 bits, as a Linear does; its weight is rounded to 8 bits from float32. Sources: Micikevicius et al. 2022, "FP8
formats for deep learning"; DeepSeek-AI 2024, "DeepSeek-V3 technical report", 3.3 (blockwise). Names, and what autocast
does, are torchao's.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..autodiff import ops
from ..autodiff.autocast import lowered
from ..autodiff.custom import custom_vjp
from ..backend import is_floating, matmul, module_of, to_device_of, xp
from ..nn.layers import Linear
from ..nn.module import Module
from ..parallel.parts import indices_of_ranks
from .quant_model import replaced


@dataclass(frozen=True)
class Format:
    """Floating numbers of 8 bits. bits: of the fraction; least: the smallest normal number's exponent; largest."""

    name: str
    bits: int
    least: int
    largest: float

    def rounded(self, x):
        """x, float32 or float64, as the nearest of these numbers, halves to even; beyond the largest it is that. NaN
        stays."""
        arrays = module_of(x)
        near = arrays.minimum(arrays.maximum(x, -self.largest), self.largest)
        step = arrays.maximum(power_below(near), 2.0 ** self.least) * 2.0 ** -self.bits
        # The processor rounds to multiples of the last bit of so large a number, which is this step.
        large = step * (1.5 * 2.0 ** xp.finfo(x.dtype).nmant)
        return arrays.copysign((near + large) - large, x)


def power_below(x):
    """2^floor(log2 |x|) of float32 or float64, 0 for 0: x without its sign and fraction."""
    bits, exponent = (xp.int32, 0x7F800000) if x.dtype == xp.float32 else (xp.int64, 0x7FF0000000000000)
    return (x.view(bits) & exponent).view(x.dtype)


E4M3 = Format("e4m3", 3, -6, 448.0)
E5M2 = Format("e5m2", 2, -14, 57344.0)


@dataclass(frozen=True)
class Recipe:
    """How the operands of products are rounded.

    gradient       the Format of gradients; all else is in e4m3
    block          (rows, elements along the axis that is summed over) that share a scale; None: all
    weight_block   the same, of weights
    power_of_two   whether scales are powers of two, which round nothing by themselves
    """

    gradient: Format
    block: tuple
    weight_block: tuple
    power_of_two: bool

    def __post_init__(self):
        if self.block[1] != self.weight_block[1]:
            raise ValueError(f"Recipe: block {self.block} and weight_block {self.weight_block} must have groups of the "
                             "same length along the axis that is summed over, the second one")


RECIPES = {
    "tensorwise": Recipe(E5M2, (None, None), (None, None), False),
    "rowwise": Recipe(E4M3, (1, None), (1, None), True),
    "blockwise": Recipe(E4M3, (1, 128), (128, 128), True),
}


# ---------------------------------------------------------------- groups, of which several ranks may have numbers

class Groups(NamedTuple):
    """The elements of an axis that are here, by groups.

    count    how many groups have some here
    size     how many elements a whole one has
    of       the group of each element, counted from 0 among those here
    place    where the elements stand among count · size
    members  the elements of each group
    numbers  which of all ranks' groups those here are; these are `total`
    shared   whether a group has elements on several ranks: the same on all of them
    """

    count: int
    size: int
    of: object
    place: object
    members: list
    numbers: object
    total: int
    shared: bool


def groups_of(extent, size, like, cut=None):
    """The Groups of so many elements (None: of all) along an axis that has `extent` here, for arrays like `like`.
    cut: the Cut, where it is one rank's part of the axis."""
    if cut is not None and size not in (None, 1):
        groups = cut.groups(size)
        there = {name: to_device_of(getattr(groups, name), like) for name in ("of", "place", "numbers")}
        return groups._replace(**there, members=[to_device_of(each, like) for each in groups.members])
    shared = size is None and cut is not None and cut.comm.size > 1
    count, size = (1, max(extent, 1)) if size is None else (-(-extent // size), size)
    return Groups(count, size, module_of(like).arange(extent) // size, slice(extent),
                  [slice(i * size, (i + 1) * size) for i in range(count)], slice(count), count, shared)


class Cut:
    """An axis that is cut over the ranks of comm. indices: those that each rank has."""

    def __init__(self, comm, indices):
        self.comm, self.indices, self.found = comm, indices, {}

    def groups(self, size):
        """The Groups of this rank's part."""
        if size not in self.found:
            ranks = [np.unique(each // size) for each in self.indices]
            total = -(-sum(map(len, self.indices)) // size)
            mine = self.indices[self.comm.rank]
            numbers, of = np.unique(mine // size, return_inverse=True)
            self.found[size] = Groups(len(numbers), size, of, of * size + mine % size,
                                      [np.flatnonzero(of == i) for i in range(len(numbers))], numbers, total,
                                      sum(map(len, ranks)) > total)
        return self.found[size]


class Operand:
    """A matrix on its way into 8 bits.

    x      (rows, columns), float32 or float64
    form   the Format
    block  (rows, columns) of a group; None: all. Those at the ends may be smaller
    cuts   the Cut of each axis, None where all of it is here; one at most
    largest  by (group of rows, group of columns): the largest |x|, of this rank's until over_ranks has been called
    """

    def __init__(self, x, form, block, cuts=(None, None)):
        self.x, self.form = x, form
        self.groups = rows, columns = [groups_of(n, size, x, cut) for n, size, cut
                                       in zip(x.shape, block, cuts, strict=True)]
        self.comm = next((cut.comm for cut, of in zip(cuts, self.groups, strict=True) if of.shared), None)
        arrays = module_of(x)
        padded = arrays.zeros((rows.count * rows.size, columns.count * columns.size), x.dtype)
        padded[rows.place, columns.place] = arrays.absolute(x)
        self.largest = padded.reshape(rows.count, rows.size, columns.count, columns.size).max((1, 3))

    def scaled(self, power_of_two):
        """(x · scale, rounded; scale by group), both in x's dtype. The scale is the format's largest number / the
        group's largest, or the power of two next below. A group of numbers below 1e-12 has 1e-12's; inf and NaN become
        NaN."""
        scale = self.form.largest / module_of(self.x).maximum(self.largest, 1e-12)
        scale = power_below(scale) if power_of_two else scale
        rows, columns = self.groups
        return self.form.rounded(self.x * scale[rows.of[:, None], columns.of]), scale


def over_ranks(operands):
    """Let `largest` be that of all ranks' numbers, where several have some of a group: by one all-reduce, or none."""
    shared = [o for o in operands if o.comm is not None]
    if not shared:
        return
    arrays, wholes = module_of(shared[0].x), []
    for o in shared:
        rows, columns = o.groups
        wholes.append(arrays.zeros((rows.total, columns.total), o.x.dtype))
        wholes[-1][rows.numbers, columns.numbers] = o.largest
    sent = arrays.concatenate([whole.reshape(-1) for whole in wholes])
    sent[arrays.isnan(sent)] = xp.inf       # of which the scale is as bad; but a maximum may pass NaN over
    shared[0].comm.all_reduce(sent, "max", what="the largest numbers of float8's groups")
    for o, whole in zip(shared, wholes, strict=True):
        (rows, columns), (mine, sent) = o.groups, (sent[:whole.size], sent[whole.size:])
        o.largest = mine.reshape(whole.shape)[rows.numbers, columns.numbers]


def products(pairs, power_of_two):
    """[a bᵀ] of pairs of Operands (m, k) and (n, k) whose groups are equally long along k: each (m, n), in their
    dtype; where k is cut over ranks, this one's part of the sum."""
    with xp.errstate(invalid="ignore", divide="ignore"):        # inf and NaN are for a GradScaler to see
        over_ranks([operand for pair in pairs for operand in pair])
        return [_product(*pair, power_of_two) for pair in pairs]


def _product(a, b, power_of_two):
    (x, scale_x), (y, scale_y) = a.scaled(power_of_two), b.scaled(power_of_two)
    out = module_of(x).zeros((len(x), len(y)), x.dtype)
    for i, part in enumerate(a.groups[1].members):
        of_x, of_y = scale_x[:, i][a.groups[0].of], scale_y[:, i][b.groups[0].of]
        out += matmul(x[:, part], y[:, part].T) / of_x[:, None] / of_y
    return out


# ---------------------------------------------------------------- layers

def linear_of(recipe, rows=None, columns=None):
    """f(x, weight) = x weightᵀ by a Recipe, with its gradients: (tokens, in), (out, in) -> (tokens, out), in x's dtype.
    Sums are made in float32 at least. Rounding passes derivatives on as they are; so there is one of the first order,
    in reverse mode: TypeError for others, when they are asked for.

    rows, columns  the Cuts of the weight's axes, where this rank has a part of it
    """
    def operand(x, form, block, *cuts):
        return Operand(x.astype(xp.promote_types(x.dtype, xp.float32), copy=False), form, block, cuts)

    @custom_vjp
    def float8_linear(x, weight):
        y, = products([(operand(x, E4M3, recipe.block, None, columns),
                        operand(weight, E4M3, recipe.weight_block, rows, columns))], recipe.power_of_two)
        return y.astype(x.dtype)

    @custom_vjp
    def float8_linear_backward(x, weight, g):
        dx, dw = products([
            (operand(g, recipe.gradient, recipe.block, None, rows),
             operand(weight.T, E4M3, recipe.weight_block, columns, rows)),
            (operand(g.T, recipe.gradient, recipe.block, rows, None),
             operand(x.T, E4M3, recipe.block, columns, None))], recipe.power_of_two)
        return dx.astype(x.dtype), dw.astype(weight.dtype)

    def once(kept, cotangents):
        raise TypeError("products of 8 bits can be differentiated once only: their gradients are rounded too, and a "
                        "second derivative would be none of what is computed. Convert the model afterwards")
    float8_linear_backward.defvjp(lambda *args: (float8_linear_backward(*args), None), once)
    float8_linear.flops = lambda x, weight: 2 * x.shape[0] * weight.size
    return float8_linear.defvjp(lambda x, weight: (float8_linear(x, weight), (x, weight)),
                                lambda kept, g: float8_linear_backward(*kept, g))


linear_in = functools.cache(linear_of)      # of recipes; a Cut holds a Communicator, and would be kept for ever


def applied(linear, x, weight, bias):
    """x weightᵀ + bias by `linear`, one that linear_of has made: (…, in) -> (…, out), in x's dtype, or autocast's."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"a layer of 8 bits: the last axis of x {tuple(x.shape)} must be {weight.shape[1]}, as of its "
                         f"weight {tuple(weight.shape)}")
    x = lowered(x) if is_floating(x.dtype) else ops.astype(x, weight.dtype)
    rows = x if len(x.shape) == 2 else ops.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = linear(rows, weight)
    y = y if len(x.shape) == 2 else ops.reshape(y, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + ops.astype(bias, y.dtype)


def recipe_of(recipe):
    """A Recipe, given by itself or by its name; ValueError for another name."""
    if not isinstance(recipe, Recipe) and recipe not in RECIPES:
        raise ValueError(f"Float8Linear: recipe {recipe!r}; there are {', '.join(RECIPES)}")
    return recipe if isinstance(recipe, Recipe) else RECIPES[recipe]


class Float8Linear(Module):
    """A Linear whose products are of numbers of 8 bits: (…, in_features) -> (…, out_features), in the input's dtype, or
    autocast's. Its parameters are the layer's own, in their own precision.

    recipe  a Recipe, or one of RECIPES by name
    """

    def __init__(self, linear, recipe="tensorwise"):
        super().__init__()
        self.recipe = recipe_of(recipe)
        for name in ("weight", "bias"):
            self._register(self._parameters, name, getattr(linear, name))

    def forward(self, x):
        return applied(linear_in(self.recipe), x, self.weight, self.bias)

    def extra_repr(self):
        return ", ".join(map(str, self.weight.shape[::-1]))


class Float8Part:
    """What makes the products of a rank's part of a Linear in 8 bits, in ops.linear's place. Collective.

    layer  a ColumnParallelLinear or RowParallelLinear
    """

    def __init__(self, layer, recipe):
        axis, indices, extent = layer.parts["weight"]
        cuts = [None, None]
        cuts[axis] = Cut(layer.comm, indices_of_ranks(layer.comm, indices, extent))
        self.linear = linear_of(recipe, *cuts)

    def __call__(self, x, weight, bias=None):
        return applied(self.linear, x, weight, bias)

    def __repr__(self):
        return "8 bits"


def convert_to_float8_training(model, recipe="tensorwise", module_filter_fn=None):
    """Let a model's Linears make their products in 8 bits, in place. Returns the model; one that is a Linear itself
    comes back as a Float8Linear.

    recipe            "tensorwise", "rowwise", "blockwise", or a Recipe
    module_filter_fn  module_filter_fn(linear, its path) -> whether it is to be changed (default: each). First and last
                      layers are often left out

    Parameters stay what they are, with their names, optimizer and place in flat buffers. ValueError where no Linear is
    found. Cut models by parallelize_module before; then it is collective, and their parts of Linears stay, with other
    products in them.
    """
    chosen = [(path, m) for path, m in model.named_modules() if "forward" not in vars(m)
              and (type(m) is Linear or getattr(m, "product", None) is ops.linear)
              and (module_filter_fn is None or module_filter_fn(m, path))]
    if not chosen:
        raise ValueError("convert_to_float8_training: the model has no Linear"
                         + " that module_filter_fn takes" * (module_filter_fn is not None))
    for _, m in chosen:
        if type(m) is not Linear:
            m.product = Float8Part(m, recipe_of(recipe))
    return replaced(model, {id(m): Float8Linear(m, recipe) for _, m in chosen if type(m) is Linear})
