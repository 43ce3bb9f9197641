"""What a learner is told of outputs that are nothing like what was asked for."""

import numpy as np
import pytest

from exercises.frame import launch, wording
from exercises.frame.checking import check_answer
from exercises.frame.course import Course

from .test_judging import said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    failure = launch.read_source(tmp_path)[-1]
    assert failure.kind == "no answer" and "can't be read: Is a directory" in failure.message


@pytest.mark.parametrize("z, text", [
    (lambda x, rank: None, "z is None; expected a list of 2: is there a return?"),
    (lambda x, rank: 3, "z is 3; expected a list of 2"),
    (lambda x, rank: [2 * x], "z[1] is missing"),
    (lambda x, rank: [2 * x, 2 * x, 0], "z[2] is there, and nobody expected it"),
    (lambda x, rank: [2 * x, [[1], {"a": 2}]], "z[1] is an object of type list; expected an array of shape [3]"),
    (lambda x, rank: {1: x}, "z is a dict of 1; expected a list of 2"),
    (lambda x, rank: np.zeros((10 ** 9, 0)), "z is an array of shape [1000000000, 0]; expected a list of 2"),
    (lambda x, rank: [2 * x, np.array(["a"] * 3)], "z[1] is an array of shape [3]"),
    (lambda x, rank: [2 * x, np.nan * x], "z[1] holds nan"),
    (lambda x, rank: [3 * x, np.nan * x], "0 of 2: z[1] holds nan"),
    (lambda x, rank: [3 * x, x * (np.nan if x[0] > 1 else 5)], "z[0][2] is 9; expected 6"),
])
def test_what_is_said_where_a_list_was_expected(z, text):
    """Where the shape of the tree is wrong, the place is named where it goes wrong; nan where there is one."""
    assert text in said(lambda x: 2 * x, z).split("\n")[0], said(lambda x: 2 * x, z)


@pytest.mark.parametrize("got, expected, text", [
    (82141249536, 8.41545e10, "the result is 8.21412e+10; expected 8.41545e+10"),       # both in one notation
    (np.int64(3), np.float64(2.5), "the result is 3; expected 2.5"),
    (7, 12345678, "the result is 7; expected 12345678"),
    (1.5, {"a": 1, "b": 2}, "the result is 1.5; expected a dict of 'a', 'b'"),
    (np.array([np.inf, np.nan, 2.0]), np.array([np.inf, np.nan, 3.0]), "the result[2] is 2; expected 3"),
    (1.5, dict.fromkeys("abcdefg"), "the result is 1.5; expected a dict of 7")], ids=str)
def test_a_difference_in_words(got, expected, text):
    assert wording.difference("result", got, expected) == text


def test_the_inputs_of_a_case_are_named_or_left_out_visibly():
    assert wording.brief({f"n{i}": i for i in range(8)}) == ", ".join(f"n{i}={i}" for i in range(8))
    assert wording.brief({f"n{i}": i for i in range(20)}).endswith("n11=11 …")


def test_an_exception_outside_of_the_answer_shows_how_it_was_called(tmp_path):
    course = Course()
    path = tmp_path / "linear.py"
    text = (course.solutions / "05_layers_and_optimizers" / "linear.py").read_text()
    path.write_text("\ufeff" + text.replace("return dy @ self.weight, ", "return "), encoding="utf-8")
    verdict = check_answer(course, course.exercise("05.1"), path)
    assert verdict.message == "ValueError: not enough values to unpack (expected 3, got 2)"
    assert verdict.details[0].startswith("    not in your file, but where the check uses it: ")
    assert "layer.backward(" in verdict.details[0]


def test_of_several_functions_the_one_that_is_not_there_is_named(tmp_path):
    course = Course()
    path = tmp_path / "packing.py"
    text = (course.solutions / "24_post_training" / "packing.py").read_text(encoding="utf-8")
    path.write_text(text.replace("def visible(", "def visibly("), encoding="utf-8")
    verdict = check_answer(course, course.exercise("24.1"), path)
    assert (verdict.kind, verdict.message) == ("error", "there is no visible in the file: keep the name 'visible'")
