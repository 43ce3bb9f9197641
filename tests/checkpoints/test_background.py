"""Checkpoints that are written while training goes on: the bytes of those that it waits for."""

import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from minitorch_dist import checkpoints, nn, optim
from minitorch_dist.checkpoints import Checkpoints, writing
from tests.crews import crews

from .cases import WAYS

CASES = "tests.checkpoints.background_cases:"
CUTS = [("gpt", way, max(WAYS[way])) for way in ("one", "data", "stage 3", "heads and data")] + [
    ("mlp", "layers and data", 4)]


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name, way, n", CUTS)
def test_training_goes_on_and_the_values_are_those_of_the_save(tmp_path, name, way, n):
    for before, after in crews.call(CASES + "both_ways", n, args=(name, way, str(tmp_path))):
        assert before == (False, False) and after == (True, True)
    assert bytes_of(tmp_path / "beside") == bytes_of(tmp_path / "waited")
    assert len(bytes_of(tmp_path / "beside")) == n + 1


def test_who_is_last_gives_the_name(tmp_path):
    """Nobody waits, and of 4 ranks, which end at about the same time, one publishes."""
    assert crews.call(CASES + "unwaited", 4, args=(str(tmp_path), 20)) == [[True] * 20] * 4
    assert {len(bytes_of(folder)) for folder in tmp_path.iterdir()} == {5}


def test_notes_that_nobody_sees(tmp_path):
    files = ["index.json", "rank-0.safetensors", "rank-1.safetensors", "rank-2.safetensors"]
    assert crews.call(CASES + "unseen", 3, args=(str(tmp_path / "one"),)) == [(False, files)] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write(tmp_path, rank):
    for errors, steps, left, then in crews.call(CASES + "full_disk", 2, args=(str(tmp_path), rank)):
        assert len(errors) == 2 and all("No space left on device" in error for error in errors)
        assert (steps, left, then) == ([1], ["step-00000001"], [1, 3])


def model_and_optimizer():
    model = nn.Linear(30, 20)
    return model, optim.SGD(model.parameters(), 0.1, momentum=0.9)


def test_what_comes_next_waits(tmp_path, monkeypatch):
    """A load, another save; what was given as facts may change meanwhile; old ones go."""
    model, optimizer = model_and_optimizer()
    there, gate, facts = Checkpoints(tmp_path, keep=1, async_op=True), threading.Event(), [1]
    write = writing.write
    monkeypatch.setattr(writing, "write", lambda *args: (gate.wait(20), write(*args))[1])
    there.save(1, model, optimizer, seen=facts)
    facts.append(2)
    weight = model.weight.numpy().copy()
    model.weight.data[...] = 0.0
    optimizer.param_groups[0]["lr"] = 0.7
    assert there.steps() == []
    gate.set()
    assert there.load(model, optimizer) == (1, {"seen": [1], "step": 1})
    np.testing.assert_array_equal(model.weight.numpy(), weight)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for step in (2, 3, 4):
        there.save(step, model, optimizer)
        assert set(there.steps()) <= {step - 1, step}
    there.wait()
    there.wait()
    assert there.steps() == [4]


def test_what_could_not_be_written_is_raised_by_the_next(tmp_path, monkeypatch, capsys):
    model, optimizer = model_and_optimizer()
    there, write = Checkpoints(tmp_path, async_op=True), writing.write
    there.save(1, model, optimizer)
    there.wait()

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr(writing, "write", full)
    there.save(2, model, optimizer)
    there._under_way._thread.join()
    monkeypatch.setattr(writing, "write", write)
    said = f"rank 0: {tmp_path}/step-00000002 couldn't be written, and the checkpoints before it stay: "
    assert said in capsys.readouterr().err
    with pytest.raises(OSError, match="No space left on device"):
        there.save(3, model, optimizer)
    assert there.steps() == [1]
    there.save(3, model, optimizer)
    there.wait()
    assert there.steps() == [1, 3]


