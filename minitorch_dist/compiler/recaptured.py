"""Why a compiled function was captured once more: what differs from the last time, in words."""

from ..backend import as_dtype
from ..surroundings import changed


def once_more(times, before, key):
    """The end of a warning: after so many times, the last of which made the variant `before`, a call has this key."""
    return (f"once more after {times} times, and keeps {times} graphs; now because {why(before, key)}. Another shape "
            "takes another graph; another number takes none where it is a tensor among the arguments")


def why(before, key):
    """Of a variant of the same function, and the key of the call that it doesn't fit."""
    if before.key == key:
        return changed(before.places) or "something that it reads has changed meanwhile"
    (was, were, *_), (tree, now, *_) = before.key, key
    if was != tree:
        return "its arguments are nested otherwise"
    for i, (a, b) in enumerate(zip(were, now, strict=True)):
        if a != b:
            return f"argument {i} was {told(a)} and is {told(b)}"
    return "a mode is another one: gradients, autocast, kernels"


def told(what):
    """An argument, as surroundings.described has it."""
    if not isinstance(what, tuple):
        return "another object"
    if len(what) == 2:
        return str(what[1])
    return f"{as_dtype(what[2]).name} {what[1]} on {what[3]}"
