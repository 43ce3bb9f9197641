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
