"""Outputs against truth, and which known mistake explains all that is wrong with them."""

import inspect
from dataclasses import dataclass

import numpy as np

from .child import Unknown

MISSING = Unknown("nothing")
FEW = 6            # names in a sentence
MANY = 12          # inputs in a line


@dataclass
class Finding:
    """What is wrong: a sentence, and lines under it."""

    sentence: str
    details: list


def finding(text, details):
    """The Finding of a chapter's text: lines behind the first are shown as they are, before the details."""
    sentence, *lines = text.splitlines() or [""]
    return Finding(sentence, lines + details)


def per_rank(case_or_outputs):
    """A list over ranks, also of a plain exercise's dict."""
    return [case_or_outputs] if isinstance(case_or_outputs, dict) else list(case_or_outputs)


# ---------------------------------------------------------------- comparing

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


# ---------------------------------------------------------------- the verdict on one launch

def judge(check, cases, outputs, n):
    """A Finding, or None if everything is right. outputs[case][rank]."""
    truths = [per_rank(check.truth(case)) for case in cases]
    wrong = all_wrong(outputs, truths, check.tolerance)
    if wrong:
        return explain(check, cases, outputs, truths, wrong, n)
    return (changed_inputs(check, cases, outputs, truths) or unequal_bits(check, outputs, n)
            or unmet_demand(check, cases, outputs, n))


def all_wrong(outputs, truths, tolerance):
    """{(case, rank): labels of what is wrong}, of those with anything wrong. outputs, truths: [case][rank]"""
    found = {(i, rank): wrong_labels(got, truths[i][rank], tolerance)
             for i, ranks in enumerate(outputs) for rank, got in enumerate(ranks)}
    return {where: labels for where, labels in found.items() if labels}


def as_given(case, got):
    """The outputs in the form in which the chapter thinks of them: as its cases are."""
    return got[0] if isinstance(case, dict) else got


def holds(predicate, case, got):
    """Whether a chapter's predicate is true. It is not if the outputs are so strange that it can't be asked."""
    try:
        return bool(predicate(case, as_given(case, got)))
    except Exception:      # outputs are data of an unknown author
        return False


def say(sentence, case, n, got):
    """The text of a sentence, which may be a function of the case, or of (case, got)."""
    if callable(sentence):
        needed = [p for p in inspect.signature(sentence).parameters.values() if p.default is p.empty]
        sentence = sentence(case, as_given(case, got)) if len(needed) > 1 else sentence(case)
    return sentence.replace("{ranks}", str(n))


def explain(check, cases, outputs, truths, wrong, n):
    """The first signature that explains all that is wrong, else what can be said without knowing the mistake."""
    touched = sorted({i for i, _ in wrong})
    details = [] if check.unsaid else [*facts(cases, outputs, truths, wrong, n, check.tolerance)]
    signature, only = recognised(check, cases, outputs, truths, wrong)
    if signature is not None:
        return finding(only + say(signature.sentence, cases[touched[0]], n, outputs[touched[0]]), details)
    signature, part = (None, {}) if check.unsaid else one_of_several(check, cases, outputs, truths)
    if signature is not None:
        (i, _), *_ = part
        details = [*facts(cases, outputs, truths, part, n, check.tolerance), "  and that isn't all that is wrong"]
        return finding(say(signature.sentence, cases[i], n, outputs[i]), details)
    return Finding(check.unsaid or unknown_mistake(outputs, truths, wrong, n), details[1:])


def recognised(check, cases, outputs, truths, wrong):
    """(the first signature that explains all that is wrong, what its sentence must be preceded by), or (None, "")."""
    touched = sorted({i for i, _ in wrong})
    for signature in check.signatures:
        if signature.when is not None:
            found = all(holds(signature.when, cases[i], outputs[i]) for i in touched) and ""
        else:
            found = explained(check, signature, cases, outputs, truths, wrong)
        if found is not False:
            return signature, found
    return None, ""


def explained(check, signature, cases, outputs, truths, wrong):
    """False, or what the sentence must be preceded by: "" or "only grads[2]: "."""
    only, ranks = {}, {}
    for i in sorted({i for i, _ in wrong}):
        theirs = signature.outputs(cases[i])
        if theirs is None:
            return False
        for rank, hypothesis in enumerate(per_rank(theirs)):
            labels = wrong.get((i, rank), [])
            expected, found = all_leaves(hypothesis), all_leaves(outputs[i][rank], truths[i][rank])
            if any(label.partition("[")[0] not in hypothesis        # it says nothing of what is missing
                   or not same(found.get(label, MISSING), expected.get(label, MISSING), check.tolerance)
                   for label in labels):
                return False
            right = all_leaves(truths[i][rank])
            elsewhere = [label for label in expected if label not in labels and label in right
                         and not same(expected[label], right[label], check.tolerance)]
            if labels:
                only.update(dict.fromkeys(labels))
                ranks[rank] = None
            if elsewhere:
                only[None] = None
                ranks.setdefault(None, None)
    if None not in only:
        return ""
    names = [label for label in only if label is not None]
    if set(names) == {label for i, _ in wrong for right in truths[i] for label in all_leaves(right)}:
        several = len(truths[0]) > 1
        return f"only on rank {', '.join(str(rank) for rank in ranks if rank is not None)}: " if several else ""
    return f"only {', '.join(names[:FEW])}{' …' * (len(names) > FEW)}: "


