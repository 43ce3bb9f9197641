"""Pictures of models: what they count, what they refuse, that they are drawn; examples/pictures.py on real runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import viz
from minitorch_dist.viz.curves import Run, read_run

from . import here

ROOT = Path(__file__).parents[1]


def size(path):
    """(width, height) of a PNG, out of its header."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 2000
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_confusion_matrix(tmp_path):
    labels, taken = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 0, 2, 2])
    counts = viz.confusion_matrix(labels, taken, tmp_path / "new" / "c.png", classes=3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 2]] and size(tmp_path / "new" / "c.png")
    assert viz.confusion_matrix([1], [1], tmp_path / "c.png").sum() == 1      # no error at all


@pytest.mark.parametrize("shape", [(6, 1, 5, 5), (16, 6, 5, 5), (40, 3, 3, 3), (2, 100, 1, 1)], ids=str)
def test_filters(tmp_path, shape):
    viz.filters(np.random.default_rng(0).standard_normal(shape), tmp_path / "f.png")
    viz.filters(np.zeros(shape), tmp_path / "f.svg")
    assert size(tmp_path / "f.png") and (tmp_path / "f.svg").read_bytes().startswith(b"<?xml")


def test_attention_maps(tmp_path):
    viz.attention_maps(np.full((3, 4, 4), 0.25), tmp_path / "a.png", "a b\n")
    viz.attention_maps(np.full((1, 16, 16), 1 / 16), tmp_path / "b.png")
    assert size(tmp_path / "a.png")[0] > 2 * size(tmp_path / "b.png")[0]
    named = []
    for sources in (None, "what it reads"[:9], "another text"[:9]):
        viz.attention_maps(np.full((1, 4, 9), 1 / 9), tmp_path / "c.png", "abcdefghi", sources=sources)
        named.append((tmp_path / "c.png").read_bytes())
    assert len(set(named)) == 3


def test_names_of_few_rows_have_room(tmp_path):
    """As of a date of 10 characters, written while 26 are looked at: between two names there is a name's height."""
    viz.attention_maps(np.full((4, 10, 26), 1 / 26), tmp_path / "wide.svg", "2012-09-25", sources="x" * 26)
    drawing = (tmp_path / "wide.svg").read_text()
    at = [float(y) for y in re.findall(r'id="ytick_\d+">.*?<use [^>]*? y="([\d.]+)"', drawing, re.DOTALL)][:10]
    assert len(at) == 10 and min(np.diff(at)) >= 7


def test_text_surprise(tmp_path):
    viz.text_surprise("one line", np.full(8, 0.5), tmp_path / "short.png")
    viz.text_surprise("two\nlines" + "x" * 100, np.linspace(0, 1, 109), tmp_path / "long.png")
    viz.text_surprise("given", [np.nan, np.nan, 0.1, 0.2, 0.3], tmp_path / "given.png")
    short, long = size(tmp_path / "short.png"), size(tmp_path / "long.png")
    assert short[0] < long[0] and short[1] < long[1] and size(tmp_path / "given.png") == short


def test_learning_curve(tmp_path):
    steps, losses = np.arange(1, 901), np.linspace(2, 1, 900)
    for name, validation in (("with", [(300, 1.9), (900, 1.2)]), ("without", None)):
        run = Run("one", steps, losses, {"data": "d", "ranks": 2, "validation": validation})
        viz.learning_curve(run, tmp_path / f"{name}.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_greatest_scores_stand_below_the_loss(tmp_path):
    """Where a history has them, in all steps or some; the threshold where it is near."""
    losses, scores = np.linspace(2, 1, 500), np.geomspace(0.1, 30, 500)
    lines = [{"step": i + 1, "loss": loss, "greatest_score": score} for i, (loss, score) in enumerate(
        zip(losses.tolist(), scores.tolist(), strict=True))]
    del lines[7]["greatest_score"]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for threshold, told in ((20, True), (1e9, False)):
        (tmp_path / "summary.json").write_text(json.dumps({"qk_clip": threshold}))
        run = read_run(tmp_path)
        assert np.isnan(run.scores[7]) and (np.delete(run.scores, 7) == np.delete(scores, 7)).all()
        viz.learning_curve(run, tmp_path / "scores.svg")
        drawing = (tmp_path / "scores.svg").read_text()
        assert ("clipped to 20" in drawing) == told and "of attention" in drawing
    lines = [{"step": i + 1, "loss": 1.0, "greatest_score": float("-inf")} for i in range(3)]     # of no score at all
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).scores is None
    viz.learning_curve(Run("one", run.steps, run.losses, {}), tmp_path / "without.svg")
    assert "of attention" not in (tmp_path / "without.svg").read_text()


def test_a_short_learning_curve_names_each_step_once(tmp_path):
    viz.learning_curve(Run("one", np.arange(1, 4), np.array([3.0, 2.0, 1.0]), {}), tmp_path / "short.svg")
    drawing = (tmp_path / "short.svg").read_text()      # each text stands in a comment of the SVG beside its glyphs
    steps = drawing[drawing.index('id="matplotlib.axis_1"'):drawing.index('id="matplotlib.axis_2"')]
    assert re.findall(r"<!-- (\d+) -->", steps) == ["1", "2", "3"]


