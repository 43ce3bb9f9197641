"""examples/grpo.py: one curve on any ranks, also of a run that goes on; it learns; what doesn't fit is said."""

import json
import os
import re
import runpy
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import comm, nn, training
from minitorch_dist.data.text import addition
from minitorch_dist.parallel import DistributedDataParallel
from tests import crews, here
from tests.crews import threads

PROGRAM = Path(__file__).parents[1] / "examples" / "grpo.py"
TINY = ["--warm-steps", 20, "--steps", 4, "--questions", 7, "--group", 12, "--updates", 2, "--eval-every", 4,
        "--careless", 0.3, "--temperature", 0.9]        # in exact mode one of the 8 micro-shards has no question


def run(out, n, *flags, limit=60, env=None):
    """(summary, history, rank 0's stdout) of a run that must end well."""
    found = crews.launch([PROGRAM, *flags, "--out", out], n, limit=limit, env=env).check()
    lines = (out / "history.jsonl").read_text().splitlines()
    return json.loads((out / "summary.json").read_text()), [json.loads(line) for line in lines], found.stdout[0]


def test_exact_mode_has_one_curve(tmp_path):
    (one, first, said), *others = (run(tmp_path / str(n), n, *TINY, "--exact", env=threads(n)) for n in (1, 2))
    assert len(first) == 4 and [step for step, *_ in one["curve"]] == [1, 2, 3, 4] and one["ranks"] == 1
    assert [step for step, _ in one["looks"]] == [0, 4] and one["before"] == one["looks"][0][1]
    assert any(0 < reward < 1 for _, reward, _ in one["curve"]) and one["curve"][-1][2] > 0
    assert "of the unseen sums are right" in said
    for summary, history, _ in others:
        for name in ("parameters_sha256", "curve", "looks"):
            assert summary[name] == one[name], name
        assert [line["loss"] for line in history] == [line["loss"] for line in first]
    folder = {p.name for p in (tmp_path / "1").iterdir()}
    assert folder == {"history.jsonl", "summary.json", "parameters.npz", "reference.npz", "curve.png"}
    assert (tmp_path / "1" / "curve.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_pairs_have_one_curve_too(tmp_path):
    flags = [*TINY, "--dpo", "--exact"]
    (one, first, _), (two, second, _) = (run(tmp_path / str(n), n, *flags, env=threads(n)) for n in (1, 2))
    assert one["parameters_sha256"] == two["parameters_sha256"] and one["curve"] == two["curve"]
    losses = [line["loss"] for line in first]
    assert any(losses) and losses == [line["loss"] for line in second]


@pytest.mark.thorough
def test_a_run_goes_on(tmp_path):
    flags = [*TINY, "--exact", "--async-save", "--save-every", 2]
    whole, _, _ = run(tmp_path / "whole", 2, *flags)
    steps = whole["curve"]
    out = tmp_path / "whole"
    newest = max((out / "checkpoints").iterdir(), key=lambda path: path.name)
    assert len(list((out / "checkpoints").iterdir())) == 2
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    again, history, _ = run(out, 1, *flags, "--resume", env=threads(1))
    assert again["resumed_at"] == 2 and again["curve"] == steps and len(history) == 4
    assert again["parameters_sha256"] == whole["parameters_sha256"] and again["looks"] == whole["looks"]


def test_a_signal_in_the_warm_start_ends_it(tmp_path, monkeypatch):
    """In the next step; a next run begins as if there had been none."""
    steps, train_step = [], training.train_step

    def signalled(*args, step, **options):
        steps.append(step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(*args, step=step, **options)
    monkeypatch.setattr(training, "train_step", signalled)
    flags = [*TINY, "--out", tmp_path, "--save-every", 2]
    found = here.run(PROGRAM, *flags)
    assert found.status == 130 and steps == [-20, -19, -18, -17] and "interrupted before it was asked" in found.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"history.jsonl"}
    short = ["--warm-steps", 2, "--steps", 1, "--questions", 2]
    assert here.run(PROGRAM, *flags, *short).status == 0 and steps[4:] == [-2, -1, 0, 1]


def test_a_careless_text_that_is_not_learned_is_told_as_such(tmp_path):
    found = here.run(PROGRAM, "--warm-lr", 1e30, "--warm-steps", 20, "--out", tmp_path)
    assert found.status == 1 and found.stderr.count("\n") == 1
    assert re.match(r"on the careless text, whose steps are numbered up to 0: step -1\d: the loss is nan, at a "
                    r"learning rate of .*: the training has diverged", found.stderr)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_the_coldest_and_the_hottest_answers_can_be_learnt_from(tmp_path, temperature):
    _, history, said = run(tmp_path, 1, "--warm-steps", 2, "--steps", 2, "--questions", 4, "--temperature", temperature)
    assert all(np.isfinite(line["loss"]) for line in history) and "Warning" not in said


@pytest.mark.thorough
def test_it_learns_to_carry(tmp_path):
    summary, _, said = run(tmp_path / "run", 1, limit=300)
    assert summary["before"] < 60 and summary["after"] > summary["before"] + 25, said


@pytest.mark.parametrize("flags, words", [
    (["--group", 1], "--group 1"), (["--temperature", 1e-40], "--temperature 1e-40: must be 1e-30 to 1e+30"),
    (["--temperature", 1e39], "--temperature 1e+39: must be 1e-30 to 1e+30"),
    (["--careless", 1], "--careless 1"), (["--dpo", "--clip-high", 1], "--clip-high 1.0: is for GRPO"),
    (["--questions", 1], "batch_size=1"), (["--steps", 0], "--steps 0")], ids=str)
def test_what_does_not_fit_is_said_once(tmp_path, flags, words):
    found = crews.launch([PROGRAM, *flags, "--out", tmp_path / "run"], 2, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("grpo.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not any(found.stdout)


# ---------------------------------------------------------------- its parts

@pytest.fixture(scope="module")
def parts():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def test_its_legend_lies_on_no_curve(parts, tmp_path, monkeypatch):
    """KL's axes, which are drawn over the others, included."""
    kept, drawn = [], parts.picture.__globals__["drawn"]

    @contextmanager
    def keeping(*args):
        with drawn(*args) as figure:
            yield figure
        kept.append(figure)
    monkeypatch.setitem(parts.picture.__globals__, "drawn", keeping)
    parts.picture({"curve": [(1, 0.1, 2.0), (2, 0.9, 0.1)], "looks": [(0, 40.0), (2, 99.0)]}, tmp_path / "curve.png")
    (legend,), axes = kept[0].legends, kept[0].axes
    assert len(axes) == 2 and [text.get_text()[:6] for text in legend.get_texts()] == ["reward", "unseen"]
    assert all(legend.get_window_extent().y0 > a.get_window_extent().y1 for a in axes)


def test_no_more_questions_are_told_than_there_are(parts, tmp_path):
    args, said, world = parts.parse(["--questions", "100000", "--out", str(tmp_path)]), [], comm.world()
    args.warm_steps, network = 1, lambda: nn.GPT(12, **parts.MODEL)
    parts.begin(args, world, DistributedDataParallel(network(), world), network(), addition(2),
                SimpleNamespace(resume=False), SimpleNamespace(say=said.append), SimpleNamespace(wanted=False))
    assert "8 to each of 9,000 questions a step" in said[-1]


def test_the_careless_text(parts):
    problems = addition(2)
    rows = parts.careless(problems, 0.6, 0)
    forgot = 0
    for row, whole in zip(rows, problems.train, strict=True):
        text = problems.vocabulary.decode(row)
        a, b, written = text[:2], text[3:5], text[6:]
        without = f"{(int(a[1]) + int(b[1])) % 10}{(int(a[0]) + int(b[0])) % 10}0"
        carried = f"{int(a) + int(b):03}"[::-1]
        assert written in (without, carried) and (row[:6] == whole[:6]).all()
        forgot += written != carried
    assert not (rows == problems.train).all() and abs(forgot / len(rows) / 0.6 - 0.6975) < 0.03   # 1 - 0.55²


def test_pairs_are_of_groups_that_have_both(parts):
    answers = SimpleNamespace(rewards=np.array([0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1.0]))
    good, bad = parts.pairs(answers, 3)
    assert good.tolist() == [3, 7] and bad.tolist() == [4, 6]


def test_dpo_weighs_whole_answers(parts):
    model = nn.GPT(12, **parts.MODEL)
    tokens = np.random.default_rng(0).integers(0, 12, (4, 8))
    labels = np.where(np.arange(8) < 5, -100, tokens)
    answers = SimpleNamespace(inputs=tokens, labels=labels, temperature=1.0, rewards=np.array([1, 0, 0, 1]),
                              reference=np.random.default_rng(1).normal(-2, 1, (4, 8)) * (labels >= 0))
    logits = model(tokens).numpy()
    each = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    whole = [sum(each[i, t, labels[i, t]] - answers.reference[i, t] for t in range(5, 8)) for i in range(4)]
    wanted = sum(np.log1p(np.exp(-0.3 * (whole[good] - whole[bad]))) for good, bad in ((0, 1), (3, 2)))
    found = parts.dpo(SimpleNamespace(group=2, beta=0.3))(model, answers).item()
    assert abs(found - wanted) < 1e-4
