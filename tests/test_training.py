"""What training programs share: the step, the groups, the files, the clean stop."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn, optim, program, training
from minitorch_dist.data import Loader
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.testing import ranks
from tests.parallel.test_offload import file_size_limit

random = np.random.default_rng
COUNT, FEATURES, CLASSES = 13, 5, 4


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def setting(exact=False, rank=0, size=1):
    """A linear model on 13 samples, and the one batch of them all."""
    x, labels = random(0).standard_normal((COUNT, FEATURES)), random(1).integers(0, CLASSES, COUNT)
    loader = Loader(x, labels, COUNT, rank=rank, size=size, micro_shards=8 if exact else 1, shuffle=False)
    mt.manual_seed(2)
    return x, labels, next(iter(loader.epoch(0))), nn.Linear(FEATURES, CLASSES, dtype=np.float64)


def by_hand(x, labels, weight, bias, units):
    """(loss, gradients): Σ -log p[label] / (13 · units) in plain NumPy."""
    z = x @ weight.T + bias
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    d = (p - np.eye(CLASSES)[labels]) / (COUNT * units)
    return -np.log(p[np.arange(COUNT), labels]).sum() / (COUNT * units), [d.T @ x, d.sum(axis=0)]


def one_step_of_all_rows_on_each():
    """What a Loader that is told of no ranks leads to in exact mode."""
    world = comm.world()
    _, _, batch, model = setting(True)
    model = DistributedDataParallel(model, world, exact=True)
    with pytest.raises(ValueError) as error:
        training.train_step(model, optim.SGD(model.parameters(), lr=0.5), batch, loss_sum, world, seed=0, step=0)
    return str(error.value)


def one_step(exact=False, units=1, clip=None, stop_on=(), accumulate=1):
    """On every rank: (loss, stop, weight and bias after a step of SGD at 0.5)."""
    world = comm.world()
    _, _, batch, model = setting(exact, world.rank, world.size)
    ddp = DistributedDataParallel(model, world, exact=exact)
    optimizer = optim.SGD(ddp.parameters(), lr=0.5)
    with ledger.record() as book:
        loss, stop = training.train_step(ddp, optimizer, batch, loss_sum, world, seed=0, step=0, units=units, clip=clip,
                                         accumulate=accumulate, stop=world.rank in stop_on)
    if world.size > 1:      # the one bucket and the loss, however many passes
        assert book.calls["world", "all_reduce"] == 2
    return loss, stop, [p.numpy().copy() for p in ddp.parameters()]


class Noisy(nn.Module):
    """A linear layer of inputs with noise, as a variational autoencoder's or a diffusion model's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, dtype=np.float64)

    def forward(self, x):
        return self.linear(x + mt.randn(*x.shape, dtype=x.dtype) * mt.rand(x.shape[0], 1, dtype=x.dtype))


