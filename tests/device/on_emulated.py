"""Arrays to an emulated GPU's memory, and back."""

import numpy as np

from .emulated.machine import NULL


def up(machine, array, stream=NULL):
    """An array's address on the GPU."""
    array = np.ascontiguousarray(array)
    at = machine.allocate(array.nbytes)
    machine.copy(at, array.ctypes.data, array.nbytes, stream)
    return at


def down(machine, at, like, stream=NULL):
    out = np.empty(like.shape, like.dtype)
    machine.copy(out.ctypes.data, at, out.nbytes, stream)
    return out
