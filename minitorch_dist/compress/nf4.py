"""Weights of 4 bits: NF4, the numbers that QLoRA keeps its frozen weights in.

    w      64 numbers       → 64 codes of 4 bits, and the largest |w|, their absmax, in float32       4.5 bits each
    absmax 256 such numbers → 256 codes of 8 bits, and the largest of these in float32                4.127 bits

A code stands for one of 16 levels from -1 to 1, times the block's absmax. Trained weights are about normally
distributed: so the levels are quantiles of that distribution, each met about as often as any other. One of them is 0,
for padding and for what was pruned. "Double quantisation" does the same again with the absmaxs, in blocks of 256, their
mean taken off before: they are all positive, and 8-bit floats (E4M3) have half of their numbers below 0.

A product takes the weight apart, and drops it: no float copy of it lives between forward and backward.
Source: Dettmers et al. 2023, "QLoRA: efficient finetuning of quantized LLMs", 3 and appendix E.
"""

import functools
import math
from statistics import NormalDist

from ..autodiff.autocast import lowered
from ..autodiff.primitive import LinearOp, Primitive, bind, lower
from ..autodiff.tensor import Tensor
from ..backend import device_of, is_floating, matmul, module_of, to, to_device_of, xp
from ..nn.module import Module

BLOCK, SECOND_BLOCK = 64, 256       # weights that share an absmax; absmaxs that share one


def normal_levels(bits=4):
    """The 2^bits levels of NormalFloat, float32 in ascending order: quantiles of N(0, 1), divided by the largest.

    Below 0 and above it they are taken apart, one more above, at equal distances of probability; both halves have the
    0, which is kept once. The outermost lie as far in, ½(1/32 + 1/30) for 4 bits, as the paper's levels do."""
    half = 2 ** (bits - 1)
    end = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2

    def quantiles(count):
        return [NormalDist().inv_cdf(end + (0.5 - end) * i / count) for i in range(count)]
    values = [-q for q in quantiles(half - 1)] + [0.0] + quantiles(half)[::-1]
    return xp.array([v / max(values) for v in values], xp.float32)


def float_levels(bits=3, exponents=16):
    """The numbers of an 8-bit float with so many bits of fraction (E4M3: 3, and NaN in the place of the largest),
    float32 in ascending order, divided by the largest."""
    values = [m / 2 ** bits * 2.0 if e == 0 else (1 + m / 2 ** bits) * 2.0 ** e
              for e in range(exponents) for m in range(2 ** bits)][:-1]
    return xp.array(sorted({sign * v / values[-1] for v in values for sign in (-1, 1)}), xp.float32)


NF4, E4M3 = normal_levels(), float_levels()
PAIRS = xp.stack([xp.repeat(NF4, 16), xp.tile(NF4, 16)], axis=1)        # by byte: its levels, the upper half's first


@functools.cache
def tables(device):
    """(PAIRS, E4M3) on a device: sent there once, and not for each product."""
    return to(PAIRS, device), to(E4M3, device)


