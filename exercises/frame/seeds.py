"""For authors: what a check says over many seeds. docs/authoring.md, "Seeds"."""

import copy
import dataclasses

import numpy as np

from .check import Outputs
from .checking import CLOSED, Verdict, check_answer, checks_of
from .comparing import per_rank
from .judge import all_wrong, judge, recognised
from .launch import launch

AT_ONCE = 25      # seeds in one launch
ALONE = 5         # seeds, each with a launch of its own, of an answer that ends a launch (it raises, hangs, is late)


def check_seeds(course, exercise, path, uses, seeds):
    """{seed: Verdict}: what check_answer says of an answer; many seeds' cases go into one launch where that can be.

    Of an answer that doesn't get as far as wrong outputs only the first seeds are tried.
    """
    first = check_answer(course, exercise, path, uses, seeds[0])
    verdicts = {}
    for at in range(0, len(seeds), AT_ONCE):
        if first.kind in ("wrong", "passed"):
            found = _together(course, exercise, path, uses, seeds[at:at + AT_ONCE])
        else:
            found = None
        if found is None:
            return verdicts | {seed: check_answer(course, exercise, path, uses, seed) for seed in seeds[at:at + ALONE]}
        verdicts |= found
    return verdicts


def _together(course, exercise, path, uses, seeds):
    """{seed: Verdict}, or None if the answer leaves no outputs for some of the cases."""
    folder = course.exercises / exercise.folder
    check, left, verdicts = checks_of(folder)[exercise.id], list(seeds), {}
    for n in exercise.ranks:
        drawn = {seed: check.cases(np.random.default_rng(seed), n) for seed in left}
        everything = [per_rank(case) for cases in drawn.values() for case in cases]
        launched = launch(exercise, path, everything, n, uses, CLOSED, folder / "drive.py", exercise.limit * len(left))
        if launched.failure is not None:
            return None
        outputs = iter(launched.outputs)
        for seed, cases in drawn.items():
            finding = judge(check, cases, [next(outputs) for _ in cases], n)
            if finding is not None:
                verdicts[seed] = Verdict(False, "wrong", finding.sentence, finding.details, seed=seed)
        left = [seed for seed in left if seed not in verdicts]
        if not left:
            break
    return verdicts | {seed: Verdict(True, "passed", "passed", seed=seed) for seed in left}


# ---------------------------------------------------------------- signatures among themselves

def clashes(check, ranks, seeds):
    """[(number of the signature, n, {what speaks: [seeds]})]: mistakes that aren't told the same with every seed.

    An answer that gives just what the signature predicts is judged; what speaks is the number of a signature, "right"
    (the mistake can't be seen) or "nothing". A signature that the drawn cases never apply to isn't listed.
    """
    spoken = {}
    for n in ranks:
        for seed in seeds:
            cases = check.cases(np.random.default_rng(seed), n)
            truths = [per_rank(check.truth(case)) for case in cases]
            once = copy.copy(check)     # what a mistake gives is asked for by all others
            once.signatures = [remembering(signature) for signature in check.signatures]
            for number, signature in enumerate(once.signatures):
                heard = signature.outputs and speaks(once, signature, cases, truths)
                if heard:
                    spoken.setdefault((number, n), {}).setdefault(heard, []).append(seed)
    return [(number, n, heard) for (number, n), heard in spoken.items() if len(heard) > 1]


def remembering(signature):
    """The Signature, with the outputs of every case worked out once. The cases must live as long as it does."""
    known = {}

    def outputs(case):
        if id(case) not in known:
            known[id(case)] = signature.outputs(case)
        return known[id(case)]
    return dataclasses.replace(signature, outputs=outputs) if signature.outputs else signature


def speaks(check, signature, cases, truths):
    """What is said of an answer with the signature's mistake: the number of a signature, "right" or "nothing"."""
    outputs = []
    for case, truth in zip(cases, truths, strict=True):
        theirs = signature.outputs(case) if any(truth) else None
        theirs = truth if theirs is None else per_rank(theirs)
        outputs.append([Outputs({**right, **wrong}) for right, wrong in zip(truth, theirs, strict=True)])
    wrong = all_wrong(outputs, truths, check.tolerance)
    if not wrong:
        return "right"
    found, _ = recognised(check, cases, outputs, truths, wrong)
    return "nothing" if found is None else str(check.signatures.index(found))
