"""The demo's train.py as users start it: its files, its errors, its accuracy, its exact mode."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from minitorch_dist import comm
from minitorch_dist.testing import ranks
from mnist_demo import train as program
from tests import crews
from tests.crews import threads

TRAIN = Path(__file__).parents[1] / "mnist_demo" / "train.py"
SMALL = ["--data", "digits", "--hidden", "33,17", "--batch-size", "13"]     # 1,437 = 110 · 13 + 7: uneven
FIELDS = {      # what a summary must hold, and of which kind
    "ranks": int, "data": str, "test_accuracy": float, "parameters_sha256": str, "samples_per_second": float,
    "bytes_sent_per_rank": int, "peak_memory_bytes": int, "products_made_by": str,
}
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def start(n, *flags, by=crews.launch, limit=120, **options):
    """Of most runs the beginning is the longest: `by` ranks that are there already, or by mpirun (ranks.launch)."""
    return by([TRAIN, *flags], n=n, limit=limit, **options)


def read(folder):
    """(summary, history) of a run's folder."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), [json.loads(line) for line in lines]


def train(tmp_path, n, *flags, limit=120, **options):
    """A run that must end well; (summary, history, rank 0's stdout)."""
    out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    run = start(n, *flags, "--out", out, limit=limit, **options).check()
    assert not any(text.strip() for text in run.stdout[1:]), "only rank 0 speaks"
    return *read(out), run.stdout[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_writes_its_files(tmp_path, n):
    summary, history, said = train(tmp_path, n, *SMALL, "--epochs", "2", "--steps", "115", by=ranks.launch)
    assert {name: type(summary[name]) for name in FIELDS} == FIELDS
    assert summary["ranks"] == n and summary["data"] == "digits" and summary["steps"] == 115
    assert 0 <= summary["test_accuracy"] <= 100 and summary["samples_per_second"] > 0
    assert len(summary["parameters_sha256"]) == 64 and int(summary["parameters_sha256"], 16) >= 0
    assert 10e6 < summary["peak_memory_bytes"] < 10e9
    assert [set(line) for line in history] == [{"step", "epoch", "loss", "samples"}] * 115
    assert [line["step"] for line in history] == list(range(1, 116))
    assert [line["epoch"] for line in history] == [0] * 111 + [1] * 4
    assert [line["samples"] for line in history] == [*range(13, 111 * 13, 13), *range(1437, 1437 + 4 * 13 + 1, 13)]
    assert history[-1]["loss"] == summary["final_loss"] < history[0]["loss"]
    # 784·33 + 33 + 33·17 + 17 + 17·10 + 10 parameters, padded to 16 each and to 4,096 in all, travel in every step.
    gradients = 115 * 4 * 28_672
    assert 2 * (n - 1) / n * gradients <= summary["bytes_sent_per_rank"] < 2 * (n - 1) / n * gradients + 10_000
    assert "digits" in said.lower() or "handwrit" in said.lower()
    assert f"{summary['test_accuracy']:.2f} %" in said and "parameters" in said


def test_two_ranks_draw_the_curve_of_one(tmp_path):
    flags = [*SMALL, "--steps", "112", "--dropout", "0.2", "--clip", "1", "--dtype", "float64", "--optimizer", "adamw"]
    (_, alone, _), (_, together, _) = train(tmp_path, 1, *flags), train(tmp_path, 2, *flags, "--bucket-mb", "0.01")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(alone, together, strict=True)) < 1e-10


OWN_REDUCER = """
import numpy as np

def to_and_fro(wire, x, combine):
    if wire.rank == 0:
        wire.send(x, 1)
        wire.recv(x, 1)
    else:
        theirs = np.empty_like(x)
        wire.recv(theirs, 0)
        combine(theirs, x, out=x)
        wire.send(x, 0)
"""


def test_who_reduces_is_a_choice_that_keeps_the_curve(tmp_path):
    (tmp_path / "own.py").write_text(OWN_REDUCER)
    flags = [*SMALL, "--steps", "20", "--dtype", "float64"]
    _, alone, _ = train(tmp_path, 1, *flags)
    for name, slot in (("ring", "ring"), ("mpi", "mpi"), ("to_and_fro", f"{tmp_path}/own.py:to_and_fro")):
        summary, history, _ = train(tmp_path, 2, *flags, "--comm", slot)
        assert summary["comm"] == name
        assert max(abs(a["loss"] - b["loss"]) for a, b in zip(alone, history, strict=True)) < 1e-10


