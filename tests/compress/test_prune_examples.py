"""The examples of pruning, distillation and soups, made small: what they print, and that it is what the papers say."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name, capsys, *flags):
    """The lines of a program."""
    assert runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]([*map(str, flags)]) == 0
    return capsys.readouterr().out.splitlines()


def percents(line):
    return [float(x) for x in re.findall(r"(\d+\.\d+) %", line)]


def test_a_ticket_beats_its_controls(capsys):
    said = printed("lottery_ticket", capsys, "--hidden", "100,50", "--rounds", 2, "--share", 0.8, "--controls", 1,
                   "--repeats", 1, "--epochs", 8)
    head = next(i for i, line in enumerate(said) if line.startswith("weights kept"))
    dense, middle, last = map(percents, said[head + 1:head + 4])
    assert dense[0] == 100 and middle[0] == 20 and len(middle) == 2 and last[0] == 4 and len(last) == 4
    assert dense[1] > 80 and last[1] > max(last[2:])
    weights = [row for row in said if re.match(r"\d\.weight", row)]
    assert [percents(row) for row in weights] == [[4.0]] * 3 and any("as bitmasks and values" in line for line in said)


@pytest.mark.thorough
def test_a_student_learns_a_digit_that_it_has_never_seen(capsys):
    said = printed("distill", capsys, "--repeats", 1, "--steps", 200, "--teacher-steps", 250)
    rows = [percents(line) for line in said if line.startswith(("labels", "teacher, T"))]
    few, without = rows[:4], rows[4:]
    assert few[2][0] > few[0][0] + 2 and few[3][0] > few[0][0] + 2
    assert without[0][1] == 0 and without[2][1] > 20 and without[2][3] > 50 and without[2][0] > without[0][0]


def test_only_models_from_one_start_can_be_averaged(capsys):
    said = printed("soup", capsys, "--repeats", 1, "--models", 3, "--start", 80, "--steps", 40)
    soups = [percents(line)[0] for line in said if "uniform soup" in line]
    alone = [percents(line)[0] for line in said if "one of them" in line]
    assert soups[0] > alone[0] - 3 and soups[1] < alone[1] - 15
    assert [line.split()[-1] for line in said if re.match(r" +[012] ", line)][0] == "stays"


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("lottery_ticket", ["--share", "1.5"], "share=1.5"), ("distill", ["--few", "9999"], "there are 1,437 images"),
    ("soup", ["--models", "0"], "--models 0: must be at least 1")])
def test_what_does_not_fit_is_said_in_words(name, flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        printed(name, capsys, *flags)
    assert end.value.code == 2 and words in capsys.readouterr().err
