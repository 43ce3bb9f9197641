"""The verdict on one launch: outputs against truth, and which known mistake explains all that is wrong with them."""

import inspect
from dataclasses import dataclass

import numpy as np

from .comparing import MISSING, all_leaves, is_number, per_rank, same, wrong_labels
from .wording import FEW, facts, show, unknown_mistake


@dataclass
class Finding:
    """What is wrong: a sentence, and lines under it."""

    sentence: str
    details: list


def finding(text, details):
    """The Finding of a chapter's text: lines behind the first are shown as they are, before the details."""
    sentence, *lines = text.splitlines() or [""]
    return Finding(sentence, lines + details)


def judge(check, cases, outputs, n):
    """A Finding, or None if everything is right. outputs[case][rank]."""
    truths = [per_rank(check.truth(case)) for case in cases]
    wrong = all_wrong(outputs, truths, check.tolerance)
    if wrong:
        return explain(check, cases, outputs, truths, wrong, n)
    return (changed_inputs(check, cases, outputs, truths) or floats_for_integers(check, outputs, truths)
            or unequal_bits(check, outputs, n) or unmet_demand(check, cases, outputs, n))


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


def floats_for_integers(check, outputs, truths):
    for i, ranks in enumerate(truths):
        for rank, truth in enumerate(ranks):
            asked = {name: truth[name] for name in check.integers if name in truth}
            found = all_leaves(outputs[i][rank], asked)
            for label, expected in all_leaves(asked).items():
                if is_number(expected) and kind(expected) in "iu" and kind(found[label]) not in "iu":
                    return Finding(f"{label.replace('result', 'the result', 1)} is right, but {show(found[label])} of "
                                   f"type {np.asarray(found[label]).dtype}, where an integer was asked for: range(), "
                                   "indices and lengths take nothing else. //, round() and math.ceil() give one, / and "
                                   "np.ceil() don't", [])
    return None


def kind(leaf):
    return np.asarray(leaf).dtype.kind


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
