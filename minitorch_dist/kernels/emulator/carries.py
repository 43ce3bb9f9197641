"""Instructions that carry: add.cc, addc, sub.cc, subc, mad.cc, madc, for numbers that take several registers."""

import numpy as np

from .arithmetic import TYPES, UNSIGNED, high
from .lanes import reader, writer

FLAG = "carry flag"         # a register that every lane has besides those that are declared


def carrying(one):
    """(state, mask) -> None, or None. The flag of a sum is its carry, of a difference its borrow. What has .cc writes
    it, what has a c behind its name begins with it."""
    name, *words, kind = one.parts
    base = name.removesuffix("c")
    halves, takes, gives = {"lo", "hi"} & set(words), name != base, "cc" in words
    if (kind not in ("u32", "s32", "u64", "s64") or set(words) - {"cc", "lo", "hi"}
            or len(halves) != (base == "mad") or len(one.operands) != (4 if base == "mad" else 3)):
        return None
    dtype, unsigned = TYPES[kind], UNSIGNED[TYPES[kind].itemsize]
    read = [reader(operand, dtype) for operand in one.operands[1:]]
    put, flag, put_flag = writer(one.operands[0]), reader(FLAG, TYPES["pred"]), writer(FLAG)
    times = high if "hi" in words else np.multiply

    def run(state, mask):
        a, b, *c = (get(state) for get in read)
        x, y = (np.asarray(value).view(unsigned) for value in ((times(a, b), *c) if c else (a, b)))
        more = flag(state).astype(unsigned) if takes else unsigned.type(0)
        if base == "sub":
            part = x - y
            total, over = part - more, (x < y) | (part < more)
        else:
            part = x + y
            total, over = part + more, (part < x) | (part + more < part)
        put(state, total, mask)
        if gives:
            put_flag(state, over, mask)
    return run
