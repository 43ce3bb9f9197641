"""What the answers of chapter 0 are tried with. The diagnoses of 00.2 stand nowhere: the bugs are run again."""

import json
from pathlib import Path

import numpy as np

from exercises.frame import Check, gives, when
from exercises.frame.pictures import two_curves

from . import gallery

RUNS = Path(__file__).parents[2] / "runs"

# ---------------------------------------------------------------- 00.1


def demo_runs():
    """The losses of `make demo`'s two runs, or None where it hasn't been run."""
    curves = []
    for name in ("demo-1", "demo-2"):
        path = RUNS / name / "history.jsonl"
        if not path.exists():
            return None
        curves.append(np.array([json.loads(line)["loss"] for line in path.read_text().splitlines()]))
    return curves if len(curves[0]) == len(curves[1]) > 0 else None


def answer(case, distance=None, first=lambda at: at + 1, allowed=lambda tolerance, a, b: tolerance):
    """(largest, first) by a plain loop. distance(a, b), first(index) and allowed(tolerance, a, b) may be those of a
    mistake."""
    largest, step = 0.0, None
    for at, (a, b) in enumerate(zip(case["one"], case["two"], strict=True)):
        d = (distance or apart)(a, b)
        largest = max(largest, d)
        if step is None and d > allowed(case["tolerance"], a, b):
            step = first(at)
    return {"result": [largest, step]}


def apart(a, b):
    if np.isnan(a) and np.isnan(b):
        return 0.0
    return np.inf if np.isnan(a) or np.isnan(b) else abs(b - a)


def nan_ignored(a, b):
    return 0.0 if np.isnan(a) or np.isnan(b) else abs(b - a)


def last_apart(case):
    largest, _ = answer(case)["result"]
    steps = [at + 1 for at, (a, b) in enumerate(zip(case["one"], case["two"], strict=True))
             if apart(a, b) > case["tolerance"]]
    return {"result": [largest, steps[-1] if steps else None]}


def stays_apart(case):
    """From the last step at which they are equal: the one after it."""
    largest, first = answer(case)["result"]
    equal = [0] + [at + 1 for at, (a, b) in enumerate(zip(case["one"], case["two"], strict=True))
                   if apart(a, b) <= case["tolerance"]]
    return {"result": [largest, None if first is None or equal[-1] == len(case["one"]) else equal[-1] + 1]}


def none_for_1(case):
    largest, first = answer(case)["result"]
    return {"result": [largest, None if first == 1 else first]}


def where_largest(case):
    largest, first = answer(case)["result"]
    d = [apart(a, b) for a, b in zip(case["one"], case["two"], strict=True)]
    return {"result": [largest, None if first is None else int(np.argmax(d)) + 1]}


def with_largest(value):
    def outputs(case):
        found = answer(case)["result"]
        finite = ~(np.isnan(case["one"]) | np.isnan(case["two"]))
        return {"result": [float(value((case["two"] - case["one"])[finite])) if finite.all() else found[0], found[1]]}
    return outputs


def another_largest(value):
    """value(distances, index of the first beyond the tolerance or None) instead of the largest."""
    def outputs(case):
        largest, first = answer(case)["result"]
        d = [apart(a, b) for a, b in zip(case["one"], case["two"], strict=True)]
        return {"result": [value(d, None if first is None else first - 1), first]}
    return outputs


def without_none(instead):
    def outputs(case):
        largest, first = answer(case)["result"]
        return {"result": [largest, instead if first is None else first]}
    return outputs


def has_nan(case):
    return bool(np.isnan(case["one"]).any() or np.isnan(case["two"]).any())


def nan_handed_on(case, got):
    """The largest distance came out as NaN, where a curve holds one."""
    return has_nan(case) and bool(np.isnan(got["result"][0]))


def from_zero_beside_nan(case, got):
    """Counted from 0, and NaN handed on as well; of which the count is said first."""
    return nan_handed_on(case, got) or got["result"][1] == answer(case)["result"][1] - 1