def noisy(exact):
    """(losses of 3 steps, what is said of a forward outside of a scope)."""
    world = comm.world()
    _, _, batch, _ = setting(exact, world.rank, world.size)
    mt.manual_seed(2)
    model = DistributedDataParallel(Noisy(), world, exact=exact)
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    losses = [training.train_step(model, optimizer, batch, loss_sum, world, seed=0, step=step)[0] for step in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model(batch.inputs)
        except RuntimeError as error:
            return losses, str(error)
        model.eval()(batch.inputs)
    return losses, [str(warning.message) for warning in said]


@pytest.mark.parametrize("exact", [False, True])
def test_noise_belongs_to_the_samples(exact):
    (alone, said), = [noisy(exact)]
    assert "random_scope" in said if exact else said == []
    for n in (2, 4):
        for rank, (losses, said) in enumerate(ranks.call("tests.test_training:noisy", n, (exact,))):
            assert losses == alone if exact else losses == pytest.approx(alone, rel=1e-12)
            if exact:
                assert "these random numbers would depend on the number of ranks" in said
            else:       # of both draws of a forward, by one rank, and in training only
                assert len(said) == 2 * (rank == 0)
                assert all("the same on all ranks" in text and "random_scope(seed, step" in text for text in said)


@pytest.mark.parametrize("accumulate", [2, 3, 16])
def test_accumulation_is_the_same_step_with_one_set_of_reductions(accumulate):
    """16 pieces of 13 rows, or of a rank's 6: some are empty."""
    once = one_step()
    for loss, _, weights in [one_step(accumulate=accumulate),
                             *ranks.call("tests.test_training:one_step", n=2, args=(False, 1, None, (), accumulate))]:
        assert loss == pytest.approx(once[0], rel=1e-14)
        for got, wanted in zip(weights, once[2], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_a_loader_that_was_not_told_of_the_ranks():
    for text in ranks.call("tests.test_training:one_step_of_all_rows_on_each", 2):
        assert "4 micro-shards on each of these ranks, and the batch has 8: give the Loader rank=" in text


def test_accumulation_in_exact_mode_is_refused():
    with pytest.raises(ValueError, match="accumulate=2 in exact mode"):
        one_step(exact=True, accumulate=2)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("units", "clip"), [(1, None), (3, None), (1, 0.01)])
def test_a_step_is_that_of_the_global_batch(n, exact, units, clip):
    x, labels, _, model = setting()
    weights = [p.numpy().copy() for p in model.parameters()]
    wanted, grads = by_hand(x, labels, *weights, units)
    if clip:
        norm = np.sqrt(sum((g ** 2).sum() for g in grads))
        assert norm > 2 * clip
        grads = [g * clip / (norm + 1e-6) for g in grads]
    for loss, stop, after in ranks.call("tests.test_training:one_step", n, (exact, units, clip)):
        assert loss == pytest.approx(wanted, rel=1e-12) and stop is False
        for w, g, a in zip(weights, grads, after, strict=True):
            np.testing.assert_allclose(a, w - 0.5 * g, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("clip", [None, lambda model: None, lambda model: 3.5])
def test_a_guard_against_spikes_hears_of_the_loss_and_of_a_norm_that_is_known(clip):
    x, labels, batch, model = setting()
    loss, grads = by_hand(x, labels, *(p.numpy().copy() for p in model.parameters()), 1)
    norm = np.sqrt(sum((g ** 2).sum() for g in grads)) if clip is None else clip(model)
    ddp, heard = DistributedDataParallel(model, comm.world()), []
    guard = SimpleNamespace(spiked=lambda step, **values: heard.append((step, values)))
    training.train_step(ddp, optim.SGD(ddp.parameters(), lr=0.5), batch, loss_sum, comm.world(), seed=0, step=6,
                        clip=clip, spikes=guard)
    assert heard == [(7, pytest.approx({"loss": loss} | ({} if norm is None else {"norm": norm}), rel=1e-12))]


def test_one_rank_that_wants_to_stop_stops_all():
    for stop_on, wanted in [((1,), True), ((0, 1), True)]:
        assert [v[1] for v in ranks.call("tests.test_training:one_step", 2, (False, 1, None, stop_on))] == [wanted] * 2


def test_decay_groups():
    mt.manual_seed(0)
    model = nn.GPT(7, 5, layers=1, heads=2, dim=4)
    matrices, vectors = training.decay_groups(model, 0.3)
    assert matrices["weight_decay"] == 0.3 and vectors["weight_decay"] == 0.0
    assert {id(p) for g in (matrices, vectors) for p in g["params"]} == {id(p) for p in model.parameters()}
    named = {id(p): name for name, p in model.named_parameters()}
    assert {named[id(p)].rsplit(".", 1)[1] for p in matrices["params"]} == {"weight"}
    assert all(named[id(p)].endswith("bias") or "norm" in named[id(p)] for p in vectors["params"])
    before = {name: p.numpy().copy() for name, p in model.named_parameters()}
    optimizer = optim.AdamW([matrices, vectors], lr=0.1)
    for p in model.parameters():
        p.grad = mt.tensor(np.zeros_like(p.numpy()))
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.3 if p.ndim > 1 else 1
        np.testing.assert_allclose(p.numpy(), before[name] * factor, rtol=1e-6, err_msg=name)


# ---------------------------------------------------------------- files

def model(seed=0):
    mt.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4))


def test_parameters_come_back(tmp_path):
    first, second = model(), model(1)
    first(mt.tensor(random(0).standard_normal((5, 3)).astype(np.float32)))
    path = tmp_path / "parameters.npz"
    training.save_parameters(path, first)
    training.load_parameters(path, second)
    assert training.parameters_sha256(first) == training.parameters_sha256(second)
    assert (first[1].running_mean == second[1].running_mean).all() and first[1].running_mean.any()
    assert [p.name for p in tmp_path.iterdir()] == ["parameters.npz"]
    with pytest.raises(ValueError, match="parameters.npz is of another model: load_state_dict: no values for.*weight"):
        training.load_parameters(path, nn.Linear(3, 4))
    with pytest.raises(ValueError, match="shape"):
        training.load_parameters(path, nn.Sequential(nn.Linear(2, 4), nn.BatchNorm(4)))


