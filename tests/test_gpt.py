"""examples/gpt.py as users start it: sums that it has never seen, one curve on two ranks, a text, signals."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from minitorch_dist import nn, training
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.testing import ranks
from tests import crews, here
from tests.crews import threads

ROOT = Path(__file__).parents[1]
GPT, TRAIN = ROOT / "examples" / "gpt.py", ROOT / "mnist_demo" / "train.py"
MLP = ["--data", "digits", "--hidden", "16", "--epochs", "100000", "--batch-size", "16"]
TINY = ["--layers", "1", "--dim", "16", "--heads", "2", "--batch-size", "12", "--steps", "6", "--eval-every", "3",
        "--warmup", "2"]
LEARNS = ["--steps", "500", "--batch-size", "128", "--eval-every", "500"]     # about 15 s of one quiet core
TEXT = "Der Mond ist aufgegangen, die goldnen Sternlein prangen am Himmel hell und klar; ünd €.\n" * 9


def read(folder):
    """(summary, history) of a run's folder."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), [json.loads(line) for line in lines]


def train(tmp_path, n, *flags, limit=60, env=None, by=crews.launch):
    """A run that must end well: (summary, history, rank 0's stdout, folder)."""
    out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    run = by([GPT, *flags, "--out", out], n=n, limit=limit, env=env).check()
    assert not any(text.strip() for text in run.stdout[1:]), "only rank 0 speaks"
    return *read(out), run.stdout[0], out


@pytest.mark.thorough
def test_it_learns_to_add(tmp_path):
    summary, history, said, out = train(tmp_path, 1, *LEARNS, limit=300)
    assert summary["unseen_sums_right"] >= 95, said
    assert history[0]["loss"] > 2 > 0.2 > summary["validation_loss"] > 0
    assert f"{summary['unseen_sums_right']:.1f} % of the sums" in said
    assert len(re.findall(r"^\d\d\+\d\d=\d{3}", said, re.M)) == 8
    assert {p.name for p in out.iterdir()} == {"history.jsonl", "summary.json", "parameters.npz", "curve.png"}
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    with np.load(out / "parameters.npz") as state:      # what it says it has saved can be loaded, and adds
        model = nn.GPT(12, summary["length"], summary["layers"], summary["heads"], summary["dim"])
        model.load_state_dict(dict(state))
    a, b = np.random.default_rng(0).integers(0, 100, (2, 400))
    question = np.array([["+0123456789=".index(c) for c in f"{x:02}+{y:02}="] for x, y in zip(a, b, strict=True)])
    digits = model.generate(question, 3, temperature=0)[:, 6:] - 1          # the last digit comes first
    assert (digits @ [1, 10, 100] == a + b).mean() >= 0.95


def test_one_curve_on_one_and_two_ranks(tmp_path):
    flags = [*TINY, "--dropout", "0.1", "--attention-dropout", "0.2", "--kv-heads", "1", "--family", "llama"]
    (alone, first, _, out), (together, second, _, _) = (train(tmp_path, n, *flags) for n in (1, 2))
    assert together["ranks"] == 2 and max(abs(a["loss"] - b["loss"]) for a, b in zip(first, second, strict=True)) < 1e-5
    assert abs(alone["validation_loss"] - together["validation_loss"]) < 1e-5
    with np.load(out / "parameters.npz") as state:
        nn.GPT(12, 8, 1, 2, 16, 1, tied=False, hidden=48, **FAMILIES["llama"]).load_state_dict(dict(state))
    exact = {n: train(tmp_path, n, *flags, "--exact", env=threads(n)) for n in (1, 2, 4)}
    assert len({run[0]["parameters_sha256"] for run in exact.values()}) == 1
    for run in exact.values():
        assert run[0]["validation"] == exact[1][0]["validation"] and run[1] == exact[1][1]
    assert train(tmp_path, 1, *flags, "--exact", "--seed", "1")[0]["parameters_sha256"] \
        != exact[1][0]["parameters_sha256"]