@pytest.mark.parametrize("n", [1, 2])
def test_the_pieces_of_the_course_train_as_the_library_does(tmp_path, n):
    flags = [*SMALL, "--steps", "114", "--mine", "--dropout", "0.2", "--weight-decay", "0.1", "--optimizer", "adamw",
             "--bucket-mb", "0.000001"]
    summary, history, said = train(tmp_path, n, *flags, variables={"MINITORCH_MINE": str(tmp_path / "none")})
    library, theirs = read(tmp_path / "run-0" / "library")
    assert summary["comm"] != library["comm"] and summary["parameters_sha256"] != library["parameters_sha256"]
    assert summary["dtype"] == library["dtype"] == "float64" and len(history) == 114
    assert 0 < max(abs(a["loss"] - b["loss"]) for a, b in zip(history, theirs, strict=True)) < 1e-9
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert [line.split()[:3] for line in said.splitlines()[1:7]] == [
        ["optimizer", "05.4", "ours"], ["loss", "05.2", "ours"], ["collective", "10.3", "ours"],
        ["gradient_sync", "08.3", "ours"], ["sampler", "08.1", "ours"], ["all", "together", "15.1"]]
    assert "WITHIN TOLERANCE" in said and "parameters at the end" in said
    assert (tmp_path / "run-0" / "curves.png").stat().st_size > 10_000


def test_a_wrong_piece_of_the_course_shows(tmp_path):
    """An answer counts as passed if progress.json says so of the very file."""
    folder = tmp_path / "mine" / "05_layers_and_optimizers"
    folder.mkdir(parents=True)
    wrong = TRAIN.parents[1] / "solutions" / folder.name / "wrong" / "adam_no_correction.py"
    digest = hashlib.sha256(wrong.read_bytes()).hexdigest()
    shutil.copyfile(wrong, folder / "adam.py")
    (folder.parent / "progress.json").write_text(json.dumps({"05.4": {"passed": "2026-01-01", "sha256": digest}}))
    run = start(2, *SMALL, "--steps", "5", "--mine", "--out", tmp_path / "run",
                variables={"MINITORCH_MINE": str(folder.parent)})
    assert run.returncode == 1, run.report()
    assert "optimizer      05.4  yours" in run.stdout[0]
    assert "DIFFERENT from step 2" in run.stdout[0] and "BEYOND" in run.stdout[0]


