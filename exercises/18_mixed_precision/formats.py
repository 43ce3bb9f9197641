"""18.1: formats as tables of all their numbers; and what rounding gives with a known mistake in it."""

import functools

import numpy as np

ASKED = ((5, 10), (8, 7), (5, 2), (4, 3), (6, 9), (8, 20))
SHAPES = ((-1,), (3, -1), (-1, 4), (2, 2, -1), (-1,), (4, -1))


def numbers(patterns, exponent_bits, mantissa_bits):
    """The numbers of a format with these bit patterns; that of inf is read as the number that would be next."""
    e, mantissa = np.divmod(patterns, 2 ** mantissa_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    return np.ldexp(mantissa / 2 ** mantissa_bits + (e > 0), np.maximum(e, 1) - bias)


def beyond(exponent_bits, mantissa_bits):
    """The pattern of inf; the one before it is the largest number's."""
    return (2 ** exponent_bits - 1) << mantissa_bits


@functools.cache
def table_of(*form):
    """All numbers from 0 up, in the order of their bit patterns."""
    return numbers(np.arange(beyond(*form) + 1), *form)


def truth(case):
    """float16 by NumPy, formats with float32's exponents by float32's bits, others by looking them up: neighbours in
    the table, and the even pattern where both are near.
    """
    x, (E, M) = case["x"], (case["exponent_bits"], case["mantissa_bits"])
    if (E, M) == (5, 10):
        with np.errstate(over="ignore"):
            found = x.astype(np.float16).astype(np.float32)
    else:
        found = by_bits(x, M) if E == 8 else looked_up(x, table_of(E, M))
    one = (2 ** (E - 1) - 1) << M
    smallest, normal, after_one, largest = numbers(np.array([1, 2 ** M, one + 1, beyond(E, M) - 1]), E, M).tolist()
    return {"result": found, "signs": np.signbit(found) & ~np.isnan(found),
            "limits": {"smallest": smallest, "normal": normal, "largest": largest, "epsilon": after_one - 1}}


def by_bits(x, mantissa_bits):
    """Rounding as integers: half a step less 1, and 1 more behind an odd last bit; what runs over goes on into the
    exponent.
    """
    bits, behind = x.view(np.uint32).astype(np.int64), 23 - mantissa_bits
    bits += (1 << behind - 1) - 1 + (bits >> behind & 1)
    found = (bits >> behind << behind).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, found)


def looked_up(x, table):
    size = np.abs(x.astype(np.float64))
    at = np.clip(table.searchsorted(size, side="right") - 1, 0, len(table) - 2)
    below, above = size - table[at], table[at + 1] - size
    at += (above < below) | (above == below) & (at % 2 == 1)
    found = np.where(at == len(table) - 1, np.inf, table[at])
    return np.copysign(np.where(np.isnan(x), np.nan, found), x).astype(np.float32)