def encode(x, levels, block):
    """(codes, absmax) of float32 numbers (n,): each block's largest |x|, float32 (⌈n/block⌉,), and the number of the
    level next to each x / absmax, uint8 (⌈n/block⌉ · block,); what is padded has 0's."""
    blocks = xp.zeros((-(-len(x) // block), block), xp.float32)
    blocks.reshape(-1)[:len(x)] = x
    absmax = xp.absolute(blocks).max(1)
    shares = blocks / xp.where(absmax == 0, 1, absmax)[:, None]
    between = (levels[1:].astype(xp.float64) + levels[:-1]) / 2
    return xp.searchsorted(between, shares.reshape(-1)).astype(xp.uint8), absmax


def absmax_of(scales):
    """The absmax of each block of weights, float32, from what `NF4Weight.scales` gives."""
    if not isinstance(scales, tuple):
        return scales
    codes, second, mean = scales
    values = tables(device_of(codes))[1][codes] * second.repeat(SECOND_BLOCK)[:len(codes)] + mean
    return module_of(codes).maximum(values, 0)      # what is rounded to below 0 would turn its weights' signs


def dequantize(codes, scales, shape, dtype):
    """The weight that packed codes stand for, of this shape and dtype: a new array."""
    blocks = tables(device_of(codes))[0][codes].reshape(-1, BLOCK)
    blocks *= absmax_of(scales)[:, None]
    return blocks.reshape(-1)[:math.prod(shape)].reshape(shape).astype(dtype, copy=False)


# ---------------------------------------------------------------- products

def _forward(x, codes, scales, size, transposed):
    weight = dequantize(codes, scales, size, x.dtype)
    y = matmul(x.reshape(-1, x.shape[-1]), weight if transposed else weight.T)
    return y.reshape(*x.shape[:-1], y.shape[-1])


# Linear in x, and what is kept are the codes. The transpose is the same op the other way round.
_product = LinearOp("x Wᵀ of NF4", lambda t, kept: bind(_linear, (t,), kept),
                    lambda c, kept: bind(_linear, (c,), (*kept[:-1], not kept[-1])), listed=False)
_linear = Primitive("nf4_linear", _forward, "x", "codes scales size transposed",
                    x=(_product, "codes scales size transposed"), listed=False)


class NF4Weight(Module):
    """A matrix (out, in) in NF4: what stands in the place of a frozen weight.

    weight   an array of floats
    double   quantise the absmaxs too

    codes    uint8 (⌈n/64⌉ · 32,): two elements each in C order, the first in the upper half
    absmax   of each block of 64: float32; with double its code, uint8, in blocks of 256 of
    second   their absmax, float32, and
    mean     float32 (1,), what was taken off
    These are parameters that are frozen, so that whoever wraps the model sends them once. They keep their
    dtypes when a model is cast. ValueError for inf or NaN.
    """

    keeps_dtypes = True

    def __init__(self, weight, double=True):
        super().__init__()
        array = lower(weight)
        host = xp.asarray(to_device_of(array, NF4), xp.float32)
        if not xp.isfinite(host).all():
            raise ValueError(f"NF4: a weight of shape {array.shape} has inf or NaN, which have no place between -1 and "
                             "1: look for what made them before quantising")
        self.shape, self.double = tuple(array.shape), double
        codes, absmax = encode(host.reshape(-1), NF4, BLOCK)
        kept = {"codes": codes[::2] << 4 | codes[1::2], "absmax": absmax}
        if double:
            mean = absmax.mean(dtype=xp.float32).reshape(1)
            second, kept["second"] = encode(absmax - mean, E4M3, SECOND_BLOCK)
            kept |= {"absmax": second[:len(absmax)].copy(), "mean": mean}
        for name, values in kept.items():
            self._register(self._parameters, name, Tensor(to_device_of(values, array)))

    def scales(self):
        """What absmax_of takes: an array, or (codes, absmax, mean) with double."""
        if not self.double:
            return self.absmax.data
        return self.absmax.data, self.second.data, self.mean.data

    def dequantize(self, dtype=xp.float32):
        """The floats that it stands for, a new array (out, in)."""
        return dequantize(self.codes.data, self.scales(), self.shape, dtype)

    def linear(self, x):
        """x Wᵀ: (…, in) -> (…, out), in x's dtype, or autocast's. Backward takes W apart again."""
        if len(x.shape) == 0 or x.shape[-1] != self.shape[1] or not is_floating(x.dtype):
            raise ValueError(f"NF4Weight.linear: x is {x.dtype} {tuple(x.shape)}; floats are wanted, and a last axis "
                             f"of {self.shape[1]}, as of the weight {self.shape}")
        return bind(_linear, (lowered(x),), (self.codes.data, self.scales(), self.shape, False))

    @property
    def nbytes(self):
        """Of all that is kept."""
        return sum(p.data.nbytes for p in self.parameters())

    def extra_repr(self):
        return f"{', '.join(map(str, self.shape))}, {8 * self.nbytes / math.prod(self.shape):.3f} bits each"
