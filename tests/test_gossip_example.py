"""examples/gossip.py: its table's gaps, messages and bytes are what closed forms say, and all ways learn."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from examples import gossip
from minitorch_dist.flat import BLOCK, round_up
from minitorch_dist.viz.figure import drawn
from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "gossip.py"
SIZE = 784 * 24 + 24 + 24 * 10 + 10


@pytest.mark.thorough
def test_the_table(tmp_path):
    n, steps, picture = 4, 60, tmp_path / "runs" / "consensus.png"
    flags = "--steps", steps, "--hidden", 24, "--every", 7, "--split", "label", "--show", "--out", picture.parent
    lines = crews.launch([PROGRAM, *flags], n, limit=60).check().stdout[0].splitlines()
    assert lines[0] == "complete graph of 4 ranks; spectral gap 1" and "    x1 ← 0.5 x0 + 0.5 x1" in lines
    assert lines.pop() == f"loss and consensus: {picture}" and picture.stat().st_size > 10_000
    rows = {line[:22].strip(): [float(cell.replace(",", "")) for cell in line[22:].replace(" -", " 0").split()]
            for line in lines[-7:]}
    whole = 2 * (n - 1) / n * 4 * round_up(SIZE + 4, BLOCK)     # the all-reduce of a bucket
    assert list(rows) == ["data parallel", "complete", "one-peer", "exponential", "ring", "one-peer, overlapped",
                          "one-peer, H=7"]
    for name, gap, messages in [("complete", 1, 3), ("one-peer", 1, 1), ("exponential", 2 / 3, 2), ("ring", 2 / 3, 2),
                                ("one-peer, overlapped", 1, 1), ("one-peer, H=7", 1, 8 / 60)]:
        assert rows[name][:3] == pytest.approx([gap, messages * steps, messages * steps * SIZE * 4 / 1e6], abs=0.006)
    assert rows["data parallel"][:4] == pytest.approx([0, steps, steps * whole / 1e6, 0], abs=0.006)
    far = {name: row[3] for name, row in rows.items()}
    assert far["complete"] < 1e-4 < far["ring"] < far["one-peer, H=7"]
    assert rows["complete"][4:] == pytest.approx(rows["data parallel"][4:], abs=0.6)        # of float32
    assert all(right > 50 for *_, right, _ in rows.values()), rows


@pytest.mark.parametrize("consensus, panels", [([0.0, 1e-7], 1), ([0.0, 0.3], 2)], ids=["agree", "apart"])
def test_no_panel_is_empty(monkeypatch, tmp_path, consensus, panels):
    """One rank always agrees with itself."""
    found, figures = {"ring": gossip.Result(0, 0, 0, 0, 0, 0, [(1, 2.0, consensus[0]), (2, 1.0, consensus[1])])}, []

    @contextmanager
    def seen(path, size):
        with drawn(path, size) as figure:
            yield figure
            figures.append([len(axes.lines) for axes in figure.axes])
    monkeypatch.setattr(gossip, "drawn", seen)
    gossip.picture(found, tmp_path / "consensus.png")
    assert figures == [[1] * panels] and (tmp_path / "consensus.png").stat().st_size > 5_000


@pytest.mark.parametrize("flags, words", [
    (["--every", "0"], "--every 0"), (["--batch-size", "1438"], "a rank has 1437 samples only"),
    (["--lr", "-1"], "--lr -1")], ids=str)
def test_what_does_not_fit_is_said_once(flags, words):
    found = crews.launch([PROGRAM, "--steps", 1, *flags], 1, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("gossip.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not any(found.stdout)        # before anything is trained
