"""Updates on a thin wire: what a client of federated learning sends in place of a float per parameter.

Three kinds of encodings, each of one parameter's update H (what training has added to it):

- *structured*: the client trains within a random subspace, known from a seed, so that H lies in it and few numbers say
  which point it is. `project` is the orthogonal projection, which local training applies to each gradient.
- *sketched*: the client trains freely, and H is rounded and thinned out at random, so that the mean of what can come
  out is H itself: over many clients the errors average away.
- *rounded to nearest*: nothing is drawn, and what is lost is lost. fully_shard's messages can be that
  (fsdp/few_bits.py).

    encoding                        bytes for n × m float32 (biases and norms travel whole)
    Whole()                         4·n·m
    LowRank(r)                      4·r·m                 H = Q B, Q (n × r) from the seed
    RandomMask(keep)                4·keep·n·m            the places from the seed
    Sketch(levels=2)                n·m/8 + 8             each number rounded at random to one of two, the extremes
    Sketch(levels=4, rotate=True)   2·D/8 + 8             D: n·m, up to the next power of two
    Sketch(levels=4, rotate=True, keep=1/16)              a sixteenth of that
    E3M0()                          n·m/2 + 4             4 bits: a sign and an exponent
    Blocks(8)                       n·m + 4·n·m/256       each 256 numbers have a scale of their own

Rotating means multiplying by random signs and then by Hadamard's matrix: it makes large and small entries alike, for
whose sake the levels would otherwise lie far apart. With d entries, n clients and two levels, the mean's expected
squared error is at most d/(2n) · mean‖H‖² without, (2 ln d + 2)/n · mean‖H‖² with it.

What travels is a message: a list of arrays, whose nbytes are what it costs. Random choices are drawn from a key, a
tuple of strings and integers that both sides know: (seed, round, client, the parameter's name).

Sources: Konečný et al. 2016, "Federated learning: strategies for improving communication efficiency"; Suresh et al.
2017, "Distributed mean estimation with limited communication" (the two bounds); Douillard et al. 2025, "Streaming
DiLoCo with overlapping communication" (E3M0 for differences of parameters); Wang et al. 2023, "ZeRO++" (blocks).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backend import is_short, is_whole, module_of, stream, to, to_device_of
from ..divergence import Diverged


@dataclass(frozen=True)
class Whole:
    """All numbers as they are."""

    def draw(self, shape, dtype, key):
        """The random choices for an update of this shape and dtype: both sides draw the same ones from the key."""
        return None

    def project(self, gradient, drawn):
        """What local training may use of a gradient, wherever that lives: an array of its shape there."""
        return gradient

    def encode(self, update, drawn):
        """The message for an update, floating, of any shape, on the host."""
        return [np.array(update)]

    def decode(self, message, shape, drawn):
        """The update that a message stands for, of that shape."""
        return message[0].reshape(shape)


class Subspace(Whole):
    """Structured encodings: training keeps the update in a random subspace, of which the message says the point."""

    def project(self, gradient, drawn):
        here = to(gradient, "cpu")
        return to_device_of(self.decode(self.encode(here, drawn), here.shape, drawn), gradient)


@dataclass(frozen=True)
class RandomMask(Subspace):
    """Train a random share `keep`, in (0, 1], of each matrix's entries, and send these."""

    keep: float

    def __post_init__(self):
        _check_share("RandomMask", self.keep)

    def draw(self, shape, dtype, key):
        return _chosen(math.prod(shape), self.keep, key)

    def encode(self, update, drawn):
        return [update.ravel()[drawn]]

    def decode(self, message, shape, drawn):
        update = np.zeros(math.prod(shape), message[0].dtype)
        update[drawn] = message[0]
        return update.reshape(shape)


@dataclass(frozen=True)
class LowRank(Subspace):
    """Train each matrix's update as Q B: Q, `rank` orthonormal columns, is drawn; B is sent. An array of more than two
    axes is taken as a matrix of its first axis × the others."""

    rank: int

    def __post_init__(self):
        if not is_whole(self.rank) or self.rank < 1:
            raise ValueError(f"LowRank: rank is {self.rank!r}; it must be a whole number, at least 1")

    def draw(self, shape, dtype, key):
        columns = stream("basis", *key).standard_normal((shape[0], min(self.rank, shape[0])))
        return np.linalg.qr(columns)[0].astype(dtype)

    def encode(self, update, drawn):
        return [drawn.T @ update.reshape(len(update), -1)]

    def decode(self, message, shape, drawn):
        return (drawn @ message[0]).reshape(shape)


