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

The rounding is that of an H100's hardware, the sums are those of float32, by BLAS: it is for seeing what becomes of a
training, not faster. What backward needs is kept as it was, in its own precision. Under autocast a layer takes and
gives 16 bits, as a Linear does; its weight is rounded to 8 bits from float32. Sources: Micikevicius et al. 2022, "FP8
formats for deep learning"; DeepSeek-AI 2024, "DeepSeek-V3 technical report", 3.3 (blockwise). Names, and what autocast
does, are torchao's.
"""

import functools
import math
from dataclasses import dataclass

from ..autodiff import ops
from ..autodiff.autocast import lowered
from ..autodiff.custom import custom_vjp
from ..backend import matmul, module_of, xp
from ..nn.layers import Linear
from ..nn.module import Module
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


def scaled(x, form, block, power_of_two=False):
    """A matrix in 8 bits: (x · scale, rounded to the Format `form`; scale by group), both in x's dtype.

    x      (rows, columns), float32 or float64
    block  (rows, columns) of a group; None: all. Those at the ends may be smaller
    scale  (groups of rows, groups of columns): the format's largest number / the group's largest |x|, or the power of
           two next below. A group of numbers below 1e-12 has 1e-12's; inf and NaN become NaN
    """
    arrays, (rows, columns) = module_of(x), x.shape
    height, width = (size or max(n, 1) for size, n in zip(block, x.shape, strict=True))
    groups = -(-rows // height), -(-columns // width)
    padded = arrays.zeros((groups[0] * height, groups[1] * width), x.dtype)
    padded[:rows, :columns] = arrays.absolute(x)
    largest = padded.reshape(groups[0], height, groups[1], width).max((1, 3))
    scale = form.largest / arrays.maximum(largest, 1e-12)
    scale = power_below(scale) if power_of_two else scale
    each = scale[(arrays.arange(rows) // height)[:, None], arrays.arange(columns) // width]
    return form.rounded(x * each), scale


def product(a, b, forms, blocks, power_of_two):
    """a bᵀ of matrices (m, k) and (n, k) that are rounded to 8 bits: (m, n), in their dtype.

    forms, blocks  of each, as `scaled` takes them; blocks of both are equally long along k
    """
    arrays, (m, k), n = module_of(a), a.shape, b.shape[0]
    with xp.errstate(invalid="ignore", divide="ignore"):        # inf and NaN are for a GradScaler to see
        (a, scale_a), (b, scale_b) = (scaled(x, form, block, power_of_two)
                                      for x, form, block in zip((a, b), forms, blocks, strict=True))
        out, width = arrays.zeros((m, n), a.dtype), blocks[0][1] or max(k, 1)
        for i, start in enumerate(range(0, k, width)):
            part = slice(start, start + width)
            of_a, of_b = (scale[:, i][arrays.arange(size) // (block[0] or max(size, 1))]
                          for scale, block, size in zip((scale_a, scale_b), blocks, (m, n), strict=True))
            out += matmul(a[:, part], b[:, part].T) / of_a[:, None] / of_b
    return out


@functools.cache
def linear_in(recipe):
    """f(x, weight) = x weightᵀ by a Recipe, with its gradients: (tokens, in), (out, in) -> (tokens, out), in x's dtype.
    Sums are made in float32 at least. Rounding passes derivatives on as they are; so there is one of the first order,
    in reverse mode: TypeError for others, when they are asked for."""
    def of(x, weight, *forms, blocks):
        dtype = xp.promote_types(x.dtype, xp.float32)
        return product(x.astype(dtype), weight.astype(dtype), forms, blocks, recipe.power_of_two)

    @custom_vjp
    def float8_linear(x, weight):
        return of(x, weight, E4M3, E4M3, blocks=(recipe.block, recipe.weight_block)).astype(x.dtype)

    @custom_vjp
    def float8_linear_backward(x, weight, g):
        dx = of(g, weight.T, recipe.gradient, E4M3, blocks=(recipe.block, recipe.weight_block))
        dw = of(g.T, x.T, recipe.gradient, E4M3, blocks=(recipe.block, recipe.block))
        return dx.astype(x.dtype), dw.astype(weight.dtype)

    def once(kept, cotangents):
        raise TypeError("products of 8 bits can be differentiated once only: their gradients are rounded too, and a "
                        "second derivative would be none of what is computed. Convert the model afterwards")
    float8_linear_backward.defvjp(lambda *args: (float8_linear_backward(*args), None), once)
    float8_linear.flops = lambda x, weight: 2 * x.shape[0] * weight.size
    return float8_linear.defvjp(lambda x, weight: (float8_linear(x, weight), (x, weight)),
                                lambda kept, g: float8_linear_backward(*kept, g))


class Float8Linear(Module):
    """A Linear whose products are of numbers of 8 bits: (…, in_features) -> (…, out_features), in the input's dtype, or
    autocast's. Its parameters are the layer's own, in their own precision.

    recipe  a Recipe, or one of RECIPES by name
    """

    def __init__(self, linear, recipe="tensorwise"):
        super().__init__()
        if not isinstance(recipe, Recipe) and recipe not in RECIPES:
            raise ValueError(f"Float8Linear: recipe {recipe!r}; there are {', '.join(RECIPES)}")
        self.recipe = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]
        for name in ("weight", "bias"):
            self._register(self._parameters, name, getattr(linear, name))

    def forward(self, x):
        y = linear_in(self.recipe)(ops.reshape(lowered(x), (math.prod(x.shape[:-1]), x.shape[-1])), self.weight)
        y = ops.reshape(y, (*x.shape[:-1], self.weight.shape[0]))
        return y if self.bias is None else y + ops.astype(self.bias, y.dtype)

    def extra_repr(self):
        return ", ".join(map(str, self.weight.shape[::-1]))


def convert_to_float8_training(model, recipe="tensorwise", module_filter_fn=None):
    """Let a model's Linears make their products in 8 bits, in place. Returns the model; one that is a Linear itself
    comes back as a Float8Linear.

    recipe            "tensorwise", "rowwise", "blockwise", or a Recipe
    module_filter_fn  module_filter_fn(linear, its path) -> whether it is to be changed (default: each). First and last
                      layers are often left out

    Parameters stay what they are, with their names, optimizer and place in flat buffers. ValueError where no Linear is
    found. Cut models by parallelize_module before; its parts of layers stay as they are.
    """
    found = {id(m): Float8Linear(m, recipe) for path, m in model.named_modules()
             if type(m) is Linear and "forward" not in vars(m)
             and (module_filter_fn is None or module_filter_fn(m, path))}
    if not found:
        raise ValueError("convert_to_float8_training: the model has no Linear"
                         + " that module_filter_fn takes" * (module_filter_fn is not None))
    return replaced(model, found)