def test_a_trace_shows_what_every_rank_did(tmp_path):
    flags = [*SMALL, "--steps", "9", "--bucket-mb", "0.000001"]
    plain, _, _ = train(tmp_path, 2, *flags)
    summary, history, said = train(tmp_path, 2, *flags, "--trace", "2")
    assert summary["parameters_sha256"] == plain["parameters_sha256"] and len(history) == 9
    out = tmp_path / "run-1"
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        slices = [e["name"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e["pid"] == rank
                  and e["ph"] == "X" and e["name"] != "wait"]
        assert slices == ["forward", "backward", "optimizer"] * 2
    assert (out / "timeline.png").stat().st_size > 10_000
    assert "trace.json" in said and "hidden" in said and not (tmp_path / "run-0" / "trace.json").exists()


def test_exact_runs_have_one_hash(tmp_path):
    flags = [*SMALL, "--steps", "112", "--dropout", "0.2", "--exact"]   # the last batch has 7 rows
    digests = {n: train(tmp_path, n, *flags, env=threads(n))[0]["parameters_sha256"] for n in (1, 2, 4)}
    digests["4 on 2 nodes"] = train(tmp_path, 4, *flags, "--bucket-mb", "0.01",
                                    env={"MINITORCH_NODES": "2"})[0]["parameters_sha256"]
    assert len(set(digests.values())) == 1, digests
    assert train(tmp_path, 1, *flags, "--seed", "1")[0]["parameters_sha256"] != digests[1]


def test_the_shipped_digits_are_learned(tmp_path):
    summary, history, _ = train(tmp_path, 1, "--data", "digits")
    assert summary["test_accuracy"] >= 88
    assert summary["epochs"] == 20 and summary["batch_size"] == 64 and summary["hidden"] == [512, 512]
    assert summary["optimizer"] == "sgd" and summary["schedule"] == "cosine" and summary["dtype"] == "float32"
    losses = [line["loss"] for line in history]
    assert losses[0] > 1.5 and sum(losses[-20:]) / 20 < 0.1


def has_mnist():
    folder = os.environ.get("MINITORCH_DATA")
    return bool(folder) and all((Path(folder) / name).exists() or (Path(folder) / f"{name}.gz").exists()
                                for name in MNIST_FILES)


def need_mnist():
    if not has_mnist():
        pytest.skip("MINITORCH_DATA names no folder with MNIST's four files")


def test_mnist_is_learned(tmp_path):
    need_mnist()
    summary, history, said = train(tmp_path, 2, "--data", "mnist", "--steps", "200")
    assert summary["data"] == "mnist" and "60,000" in said and len(history) == 200
    assert summary["test_accuracy"] >= 92


# ---------------------------------------------------------------- the other models

@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_exact_runs_of_other_models_have_one_hash(tmp_path, model):
    """Dropout and augmentation on: random numbers belong to the sample. The last batch has 5 rows for 8
    micro-shards."""
    flags = ["--data", "digits", "--model", model, "--batch-size", "179", "--steps", "9", "--dropout", "0.2",
             "--augment", "2", "--exact"]
    assert 1437 % 179 == 5 and 1437 // 179 == 8
    runs = {n: train(tmp_path, n, *flags, limit=120, env=threads(n)) for n in (1, 2, 4)}
    digests = {n: run[0]["parameters_sha256"] for n, run in runs.items()}
    assert len(set(digests.values())) == 1, digests
    assert all(history == runs[1][1] for _, history, _ in runs.values())
    assert runs[1][0]["test_accuracy"] == runs[4][0]["test_accuracy"]
    changed = [train(tmp_path, 1, *flags[:-1], *more)[0]["parameters_sha256"]
               for more in (["--exact", "--augment", "1"], ["--exact", "--dropout", "0.1"], [])]
    assert len({digests[1], *changed}) == 4


@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_other_models_on_two_ranks(tmp_path, model):
    flags = ["--data", "digits", "--model", model, "--batch-size", "24", "--steps", "8", "--dropout", "0.2",
             "--augment", "2", "--dtype", "float64"]
    (alone, first, _), (_, second, _) = (train(tmp_path, n, *flags) for n in (1, 2))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(first, second, strict=True)) < 1e-9
    assert alone["model"] == model and alone["optimizer"] == "adamw" and alone["warmup"] == 4


@pytest.mark.parametrize(("flags", "least"), [
    (["--model", "cnn", "--epochs", "6"], 90),
    (["--model", "transformer", "--epochs", "6"], 75)], ids=["cnn", "transformer"])
def test_the_digits_are_learned_by_other_models(tmp_path, flags, least):
    summary, history, _ = train(tmp_path, 1, "--data", "digits", *flags, limit=120)
    assert summary["test_accuracy"] >= least
    assert sum(line["loss"] for line in history[-20:]) / 20 < 0.5 < history[0]["loss"]


@pytest.mark.thorough
def test_lenet_learns_mnist(tmp_path):
    need_mnist()
    summary, history, _ = train(tmp_path, 1, "--data", "mnist", "--model", "cnn", "--epochs", "2", limit=400)
    assert len(history) == 2 * 60_000 // 32 and summary["test_accuracy"] >= 98.8


# ---------------------------------------------------------------- settings

def test_zero_is_a_value(tmp_path):
    """A rate of 0 is 0, not the default; clipped to 0, nothing moves either."""
    moved, rate, clipped = (train(tmp_path, 1, *SMALL, "--steps", "3", *flags)
                            for flags in ([], ["--lr", "0"], ["--clip", "0"]))
    assert rate[0]["lr"] == 0.0 and clipped[0]["clip"] == 0.0
    assert rate[0]["parameters_sha256"] == clipped[0]["parameters_sha256"] != moved[0]["parameters_sha256"]