DIES = """
import os, signal, sys
import numpy as np
from minitorch_dist import nn, training
def dying(file, **arrays):
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
np.savez = dying
training.save_parameters(sys.argv[1], nn.Linear(3, 4))
"""


def test_a_kill_in_mid_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "parameters.npz"
    training.save_parameters(path, nn.Linear(3, 4))
    before = path.read_bytes()
    dead = subprocess.run([sys.executable, "-c", DIES, str(path)], timeout=60)
    assert dead.returncode == -signal.SIGKILL and path.read_bytes() == before
    assert (tmp_path / "parameters.npz.partial").exists()       # it had begun
    training.save_parameters(path, nn.Linear(3, 4))             # and the next one is not in its way
    assert [p.name for p in tmp_path.iterdir()] == ["parameters.npz"]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    path = tmp_path / "parameters.npz"
    training.save_parameters(path, nn.Linear(3, 4))
    before = path.read_bytes()
    with file_size_limit(5_000), pytest.raises(OSError, match=r"File too large: '.*/parameters\.npz'"):
        training.save_parameters(path, nn.Linear(100, 100))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["parameters.npz"]


def test_a_run_leaves_its_files(tmp_path):
    network = model()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    run = training.Run(tmp_path / "run", comm.world())
    assert (tmp_path / "run" / "summary.json").exists()     # until it begins
    with run:
        assert not (tmp_path / "run" / "summary.json").exists()
        for step in range(3):
            run.log(1.5 - step, 0, 10, time.perf_counter() - 0.5)
    summary = run.finish(network, lr=0.1)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["lr"] == 0.1 and summary["steps"] == 3 and summary["samples"] == 30
    assert summary["final_loss"] == -0.5 and 15 < summary["samples_per_second"] <= 20
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 2, "epoch": 0, "loss": 0.5, "samples": 20}
    assert summary["parameters_sha256"] == training.parameters_sha256(network)
    with np.load(tmp_path / "run" / "parameters.npz") as file:
        assert set(file) == set(network.state_dict())


SLOW_DISK = """
import sys, time
from minitorch_dist import comm, nn, training
run = training.Run(sys.argv[1], comm.world())
with run:
    run.log(1.0, 0, 10, time.perf_counter())
save = training.save_parameters
training.save_parameters = lambda *args: (time.sleep(1.5), save(*args))
run.finish(nn.Linear(2, 3))
sys.exit(143)
"""


def test_no_rank_ends_while_rank_0_writes(tmp_path):
    run = ranks.launch(["-c", SLOW_DISK, tmp_path / "run"], n=2)
    assert run.returncode == 143 and "".join(run.stderr) == "", run.report()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"history.jsonl", "parameters.npz", "summary.json"}


def differing(what):
    """What check_replicas says on ranks whose parameters or buffers differ in one bit."""
    network = model()
    if comm.world().rank == 1:
        changed = network[0].bias.data if what == "parameters" else network[1].running_mean
        changed[0] = np.nextafter(changed[0], np.float32(9))
    try:
        training.check_replicas(network, comm.world())
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_ranks_that_differ_by_a_bit_are_found(what):
    assert all(f"different {what}" in said for said in ranks.call("tests.test_training:differing", 2, (what,)))


def on_unlike_processors():
    """prepare_exact where rank 1's products come of another code: the error."""
    if comm.world().rank == 1:
        backend.products_made_by = lambda: "numpy 9.9.9, anotherblas 1.2 for Frobwell"
    try:
        training.prepare_exact(comm.world())
    except ValueError as error:
        return str(error)


def test_exact_mode_refuses_ranks_whose_products_differ():
    here = backend.products_made_by()
    assert here.startswith(f"numpy {np.__version__}")
    for pool in threadpool_info():
        assert pool["user_api"] != "blas" or f"{pool['internal_api']} {pool['version']}" in here
        assert pool["internal_api"] != "openblas" or f"for {pool['architecture']}" in here
    for said in ranks.call("tests.test_training:on_unlike_processors", 2):
        assert f"products come of {here} on rank 0, and of numpy 9.9.9, anotherblas 1.2 for Frobwell on rank 1" in said


