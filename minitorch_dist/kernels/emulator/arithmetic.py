"""What PTX's instructions compute, lane by lane: name -> types and a NumPy function, all as a table.

Rounded as IEEE and PTX ask (.rn, one rounding in fma). What PTX only bounds (.approx, .full) is NumPy's, and not the
bits that a GPU gives: the same within 2 units of the last place of 2ˣ, 1/√x and quotients, 2⁻²² of log₂ near 1, 2⁻²⁰ of
sin and cos, 2⁻¹¹ of the value of tanh. NaN is some NaN.
"""

from functools import partial

import numpy as np

from .rounding import F32, F64, U32, directed, flushed, fma, fused, fused64, narrowed, odd, saturated, widened

UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
TYPES = {f"{kind}{8 * size}": np.dtype(f"{'u' if kind == 'b' else 'i' if kind == 's' else kind}{size}")
         for kind, sizes in (("b", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("s", (1, 2, 4, 8)), ("f", (2, 4, 8)))
         for size in sizes} | {"pred": np.dtype(bool), "bf16": np.dtype("u2")}
# type of two numbers in one register -> (type of each, type of the register)
PAIRS = {"f16x2": ("f16", "b32"), "bf16x2": ("bf16", "b32"), "f32x2": ("f32", "b64")}


def shifted(a, n, left):
    """PTX's shifts: by the register's width or more gives 0, or the sign."""
    width = 8 * a.dtype.itemsize
    most = np.minimum(n, width - 1).astype(a.dtype)
    moved = a << most if left else a >> most
    return moved if not left and a.dtype.kind == "i" else np.where(n < width, moved, a.dtype.type(0))


def quotient(a, b):
    """Integer division towards zero."""
    q = a // b
    return q + ((q * b != a) & ((a < 0) != (b < 0))) if a.dtype.kind == "i" else q


def remainder(a, b):
    return a - quotient(a, b) * b


def high(a, b):
    """The upper half of a product of integers."""
    if a.dtype.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return (np.multiply(a, b, dtype=wide) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    x, y = np.asarray(a).view("u8"), np.asarray(b).view("u8")
    low = np.uint64(0xffffffff)
    x0, x1, y0, y1 = x & low, x >> 32, y & low, y >> 32
    middle = x1 * y0 + (x0 * y0 >> 32)
    top = x1 * y1 + (middle >> 32) + ((x0 * y1 + (middle & low)) >> 32)
    if a.dtype.kind == "i":
        top = top - np.where(a < 0, y, 0).astype("u8") - np.where(b < 0, x, 0).astype("u8")
    return top.view(a.dtype)


def wide(a, b):
    return np.multiply(a, b, dtype=np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}"))


def field(a, first, length):
    """bfe: bits first … first + length - 1; signed numbers keep their sign."""
    width = 8 * a.dtype.itemsize
    first, length = first & 0xff, np.minimum(length & 0xff, width)
    if a.dtype.kind == "u":
        ones = np.where(length < width, (np.uint64(1) << length.astype("u8")) - np.uint64(1), ~np.uint64(0))
        return shifted(a, first, False) & ones.astype(a.dtype)
    left = np.maximum(width - first.astype("i8") - length, 0)       # so that the field's sign is the register's
    moved = (a << left.astype(a.dtype)) >> np.minimum(left + first, width - 1).astype(a.dtype)
    return np.where(length == 0, a.dtype.type(0), moved).astype(a.dtype)


def inserted(a, b, first, length):
    """bfi: b with the lowest bits of a at first … first + length - 1."""
    width = 8 * a.dtype.itemsize
    first, length = first & 0xff, np.minimum(length & 0xff, width)
    ones = np.where(length < width, (np.uint64(1) << length.astype("u8")) - np.uint64(1), ~np.uint64(0))
    mask = shifted(ones.astype(a.dtype), first, True)
    return (b & ~mask) | (shifted(a, first, True) & mask)


def permuted(a, b, selector):
    """prmt: four bytes out of the eight of b and a."""
    both = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    out = np.zeros(np.shape(both + selector), U32)
    for i in range(4):
        choice = (selector >> (4 * i)) & 0xf
        byte = (both >> (8 * (choice & 7)).astype("u8")) & np.uint64(0xff)
        byte = np.where(choice & 8, np.where(byte & np.uint64(0x80), 0xff, 0), byte)
        out = out | (byte.astype(U32) << (8 * i))
    return out


def looked_up(a, b, c, table):
    """lop3: per bit, entry 4a + 2b + c of an 8-bit table."""
    out = np.zeros_like(a | b | c)
    for entry in range(8):
        term = (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
        out = out | np.where((table >> entry) & 1, term, 0).astype(out.dtype)
    return out


def funnelled(a, b, n, left, wrap):
    """shf: 32 of the 64 bits of b and a, moved by n."""
    n = (n & 31 if wrap else np.minimum(n, 32)).astype("u8")
    both = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    return ((both << n) >> np.uint64(32) if left else both >> n).astype(U32)


def smallest(a, b, floats=np.fmin):
    """min; of floats -0 is below 0."""
    if a.dtype.kind != "f":
        return np.minimum(a, b)
    return np.where(a == b, np.where(np.signbit(a), a, b), floats(a, b))


def largest(a, b, floats=np.fmax):
    """max; of floats 0 is above -0."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    return np.where(a == b, np.where(np.signbit(a), b, a), floats(a, b))


def ones_before(x):
    """clz: zeros above the highest one."""
    value = np.asarray(x).astype("u8")
    count = np.zeros(value.shape, U32)
    for step in (32, 16, 8, 4, 2, 1):
        big = value >> np.uint64(step) > 0
        count = count + np.where(big, U32.type(step), U32.type(0))
        value = np.where(big, value >> np.uint64(step), value)
    return U32.type(8 * x.dtype.itemsize - 1) - count + (value == 0)


def ones(x):
    return np.bitwise_count(x).astype(U32)


def reversed_bits(x):
    out = np.zeros_like(x)
    for i in range(8 * x.dtype.itemsize):
        out = out | (((x >> i) & 1) << (8 * x.dtype.itemsize - 1 - i)).astype(x.dtype)
    return out


def gross(function, x):
    """function of float64 as the approximations that Newton's method begins with: the upper 32 bits of the result, and
    subnormal numbers as zeros."""
    tiny = np.finfo(F64).tiny
    y = function(np.where(np.abs(x) < tiny, np.copysign(0.0, x), x))
    y = (y.view(np.uint64) & np.uint64(0xffffffff00000000)).view(F64)
    return np.where(np.abs(y) < tiny, np.copysign(0.0, y), y)


def binary_power(x):
    return np.exp2(x)


def inverse_root(x):
    return (1 / np.sqrt(x)).astype(x.dtype)


# name -> (function of values of one type, how many). Of integers, floats and two numbers at once alike.
SAME = {"add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "min": (smallest, 2), "max": (largest, 2),
        "and": (np.bitwise_and, 2), "or": (np.bitwise_or, 2), "xor": (np.bitwise_xor, 2), "not": (np.invert, 1),
        "neg": (np.negative, 1), "abs": (np.abs, 1), "mov": (lambda x: x, 1), "cvta": (lambda x: x, 1),
        "copysign": (lambda a, b: np.copysign(b, a), 2), "rem": (remainder, 2), "sqrt": (np.sqrt, 1),
        "rsqrt": (inverse_root, 1), "rcp": (np.reciprocal, 1), "ex2": (binary_power, 1), "lg2": (np.log2, 1),
        "sin": (np.sin, 1), "cos": (np.cos, 1), "tanh": (np.tanh, 1), "brev": (reversed_bits, 1),
        "prmt": (permuted, 3), "lop3": (looked_up, 4)}
# Name -> (its operands as those of a·b + c, how many), for roundings other than to the nearest.
AS_FMA = {"fma": (lambda a, b, c: (a, b, c), 3), "mul": (lambda a, b: (a, b, a.dtype.type(-0.0)), 2),
          "add": (lambda a, b: (a, a.dtype.type(1), b), 2), "sub": (lambda a, b: (b, a.dtype.type(-1), a), 2)}
ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
SET = {"f32": 1, "f16": 1, "bf16": 0x3f80, "u32": 0xffffffff, "s32": -1}     # set's yes, by its type
JOINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
FLOPS = dict.fromkeys(("add", "sub", "mul", "div", "min", "max", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "tanh", "sin",
                       "cos"), 1) | {"fma": 2, "mad": 2}


def flops(parts):
    """Floating-point operations of an instruction, per lane."""
    kind = parts[-1]
    return FLOPS.get(parts[0], 0) * (2 if kind in PAIRS else kind[0] == "f" or kind == "bf16")


def compared(name, floating):
    """setp's comparison: ordered ones are false where there is a NaN, the others true."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if floating and name[-1] == "u" and name[:-1] in ORDERED:
        return lambda a, b: ORDERED[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a < b) | (a > b)
    return ORDERED[name]


def converted(x, to, rounding):
    """cvt between numbers of one lane: floats to integers saturate; of NaN they make 0, but of a float64's or where 64
    bits are asked for the highest bit alone."""
    if x.dtype.kind == "f" and to.kind == "f":
        if rounding in ROUND and x.dtype == to:
            return ROUND[rounding](x)
        return x.astype(to)
    if x.dtype.kind == "f":
        whole, limits = ROUND[rounding](x.astype(F64)), np.iinfo(to)
        nan = 0 if x.dtype != F64 and to.itemsize < 8 else 1 << 8 * to.itemsize - 1
        inside = (whole >= float(limits.min)) & (whole < float(limits.max) + 1)
        return np.where(inside, np.where(inside, whole, 0).astype(to),
                        np.where(np.isnan(whole), UNSIGNED[to.itemsize].type(nan).view(to),
                                 np.where(whole < 0, to.type(limits.min), to.type(limits.max))))
    return x.astype(to)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def per_number(function, kind):
    """function on bfloat16's bits, or on two numbers in a register; of bfloat16 computed in float32."""
    if kind == "bf16":
        return lambda *xs: narrowed(function(*map(widened, xs)))
    of, whole = PAIRS[kind]
    inner = per_number(function, "bf16") if of == "bf16" else function

    def on_both(*xs):
        xs = np.broadcast_arrays(*xs)
        return inner(*(np.ascontiguousarray(x).view(TYPES[of]) for x in xs)).view(TYPES[whole])
    return on_both


def spread(kind, function, arity, more):
    """(types of the operands, function) where all have one type: with .ftz subnormal inputs and results are zeros."""
    inner = function
    if "sat" in more:
        function = lambda *xs: saturated(inner(*xs))
    if "ftz" in more:
        whole = function
        function = lambda *xs: flushed(whole(*map(flushed, xs)))
    if kind in PAIRS or kind == "bf16":
        dtype = TYPES[PAIRS[kind][1] if kind in PAIRS else kind]
        return (dtype,) * arity, per_number(function, kind)
    return (TYPES[kind],) * arity, function


# What an instruction's name may have besides its type; with another word (.cc, .relu, .xorsign) it is another one.
WORDS = {name: frozenset(words.split()) for names, words in (
    ("add sub fma", "rn rz rm rp ftz sat"), ("mul", "rn rz rm rp ftz sat lo hi wide"), ("mad", "rn ftz sat lo hi wide"),
    ("min max", "ftz NaN"),
    ("div", "rn approx full ftz"), ("sqrt rcp", "rn approx ftz"), ("rsqrt ex2 lg2 sin cos tanh", "approx ftz"),
    ("neg abs", "ftz"), ("cvta", "to global shared local const"), ("shf", "l r wrap clamp"),
    ("cvt", "rn rna rni rzi rmi rpi ftz sat relu"),
    ("set setp", " ".join(["ftz num nan", *JOINED, *ORDERED, *(f"{name}u" for name in ORDERED)])),
    ("and or xor not mov copysign rem selp shl shr bfe bfi popc clz brev prmt lop3", "")) for name in names.split()}


def operation(parts):
    """(dtypes of the operands, function) of an instruction that works on each lane alone; None where PTX's name isn't
    known here."""
    name, *more = parts
    kinds = [part for part in more if part in TYPES or part in PAIRS or part == "tf32"]
    if not kinds or set(more) - set(kinds) - WORDS.get(name, set()):
        return None
    if name == "cvt":
        return conversion(more, kinds)
    if name == "set":
        return answered(more, kinds)
    kind = kinds[-1]
    dtype, floating = TYPES.get(kind), kind[0] == "f" or kind in PAIRS or kind == "bf16"
    if name in ("rcp", "rsqrt") and kind == "f64" and {"approx", "ftz"} <= set(more):
        return (F64,), partial(gross, SAME[name][0])
    if len(kinds) > 1 or kind == "tf32" or "sat" in more and not floating or "ftz" in more and kind == "f64":
        return None
    if rounding := next((part for part in more if part in ("rz", "rm", "rp")), None):
        inputs, arity = AS_FMA[name]
        exactly = {"f32": directed, "f64": fused64}.get(kind)
        return exactly and spread(kind, lambda *xs: exactly(*inputs(*xs), rounding), arity, more)
    if name in ("min", "max") and "NaN" in more:
        return spread(kind, partial(smallest, floats=np.minimum) if name == "min" else
                      partial(largest, floats=np.maximum), 2, more)
    if name == "setp":
        return comparison(more, kind)
    if name == "selp":
        dtype = dtype or TYPES[PAIRS[kind][1]]
        return (dtype, dtype, TYPES["pred"]), lambda a, b, p: np.where(p, a, b)
    if name in ("shl", "shr"):
        return (dtype, U32), partial(shifted, left=name == "shl")
    if name == "shf":
        return (U32, U32, U32), partial(funnelled, left="l" in more, wrap="wrap" in more)
    if name in ("bfe", "bfi"):
        return (dtype,) * (1 if name == "bfe" else 2) + (U32, U32), field if name == "bfe" else inserted
    if name in ("popc", "clz"):
        return (dtype,), ones if name == "popc" else ones_before
    if name == "div":
        return spread(kind, np.divide if kind[0] == "f" else quotient, 2, more)
    if name in ("mul", "mad") and dtype is not None and dtype.kind != "f" and kind != "bf16":
        return product(name, more, dtype)
    if name in ("fma", "mad"):
        of = PAIRS.get(kind, (kind,))[0]
        return spread(kind, {"f32": fused, "f64": fused64, "bf16": partial(fused, narrow=True)}.get(of, fma), 3, more)
    if name in SAME:
        function, arity = SAME[name]
        if name == "not" and dtype == TYPES["pred"]:
            function = np.logical_not
        return spread(kind, function, arity, more)
    return None


def comparison(more, kind):
    """setp, of one predicate; with another predicate, if its name says how they are joined."""
    dtype, floating = TYPES.get(kind), kind[0] == "f" or kind == "bf16"
    if dtype is None or "ftz" in more and kind != "f32":
        return None
    test, join = compared(more[0], floating), next((JOINED[part] for part in more if part in JOINED), None)
    of = widened if kind == "bf16" else flushed if "ftz" in more else lambda x: x
    if join is None:
        return (dtype, dtype), lambda a, b: test(of(a), of(b))
    return (dtype, dtype, TYPES["pred"]), lambda a, b, c: join(test(of(a), of(b)), c)


def answered(more, kinds):
    """set: setp's answer as a number of the first type, 1.0 or an integer's bits all set; or 0."""
    compares = comparison(more, kinds[-1]) if len(kinds) == 2 and kinds[0] in SET else None
    if compares is None:
        return None
    types, test = compares
    yes = np.array(SET[kinds[0]], TYPES[kinds[0]])
    return types, lambda *xs: np.where(test(*xs), yes, np.zeros_like(yes))


def product(name, more, dtype):
    """mul and mad of integers: the lower half, the upper half, or all of it."""
    times = high if "hi" in more else wide if "wide" in more else np.multiply
    result = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if "wide" in more else dtype
    if name == "mul":
        return (dtype, dtype), times
    return (dtype, dtype, result), lambda a, b, c: times(a, b) + c


def conversion(more, kinds):
    """cvt: to the first type, from the last."""
    to, given = kinds[0], kinds[-1]
    rounding = next((part for part in more if part in ROUND), None)
    whole, flush = TYPES.get(to, F32).kind != "f" and to != "bf16", "ftz" in more       # whole: to an integer
    if to == "tf32":                # ties away from zero
        return ((F32,), lambda x: np.where(np.isnan(x), U32.type(0x7fffffff), (x.view(U32) + 0x1000) & 0xffffe000)
                ) if more == ["rna", "tf32", "f32"] else None
    if (len(kinds) != 2 or given not in TYPES or "rna" in more or "sat" in more and (whole or to == "bf16")
            or "relu" in more and (given != "f32" or to not in ("f16", "bf16", *PAIRS))
            or to in PAIRS and (given != "f32" or to == "f32x2" or flush)
            or not whole and rounding and (to != given or to == "bf16")
            or whole and rounding is None and (given[0] == "f" or given == "bf16")):
        return None

    def start(x):
        x = widened(x) if given == "bf16" else x
        x = flushed(x) if flush and x.dtype == F32 else x
        return np.maximum(x, 0) if "relu" in more else x
    if to in PAIRS:                 # two floats into one register, the first above
        inner = narrowed if to == "bf16x2" else lambda x: x.astype(TYPES["f16"]).view("u2")
        return (F32, F32), lambda a, b: inner(start(a)).astype(U32) << 16 | inner(start(b)).astype(U32)

    def one(x):
        x = start(x)
        if to == "bf16":
            return narrowed(x if x.dtype == F32 else odd(x))
        x = converted(x, TYPES[to], rounding)
        x = flushed(x) if flush and x.dtype == F32 else x
        return saturated(x) if "sat" in more else x
    return (TYPES[given],), one
