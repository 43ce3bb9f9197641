"""What the ranks do in test_timeline.py: a network whose layers take simulated seconds, over a simulated link."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel import DistributedDataParallel

LAYERS, WIDTH = 5, 64               # weights of 64 × 64 float32: 16 KiB, one bucket each
BUCKET_ELEMENTS = 2 * 4096          # as many, and the count of users behind them, to the next block
FORWARD = 0.125                     # seconds of a layer, exact in binary


def network(clock, backward):
    """A stack of layers that take FORWARD and `backward` seconds each."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        layer.register_forward_hook(lambda *_: clock.sleep(FORWARD))
        layer.weight.register_post_accumulate_grad_hook(lambda t: clock.sleep(backward))
    return nn.Sequential(*layers)


def simulated_step(backward, latency, bandwidth, bucket_cap_mb):
    """The second step's (seconds in all, seconds of the backward pass and its waits, Timeline.seconds, spans)."""
    world, clock = comm.world(), VirtualClock()
    with clock.running():
        model = DistributedDataParallel(network(clock, backward), world, bucket_cap_mb, bucket_cap_mb)
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step():
            begin = clock()
            optimizer.zero_grad()
            loss = model(mt.tensor(np.ones((2, WIDTH), np.float32))).sum()
            forward = clock()
            loss.backward()
            optimizer.step()
            return clock() - begin, clock() - forward
        step()          # cuts the buckets anew
        world.hooks.append(SimulatedLink(latency, bandwidth, clock))
        with mt.trace(world) as timeline:
            taken = step()
        world.hooks.pop()
    return *taken, timeline.seconds(world.rank), timeline.spans


def traced(folder):
    """Two real steps; rank 0 writes the trace and the picture. All ranks' spans."""
    world = comm.world()
    mt.manual_seed(0)
    model = DistributedDataParallel(nn.mlp([40, 30], 0.0, np.dtype(np.float32)), world, bucket_cap_mb=1e-6)
    optimizer = optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(mt.tensor(np.ones((4, 784), np.float32))).sum().backward()
        optimizer.step()
    step()
    with mt.trace() as timeline:
        step()
        step()
        world.barrier()
    if world.rank == 0:
        timeline.save(f"{folder}/deeper/trace.json")
        mt.viz.timeline(timeline, f"{folder}/deeper/timeline.png")
    return timeline.spans, str(timeline)


def broken():
    """A block that raises: nobody gathers, nobody hangs."""
    try:
        with mt.trace(comm.world()) as timeline:
            raise KeyError("inside")
    except KeyError:
        return timeline.spans


def charges():
    """{operation: (simulated seconds, latencies and bytes by the ledger)} over a link of one byte per second."""
    world, n, found = comm.world(), comm.world().size, {}
    small, large = (np.ones(12, np.float32) for _ in range(2)), np.ones(12 * n, np.float32)
    x, y = small
    me = world.rank
    programs = {
        "all_reduce": lambda: world.all_reduce(x), "exact": lambda: n & (n - 1) or world.all_reduce(x, exact=True),
        "ring": lambda: world.all_reduce(x, algorithm="ring"), "broadcast": lambda: world.broadcast(x, 1),
        "all_gather": lambda: world.all_gather(large, x), "reduce_scatter": lambda: world.reduce_scatter(x, large),
        "gather": lambda: world.gather(large if me == 0 else None, x), "reduce": lambda: world.reduce(x, 1),
        "scatter": lambda: world.scatter(x, large if me == 0 else None), "all_to_all": lambda: world.all_to_all(
            np.empty_like(large), large),
        "messages": lambda: [w.wait() for w in (world.isend(x, (me + 1) % n), world.irecv(y, (me - 1) % n))],
    }
    for name, run in programs.items():
        clock = VirtualClock()
        world.hooks.append(SimulatedLink(1.0, 1.0, clock))
        with ledger.record() as book:
            run()
        world.hooks.pop()
        found[name] = clock(), sum(book.calls.values()) + book.total_bytes_sent()
    return found
