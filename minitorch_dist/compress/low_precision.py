"""Training in 8 and 4 bits: products of numbers of so few bits, with a scale for each group of them.

             exponent   fraction   largest   smallest
    e4m3       4 bits     3 bits       448       2⁻⁹
    e5m2       5          2         57,344       2⁻¹⁶
    e2m1       2          1              6       ½         with its sign: 0 ½ 1 1½ 2 3 4 6, and these below 0

    model = convert_to_low_precision_training(model, "rowwise")      # its Linears, in place; then as always

A number is kept to one part in 16 (8, 4), over a range that no tensor fits into as it is: so each group of numbers is
divided by a scale that brings the largest to the range's end, rounded, and multiplied by the scale again. A Linear has
three products, and each rounds its operands anew, in groups along the axis that it sums over:

    y = x Wᵀ    dx = g W    dW = gᵀ x
                                        numbers that share a scale                      scales
    tensorwise  e4m3; e5m2 for g        all                                             float32
    rowwise     e4m3                    one sum's: a row of x, a row of W               powers of two
    blockwise   e4m3                    128 of these; of W 128 × 128                    powers of two
    mxfp8       e4m3                    32 of these                                     powers of two (e8m0)
    mxfp4       e2m1                    32 of these                                     powers of two (e8m0)
    nvfp4       e2m1                    16 of these; of W 16 × 16                       e4m3, and one for all in float32

One large number costs all those of its group their digits, or makes them 0: the finer the groups, the fewer. (Sums over
tokens have groups of tokens: with batches cut over ranks dW is rounded otherwise, but for exact mode.) Of W a square
has one scale where y and dx, which sum along different axes, are to be made of the same rounded W.

4 bits leave so little of a gradient that nvfp4 does two things more, each a field of its Recipe. stochastic_rounding: g
goes up or down by chance, so that its mean stays; to the nearest, all below a twenty-fourth of their group's largest
would be 0, at every step. random_hadamard: for dW, 16 tokens of g and of x at a time are mixed by an orthogonal matrix,
which leaves dW what it is and spreads an outlier. The paper also leaves some layers, the last ones above all, in 16
bits: that is module_filter_fn's to say.

Of a layer that tensor parallelism has cut each rank rounds its part to what one process has there, by chance too: the
draws are of the whole layer, keyed as dropout's are. Where several ranks have numbers of one group they need its
largest: they ask for all of these at once, by an all-reduce for y and another for dx and dW (of these for what is
wanted: a frozen layer has no dW), or none. Of so many numbers, for x (tokens, in):

                                      tensorwise: y, dx and dW   rowwise: y, dx and dW    the others
    column parallel: out is cut           1          3               –         tokens+in  – where groups lie inside of
    row parallel:    in is cut            2          2          tokens+out     –          ranks; nvfp4: tensorwise's

The rounding is that of hardware (of an H100, from mxfp8 on of a Blackwell), the sums are those of float32, by BLAS: it
is for seeing what becomes of a training, not faster. What backward needs is kept as it was, in its own precision. Under
autocast a layer takes and gives 16 bits, as a Linear does; its weight is rounded from float32. Names, and what autocast
does, are torchao's. Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-AI 2024, "DeepSeek-V3
technical report", 3.3 (blockwise); Open Compute Project 2023, "Microscaling formats (MX) specification v1.0", and
Mishra et al. 2025, "Recipes for pre-training LLMs with MXFP8", which rounds its scales up; NVIDIA 2025, "Pretraining
large language models with NVFP4".
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..autodiff import ops
from ..autodiff.autocast import lowered
from ..autodiff.custom import custom_vjp
from ..autodiff.modes import is_grad_enabled
from ..backend import is_floating, is_whole, matmul, module_of, random_draws, to_device_of, uniform_of_draws, xp
from ..nn.layers import Linear
from ..nn.module import Module
from ..parallel.tensor.parts import check_products, indices_of_ranks
from .formats import E2M1, E4M3, E5M2, SCALES, Format, hadamard
from .quant_model import replaced


@dataclass(frozen=True)
class Recipe:
    """How the operands of products are rounded.

    element              the Format of weights and of what goes forward
    gradient             that of gradients
    block                (rows, elements along the axis that is summed over) that share a scale; None: all
    weight_block         the same, of weights
    scale                what scales are rounded to, one of SCALES
    stochastic_rounding  whether gradients are rounded up or down by chance
    random_hadamard      whether dW is made of mixed tokens
    """

    element: Format
    gradient: Format
    block: tuple
    weight_block: tuple
    scale: str
    stochastic_rounding: bool = False
    random_hadamard: bool = False

    def __post_init__(self):
        for name in ("block", "weight_block"):
            if not all(n is None or is_whole(n) and n >= 1 for n in getattr(self, name)):
                raise ValueError(f"Recipe: {name} {getattr(self, name)} must be of numbers from 1, or None for all")
        if self.block[1] != self.weight_block[1]:
            raise ValueError(f"Recipe: block {self.block} and weight_block {self.weight_block} must have groups of the "
                             "same length along the axis that is summed over, the second one")
        if self.scale not in SCALES:
            raise ValueError(f"Recipe: scale={self.scale!r}; there are {', '.join(SCALES)}")


RECIPES = {
    "tensorwise": Recipe(E4M3, E5M2, (None, None), (None, None), "float32"),
    "rowwise": Recipe(E4M3, E4M3, (1, None), (1, None), "e8m0"),
    "blockwise": Recipe(E4M3, E4M3, (1, 128), (128, 128), "e8m0"),
    "mxfp8": Recipe(E4M3, E4M3, (1, 32), (1, 32), "e8m0"),
    "mxfp4": Recipe(E2M1, E2M1, (1, 32), (1, 32), "e8m0"),
    "nvfp4": Recipe(E2M1, E2M1, (1, 16), (16, 16), "e4m3", stochastic_rounding=True, random_hadamard=True),
}


# ---------------------------------------------------------------- groups, of which several ranks may have numbers

class Groups(NamedTuple):
    """The elements of an axis that are here, by groups.

    count    how many groups have some here
    size     how many elements a whole one has
    of       an index that gives each element what its group has, or, where all or each have one, broadcasts it
    place    where the elements stand among count · size
    numbers  which of all ranks' groups those here are; these are `total`
    shared   whether a group has elements on several ranks: the same on all of them
    """

    count: int
    size: int
    of: object
    place: object
    numbers: object
    total: int
    shared: bool


def groups_of(extent, size, like, cut=None):
    """The Groups of so many elements (None: of all) along an axis that has `extent` here, for arrays like `like`.
    cut: the Cut, where it is one rank's part of the axis."""
    if cut is not None and size not in (None, 1):
        groups = cut.groups(size)
        there = {name: to_device_of(getattr(groups, name), like) for name in ("of", "place", "numbers")}
        return groups._replace(**there)
    shared = size is None and cut is not None and cut.comm.size > 1
    count, size = (1, max(extent, 1)) if size is None else (-(-extent // size), size)
    of = slice(None) if 1 in (count, size) else module_of(like).arange(extent) // size
    return Groups(count, size, of, slice(extent), slice(count), count, shared)


class Cut:
    """An axis that is cut over the ranks of comm. indices: those that each rank has."""

    def __init__(self, comm, indices):
        self.comm, self.indices, self.found = comm, indices, {}
        self.mine, self.extent = indices[comm.rank], sum(map(len, indices))

    def groups(self, size):
        """The Groups of this rank's part."""
        if size not in self.found:
            ranks = [np.unique(each // size) for each in self.indices]
            total = -(-self.extent // size)
            numbers, of = np.unique(self.mine // size, return_inverse=True)
            self.found[size] = Groups(len(numbers), size, of, of * size + self.mine % size, numbers, total,
                                      sum(map(len, ranks)) > total)
        return self.found[size]


class Largest:
    """The largest |x| of each group of a matrix: this rank's until over_ranks has been called.

    found   (groups of rows, groups of columns), in x's dtype
    groups  the Groups of each axis
    comm    of the ranks that have elements of one group; None where each group is here
    """

    def __init__(self, x, block, cuts):
        self.groups = rows, columns = [groups_of(n, size, x, cut) for n, size, cut
                                       in zip(x.shape, block, cuts, strict=True)]
        self.comm = next((cut.comm for cut, of in zip(cuts, self.groups, strict=True) if of.shared), None)
        arrays = module_of(x)
        padded = arrays.zeros((rows.count * rows.size, columns.count * columns.size), x.dtype)
        padded[rows.place, columns.place] = arrays.absolute(x)
        self.found = padded.reshape(rows.count, rows.size, columns.count, columns.size).max((1, 3))


class Operand:
    """A matrix on its way into few bits.

    x       (rows, columns), float32 or float64
    form    the Format
    block   (rows, columns) of a group; None: all. Those at the ends may be smaller
    scale   one of SCALES
    cuts    the Cut of each axis, None where all of it is here; one at most
    chance  what Format.rounded takes, of x's shape
    largest  the Largest of groups, and, for a scale that wants it, of the whole matrix
    """

    def __init__(self, x, form, block, scale, cuts=(None, None), chance=None):
        self.x, self.form, self.scale, self.chance = x, form, SCALES[scale], chance
        self.largest = [Largest(x, block, cuts)]
        if scale == "e4m3":
            self.largest.append(Largest(self.largest[0].found, (None, None), cuts))

    def scaled(self):
        """(numbers of the format, the scale by group): their products stand for x. inf and NaN become NaN, and inf
        makes NaN of all in whose scale it has a part."""
        scale = self.scale(self.largest[0].found, self.largest[-1].found, self.form)
        by = module_of(self.x).maximum(scale, xp.finfo(scale.dtype).tiny)       # who has 0 stays it
        return self.form.rounded(self.x / self.spread(by), self.chance), scale

    def rounded(self):
        """The numbers that stand for x's, in its dtype."""
        numbers, scale = self.scaled()
        return numbers * self.spread(scale)

    def spread(self, scale):
        """What broadcasts to x's shape of what groups have."""
        rows, columns = self.largest[0].groups
        return scale[rows.of][:, columns.of]


def over_ranks(operands):
    """Let `largest` be those of all ranks' numbers, where several have some of a group: by one all-reduce, or none."""
    shared = [each for operand in operands for each in operand.largest if each.comm is not None]
    if not shared:
        return
    arrays, wholes = module_of(shared[0].found), []
    for each in shared:
        rows, columns = each.groups
        wholes.append(arrays.zeros((rows.total, columns.total), each.found.dtype))
        wholes[-1][rows.numbers, columns.numbers] = each.found
    sent = arrays.concatenate([whole.reshape(-1) for whole in wholes])
    sent[arrays.isnan(sent)] = xp.inf       # of which the scale is as bad; but a maximum may pass NaN over
    shared[0].comm.all_reduce(sent, "max", what="the largest numbers of groups")
    for each, whole in zip(shared, wholes, strict=True):
        (rows, columns), (mine, sent) = each.groups, (sent[:whole.size], sent[whole.size:])
        each.found = mine.reshape(whole.shape)[rows.numbers, columns.numbers]


def products(pairs):
    """[a bᵀ] of pairs of Operands (m, k) and (n, k): each (m, n), in their dtype; where k is cut over ranks, this one's
    part of the sum."""
    with xp.errstate(invalid="ignore", divide="ignore", over="ignore"):     # inf and NaN are for a GradScaler to see
        over_ranks([operand for pair in pairs for operand in pair])
        return [matmul(a.rounded(), b.rounded().T) for a, b in pairs]


# ---------------------------------------------------------------- layers

def linear_of(recipe, rows=None, columns=None):
    """f(x, weight) = x weightᵀ by a Recipe, with its gradients: (tokens, in), (out, in) -> (tokens, out), in x's dtype.
    Sums are made in float32 at least. Rounding passes derivatives on as they are; so there is one of the first order,
    in reverse mode: TypeError for others, when they are asked for.

    rows, columns  the Cuts of the weight's axes, where this rank has a part of it
    """
    plain = {wanted: _linear_of(recipe, rows, columns, wanted) for wanted in itertools.product((False, True), repeat=2)}

    def low_precision(x, weight):
        # Of what is frozen backward makes no gradient: no product is rounded for it, and no number drawn.
        wanted = tuple(getattr(a, "node", None) is not None for a in (x, weight))
        if not (recipe.stochastic_rounding and any(wanted) and is_grad_enabled()):
            return plain[wanted](x, weight)
        # The keys are forward's: of the module that runs now, in the scope of its step. Backward may be in another.
        return _linear_of(recipe, rows, columns, wanted, Chances(x.shape[0], weight.shape[0], rows))(x, weight)
    return low_precision


class Chances:
    """Uniform random numbers for the rounding of a gradient (tokens, out), in dx and in dW: which ones is settled now,
    and they are made at each call. cut: the Cut of out, of which this rank has a part: it has that of all numbers."""

    def __init__(self, tokens, out, cut):
        self.shape, self.mine = ((tokens, out), slice(None)) if cut is None else ((tokens, cut.extent), cut.mine)
        self.draws = [random_draws(self.shape) for _ in range(2)]

    def dx(self, like):
        """float32 (tokens, out), on the device of `like`."""
        return self._numbers(0, like)

    def dw(self, like):
        """float32 (out, tokens), on the device of `like`."""
        return self._numbers(1, like).T

    def _numbers(self, which, like):
        return to_device_of(uniform_of_draws(self.draws[which], self.shape)[:, self.mine], like)


def _linear_of(recipe, rows, columns, wanted, chances=None):
    """linear_of; without chances gradients, too, are rounded to the nearest. wanted: whether there is to be dx, and dW.
    """
    def operand(x, form, block, *cuts, chance=None):
        return Operand(x, form, block, recipe.scale, cuts, chance)

    def wide(x):
        return x.astype(xp.promote_types(x.dtype, xp.float32), copy=False)

    @custom_vjp
    def low_precision_linear(x, weight):
        y, = products([(operand(wide(x), recipe.element, recipe.block, None, columns),
                        operand(wide(weight), recipe.element, recipe.weight_block, rows, columns))])
        return y.astype(x.dtype)

    def of_dx(weight, g):
        chance = None if chances is None else chances.dx(g)
        return (operand(wide(g), recipe.gradient, recipe.block, None, rows, chance=chance),
                operand(wide(weight).T, recipe.element, recipe.weight_block, columns, rows))

    def of_dw(x, g):
        chance = None if chances is None else chances.dw(g)
        x, g = (hadamard(a) if recipe.random_hadamard else a for a in (wide(x).T, wide(g).T))
        return (operand(g, recipe.gradient, recipe.block, rows, None, chance=chance),
                operand(x, recipe.element, recipe.block, columns, None))

    @custom_vjp
    def low_precision_linear_backward(x, weight, g):
        pairs = ([of_dx(weight, g)] if wanted[0] else []) + ([of_dw(x, g)] if wanted[1] else [])
        likes = itertools.compress((x, weight), wanted)
        return tuple(d.astype(like.dtype) for d, like in zip(products(pairs), likes, strict=True))

    def backward(kept, g):
        found = iter(low_precision_linear_backward(*kept, g))
        return tuple(next(found) if each else None for each in wanted)

    def once(kept, cotangents):
        raise TypeError("products of few bits can be differentiated once only: their gradients are rounded too, and a "
                        "second derivative would be none of what is computed. Convert the model afterwards")
    low_precision_linear_backward.defvjp(lambda *args: (low_precision_linear_backward(*args), None), once)
    low_precision_linear.flops = lambda x, weight: 2 * x.shape[0] * weight.size
    return low_precision_linear.defvjp(lambda x, weight: (low_precision_linear(x, weight), (x, weight)), backward)


linear_in = functools.cache(linear_of)      # of recipes; a Cut holds a Communicator, and would be kept for ever


def applied(linear, x, weight, bias):
    """x weightᵀ + bias by `linear`, one that linear_of has made: (…, in) -> (…, out), in x's dtype, or autocast's."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"a layer of few bits: the last axis of x {tuple(x.shape)} must be {weight.shape[1]}, as of "
                         f"its weight {tuple(weight.shape)}")
    x = lowered(x) if is_floating(x.dtype) else ops.astype(x, weight.dtype)
    rows = x if len(x.shape) == 2 else ops.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = linear(rows, weight)
    y = y if len(x.shape) == 2 else ops.reshape(y, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + ops.astype(bias, y.dtype)


def recipe_of(recipe):
    """A Recipe, given by itself or by its name; ValueError for another name."""
    if not isinstance(recipe, Recipe) and recipe not in RECIPES:
        raise ValueError(f"LowPrecisionLinear: recipe {recipe!r}; there are {', '.join(RECIPES)}")
    return recipe if isinstance(recipe, Recipe) else RECIPES[recipe]


class LowPrecisionLinear(Module):
    """A Linear whose products are of numbers of few bits: (…, in_features) -> (…, out_features), in the input's dtype,
    or autocast's. Its parameters are the layer's own, in their own precision.

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
        return f"{', '.join(map(str, self.weight.shape[::-1]))}, {self.recipe.element.name}"


class LowPrecisionPart:
    """What makes the products of a rank's part of a Linear by a Recipe, in ops.linear's place. Collective.

    layer  a ColumnParallelLinear or RowParallelLinear
    """

    def __init__(self, layer, recipe):
        self.recipe, (axis, indices, extent) = recipe, layer.parts["weight"]
        cuts = [None, None]
        cuts[axis] = Cut(layer.comm, indices_of_ranks(layer.comm, indices, extent))
        self.linear = linear_of(recipe, *cuts)

    def __call__(self, x, weight, bias=None):
        return applied(self.linear, x, weight, bias)

    def __repr__(self):
        return f"products of {self.recipe.element.name}"


def few_bits(module):
    """Whether a layer makes its products of few bits."""
    return isinstance(module, LowPrecisionLinear) or isinstance(getattr(module, "product", None), LowPrecisionPart)


def convert_to_low_precision_training(model, recipe="tensorwise", module_filter_fn=None):
    """Let a model's Linears make their products in 8 or 4 bits, in place. Returns the model; one that is a Linear
    itself comes back as a LowPrecisionLinear.

    recipe            one of RECIPES by name, or a Recipe
    module_filter_fn  module_filter_fn(linear, its path) -> whether it is to be changed (default: each). First and last
                      layers are often left out, in 4 bits always, and routers of mixtures

    Parameters stay what they are, with their names, optimizer and place in flat buffers. ValueError where no Linear is
    found, and for a model with LoRA's adapters. Cut models by parallelize_module before; then it is collective, and
    their parts of Linears stay, with other products in them.
    """
    if adapters := [name for name, _ in model.named_parameters() if name.endswith("lora_A")]:
        raise ValueError(f"convert_to_low_precision_training: {adapters[0]} is an adapter (lora.add), and those don't "
                         "go with products of few bits: take one of the two")
    chosen = [(path, m) for path, m in model.named_modules() if "forward" not in vars(m)
              and (type(m) is Linear or hasattr(m, "parts") and getattr(m, "product", None) is ops.linear)
              and (module_filter_fn is None or module_filter_fn(m, path))]
    if not chosen:
        raise ValueError("convert_to_low_precision_training: the model has no Linear"
                         + " that module_filter_fn takes" * (module_filter_fn is not None))
    check_products("convert_to_low_precision_training", dict(chosen))
    for _, m in chosen:
        if type(m) is not Linear:
            m.product = LowPrecisionPart(m, recipe_of(recipe))
    return replaced(model, {id(m): LowPrecisionLinear(m, recipe) for _, m in chosen if type(m) is Linear})
