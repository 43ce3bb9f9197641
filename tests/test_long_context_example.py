"""examples/long_context.py: its table against formulas, one loss, and what doesn't fit."""

import re
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks

PROGRAM = Path(__file__).parents[1] / "examples" / "long_context.py"


def test_it_counts_and_trains():
    said = ranks.launch([PROGRAM, "--lengths", "32,64", "--steps", "3", "--how", "all_to_all"], 2, limit=60).check()
    lines = said.stdout[0].splitlines()
    rows = [list(map(float, re.findall(r"\d+\.?\d*", line))) for line in lines[2:4]]
    for length, (t, whole, ring, *ring_sent, heads, sent, paper) in zip((32, 64), rows, strict=True):
        assert t == length and heads == pytest.approx(whole / 2, abs=0.01) and 0 < ring < heads
        once = 2 * 2 * length // 2 * 64 * 4 / 1e6       # both layers' keys and values of half a sequence, float32
        assert ring_sent == pytest.approx([3 * once] * 2, abs=1e-3)
        assert (sent, paper) == pytest.approx((2 * once, 2 * once), abs=1e-3)
    losses = [line.split() for line in lines[-3:]]
    assert [int(step) for step, *_ in losses] == [0, 1, 2]
    assert all(float(difference) < 1e-10 for *_, difference in losses)
    assert float(losses[2][2]) < float(losses[0][2])


def test_what_does_not_fit_is_said_once():
    found = ranks.launch([PROGRAM, "--lengths", "30"], 2, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("long_context.py: ")]
    words = "2 ranks can't share 30 positions in layout='zigzag', which needs a multiple of 4: pad the sequences to 32"
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
