"""Sync mode is DistributedDataParallel to the last bit; async mode's updates, staleness and bytes are closed forms."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, data, nn, optim
from minitorch_dist.comm.communicator import world_of_one
from minitorch_dist.parallel.servers.parameter_server import ParameterServer, roles
from minitorch_dist.parallel.servers.parameter_shard import Request, Shard
from minitorch_dist.testing import ranks
from tests.crews import crews, threads
from tests.device.fake_cupy import installed

from . import cases, plain, server_cases

CASES = "tests.parallel.server_cases:"
ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- sync

@pytest.fixture(scope="module")
def by_ddp():
    first, second = crews.call(CASES + "exact_by_ddp", 2)
    assert first == second
    return first


@pytest.mark.parametrize("workers, servers, n", [(1, 1, 1), (2, 1, 3), (4, 1, 5), (2, 3, 5)])
def test_sync_has_the_bits_of_data_parallelism(by_ddp, workers, servers, n):
    everyone = crews.call(CASES + "exact_by_servers", n, (servers,), env=threads(n))
    for name, wanted in by_ddp.items():
        assert len(set(wanted)) == server_cases.STEPS
        for rank, (digests, own, version, staleness) in enumerate(seen[name] for seen in everyone):
            assert digests == (wanted if n == 1 or rank >= servers else None), f"{name}, rank {rank}"
            assert own == wanted[-1] and version == server_cases.STEPS
            assert staleness == {0: workers * server_cases.STEPS * servers}


def batches(steps):
    sampler = data.Sampler(plain.SAMPLES, cases.BATCH, seed=3)
    return [rows for epoch in range(20) for rows in sampler.epoch(epoch)][:steps]


def close(got, wanted, tolerance):
    for g, w in zip(got.values(), wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance)


@pytest.mark.parametrize("n, servers", [(3, 2), (5, 1), (5, 2)])
def test_sync_trains_like_plain_numpy(n, servers):
    _, wanted = plain.train(batches(40), lr=0.05, momentum=0.9)
    for got, _ in crews.call(CASES + "like_plain", n, (servers, 0.9)):
        close(got, wanted, 1e-12)


@pytest.mark.parametrize("n, servers", [(3, 1), (5, 2)])
def test_a_bound_of_0_is_bulk_synchronous(n, servers):
    """Without momentum, the pushes of a round, taken one by one, are their sum taken at once."""
    _, wanted = plain.train(batches(40), lr=0.05, momentum=0.0)
    workers = n - servers
    for got, staleness in crews.call(CASES + "like_plain", n, (servers, 0.0, "async", 0)):
        close(got, wanted, 1e-12)
        assert staleness == dict.fromkeys(range(workers), 40 * servers)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_worker_has_not_used_is_no_gradient(mode):
    """Each of two heads is used twice, by one worker at a time; the third rests, without weight decay."""
    for first, then in crews.call(CASES + "unused", 3, (mode,)):
        for name, p in first.items():
            for _ in range(0 if "head2" in name else 2):
                p = p - 0.1 * (1 + 0.5 * p)
            np.testing.assert_allclose(then[name], p, rtol=1e-14)


# ---------------------------------------------------------------- a slow worker, in virtual time

K, SLOW = 6, [1.0, 1.0, 1.0, 4.0]       # one of four workers takes four times as long; the run lasts 4·K


def test_async_makes_more_updates_than_sync_with_a_slow_worker():
    found = {mode: crews.call(CASES + "in_virtual_time", 5, (SLOW, 4.0 * K, mode)) for mode in ("sync", "async")}
    (history,), version, *_ = found["sync"][0]
    assert version == K and len(history) == 4 * K       # all wait for the slow one
    assert [push.time for push in history] == [4.0 * k + t for k in range(K) for t in SLOW]
    (history,), version, *_ = found["async"][0]
    assert version == len(history) == 3 * 4 * K + K     # 13/4 times the gradients, 13 times the updates
    assert [steps for *_, steps, _ in found["async"]] == [0, 4 * K, 4 * K, 4 * K, K]
    assert history == sorted(history, key=lambda p: (p.time, p.worker)) and history[-1].time == 4.0 * K
    for push in history:
        t = round(push.time)
        if push.worker == 4:        # since its last push: 4 of each other, those at the same time too
            wanted = 12
        elif t == 1:                # the first of its worker, which began with version 0
            wanted = push.worker - 1
        else:                       # one of each other fast one, and the slow one's if it came between
            wanted = 2 + (t % 4 == 1)
        assert push.staleness == wanted, push


@pytest.mark.parametrize("s", [0, 1, 3, 1000])
def test_the_bound_holds_fast_workers_back(s):
    everyone = crews.call(CASES + "in_virtual_time", 5, (SLOW, 4.0 * K, "async", s))
    (history,), version, *_ = everyone[0]
    assert Counter(push.worker for push in history) == {4: K} | dict.fromkeys((1, 2, 3), min(4 * K, K + s))
    clocks = Counter()
    for push in history:
        clocks[push.worker] += 1
        assert clocks[push.worker] - min(clocks[w] for w in (1, 2, 3, 4)) <= s + 1      # it was let go at s
    assert max(push.staleness for push in history) <= 3 * (2 * s + 1)
    if s == 0:
        assert [push.staleness for push in history] == [0, 1, 2, 3] * K


def test_virtual_time_repeats_itself_on_any_number_of_servers():
    """Steps of any length, in a run that no computer's speed has a say in."""
    random = np.random.default_rng(5)
    seconds = [random.exponential(1.0, 7).round(3).tolist() for _ in range(3)]
    runs = [crews.call(CASES + "in_virtual_time", 5, (seconds, 30.0, "async", 2, 2)) for _ in range(2)]
    (first, *_), (second, *_) = runs
    assert first[0] == second[0] and np.array_equal(first[3], second[3])
    (one, other), *_ = first
    assert one == other and len(one) > 40           # both servers have served in one order
    assert max(push.staleness for push in one) <= 2 * (2 * 2 + 1)


