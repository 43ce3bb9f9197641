"""examples/pipeline.py against mnist_demo/train.py: one curve, one hash; and what doesn't fit."""

import json
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks
from tests import crews
from tests.crews import threads

ROOT = Path(__file__).parents[1]
PROGRAM, TRAIN = ROOT / "examples" / "pipeline.py", ROOT / "mnist_demo" / "train.py"
SMALL = ["--data", "digits", "--hidden", "24,16", "--dropout", "0.1", "--steps", "12"]


def run(program, n, folder, *flags, by=crews.launch):
    """(loss of every step, summary)"""
    by([program, *SMALL, *flags, "--out", folder], n, limit=60, env=threads(n)).check()
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line["loss"] for line in history], json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(TRAIN, 1, tmp_path_factory.mktemp("whole"), "--exact")


@pytest.mark.parametrize("n, flags", [(2, []), (4, ["--stages", "2", "--schedule", "gpipe"]),
                                      (2, ["--schedule", "interleaved"]),
                                      (2, ["--schedule", "v-min"]),
                                      (4, ["--stages", "2", "--schedule", "zb-h1", "--zero", "3"])], ids=str)
def test_exact_runs_have_the_hash_of_one_process(whole, tmp_path, n, flags):
    losses, summary = run(PROGRAM, n, tmp_path, "--exact", *flags)
    assert losses == whole[0] and summary["parameters_sha256"] == whole[1]["parameters_sha256"]
    assert summary["test_accuracy"] == whole[1]["test_accuracy"]


def test_a_stage_without_parameters(tmp_path):
    """Five layers on five ranks: two of them have an activation alone."""
    losses, summary = run(PROGRAM, 5, tmp_path, "--dropout", "0", "--micro-batches", "3", by=ranks.launch)
    assert summary["mesh"] == {"dp": 1, "pp": 5} and losses[-1] < losses[0]


@pytest.mark.parametrize("n, flags, words", [
    (2, ["--stages", "3"], "--stages 3: must divide the number of ranks, which is 2"), (1, ["--lr", "nan"], "--lr nan"),
    (2, ["--exact", "--micro-batches", "4"], "has 8 over all"), (1, ["--hidden", "12,x"], "--hidden '12,x'"),
    (1, ["--stages", "0"], "--stages 0: must be at least 1"),
    (2, ["--schedule", "interleaved", "--micro-batches", "3"], "2 ranks must divide the 3 micro-batches"),
    (2, ["--schedule", "interleaved", "--chunks", "9"], "layers can't be cut into 18 stages, 9 on each of 2"),
    (2, ["--schedule", "zb-v", "--hidden", "32", "--dropout", "0"],
     "--hidden 32: 3 layers can't be cut into 4 stages")], ids=str)
def test_what_does_not_fit_is_said_once(tmp_path, n, flags, words):
    found = crews.launch([PROGRAM, *SMALL, *flags, "--out", tmp_path / "run"], n, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("pipeline.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not (tmp_path / "run" / "summary.json").exists()
