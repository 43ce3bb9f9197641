"""examples/long_context.py: its table against formulas, one loss, and what doesn't fit."""

import re
from pathlib import Path

import pytest

from tests.crews import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "long_context.py"


def run(*flags, ranks=2):
    """[(exit status, stdout, stderr)] of the program on some ranks."""
    return crews.call("tests.parallel.context_model_cases:program", ranks, args=(str(PROGRAM), *flags), limit=60)


def test_it_counts_and_trains(tmp_path):
    (tmp_path / "text").write_text("abcdefg " * 200)
    found = run("--lengths", "32,64", "--steps", "3", "--how", "all_to_all", "--text", str(tmp_path / "text"))
    assert [(status, err) for status, _, err in found] == [(0, "")] * 2 and not found[1][1], found
    lines = found[0][1].splitlines()
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


@pytest.mark.parametrize("window, left", [("linear", 1), ("delta", 16 * 16)])
def test_states_are_sent_whatever_the_length(tmp_path, window, left):
    """Of two pieces of each of 4 heads, in both layers, to the other rank and back; with what is left of one before."""
    (tmp_path / "text").write_text("abcdefg " * 200)
    found = run("--lengths", "32,96", "--steps", "2", "--window", window, "--text", str(tmp_path / "text"))
    assert [(status, err) for status, _, err in found] == [(0, "")] * 2, found
    lines = found[0][1].splitlines()
    for line in lines[2:4]:
        *_, ring, counted, paper, heads, counted_too, paper_too = map(float, re.findall(r"\d+\.?\d*", line))
        assert {counted, paper, counted_too, paper_too} == {round(2 * 2 * 2 * 4 * (16 * 16 + left) * 4 / 1e6, 3)}
        assert ring == heads
    assert all(float(line.split()[3]) < 1e-10 for line in lines[-2:])


def test_chosen_blocks(tmp_path):
    """By heads alone: what is kept grows with the length, not with its square."""
    (tmp_path / "text").write_text("abcdefg " * 200)
    flags = "--lengths", "64,128,256", "--steps", "2", "--window", "3x8", "--text", str(tmp_path / "text")
    found = run(*flags, "--how", "all_to_all")
    assert [(status, err) for status, _, err in found] == [(0, "")] * 2 and "ring" not in found[0][1], found
    lines = found[0][1].splitlines()
    rows = [list(map(float, re.findall(r"\d+\.?\d*", line))) for line in lines[2:5]]
    for t, whole, heads, sent, paper in rows:
        assert heads == pytest.approx(whole / 2, rel=0.02)
        assert sent == paper == pytest.approx(4 * t * 64 * 4 / 1e6, abs=1e-3)
    assert rows[2][1] < 2.05 * rows[1][1] < 4.2 * rows[0][1]
    assert all(float(line.split()[3]) < 1e-10 for line in lines[-2:])
    found = run(*flags)
    said = "long_context.py: --how ring --window 3x8: a ring doesn't have all blocks to choose from: --how all_to_all"
    assert [status for status, *_ in found] == [2, 2] and said in found[0][2], found


def test_what_does_not_fit_is_said_once():
    found = run("--lengths", "30")
    said = [line for *_, err in found for line in err.splitlines() if line.startswith("long_context.py: ")]
    words = "2 ranks can't share 30 positions in layout='zigzag', which needs a multiple of 4: pad the sequences to 32"
    assert [status for status, *_ in found] == [2, 2] and len(said) == 1 and words in said[0], found


def test_heads_are_shared_where_there_are_keys(tmp_path):
    """States are those of all heads on each rank, and 3 ranks do; the all-to-all of keys is refused, by name."""
    (tmp_path / "text").write_text("abcdefg " * 200)
    flags = "--lengths", "24", "--steps", "1", "--text", str(tmp_path / "text"), "--window"
    found = run(*flags, "linear,delta", ranks=3)
    assert [(status, err) for status, _, err in found] == [(0, "")] * 3, found
    found = run(*flags, "linear,all", ranks=3)
    said = "long_context.py: all-to-all, which is counted beside the ring: 3 ranks must divide the 4 heads"
    assert [status for status, *_ in found] == [2] * 3 and said in found[0][2], found
