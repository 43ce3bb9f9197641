"""Errors that a first afternoon meets: each says what is wrong, and what to do."""

from tests.crews import crews

from .test_tensor_misuse import told

CASES = "tests.parallel.told_cases:"


def test_what_a_communication_hook_returns():
    for found in crews.call(CASES + "hooks", 2):
        told(found, {kind: ("TypeError", f"a communication hook has returned a {kind}: it returns a fun", "work.wait")
                     for kind in ("Work", "ndarray", "NoneType")})


def test_sums_of_another_step_are_named():
    for found in crews.call(CASES + "adversaries", 2):
        told({"": found}, {"": ("RuntimeError", "already, of 2.bias, 2.weight, 0.bias, 0.weight, and would",
                                "call zero_grad() of their model before it")})
