"""examples/fully_sharded.py against mnist_demo/train.py: one curve, one hash; its table; and what doesn't fit."""

import json
import re
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks
from tests import crews
from tests.crews import threads

ROOT = Path(__file__).parents[1]
PROGRAM, TRAIN = ROOT / "examples" / "fully_sharded.py", ROOT / "mnist_demo" / "train.py"
SMALL = ["--data", "digits", "--hidden", "90,70", "--dropout", "0.1", "--clip", "0.4", "--steps", "8"]


def run(program, n, folder, *flags, by=crews.launch):
    """(loss of every step, summary)"""
    by([program, *SMALL, *flags, "--out", folder], n, limit=60, env=threads(n)).check()
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line["loss"] for line in history], json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(TRAIN, 1, tmp_path_factory.mktemp("whole"), "--exact")


@pytest.mark.parametrize("n, flags", [(2, ["--keep"]), (2, ["--compile"]),
                                      (4, ["--stage", "2", "--replicas", "2"])], ids=str)
def test_exact_runs_have_the_hash_of_one_process(whole, tmp_path, n, flags):
    losses, summary = run(PROGRAM, n, tmp_path, *flags, by=ranks.launch if n == 2 else crews.launch)
    assert losses == whole[0] and summary["parameters_sha256"] == whole[1]["parameters_sha256"]
    assert summary["test_accuracy"] == whole[1]["test_accuracy"]
    head, _, *rows = summary["table"]
    size = sum(a * b + b for a, b in ((784, 90), (90, 70), (70, 10)))
    assert head.startswith(f"{size:,} parameters, Adam") and len(rows) == (9 if n == 4 else 6)
    if n == 4:      # of the two copies: gradients and their state are halves, and a half is summed over both
        assert rows[8].startswith("2, 2 copies")
        numbers = [float(x) for x in re.findall(r"\d+\.\d+", rows.pop())][1:-1:2]
        assert numbers == pytest.approx([x * size / 1e6 for x in (2 * 4 / 2 + 2 * 4 / 2 / 2, 4, 2, 4)], abs=0.006)
        # Pairs keep values: a gather over 4 and one over 2. ZeRO++: in 8 bits, gradients in 4, and scales.
        near, few = (rows.pop(6) for _ in range(2))
        assert near.startswith("3, near 2") and few.startswith("3, ZeRO++")
        for row, value, gradient in (near, 4, 4), (few, 1, 1 / 2):
            counted, paper = map(float, re.findall(r"\d+\.\d+", row)[:2])
            wanted = (value * (3 / 4 + 1 / 2) + gradient * 3 / 4) * size / 1e6
            assert paper == pytest.approx(wanted, abs=0.006)
            assert 0 <= counted - wanted + 0.01 < 3 * n * 4096 * 8e-6 + 0.02 * wanted * (row == few), row
    for stage, row in ((3, rows.pop()), (1, rows.pop())):       # sums of gradients stay float32; pieces are the values
        assert row.startswith(f"{stage}, 16 bits")
        counted = [float(x) for x in re.findall(r"\d+\.\d+", row)][:-1:2]
        wanted = [2 * (3 if stage == 3 else 2) * size * (n - 1) / n, 2 * size * (stage == 1),
                  2 * size * (stage == 1) + 4 * size / n, 12 * size / n]
        assert all(0 <= c - w / 1e6 + 0.01 < 3 * n * 4096 * 12e-6 for c, w in zip(counted, wanted, strict=True)), row
    for stage, row in enumerate(rows):
        numbers = [float(x) for x in re.findall(r"\d+\.\d+", row)]
        counted, paper = numbers[:-1:2], numbers[1:-1:2]
        wanted = [(3 if stage == 3 else 2) * 4 * size * (n - 1) / n, *(kind * size / (n if stage >= cut else 1)
                                                                       for kind, cut in ((4, 3), (4, 2), (8, 1)))]
        assert paper == pytest.approx([w / 1e6 for w in wanted], abs=0.006)
        # padding: of each of three units less than ranks · 4,096 elements, of float32 and of Adam's two
        assert all(0 <= c - p + 0.01 < 3 * n * 4096 * 8e-6 for c, p in zip(counted, paper, strict=True)), row
        assert (numbers[-1] > 0) == (stage == 3)


@pytest.mark.parametrize("flags, words", [
    (["--replicas", "3"], "--replicas 3 must divide the 2 ranks"),
    (["--stage", "2", "--keep"], "--keep --stage 2: parameters are cut in stage 3 only"), (["--lr", "nan"], "--lr nan"),
    (["--stage", "4"], "invalid choice: 4"), (["--batch-size", "0"], "--batch-size 0: must be at least 1")], ids=str)
def test_what_does_not_fit_is_said_once(tmp_path, flags, words):
    found = crews.launch([PROGRAM, *SMALL, *flags, "--out", tmp_path / "run"], 2, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("fully_sharded.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not (tmp_path / "run" / "summary.json").exists()
