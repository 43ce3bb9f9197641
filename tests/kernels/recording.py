"""A GPU that only writes down what it is asked: arrays that claim to be on it, and a driver in CupyDriver's place."""

import pickle
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from minitorch_dist.kernels import build, table


class DeviceArray:
    """A NumPy array as seen from outside on a GPU: an address, no elements."""

    def __init__(self, array, device=0):
        self.array, self.device = array, SimpleNamespace(id=device)
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=device)
        self.dtype, self.shape, self.strides, self.flags = array.dtype, array.shape, array.strides, array.flags
        self.size, self.ndim, self.itemsize = array.size, array.ndim, array.itemsize


@dataclass
class RecordingDriver:
    """What CupyDriver offers. `calls` has every launch: (device, binary, grid, block, args, shared_mem)."""

    here: int = 0
    cc: int = 90
    calls: list = field(default_factory=list)
    loaded: list = field(default_factory=list)
    times: dict = field(default_factory=dict)       # {options as a tuple: milliseconds}, for the autotuner
    device_name: str = "a recording"

    def current(self):
        return self.here

    @contextmanager
    def using(self, device):
        before, self.here = self.here, device
        yield
        self.here = before

    def capability(self, device):
        return self.cc

    def name(self, device):
        return self.device_name

    def packed(self, numbers):
        return tuple(numbers), None

    def load(self, binary, device):
        assert device == self.here
        self.loaded.append((binary, device))

        def function(grid, block, args, shared_mem=0, stream=None):
            args = tuple(np.uint64(a.data.ptr) if isinstance(a, DeviceArray) else a for a in args)     # as CuPy does
            self.calls.append((self.here, binary, grid, block, args, shared_mem))
        return function


@dataclass(frozen=True)
class Variant:
    """What build() was asked for."""

    kernel: str
    types: tuple        # ((parameter, type or None), …)
    divisible: tuple
    options: tuple      # ((keyword, value), …)


def fake_build(asked=None):
    """A build() that makes nothing: a Binary of the types asked for, two scratch pointers, 1 KiB of shared memory."""
    def build_nothing(kernel, types, divisible, options, capability):
        variant = Variant(kernel.name, tuple(types.items()), tuple(divisible), tuple(options.items()))
        if asked is not None:
            asked.append(variant)
        kinds = tuple(kind for kind in types.values() if kind is not None)
        return build.Binary(variant, kinds, 2, 1024, kernel.settings(options)[1], b"")
    return build_nothing


def build_variants(source, target):
    """Build each pickled Variant for sm_90 and pickle (its Binary, the types of the PTX's parameters)."""
    kernels, found = table(), {}
    with open(source, "rb") as file:
        variants = pickle.load(file)
    for v in variants:
        kernel, types, options = kernels[v.kernel], dict(v.types), dict(v.options)
        made = build.compile_triton(kernel, types, v.divisible, options, 90)
        found[v] = (build.checked(kernel, types, made), build.ptx_parameters(made.asm["ptx"], made.metadata.name))
    with open(target, "wb") as file:
        pickle.dump(found, file)


def size_of(ptx_type):
    """Bytes of a PTX type: 8 of "u64"."""
    return np.dtype({"u": "u", "f": "f", "s": "i", "b": "u"}[ptx_type[0]] + str(int(ptx_type[1:]) // 8)).itemsize


if __name__ == "__main__":
    build_variants(*sys.argv[1:])
