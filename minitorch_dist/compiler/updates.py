"""mt.compile(optimizer): its update, a dozen passes of NumPy's over each tile, as one loop in C.

    m *= beta1                              for (long i = 0; i < n; i++) {
    np.multiply(g, 1 - beta1, out=t)          const float v4 = a2[i] * s0;
    m += t                          →         const float v5 = a1[i] * s1;
    …                                         const float v6 = v4 + v5;
    p -= t                                    …
                                            }

The optimizer's own `update` is run, on arrays without elements, which write down what they are asked for; so there is
no second definition of what a step is. That is done anew for each stretch of parameters and each step, which takes some
20 µs, and so numbers may change as they like: they are arguments of the loop (s0, s1 …). Only what is asked for in
another way, say with a weight decay where there was none, is another loop, compiled once. (NumPy's passes over a short
stretch take no longer, and are left as they are.)

Sums, products, quotients and roots are NumPy's, in the same order: parameters and state get the same bits.
"""

import copy
import ctypes

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..optim import Combined, Optimizer
from . import cc
from .expressions import ARITHMETIC, TYPES

UFUNCS = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.divide: "div", np.negative: "neg",
          np.sqrt: "sqrt", np.square: "square", np.maximum: "maximum", np.minimum: "minimum", np.absolute: "abs",
          np.sign: "sign"}
SHORT = 2**16       # elements: of fewer in a stretch NumPy's passes are as fast
FLOATS = np.dtype("float32"), np.dtype("float64")


def compile_optimizer(optimizer, emit=None):
    """See compile: the same optimizer, whose steps run as loops in C from now on, where there is a compiler. Of several
    combined those that can be. What has 16 bits, or state of 8, is short, or lies on a GPU, is updated as before."""
    members = [o for o in (optimizer.optimizers if isinstance(optimizer, Combined) else [optimizer])
               if type(o).update is not Optimizer.update]
    if not members:
        raise TypeError(f"compile: {type(optimizer).__name__} has no update of single elements, to make a loop of: its "
                        "steps are products and sums over whole matrices")
    if emit not in (None, "c"):
        raise ValueError(f"compile: emit={emit!r} of an optimizer; it can be 'c' or None")
    if cc.compiler() is not None:
        for each in members:
            each.loops = Loops()
    return optimizer


class Loops:
    """The loops of one optimizer: {what an update asks for: the C function}."""

    def __init__(self):
        self.functions = {}

    def __reduce__(self):
        return Loops, ()        # functions are a process's own

    def take(self, p, g, state):
        """Whether these arrays, as `tiled` gets them, are updated here: long ones of NumPy's, float32 or float64."""
        return p.size >= SHORT and p.dtype in FLOATS and all(
            isinstance(a, np.ndarray) and a.dtype == p.dtype and a.flags.c_contiguous for a in (p, g, *state.values()))

    def update(self, optimizer, p, g, state, group, step):
        """optimizer.update of all of these arrays, in place."""
        arrays, asked = [p, g, *state.values()], Asked(p.dtype)
        named = [Element(asked, value) for value in asked.inputs(len(arrays))]
        shadow = copy.copy(optimizer)
        shadow.scratch = lambda like, k=0: asked.scratch(k)
        p_, g_, *rest = named
        shadow.update(p_, shadow.divided(g_, p_), dict(zip(state, rest, strict=True)), group, step)
        changed = tuple((i, each.value) for i, each in enumerate(named) if each.value != i)
        key = p.dtype, len(arrays), tuple(asked.steps), changed
        if key not in self.functions:
            self.functions[key] = function(*key)
        numbers = (ctypes.c_double * len(asked.numbers))(*asked.numbers)
        self.functions[key](p.size, numbers, *(a.ctypes.data for a in arrays))


class Asked:
    """What an update has asked for: steps [(op, operands)], of which each makes the next value; operands are values, by
    number, the arrays' first, or texts "s0", "s1" … for its numbers."""

    def __init__(self, dtype):
        self.dtype, self.steps, self.numbers, self.first, self.scratches = dtype, [], [], 0, {}

    def inputs(self, count):
        """The values of so many arrays."""
        self.first = count
        return range(count)

    def scratch(self, k):
        """A working array."""
        return self.scratches.setdefault(k, Element(self, None))

    def add(self, name, operands):
        """The value of a step."""
        self.steps.append((name, tuple(map(self.operand, operands))))
        return self.first + len(self.steps) - 1

    def operand(self, x):
        """A value's number, or the text of a number's."""
        if isinstance(x, Element):
            if x.value is None:
                raise ValueError("an optimizer's update reads a scratch array before it has written it")
            return x.value
        if x.__class__ not in (float, int):
            raise TypeError(f"compile: an optimizer's update works with a {type(x).__name__}; in a loop it can be with "
                            "numbers and the arrays that it is given")
        self.numbers.append(x)
        return f"s{len(self.numbers) - 1}"


class Element(NDArrayOperatorsMixin):
    """An array without elements: whatever is done with it is noted. value: what it holds now."""

    def __init__(self, asked, value):
        self.asked, self.value, self.dtype = asked, value, asked.dtype

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, dtype=None):
        if ufunc not in UFUNCS or method != "__call__" or dtype not in (None, self.dtype):
            raise TypeError(f"compile: an optimizer's update asks for np.{ufunc.__name__}, which is no part of a loop: "
                            f"there are {', '.join(f'np.{each.__name__}' for each in UFUNCS)}")
        value = self.asked.add(UFUNCS[ufunc], inputs)
        if out is None:
            return Element(self.asked, value)
        out[0].value = value
        return out[0]

    def __setitem__(self, where, x):
        if where is not Ellipsis or not isinstance(x, Element):
            raise TypeError("compile: an optimizer's update writes into a part of an array, or a number into it; in a "
                            "loop it can write one array into another: y[...] = x")
        self.value = self.asked.operand(x)


def source(dtype, arrays, steps, changed):
    """The C function `update(n, numbers, arrays …)` of these steps; changed: [(array, the value it gets)]."""
    t = TYPES[dtype.name]
    suffix = "f" if t == "float" else ""
    used = {x for _, operands in steps for x in operands}
    lines = [f"void update(long n, const double *s, {', '.join(f'{t} *restrict a{i}' for i in range(arrays))}) {{"]
    lines += [f"  const {t} {x} = s[{x[1:]}];" for x in sorted(used, key=str) if isinstance(x, str)]
    lines.append("  for (long i = 0; i < n; i++) {")
    lines += [f"    const {t} v{i} = a{i}[i];" for i in range(arrays) if i in used or any(v == i for _, v in changed)]
    for i, (name, operands) in enumerate(steps, arrays):
        names = [x if isinstance(x, str) else f"v{x}" for x in operands]
        lines.append(f"    const {t} v{i} = {ARITHMETIC[name].format(*names, f=suffix)};")
    lines += [f"    a{i}[i] = v{value};" for i, value in changed]
    return "\n".join([*lines, "  }", "}", ""])


def function(dtype, arrays, steps, changed):
    """The same, compiled."""
    found = cc.build(source(dtype, arrays, steps, changed)).update
    found.argtypes = [ctypes.c_long, ctypes.POINTER(ctypes.c_double), *[ctypes.c_void_p] * arrays]
    found.restype = None
    return found
