"""A training.Run: what it keeps, what it refuses, and who is told. How whole programs go on: test_resume.py."""

import contextlib
import errno
import fcntl
import io
import os
import re
import resource
import time
import zlib

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import attempt, comm, divergence, nn, optim, training
from minitorch_dist.checkpoints import CheckpointError, Checkpoints, writing
from tests.crews import crews
from tests.parallel.test_offload import file_size_limit

CASES = "tests.test_run:"


def without_room(folder):
    """(status, what was said) on this rank where rank 0 can't write what is left at a run's end."""
    run, said = training.Run(folder, comm.world()), io.StringIO()
    with run:
        run.log(1.5, 0, 10, 0.0)

    def full(path, network):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    save, training.save_parameters = training.save_parameters, full
    try:
        with contextlib.redirect_stderr(said):
            run.finish(nn.Linear(2, 3))
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        training.save_parameters = save


def test_a_disk_that_is_full_at_the_end_is_told_in_a_line_and_ends_all_ranks(tmp_path):
    assert crews.call(CASES + "without_room", 2, (str(tmp_path),)) == [
        (1, f"{tmp_path}/parameters.npz: No space left on device: the run ends after step 1. There is no checkpoint to "
            "go on from\n"), (1, "")]
    assert (tmp_path / "history.jsonl").read_bytes().count(b"\n") == 1


def without_room_on_the_way(folder, room, steps):
    """(status, what was said) on this rank, where files may grow by so many bytes while a run makes so many steps, of
    which it saves the third, whose checkpoint stays, and the last."""
    network, said, status = nn.Linear(30, 30), io.StringIO(), None
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with contextlib.redirect_stderr(said), training.Run(folder, comm.world()) as run:
            for step in range(1, steps + 1):
                run.log(1.5, 0, 10, 0.0)
                if step == 3:
                    run.save(network, optimizer)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            if room:
                run.save(network, optimizer)
    except SystemExit as end:
        status = end.code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return status, said.getvalue()


@pytest.mark.parametrize("room, steps, file, last", [
    (0, 300, "history.jsonl", range(3, 300)),       # in log, on rank 0 alone
    (0, 4, "history.jsonl", [4]),                   # at the end of `with`
    (1000, 4, "checkpoints/.step-00000004.partial/rank-", [4])])
def test_a_disk_that_is_full_on_the_way_ends_the_run_in_a_line(tmp_path, room, steps, file, last):
    """No line nor checkpoint is lost that was written."""
    first, second = crews.call(CASES + "without_room_on_the_way", 2, (str(tmp_path), room, steps))
    said = re.fullmatch(f"{tmp_path}/{file}.*: File too large: the run ends after step (.*). The checkpoint of step 3 "
                        "is whole: --resume goes on from there\n", first[1])
    assert first[0] == 1 and int(said[1]) in last
    assert second == ((1, "") if room else (None, ""))
    assert (tmp_path / "history.jsonl").read_bytes().count(b"\n") == (4 if room else 3)
    assert resumed(tmp_path, sizes=(30, 30)).step == 3


def without_room_beside(folder, last):
    """(status, what was said) on this rank where the checkpoint of a run's last step, which is written beside the
    training, has no room on rank `last`."""
    network, said, world, write = nn.Linear(2, 3), io.StringIO(), comm.world(), writing.write
    optimizer = optim.SGD(network.parameters(), lr=0.1)

    def full(path, blocks):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    run = training.Run(folder, world, async_save=True)
    try:
        with contextlib.redirect_stderr(said):
            with run:
                for step in (1, 2):
                    run.log(1.5, 0, 10, 0.0)
                    run.save(network, optimizer)
                    run.checkpoints.wait() if step == 1 else None
                    writing.write = full if world.rank == last else write
            run.finish(network)
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        writing.write = write


@pytest.mark.parametrize("n, last", [(1, 0), (2, 0), (2, 1)])
def test_a_checkpoint_beside_the_training_that_has_no_room_at_the_end_ends_all_ranks_in_a_line(tmp_path, n, last):
    """Parameters and summary, for which there is room, are written all the same."""
    found = crews.call(CASES + "without_room_beside", n, (str(tmp_path), last))
    assert [status for status, _ in found] == [1] * n
    file = f"{tmp_path}/checkpoints/.step-00000002.partial/rank-{last}.safetensors"
    assert found[0][1].endswith(
        f"{file}: No space left on device: the run ends after step 2. The checkpoint of step 1 is whole: --resume goes "
        "on from there; parameters.npz and summary.json are written\n")
    assert all("Traceback" not in said and said.count("\n") == (rank == 0) + (rank == last)
               for rank, (_, said) in enumerate(found))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "history.jsonl", "parameters.npz",
                                                                "summary.json"]
    assert resumed(tmp_path).step == 1


