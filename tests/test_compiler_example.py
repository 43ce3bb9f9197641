"""examples/compiler.py, and --compile of the training programs."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.compiler import cc
from minitorch_dist.testing import ranks
from tests.crews import threads

ROOT = Path(__file__).parents[1]
PROGRAM, TRAIN, GPT = ROOT / "examples" / "compiler.py", ROOT / "mnist_demo" / "train.py", ROOT / "examples" / "gpt.py"
SMALL = ["--rows", "70", "--columns", "33"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def said(capsys, *arguments):
    assert runpy.run_path(str(PROGRAM))["main"]([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("emit", ["c", "numpy"])
@pytest.mark.parametrize("function", ["layer_norm", "softmax", "gelu"])
def test_it_shows_each_stage_and_what_it_saves(capsys, function, emit):
    if emit == "c" and cc.compiler() is None:
        pytest.skip("no C compiler")
    out = said(capsys, "--function", function, "--emit", emit)
    for words in ("--- captured", "--- fused", "kernel of 70 rows" if function != "gelu" else "kernel of",
                  "--- fused backward", "void kernel(" if emit == "c" else "NumPy runs", "kernels of forward    1\n"):
        assert words in out, words
    assert float(out.rsplit(maxsplit=1)[-1]) < 1e-4


def test_gradients_of_0_differ_by_nothing(capsys, recwarn):
    for function in ("layer_norm", "softmax"):      # a column alone: x is always 0, or 1
        assert float(said(capsys, "--function", function, "--columns", "1", "--emit", "numpy").split()[-1]) < 1e-4
    assert not recwarn.list


def test_one_stage_alone(capsys):
    out = said(capsys, "--stage", "fused backward", "--emit", "numpy")
    assert out.startswith("backward of compile(layer_norm): 1 kernels") and "---" not in out


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--function", "sinh"]], ids=str)
def test_what_it_can_not_show(capsys, flags):
    with pytest.raises(SystemExit) as end:
        said(capsys, *flags)
    assert end.value.code == 2


def test_compiled_training_draws_the_same_curve(tmp_path):
    """On two ranks the bits of one; and within rounding the curve of the ops one by one."""
    runs = {}
    for name, n, flags in (("ops", 1, []), ("one", 1, ["--compile"]), ("two", 2, ["--compile"])):
        out = tmp_path / name
        ranks.launch([TRAIN, "--data", "digits", "--hidden", "24,16", "--dropout", "0.1", "--steps", "12", "--exact",
                      "--dtype", "float64", "--out", out, *flags], n, limit=90, env=threads(n)).check()
        lines = (out / "history.jsonl").read_text().splitlines()
        runs[name] = [json.loads(line)["loss"] for line in lines], json.loads((out / "summary.json").read_text())
    assert runs["one"][0] == runs["two"][0]
    assert runs["one"][1]["parameters_sha256"] == runs["two"][1]["parameters_sha256"]
    np.testing.assert_allclose(runs["ops"][0], runs["one"][0], rtol=1e-10)
    assert runs["one"][1]["compile"] and not runs["ops"][1]["compile"]


def test_a_compiled_gpt_writes(tmp_path):
    out = tmp_path / "run"
    small = ["--layers", "1", "--dim", "16", "--steps", "6", "--eval-every", "5"]
    ranks.launch([GPT, "--compile", *small, "--out", out], 1, limit=90).check()
    assert json.loads((out / "summary.json").read_text())["compile"] is True
