"""Triton's interpreter with a meter at every load and store: how the course's kernels are called.

Launches take NumPy arrays as they are. An address that belongs to none of the launch's arrays is neither read nor
written, but counted, so that a mistake ends in a sentence and not in a crash. Undefined values are NaN: what is read
from outside, and what a masked load without `other` gives.
"""

import numpy as np
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from .interpret import Argument, mend
from .launch import TYPES

GUARD = 2**16     # elements before and behind every array, and more where the array is large
NOWHERE = np.full(1, 2**64 - 1, np.uint64)      # an address that nothing has


class OnDevice(np.ndarray):
    """Stands in for a GPU's arrays: kernels take no others, and NumPy makes them by zeros_like and `like=`."""

    def __array_function__(self, function, types, args, kwargs):
        if function in (np.asarray, np.array, np.zeros, np.empty, np.ones, np.full, np.arange):
            return function(*args, **kwargs).view(OnDevice)
        return super().__array_function__(function, types, args, kwargs)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **more):
        Meter.current.numpy.append(f"np.{ufunc.__name__}")
        plain = [[x.view(np.ndarray) if isinstance(x, OnDevice) else x for x in arrays] for arrays in (inputs, out)]
        result = getattr(ufunc, method)(*plain[0], **({"out": tuple(plain[1])} if out else {}), **more)
        return result.view(OnDevice) if isinstance(result, np.ndarray) else result


class Meter:
    """What kernels have done to memory while the meter was the `current` one."""

    current = None

    def __init__(self):
        self.launches, self.bytes_read, self.bytes_written = 0, 0, 0
        self.outside_read, self.outside_written, self.written_twice = 0, 0, 0
        self.programs, self.idle, self.multiplied = 0, 0, 0
        self.read, self.written, self.numpy = [NOWHERE], [NOWHERE], []
        self.lanes = []     # of each launch the most that one store has

    def begin(self, arrays):
        """A launch that gets these arrays."""
        self.launches += 1
        self.lanes.append(0)
        self.known = np.sort(np.concatenate([NOWHERE, *map(addresses, arrays)]))
        self.stored, self.begun = {}, set()

    def end(self):
        self.programs += len(self.begun)
        self.idle += len(self.begun) - sum(any(at.size for at in by_one) for by_one in self.stored.values())
        stored = np.concatenate([NOWHERE, *(np.unique(np.concatenate(by_one)) for by_one in self.stored.values())])
        self.written_twice += stored.size - np.unique(stored).size

    def belongs(self, at):
        """Which addresses are those of an element."""
        place = np.searchsorted(self.known, at)
        return self.known.take(place, mode="clip") == at

    def facts(self, read, written):
        """As outputs: what must be 0, and what is counted. read, written: {name: array that kernels should have …}"""
        def missing(arrays, places):
            return {name: int((~np.isin(addresses(a), np.concatenate(places))).sum()) for name, a in arrays.items()}
        return {"memory": {"elements read outside of the arrays": self.outside_read,
                           "elements written outside of the arrays": self.outside_written,
                           "elements written by two programs": self.written_twice},
                "launches": self.launches, "bytes_read": self.bytes_read, "bytes_written": self.bytes_written,
                "lanes": max(self.lanes, default=0), "lanes_of_launches": self.lanes, "programs": self.programs,
                "idle": self.idle, "multiplied": self.multiplied, "numpy": self.numpy[:1],
                "unread": missing(read, self.read), "unwritten": missing(written, self.written)}


def addresses(a):
    """Of the array's elements."""
    offsets = np.zeros(a.shape, np.int64)
    for index, step in zip(np.indices(a.shape), a.strides, strict=True):
        offsets += index * step
    return (offsets.ravel() + a.ctypes.data).astype(np.uint64)


# ---------------------------------------------------------------- between the kernel and memory

def load(self, ptrs, mask, other, *hints):
    kind = interpreter._get_np_dtype(ptrs.get_element_ty())
    wanted, at = np.broadcast_to(mask.data, ptrs.data.shape), ptrs.data
    safe = wanted & Meter.current.belongs(at)
    Meter.current.outside_read += int(np.count_nonzero(wanted & ~safe))
    Meter.current.read.append(at[safe])
    Meter.current.bytes_read += int(np.count_nonzero(wanted)) * np.dtype(kind).itemsize
    undefined = np.full(at.shape, np.nan if np.dtype(kind).kind == "f" else 0, kind)
    values = undefined if other is None else np.where(wanted, undefined, other.data).astype(kind)
    return interpreter.TensorHandle(interpreter._interpreter.load(at, safe, values, kind), ptrs.get_element_ty())


