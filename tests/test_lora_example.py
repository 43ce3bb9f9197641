"""examples/lora.py: what its table counts is what formulas say, and what doesn't fit is said first."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from examples import lora
from minitorch_dist import nn, training
from minitorch_dist.flat import BLOCK, round_up
from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "lora.py"
SMALL = {"length": 8, "layers": 1, "heads": 2, "dim": 32, "kv_heads": None, "positions": "learned", "norm": "layer",
         "window": [3, None], "qk_norm": True, "gated": False}
FACTS = SMALL | {"family": "gpt", "hidden": None, "predict": 1}
MATRICES = [(96, 32), (32, 32), (128, 32), (32, 128)]       # (out, in) of a block


@pytest.fixture
def run(tmp_path):
    """The folder of a run of examples/gpt.py."""
    (tmp_path / "gpt").mkdir()
    training.save_parameters(tmp_path / "gpt" / "parameters.npz", nn.GPT(12, **SMALL))
    (tmp_path / "gpt" / "summary.json").write_text(json.dumps({"data": "addition", **FACTS}))
    return tmp_path / "gpt"


def test_the_table(run, tmp_path):
    said = crews.launch([PROGRAM, "--from", run, "--steps", 2, "--ranks", "2,3", "--batch-size", 16, "--base", 3,
                         "--out", tmp_path / "out"], 2, limit=60).check().stdout[0]
    lines = said.splitlines()
    assert lines[0].startswith(f"base 10, of {run}: ")
    rows = {line[:22].strip(): [float(n.replace(",", "")) for n in re.findall(r"[\d,.]+", line[22:])]
            for line in lines[3:-1]}
    assert list(rows) == ["nothing learnt before", "all parameters", "LoRA, r=2", "LoRA, r=3", "QLoRA, r=3"]
    whole = nn.GPT(12, **SMALL)
    size = sum(p.size for p in whole.parameters())
    for name, (trained, sent, sent_paper, held, held_paper, weights, weights_paper, _) in rows.items():
        rank = int(name[-1]) if "LoRA" in name else 0
        n = rank * sum(map(sum, MATRICES)) or size
        assert (trained, sent_paper, held_paper) == (n, 4 * n, 8 * n), name
        assert 4 * n <= sent <= 4 * round_up(n + 40, BLOCK) and 8 * n <= held <= 8 * (round_up(n, BLOCK) + BLOCK), name
        of_matrices = sum(out * inside for out, inside in MATRICES)
        if "QLoRA" in name:
            blocks = of_matrices // 64
            assert weights == 4 * (size - of_matrices + n) + of_matrices // 2 + blocks + 4 * len(MATRICES) * 2
        else:
            assert weights == weights_paper == 4 * (size + (n if rank else 0))
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 10_000
    with np.load(tmp_path / "out" / "QLoRA-3.npz") as adapters:
        assert len(adapters) == 2 * len(MATRICES) and sum(a.size for a in adapters.values()) == rows["QLoRA, r=3"][0]


def test_large_numbers_stay_apart():
    cells = ["2,048,000", "16,416,768 / 16,384,000", "8,597,504 / 8,597,504", "0.0 %"]
    assert lora.row("LoRA, r=1000", cells).split() == "LoRA, r=1000".split() + " ".join(cells).split()


@pytest.mark.parametrize("flags, words", [
    (["--ranks", "4,x"], "--ranks '4,x'"), (["--ranks", "0"], "--ranks 0"), (["--base", "10"], "invalid choice: 10"),
    (["--dropout", "1"], "--dropout 1"), (["--from", "nowhere"], "nowhere/summary.json"),
    (["--batch-size", "1"], "batch_size=1"),
    (["--from", "runs/x", "--pretrain", "7"], "--pretrain 7: is for learning to add first")], ids=str)
def test_what_does_not_fit_is_said_once(flags, words):
    found = crews.launch([PROGRAM, "--steps", 1, *flags], 2, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("lora.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not any(found.stdout)        # before anything is trained


def test_another_run_is_refused(run, tmp_path):
    (run / "summary.json").write_text(json.dumps({"data": "play.txt", **SMALL}))
    found = crews.launch([PROGRAM, "--from", run, "--out", tmp_path / "out"], 1, limit=30)
    assert found.returncode == 2 and "its summary is of 'play.txt'" in found.stderr[0]
    for text, words in (('{"data": "addition", "length": 8}', "its summary has no layers, heads, dim"),
                        ("[]", "summary.json is damaged: 'list'"), ("{", "summary.json is damaged: Expecting")):
        (run / "summary.json").write_text(text)
        found = crews.launch([PROGRAM, "--from", run, "--out", tmp_path / "out"], 1, limit=30)
        assert found.returncode == 2 and words in found.stderr[0] and "Traceback" not in found.stderr[0]


def test_any_run_of_gpt_may_have_learnt_it(tmp_path):
    """It goes on from what that run has reached."""
    flags = ["--steps", 30, "--dim", 16, "--layers", 1, "--family", "llama", "--hidden", 24, "--predict", 2]
    crews.launch([PROGRAM.parent / "gpt.py", *flags, "--out", tmp_path / "gpt"], 1, limit=60).check()
    right = json.loads((tmp_path / "gpt" / "summary.json").read_text())["unseen_sums_right"]
    said = crews.launch([PROGRAM, "--from", tmp_path / "gpt", "--steps", 1, "--ranks", "1", "--batch-size", 8, "--out",
                         tmp_path / "out"], 1, limit=60).check().stdout[0]
    assert right > 0 and said.startswith(f"base 10, of {tmp_path / 'gpt'}: {right:.1f} % of the sums that it has never")
