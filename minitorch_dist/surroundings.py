"""What a function takes from elsewhere, and whether it is still that.

A function that is not run again (cuda_graphs.py, compiler/) must not go on with what its names stood for once. What it
reads is found from its code: variables around it, globals, attributes that it names, and in turn what these hold.

    a function   what its names stand for; those of functions that it calls, too, but for the library's
    a module     all attributes of it and of the modules below: parameters, buffers, numbers, hooks, training
    a tensor     its array, whether it wants a gradient, hooks
    a list …     what is in it, a dict's keys, too; of one that is a module's attribute, which no code names, only the
                 arrays, tensors, modules and functions: it may be a history that grows
    an object    those attributes, its own and its classes', that the function's code names

Found once, as Places, which are quick to compare.
"""

import argparse
import dis
import functools
import sys
import sysconfig
from functools import partial
from itertools import zip_longest
from operator import is_
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from .autodiff.tensor import Tensor
from .backend import device_of, dtype_code, is_array

PLAIN = (bool, int, float, complex, str, bytes, type(None))
NAMESPACES = (SimpleNamespace, argparse.Namespace)
MISSING = object()      # what isn't there, not even as None
CONTAINERS = (list, tuple, dict, set, frozenset)
ITEMS = "[…]"           # behind a name: code loads it, and may read items. Alone: by which it reads a container
STORES = {"STORE_ATTR", "DELETE_ATTR"}
STDLIB = Path(sysconfig.get_paths()["stdlib"])


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


def changed(places):
    """What isn't what it was at the first place where something isn't, in words; None: nothing."""
    for look, where, kept in places:
        now = look(where)
        if len(now) != len(kept):
            return f"{named(look, where)} had {len(kept)} values and has {len(now)}"
        for i, (a, b) in enumerate(zip(now, kept, strict=True)):
            if not same(a, b):
                return f"{named(look, where, i)} was {b!r:.40} and is {a!r:.40}"
    return None


def named(look, where, i=None):
    """What a Place is called, or its value number i."""
    if look in (of_names, of_slots, of_cells) and i is not None:
        return where[1][i]
    if look is of_module and i is not None:
        return f"{type(where).__name__}.{[*vars(where)][i]}"
    if look in (of_container, of_objects):
        return f"a {type(where).__name__}" if i is None else f"an item of a {type(where).__name__}"
    return KINDS[look]


def put_back(places):
    """Let what stood there stand there again, in lists, dicts, sets, attributes and variables around a function."""
    for look, where, kept in places:
        if unchanged([Place(look, where, kept)]):
            continue
        if look is of_container and isinstance(where, list):
            where[:] = kept
        elif look is of_container and isinstance(where, dict):
            half = len(kept) // 2
            where.clear()
            where.update(zip(kept[:half], kept[half:], strict=True))
        elif look is of_container and isinstance(where, set):
            where.clear()
            where.update(kept)
        elif look is of_module:     # attributes that are new stand last
            _set_again(vars(where), list(vars(where)), kept)
        elif look is of_names and isinstance(where[0], dict):
            _set_again(*where, kept)
        elif look is of_cells:
            for cell, value in zip(where[0], kept, strict=True):
                if value is not MISSING:
                    cell.cell_contents = value


def _set_again(table, names, kept):
    """Let a table have these values under these names; names for which there is none have no value."""
    for name, value in zip_longest(names, kept, fillvalue=MISSING):
        if value is MISSING:
            table.pop(name, None)
        elif name is not MISSING:
            table[name] = value


def same(a, b):
    """Whether two values are one object, or equal numbers or texts."""
    return a is b or a.__class__ is b.__class__ and isinstance(a, PLAIN) and repr(a) == repr(b)