def store(self, ptrs, value, mask, *hints):
    wanted, at = np.broadcast_to(mask.data, ptrs.data.shape), ptrs.data
    safe = wanted & Meter.current.belongs(at)
    Meter.current.outside_written += int(np.count_nonzero(wanted & ~safe))
    Meter.current.bytes_written += int(np.count_nonzero(wanted)) * np.dtype(
        interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
    Meter.current.written.append(at[safe])
    Meter.current.lanes[-1] = max(Meter.current.lanes[-1], at.size)
    Meter.current.stored.setdefault(interpreter.interpreter_builder.grid_idx, []).append(at[safe])
    return interpreter._interpreter.store(at, value.data, safe)


def dot(self, a, b, d, precision, *more):
    """tl.dot, whose multiply-adds are counted, those of padding as well. Of float32 tensor cores look at the bits of
    tf32 alone, unless somebody says "ieee" or "tf32x3"; the interpreter looks at all."""
    Meter.current.multiplied += a.data.size * b.data.shape[-1]
    if precision.name == "TF32":
        a, b = (interpreter.TensorHandle(as_tf32(x.data), x.dtype) if x.data.dtype == np.float32 else x for x in (a, b))
    return original_dot(self, a, b, d, precision, *more)


def as_tf32(x):
    """float32 without the 13 bits of a fraction that tf32 hasn't."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xffffe000)).view(np.float32)


def set_grid_idx(self, *number):
    """A program begins."""
    Meter.current.begun.add(number)
    original_set_grid_idx(self, *number)


def run(self, *args, grid, warmup, **kwargs):
    """A launch: kernel[grid](*args, **kwargs)."""
    if not callable(grid) and not isinstance(grid, (tuple, list)):
        raise TypeError(f"the grid is a tuple: {self.__name__}[({grid},)](…)")
    for name, a in (*zip(self.arg_names, args, strict=False), *kwargs.items()):
        if isinstance(a, (list, tuple)):
            raise TypeError(f"{self.__name__} gets {name} as a {type(a).__name__}, and a kernel takes arrays and "
                            "numbers only: np.asarray(…, like=p) makes an array where p is")
        if isinstance(a, np.ndarray) and not isinstance(a, OnDevice):
            raise TypeError(f"{self.__name__} gets {name} of shape {list(a.shape)}, which lies on the host: a GPU "
                            "can't read it. np.asarray(…, like=p) and np.zeros_like(p) make an array where p is")
    Meter.current.begin([a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)])
    try:
        original_run(self, *map(argument, args), grid=grid, warmup=warmup,
                     **{name: argument(a) for name, a in kwargs.items()})
    except interpreter.InterpreterError as error:      # it hides what has happened, and in which line
        cause = error
        while isinstance(cause, interpreter.InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None
    Meter.current.end()


def argument(a):
    """What the interpreter takes: its own pointers, and Python's numbers."""
    return Argument(a, TYPES[a.dtype.name]) if isinstance(a, np.ndarray) else \
        a.item() if isinstance(a, np.generic) else a


def install():
    """From now on each launch in the interpreter is metered. Once in a process."""
    global original_run, original_set_grid_idx, original_dot
    mend()
    mangle_type(0)      # the first one looks for torch, whose import an answer isn't allowed
    original_run = interpreter.InterpretedFunction.run
    interpreter.InterpretedFunction.run = run
    original_set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx
    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx
    original_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_masked_load = load
    interpreter.InterpreterBuilder.create_masked_store = store


def begun():
    """A new Meter, which is the current one from now on."""
    Meter.current = Meter()
    return Meter.current


# ---------------------------------------------------------------- arrays amid NaNs

def nans(size, dtype):
    """So many of them, so far from any other array that a kernel that takes bytes for elements, or misses an array by
    several times its size, meets none of another's elements: what it is told doesn't depend on where memory was free.
    """
    guard = max(GUARD, 8 * size)       # never touched: no more than addresses
    found = np.empty(2 * guard + size, dtype)[guard:guard + size]
    found.fill(np.nan)
    return found


def laid(values, steps):
    """A copy of an array amid NaNs whose elements are so many elements apart along its axes, none of them below 1 and
    no two in one place. ValueError where two are."""
    reach = 1 + sum((n - 1) * step for n, step in zip(values.shape, steps, strict=True))
    view = np.lib.stride_tricks.as_strided(nans(reach, values.dtype), values.shape,
                                           [step * values.itemsize for step in steps])
    view[...] = values
    if not np.array_equal(view, values, equal_nan=True):
        raise ValueError(f"steps {tuple(steps)} put two elements of shape {values.shape} into one place")
    return view.view(OnDevice)