# ---------------------------------------------------------------- record and replay

def test_a_given_order_repeats_a_run_to_the_last_bit():
    """Two servers, three workers, whose pushes come as they do; then others are slow, and the order is given."""
    first = crews.call(CASES + "real_arrivals", 5, ([0.0, 0.002, 0.004],))
    assert len({digest for digest, *_ in first}) == 1
    digest, orders, staleness, _ = first[0]
    steps = -(-plain.SAMPLES // cases.BATCH)
    assert [Counter(order) for order in orders] == [dict.fromkeys((2, 3, 4), steps + 1)] * 2    # and one to leave
    again = crews.call(CASES + "real_arrivals", 5, ([0.003, 0.001, 0.0], orders))
    assert [seen[:3] for seen in again] == [(digest, orders, staleness)] * 5
    assert [seen[3] for seen in again] == [seen[3] for seen in first]
    turned = [[{2: 4, 3: 3, 4: 2}[worker] for worker in order] for order in orders]
    assert crews.call(CASES + "real_arrivals", 5, ([0.0] * 3, turned))[0][0] != digest


# ---------------------------------------------------------------- Downpour, bytes

@pytest.mark.parametrize("n", [1, 2])
def test_downpour_on_paper(n):
    """One worker: w is fetched every third step and moved by itself in between; sums of two gradients are pushed, and
    the thirteenth alone, when it leaves."""
    kept, s, copy, accrued, wanted = np.zeros(24), np.zeros(24), np.zeros(24), np.zeros(24), []
    for step in range(13):
        gradient = copy + np.arange(1, 25) + step
        accrued += gradient
        if (step + 1) % 2 == 0 or step == 12:
            s += accrued ** 2
            kept = kept - 0.3 * accrued / (np.sqrt(s) + 1e-10)
            accrued = np.zeros(24)
        copy = kept if (step + 1) % 3 == 0 else copy - 0.01 * gradient
        wanted.append(copy)
    everyone = crews.call(CASES + "downpour", n, (3, 2, 0.01, 13), env=threads(n))
    np.testing.assert_allclose(everyone[-1][0], wanted, rtol=1e-13)
    for _, final in everyone:
        np.testing.assert_allclose(final, kept, rtol=1e-13)


@pytest.mark.parametrize("servers, n_fetch, n_push", [(1, 1, 1), (2, 1, 1), (2, 4, 2)])
def test_bytes_are_the_closed_form(servers, n_fetch, n_push):
    everyone, steps = crews.call(CASES + "traffic", 5, (servers, 8, n_fetch, n_push)), 8
    padded, size = -(-61 * 53 // 16) * 16 + 64, 8       # two tensors, float64
    blocks = everyone[0][2]
    assert sum(hi - lo for lo, hi in blocks) == padded
    assert all(abs(hi - lo - padded / servers) <= 16 for lo, hi in blocks)
    workers = 5 - servers
    for rank, (sent, calls, _, is_worker) in enumerate(everyone):
        if is_worker:
            assert sent["send"] == size * padded * steps // n_push
            requests = servers * (len([k for k in range(1, steps + 1) if k % n_push == 0 or k % n_fetch == 0]) + 1)
            assert sent["envelope"] < 600 * (requests + 2) and 0 < calls["envelope"] - requests <= 3    # to the end
        else:
            lo, hi = blocks[rank]
            assert sent["send"] == workers * size * (hi - lo) * steps // n_fetch


# ---------------------------------------------------------------- a GPU

@pytest.mark.parametrize("settings", [("sync",), ("async", None, 3, 2, 0.01)], ids=str)
def test_a_model_on_a_gpu_has_the_bits_of_one_on_the_host(settings):
    """By one process; on the stand-in for CuPy."""
    def trained(device):
        model = server_cases.small_model(np.float32).to(device)
        with ParameterServer(model, server_cases.OPTIMIZERS["adam"], world_of_one(), 1, *settings) as ps:
            for batch in cases.loader_for(np.float32).epoch(0):
                ps.zero_grad()
                x, labels = (backend.to(values, device) for values in (batch.inputs, batch.labels))
                nn.cross_entropy(model(x), labels).backward()
                ps.step()
        return [p.cpu().numpy() for p in model.parameters()]
    with installed():
        for here, there in zip(trained("cpu"), trained("cuda"), strict=True):
            np.testing.assert_array_equal(here, there)


# ---------------------------------------------------------------- errors

@pytest.mark.parametrize(("settings", "words"), [
    ({"n_push": 1.5}, "n_push=1.5 must be"), ({"n_fetch": 2.5}, "n_fetch=2.5 and"), ({"servers": 0.5}, "servers=0.5"),
    ({"max_staleness": float("nan")}, "max_staleness=nan"), ({"local_lr": float("nan")}, "local_lr=nan"),
    ({"local_lr": -0.1}, "local_lr=-0.1"), ({"local_lr": float("inf")}, "local_lr=inf")], ids=str)
def test_settings_that_are_no_numbers_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ParameterServer(nn.Linear(3, 2), optim.SGD, world_of_one(), mode="async", **settings)


def test_misuse_is_named_on_every_rank():
    everyone = crews.call(CASES + "misuse", 3)
    for rank, said in enumerate(everyone):
        for name, words in {
                "model": ("ranks 0, 1: parameter 'w': float64 [24]", "rank 2: parameter 'w': float64 [25]"),
                "mode here": ("ranks 0, 1: mode='sync'", "rank 2: mode='async'"),
                "bound here": ("ranks 0, 1: max_staleness=None", "rank 2: max_staleness=1"),
                "all serve": ("servers=3 of 3 ranks",), "none serves": ("servers=0 of 3 ranks",),
                "no such mode": ("mode='hogwild'; one of sync, async",),
                "sync and max_staleness": ("max_staleness=1 is for",),
                "sync and n_fetch": ("n_fetch=2 is for",), "sync and n_push": ("n_push=3 is for",),
                "sync and local_lr": ("local_lr=0.5 is for",), "sync and orders": ("orders=[[1]] is for",),
                "n_push": ("n_push=0 must be at least 1",), "n_fetch": ("n_fetch=0 and n_push=1 must be at least 1",),
                "max_staleness": ("max_staleness=-1 at least 0",), "nothing to train": ("at least one; got []",),
                "orders": ("2 orders for 1 servers",),
                "too small": ("leave nothing for server",), "batch norm": ("1 BatchNorm", "LayerNorm"),
                "dtypes": ("float32", "float64"), "no optimizer": ("lr is -1.0",),
                "of norms": ("ParameterServer: LAMB makes an element's step of all of its parameter",),
                "of means": ("ParameterServer: Adafactor makes an element's step of all of its parameter",)}.items():
            assert said[name].startswith("ValueError: ") and all(word in said[name] for word in words), said[name]
        assert "in another one's block" in said["another block"]
        assert "its block has ended" in said["a second block"]
        if rank == 0:
            assert "rank 0 is a server, and step() is for the workers, ranks [1, 2]" in said["a server's step"]
        else:
            assert f"rank {rank} has a gradient of 'w' of which 1 of 24 values aren't finite, the first inf" \
                in said["not finite"]
            assert f"rank {rank} pushes float64[25], and this server keeps elements 0 to 31" in said["another shape"]
            assert "float32[24]" in said["another dtype"]
        assert said["and then"][0] == 2
        np.testing.assert_allclose(said["and then"][1], -0.2)
    assert roles(1, 1) == ([0], [0])
    with pytest.raises(ValueError, match="servers=2 of 1 ranks"):
        roles(1, 2)


def test_steps_are_counted_on_beyond_what_a_setting_of_8_bits_holds():
    with ParameterServer(server_cases.Vector(), server_cases.sgd(0.1), world_of_one(), mode="async", n_fetch=np.int8(3),
                         n_push=np.int8(2)) as ps:
        ps.steps = 129
        server_cases.push(ps, np.ones(24))
    assert ps.version == 1


@pytest.mark.parametrize("settings, words", [
    ({}, "a pull from the parameter servers"),
    ({"mode": "async", "n_fetch": 2, "local_lr": 0.1}, "ParameterServer.step")], ids=["pull", "local step"])
def test_a_step_before_backward_is_told(settings, words):
    model = server_cases.Vector()
    with ParameterServer(model, server_cases.sgd(0.1), world_of_one(), **settings) as ps:
        loss = mt.sum(model.w * model.w)
        loss.backward(retain_graph=True)
        ps.step()
        with pytest.raises(RuntimeError, match=words):
            loss.backward()


def test_in_sync_mode_all_take_equally_many_steps():
    server, first, second = crews.call(CASES + "uneven_in_sync", 3)
    assert server is None and first is None
    assert "worker 1 has left after 2 steps" in second and "equally many" in second


def test_nor_may_one_push_that_came_before_another_left():
    """In virtual time, where it is served after that."""
    shard = Shard(kept(), (0, 16), server_cases.sgd(1.0), [1, 2], "sync", None, True, None)
    ahead = shard.ask(request(2))
    assert shard.ask(request(1, pushes=False, leaves=True)).wait() == (0, 0.0, None)
    with pytest.raises(RuntimeError, match="worker 1 has left after 0 steps, and others go on"):
        ahead.wait()
    assert shard.version == 0 and shard.ask(request(2, pushes=False, leaves=True)).is_completed()


def test_an_optimizer_that_fails_is_heard_of_by_all_who_wait():
    server, *workers = crews.call(CASES + "failing_optimizer", 3)
    assert server is None and len(workers) == 2
    for note, in workers:
        assert note.startswith("It was raised on rank 0") and "optimizer.step = lambda: 1 / 0" in note


def test_a_server_that_fails_loses_its_own_part_of_a_push():
    """Three workers push ones twice; the second of two servers fails once."""
    everyone = crews.call(CASES + "fails_once", 5, (2,))
    assert sum(caught for caught, _ in everyone) == 1
    for _, w in everyone:
        np.testing.assert_array_equal(w, np.repeat([-6.0, -5.0], 16))


def test_who_leaves_the_block_by_an_error_tells_the_others():
    told, raised, other = crews.call(CASES + "left_by_an_error", 3)
    assert raised == ("KeyError", "'to go on'") and told == other
    assert told[0] == "RuntimeError" and "rank 1 has left 'rpc' by an error" in told[1]


def kept():
    """A server's pieces: one of a parameter of 16 elements."""
    return [(0, "w", mt.tensor(np.zeros(16), requires_grad=True))]


def request(worker, **options):
    gradient = np.ones(16) if options.pop("pushes", True) else None
    return Request(worker, 0.0, 0, gradient, frozenset(), False, **options)


@pytest.mark.parametrize("order, bound, words", [
    ([2, 2, 2], None, "request 2 is to be worker 2's, which has left"), ([2, 2], 0, "held back: [2]"),
    ([7], None, "request 0 is to be worker 7's, which has left, or is held back, or is none")])
def test_orders_of_another_run_are_refused(order, bound, words):
    """Worker 2 pushes and leaves; worker 1 has pushed before, but isn't served until it is its turn."""
    shard = Shard(kept(), (0, 16), server_cases.sgd(1.0), [1, 2, 3], "async", bound, False, order)
    waiting = shard.ask(request(1))
    shard.ask(request(2))
    if order[0] == 2 and bound is None:
        assert not waiting.is_completed()
        assert shard.ask(request(2, pushes=False, leaves=True)).wait() == (1, shard.time, None)
        assert 0 < shard.history[0].time < shard.time < 60      # seconds since it was made
    with pytest.raises(RuntimeError, match=re.escape(words)):
        waiting.wait()


KILLED = """
import os, signal
import numpy as np
from minitorch_dist import comm
from minitorch_dist.parallel.servers.parameter_server import ParameterServer
from tests.parallel.server_cases import Vector, push, sgd
with ParameterServer(Vector(), sgd(0.1), comm.world()) as ps:
    if ps.is_worker:
        push(ps, np.ones(24))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_waits_for_a_worker_that_was_killed_ends_with_a_message(tmp_path):
    (tmp_path / "program.py").write_text(KILLED)
    run = ranks.launch([tmp_path / "program.py"], 2, limit=20, env={"PYTHONPATH": str(ROOT)})
    assert not run.timed_out and run.returncode not in (0, None) and run.seconds < 10, run.report()
    said = run.launcher_stderr + run.stderr[0]      # the launcher sees it first, MPICH's or Open MPI's, or rank 0 does
    assert re.search("(?i)signal:? 9|EXIT CODE: 9|on 'rpc' for rank 1, which has died", said), run.report()