@pytest.mark.parametrize(("draw", "words"), [
    (lambda p: viz.filters(np.zeros((3, 4)), p), r"\(3, 4\).*\(out, in, kh, kw\)"),
    (lambda p: viz.attention_maps(np.zeros((3, 4)), p), r"\(3, 4\).*\(heads, time, sources\)"),
    (lambda p: viz.text_surprise("abc", [0.5], p), "3 characters and 1"),
    (lambda p: viz.confusion_matrix([3, -1, 0], [3, 1, 0], p), "labels from -1 to 3, where classes are 0 to 9"),
    (lambda p: viz.confusion_matrix([1, 0], [2, 0], p, classes=2), "predictions from 0 to 2, .* 0 to 1"),
    (lambda p: viz.confusion_matrix([1, 0, 1], [[1], [0], [1]], p), r"\(3,\) labels and \(3, 1\) predictions"),
    (lambda p: viz.text_surprise("", [], p), "0 characters"),
])
def test_what_is_refused(tmp_path, draw, words):
    with pytest.raises(ValueError, match=words):
        draw(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


RUNS = {
    "cnn": ("mnist_demo/train.py", ["--data", "digits", "--model", "cnn", "--steps", "2"],
            {"confusion.png", "curve.png", "filters.png"}),
    "mlp": ("mnist_demo/train.py", ["--data", "digits", "--hidden", "8,9", "--steps", "2", "--dtype", "float64"],
            {"confusion.png", "curve.png"}),
    "transformer": ("mnist_demo/train.py", ["--data", "digits", "--model", "transformer", "--pieces", "rows",
                                            "--steps", "2"],
                    {"attention-0.png", "attention-1.png", "confusion.png", "curve.png"}),
    "pipeline": ("examples/pipeline.py", ["--data", "digits", "--hidden", "8,9", "--steps", "2"],
                 {"confusion.png", "curve.png"}),
    "addition": ("examples/gpt.py", ["--layers", "1", "--dim", "16", "--steps", "2", "--batch-size", "8"],
                 {"attention-0.png", "curve.png", "surprise.png"}),
    "text": ("examples/gpt.py", ["--layers", "1", "--dim", "16", "--steps", "2", "--positions", "rotary",
                                 "--kv-heads", "2", "--norm", "rms", "--length", "12", "--sample", "5",
                                 "--window", "4", "--qk-norm", "--text", ROOT / "LICENSE"],
             {"attention-0.png", "curve.png", "surprise.png"}),
    "llama": ("examples/gpt.py", ["--layers", "1", "--dim", "16", "--steps", "2", "--batch-size", "8", "--family",
                                  "llama", "--hidden", "24", "--predict", "2"],
              {"attention-0.png", "curve.png", "surprise.png"}),
    "deepseek": ("examples/gpt.py", ["--layers", "1", "--dim", "16", "--steps", "2", "--batch-size", "8", "--family",
                                     "deepseek"], {"curve.png", "surprise.png"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_pictures_of_a_run(tmp_path, name):
    program, flags, pictures = RUNS[name]
    assert here.run(ROOT / program, *flags, "--out", tmp_path / "run").status == 0
    for name in ("filters.png", "confusion.png", "surprise.png", "attention-7.png"):
        (tmp_path / "run" / name).write_text("of an earlier run")
    run = here.run(ROOT / "examples" / "pictures.py", tmp_path / "run")
    assert run.status == 0 and not run.stderr
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == pictures
    assert all(size(tmp_path / "run" / picture) for picture in pictures)
    assert len(run.stdout.splitlines()) == len(pictures)


def test_pictures_of_no_run(tmp_path):
    run = subprocess.run([sys.executable, ROOT / "examples" / "pictures.py", tmp_path], capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 2 and f"{tmp_path} is not a finished run" in run.stderr and "Traceback" not in run.stderr
    (tmp_path / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "summary.json").write_text('{"ranks": 1}')
    run = here.run(ROOT / "examples" / "pictures.py", tmp_path)
    assert run.status == 2 and "summary.json has no 'text'" in run.stderr


def test_a_curve_that_the_run_has_drawn_itself_stays(tmp_path):
    flags = "--warm-steps", "1", "--steps", "1", "--questions", "8", "--group", "2"
    assert here.run(ROOT / "examples" / "grpo.py", *flags, "--out", tmp_path).status == 0
    before = (tmp_path / "curve.png").read_bytes()
    run = here.run(ROOT / "examples" / "pictures.py", tmp_path)
    assert run.status == 2 and "is a run of grpo.py" in run.stderr and (tmp_path / "curve.png").read_bytes() == before


def test_pictures_of_a_model_that_the_summary_does_not_tell(tmp_path):
    program, flags, _ = RUNS["llama"]
    assert here.run(ROOT / program, *flags, "--out", tmp_path).status == 0
    summary = tmp_path / "summary.json"
    summary.write_text(summary.read_text().replace('"predict": 2', '"predict": 1'))
    run = here.run(ROOT / "examples" / "pictures.py", tmp_path)
    assert run.status == 2 and "parameters.npz and summary.json are of different models: load_state_" in run.stderr