def samples(rng, exponent_bits, mantissa_bits):
    """float32 numbers: of the format, halfway between two of them, just beside that; from far below to far above."""
    least, last = 2 ** mantissa_bits, beyond(exponent_bits, mantissa_bits) - 1
    e = 2 ** exponent_bits - rng.integers(2, 2 + 2 ** (exponent_bits - 3), 3)
    # Of each kind an even and an odd one: subnormal, around the smallest normal number, normal, the largest ones. And
    # those just below large powers of 2.
    at = np.concatenate([[0, 1, 2, least - 1, least, least + 1, last - 1, last], rng.integers(0, least, 4),
                         2 * rng.integers(least // 2, last // 2, 12), 1 + 2 * rng.integers(least // 2, last // 2, 12),
                         e * least - 1])
    below, above = (numbers(at + i, exponent_bits, mantissa_bits) for i in (0, 1))
    middle = ((below + above) / 2).astype(np.float32)
    inside = below + (above - below) * rng.uniform(0.05, 0.95, (4, len(at)))
    inside = np.minimum(inside, np.finfo(np.float32).max).astype(np.float32)
    ends = np.log2(numbers(np.array([1, last]), exponent_bits, mantissa_bits))
    powers = rng.uniform(ends[0] - 4, min(ends[1] + 3, 127.9), 60)
    beside = [np.nextafter(middle, np.float32(end)) for end in (0, np.inf)]
    found = np.concatenate([below, middle, *beside, *inside, 2 ** powers, [1e38, np.inf]]).astype(np.float32)
    # Each with both signs; so ±0 and ±inf are among them.
    nans = np.array([0x7fc00000, 0x7fffffff, 0xffffffff, 0xffc00000], np.uint32).view(np.float32)
    return rng.permutation(np.concatenate([found, -found, nans]))


def cases(rng):
    """Without the real gradients."""
    found = []
    for (exponent_bits, mantissa_bits), shape in zip(ASKED, SHAPES, strict=True):
        x = samples(rng, exponent_bits, mantissa_bits)
        found.append({"x": x[:len(x) // 12 * 12].reshape(shape), "exponent_bits": exponent_bits,
                      "mantissa_bits": mantissa_bits})
    more = {"exponent_bits": 5, "mantissa_bits": 10}
    return [*found, {"x": np.array(rng.uniform(0.1, 9), np.float32), **more},
            {"x": np.empty((0, 3), np.float32), **more}]


# ---------------------------------------------------------------- mistakes

def mistaken(bias=lambda E: 2 ** (E - 1) - 1, digits=0, rint=np.rint, subnormals=True, top=None, before=False,
             paper=True, after=lambda x, y, limits: y, exponent=lambda size: np.frexp(size)[1] - 1):
    """Hypothesis: rounding and limits by arithmetic in float64; the keywords are the mistakes.

    bias        of E
    digits      how many mantissa bits too many
    rint        how a number becomes an integer
    subnormals  False: as many digits below the smallest normal number as above it
    top         (E, M, the right largest) -> what is taken for the largest number
    before      whether it is decided before rounding what is larger
    paper       False: limits are right, and the largest number is, too
    after       (x, the result, the right limits) -> the result
    exponent    of a size
    """
    def outputs(case):
        x, E, M = case["x"].astype(np.float64), case["exponent_bits"], case["mantissa_bits"]
        limits, digit = truth(case)["limits"], M + digits
        normal = 2.0 ** (1 - bias(E))
        largest = (2 - 2.0 ** -digit) * 2.0 ** bias(E) if paper else limits["largest"]
        largest = largest if top is None else top(E, M, largest)
        with np.errstate(all="ignore"):
            size = np.abs(x)
            gap = exponent(np.maximum(size, normal) if subnormals else size) - digit
            y = np.ldexp(rint(np.ldexp(x, -gap)), gap)
            y = np.where((size if before else np.abs(y)) > largest, np.copysign(np.inf, x), y)
            y = after(x, np.where(np.isnan(x), np.nan, y), limits).astype(np.float32)
        found = {"smallest": normal * 2.0 ** -digit, "normal": normal, "epsilon": 2.0 ** -digit,
                 "largest": largest if np.isfinite(largest) else limits["largest"]}
        return {"result": y, "signs": np.signbit(y) & ~np.isnan(y), "limits": found if paper else limits}
    return outputs


def logarithm(size):
    """The exponent by a float32's logarithm."""
    found = np.floor(np.log2(size.astype(np.float32)))
    return np.where(np.isfinite(found), found, 0).astype(int)


def away(x):
    """The nearest integer, halves away from 0."""
    return np.trunc(x + np.copysign(0.5, x))


def halves_up(x):
    return np.floor(x + 0.5)


def saturated(x, y, limits):
    return np.where(np.isinf(x), x, clipped(x, y, limits))


def clipped(x, y, limits):
    return np.clip(y, -limits["largest"], limits["largest"])


def flushed(x, y, limits):
    return np.where(np.abs(y) < limits["normal"], np.copysign(0.0, y), y)


def flushed_before(x, y, limits):
    return np.where(np.abs(x) < limits["normal"], np.copysign(0.0, y), y)


def below_smallest(x, y, limits):
    return np.where(np.abs(x) < limits["smallest"], np.copysign(0.0, y), y)


def always_float16(case):
    right = truth(case | {"exponent_bits": 5, "mantissa_bits": 10})
    return {"result": right["result"], "signs": right["signs"]}


def lost_nan(case, got):
    """Whether nothing is wrong but that some NaN isn't one."""
    right, mine = truth(case)["result"], np.asarray(got["result"])
    if mine.shape != right.shape:
        return False
    lost = np.isnan(right) & ~np.isnan(mine)
    return lost.any() and np.array_equal(mine[~lost], right[~lost], equal_nan=True)


def said(name, value):
    """Hypothesis about limits alone: (E, M, the right limits) -> what is said of `name`."""
    def outputs(case):
        limits = truth(case)["limits"]
        return {"limits": limits | {name: value(case["exponent_bits"], case["mantissa_bits"], limits)}}
    return outputs
