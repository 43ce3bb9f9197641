"""What is said of outputs that are wrong: signatures, several mistakes at once, unknown ones, bits, demands."""

import numpy as np
import pytest

from exercises.frame import Check, Outputs, child, comparing, demand, gives, judge, when, wording
from exercises.frame.judge import judge as judged


class Doubled(Check):
    """Two ranks; the right outputs are twice the inputs, and one list of two."""

    signatures = [
        gives("nothing was done", lambda case: [{"y": r["x"], "z": [r["x"], r["x"]]} for r in case]),
        gives("tripled by {ranks} ranks", lambda case: [{"y": 3 * r["x"], "z": [3 * r["x"]] * 2} for r in case]),
        when("looks strange", lambda case, got: got[0]["y"].sum() == 7),
    ]
    demands = [demand("too many calls", lambda case, got: len(got[0].calls) < 2)]

    def truth(self, case):
        return [{"y": 2 * r["x"], "z": [2 * r["x"]] * 2} for r in case]


def said(y, z=None, ranks=2, calls=(), check=Doubled):
    """The finding for outputs y(x), z(x, rank)."""
    cases = [[{"x": np.arange(1.0, 4.0) + rank, "k": 7} for rank in range(ranks)] for _ in range(2)]
    z = z or (lambda x, rank: [2 * x, 2 * x])
    outputs = [[Outputs(y=y(r["x"]), z=z(r["x"], rank)) for rank, r in enumerate(case)] for case in cases]
    for got in outputs[0]:
        got.calls = calls
    finding = judged(check(), cases, outputs, ranks)
    return finding and "\n".join([finding.sentence, *finding.details])


def test_a_signature_must_explain_everything_that_is_wrong():
    assert said(lambda x: 2 * x) is None
    assert said(lambda x: x, lambda x, r: [x, x]).startswith("nothing was done\n  rank 0 of 2: y[2] is 3; expected 6")
    assert said(lambda x: 3 * x, lambda x, r: [3 * x, 3 * x]).startswith("tripled by 2 ranks")
    assert said(lambda x: 2 * x, lambda x, r: [2 * x, x]).startswith("only z[1]: nothing was done")
    assert said(lambda x: x, lambda x, r: [x, 3 * x]).startswith("rank 0 of 2: y[2] is 3; expected 6")
    assert said(lambda x: 2 * x if x[0] == 1 else x, lambda x, r: [2 * x] * 2 if r == 0 else [x] * 2).startswith(
        "only on rank 1: nothing was done")
    assert said(lambda x: np.array([3.0, 4.0, 0.0])).startswith("looks strange")
    assert "in case 1 of 2: every rank has k=7" in said(lambda x: x)


class Several(Check):
    """Two outputs, and mistakes that concern one of them each."""

    signatures = [gives("z isn't negative", lambda case: {"y": 2.5 * case["x"], "z": case["x"]}),
                  gives("y is squared", lambda case: {"y": case["x"] ** 2, "z": -case["x"]}),
                  gives("z is doubled", lambda case: {"z": -2.0 * case["x"]})]

    def truth(self, case):
        return {"y": 2.5 * case["x"], "z": -case["x"]}


@pytest.mark.parametrize("y, z, text", [
    (lambda x: x ** 2, lambda x: -x / 3, "y is squared\n  y[2] is 5.76; expected -6\n  in case 1 of 2: x of shape [3]"
                                         "\n  and that isn't all that is wrong"),
    (lambda x: x ** 2, lambda x: -2 * x, "y is squared"),           # both are known: the first one is said
    (lambda x: -x, lambda x: -2 * x, "z is doubled\n  z[2] is 4.8; expected 2.4"),
    (lambda x: x + (x > 5), lambda x: x, "z isn't negative"),
    (lambda x: x ** 2 + (x > 5), lambda x: -x / 3, "y[2] is 5.76; expected -6"),      # not in all that would show it
    (lambda x: x ** 2, lambda x: -2 * np.round(x), "y is squared"),
])
def test_of_several_mistakes_one_that_is_known_is_said(y, z, text):
    cases = [{"x": np.array([0.3, 1.7, first])} for first in (-2.4, 5.5)]
    found = judged(Several(), cases, [[Outputs(y=y(case["x"]), z=z(case["x"]))] for case in cases], 1)
    assert "\n".join([found.sentence, *found.details]).startswith(text)


def test_one_of_several_mistakes_is_not_told_by_whole_numbers():
    cases = [{"x": np.array([1.0, 2.0])}]
    assert judged(Several(), cases, [[Outputs(y=cases[0]["x"] ** 2, z=np.zeros(2))]], 1).sentence == \
        "y[0] is 1; expected 2.5"
    with np.errstate(all="raise"):
        assert not judge.tells(np.array([np.inf, np.nan, -2.0])) and judge.tells(np.array([np.inf, 0.5]))


def test_a_signature_says_nothing_of_an_output_that_it_leaves_out():
    case = {"x": np.array([0.3, 1.7])}
    assert judged(Several(), [case], [[Outputs(z=-case["x"])]], 1).sentence.startswith("y is missing")


class Untouched(Doubled):
    """Its first case has one output, its others have two."""

    def truth(self, case):
        found = super().truth(case)
        return [{"y": rank["y"]} for rank in found] if case[0]["x"][0] == 1 else found


def test_which_leaves_a_mistake_shows_in_is_said_of_the_case_in_which_it_shows():
    cases = [[{"x": np.arange(first, first + 3), "k": 7}] for first in (1.0, 2.0)]
    one, other = (case[0]["x"] for case in cases)
    right, wrong = Outputs(y=2 * other, z=[2 * other, 2 * other]), Outputs(y=other, z=[other, other])
    half = Outputs(y=2 * other, z=[2 * other, other])
    assert judged(Untouched(), cases, [[Outputs(y=2 * one)], [half]], 1).sentence == "only z[1]: nothing was done"
    two, outputs = [case * 2 for case in cases], [[Outputs(y=2 * one)] * 2, [right, wrong]]
    assert judged(Untouched(), two, outputs, 2).sentence == "only on rank 1: nothing was done"


