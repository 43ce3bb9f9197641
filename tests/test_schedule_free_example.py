"""examples/schedule_free.py: its table is one of several trainings, alike on any number of ranks."""

from pathlib import Path

import pytest

from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "schedule_free.py"
FLAGS = "--data", "digits", "--hidden", "16"


def test_the_table(tmp_path):
    said = [crews.launch([PROGRAM, *FLAGS, "--lengths", "6,20,60", "--warmup", 4, "--out", tmp_path / str(n)], n,
                         limit=90).check().stdout[0].splitlines() for n in (1, 2)]
    assert said[0][1:-1] == said[1][1:-1]
    assert said[0][1] == "5 trainings of up to 60 steps of 64; rates 0.00390625, and 0.0078125 without a schedule"
    rows = [[float(cell.strip(",")) for cell in line.split()] for line in said[0][5:8]]
    assert [row[0] for row in rows] == [6, 20, 60]
    for column in range(1, 5):      # all of them learn
        assert rows[0][column] > rows[1][column] > rows[2][column]
    assert rows[0][1] != rows[0][2] and rows[2][3] != rows[2][4]
    assert (tmp_path / "2" / "schedule_free.png").stat().st_size > 10_000


@pytest.mark.parametrize("flags, words", [(["--lengths", "0"], "--lengths '0'"), (["--lengths", ","], "--lengths"),
                                          (["--lr", 0], "--lr 0"), (["--free-lr", "nan"], "--free-lr nan"),
                                          (["--warmup", -1], "--warmup -1"), (["--batch-size", 9999], "9999"),
                                          (["--hidden", "8,x"], "--hidden '8,x'"), (["--looks", 0], "--looks 0"),
                                          (["--out", f"{PROGRAM}/x"], "Not a directory")], ids=str)
def test_what_does_not_fit_is_said(flags, words):
    found = crews.launch([PROGRAM, *FLAGS, *flags], 1, limit=30)
    assert found.returncode == 2 and words in found.stderr[0] and not any(found.stdout)