def test_epochs_that_no_step_is_left_for_are_not_reported(tmp_path):
    summary, history, said = train(tmp_path, 1, *SMALL, "--steps", "3", "--epochs", "5")
    assert summary["steps"] == len(history) == 3 and summary["epochs"] == 1 and said.count("epoch ") == 1


# What is wrong: (flags, words of the message). OWN and EMPTY stand for a file of functions and an empty folder.
UNFIT = [
    ("--steps 0", "--steps 0: must be at least 1"), ("--epochs 0", "--epochs 0: must be at least 1"),
    ("--epochs -1", "--epochs -1"), ("--epochs 0.5", "invalid int value"), ("--accumulate 0", "--accumulate 0"),
    ("--accumulate 100000000000000000000 --batch-size 7", "no more pieces than samples; take 7 or fewer"),
    ("--accumulate 2 --exact", "raise --micro-shards"), ("--batch-size 0", "--batch-size 0: must be at least 1"),
    ("--batch-size -1", "--batch-size -1"), ("--hidden 12,x", "--hidden '12,x'"), ("--hidden 0", "--hidden '0'"),
    ("--micro-shards 0", "--micro-shards 0"), ("--micro-shards 3 --exact", "power of two; got 3"),
    ("--bucket-mb 0", "--bucket-mb 0.0: must be more than 0"), ("--bucket-mb -1", "--bucket-mb -1.0"),
    ("--bucket-mb nan", "--bucket-mb nan"), ("--lr nan", "--lr nan: must be at least 0, and finite"),
    ("--lr -0.1", "--lr -0.1"), ("--lr inf", "--lr inf"), ("--weight-decay nan", "--weight-decay nan"),
    ("--clip -1", "--clip -1.0"), ("--warmup -1", "--warmup -1"),
    ("--warmup 8 --steps 8", "--warmup 8: the run has 8 steps"), ("--seed -1", "--seed -1: must be at least 0"),
    ("--dropout 1.5", "--dropout 1.5: must be a probability"), ("--dropout 1", "--dropout 1.0"),
    ("--dropout -0.1", "--dropout -0.1"), ("--trace -1", "--trace -1"), ("--augment -1", "--augment -1"),
    ("--augment 28", "reach 28 for images of 28 pixels"), ("--data letters", "invalid choice: 'letters'"),
    ("--data mnist --data-dir EMPTY", "train-images-idx3-ubyte"), ("--data-dir nowhere", "nowhere"),
    ("--data digits --data-dir EMPTY", "names a folder"), ("--optimizer lion", "invalid choice: 'lion'"),
    ("--device gpu", "device gpu"), ("--device cuda:99", "device cuda:99"), ("--mine --exact", "without --exact"),
    ("--mine --comm ring", "without --exact, --comm"), ("--mine --device cuda", "and --device"),
    ("--comm nonsense", "one of auto, mpi, shared, ring, recursive_doubling, halving_doubling, tree"),
    ("--comm nowhere.py:f", "there is no file"), ("--comm OWN:missing", "has no function missing; it has fine, one"),
    ("--comm OWN:number", "number is 3"), ("--comm OWN:one", "one(wire, x, combine)"),
    ("--pieces rows", "--pieces rows: is for --model transformer alone, and would change nothing: leave it out"),
    ("--model cnn --hidden 9", "--hidden 9: is for --model mlp alone"),
    ("--comm BROKEN:fine", "NameError in line 2: name 'oops'"), ("--comm UNREADABLE:fine", "SyntaxError"),
]
OWN_FILES = {"OWN": "number = 3\ndef fine(wire, x, combine):\n    pass\ndef one(x):\n    pass\n",
             "BROKEN": "import numpy\noops\n", "UNREADABLE": "def fine(:\n"}