@pytest.mark.parametrize("name", ["normuon", "dion", "dion2"])
def test_one_curve_of_an_optimizer_of_matrices(tmp_path, name):
    """Dion's gradients aren't summed, but in exact mode."""
    flags = [*TINY, "--optimizer", name]
    (_, first, _, _), (_, second, _, _) = (train(tmp_path, n, *flags) for n in (1, 2))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(first, second, strict=True)) < 1e-5 < 0.1 < \
        abs(first[-1]["loss"] - first[0]["loss"])
    (alone, *_), (together, *_) = (train(tmp_path, n, *flags, "--exact") for n in (1, 2))
    assert alone["parameters_sha256"] == together["parameters_sha256"]


def test_a_z_loss_is_added(tmp_path):
    """To the first loss, where all 12 characters are about as likely: log² of their number."""
    flags = [*TINY, "--steps", "2", "--warmup", "1", "--skip-spikes"]
    plain, added = (train(tmp_path, 1, *flags, "--z-loss", weight)[1][0]["loss"] for weight in ("0", "0.5"))
    assert plain == pytest.approx(np.log(12), rel=0.05) and added == pytest.approx(plain + np.log(12)**2 / 2, rel=0.05)


def test_scores_are_clipped_and_told(tmp_path):
    """In exact mode alike on two ranks; compiled, too; and not where a step is left out."""
    flags = [*TINY, "--exact", "--qk-clip", "0.001"]
    (alone, first, _, _), (together, second, _, _) = (train(tmp_path, n, *flags, env=threads(n)) for n in (1, 2))
    assert first == second and alone["parameters_sha256"] == together["parameters_sha256"]
    assert all(0.001 < line["greatest_score"] < 0.5 and 1 <= line["heads_clipped"] <= 2 for line in first)
    told, free, _, _ = train(tmp_path, 1, *TINY, "--exact", "--qk-clip", "1e9", env=threads(1))
    assert told["parameters_sha256"] == train(tmp_path, 1, *TINY, "--exact")[0]["parameters_sha256"]
    assert free[0]["greatest_score"] == first[0]["greatest_score"] and not any(line["heads_clipped"] for line in free)
    assert told["parameters_sha256"] != alone["parameters_sha256"]
    compiled = train(tmp_path, 1, *TINY, "--compile", "--qk-clip", "0.001")[1]
    np.testing.assert_allclose([line["greatest_score"] for line in compiled],
                               [line["greatest_score"] for line in first], rtol=1e-4)
    spiky, lines, _, _ = train(tmp_path, 1, *TINY, "--steps", "80", "--qk-clip", "0.001", "--skip-spikes", "0.01")
    without = [line["step"] for line in lines if "greatest_score" not in line]
    assert without == spiky["left_out"] and 1 < len(without) < 20
    clip = mock.Mock()      # of a step that is left out the scores are forgotten
    assert runpy.run_path(str(GPT))["clipped"](clip, "a spike") == {} and clip.mock_calls == [mock.call.forget()]


@pytest.mark.parametrize("n", [1, 2])
def test_a_text(tmp_path, n):
    (tmp_path / "moon.txt").write_text(TEXT, encoding="utf-8")
    summary, history, said, _ = train(tmp_path, n, "--text", tmp_path / "moon.txt", *TINY, "--length", "20",
                                      "--sample", "50", "--steps", "60", by=ranks.launch)
    assert summary["data"] == "moon.txt" and len(history) == 60 and "characters/s" in said
    vocabulary = len(set(TEXT))
    assert f"{vocabulary} characters" in said and f"{round(0.9 * len(TEXT)) - 20:,} samples" in said
    assert abs(history[0]["loss"] - np.log(vocabulary)) < 0.2 and summary["validation_loss"] < 3.2
    assert [step for step, _ in summary["validation"]] == list(range(3, 61, 3))
    written = said[said.rindex("characters/s"):].split("\n", 1)[1].rsplit("validation loss", 1)[0]
    assert len(written) >= 50 and set(written) <= set(TEXT)


