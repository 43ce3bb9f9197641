"""examples/parameter_server.py: sync is DDP, a slow worker holds back whom it should, and all learn."""

import re
import runpy
from pathlib import Path

import pytest

import minitorch_dist as mt
from minitorch_dist.testing import ranks

PROGRAM = Path(__file__).parents[1] / "examples" / "parameter_server.py"


@pytest.mark.thorough
def test_the_table_of_all_modes(tmp_path):
    steps, slow = 120, 3.0
    flags = "--steps", steps, "--batch-size", 16, "--hidden", 32, "--lr", 0.04, "--slow", slow, "--out", tmp_path
    said = ranks.launch([PROGRAM, *flags], 3, limit=60).check().stdout[0]
    rows = {line[:12].strip(): line[12:].split() for line in said.splitlines()[3:8]}
    assert set(rows) == {"DDP", "sync", "async, s=0", "async, s=2", "async"}
    accuracy = {label: float(row[4]) for label, row in rows.items()}
    assert accuracy["sync"] == accuracy["DDP"] and "DDP's to the last bit" in said
    assert min(accuracy.values()) > 82 and max(accuracy.values()) - min(accuracy.values()) < 6
    # updates and gradients per second of virtual time: the fast worker waits for the slow one, or makes 3 of its steps
    assert rows["sync"][:4] == [f"{1 / slow:.2f}", f"{2 / slow:.2f}", "0.00", "0"]
    assert rows["async, s=0"][:4] == [f"{2 / slow:.2f}", f"{2 / slow:.2f}", "0.50", "1"]
    assert float(rows["async, s=2"][1]) == pytest.approx((2 * steps + 2) / (steps * slow), abs=0.01)
    assert float(rows["async"][1]) == pytest.approx(1 + 1 / slow, abs=0.01) and rows["async"][3] == "3"
    assert all(row[5] == row[6] for label, row in rows.items() if label != "DDP")
    assert len(re.findall("^staleness of", said, re.M)) == 3 and (tmp_path / "curves.png").stat().st_size > 10_000


def test_what_does_not_fit_is_said_once():
    found = ranks.launch([PROGRAM, "--servers", 2], 1, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("parameter_server.py: ")]
    assert found.returncode == 2 and len(said) == 1 and "servers=2 of 1 ranks" in said[0], found.report()


def test_a_learning_rate_of_0_is_one():
    program = runpy.run_path(PROGRAM)
    p = mt.tensor([1.0], requires_grad=True)
    assert [program["optimizer"](program["parse"](argv), [p]).lr for argv in (["--lr", "0"], [])] == [0.0, 0.05]