def test_a_run_that_diverges_while_a_checkpoint_has_no_room_says_both(tmp_path, monkeypatch, capsys):
    network = nn.Linear(2, 3)

    def full(path, blocks):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    monkeypatch.setattr(writing, "write", full)
    with pytest.raises(SystemExit) as ended, training.Run(tmp_path, comm.world(), async_save=True) as run:
        run.log(1.5, 0, 10, 0.0)
        run.save(network, optim.SGD(network.parameters(), lr=0.1))
        raise divergence.Diverged("step 2: the loss is nan")
    assert ended.value.code == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert "step-00000001 couldn't be written" in first and rest == [
        "step 2: the loss is nan", f"the losses until then are in {tmp_path}/history.jsonl"]


@pytest.mark.parametrize("steps", [60, 600])        # fewer than a buffer holds: written at the end; and more
def test_a_history_that_the_disk_has_no_room_for_is_named(tmp_path, capsys, steps):
    with file_size_limit(2_000), pytest.raises(SystemExit) as ended:
        with training.Run(tmp_path, comm.world()) as run:
            for _ in range(steps):
                run.log(1.0, 0, 10, time.perf_counter())
    assert ended.value.code == 1 and isinstance(ended.value.__cause__, OSError)
    said = f"{tmp_path}/history.jsonl: File too large: the run ends after step {run.step}. There is no checkpoint"
    assert capsys.readouterr().err.startswith(said) and 30 < run.step <= steps
    training.Run(tmp_path, comm.world())                # the folder isn't locked any more


def elsewhere(folder, saves):
    """What this rank is told where rank 1 has another disk by the name of rank 0's."""
    world = comm.world()
    try:
        training.Run(f"{folder}/of-{world.rank}", world, saves=saves)
    except OSError as error:
        return str(error)


def test_a_run_that_will_save_wants_a_folder_that_all_ranks_see(tmp_path):
    for said in crews.call(CASES + "elsewhere", 3, (str(tmp_path), True)):
        assert "rank 1 on " in said and "doesn't see this folder, which rank 0 has made" in said
    assert crews.call(CASES + "elsewhere", 3, (str(tmp_path), False)) == [None] * 3


def test_an_error_that_is_kept_keeps_no_folder(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint") as kept:
        training.Run(tmp_path, comm.world(), resume=True)
    training.Run(tmp_path, comm.world())
    assert kept.value


def test_a_file_system_without_locks_lets_everybody_pass(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", none)
    assert [training.Lock(tmp_path).taken() for _ in range(2)] == [True, True]


def run_of(folder, step=3, scaler=None, **facts):
    """A run with a checkpoint of its last step, that was broken off."""
    network = nn.Linear(2, 3)
    with training.Run(folder, comm.world()) as run:
        for _ in range(step):
            run.log(1.5, 0, 10, 0.0)
        run.save(network, optim.SGD(network.parameters(), lr=0.1), scaler, **facts)


def resumed(folder, scaler=None, sizes=(2, 3), **watches):
    network = nn.Linear(*sizes)
    run = training.Run(folder, comm.world(), resume=True)
    run.restore(network, optim.SGD(network.parameters(), lr=0.1), None, scaler, **watches)
    return run


def test_what_watches_a_run_goes_on_with_it(tmp_path):
    scaler, guard = optim.GradScaler(init_scale=32.0, growth_interval=5), optim.SpikeGuard(window=4)
    guard.spiked(1, loss=7.0)
    run_of(tmp_path / "with", scaler=scaler, spikes=guard)
    scaler, guard = optim.GradScaler(), optim.SpikeGuard(window=4)
    run = resumed(tmp_path / "with", scaler, spikes=guard, another=None)
    assert (scaler.get_scale(), scaler.growth_interval) == (32.0, 5) and guard.state_dict()["before"] == {"loss": [7.0]}
    assert (run.step, run.samples, run.loss, run.resumed_at) == (3, 30, 1.5, 3)
    run_of(tmp_path / "without")
    with pytest.raises(CheckpointError, match="step 3 was saved without a GradScaler: go on without one"):
        resumed(tmp_path / "without", optim.GradScaler())


def test_a_history_whose_loss_is_no_number_was_changed(tmp_path):
    run_of(tmp_path)
    path = tmp_path / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in [lines[0], lines[1].replace("1.5", "null"), lines[2]]))
    with pytest.raises(CheckpointError, match="line 2 isn't that of step 2: was it changed"):
        resumed(tmp_path)


