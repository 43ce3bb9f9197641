"""examples/quantize.py: its table."""

import re
import runpy
from pathlib import Path

import pytest

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "quantize.py"))


def test_the_table(capsys):
    assert PROGRAM["main"](["--epochs", "5", "--hidden", "32,16", "--lr", "0.02"]) == 0
    rows = dict(re.findall(r"^(\w.*?)  +(\d+\.\d\d %  .*)$", capsys.readouterr().out, re.M))
    assert len(rows) == 2 + len(PROGRAM["PLAIN"])
    percent = {what: float(row.split()[0]) for what, row in rows.items()}
    share = {what: float(row.split()[-1]) for what, row in rows.items()}
    full = percent["float32"]
    assert full > 70 and share["float32"] == 1
    for what in ("weight-only, 8 bits", "dynamic, 8 bits", "integers alone, 8 bits"):
        assert abs(percent[what] - full) < 1.5 and 0.25 < share[what] < 0.26
    aware = "the same, trained on with the rounding"
    assert percent[aware] > percent["integers alone, weights of 2 bits"] + 5
    assert share[aware] == share["integers alone, weights of 2 bits"] < 0.08


@pytest.mark.parametrize("flags, words", [(["--lr", "0"], "--lr 0.0: must be more than 0"),
                                          (["--data", "mnist", "--data-dir", "/nowhere"], "/nowhere")])
def test_what_does_not_fit(flags, words, capsys):
    with pytest.raises(SystemExit) as error:
        PROGRAM["main"](flags)
    assert error.value.code == 2 and words in capsys.readouterr().err
