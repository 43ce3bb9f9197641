"""Outputs in a few words: what was got, what was expected, and what can be said of a mistake that nobody knows."""

import numpy as np

from .comparing import MISSING, all_leaves, compared, is_number, per_rank

FEW = 6            # names in a sentence
MANY = 12          # inputs in a line


def facts(cases, outputs, truths, wrong, n, tolerance):
    """Lines: the first wrong number, and the case it is from."""
    (i, rank), labels = next(iter(wrong.items()))
    found = difference(*compared(labels[0], outputs[i][rank], truths[i][rank]))
    yield "  " + (f"rank {rank} of {n}: " if n > 1 else "") + found
    yield from place(cases, i, n)


def place(cases, i, n):
    """The line that says which case it is, and with which inputs; none where there is one, without any that fit."""
    numbers = [brief(inputs) for inputs in per_rank(cases[i])]
    inputs = ""
    if n > 1 and any(numbers) and len(set(numbers)) == 1:
        inputs = f": every rank has {numbers[0]}"
    elif any(numbers):
        inputs = ": " + "; ".join((f"rank {r} has " if n > 1 else "") + text for r, text in enumerate(numbers) if text)
    if inputs or len(cases) > 1:
        yield f"  in case {i + 1} of {len(cases)}{inputs}"


def brief(inputs):
    """The inputs that fit into a line: numbers, a few of them, and short strings, and shapes."""
    short = [f"{name}={number(value) if isinstance(value, float) else repr(value)}" for name, value in inputs.items()
             if (isinstance(value, (bool, int, float, str)) or few_numbers(value)) and len(repr(value)) < 30]
    shapes = [f"{name} of shape {list(value.shape)}" for name, value in inputs.items() if isinstance(value, np.ndarray)]
    return ", ".join((short + shapes)[:MANY]) + " …" * (len(short + shapes) > MANY)


def few_numbers(value):
    return isinstance(value, (list, tuple)) and bool(value) and all(type(x) in (int, float) for x in value)


def difference(label, got, expected):
    """One leaf in words: got and expected, at the index where they differ most."""
    name = "the result" if label == "result" else label.replace("result", "the result", 1)
    if got is MISSING:
        return f"{name} is missing; expected {show(expected)}"
    if expected is MISSING:
        return f"{name} is there, and nobody expected it"
    if got is None:
        return f"{name} is None; expected {show(expected)}" + (": is there a return?" if "[" not in label else "")
    if not (is_number(got) and is_number(expected)):
        return f"{name} is {show(got)}; expected {show(expected)}"
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return f"{name} has shape {list(got.shape)}; expected {list(expected.shape)}"
    if got.dtype.kind in "USmMV":
        return f"{name} is {show(got)}; expected {show(expected)}"
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(got.astype(complex) - expected.astype(complex))
    distance = np.where((got == expected) | (got != got) & (expected != expected), 0.0, distance)     # inf is inf
    index = np.unravel_index(np.argmax(np.where(np.isnan(distance), np.inf, distance)), got.shape)
    at = f"[{', '.join(map(str, index))}]" if got.ndim else ""
    kinds = got.dtype.kind + expected.dtype.kind       # of a float and an integer both are shown as floats
    one, other = (number(x[index].astype(float) if sorted(kinds) in (["f", "i"], ["f", "u"]) else x[index])
                  for x in (got, expected))
    if one == other:      # in six digits
        other += f" and not off by {number(distance[index])}"
        if got.dtype.kind == expected.dtype.kind == "f" and got.dtype.itemsize < expected.dtype.itemsize:
            other += f": yours has only the digits of {got.dtype}"
        elif detour(got, expected):
            other += ": yours has only the digits of float32, as if it had been one on the way"
    return f"{name}{at} is {one}; expected {other}"


def detour(got, expected):
    """Whether float64 numbers are float32's, all of them, where not all were expected to be."""
    if not got.dtype == expected.dtype == np.float64:
        return False
    with np.errstate(over="ignore"):
        return bool(np.all(got == got.astype(np.float32)) and np.any(expected != expected.astype(np.float32)))


def number(value):
    return f"{value:.6g}" if np.asarray(value).dtype.kind == "f" else str(value)


def show(value):
    """A leaf in a few words."""
    if isinstance(value, np.ndarray) and value.ndim:
        return f"an array of shape {list(value.shape)}"
    if isinstance(value, dict) and 0 < len(value) <= FEW and all(isinstance(key, str) for key in value):
        return f"a dict of {', '.join(map(repr, value))}"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (float, np.generic, np.ndarray)):
        return number(value)
    return repr(value) if not isinstance(value, str) or len(value) < 80 else repr(value[:77] + "…")


def unknown_mistake(outputs, truths, wrong, n):
    """What can be said of wrong numbers without knowing the mistake."""
    pairs = []
    for (i, rank), labels in wrong.items():
        expected, got = all_leaves(truths[i][rank]), all_leaves(outputs[i][rank], truths[i][rank])
        pairs += [(i, rank, label, got.get(label, MISSING), expected.get(label, MISSING)) for label in labels]
    i, rank, label = pairs[0][:3]
    one_place = difference(*compared(label, outputs[i][rank], truths[i][rank]))
    arrays = [(np.asarray(g), np.asarray(e)) for *_, g, e in pairs if is_number(g) and is_number(e)]
    where = f"rank {rank} of {n}: " if n > 1 else ""
    if len(arrays) < len(pairs) or any(g.shape != e.shape or g.dtype.kind not in "fciub" for g, e in arrays):
        return where + one_place
    nan = [pair[2] for pair in pairs if pair[:2] == (i, rank) and np.isnan(pair[3]).any() > np.isnan(pair[4]).any()]
    if nan:
        return f"{where}{enumerated(nan)} holds nan: an element that was never written, or ∞ - ∞, 0 · ∞ or 0 / 0"
    flat = np.concatenate([np.ravel(g).astype(complex) for g, _ in arrays])
    right = np.concatenate([np.ravel(e).astype(complex) for _, e in arrays])
    ratio = constant_ratio(flat, right)
    if ratio is None or abs(ratio - 1) < 1e-3 or 0 < abs(ratio) < 1e-3:      # 1.000 or 0.000 times
        return where + one_place
    what = enumerated(pair[2] for pair in pairs)
    every = f"every element of {what}" if flat.size > 1 else what
    if ratio == 0:
        return f"{every} is 0"
    if abs(ratio + 1) < 1e-6:
        return f"{every} has the wrong sign"
    return f"{every} is {ratio:.3f} times what it should be"


def enumerated(labels):
    """The first few of them, each once."""
    names = list(dict.fromkeys(labels))
    return f"{', '.join(names[:FEW])}{' …' * (len(names) > FEW)}".replace("result", "the result", 1)


def constant_ratio(got, expected):
    """got / expected if that is one real number, else None."""
    counts = np.abs(expected) > 1e-9 * np.abs(expected).max(initial=0.0)
    if not counts.any() or not np.isfinite(got).all():
        return None
    if np.abs(got[~counts]).max(initial=0.0) > 1e-6 * np.abs(expected).max():
        return None
    ratios = got[counts] / expected[counts]
    ratio = np.median(ratios.real)
    return float(ratio) if np.abs(ratios - ratio).max() <= 1e-6 * max(abs(ratio), 1e-3) else None