def test_a_step_that_was_resumed_from_is_not_saved_again(tmp_path):
    run_of(tmp_path)
    index = sorted((tmp_path / "checkpoints").glob("step-*/*"))
    before = [path.stat().st_mtime_ns for path in index]
    with resumed(tmp_path) as run:
        network = nn.Linear(2, 3)
        run.save(network, optim.SGD(network.parameters(), lr=0.1))
    assert before and [path.stat().st_mtime_ns for path in index] == before


@pytest.mark.parametrize("async_save, noted", [(False, [2, 4, 4]), (True, [None, 2, 4])])
def test_a_supervisor_is_told_of_the_checkpoints_that_are_there(tmp_path, monkeypatch, async_save, noted):
    """At the first save, at the second, which waits for one that is written beside the training, and at the end."""
    monkeypatch.setenv(attempt.SUPERVISED, str(tmp_path / "steps"))
    network, seen = nn.Linear(2, 3), []
    with training.Run(tmp_path / "run", comm.world(), async_save=async_save) as run:
        for _ in range(5):
            run.log(1.5, 0, 10, 0.0)
            if run.due(2, 6):
                run.save(network, optim.SGD(network.parameters(), lr=0.1))
                seen.append(attempt.read_steps(tmp_path / "steps").saved)
        Checkpoints(tmp_path / "best").save(5, network)      # another's
    run.finish(network)
    assert [*seen, attempt.read_steps(tmp_path / "steps").saved] == noted


def test_a_run_ends_when_its_last_checkpoint_is_there(tmp_path, monkeypatch):
    network, sync = nn.Linear(2, 3), os.fsync
    with training.Run(tmp_path, comm.world(), async_save=True) as run:
        run.log(1.5, 0, 10, 0.0)
        monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.5), sync(file)))
        run.save(network, optim.SGD(network.parameters(), lr=0.1))
    monkeypatch.setattr(training, "save_parameters", lambda path, network: seen.extend(run.checkpoints.steps()))
    seen = []
    run.finish(network)
    assert seen == [1]


@pytest.mark.parametrize("every, steps, due", [
    (None, 7, []), (3, 7, [3, 6, 7]), (7, 7, [7]), (9, 7, [7]), (1, 3, [1, 2, 3])])
def test_when_a_checkpoint_is_due(tmp_path, every, steps, due):
    run = training.Run(tmp_path, comm.world())
    found = []
    for run.step in range(1, steps + 1):
        if run.due(every, steps):
            found.append(run.step)
    assert found == due


def test_no_step_no_speed(tmp_path):
    run = training.Run(tmp_path, comm.world())
    assert run.speed == 0


def test_a_number_tells_data_apart():
    """All of it, in its order, as lies in memory."""
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((7, 5, 3)).astype(np.float32), random.integers(0, 9, 7)
    assert training.crc32(images, labels) == f"{zlib.crc32(images.tobytes() + labels.tobytes()):08x}"
    assert training.crc32(images[:, ::2].T) == f"{zlib.crc32(images[:, ::2].T.tobytes()):08x}"
    small = next(i for i in range(256) if zlib.crc32(bytes([i])) < 1 << 28)
    assert training.crc32(np.array([small], np.uint8)) == f"0{zlib.crc32(bytes([small])):07x}"


class Part(nn.Linear):
    """As parallelize_module leaves one."""

    is_part = True


@pytest.mark.parametrize("network, words", [
    (nn.Sequential(nn.Linear(2, 3), Part(3, 2)), "this rank has parts of the model only"),
    (nn.Linear(2, 3, dtype=mt.bfloat16), "weight is bfloat16, which an .npz file would lose")], ids=["part", "16 bits"])
def test_what_no_file_of_parameters_can_hold(tmp_path, network, words):
    with pytest.raises(ValueError, match=words):
        training.save_parameters(tmp_path / "parameters.npz", network)
    assert not list(tmp_path.iterdir())


def test_a_digest_does_not_depend_on_the_order_of_the_layers():
    mt.manual_seed(0)
    first, second, ways = nn.Linear(2, 3), nn.Linear(4, 2), []
    for names in ("ab", "ba"):
        network = nn.Module()
        for name in names:
            setattr(network, name, {"a": first, "b": second}[name])
        ways.append(training.parameters_sha256(network))
    assert ways[0] == ways[1]
