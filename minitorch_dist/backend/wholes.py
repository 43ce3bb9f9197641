"""Numbers as Python's: NumPy's, and arrays of one without axes, are as good. A whole one of NumPy's of 8 bits would
overflow in the first product of two extents, and a setting of float64 would make float64 of all that it meets."""

from operator import index

import numpy as np


def is_whole(value):
    """Whether `value` is one whole number, of whatever type."""
    try:
        index(value)
    except TypeError:
        return False
    return True


def whole(name, value):
    """The argument of this name, as an int. TypeError where it is no whole number."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number") from None


def wholes(name, value):
    """The argument of this name, one whole number or several, as a tuple of ints. TypeError where it isn't that."""
    if value.__class__ is tuple:        # mostly of ints, which is seen in half the time of making them
        for each in value:
            if each.__class__ is not int:
                break
        else:
            return value
    try:
        return (index(value),) if is_whole(value) else tuple(map(index, value))
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number, or several") from None


def number(value):
    """A number of NumPy's as Python's, which takes the dtype of what it meets (NEP 50); anything else as it is."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
