"""Lists, tuples and numbers in the places of arrays, as NumPy's functions take them: mt.sum([1, 2]).

Most ops begin by asking their arrays for a shape, which a list doesn't have. Only then, when an op has failed, is
looked at what it was given. So arrays cost a call, a tenth of a microsecond, and that only where users call mt.mean(x):
methods, operators and what the library calls itself are the bare functions, and the quickest catch it themselves. There
is looked for torch's names of arguments, too: mt.sum(x, dim=1).
"""

import inspect
from functools import wraps

from ..torch_names import ARGUMENTS
from .dispatch import as_array

# Parameters that are arrays.
ARRAYS = frozenset("x y w weight bias gate up input query key value indices logits labels prediction target "
                   "targets".split())


def taking_lists(function, module=None):
    """The function, which may be given lists, tuples and numbers as well where its parameters are called as ARRAYS are.
    TypeError that names function and parameter for what can't become an array: text, lists of Tensors, None unless it
    is the default; one that says what torch's dim= and the like are called. Itself where it has neither such parameters
    nor an axis, or sees to lists in dispatch.py's ways, as the quickest do.
    module: by which pickle finds it, if not the function's own."""
    parameters = inspect.signature(function).parameters
    if "axis" not in parameters and (not {"as_array", "operand"}.isdisjoint(function.__code__.co_names)
                                     or parameters.keys().isdisjoint(ARRAYS)):
        return function

    @wraps(function)
    def taking(*args, **named):
        try:
            return function(*args, **named)
        except (AttributeError, TypeError):
            if odd := [name for name in named if name in ARGUMENTS and name not in parameters]:
                raise TypeError(f"{function.__name__}: functions have NumPy's arguments, methods torch's: "
                                + ", ".join(f"{ARGUMENTS[name]} in place of {name}=" for name in odd)) from None
            made = of_lists(function, *args, **named)
            if made is None:
                raise
        return function(*made.args, **made.kwargs)
    taking.__module__ = module or function.__module__
    return taking


def of_lists(function, *args, **named):
    """The arguments with arrays where there were lists and numbers, as inspect's BoundArguments; None: all were arrays,
    or they are none that the function takes."""
    try:
        bound = inspect.signature(function).bind(*args, **named)
    except TypeError:
        return None
    given, arrays = bound.arguments, {}
    for name, parameter in bound.signature.parameters.items():
        value = given.get(name)
        if name in ARRAYS and not hasattr(value, "shape") and (value is not None or parameter.default is not None):
            beside = next((v for n, v in given.items() if n in ARRAYS and hasattr(v, "shape")), None)
            arrays[name] = as_array(function.__name__, value, beside, name)
    given.update(arrays)
    return bound if arrays else None
