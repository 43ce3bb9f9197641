"""Kernels on a GPU: Triton functions made from text, started like those of kernels/."""

import functools
import linecache
import zlib

from .triton_source import Writer

MODULE = "minitorch_dist.compiler.generated"


class GpuKernel:
    """A kernel for inputs with certain strides: call it with their arrays (CuPy's, or NumPy's where Triton interprets),
    and it gives the outputs. `like` is an array of the same kind."""

    def __init__(self, kernel, strides, like):
        self.writer, self.like = Writer(kernel, strides), like
        self.outputs = kernel.outputs
        names = tuple(name for name, *_ in self.writer.parameters)
        self.record = record(self.writer.text, kernel.name, len(kernel.inputs), names, self.writer.warps)

    def __call__(self, arrays):
        from ..kernels import launch
        from ..kernels.column_sums import column_sums
        writer = self.writer
        written = [launch.empty(shape, dtype, self.like) for _, shape, dtype, _ in writer.parameters]
        self.record((writer.grid,), *arrays, *written)
        made = []
        for v, array in zip(self.outputs, written, strict=True):
            if v in writer.ends:
                array, = column_sums(array)
                array = array.reshape(v.shape)
            made.append(array)
        return made


@functools.cache
def record(text, name, inputs, written, warps):
    """The Kernel of a Triton function's text."""
    from ..kernels.kernel import Kernel
    names = [f"in{i}" for i in range(inputs)]
    return Kernel(name, function(text), dict.fromkeys([*names, *written], "*"), {}, strided=tuple(names),
                  num_warps=warps, fp_fusion=False)


def function(text):
    """The Triton function `kernel` of a text. (Triton reads a function's source where Python says that it stands.)"""
    import triton
    import triton.language as tl

    from ..kernels import device_functions as functions
    place = f"<kernel {zlib.crc32(text.encode()):08x}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    names = {"__name__": MODULE, "triton": triton, "tl": tl, "lib": functions.lib, "largest": functions.largest,
             "smallest": functions.smallest}
    exec(compile(text, place, "exec"), names)
    return names["kernel"]