def described(value):
    """What a graph is made for: an array's kind, shape and dtype, or the value."""
    raw = value.data if isinstance(value, Tensor) else value
    if is_array(raw) or raw is not value:
        return (Tensor if raw is not value else None, raw.shape, dtype_code(raw.dtype),
                "cpu" if raw.__class__ is np.ndarray else device_of(raw))
    if isinstance(value, (*PLAIN, np.generic, np.dtype)):
        return type(value), repr(value) if isinstance(value, (float, complex, np.generic)) else value    # 0.0 == -0.0
    return The(value)


class The:
    """An object, equal to nothing but itself."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, The) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def of_tensor(tensor):
    """What of a tensor decides what a function does with it."""
    node = tensor.node
    return (tensor.data,) if node is None else (
        tensor.data, node, getattr(node, "hooks", None), getattr(node, "grad_hooks", None))


def of_module(module):
    return vars(module).values()


def of_container(container):
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def of_objects(container):
    return [item for item in of_container(container) if not isinstance(item, PLAIN)]


def type_of(value):
    return (type(value),)


def of_names(source):
    """(where names are looked up, the names) -> values."""
    table, names = source
    return [table.get(name, MISSING) for name in names]


def of_slots(source):
    """(an object, names of its slots) -> values."""
    value, names = source
    return [getattr(value, name, MISSING) for name in names]


def of_defaults(function):
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def of_arguments(function):
    return [function.func, *function.args, *function.keywords.values()]


def of_cells(source):
    """(the cells of the variables around a function, their names) -> values."""
    cells, _ = source
    return [MISSING if cell == EMPTY else cell.cell_contents for cell in cells]


KINDS = {of_defaults: "a default", of_tensor: "a tensor", of_arguments: "a partial",
         type_of: "a type", of_cells: "what is around a function", of_names: "an object", of_slots: "an object",
         of_module: "a module"}
TABLES = ("_parameters", "_buffers", "_modules")
EMPTY = CellType()


@functools.lru_cache(4096)
def names_of(code):
    """All names that code looks up, in functions inside of it too; those that it doesn't only set with ITEMS, too."""
    inner = [names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    loaded = [f"{step.argval}{ITEMS}" for step in dis.get_instructions(code)
              if step.opcode in dis.hasname and step.opname not in STORES]
    return frozenset((*code.co_names, *loaded, ITEMS)).union(*inner)


def surroundings(root, given=()):
    """[Place] of all that a function or a module reads, of what it is `given`, too."""
    seen, places, code = {}, [], set()
    stack = [(value, frozenset()) for value in (root, *given) if not isinstance(value, np.dtype)]
    while stack:
        walk(stack, seen, places, code)
        # Any code may be handed any object of the user's, and ask it for what it names.
        stack = [(value, frozenset(code)) for value, known in seen.values() if not code <= known
                 and (classes(value) or isinstance(value, NAMESPACES)) and not isinstance(value, ModuleType)]
    return places


def walk(stack, seen, places, code):
    """Add the Places of what is on the stack, [(value, names by which code reads it)], and of what that holds; to
    `seen`, {id: (value, the names that it was asked for)}; to `code`, the names in all code that was met."""
    while stack:
        value, names = stack.pop()
        if isinstance(value, PLAIN) or value is MISSING:
            continue
        again, (_, known) = id(value) in seen, seen.setdefault(id(value), (value, set()))
        names = names - known       # those that it has not been asked for yet
        if again and (not names or isinstance(value, (Tensor, FunctionType))):
            continue
        known |= names
        found = [] if again and not reads_names(value, names) else [
            Place(look, where, tuple(look(where))) for look, where in places_of(value, names)
            if not (again and look is of_module)]
        places += found
        inside = names_of(value.__code__) if isinstance(value, FunctionType) else names
        code |= inside
        stack += [(inner, inside | {ITEMS} if is_read(inner, value, known) else inside - {ITEMS})
                  for inner in held(value, found)]
        if not isinstance(value, (FunctionType, MethodType)):
            stack += [(cls, names) for cls in classes(value)]
        owner = value.__self__ if isinstance(value, MethodType) else value
        for method in methods(value, names):
            stack += [(method, frozenset()), (owner, names_of(method.__code__))]


def held(value, found):
    """What is in a value, to be looked at in turn."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, FunctionType) and library(value):
        return of_cells((value.__closure__ or (), ()))
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if is_module(value):    # its tables hold what its attributes are, but for modules without a name
        tables = [inner for name, inner in value._modules.items() if not name]
        return [inner for name, inner in vars(value).items() if name not in TABLES] + tables
    if isinstance(value, CONTAINERS):
        return of_container(value)
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    return [inner for place in found for inner in place.kept] + ([] if wrapped is None else [wrapped])


def is_read(inner, value, names):
    """Whether the code that reads a value by these names reads a container in it."""
    if isinstance(value, CONTAINERS):
        return ITEMS in names
    return not (is_module(value) and isinstance(inner, CONTAINERS)) or any(
        inner is held for name, held in vars(value).items() if name + ITEMS in names)


def methods(value, names):
    """The functions of a value's class, and of those below it, that are called by these names, by an operator, or when
    it is called itself; a bound method's own."""
    if isinstance(value, MethodType):
        found = [value.__func__]
    else:
        found = [inner for cls in classes(value) for name, inner in vars(cls).items()
                 if name in names or name == "forward" or name.startswith("__")]
        found = [part for inner in found for part in (
            (inner.fget,) if isinstance(inner, property) else (getattr(inner, "__func__", inner),))]
    return [method for method in found if isinstance(method, FunctionType) and not library(method)]


def classes(value):
    """The classes, but for libraries', that give a value, or an instance of this class, its attributes."""
    mro = (value if isinstance(value, type) else type(value)).__mro__
    return [cls for cls in mro if isinstance(cls.__module__, str) and not of_library(cls.__module__)]


def library(function):
    """Whether a function is a library's: it reads what it was given, and nothing that changes."""
    return of_library(function.__module__ or "")


@functools.cache
def of_library(module):
    """Whether a module of this name is a library's: ours, Python's, or one that was installed."""
    top = module.partition(".")[0]
    if top == __package__ or top not in sys.modules:
        return top == __package__ or top in sys.stdlib_module_names
    place = Path(getattr(sys.modules[top], "__file__", None) or "")
    if not place.parts:     # built in, or typed in
        return top in sys.builtin_module_names
    return STDLIB in place.parents or not {"site-packages", "dist-packages"}.isdisjoint(place.parts)


def places_of(value, names):
    """(look, where) of what can change in one value, where code with these names reads it."""
    if isinstance(value, Tensor):
        return [(of_tensor, value)]
    if is_module(value):
        return [(of_module, value)]
    if isinstance(value, partial):
        return [(of_arguments, value)]
    if isinstance(value, CONTAINERS):
        return [(of_container if ITEMS in names else of_objects, value)]
    if isinstance(value, FunctionType):
        if library(value):
            return []
        table, read = value.__globals__, names_of(value.__code__)
        return [(of_cells, (value.__closure__ or (), value.__code__.co_freevars)),
                (of_names, (table, tuple(read & table.keys()))), (of_defaults, value), (of_module, value)]
    if isinstance(value, MethodType) or isinstance(value, ModuleType) and of_library(value.__name__):
        return []
    table = getattr(value, "__dict__", {})
    names = [name for name in names if not name.endswith(ITEMS)]
    slots = [name for cls in classes(value) for name in names
             if isinstance(vars(cls).get(name), MemberDescriptorType) and not isinstance(value, type)]
    return [(type_of, value), (of_slots, (value, tuple(slots))), (of_names, (table, tuple(names)))]


def reads_names(value, names):
    """Whether what can change in a value, which was asked for other names before, depends on these."""
    if isinstance(value, CONTAINERS):
        return ITEMS in names
    return not isinstance(value, (Tensor, FunctionType, MethodType))


def is_module(value):
    """Whether it is an nn.Module, which lies above."""
    return hasattr(type(value), "named_modules") and "_modules" in getattr(value, "__dict__", ())
