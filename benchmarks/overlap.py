"""A transformer block on 2 ranks over a slow link: products that hide the messages, and products that wait for them.

    python benchmarks/overlap.py        # starts `mpirun -n 2` itself

Tensor and sequence parallelism, forward and backward, with tp_comm_overlap and without, over a simulated link
(comm/link.py): whoever waits for what such a link would still be carrying sleeps. Its bandwidth is told as h/p, the
seconds of a message beside those of the shortest product that hides one.

"on paper" begins with the same steps without a link. Without overlap it adds what all messages take; with overlap, of
each message what is left when the products between its posting and its arrival are made.
"""

from _harness import Report, named, one_thread, world_of

one_thread()

import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import ledger, nn  # noqa: E402
from minitorch_dist.comm.link import SimulatedLink  # noqa: E402
from minitorch_dist.parallel.tensor import tensor_parallel as tp  # noqa: E402

RANKS, LIMIT = 2, 900
BATCH, TIME, DIM, HEADS = 4, 128, 512, 8
MESSAGE = BATCH * TIME // RANKS * DIM * 4       # bytes: the activations of one rank's positions
RATIOS = (0.5, 1.0, 2.0, 4.0)                   # h/p
ROUNDS, STEPS = 20, 2
AIM, NEAR = 1.1, 0.15                           # times as fast at h = p; of what is said on paper


def program(world, overlap):
    """A step of a block in parts: forward, backward."""
    mt.manual_seed(0)
    block = nn.TransformerBlock(DIM, HEADS, causal=True)
    tp.parallelize_module(block, world, tp.plan_of(block), True, overlap)
    rng = np.random.default_rng(world.rank)
    x, u = (rng.standard_normal((BATCH, TIME // RANKS, DIM)).astype(np.float32) for _ in range(2))

    def step():
        leaf = mt.tensor(x, requires_grad=True)
        block(leaf).backward(mt.tensor(u))
        for p in block.parameters():
            p.grad = None
    return step


def turn(step, world):
    """Seconds per step of the slowest rank."""
    step()
    world.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    taken = np.array([(time.perf_counter() - start) / STEPS])
    world.all_reduce(taken, "max")
    return float(taken[0])


def hiding(step, world):
    """[seconds of the products between the posting and the arrival of each message of a step with overlap], medians,
    the mean of the ranks."""
    runs = []
    for _ in range(ROUNDS):
        with ledger.record(timeline=True) as book:
            step()
        products = [s for s in book.spans if s.name == "product"]
        runs.append([sum(p.end - p.begin for p in products if m.begin <= p.begin and p.end <= m.end)
                     for m in book.spans if m.name == "isend"])
    found = np.array([statistics.median(run) for run in zip(*runs, strict=True)])
    world.all_reduce(found, "mean")
    return found.tolist()


def measure(world, steps, bandwidths):
    """{(overlap, h/p): (best, median) seconds per step}, in turns; h/p None: without a link."""
    turns = {(overlap, ratio): [] for overlap in steps for ratio in (None, *bandwidths)}
    order = random.Random(0)        # the same on all ranks
    for _ in range(ROUNDS):
        for overlap, ratio in order.sample(list(turns), len(turns)):
            if ratio is not None:
                world.hooks.append(SimulatedLink(0.0, bandwidths[ratio]))
            turns[overlap, ratio].append(turn(steps[overlap], world))
            if ratio is not None:
                world.hooks.pop()
    return {what: (min(times), statistics.median(times)) for what, times in turns.items()}


def report_on(report, seconds, hidden, sent, bandwidths):
    """The table, and the aims."""
    rows, best = [], {what: times[0] for what, times in seconds.items()}
    for ratio in (None, *bandwidths):
        paper = {False: best[False, None], True: best[True, None]}
        if ratio is not None:
            small = (sent - len(hidden) * MESSAGE) / bandwidths[ratio]      # sums of norms' and biases' gradients
            h = MESSAGE / bandwidths[ratio]
            paper[False] += sent / bandwidths[ratio]
            paper[True] += small + sum(max(0.0, h - w) for w in hidden)
        row = {"h/p": "no link" if ratio is None else f"{ratio:g}",
               "MB/s": "" if ratio is None else f"{bandwidths[ratio] / 1e6:,.0f}"}
        for overlap, name in ((False, "waiting"), (True, "hiding")):
            row |= {f"{name}, ms": f"{1e3 * best[overlap, ratio]:.1f}",
                    f"{name}, median": f"{1e3 * seconds[overlap, ratio][1]:.1f}",
                    f"{name}, on paper": "" if ratio is None else f"{1e3 * paper[overlap]:.1f}"}
        rows.append(row | {"speed-up": f"{best[False, ratio] / best[True, ratio]:.2f}",
                           "on paper": f"{paper[False] / paper[True]:.2f}"})
        if ratio == 1.0:
            got = best[False, ratio] / best[True, ratio]
            report.aim("hiding against waiting, at h = p", f"≥ {AIM} ×", f"{got:.2f} ×", got >= AIM)
            off = abs(best[True, ratio] / paper[True] - 1)
            report.aim("a step that hides, at h = p, off what is said on paper", f"≤ {NEAR:.0%}", f"{off:.0%}",
                       off <= NEAR)
    report.table(f"a block's step: d = {DIM}, T = {TIME}, batch {BATCH}, float32, {RANKS} ranks; "
                 f"{len(hidden)} messages of {MESSAGE / 1e6:.2f} MB", rows)


def main():
    world = world_of(__file__, RANKS, LIMIT)
    if world is None:
        return
    report = Report("overlap", "Messages behind products (`overlap.py`)")
    steps = {overlap: program(world, overlap) for overlap in (False, True)}
    for step in steps.values():
        step()
    hidden = hiding(steps[True], world)
    with ledger.record() as book:
        steps[True]()
    bandwidths = {ratio: MESSAGE / (ratio * min(hidden)) for ratio in RATIOS}
    seconds = measure(world, steps, bandwidths)
    report_on(report, seconds, hidden, book.total_bytes_sent(), bandwidths)
    if world.rank == 0:
        report.save()


if __name__ == "__main__":
    named(__doc__)
    main()
