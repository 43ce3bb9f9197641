"""Ranks that wait for each other in a circle, in different communicators, are told within seconds; nobody else is."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from minitorch_dist.comm import circle
from minitorch_dist.comm.state import LATE, MESSAGE, Call, state
from minitorch_dist.testing import ranks

from ..quick import asked

LIMIT = 30
HEAD = """
import threading, time
import numpy as np
from minitorch_dist import comm, nn
from minitorch_dist.comm import guard
from minitorch_dist.parallel import DistributedDataParallel
guard.CIRCLE_SECONDS = 0.4
world, x = comm.world(), np.ones(3)
rank = world.rank
world.barrier()
"""
DATA_PARALLEL = """
m = DistributedDataParallel(nn.Linear(4, 2), comm.DeviceMesh(dp=-1)["dp"])
for step in range(3):
    m.zero_grad()
    (m(np.ones((2, 4), np.float32)) ** 2).sum().backward()
    if step == 1 and rank == 0:
        world.all_reduce(x)
"""
THREE = """
pairs = [world.split(0 if rank in (i, (i + 1) % 3) else None, name=f"pair{i}") for i in range(3)]
pairs[rank].all_reduce(x)       # with the next rank, which waits for the one after it
"""
WORLD_AND_TP = """
mesh = comm.DeviceMesh(dp=2, tp=2)
(world if rank == 2 else mesh["tp"]).all_reduce(x)
world.barrier()
"""
WINDOWS = """
mesh = comm.DeviceMesh(dp=-1)
a, b = world.empty(5, "f4"), mesh["dp"].empty(5, "f4")
for _ in range(3):
    world.all_reduce(a), mesh["dp"].all_reduce(b)
world.all_reduce(a) if rank else mesh["dp"].all_reduce(b)
"""
RECV = "world.all_reduce(x) if rank == 0 else world.recv(x, 0, tag=7)"
SECOND_OF_TWO = """
group = world.split(0)
if rank == 0:
    group.isend(x, 1, tag=3)
    group.isend(x, 1, tag=4)
    world.barrier()
else:
    works = [group.irecv(np.empty(3), 0, tag) for tag in (3, 4, 3)]
    works[2].wait()
"""
EACH_OTHERS = "world.recv(x, 1 - rank)"

# what: (ranks, nodes, program, {rank: what it says})
CIRCLES = {
    "data parallelism, and the world": (2, 1, DATA_PARALLEL, {
        0: ("all_reduce(float64[3]) on 'world' for rank 1, which hasn't called it", "world.all_reduce(x)"),
        1: ("on 'dp' for rank 0, which hasn't called it", ".sum().backward()")}),
    "three pairs": (3, 1, THREE, {
        i: (f"on 'pair{i}' for rank {(i + 1) % 3}, which hasn't called it", "pairs[rank].all_reduce(x)")
        for i in range(3)}),
    "the world and tensor parallelism": (4, 1, WORLD_AND_TP, {
        2: ("on 'world' for rank 3, which hasn't called it",), 3: ("on 'tp' for rank 2, which",)}),
    "on one of two nodes": (4, 2, WORLD_AND_TP, {
        2: ("on 'world' for rank 3, which hasn't called it",), 3: ("on 'tp' for rank 2, which hasn't",)}),
    "windows": (2, 1, WINDOWS, {0: ("on 'dp' for rank 1",), 1: ("on 'world' for rank 0",)}),
    "a message, and a collective": (2, 1, RECV, {
        0: ("on 'world' for rank 1, which hasn't called it",),
        1: ("recv(float64[3], peer 0) on 'world' for rank 0, which hasn't sent it", "world.recv(x, 0, tag=7)")}),
    "the second message of two": (2, 1, SECOND_OF_TWO, {
        1: ("irecv(float64[3], peer 0) on 'world/0' for rank 0, which hasn't sent it", "works[2].wait()")}),
    "messages": (2, 1, EACH_OTHERS, {
        i: (f"recv(float64[3], peer {1 - i}) on 'world' for rank {1 - i}, which hasn't sent it",) for i in range(2)}),
}
LATE_COMER = """
mesh = comm.DeviceMesh(dp=2, tp=2)
time.sleep(2 * (rank == 3))
mesh["tp"].all_reduce(x)
mesh["dp"].all_reduce(x)
world.all_reduce(x)
"""
POSTED = """
pair = world.split(0)
y = np.ones(3)
if rank == 0:
    works = [world.all_reduce(x, async_op=True), pair.all_reduce(y, async_op=True)]
