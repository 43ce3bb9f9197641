"""Kernels on a GPU: Triton functions made from text, started like those of kernels/."""

import functools
import hashlib
import linecache

from ..backend import module_of
from .triton_source import Writer

MODULE = "minitorch_dist.compiler.generated"
LIMIT = 2 ** 31 - 1     # elements that column_sums takes


class GpuKernel:
    """A kernel for inputs with certain strides: call it with their arrays (CuPy's, or NumPy's where Triton interprets),
    and it gives the outputs. `like` is an array of the same kind."""

    def __init__(self, kernel, strides, like):
        self.writer, self.like = Writer(kernel, strides), like
        names = tuple(name for name, *_ in self.writer.parameters)
        # (parameter, which of its sums or None, shape) per output; {parameter: a place for each of its sums}
        ends = {v: (name, first // columns) for v, (name, first, columns) in self.writer.ends.items()}
        self.results = [(*ends.get(v, (f"out{i}", None)), v.shape) for i, v in enumerate(kernel.outputs)]
        self.shares = {name: (None,) * sum(other == name for other, _ in ends.values()) for name, _ in ends.values()}
        self.record = record(self.writer.text, kernel.name, len(kernel.inputs), names, self.writer.warps)

    def __call__(self, arrays):
        from ..kernels import launch
        writer = self.writer
        written = {name: launch.empty(shape, dtype, self.like) for name, shape, dtype in writer.parameters}
        self.record((writer.grid,), *arrays, *written.values())
        for name, places in self.shares.items():
            written[name] = summed(written[name], places)
        made = []
        for name, number, shape in self.results:
            array = written[name] if number is None else written[name][number]
            made.append(array if array.shape == shape else array.reshape(shape))
        return made


def summed(x, places):
    """kernels.column_sums of however many elements: by parts of the rows first, where there are too many."""
    from ..kernels.column_sums import column_sums
    rows = LIMIT // x.shape[1]
    if len(x) > rows:
        x = module_of(x).stack([column_sums(x[i:i + rows])[0] for i in range(0, len(x), rows)])
    return column_sums(x, places=places)


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
    place = f"<kernel {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}>"     # two texts never share one
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    names = {"__name__": MODULE, "triton": triton, "tl": tl, "lib": functions.lib, "largest": functions.largest,
             "smallest": functions.smallest}
    exec(compile(text, place, "exec"), names)
    return names["kernel"]
