"""Runs that are broken off and go on: the curve that they would have had, on any number of ranks."""

import dataclasses
import json
import os
import runpy
import shutil
import signal
from pathlib import Path

import pytest

from minitorch_dist import comm, data, nn, training
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.testing import ranks
from tests import crews

ROOT = Path(__file__).parents[1]
TRAIN = ["--data", "digits", "--hidden", "16", "--steps", "30", "--augment", "1", "--optimizer", "adamw", "--dropout",
         "0.2"]        # an epoch has 23 steps
PROGRAMS = {    # of 24 steps -> arguments
    "mnist_demo/train.py": ["--data", "digits", "--hidden", "16", "--steps", "24", "--exact"],
    "examples/fully_sharded.py": ["--data", "digits", "--hidden", "16", "--steps", "24", "--clip", "0.5"],
    "examples/pipeline.py": ["--data", "digits", "--hidden", "16,16", "--steps", "24", "--exact", "--dropout", "0.1"],
    "examples/gpt.py": ["--steps", "24", "--layers", "1", "--dim", "16", "--batch-size", "16", "--eval-every", "10",
                        "--exact", "--dropout", "0.1", "--optimizer", "muon"],
}


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(ROOT / "mnist_demo" / "train.py"))["main"]


def end(folder):
    """(digest of the parameters, the history's lines, the summary)."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["parameters_sha256"], (folder / "history.jsonl").read_text().splitlines(), summary


def at_step(step, do):
    """Let runs do something when a step is done."""
    log = training.Run.log

    def logged(self, *args):
        log(self, *args)
        if self.step == step:
            do()
    return logged


@pytest.fixture(scope="module")
def whole(main, tmp_path_factory):
    """A run that nobody breaks off."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*TRAIN, "--out", str(folder)]) == 0
    return end(folder)


class Killed(BaseException):
    """As if the power had gone: nobody catches this."""


@pytest.mark.parametrize("every, killed, at", [(7, 18, 14), (5, 30, 30), (23, 24, 23), (4, 23, 20)])
def test_a_killed_run_goes_on(main, whole, tmp_path, monkeypatch, every, killed, at):
    """From the newest checkpoint: in the middle of an epoch, at its end, and at the run's."""
    def die():
        raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.Run, "log", at_step(killed, die)) if killed < 30 else \
            patch.setattr(training.Run, "finish", lambda *args, **facts: die())
        main([*TRAIN, "--out", str(tmp_path), "--save-every", str(every)])
    assert not (tmp_path / "summary.json").exists()
    assert main([*TRAIN, "--out", str(tmp_path), "--save-every", str(every), "--resume"]) == 0
    digest, history, summary = end(tmp_path)
    assert (digest, history) == whole[:2]
    assert summary["resumed_at"] == at and summary["test_accuracy"] == whole[2]["test_accuracy"]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_writes_a_checkpoint(main, whole, tmp_path, monkeypatch, capsys, number, status):
    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "log", at_step(11, lambda: os.kill(os.getpid(), number)))
        assert main([*TRAIN, "--out", str(tmp_path)]) == status
    said = "interrupted after step 12 of 30: saving what there is; --resume goes on from there"
    assert said in capsys.readouterr().out
    assert main([*TRAIN, "--out", str(tmp_path), "--resume"]) == 0
    assert "30 steps of 64 samples, from step 12 on" in capsys.readouterr().out
    assert end(tmp_path)[:2] == whole[:2]


def broken_off(folder, newest=24):
    """Make a run that has ended look as if it had been killed after the last checkpoint but one."""
    shutil.rmtree(folder / "checkpoints" / f"step-{newest:08d}")
    for name in ("summary.json", "parameters.npz"):
        (folder / name).unlink()


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_goes_on_on_another_number_of_ranks(tmp_path, program):
    """Exact mode: the same bits."""
    arguments = [str(ROOT / program), *PROGRAMS[program]]
    alone, both = tmp_path / "alone", tmp_path / "both"
    crews.launch([*arguments, "--out", str(alone)], 1).check()
    beside = ["--async-save"] if "examples" in program else []
    crews.launch([*arguments, "--out", str(both), "--save-every", "9", *beside], 2).check()
    assert end(alone)[:2] == end(both)[:2]
    sent = end(both)[2]["bytes_sent_per_rank"]
    broken_off(both)
    more = ["--stage", "1"] if "sharded" in program else []
    crews.launch([*arguments, "--out", str(both), "--resume", *more], 1).check()
    digest, history, summary = end(both)
    assert (digest, history) == end(alone)[:2] and summary["resumed_at"] == 18 and summary["ranks"] == 1
    if "sharded" in program:        # what two ranks have sent before counts
        assert 0 < summary["bytes_sent_per_rank"] < sent
    if "gpt" in program:
        assert summary["validation"] == end(alone)[2]["validation"]


def test_one_command_begins_and_goes_on(main, whole, tmp_path, monkeypatch, capsys):
    """However often it is killed, and once more when all is done."""
    def die():
        raise Killed
    arguments = [*TRAIN, "--out", str(tmp_path), "--save-every", "4", "--resume", "auto"]
    for killed in (2, 10, 17):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(training.Run, "log", at_step(killed, die))
            main(arguments)
    assert "from step" not in capsys.readouterr().out.split("steps of 64 samples")[1]
    for _ in range(2):
        assert main(arguments) == 0
        assert end(tmp_path)[:2] == whole[:2]