else:
    works = [pair.all_reduce(y, async_op=True), world.all_reduce(x, async_op=True)]
    time.sleep(1.5)
for work in works[::-1]:
    work.wait()
assert x[0] == y[0] == 2
"""
COMPUTES = """
pair = world.split(0)
if rank == 0:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        np.ones((100, 100)) @ np.ones((100, 100))
pair.all_reduce(x)
world.all_reduce(x)
"""
# Rank 0 has told that it waits for rank 1, and goes on to compute where its watchdog can't tell otherwise.
HOLDS_PYTHONS_LOCK = """
pair = world.split(0)
time.sleep(1 * (rank == 1))
pair.barrier()
if rank == 0:
    sum(range(150_000_000))
world.barrier()
"""
TIMES_OUT = """
pair = world.split(0)
if rank == 0:
    work = world.all_reduce(x, async_op=True)
    try:
        work.wait(1.5)
    except TimeoutError:
        pair.barrier()
        work.wait()
else:
    pair.barrier()
    world.all_reduce(x, async_op=True).wait()
"""
ANOTHER_THREAD = """
pair = world.split(0)
def send():
    pair.send(x, 1)
    time.sleep(2)
    pair.send(x, 1)
if rank == 0:
    threading.Thread(target=send).start()
    time.sleep(0.3)
    world.barrier()
else:
    pair.recv(x, 0)
    pair.recv(x, 0)
    world.barrier()
"""
SERVES = """
pair = world.split(0)
if rank == 1:       # from whom the message comes, rank 2, nobody can know
    work = pair.all_reduce(x, async_op=True)
    pair.recv_any()
elif rank == 2:
    time.sleep(2)
    pair.isend_parts([x.view(np.uint8)], 1)
