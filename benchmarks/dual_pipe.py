"""DualPipeV beside another rank that shares the experts, over a slow link: passes in turns, and one after the other.

    python benchmarks/dual_pipe.py      # starts `mpirun -n 2` itself

Two blocks with experts, a stage each, of which both ranks have half of the experts: all messages are all-to-alls. A
simulated link (comm/link.py) carries them: whoever waits for what it would still be carrying sleeps. Its bandwidth is
told as h/c, the seconds of all messages of a step beside those of all computing. "on paper" adds to a step without a
link what all messages take; and, in turns, what those that aren't hidden take, if each combined step hid the shorter of
its two halves' messages and products.
"""

from _harness import Report, named, one_thread, world_of

one_thread()

import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import data, ledger, nn  # noqa: E402
from minitorch_dist.comm.link import SimulatedLink  # noqa: E402
from minitorch_dist.parallel.experts import moe  # noqa: E402
from minitorch_dist.parallel.pipelines import Pipeline  # noqa: E402
from minitorch_dist.parallel.pipelines.schedule_dual import dual_pipe_v  # noqa: E402
from minitorch_dist.parallel.pipelines.schedule_steps import Step, combined  # noqa: E402
from minitorch_dist.parallel.tensor import parallelize_module  # noqa: E402

RANKS, LIMIT = 2, 900
MICRO_BATCHES, ROWS, TIME, DIM, HEADS, EXPERTS = 6, 2, 64, 128, 4, 4
RATIOS = (0.25, 0.5, 1.0)       # h/c
ROUNDS = 20
AIM = 1.2                       # times as fast at h = c/2


class Block(nn.TransformerBlock):
    """Without the balance loss, which nothing is trained for here: one tensor in, one out."""

    def forward(self, x):
        return super().forward(x)[0]


def program(world, axis, apart):
    """A step of the pipeline, both passes of all micro-batches."""
    mt.manual_seed(0)
    stages = [nn.Sequential(Block(DIM, HEADS, causal=True, moe={"experts": EXPERTS})) for _ in range(2)]
    for stage in stages:
        parallelize_module(stage, axis, moe.plan_of(stage))
        for _, experts in [(name, m) for name, m in stage.named_modules() if isinstance(m, moe.ExpertParallel)]:
            experts.summed = True       # each rank's gradients stay its own: nobody trains
    schedule = dual_pipe_v(1, MICRO_BATCHES)
    if apart:
        schedule = [[Step(*step) for step in row] for row in schedule]
    pipeline = Pipeline(stages, world.split(world.rank), schedule)
    rng = np.random.default_rng(world.rank)
    x, u = rng.standard_normal((2, MICRO_BATCHES * ROWS, TIME, DIM)).astype(np.float32)
    batch = next(iter(data.Loader(x, u, len(x)).epoch(0)))

    def step():
        pipeline.run(batch, lambda y, u: mt.sum(y * u), seed=0, step=0)
        for stage in stages:
            stage.zero_grad()
    return step


def turn(step, world):
    """Seconds of the slowest rank's step."""
    step()
    world.barrier()
    start = time.perf_counter()
    step()
    taken = np.array([time.perf_counter() - start])
    world.all_reduce(taken, "max")
    return float(taken[0])


def measure(world, axis, steps, bandwidths):
    """{(apart, h/c): (best, median) seconds of a step}, in turns; h/c None: without a link."""
    turns = {(apart, ratio): [] for apart in steps for ratio in (None, *bandwidths)}
    order = random.Random(0)        # the same on all ranks
    for _ in range(ROUNDS):
        for apart, ratio in order.sample(list(turns), len(turns)):
            if ratio is not None:
                axis.hooks.append(SimulatedLink(0.0, bandwidths[ratio]))
            turns[apart, ratio].append(turn(steps[apart], world))
            if ratio is not None:
                axis.hooks.pop()
    return {what: (min(times), statistics.median(times)) for what, times in turns.items()}


def report_on(report, seconds, sent, bandwidths):
    """The table, and the aim."""
    best, rows = {what: times[0] for what, times in seconds.items()}, []
    share = 3 * sum(len(steps) > 1 for steps in combined(dual_pipe_v(1, MICRO_BATCHES)[0])) / (6 * MICRO_BATCHES)
    for ratio in (None, *bandwidths):
        h = 0.0 if ratio is None else sent / bandwidths[ratio]
        paper = {True: best[True, None] + h, False: best[False, None] + h - share * min(h, best[False, None])}
        row = {"h/c": "no link" if ratio is None else f"{ratio:g}",
               "MB/s": "" if ratio is None else f"{bandwidths[ratio] / 1e6:,.0f}"}
        for apart, name in ((True, "one after the other"), (False, "in turns")):
            row |= {f"{name}, ms": f"{1e3 * best[apart, ratio]:.1f}",
                    f"{name}, median": f"{1e3 * seconds[apart, ratio][1]:.1f}",
                    f"{name}, on paper": "" if ratio is None else f"{1e3 * paper[apart]:.1f}"}
        rows.append(row | {"speed-up": f"{best[True, ratio] / best[False, ratio]:.2f}",
                           "on paper": f"{paper[True] / paper[False]:.2f}"})
        if ratio == 0.5:
            got = best[True, ratio] / best[False, ratio]
            report.aim("in turns against one after the other, at h = c/2", f"≥ {AIM} ×", f"{got:.2f} ×", got >= AIM)
    report.table(f"a step of two blocks: d = {DIM}, T = {TIME}, {EXPERTS} experts, {MICRO_BATCHES} micro-batches of "
                 f"{ROWS}, float32, {RANKS} ranks; {sent / 1e6:.1f} MB sent per rank", rows)


def main():
    world = world_of(__file__, RANKS, LIMIT)
    if world is None:
        return
    report, axis = Report("dual_pipe", "Passes in turns (`dual_pipe.py`)"), world.split(0, name="ep")
    steps = {apart: program(world, axis, apart) for apart in (True, False)}
    with ledger.record() as book:
        steps[True]()
    compute = min(turn(steps[True], world) for _ in range(3))
    bandwidths = {ratio: book.total_bytes_sent() / (ratio * compute) for ratio in RATIOS}
    report_on(report, measure(world, axis, steps, bandwidths), book.total_bytes_sent(), bandwidths)
    if world.rank == 0:
        report.save()


if __name__ == "__main__":
    named(__doc__)
    main()
