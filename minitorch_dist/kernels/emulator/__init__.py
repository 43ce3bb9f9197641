"""A GPU in NumPy: runs a kernel's PTX, instruction by instruction, checks every access, and counts what it costs.

    ptx.py          PTX's text as a Program
    arithmetic.py   what instructions compute, a table
    rounding.py     sums and products rounded once
    carries.py      sums and products of numbers that take several registers
    memory.py       arrays at their addresses, shared memory, a thread's own; who may touch what when
    lanes.py        the state of a batch of programs
    loads_and_stores.py   instructions that touch memory
    warps.py        shuffles and matrices: which lane has which element
    together.py     instructions of whole warps
    machine.py      branches, barriers: runs all of it
    counts.py       sectors, wavefronts, instructions, operations
    calls.py        a call of each kernel, to be looked at

It is the compiled code that runs here, with the launch's own arguments, so it needs Triton to compile (not
TRITON_INTERPRET) and no GPU. A million times slower than one, about: for kernels on some thousand elements.

    with emulated() as launches:        # Emulator(90)
        add(x, y)                       # NumPy arrays
    print(*launches[0].sums(), *launches[0].by_line(), sep="\n")
"""

from contextlib import contextmanager

import numpy as np

from .. import launch
from ..build import checked, compile_triton
from .counts import Counts
from .lanes import EmulationError, Unknown
from .machine import Code, run
from .memory import SECTOR, GlobalMemory, aligned
from .ptx import parse

__all__ = ["Counts", "EmulationError", "Emulator", "Unknown", "aligned", "emulated", "execute", "parse"]


def execute(code, grid, threads, arguments, shared=0, lent=()):
    """Run a kernel's PTX on a grid; returns its Counts.

    code       Code(parse(ptx))
    arguments  {name: NumPy array, or NumPy number of the parameter's width; for a structure an array of its bytes}, in
               the order of the parameters; parameters that are left get 0
    threads    per program: a number, or (x, y, z)
    shared     bytes of shared memory per program, besides those that the kernel's text asks for
    lent       arrays that the kernel finds by addresses in its arguments
    """
    program = code.program
    arrays = {name: value for (name, value), kind in zip(arguments.items(), program.parameters.values(), strict=False)
              if isinstance(value, np.ndarray) and "[" not in kind}
    given = [np.uint64(value.ctypes.data) if name in arrays else value for name, value in arguments.items()]
    given += [np.zeros(program.size(name), np.uint8) for name in list(program.parameters)[len(given):]]
    memory = GlobalMemory(arrays | {f"lent array {i}": a for i, a in enumerate(lent)})
    counts = Counts(program.name, tuple(grid), int(np.prod(threads)))
    run(code, grid, threads, dict(zip(program.parameters, given, strict=True)), memory, shared, counts)
    for region in memory.regions:
        for touched, sums in ((region.read, counts.read), (region.written, counts.written)):
            if touched.any():
                sums[region.name] = sums.get(region.name, 0) + SECTOR * int(touched.sum())
    return counts


class Emulator:
    """Compiles kernels for one compute capability and runs them on NumPy arrays. `launches` has the Counts of each.

    lent    arrays that kernels may touch besides their arguments: those whose addresses are in a table
    """

    def __init__(self, capability=90, lent=()):
        self.capability, self.lent, self.launches, self.codes = capability, lent, [], {}

    def empty(self, shape, dtype):
        """launch.empty for NumPy arrays: where one of CuPy's would begin."""
        return aligned(np.empty(shape, dtype))

    def __call__(self, kernel, grid, args, options):
        """What launch.launch calls for NumPy arrays."""
        arguments = dict(zip(kernel.signature, args, strict=True))
        types, divisible = {}, []
        for name, kind in kernel.signature.items():
            value, pointer = arguments[name], kind[0] == "*"
            types[name] = launch.pointer_type(kernel, name, value) if pointer else kind
            if value is not None and (pointer or name in kernel.divisible):
                divisible += [name] * ((value.ctypes.data if pointer else value) % 16 == 0)
        code, binary = self.code(kernel, types, divisible, options)
        given = {name: arguments[name] if kind[0] == "*" else launch.NUMBERS[kind](arguments[name])
                 for name, kind in kernel.signature.items() if arguments[name] is not None}
        counts = execute(code, grid, 32 * binary.warps, given, binary.shared, self.lent)
        counts.kernel = kernel.name
        self.launches.append(counts)

    def code(self, kernel, types, divisible, options):
        """(Code, Binary) for arguments of these types."""
        key = kernel, tuple(types.items()), tuple(divisible), tuple(options.items())
        if key not in self.codes:
            compiled = compile_triton(kernel, types, divisible, options, self.capability)
            self.codes[key] = Code(parse(compiled.asm["ptx"])), checked(kernel, types, compiled)
        return self.codes[key]


@contextmanager
def emulated(emulator=None):
    """Launches on NumPy arrays go to an Emulator: the list of their Counts."""
    emulator = emulator or Emulator()
    before, launch.on_numpy = launch.on_numpy, emulator
    try:
        yield emulator.launches
    finally:
        launch.on_numpy = before
