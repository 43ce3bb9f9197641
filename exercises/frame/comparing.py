"""Values as trees of arrays, numbers and strings, and whether one is what was expected."""

import numpy as np

from .child import Unknown

MISSING = Unknown("nothing")


def per_rank(case_or_outputs):
    """A list over ranks, also of a plain exercise's dict."""
    return [case_or_outputs] if isinstance(case_or_outputs, dict) else list(case_or_outputs)


def branches(value, name):
    """{label: item} of a list or a dict; {} of a leaf."""
    if isinstance(value, (list, tuple)):
        return {f"{name}[{i}]": item for i, item in enumerate(value)}
    return {f"{name}[{key!r}]": item for key, item in value.items()} if isinstance(value, dict) else {}


def leaves(value, name):
    """{label: array, number, string or None} of nested lists and dicts: {"grads[1]": …}. Empty ones are leaves."""
    items = branches(value, name)
    if not items:
        return {name: value}
    return {label: leaf for item_name, item in items.items() for label, leaf in leaves(item, item_name).items()}


def compared(label, got, expected):
    """(label, got, expected) there, or above, where one of the two has a leaf and the other a list or a dict."""
    def leads(name):
        return label == name or label.startswith(name + "[")
    name = next(name for name in expected if leads(name))
    one, other = shaped(got.get(name, MISSING), expected[name]), expected[name]
    while name != label:
        ours, theirs = branches(one, name), branches(other, name)
        if not (ours and theirs) or isinstance(one, dict) != isinstance(other, dict):
            break
        name = next(step for step in theirs | ours if leads(step))
        one, other = ours.get(name, MISSING), theirs.get(name, MISSING)
    return name, one, other


def all_leaves(outputs, like=None):
    """{label: leaf} of one rank's outputs; with `like` (expected outputs) only those names, shaped as it is."""
    if like is None:
        return {label: leaf for name, value in outputs.items() for label, leaf in leaves(value, name).items()}
    found = {}
    for name, expected in like.items():
        found |= leaves(shaped(outputs.get(name, MISSING), expected), name)
    return found


def shaped(got, expected):
    """got, with lists made arrays and arrays made lists where it was expected so: both are right."""
    if isinstance(expected, np.ndarray) and isinstance(got, (list, tuple)):
        try:
            array = np.asarray(got)
            return Unknown("list") if array.dtype.hasobject else array
        except ValueError:
            return Unknown("list")
    if isinstance(expected, (list, tuple)):
        if isinstance(got, np.ndarray) and got.ndim and len(got) == len(expected):
            got = list(got)
        if isinstance(got, (list, tuple)) and len(got) == len(expected):
            return [shaped(g, e) for g, e in zip(got, expected, strict=True)]
    if isinstance(expected, dict) and isinstance(got, dict):
        return {key: shaped(value, expected.get(key)) for key, value in got.items()}
    return got


def is_number(value):
    return isinstance(value, (bool, int, float, complex, np.generic, np.ndarray))


def same(got, expected, tolerance):
    """Whether a leaf is right. Floating-point numbers within `tolerance` of the array's largest magnitude."""
    if not (is_number(got) and is_number(expected)):
        return type(got) is type(expected) and got == expected
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or got.dtype.kind in "USmMV":
        return False
    if got.size == 0:
        return True
    if expected.dtype.kind in "biu":
        return bool(np.array_equal(got, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return False
    scale = np.abs(expected[finite]).max(initial=0.0) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.all(np.abs(got[finite] - expected[finite]) <= tolerance * scale))


def wrong_labels(got, expected, tolerance):
    """Labels of one rank's leaves that are wrong, in order."""
    expected_leaves, got_leaves = all_leaves(expected), all_leaves(got, expected)
    wrong = [label for label, leaf in expected_leaves.items()
             if not same(got_leaves.get(label, MISSING), leaf, tolerance)]
    return wrong + [label for label in got_leaves if label not in expected_leaves]