@dataclass(frozen=True)
class Sketch(Whole):
    """Round and thin out each matrix's update at random; unbiased: the mean over keys of what is decoded is the update.

    levels  None: numbers as they are; k ≥ 2: each is rounded to one of k levels, which divide the update's range
            evenly, up or down with the probability that keeps its mean
    rotate  multiply by a random rotation before, and by its inverse when decoding
    keep    the share, in (0, 1], of the numbers that is sent, multiplied by 1/keep
    """

    levels: int | None = None
    rotate: bool = False
    keep: float = 1.0

    def __post_init__(self):
        _check_share("Sketch", self.keep)
        if self.levels is not None and not (is_whole(self.levels) and 2 <= self.levels <= 1 << 16):
            raise ValueError(f"Sketch: levels is {self.levels!r}; whole numbers from 2 to {1 << 16} can be had")

    @property
    def bits(self):
        """Of each number sent, where there are levels."""
        return math.ceil(math.log2(self.levels))

    def draw(self, shape, dtype, key):
        """(the signs of the rotation or None, the places that are sent, a stream for the rounding)."""
        width, signs = math.prod(shape), None
        if self.rotate:
            width = 1 << (width - 1).bit_length()
            signs = (2 * stream("signs", *key).integers(0, 2, width) - 1).astype(dtype)
        places = slice(None) if self.keep == 1 else _chosen(width, self.keep, key)
        return _Draw(signs, places, width, stream("rounding", *key))

    def encode(self, update, drawn):
        values = np.zeros(drawn.width, update.dtype)
        values[:update.size] = update.ravel()
        if self.rotate:
            values = hadamard(values * drawn.signs)
        sent = values[drawn.places]
        sent = sent * update.dtype.type(values.size / sent.size)
        if self.levels is None:
            return [sent]
        low, high = sent.min(), sent.max()
        if not (np.isfinite(low) and np.isfinite(high)):
            raise _diverged("Sketch", update, low if np.isfinite(high) else high)
        steps = (sent.astype(np.float64) - low) / ((np.float64(high) - low) or 1.0) * (self.levels - 1)
        numbers = np.floor(steps + drawn.rounding.random(sent.size)).astype(np.int64)
        return [np.array([low, high]), to_bits(np.minimum(numbers, self.levels - 1), self.bits)]

    def decode(self, message, shape, drawn):
        values = np.zeros(drawn.width, message[0].dtype)
        sent = message[0]
        if self.levels is not None:
            low, high = sent.astype(np.float64)
            numbers = from_bits(message[1], values[drawn.places].size, self.bits)
            sent = low + numbers * ((high - low) / (self.levels - 1))
        values[drawn.places] = sent
        if self.rotate:
            values = hadamard(values) * drawn.signs
        return values[:math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class E3M0(Whole):
    """A float of 4 bits without a mantissa: 0 or ±s·2^(e-7), e from 1 to 7, where s is the update's greatest magnitude.
    Each number is rounded to one of its two neighbours, at random and unbiased, as in Sketch. Its levels lie dense
    where most numbers are, near 0."""

    def draw(self, shape, dtype, key):
        return stream("rounding", *key)

    def encode(self, update, drawn):
        values = update.ravel().astype(np.float64)
        greatest = np.abs(values).max()
        if not np.isfinite(greatest):
            raise _diverged("E3M0", update, greatest)
        sizes = np.abs(values) / (greatest or 1.0)
        below = np.minimum(np.searchsorted(SIZES, sizes, side="right") - 1, len(SIZES) - 2)
        share = (sizes - SIZES[below]) / (SIZES[below + 1] - SIZES[below])
        exponents = below + (drawn.random(values.size) < share)
        return [np.array([greatest], update.dtype), to_bits(exponents | np.signbit(values) << 3, 4)]

    def decode(self, message, shape, drawn):
        numbers = from_bits(message[1], math.prod(shape), 4)
        values = np.where(numbers & 8, -1.0, 1.0) * SIZES[numbers & 7] * message[0][0]
        return values.astype(message[0].dtype).reshape(shape)


SIZES = np.array([0.0, *(2.0 ** (e - 7) for e in range(1, 8))])      # of E3M0, of the greatest: by exponent


@dataclass(frozen=True)
class Blocks(Whole):
    """Each block of `size` numbers has a scale s, and each number is k·s, k a whole number of 8 or 4 bits: that next to
    it. A block's greatest magnitude is 127·s, or 7·s; so each is off by s/2 at most. Nothing is drawn.

    A block with an inf or NaN comes out as NaN. Scales are float32, of float64 updates float64; arrays may lie on GPUs.
    ValueError for other bits, and for blocks of an odd size.
    """

    bits: int
    size: int = 256

    def __post_init__(self):
        if self.bits not in (4, 8) or self.size < 2 or self.size % 2:
            raise ValueError(f"Blocks({self.bits}, {self.size}): numbers have 8 or 4 bits, a block an even number of "
                             "them, at least 2")

    @property
    def greatest(self):
        """The largest whole number."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, update, drawn=None):
        """[scales (blocks,), codes uint8 (blocks · size · bits / 8,)]."""
        xp = module_of(update)
        dtype = np.float32 if is_short(update.dtype) else update.dtype
        blocks = xp.zeros((-(-update.size // self.size), self.size), dtype)
        blocks.reshape(-1)[:update.size] = update.reshape(-1)
        scales = xp.absolute(blocks).max(1) / self.greatest
        finite = xp.isfinite(scales)
        scales = xp.where(finite, scales, float("nan")).astype(dtype)
        blocks[~finite] = 0
        # The processor rounds to whole numbers beside so large a one, halves to even.
        large = 1.5 * 2.0 ** np.finfo(dtype).nmant
        steps = blocks / xp.where(scales > 0, scales, 1)[:, None] + large - large
        # A scale too small for all its bits (below 1e-38) would have some beyond the last.
        steps = xp.minimum(xp.maximum(steps, -self.greatest), self.greatest)
        codes = steps.astype(np.int8).view(np.uint8).reshape(-1)
        return [scales, codes if self.bits == 8 else codes[::2] & 15 | codes[1::2] * 16]

    def decode(self, message, shape, drawn=None):
        scales, codes = message
        xp = module_of(scales)
        if self.bits == 8:
            numbers = codes.view(np.int8)
        else:       # each moved to the top of a byte, and down again with its sign
            numbers = xp.stack([codes * 16, codes & 240], axis=1).view(np.int8) // 16
        values = numbers.reshape(-1, self.size) * scales[:, None]
        return values.reshape(-1)[:math.prod(shape)].reshape(shape)


def rows_of_bytes(x, blocks):
    """uint8 (n, bytes) of floats x (n, …): the codes of each x[i] in such Blocks, then its scales. ValueError unless
    their size divides the last axis."""
    if x.shape[-1] % blocks.size:
        raise ValueError(f"{blocks}: rows of {x.shape[-1]} features aren't made of whole blocks")
    count, arrays = math.prod(x.shape[1:]), module_of(x)
    scales, codes = blocks.encode(x)
    codes = codes.reshape(len(x), count * blocks.bits // 8)
    return arrays.concatenate([codes, scales.reshape(len(x), count // blocks.size).view(np.uint8)], axis=1)


def from_rows(rows, blocks, shape, dtype):
    """(n, *shape) of a dtype: what n rows of bytes were made of."""
    codes, arrays = math.prod(shape) * blocks.bits // 8, module_of(rows)
    scales = arrays.ascontiguousarray(rows[:, codes:]).view(np.float32 if is_short(dtype) else dtype)
    message = scales.reshape(-1), arrays.ascontiguousarray(rows[:, :codes]).reshape(-1)
    return blocks.decode(message, (len(rows), *shape)).astype(dtype, copy=False)


def row_bytes(blocks, count):
    """Of a row of so many numbers of float32 or fewer bits, whole blocks."""
    return count * blocks.bits // 8 + count // blocks.size * 4


def _diverged(what, update, value):
    return Diverged(f"{what}: an update of shape {update.shape} has a value of {value}: training has diverged; a "
                    "smaller learning rate may help")


class _Draw(NamedTuple):
    signs: np.ndarray | None
    places: np.ndarray | slice
    width: int
    rounding: np.random.Generator


class Channel:
    """One client's way to the server in one round: the draws for all its parameters, made once.

    shapes  {name: shape}; arrays of fewer than two axes (biases, norms) go whole
    """

    def __init__(self, encoding, shapes, dtype, key):
        self.shapes = shapes
        self.encodings = {name: encoding if len(shape) > 1 and math.prod(shape) else Whole()
                          for name, shape in shapes.items()}
        self.drawn = {name: e.draw(shapes[name], dtype, (*key, name)) for name, e in self.encodings.items()}

    def project(self, name, gradient):
        """What local training may use of the gradient of a parameter."""
        return self.encodings[name].project(gradient, self.drawn[name])

    def encode(self, updates):
        """{name: message} of {name: update}."""
        return {name: self.encodings[name].encode(update, self.drawn[name]) for name, update in updates.items()}

    def decode(self, messages):
        """{name: update} of {name: message}."""
        return {name: self.encodings[name].decode(message, self.shapes[name], self.drawn[name])
                for name, message in messages.items()}


def nbytes(messages):
    """Bytes of {name: message}."""
    return sum(array.nbytes for message in messages.values() for array in message)


def hadamard(values):
    """Hadamard's matrix, divided by √d, times d values, d a power of two: symmetric, and its own inverse. d·log₂ d
    additions."""
    values, step = np.array(values), 1
    while step < values.size:
        pairs = values.reshape(-1, 2, step)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        step *= 2
    return values / values.dtype.type(math.sqrt(values.size))


def to_bits(numbers, bits):
    """uint8: integers (n,) from 0 to 2^bits - 1, one behind the other."""
    return np.packbits((numbers[:, None] >> np.arange(bits)) & 1 == 1)


def from_bits(packed, count, bits):
    """What to_bits was given: `count` integers."""
    ones = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    return (ones.astype(np.int64) << np.arange(bits)).sum(axis=1)


def _check_share(what, keep):
    if not 0 < keep <= 1:
        raise ValueError(f"{what}: keep is {keep}; it must be above 0 and at most 1")


def _chosen(count, keep, key):
    """The places that are sent: a random share of `count`, at least one, in order."""
    return np.sort(stream("chosen", *key).choice(count, max(1, round(keep * count)), replace=False))
