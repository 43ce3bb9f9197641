"""examples/mup.py: its table, and that both ways begin alike at base."""

import itertools
import math
from pathlib import Path

import pytest

from examples import mup
from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "mup.py"
FLAGS = "--steps", 5


@pytest.mark.parametrize("n, flags", [(1, ("--widths", "8,24", "--lrs", -9, -7)), (2, (
    "--model", "transformer", "--widths", "8,16", "--optimizer", "sgd", "--lrs", -6, -5, "--batch-size", 4))])
def test_the_table(tmp_path, n, flags):
    said = crews.launch([PROGRAM, *FLAGS, *flags, "--out", tmp_path], n, limit=60).check().stdout[0].splitlines()
    head, rows = said[4].split(), [line.split() for line in said[5:5 + (3 if n == 1 else 2)]]
    assert head[1:3] == head[3:5] and head[1] == "8"
    for row in rows:
        assert row[0].startswith("2^-") and row[1] == row[3], said       # at base's width
    assert any(row[2].strip("*") != row[4].strip("*") for row in rows)
    for column in range(1, 5):
        marked = [row[column] for row in rows if row[column].endswith("*")]
        assert len(marked) == 1 and float(marked[0][:-1]) == min(float(row[column].strip("*")) for row in rows)
    assert (tmp_path / "mup.png").stat().st_size > 10_000 and said[-1].endswith("mup.png")


def test_large_losses_stay_in_their_columns():
    args = mup.parse(["--widths", "8,16", "--lrs", "0", "1"])
    losses = dict(zip(itertools.product(args.widths, args.lrs, mup.WAYS), (
        999.9994, 1000, 1e30, math.inf, 2.0, 999.9996, 5e307, 1), strict=True))
    rows = [line.split() for line in mup.table(args, losses).splitlines()[2:]]
    assert rows == [["2^0", "999.999*", "2.000*", "1.0e+03*", "1.0e+03"],
                    ["2^1", "1.0e+30", "5.0e+307", "inf", "1.000*"]]


@pytest.mark.parametrize("flags, words", [(["--lrs", -3, -5], "--lrs -3 -5"), (["--steps", 0], "--steps 0"),
                                          (["--widths", "8,x"], "--widths '8,x'"),
                                          (["--widths", ","], "--widths ',': there must be at least 1"),
                                          (["--lrs", -3, 2000], "-1000 to 1000"), (["--batch-size", 9999], "9999"),
                                          (["--out", f"{PROGRAM}/x"], "Not a directory"),
                                          (["--widths", "6,8", "--model", "transformer"], "heads")], ids=str)
def test_what_does_not_fit_is_said(flags, words):
    found = crews.launch([PROGRAM, *FLAGS, *flags], 1, limit=30)
    assert found.returncode == 2 and words in found.stderr[0] and not any(found.stdout)
