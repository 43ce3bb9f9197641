"""Where an array lies in memory that may go, and come again elsewhere: what is saved for backward in its place."""

from typing import NamedTuple

from ..backend import module_of, xp


class Place(NamedTuple):
    """An array's place in a 1-d uint8 array; offset and strides in bytes."""

    offset: int
    shape: tuple
    strides: tuple
    dtype: object

    @classmethod
    def of(cls, array, begin):
        """Of an array in memory that begins at the address `begin`."""
        return cls(address(array) - begin, array.shape, array.strides, array.dtype)

    def view(self, memory):
        """The array again; its strides too, on which the order of sums may depend."""
        if isinstance(memory, xp.ndarray):
            return xp.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)
        first = memory[self.offset:self.offset + self.dtype.itemsize].view(self.dtype)
        return module_of(memory).lib.stride_tricks.as_strided(first, self.shape, self.strides)


def address(array):
    """Where its first element lies."""
    return array.__array_interface__["data"][0] if isinstance(array, xp.ndarray) else array.data.ptr
