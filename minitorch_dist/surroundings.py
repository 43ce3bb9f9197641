"""What a function takes from elsewhere, and whether it is still that.

A function that is not run again (cuda_graphs.py, compiler/) must not go on with what its names stood for once. What it
reads is found from its code: variables around it, globals, attributes that it names, and in turn what these hold.

    a function   what its names stand for; those of functions that it calls, too, but for the library's
    a module     all attributes of it and of the modules below: parameters, buffers, numbers, hooks, training
    a tensor     its array, whether it wants a gradient, hooks
    a list …     the arrays, tensors, modules and functions in it; its numbers and texts are not looked at
    an object    those attributes that the function's code names

Found once, as Places, which are quick to compare.
"""

import sys
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import NamedTuple

import numpy as np

from .autodiff.tensor import Tensor
from .backend import is_array

PLAIN = (bool, int, float, complex, str, bytes, type(None))
LIBRARIES = {__package__, "numpy", "cupy", *sys.stdlib_module_names} - {"__main__"}


class Place(NamedTuple):
    """Where values stand: look(where) gave `kept`."""

    look: object
    where: object
    kept: tuple


def unchanged(places):
    """Whether the same stands there now."""
    for look, where, kept in places:
        now = look(where)
        if len(now) != len(kept) or not all(map(is_, now, kept)) and not all(map(same, now, kept)):
            return False
    return True


def same(a, b):
    """Whether two values are one object, or equal numbers or texts."""
    return a is b or a.__class__ is b.__class__ and isinstance(a, PLAIN) and repr(a) == repr(b)


def described(value):
    """What a graph is made for: an array's kind, shape and dtype, or the value."""
    raw = value.data if isinstance(value, Tensor) else value
    if is_array(raw) or raw is not value:
        return Tensor if raw is not value else None, raw.shape, raw.dtype.str
    return type(value), repr(value) if isinstance(value, (float, complex, np.generic)) else value    # 0.0 == -0.0


def of_tensor(tensor):
    """What of a tensor decides what a function does with it."""
    node = tensor.node
    return (tensor.data,) if node is None else (
        tensor.data, node, getattr(node, "hooks", None), getattr(node, "grad_hooks", None))


def of_module(module):
    return vars(module).values()


def of_container(container):
    items = container.values() if isinstance(container, dict) else container
    return [item for item in items if not isinstance(item, PLAIN)]


def of_names(source):
    """(where names are looked up, the names) -> values."""
    table, names = source
    return [table.get(name) for name in names]


def of_cells(cells):
    return [cell.cell_contents for cell in cells if cell != EMPTY]


TABLES = ("_parameters", "_buffers", "_modules")
EMPTY = CellType()


def names_of(code):
    """All names that code looks up, in functions inside of it too."""
    inner = [names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


def surroundings(root):
    """[Place] of all that a function or a module reads."""
    places, seen, stack = [], {}, [(root, frozenset())]
    while stack:
        value, names = stack.pop()
        known = seen.setdefault(id(value), set())
        if isinstance(value, PLAIN) or names in known:
            continue
        found = [] if known and not reads_names(value) else [
            Place(look, where, tuple(look(where))) for look, where in places_of(value, names)]
        known.add(names)
        places += found
        inside = names_of(value.__code__) if isinstance(value, FunctionType) else names
        stack += [(inner, inside) for inner in held(value, found)]
        owner = getattr(value, "__self__", value)
        stack += [(inner, names_of(method.__code__)) for method in methods(value, names) for inner in (method, owner)]
    return places


def held(value, found):
    """What is in a value, to be looked at in turn."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, FunctionType) and library(value):
        return of_cells(value.__closure__ or ())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if is_module(value):    # its tables hold what its attributes are, but for modules without a name
        tables = [inner for name, inner in value._modules.items() if not name]
        return [inner for name, inner in vars(value).items() if name not in TABLES] + tables
    wrapped = getattr(value, "__wrapped__", None)
    return [inner for place in found for inner in place.kept] + ([] if wrapped is None else [wrapped])


def methods(value, names):
    """The functions of a value's class that are called by these names, or when it is called itself; a function."""
    if isinstance(value, MethodType):
        found = [value.__func__]
    else:
        found = [getattr(type(value), name, None) for name in {*names, "forward", "__call__"}]
    return [method for method in found if isinstance(method, FunctionType) and not library(method)]


def library(function):
    """Whether a function is a library's: it reads what it was given, and nothing that changes."""
    return (function.__module__ or "").partition(".")[0] in LIBRARIES


def places_of(value, names):
    """(look, where) of what can change in one value, where code with these names reads it."""
    if isinstance(value, Tensor):
        return [(of_tensor, value)]
    if is_module(value):
        return [(of_module, value)]
    if isinstance(value, (list, tuple, dict, set)):
        return [(of_container, value)]
    if isinstance(value, FunctionType):
        if library(value):
            return []
        table, read = value.__globals__, names_of(value.__code__)
        return [(of_cells, value.__closure__ or ()), (of_names, (table, tuple(read & table.keys()))),
                (of_container, value.__defaults__ or ()), (of_container, value.__kwdefaults__ or {})]
    table = getattr(value, "__dict__", None)
    return [] if table is None or isinstance(value, MethodType) else [(of_names, (table, tuple(names & table.keys())))]


def reads_names(value):
    """Whether it depends on the names that a code looks up what can change in a value."""
    return not (isinstance(value, (Tensor, FunctionType, MethodType, list, tuple, dict, set)) or is_module(value))


def is_module(value):
    """Whether it is an nn.Module, which lies above."""
    return hasattr(value, "named_modules") and "_modules" in getattr(value, "__dict__", ())