world.barrier()
(work if rank == 1 else pair.all_reduce(x, async_op=True)).wait()
"""
NO_CIRCLES = {"comes late": (4, LATE_COMER), "posts in another order": (2, POSTED), "computes": (2, COMPUTES),
              "holds Python's lock": (2, HOLDS_PYTHONS_LOCK), "gives up waiting": (2, TIMES_OUT),
              "has another thread that calls": (2, ANOTHER_THREAD), "takes messages from anybody": (3, SERVES)}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """{what: its Run} of those that are tested, three at a time, for most of them wait."""
    folder = tmp_path_factory.mktemp("programs")

    def run(what):
        n, nodes, program, _ = CIRCLES.get(what) or (NO_CIRCLES[what][0], 1, NO_CIRCLES[what][1], None)
        path = folder / f"{what.replace(' ', '_')}.py"
        path.write_text(HEAD + program)
        return ranks.launch([path], n, LIMIT, env={"MINITORCH_NODES": str(nodes)})
    tested = [what for what, in asked(request, "what")]
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(tested, pool.map(run, tested), strict=True))


@pytest.mark.parametrize("what", CIRCLES)
def test_a_circle_is_told(runs, what):
    run = runs[what]
    assert not run.timed_out and run.returncode == 1, run.report()
    for rank, words in CIRCLES[what][3].items():
        assert "wait for each other in a circle" in run.stderr[rank], run.report()
        assert all(word in run.stderr[rank] for word in words), (words, run.report())


@pytest.mark.parametrize("what", NO_CIRCLES)
def test_what_is_none_goes_on(runs, what):
    run = runs[what].check()
    assert "".join(run.stderr) == "", run.report()


def test_a_circle_through_two_nodes_ends_at_the_stall_limit(tmp_path):
    (tmp_path / "program.py").write_text(HEAD + RECV)
    run = ranks.launch([tmp_path / "program.py"], 2, LIMIT,
                       env={"MINITORCH_NODES": "2", "MINITORCH_STALL_SECONDS": "3"})
    assert run.returncode == 1 and "the stall limit of 3 s" in "".join(run.stderr), run.report()
    assert "wait for each other" not in "".join(run.stderr)


# ---------------------------------------------------------------- what is certain, look by look

@pytest.fixture
def node(monkeypatch):
    """(function that has rank i look at its call number `calls`, in which it waits; what each has sent), of two ranks
    in this one process."""
    lines = {rank: memoryview(bytearray(circle.line_bytes(2))).cast("Q") for rank in range(2)}
    waits = [circle.Waits(rank, lines) for rank in range(2)]
    sent = [{}, {}]
    for name, value in (("groups", {9}), ("call", "any"), ("threads", set()), ("turn", None), ("calls", 0)):
        monkeypatch.setattr(state, name, value)

    def look(rank, awaited, calls=5, now=None, number=1):
        monkeypatch.setattr(state, "sent", sent[rank])
        monkeypatch.setattr(state, "calls", calls if now is None else now)
        call = SimpleNamespace(awaited=lambda: awaited, communicator=SimpleNamespace(token=9), tag=2, number=number)
        return waits[rank].circle(calls, call)
    return look, sent


def test_both_must_have_looked_twice_since(node):
    look, _ = node
    for _ in range(5):
        assert look(0, {1: LATE}) == []
    assert look(1, {0: LATE}) == []         # the first that sees a circle
    assert look(1, {0: LATE}) == look(1, {0: LATE}) == []       # rank 0 hasn't looked again
    assert look(0, {1: LATE}) == look(0, {1: LATE}) == []
    assert look(1, {0: LATE}) == [1, 0]
    assert look(0, {1: LATE}) == []         # since rank 0 has seen it, rank 1 has looked once
    assert look(1, {0: LATE}) == [1, 0] and look(0, {1: LATE}) == [0, 1]


def test_who_goes_on_to_another_call_is_in_no_circle(node):
    look, _ = node
    for calls in range(1, 9):
        assert look(0, {1: LATE}, calls) == look(1, {0: LATE}) == []
    for _ in range(5):
        assert look(0, {1: LATE}, 9, now=10) == look(1, {0: LATE}) == []    # it leaves while it is looked at


def test_a_message_that_was_sent_is_not_waited_for(node):
    look, sent = node
    sent[1][9, 0, 2] = 1
    for _ in range(5):
        assert look(0, {1: MESSAGE}, number=1) == look(1, {0: LATE}) == []
    for _ in range(5):
        found = look(0, {1: MESSAGE}, 6, number=2), look(1, {0: LATE})
    assert found == ([0, 1], [1, 0])
    sent[1][9, 0, 2] = 2
    for _ in range(3):
        found = look(0, {1: MESSAGE}, 6, number=2), look(1, {0: LATE})
    assert found == ([], [])


def test_nothing_is_said_of_what_may_end_by_itself():
    group = SimpleNamespace(token=9, world_ranks=[0, 1], late=lambda number: [1])
    assert Call(group, "all_reduce").awaited() == {1: LATE}
    assert Call(group, "all_reduce", number=0).awaited() == Call(group, "send", None, 1, 0).awaited() == {}
    assert Call(group, "recv", None, 1, 1, 0).awaited() == {1: MESSAGE}
    assert Call(SimpleNamespace(token=0), "recv", None, 1, 1, 0).awaited() == {}


def test_a_thread_beside_that_has_called(monkeypatch):
    monkeypatch.setattr(state, "thread", 1)
    monkeypatch.setattr(state, "threads", {1, threading.get_ident()})
    assert circle.others_call()
    monkeypatch.setattr(state, "turn", 1)
    assert not circle.others_call()