@pytest.fixture
def earlier_run(tmp_path):
    """A folder with an earlier run's files, as (folder, contents)."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("history.jsonl", "summary.json", "parameters.npz", "trace.json", "timeline.png"):
        (out / name).write_text(f"{name} of an earlier run")
    return out, contents(out)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def filled(flags, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, text in OWN_FILES.items():
        (tmp_path / f"{name.lower()}_file.py").write_text(text)
        flags = flags.replace(name, f"{tmp_path}/{name.lower()}_file.py")
    return flags.replace("EMPTY", f"{tmp_path}/empty").split()


@pytest.mark.parametrize(("flags", "words"), UNFIT, ids=[flags for flags, _ in UNFIT])
def test_what_does_not_fit_is_said_and_harms_nothing(tmp_path, earlier_run, capsys, monkeypatch, flags, words):
    out, before = earlier_run
    monkeypatch.delenv("MINITORCH_DATA", raising=False)
    flags = filled(flags, tmp_path)
    with pytest.raises(SystemExit) as ended:
        program.main([*(() if "--data" in flags or "--data-dir" in flags else ("--data", "digits")), *flags,
                      "--out", str(out)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said and sum(line.startswith("train.py: ") for line in said.splitlines()) == 1
    assert contents(out) == before and comm.world().algorithm == "auto"


def test_damaged_notes_of_the_course(tmp_path, earlier_run, capsys, monkeypatch):
    out, before = earlier_run
    (tmp_path / "progress.json").write_text("{half")
    monkeypatch.setenv("MINITORCH_MINE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        program.main([*SMALL, "--mine", "--out", str(out)])
    assert ended.value.code == 2 and contents(out) == before
    assert f"train.py: {tmp_path}/progress.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "words"), [
    ("--lr nan", "--lr nan"), ("--comm nonsense", "one of auto, mpi"), ("--comm BROKEN:fine", "NameError in line 2"),
    ("--batch-size 1", "batch_size=1"), ("--device cuda", "device cuda"), ("--micro-shards 1 --exact", "not on 2")])
def test_what_does_not_fit_is_said_once_by_two_ranks(tmp_path, earlier_run, flags, words):
    out, before = earlier_run
    run = start(2, "--data", "digits", *filled(flags, tmp_path), "--out", out, limit=30,
                variables={"CUDA_VISIBLE_DEVICES": ""})
    assert not run.timed_out and run.returncode == 2, run.report()
    assert words in run.stderr[0] and run.stderr[0].count("train.py: ") == 1 and "Traceback" not in run.stderr[0]
    assert run.stderr[1] == "" and contents(out) == before


@pytest.mark.parametrize("nodes", ["1", "2", "3"])
def test_ranks_that_share_no_memory_say_it_once_too(tmp_path, nodes):
    run = ranks.launch([TRAIN, *SMALL, "--lr", "nan", "--out", tmp_path / "run"], n=3, limit=30,
                       env={"MINITORCH_NODES": nodes})
    assert not run.timed_out and run.returncode == 2, run.report()
    assert "--lr nan" in run.stderr[0] and run.stderr[1:] == ["", ""] and "was called" not in run.stderr[0]


@pytest.mark.parametrize("name, value", [("MINITORCH_NODES", "0"), ("MINITORCH_NODES", "²"),
                                         ("MINITORCH_STALL_SECONDS", "soon")])
def test_a_variable_that_can_not_be_is_said_once(name, value):
    run = ranks.launch([TRAIN, *SMALL], n=2, limit=30, env={name: value})
    assert not run.timed_out and run.returncode == 2, run.report()
    assert run.stderr[0].startswith(f"train.py: {name}='{value}' must be a number") and run.stderr[1] == ""
    assert run.stderr[0].count("\n") == 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name, flags", [("file", []), ("file/below", []), ("file" * 100, ["--resume", "auto"])])
def test_a_folder_that_can_not_be_written(tmp_path, n, name, flags):
    (tmp_path / "file").write_text("a file")
    run = start(n, *SMALL, "--steps", "3", "--out", tmp_path / name, *flags, limit=30)
    assert not run.timed_out and run.returncode == 2, run.report()
    assert str(tmp_path / "file") in run.stderr[0] and "Traceback" not in "".join(run.stderr)
    assert run.stderr[1:] == [""] * (n - 1)
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.parametrize(("n", "flags"), [(2, ["--batch-size", "7"]), (1, ["--trace", "5", "--steps", "6"]),
                                          (1, ["--trace", "--steps", "2"]), (1, ["--hidden", ""]),
                                          (1, ["--batch-size", "100000"]), (1, ["--clip", "1e30"])], ids=str)
def test_what_looks_odd_and_fits(tmp_path, n, flags):
    _, history, said = train(tmp_path, n, *SMALL, "--steps", "6", *flags)
    assert all(line["loss"] < 5 for line in history)
    if "--trace" in flags:
        assert ("nothing recorded" in said) == (len(history) == 2)
        assert (tmp_path / "run-0" / "trace.json").exists() == (len(history) == 6)


# ---------------------------------------------------------------- what fails

@pytest.mark.parametrize("n", [1, 2])
def test_mnist_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path, earlier_run, n):
    (tmp_path / "empty").mkdir()
    out, before = earlier_run
    run = start(n, "--data", "mnist", "--out", out, limit=30, variables={"MINITORCH_DATA": str(tmp_path / "empty")})
    assert not run.timed_out and run.returncode == 2
    said = "\n".join(run.stderr)
    assert "MINITORCH_DATA" in said and str(tmp_path / "empty") in said and MNIST_FILES[0] in said
    assert "Traceback" not in said and said.count("train.py: ") == 1 and contents(out) == before


@pytest.mark.parametrize(("flags", "words"), [(["--exact"], "runs on 1, 2, 4 … 8 ranks"),
                                              (["--batch-size", "2"], "a batch_size of at least 3")])
def test_three_ranks_that_do_not_fit(tmp_path, earlier_run, flags, words):
    out, before = earlier_run
    run = start(3, *SMALL, *flags, "--out", out, limit=30)
    assert not run.timed_out and run.returncode == 2 and words in run.stderr[0]
    assert contents(out) == before


RAISES_ON_RANK_1 = """
import runpy, sys
from minitorch_dist import comm, optim
step = optim.SGD.step
def failing_step(self):
    failing_step.calls += 1
    if comm.world().rank == 1 and failing_step.calls == 3:
        raise ArithmeticError("out of luck in step 3")
    step(self)