def test_a_copy_is_a_ranks_share(tmp_path, monkeypatch):
    """Of its own memory, and let go as soon as it is on disk."""
    model, optimizer = model_and_optimizer()
    copied = []
    monkeypatch.setattr(checkpoints.saving, "copied",
                        lambda pieces: copied.append(writing.copied(pieces)) or copied[0])
    saving = checkpoints.save(tmp_path / "one", model, optimizer, async_op=True)
    saving.wait()
    assert sum(array.nbytes for array, _, _ in copied[0].values()) == 2 * 4 * (30 * 20 + 20)
    live = [p.data for p in model.parameters()]
    assert not any(np.shares_memory(array, other) for array, _, _ in copied[0].values() for other in live)
    assert saving._pieces is None


def test_a_rank_without_memory(tmp_path):
    """Every wait says so on every rank."""
    assert crews.call(CASES + "no_memory", 2, args=(str(tmp_path / "one"),)) == [(["no room"] * 2, [])] * 2


def test_a_rank_that_may_start_no_thread(tmp_path):
    """The other rank writes, and nobody gives the folder a name: the wait says why on both."""
    assert crews.call(CASES + "no_thread", 2, args=(str(tmp_path / "one"),)) == [("can't start new thread", [])] * 2


def test_a_wait_that_ctrl_c_has_ended_is_waited_again(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    there, gate, write = Checkpoints(tmp_path, async_op=True), threading.Event(), writing.write
    monkeypatch.setattr(writing, "write", lambda *args: (gate.wait(20), write(*args))[1])
    there.save(1, model, optimizer)
    saving = there._under_way

    for wait in (saving.wait, there.wait):
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert not saving.is_completed()
    monkeypatch.undo()
    gate.set()
    there.save(2, model, optimizer)
    there.wait()
    assert there.steps() == [1, 2]


def test_what_is_being_written_is_not_taken_for_what_was_broken_off(tmp_path, monkeypatch):
    """By a second save at the same path, or by another Checkpoints of the folder."""
    model, optimizer = model_and_optimizer()
    gate, write = threading.Event(), writing.write
    monkeypatch.setattr(writing, "write", lambda *args: (gate.wait(20), write(*args))[1])
    saving = checkpoints.save(tmp_path / "step-00000001", model, optimizer, async_op=True)
    model.weight.data[...] = 0.0
    with pytest.raises(FileExistsError, match="is being written here: wait for it"):
        checkpoints.save(tmp_path / "step-00000001", model, optimizer)
    there = [Checkpoints(tmp_path, async_op=True) for _ in range(2)]
    for step in (2, 3):
        there[step - 2].save(step, model, optimizer)
    gate.set()
    saving.wait()
    for each in there:
        each.keep = 5
        each.wait()
    assert there[0].steps() == [1, 2, 3]
    checkpoints.load(tmp_path / "step-00000001", model, optimizer)
    assert np.any(model.weight.numpy())


def test_a_path_is_free_again_when_its_save_has_failed_or_its_checkpoint_is_gone(tmp_path, monkeypatch):
    """Though nobody has waited for that save."""
    model, optimizer = model_and_optimizer()
    path, write = tmp_path / "one", writing.write
    monkeypatch.setattr(writing, "write", lambda *args: 1 / 0)
    first = checkpoints.save(path, model, optimizer, async_op=True)
    while not first.is_completed():
        time.sleep(0.001)
    monkeypatch.setattr(writing, "write", write)
    second = checkpoints.save(path, model, optimizer, async_op=True)
    while not (second.is_completed() and path.exists()):
        time.sleep(0.001)
    with pytest.raises(FileExistsError, match="there is a checkpoint already: '"):      # of no other rank: it is alone
        checkpoints.save(path, model, optimizer)
    shutil.rmtree(path)
    checkpoints.save(path, model, optimizer)
    checkpoints.load(path, model, optimizer)


def test_one_made_anew_for_each_save_keeps_as_few(tmp_path):
    """Nobody waits for what it writes: the next save finds it, and takes away the one too many."""
    model, optimizer = model_and_optimizer()
    for step in range(1, 6):
        there = Checkpoints(tmp_path, keep=2, async_op=True)
        there.save(step, model, optimizer)
        while there.steps()[-1:] != [step]:
            time.sleep(0.001)
        assert there.steps() == list(range(max(1, step - 2), step + 1))
    there.wait()
    assert there.steps() == [4, 5]
