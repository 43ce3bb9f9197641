"""GPU kernels in Triton, without torch: where they are listed, and when the engine takes one.

This file imports neither Triton nor CuPy: a machine without a GPU never loads them. A kernel's module is imported when
its first CuPy array arrives, or by name.

    kernel.py     Kernel: a Triton function with its types, constants and alignment as data
    build.py      from a Kernel to machine code for one GPU type; kept on disk
    launch.py     from machine code to a running kernel, by CuPy
    interpret.py  the same call on NumPy arrays, in Triton's interpreter (TRITON_INTERPRET=1)
    emulator/     the same call on NumPy arrays, compiled and run as PTX, instruction by instruction: checked, counted
    autotune.py   the fastest of a kernel's configurations, measured once per device
    show.py       python -m minitorch_dist kernels: each stage of the code, and what it costs
    add.py        vector add: the one to read first
    adam.py …     a module per kernel or family (flash attention has its programs in a second one)
    packing.py    numbers of 8 bits inside of a kernel

How a kernel's module is written, by the example of add.py:

- The module's docstring says what is fused and what that saves, in bytes per element, and gives the equation.
- The Triton function is decorated with @triton.jit; next to it stands `definition`, the same in NumPy, in any floating
  dtype: what a reader reads and tests compare with (in float64).
- KERNELS is a tuple of Kernel records: how each function is compiled is data.
- A Python function takes arrays (NumPy's where Triton interprets, else CuPy's), checks their shapes, makes outputs with
  `launch.empty` and calls the record: `ADD((blocks,), x, y, out, n, BLOCK=1024)`. It is the only entry.
- A module that serves an op of the op table has OPS = {"op": Op(forward, pullback, fits)} and an Entry in the OPS here.
  Both functions take what the Primitive's own forward and pullback take. Where the Primitive has `aux`, forward returns
  (ans, Kept((…))) and pullback finds that Kept as its `aux`; without `aux` they must agree with what the Primitive
  keeps. `fits(*inputs, *params)` says whether the kernel can take these arguments; elsewhere CuPy's own kernels serve.
- Where configurations differ in speed: `run = lambda options: MATMUL(grid(options), a, b, …, **options)`, then
  `run(best(MATMUL, (m, n, k), a, run))` with autotune.best, which answers {} unless tuning is asked for.
- In float16 and bfloat16 a kernel computes in float32.
- The module's samples for the tests stand in tests/kernels/samples/, in a file of the same name.

What Triton's interpreter can't do, so that kernels keep away from it: a scalar comparison broadcast into a mask (use
tl.where on the length). `/` is an approximate division on the GPU: tl.div_rn and tl.sqrt_rn round as IEEE asks.
"""

import importlib
import importlib.util
import os
from functools import cache
from typing import NamedTuple

import numpy as np

from ..backend import Placeholder

# Every module with KERNELS, in the order of reading.
MODULES = ("add", "adam", "softmax_cross_entropy", "outside", "column_sums", "segment_sums", "norms", "bias_gelu",
           "swiglu", "dropout", "matmul", "flash_attention")


class Entry(NamedTuple):
    """Which module serves an op of the op table, and from how many elements of its first input its kernel is taken."""

    module: str
    wins_from: int = 0
    dtypes: tuple = ("float32", "float16", "bfloat16")


# Op of the op table -> Entry.
OPS = {"softmax_cross_entropy": Entry("softmax_cross_entropy"),
       "linear_cross_entropy": Entry("softmax_cross_entropy"), "layer_norm": Entry("norms"),
       "rms_norm": Entry("norms"), "gelu": Entry("bias_gelu"), "linear_gelu": Entry("bias_gelu"),
       "swiglu": Entry("swiglu"), "attention": Entry("flash_attention")}


class Op(NamedTuple):
    """A kernel module's answer to an op: what stands in for the Primitive's forward and pullback, and when it can."""

    forward: object
    pullback: object
    fits: object = lambda *args: True


class Kept(tuple):
    """The side results of a kernel's forward, for its own pullback."""

    __slots__ = ()


class _State:
    on = True
    triton = None       # whether Triton is installed; None: not asked yet


@cache
def interpreting():
    """Whether Triton, once imported, interprets kernels on NumPy arrays instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def installed():
    """Whether Triton is there to import; it is not imported."""
    if _State.triton is None:
        _State.triton = importlib.util.find_spec("triton") is not None
    return _State.triton


@cache
def load(module):
    """A kernel module by name; its import brings Triton."""
    if module not in MODULES:
        raise KeyError(f"there is no kernel module {module!r}: {', '.join(MODULES)}")
    return importlib.import_module(f"{__name__}.{module}")


def table():
    """{name: Kernel}: every kernel there is. Imports Triton."""
    return {kernel.name: kernel for module in MODULES for kernel in load(module).KERNELS}


def usable(x):
    """Whether kernels run on the array x: not on NumPy's own arrays, nor disabled, nor without Triton."""
    return (_State.on and type(x) is not np.ndarray and not isinstance(x, (np.generic, Placeholder)) and installed()
            and (not interpreting() or isinstance(x, np.ndarray)))     # the interpreter reads host memory alone


_names = {}


def name_of(dtype):
    """dtype.name, which NumPy makes up anew, in a microsecond, whenever it is asked."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = dtype.name
    return name


def for_op(name, args, made=False):
    """The Op whose kernel serves the op `name` on these arguments, or None: then CuPy does.

    made: its forward has made the side results already, so that its pullback must follow, disabled or not.
    """
    entry = OPS.get(name)
    if entry is not None and made:
        return load(entry.module).OPS[name]
    if entry is None or not usable(args[0]):
        return None
    if args[0].size < entry.wins_from or name_of(args[0].dtype) not in entry.dtypes:
        return None
    op = load(entry.module).OPS[name]
    return op if op.fits(*args) else None


def enabled():
    """Whether Triton's kernels are used: see disable."""
    return _State.on


class _Switch:
    """What enable() and disable() return: as a context manager it puts things back as they were."""

    def __init__(self, on):
        self.before, _State.on = _State.on, on

    def __enter__(self):
        return self

    def __exit__(self, *error):
        _State.on = self.before


def enable():
    """Use Triton's kernels on CuPy arrays (the default). `with enable():` for a while."""
    return _Switch(True)


def disable():
    """Leave everything to CuPy's own kernels. `with disable():` for a while, to compare."""
    return _Switch(False)