failing_step.calls = 0
optim.SGD.step = failing_step
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_that_raises_ends_the_job(tmp_path):
    (tmp_path / "program.py").write_text(RAISES_ON_RANK_1)
    run = ranks.launch([tmp_path / "program.py", TRAIN, *SMALL, "--out", tmp_path / "run"], n=2, limit=30)
    assert not run.timed_out and run.seconds < 10 and run.returncode != 0
    assert "ArithmeticError: out of luck in step 3" in run.stderr[1] and "rank 1" in run.stderr[1]
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("check, fault, words", [
    ("--check-work", "miscompute rank=1 step=6", "different gradients of the rows 0 to 6 of step 6:"),
    ("--check-replicas", "flip rank=1 step=5", "have parted, found after step 6:")])
def test_ranks_that_are_wrong_or_slow_are_found(tmp_path, check, fault, words):
    """In the step in which it is asked for: every third."""
    variables = {"MINITORCH_FAULT": f"{fault}; sleep rank=1 seconds=0.1"}
    run = start(2, *SMALL, check, "3", "--stragglers", "2", "--steps", "8", "--out", tmp_path / "run", env=variables,
                by=ranks.launch)
    assert run.returncode and any(words in said and "0.weight', float32[33, 784]" in said for said in run.stderr)
    assert "step 2: median of 2 steps, ms" in run.stdout[0] and "rank 1 is slow: it computes" in run.stdout[0]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_too_few_steps_for_stragglers_are_told(tmp_path):
    *_, said = train(tmp_path, 1, *SMALL, "--steps", "3", "--stragglers", "4")
    assert "--stragglers 4: the run has ended before so many steps" in said


def test_a_signal_during_the_last_evaluation_is_heard(tmp_path, monkeypatch):
    """The run is whole, and its status tells who started it that it was asked to end."""
    accuracy = program.accuracy

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return accuracy(*arguments)
    monkeypatch.setattr(program, "accuracy", signalled)
    assert program.main(["--data", "digits", "--hidden", "8", "--steps", "2", "--out", str(tmp_path)]) == 143
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2 and not summary["interrupted"]