def test_documents_packed(tmp_path):
    """Lines, which fit into rows as the program says; one hash on any ranks."""
    text = "".join("abcdefghijklmnop"[:3 + i * 7 % 11] + "\n" for i in range(100))
    (tmp_path / "lines.txt").write_text(text)
    flags = ["--text", tmp_path / "lines.txt", "--pack", "\n", *TINY, "--length", "20", "--exact"]
    runs = [train(tmp_path, n, *flags, "--sample", "5", env=threads(n)) for n in (1, 2)]
    for summary, history, said, _ in runs:
        assert re.search(r"packed: \d+ rows of 20, \d+\.\d % padding; 0 of 90 documents cut \(0\.0 %\)\n"
                         r"one after another: \d+ rows of 20, \d\.\d % padding; [1-9]\d of 90 documents cut", said)
        assert (summary["parameters_sha256"], history) == (runs[0][0]["parameters_sha256"], runs[0][1])
    assert abs(runs[0][1][0]["loss"] - np.log(len(set(text)))) < 0.2
    for more in (["--pack"], ["--text", tmp_path / "lines.txt", "--pack", ""]):
        refused = here.run(GPT, *more, *TINY, "--out", tmp_path / "refused")
        assert refused.status == 2 and "--pack wants a --text" in refused.stderr
    refused = here.run(GPT, *flags, "--window", "2x4", "--out", tmp_path / "refused")
    assert refused.status == 2 and "--pack --window 2x4: blocks that are chosen would be of several" in refused.stderr


def test_several_tokens_are_predicted(tmp_path):
    """At first each with log(classes) nats: of packed lines, whose last characters predict fewer. What is written, and
    the validation, are of the next one alone."""
    text = "".join("abcdefghijklmnop"[:3 + i * 7 % 11] + "\n" for i in range(100))
    (tmp_path / "lines.txt").write_text(text)
    flags = ["--text", tmp_path / "lines.txt", "--pack", "\n", *TINY, "--length", "20", "--family", "deepseek",
             "--sample", "5", "--predict"]
    run = here.run(GPT, *flags, "3", "--out", tmp_path / "run")
    assert run.status == 0, run.stderr
    summary, history = read(tmp_path / "run")
    lines = [line for line in text[:int(0.9 * len(text))].split("\n") if line]
    further = sum(max(0, len(line) - k) for line in lines for k in (1, 2)) / sum(map(len, lines))
    assert history[0]["loss"] == pytest.approx((1 + 0.3 / 2 * further) * np.log(len(set(text))), rel=0.05)
    assert summary["validation_loss"] < np.log(len(set(text))) + 0.2
    with np.load(tmp_path / "run" / "parameters.npz") as state:
        plain = {name.removeprefix("model."): values for name, values in state.items() if name.startswith("model.")}
        assert {name.split(".")[1] for name in state if not name.startswith("model.")} == {"0", "1"}
    nn.GPT(len(set(text)), 20, 1, 2, 16, tied=False, hidden=48, **FAMILIES["deepseek"]).load_state_dict(plain)
    for task, length, predict in ((flags[:4], 20, "21"), ([], 8, "9")):       # a sum has 8, whatever the length
        refused = here.run(GPT, *task, *TINY, "--length", "20", "--predict", predict, "--out", tmp_path / "refused")
        assert refused.status == 2 and f"--predict {predict}: a sample has {length} char" in refused.stderr


def test_some_of_the_packed_rows_stand_for_all(tmp_path):
    """Rows stand with the longest documents first: a validation of few rows takes some of each kind."""
    (tmp_path / "lines.txt").write_text(("abcdefgh" * 5 + "\n" + "ab\n" * 20) * 50)
    program = runpy.run_path(str(GPT))
    flags = ["--text", str(tmp_path / "lines.txt"), "--pack", "\n", "--length", "20", "--eval-windows"]
    some, every = (program["PackedTask"](program["parse"]([*flags, n])).validation for n in ("6", "1000"))
    assert len(some[0]) == len(some[1]) == 6 < len(every[0])
    share = [(rows[..., 1].max(1) > 0).mean() for rows, _ in (some, every)]       # rows of several documents
    assert 0.2 < share[1] < 0.9 and abs(share[0] - share[1]) < 0.2


@pytest.mark.parametrize(("content", "words"), [(None, "missing.txt"), (b"caf\xe9 au lait" * 90, "not UTF-8"),
                                                (b"short", "no window")])