def refused(main, capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main([*TRAIN, *arguments])
    return capsys.readouterr().err


def test_a_job_that_begins_or_goes_on_names_its_folder(main, capsys):
    """That of no --out is another for other numbers of ranks: it would begin again without a word."""
    assert "--resume auto: give the run's folder by --out" in refused(main, capsys, "--resume", "auto")


def test_what_cannot_go_on_is_said(main, tmp_path, capsys, monkeypatch):
    folder, more = tmp_path / "run", ["--out", str(tmp_path / "run")]
    assert f"--resume: {folder}/checkpoints has no checkpoint" in refused(main, capsys, *more, "--resume")
    assert main([*TRAIN, *more, "--save-every", "12"]) == 0
    capsys.readouterr()
    broken_off(folder, 30)
    before = sorted(p.name for p in folder.rglob("*"))
    said = refused(main, capsys, *more)
    assert f"{folder} has a run that was broken off, with a checkpoint at step 24: go on with --resume" in said
    said = refused(main, capsys, *more, "--resume", "--lr", "0.5", "--seed", "7")
    assert "the checkpoint is of a run with lr 0.003 (now 0.5); seed 0 (now 7): give the same settings" in said
    assert "micro_shards 8 (now 4)" in refused(main, capsys, *more, "--resume", "--micro-shards", "4")
    with monkeypatch.context() as patch:
        load = data.load

        def relabelled(*args, **options):
            found = load(*args, **options)
            labels = found.train_labels.copy()
            labels[7] ^= 1
            return dataclasses.replace(found, train_labels=labels)
        patch.setattr(data, "load", relabelled)
        assert "of a run with data_crc32 " in refused(main, capsys, *more, "--resume")
    assert "steps 30 (now 46)" in refused(main, capsys, *more, "--resume", "--steps", "46")
    file = folder / "checkpoints" / "step-00000024" / "rank-0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    assert (f"it was cut off; take an earlier checkpoint (the newest is that before when {file.parent} is deleted)"
            in refused(main, capsys, *more, "--resume"))
    file.write_bytes(content)
    history = (folder / "history.jsonl").read_text()
    (folder / "history.jsonl").write_text("".join(history.splitlines(keepends=True)[:5]))
    assert "history.jsonl has 5 lines, and the checkpoint is of step 24" in refused(main, capsys, *more, "--resume")
    (folder / "history.jsonl").write_text("".join(history.splitlines(keepends=True)[:24])[:-9])     # half a line
    assert "history.jsonl has 23 lines, and the checkpoint is of step 24" in refused(main, capsys, *more, "--resume")
    for odd in (history.replace('"step": 7', '"ctep": 7'), history.replace('"loss"', "7", 1)):
        (folder / "history.jsonl").write_text(odd)
        assert "isn't that of step" in refused(main, capsys, *more, "--resume")
    (folder / "history.jsonl").write_text(history)
    assert "--save-every 0: must be at least 1" in refused(main, capsys, *more, "--save-every", "0")
    assert "--mine can't go on from a checkpoint" in refused(main, capsys, *more, "--mine", "--resume")
    assert sorted(p.name for p in folder.rglob("*")) == before      # nothing was lost on the way
    assert main([*TRAIN, *more, "--resume"]) == 0
    assert main([*TRAIN, *more]) == 0       # one that has come to its end may be overwritten
    assert not (folder / "checkpoints").exists()


def test_a_run_that_has_ended_keeps_its_results_when_it_cannot_go_on(main, tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path), "--save-every", "20"]) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert set(before) == {"history.jsonl", "summary.json", "parameters.npz"}
    assert "lr 0.003 (now 0.5)" in refused(main, capsys, "--out", str(tmp_path), "--resume", "--lr", "0.5")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert main([*TRAIN, "--out", str(tmp_path), "--resume"]) == 0
    assert "30 steps of 64 samples, from step 30 on" in capsys.readouterr().out
    assert (tmp_path / "parameters.npz").read_bytes() == before["parameters.npz"]


def test_a_trace_of_a_run_that_goes_on(main, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "log", at_step(11, lambda: os.kill(os.getpid(), signal.SIGINT)))
        main([*TRAIN, "--out", str(tmp_path)])
    assert main([*TRAIN, "--out", str(tmp_path), "--resume", "--trace", "2"]) == 0
    assert (tmp_path / "trace.json").exists() and end(tmp_path)[:2] == whole[:2]


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    """Also when the other is of another process."""
    world = comm.world()
    with training.Run(tmp_path, world) as run:
        run.log(0.5, 0, 4, 0.0)
        with pytest.raises(ValueError, match=f"another run is writing into {tmp_path}: take another --out"):
            training.Run(tmp_path, world)
        told = ranks.launch([str(ROOT / "mnist_demo" / "train.py"), *TRAIN, "--out", str(tmp_path)], 1)
        assert told.returncode == 2 and f"train.py: another run is writing into {tmp_path}" in told.stderr[0]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1
    lost = training.Run(tmp_path, world)
    lost.itself = lost      # as an exception's traceback may have it
    with pytest.raises(ValueError, match="another run is writing into"):
        training.Run(tmp_path, world)
    del lost                # nobody has it any more
    with training.Run(tmp_path, world):
        pass


@pytest.mark.parametrize("summary", ["[]", '{"interr', "{}", ""])
def test_a_damaged_summary_is_that_of_no_end(tmp_path, summary):
    Checkpoints(tmp_path / "checkpoints").save(4, nn.Linear(2, 3))
    (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(ValueError, match="has a run that was broken off, with a checkpoint at step 4"):
        training.Run(tmp_path, comm.world())
    run = training.Run(tmp_path, comm.world(), resume=True)
    with pytest.raises(ValueError, match="the newest checkpoint in .* is of no run: it says nothing of busy, loss"):
        run.restore(nn.Linear(2, 3), None, None)
    assert (tmp_path / "summary.json").read_text() == summary