def one_of_several(check, cases, outputs, truths):
    """(the first signature whose mistake shows wherever it would, {(case, rank): labels}), or (None, {})."""
    for signature in check.signatures:
        places = shows(check, signature, cases, outputs, truths) if signature.outputs else {}
        if places:
            return signature, places
    return None, {}


def shows(check, signature, cases, outputs, truths):
    """{(case, rank): labels} where the mistake would show; {} if it doesn't in one of them, or may by chance."""
    found, telling = {}, False
    for i, case in enumerate(cases):
        theirs = signature.outputs(case)
        for rank, hypothesis in enumerate([] if theirs is None else per_rank(theirs)):
            predicted, right = all_leaves(hypothesis), all_leaves(truths[i][rank])
            got = all_leaves(outputs[i][rank], truths[i][rank])
            labels = [label for label in right if not same(predicted.get(label, right[label]), right[label],
                                                           check.tolerance)]
            if any(not same(got.get(label, MISSING), predicted[label], check.tolerance) for label in labels):
                return {}
            if labels:
                found[i, rank] = labels
                telling = telling or any(tells(predicted[label]) for label in labels)
    return found if telling else {}


def tells(leaf):
    """Whether a leaf holds a number that nobody gets by chance: no whole one, as counts and zeros are."""
    if not is_number(leaf) or np.asarray(leaf).dtype.kind != "f":
        return False
    return bool(np.any(np.isfinite(leaf) & (np.floor(leaf) != leaf)))


def changed_inputs(check, cases, outputs, truths):
    """Inputs come back beside the result (child.plain_drive); nobody has asked for other ones."""
    for i, case in enumerate(cases):
        for rank, inputs in enumerate(per_rank(case)):
            for name, before in inputs.items():
                if name not in outputs[i][rank] or name in truths[i][rank] or name in check.may_change:
                    continue
                if wrong_labels(outputs[i][rank], {name: before}, 0.0):
                    right = "the result is right, but " * bool(truths[i][rank])
                    return Finding(f"{right}the argument {name} isn't what it was before the call: work on a copy", [])
    return None


def unequal_bits(check, outputs, n):
    for i in range(len(outputs)):
        for name in (name for name in check.same_bits if any(name in got for got in outputs[i])):
            first = all_leaves({name: outputs[i][0].get(name)})
            for rank in range(1, n):
                other = all_leaves({name: outputs[i][rank].get(name)})
                for label in first:
                    if not np.array_equal(np.asarray(first[label]), np.asarray(other.get(label)), equal_nan=True):
                        return Finding(f"{label} is right within rounding, but not equal to the last bit on rank 0 "
                                       f"and rank {rank}: the ranks must add in one order", [])
    return None


def unmet_demand(check, cases, outputs, n):
    for demand in check.demands:
        for i, case in enumerate(cases):
            if not holds(demand.holds, case, outputs[i]):
                return finding(say(demand.sentence, case, n, outputs[i]), [])
    return None


# ---------------------------------------------------------------- in general words

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
    """The inputs that fit into a line: numbers and short strings, and shapes."""
    short = [f"{name}={number(value) if isinstance(value, float) else repr(value)}" for name, value in inputs.items()
             if isinstance(value, (bool, int, float, str)) and len(repr(value)) < 30]
    shapes = [f"{name} of shape {list(value.shape)}" for name, value in inputs.items() if isinstance(value, np.ndarray)]
    return ", ".join((short + shapes)[:MANY]) + " …" * (len(short + shapes) > MANY)


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
    return f"{name}{at} is {one}; expected {other}"


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
        return f"{where}{enumerated(nan)} holds nan: an element that was never written, or nothing divided by nothing"
    flat = np.concatenate([np.ravel(g).astype(complex) for g, _ in arrays])
    right = np.concatenate([np.ravel(e).astype(complex) for _, e in arrays])
    ratio = constant_ratio(flat, right)
    if ratio is None or abs(ratio - 1) < 1e-3:
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
