"""The same call on NumPy arrays: Triton's interpreter runs each program of the grid, one after the other, in NumPy.

It must be asked for before Triton is imported, with TRITON_INTERPRET=1, and is meant for tests and for stepping through
a kernel with a debugger (print and breakpoint() work): some 100 ms per 100,000 elements.
"""

import functools
import inspect

import numpy as np

from ..backend import load_bfloat16
from .launch import pointer_type


class Argument:
    """A NumPy array as Triton's interpreter wants its pointers: with the methods of a torch tensor that it calls in
    order to copy from a device and back. Here both are the host, so they do nothing."""

    __slots__ = ("array", "dtype")

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *args, **kwargs):
        return self

    def set_(self, *args):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other):
        return self


@functools.cache
def mend():
    """Put right what Triton's interpreter does wrong: `range` up to a number of the kernel's (3.6 with NumPy 2.4 and
    newer), products of bfloat16 matrices, whose bits it multiplies as integers, casts of float32 to bfloat16, which it
    truncates where GPUs round, comparisons of two numbers, of which it makes a block of the numbers' type (that isn't
    a mask to 3.9, and no version has & of floats), and a search of Triton's modules for what to replace at every call
    of a function, a quarter of the time of a kernel that calls many: one search is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch, convert = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor, interpreter._convert_float
    dot, splat = builder.create_dot, builder.create_splat

    @functools.cache
    def builtins(module):
        return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]

    def patch_builtin(module, *more):
        for name in builtins(module):
            if tl.core.is_builtin(member := getattr(module, name)):     # else it is replaced already
                interpreter._patch_attr(module, name, member, *more)

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(x, given, wanted, mode):
        if given == tl.float32 and wanted == tl.bfloat16:
            return x.astype(load_bfloat16()).view(np.uint16)
        return convert(x, given, wanted, mode)

    def spread(self, block, x):
        whole = splat(self, block, x)
        if x.data.dtype == np.bool_:
            return interpreter.TensorHandle(whole.data.astype(np.bool_), tl.int1)
        return whole

    interpreter._patch_builtin = patch_builtin
    interpreter._convert_float = rounded
    interpreter._patch_lang_tensor = patch_lang_tensor
    builder.create_splat = spread
    builder.create_dot = lambda self, a, b, *more: dot(self, widened(a), widened(b), *more)


def interpret(kernel, grid, args, options):
    """Run a kernel on NumPy arrays. RuntimeError where Triton was imported to compile."""
    if hasattr(kernel.fn, "cache_key"):     # a function to be compiled has one
        raise RuntimeError(f"kernel {kernel.name} on NumPy arrays: set TRITON_INTERPRET=1 before Triton is imported "
                           "(for GPUs, pass CuPy arrays)")
    mend()
    constexprs, _, _ = kernel.settings(options)
    given = []
    for (name, kind), a in zip(kernel.signature.items(), args, strict=True):
        if kind[0] == "*":
            given.append(None if a is None else Argument(a, pointer_type(kernel, name, a)[1:]))
        else:       # the interpreter takes Python's numbers alone; a float32 first rounds to what the GPU would get
            given.append(float(np.float32(a)) if kind == "fp32" else float(a) if kind == "fp64" else int(a))
    by_name = dict(zip(kernel.signature, given, strict=True))
    with np.errstate(all="ignore"):     # a GPU is silent too
        kernel.fn[tuple(int(g) for g in grid)](**by_name, **constexprs)
