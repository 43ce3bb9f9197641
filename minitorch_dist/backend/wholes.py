"""Whole numbers as ints: NumPy's, and arrays of one without axes, are as good as Python's. One of NumPy's of 8 bits
would overflow in the first product of two extents."""

from operator import index


def is_whole(value):
    """Whether `value` is one whole number, of whatever type."""
    try:
        index(value)
    except TypeError:
        return False
    return True


def whole(**named):
    """The one argument, as an int. TypeError, naming it, where it is no whole number."""
    (name, value), = named.items()
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number") from None


def wholes(**named):
    """The one argument, one whole number or several, as a tuple of ints. TypeError, naming it, where it isn't that."""
    (name, value), = named.items()
    try:
        if value.__class__ is tuple:
            return tuple(map(index, value))
        return (index(value),) if is_whole(value) else tuple(map(index, value))
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number, or several") from None