# ---------------------------------------------------------------- Ctrl-C, SIGTERM

@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_is_a_wish(number, status):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with program.Interrupt() as interrupt:
        assert not interrupt.wanted and interrupt.status(comm.world()) == 0
        os.kill(os.getpid(), number)
        assert interrupt.wanted
        assert interrupt.status(comm.world()) == status
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


INTERRUPTED = """
import os, signal, sys, time
from minitorch_dist import program
program.ECHO_SECONDS = float(sys.argv[3])
with program.Interrupt() as interrupt:
    for name in sys.argv[1:3]:
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(0.05)
sys.exit(interrupt.wanted)
"""


@pytest.mark.parametrize(("first", "second", "echo", "status"), [
    ("SIGTERM", "SIGTERM", 0.01, -signal.SIGTERM), ("SIGINT", "SIGTERM", 30, -signal.SIGTERM),
    ("SIGTERM", "SIGINT", 30, -signal.SIGINT), ("SIGTERM", "SIGTERM", 30, 1)])
def test_the_second_signal_is_an_end_and_an_echo_is_none(first, second, echo, status):
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, first, second, str(echo)], timeout=60,
                           stderr=subprocess.DEVNULL)
    assert ended.returncode == status


def asked_of_one(number):
    """The status that all ranks end with where rank 1 only has got the signal."""
    with program.Interrupt() as interrupt:
        if comm.world().rank == 1:
            os.kill(os.getpid(), number)
        return interrupt.status(comm.world())


def test_one_rank_that_is_asked_to_end_decides_the_status_of_all():
    assert ranks.call("tests.test_training:asked_of_one", 2, (signal.SIGTERM,)) == [143, 143]


def test_progress_speaks_on_rank_0_only(capsys):
    class Rank:
        def __init__(self, rank):
            self.rank = rank
    for rank in (0, 1):
        with program.Progress(Rank(rank), 3) as progress:
            progress.step(0.5)
            progress.say(f"said by {rank}")
    assert capsys.readouterr().out == "said by 0\n"


def test_peak_memory_is_in_bytes():
    assert 10e6 < training.peak_memory_bytes() < 100e9


@pytest.mark.parametrize("epochs, steps, wanted", [
    (3, None, (3, 30)), (None, None, (4, 40)), (None, 25, (3, 25)), (3, 5, (1, 5)), (3, 100, (3, 30)),
    (None, 10, (1, 10))])
def test_what_ends_first_ends_the_training(epochs, steps, wanted):
    assert program.length(SimpleNamespace(epochs=epochs, steps=steps), 10, 4) == wanted


# ---------------------------------------------------------------- lines for people

SAYS = """
import sys
from minitorch_dist import comm, program
with program.Progress(comm.world(), 3) as progress:
    progress.step(0.5)
    progress.say("[/red] [bold]x :smile: " + "word " * 30 + "end")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_said_as_they_are(tmp_path, terminal):
    """On a terminal of 80 columns, a model's own text among them; and in a file, with the bar on the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SAYS], stdout=theirs if terminal else subprocess.PIPE, text=True,
                               stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "80"})
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    file = process.communicate(timeout=30)[0]
    assert process.returncode == 0, said.decode()
    assert "training" in said.decode()
    assert "[/red] [bold]x :smile: " + "word " * 30 + "end" in (said.decode() if terminal else file)


@pytest.mark.parametrize("error, text", [
    (FileNotFoundError(2, "No such file or directory", "play.txt"), "play.txt: No such file or directory"),
    (OSError("no room"), "no room"), (ValueError("three heads"), "three heads")], ids=str)
def test_errors_in_words(error, text, capsys):
    with pytest.raises(SystemExit) as end, program.usage_errors("program.py"):
        raise error
    assert end.value.code == 2 and capsys.readouterr().err == f"program.py: {text}\n"


def test_help_tells_defaults(capsys):
    parser = program.ArgumentParser(prog="p", description="first\n    second")
    for name, options in (("a", {"default": 0, "help": "zero"}), ("b", {"help": "none"}),
                          ("c", {"action": "store_true", "help": "no"}), ("d", {"default": 3, "help": "own default"})):
        parser.add_argument(f"--{name}", **options)
    parser.print_help()
    text = capsys.readouterr().out
    assert "zero (default: 0)\n" in text and "none\n" in text and "no\n" in text and "own default\n" in text
    assert "first\n    second" in text
