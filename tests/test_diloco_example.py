"""examples/diloco.py: its table's messages, bytes and seconds are what closed forms say, and all ways learn."""

from pathlib import Path

import pytest

from minitorch_dist.flat import BLOCK, round_up
from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "diloco.py"
FLAGS = "--steps", 80, "--hidden", 24, "--lr", 0.002, "--every", "4,10", "--fragments", 2, "--overlap", 3
LAYERS = [(784 * 24, 24), (24 * 10, 10)]


def test_the_table(tmp_path):
    n, picture = 2, tmp_path / "runs" / "accuracy.png"
    said = crews.launch([PROGRAM, *FLAGS, "--out", picture.parent], n, limit=60).check().stdout[0]
    lines = said.splitlines()
    rows = {line[:18].strip(): [float(cell.replace(",", "")) for cell in line[18:].split()] for line in lines[3:8]}
    assert list(rows) == ["data parallel", "DiLoCo, H=4", "DiLoCo, H=10", "streaming, H=10", "and in 4 bits"]
    # bytes of a message: of all, with as many numbers behind as parameters or workers, or of a fragment
    whole = 2 * (n - 1) / n * 4 * round_up(sum(map(sum, LAYERS)) + 16, BLOCK)
    parts = [2 * (n - 1) / n * 4 * round_up(sum(layer) + 16, BLOCK) for layer in LAYERS]
    short = [(n - 1) * (-(-m // 2) + 4 + 4 * v + 4) for m, v in LAYERS]
    each = 0.03 + whole / 1.25e6
    for name, messages, sent, waiting in [
            ("data parallel", 80, 80 * whole, 80 * each), ("DiLoCo, H=4", 20, 20 * whole, 20 * each),
            ("DiLoCo, H=10", 8, 8 * whole, 8 * each)]:
        assert rows[name][:4] == pytest.approx([messages, sent / 1e6, 1.6 + waiting, waiting], abs=0.051)
    # fragments leave after step 5 and step 10 of a round, and at the end the first once more
    for name, sizes in (("streaming, H=10", parts), ("and in 4 bits", short)):
        assert rows[name][:2] == pytest.approx([17, (9 * sizes[0] + 8 * sizes[1]) / 1e6], abs=0.006)
    # three steps of 20 ms hide 60 ms of each message, but for those of the end
    for name, (first, second) in (("streaming, H=10", parts), ("and in 4 bits", short)):
        first, second = 0.03 + first / 1.25e6, 0.03 + second / 1.25e6
        hidden = 8 * max(0, first - 0.06) + 7 * max(0, second - 0.06)
        assert rows[name][3] == pytest.approx(hidden + second + first, abs=0.051)
    assert all(row[5] > 70 for row in rows.values())
    assert picture.stat().st_size > 10_000 and said.endswith(f": {picture}\n")


@pytest.mark.parametrize("flags, words", [
    (["--every", "4,x"], "--every '4,x'"), (["--every", "0"], "every=0"), (["--mix", "0"], "--mix 0"),
    (["--overlap", "50", "--every", "9"], "overlap=50"), (["--bandwidth", "0"], "--bandwidth 0")], ids=str)
def test_what_does_not_fit_is_said_once(flags, words):
    found = crews.launch([PROGRAM, "--steps", 1, *flags], 1, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("diloco.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not any(found.stdout)        # before anything is trained
