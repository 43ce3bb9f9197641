"""Parameters without values: those of a model that is to be filled from elsewhere, piece by piece.

    with nn.without_values():
        model = nn.GPT(vocabulary=50257, length=1024, layers=48, dim=1600)      # takes no memory

(What torch calls the meta device.)
"""

import threading
from contextlib import contextmanager
from weakref import WeakValueDictionary

from ..backend import device_name, xp

_come_and_go = WeakValueDictionary()        # id of a tensor -> the tensor


def will_come_and_go(tensor):
    """Note that a tensor's values are in memory at times only, and each time elsewhere."""
    _come_and_go[id(tensor)] = tensor


def comes_and_goes(tensor):
    """Whether a tensor's do."""
    return _come_and_go.get(id(tensor)) is tensor


class AbsentParameterError(RuntimeError, AttributeError):
    """Somebody reads a parameter whose values aren't here."""


class Absent:
    """What stands in a parameter's place while its values aren't in memory: their shape, and nothing to read.

    message  what the error says
    """

    error = AbsentParameterError

    def __init__(self, shape, dtype, device, message):
        self.shape, self.dtype, self.ndim, self.stands_on = tuple(shape), xp.dtype(dtype), len(shape), device
        self.size = xp.prod(shape, dtype=int).item()
        self.nbytes = self.size * self.dtype.itemsize
        self.message = message

    def refuse(self, *_, **__):
        """No operation can be done."""
        raise self.error(self.message)

    def to(self, device):
        """Itself, on the device where it stands."""
        return self if device_name(device) == self.stands_on else self.refuse()

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __setitem__ = __len__ = __iter__ = refuse
    __copy__ = __deepcopy__ = __reduce_ex__ = refuse

    def __getattr__(self, name):
        self.refuse()


class Unmade(Absent):
    """Values that nobody has made. What a constructor does to them afterwards (x *= 0.5) is left out too."""

    def __init__(self, shape, dtype, device="cpu"):
        super().__init__(shape, dtype, device, f"this parameter of shape {tuple(shape)} was made without_values(), and "
                         "nobody has given it any: stream_from_disk can, from a checkpoint")

    def __imul__(self, other):
        return self

    def to(self, device):
        """As many that shall stand on a device."""
        return Unmade(self.shape, self.dtype, device_name(device))

    def astype(self, dtype, copy=True):
        """As many of another dtype."""
        return Unmade(self.shape, dtype, self.stands_on)


class Building(threading.local):
    """Whether this thread builds modules without values."""

    without_values = False


building = Building()


@contextmanager
def without_values():
    """Modules built inside have parameters with shapes and dtypes and no values: no memory, no random numbers. Buffers
    are made as ever. model.to(device or dtype) says where and what the values shall be. Who reads such a parameter gets
    an AbsentParameterError."""
    before, building.without_values = building.without_values, True
    try:
        yield
    finally:
        building.without_values = before
