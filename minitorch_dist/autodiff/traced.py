"""Traced: what tapes and duals have in common, and how a value leaves them."""

from operator import index

import numpy as np

from ..backend import device_of, is_array, is_floating, recording, to


class Traced:
    """A value that something follows: a tape (Tensor), or a tangent (Dual).

    `level` orders nested transforms: the value with the highest level decides
    who handles an op, so that an inner derivative never sees an outer one's
    perturbation as its own.
    """

    __slots__ = ()
    level = 0
    __array_ufunc__ = None      # ndarray * Traced asks Traced.__rmul__

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        TRACED.add(cls)

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return self.primal_array().size

    @property
    def device(self):
        """Where the values live: "cpu", "cuda:0", …"""
        return device_of(lower(self))

    @property
    def T(self):
        """All axes reversed, as in NumPy."""
        return self.transpose()

    def primal_array(self):
        """The bare array underneath, through all levels. No derivative flows through it."""
        return lower(self)

    def __bool__(self):
        return bool(self._number())

    def __float__(self):
        self._may_leave("float()")
        return float(self._number())

    def __int__(self):
        return int(self._number())

    def __index__(self):
        return index(self._number())

    def _number(self):
        """The bare array, for a conversion to a number, of any shape if it has one element (NumPy takes 0-d ones
        alone); from a GPU it is waited for."""
        self._asked()
        array = to(lower(self), "cpu")
        return array.reshape(()) if array.shape and array.size == 1 else array

    def item(self):
        """The value of a one-element tensor as a Python number; from a GPU it is waited for."""
        self._may_leave("item()")
        self._asked()
        return to(lower(self), "cpu").item()

    def tolist(self):
        """The values as nested Python lists; from a GPU they are waited for."""
        self._may_leave("tolist()")
        self._asked()
        return to(lower(self), "cpu").tolist()

    def __format__(self, spec):
        """f"{loss:.3f}" is that of the number, inside a transform too: it is to be looked at. Without a spec it is
        repr's."""
        if not spec:
            return repr(self)
        self._asked()
        return format(to(lower(self), "cpu").item(), spec)

    def numpy(self):
        """The values as a NumPy array; TypeError inside a transform."""
        self._may_leave("numpy()", True)
        return lower(self)

    def _may_leave(self, what, always=False):
        """TypeError for a floating value inside a transform: what comes out would have no derivative."""
        if self.level and (always or is_floating(self.dtype)):
            raise TypeError(f"{what}: a value inside a transform (grad, vjp, jvp, …) has no fixed numbers to hand out, "
                            "they would be a constant: work with it as it is, and return it from the function; where "
                            "a constant is meant, take mt.stop_gradient(x)")

    def _asked(self):
        if recording.graph is not None:
            recording.graph.asked(self)

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        raise TypeError(f"NumPy was handed a {type(self).__name__}, and would lose its derivative: "
                        "use the function of the same name in minitorch_dist, or .numpy() for the bare values")


TRACED = set()


def shape_of_data(tensor):
    """The shape of the array that a Tensor holds."""
    try:
        return tensor.data.shape
    except AttributeError as error:
        raise no_array(tensor) from error


def dtype_of_data(tensor):
    """The dtype of the array that a Tensor holds."""
    try:
        return tensor.data.dtype
    except AttributeError as error:
        raise no_array(tensor) from error


def no_array(tensor):
    """What is said where it holds none, as torch's Tensor([1.0]) may."""
    return TypeError(f"this Tensor was made of a {type(tensor.data).__name__}, and Tensor(…) takes an array as it is: "
                     "mt.tensor(values) makes one of lists and numbers, mt.zeros(shape) one of a shape")


def explain(error):
    """Add to an exception of NumPy's, inside a transform of its arrays, what to write instead."""
    note = None
    if isinstance(error, AttributeError) and (is_array(error.obj) or isinstance(error.obj, np.generic)) \
            and hasattr(Traced, error.name or ""):
        note = ("In a transform of NumPy's arrays what has no derivative, as x > 0 and x.argmax(), is NumPy's, too: "
                f"write (x > 0).astype(x.dtype), as of arrays, or mt.tensor(x > 0).{error.name}; or give it Tensors")
    elif isinstance(error, TypeError) and "does not support ufuncs (__array_ufunc__=None)" in str(error):
        note = ("NumPy can't put what a transform follows into an array of its own: write y = y + x for y += x, and "
                "mt.exp(x) for np.exp(x)")
    if note is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def lower(x):
    """The raw array under a traced value, through all levels; anything else as it is."""
    while x.__class__ in TRACED:
        x = x.lowered()
    return x