@pytest.mark.parametrize("y, text", [
    (lambda x: 5 * x, "every element of y is 2.500 times what it should be"),
    (lambda x: -2 * x, "every element of y has the wrong sign"),
    (lambda x: 8e-4 * x, "y[2] is 0.0024; expected 6"),
    (lambda x: 0 * x, "every element of y is 0"),
    (lambda x: None, "y is None; expected an array of shape [3]"),
    (lambda x: x[:2], "y has shape [2]; expected [3]"),
    (lambda x: x * np.nan, "y holds nan: an element that was never written"),
    (lambda x: "text", "y is 'text'; expected an array"),
    (lambda x: child.Unknown("Tensor"), "y is an object of type Tensor; expected an array"),
    (lambda x: 2 * x + (x == 3), "rank 0 of 2: y[2] is 7; expected 6"),
    (lambda x: 2 * x + 1e-7, "and not off by 1e-07"),
    (lambda x: x + np.inf, "y[0] is inf"),
    (lambda x: 2j * x, "y["),
    (lambda x: (2 * x).astype("f4") + np.float32(1e-6), "yours has only the digits of float32"),
    (lambda x: np.array(["a", "b", "c"]), "y is an array of shape [3]"),
    (lambda x: [2, [3]], "y is an object of type list; expected an array"),
])
def test_what_is_said_of_an_unknown_mistake(y, text):
    assert text in said(y).split("\n")[0] or text in said(y), said(y)


def test_float64_numbers_that_were_float32_on_the_way():
    thirds = np.arange(1, 4) / 3
    text = "as if it had been one on the way"
    assert text in wording.difference("y", thirds.astype(np.float32).astype(float), thirds)
    assert text not in wording.difference("y", thirds + 1e-8, thirds)
    halves = np.arange(1, 4) / 2        # which float32 has
    assert text not in wording.difference("y", halves + 1e-8, halves)


def test_lists_and_arrays_are_both_right():
    assert said(lambda x: (2 * x).tolist(), lambda x, r: np.array([2 * x, 2 * x])) is None
    assert said(lambda x: (2 * x).astype(np.float32)) is None
    assert "missing" in said(lambda x: 2 * x, lambda x, r: [2 * x])
    assert "nobody expected" in said(lambda x: 2 * x, lambda x, r: [2 * x] * 3)


def test_bits_demands_and_inputs():
    assert "not equal to the last bit on rank 0 and rank 1" in said(
        lambda x: 2 * x, lambda x, r: np.ones(3) * (1 + 1e-14 * r), check=type("C", (Doubled,), {
            "same_bits": ("z",), "truth": lambda self, case: [{"y": 2 * r["x"]} for r in case]}))
    # Some cases have outputs of other names.
    assert said(lambda x: 2 * x, check=type("N", (Doubled,), {"same_bits": ("elsewhere",)})) is None
    assert said(lambda x: 2 * x, calls=[{}, {}]) == "too many calls"

    class Kept(Check):
        def truth(self, case):
            return {"result": 1.0}
    case = {"x": np.zeros(2)}
    changed = Outputs(result=1.0, x=np.ones(2))
    begun = "the argument x isn't what it was"
    assert judged(Kept(), [case], [[changed]], 1).sentence.startswith(f"the result is right, but {begun}")
    unjudged = type("U", (Kept,), {"truth": lambda self, case: {}})()
    assert judged(unjudged, [case], [[changed]], 1).sentence.startswith(begun)
    assert judged(type("K", (Kept,), {"may_change": ("x",)})(), [case], [[changed]], 1) is None


def test_a_sentence_may_ask_what_came_out():
    class Told(Doubled):
        demands = [demand(lambda case, got: f"{len(got)} ranks, the second gave {got[1]['y'][0]:g} for "
                                            f"{case[1]['x'][0]:g}", lambda case, got: False)]
    assert said(lambda x: 2 * x, check=Told) == "2 ranks, the second gave 4 for 2"


@pytest.mark.parametrize("got, told", [
    ([8.0, 1.5], "the result[0] is right, but 8 of type float64"), (np.array([8.0, 1.5]), "the result[0] is right"),
    ([8, 1.5], None), ([np.uint8(8), 1.5], None), ([8, np.float32(1.5)], None), ([9.0, 1.5], "the result[0] is 1.125")],
    ids=str)
def test_a_float_is_told_where_somebody_will_index_with_it(got, told):
    """Of outputs that a check names, and of those leaves alone that the truth has as integers."""
    class Cut(Check):
        integers = ("result",)

        def truth(self, case):
            return {"result": [8, 1.5], "count": 3, "none": None}
    finding = judged(Cut(), [{}], [[Outputs(result=got, count=3.0, none=None)]], 1)
    assert finding is None if told is None else finding.sentence.startswith(told)


def test_integers_are_compared_exactly_and_floats_by_the_largest():
    assert not comparing.same(np.array([2**53 + 1]), np.array([2**53]), 1e-3)
    assert comparing.same(np.array([1e9, 1e-3]), np.array([1e9, 0.0]), 1e-9)
    assert not comparing.same(np.array([1e-9, 2e-9]), np.array([1e-9, 1e-9]), 1e-9)
    assert comparing.same(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 1e-9)
    assert not comparing.same(np.array([0.0, 1.0]), np.array([np.nan, 1.0]), 1e-9)
    assert comparing.same(True, True, 0) and not comparing.same("1", 1, 0)