class Compare(Check):
    exercise = "00.1"
    signatures = [
        gives("the steps are counted from 0: the first loss is that of step 1",
              lambda case: answer(case, first=lambda at: at)),
        gives("curves that are apart from step 1 on get None: the index of the first is 0, which counts as false. Ask "
              "any() whether they are ever apart",
              none_for_1),
        gives("the distance isn't a size: two may lie below one, so take the absolute value",
              lambda case: answer(case, lambda a, b: np.inf if np.isnan(a) != np.isnan(b) else
                                  0.0 if np.isnan(a) else max(b - a, 0.0))),
        when("the largest distance is NaN where a loss is, and no comparison with NaN is true: ask np.isnan of both "
             "curves. NaN in one of them is infinitely far away, NaN in both is a distance of 0", nan_handed_on),
        when("the steps are counted from 0: the first loss is that of step 1", from_zero_beside_nan),
        gives("a loss that is NaN in one of the runs counts as equal: every comparison with NaN is false, so it must "
              "be asked for with np.isnan", lambda case: answer(case, nan_ignored)),
        gives("NaN in both runs counts as different: the curves are the same there, if of no use",
              lambda case: answer(case, lambda a, b: np.inf if np.isnan(a) or np.isnan(b) else abs(b - a))),
        *[gives("the tolerance grows with the losses (np.isclose adds rtol · |two|, where rtol isn't 0 unless you say "
                "so): it is a distance in itself, the same at every step",
                lambda case, allowed=allowed: answer(case, allowed=allowed))
          for allowed in (lambda tolerance, a, b: tolerance + 1e-5 * abs(b), lambda tolerance, a, b: tolerance * a)],
        gives("that is the step from which on they stay apart; the first beyond the tolerance was asked for, whether "
              "or not they meet again", stays_apart),
        gives("that is the last step at which they are apart; the first was asked for", last_apart),
        gives("that is the step of the largest distance; the first beyond the tolerance was asked for", where_largest),
        gives("that is the mean distance: a curve that leaves at the very end would hardly show",
              with_largest(lambda d: np.abs(d).mean())),
        *[gives("the largest distance is asked for also where it stays within the tolerance: it isn't 0 there",
                another_largest(value))
          for value in (lambda d, at: 0.0 if at is None else max(d), lambda d, at: None if at is None else max(d))],
        *[gives("that is the distance at the first step beyond the tolerance; the largest of all steps was asked for",
                another_largest(value))
          for value in (lambda d, at: max(d) if at is None else d[at], lambda d, at: 0.0 if at is None else d[at])],
        *[gives("that is the distance as a part of the loss; |two - one| was asked for, as it is",
                lambda case, whole=whole: answer(case, lambda a, b: apart(a, b) / (abs(whole(a, b)) if a == a and b == b
                                                                                   else 1)))
          for whole in (lambda a, b: a, lambda a, b: b, max)],
        gives("the other way round: the largest distance comes first, then the step",
              lambda case: {"result": answer(case)["result"][::-1]}),
        *[gives("curves that are never apart have no such step: None", without_none(instead))
          for instead in (1, 0, -1)],
        gives("a distance of exactly the tolerance still counts as equal", lambda case: {"result": [
            answer(case)["result"][0],
            next((at + 1 for at, (a, b) in enumerate(zip(case["one"], case["two"], strict=True))
                  if apart(a, b) >= case["tolerance"]), None)]}),
    ]

    def cases(self, rng, ranks):
        found = []
        for n, leaves in ((40, 13), (31, 31), (7, 1)):
            one = 2 * np.exp(-np.arange(n) / 9) + 0.1 * rng.random(n)
            two = one + 1e-9 * rng.standard_normal(n)
            two[leaves - 1:] -= rng.uniform(0.01, 0.1, n - leaves + 1)
            two[(leaves + n) // 2 - 1] -= 0.1       # the largest distance lies between the first and the last
            found.append({"one": one, "two": two, "tolerance": 1e-4})
        one = np.array([2.0, 1.0, 4.0, 0.5, 0.75, 0.5, 0.75, 0.75, 0.5])
        found.append({"one": one, "tolerance": 0.125,       # exactly so far, then hardly further; and they meet again
                      "two": one + [0.125, 0, 0.125 + 2.0**-16, 0, 0.1875, 0, 0.1875, -0.25, 0.15625]})
        one = np.array([2.0, 1.0, 0.5, 0.25, 0.75])
        found.append({"one": one, "two": one.copy(), "tolerance": 1e-4})
        lost = np.array([2.0, 1.0, np.nan, np.nan, 0.5])
        found.append({"one": one, "two": one + [0, 0.0625, -0.125, 0, 0.0625], "tolerance": 0.125})    # never so far
        found.append({"one": one, "two": lost, "tolerance": 1e-4})
        found.append({"one": lost, "two": np.array([2.0, 1.25, 0.5, np.nan, 0.5]), "tolerance": 1e-4})
        found.append({"one": lost, "two": lost.copy(), "tolerance": 1e-4})
        found.append({"one": lost[2:4], "two": lost[2:4].copy(), "tolerance": 1e-4})
        if (runs := demo_runs()) is not None:
            found.append({"one": runs[0], "two": runs[1], "tolerance": 1e-4})
        return found

    def truth(self, case):
        return answer(case)

    def picture(self, runs, path):
        case, got = runs[1][-1]
        if demo_runs() is None:
            case, got = runs[1][0]
        two_curves({1: case["one"], 2: case["two"]}, path, "loss")
        whose = "of your own `make demo`" if demo_runs() is not None else \
            "made up, one of which leaves at step 13 (after `make demo` this shows your own run)"
        largest, first = got["result"]
        return f"two curves {whose}: max |Δ| = {largest:.2g}, " + ("never apart" if first is None
                                                                  else f"apart from step {first}")


# ---------------------------------------------------------------- 00.2

def said(letter, bug):
    """Is this bug what was said of the letter, and wrong?"""
    def predicate(case, got):
        return got["result"].get(letter) == bug != gallery.which(letter)
    return predicate


def no_such_mistake(case, got):
    return any(name not in gallery.BUGS for name in got["result"].values())


class Diagnose(Check):
    exercise = "00.2"
    unsaid = "return one mistake for each of A, B and C, as a dict: {\"A\": \"…\", \"B\": \"…\", \"C\": \"…\"}"
    signatures = [
        when("each of A, B and C is one of MISTAKES, spelled as there: " + ", ".join(gallery.BUGS), no_such_mistake),
        *[when(f"{letter} isn't “{bug}”. There, {looks}. Look at the step at which {letter} leaves, and at what comes "
               "after", said(letter, bug)) for letter in gallery.LETTERS for bug, looks in gallery.BUGS.items()],
    ]

    def cases(self, rng, ranks):
        return [{}]

    def truth(self, case):
        return {"result": {letter: gallery.which(letter) for letter in gallery.LETTERS}}