def test_a_text_that_cannot_be_learned(tmp_path, content, words):
    path = tmp_path / "missing.txt"
    if content is not None:
        path.write_bytes(content)
    run = here.run(GPT, "--text", path, *TINY, "--out", tmp_path / "run")
    assert run.status == 2 and words in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--batch-size", "0"], ["--dim", "-4"], ["--eval-every", "0"],
                                   ["--temperature", "-1"], ["--temperature", "1e-300"], ["--top-p", "0"],
                                   ["--top-k", "0"], ["--lr", "nan"], ["--device", "cuda:99"], ["--length", "7"],
                                   ["--window", "4,,all"], ["--window", "0"], ["--sample", "9"], ["--top-k", "3"],
                                   ["--temperature", "0"], ["--eval-windows", "7"]], ids=" ".join)
def test_a_command_line_that_does_not_fit(tmp_path, flags):
    run = here.run(GPT, *flags, "--out", tmp_path / "run")
    assert run.status == 2 and flags[0].strip("-") in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- Ctrl-C, SIGTERM

ENDLESS = {
    "gpt": [GPT, "--layers", "1", "--dim", "16", "--heads", "2", "--steps", "1000000", "--batch-size", "16"],
    "mnist": [TRAIN, *MLP],
    "pipeline": [ROOT / "examples" / "pipeline.py", *MLP],
    "sharded": [ROOT / "examples" / "fully_sharded.py", *MLP],
    "mesh": [ROOT / "examples" / "mesh.py", "--layers", "1", "--dim", "16", "--heads", "2", "--steps", "1000000",
             "--batch-size", "16"],
}


SLOW_PICTURE = """
import os, signal, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import gpt
gpt.comm.world()        # here, so that the guard sees the status on every version of Python
draw, step = gpt.viz.learning_curve, gpt.training.train_step
gpt.viz.learning_curve = lambda *args: (time.sleep(1.5), draw(*args))
def signalled(*args, **options):
    if options["step"] == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args, **options)
gpt.training.train_step = signalled
sys.exit(gpt.main(sys.argv[2:]))
"""


def test_no_rank_ends_while_rank_0_draws(tmp_path):
    run = ranks.launch(["-c", SLOW_PICTURE, *ENDLESS["gpt"], "--out", tmp_path / "run"], n=2)
    assert run.returncode == 143 and "".join(run.stderr) == "", run.report()
    assert (tmp_path / "run" / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(("program", "n", "number", "status"), [
    *((program, n, *one) for program in ("gpt", "mnist") for n in (1, 2)
      for one in ((signal.SIGINT, 130), (signal.SIGTERM, 143))),
    ("pipeline", 2, signal.SIGINT, 130), ("sharded", 2, signal.SIGTERM, 143),
    ("mesh", 2, signal.SIGINT, 130)], ids=str)
def test_a_signal_saves_what_there_is(tmp_path, program, n, number, status):
    """A signal to the program, or to mpirun, which is what a terminal's Ctrl-C and a batch system reach."""
    if n > 1 and len(ranks.mpirun_command()) > 1:
        pytest.skip("Open MPI's mpirun hands no signal on: it kills its ranks within half a second")
    out = tmp_path / "run"
    mpirun = [] if n == 1 else [shutil.which("mpirun") or Path(sys.executable).with_name("mpirun"), "-n", str(n)]
    process = subprocess.Popen([*mpirun, sys.executable, *ENDLESS[program], "--out", out], text=True, cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        limit = time.monotonic() + 60
        history = out / "history.jsonl"
        while not (history.exists() and history.stat().st_size) and time.monotonic() < limit:
            time.sleep(0.05)
        assert history.exists() and process.poll() is None
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    summary, lines = read(out)
    assert summary["interrupted"] is True and summary["exit_status"] == status and summary["ranks"] == n
    assert summary["steps"] == len(lines) == lines[-1]["step"] > 0
    with np.load(out / "parameters.npz") as state:
        model = nn.GPT(12, 8, 1, 2, 16) if program in ("gpt", "mesh") else nn.mlp((16,))
        model.load_state_dict(dict(state))
        assert training.parameters_sha256(model) == summary["parameters_sha256"]
