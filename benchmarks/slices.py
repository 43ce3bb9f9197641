"""A pipeline of two ranks that has few long sequences: whole micro-batches, and these in slices, beside torch's 1F1B.

    python benchmarks/slices.py         # starts `mpirun -n 2` itself

Both passes of a GPT's blocks, a half on each rank, on one BLAS thread each. "on paper" is what the schedule's clock
makes of one rank's seconds for all of the work, half of them on each rank: where no messages and no calls of NumPy took
time, and slices took equally long and had as much to do. They have less: a whole sequence's scores are made with all
keys and half of them hidden, a slice's with the keys up to its end. "at once" is what the fullest rank's tape holds at
most, by the ledger; of torch it isn't known. Everything is measured in turns in one job; the time of a turn is that of
the slower rank.
"""

from _harness import Report, installed, join_gloo, named, one_thread, world_of

one_thread()

import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import _models  # noqa: E402
import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import data, ledger, nn  # noqa: E402
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, lengths_of_equal_work, schedule_of  # noqa: E402
from minitorch_dist.parallel.pipelines.schedules import play  # noqa: E402

RANKS, LIMIT = 2, 900
SIZES = {"vocabulary": 65, "length": 1024, "layers": 8, "heads": 4, "dim": 128}
BATCH = MICRO_BATCHES = 2
ROUNDS = 20
WAYS = {    # name: (slices, whether they are of equal work)
    "whole micro-batches": (1, False), "2 slices": (2, True), "4 slices, equal lengths": (4, False),
    "4 slices": (4, True), "8 slices": (8, True)}
AIMS = {"whole micro-batches": 1.25, "torch 1F1B, whole": 1.0}      # 4 slices against these


def gpt():
    """The model, the same everywhere."""
    mt.manual_seed(0)
    return nn.GPT(**SIZES)


def batch_of():
    """A Loader's batch."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (BATCH, SIZES["length"] + 1))
    return next(data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, shuffle=False).epoch(0))


def ours(axis, slices, by_work):
    """(a step, the Played of its schedule) on this rank."""
    stage, batch = cut_gpt(gpt(), axis.size)[axis.rank], batch_of()
    schedule = schedule_of("1f1b", axis.size, MICRO_BATCHES, slices=slices)
    lengths = lengths_of_equal_work(SIZES["length"], slices, 6 * SIZES["dim"]) if by_work else None
    pipeline = Pipeline([stage], axis, schedule, lengths)

    def step():
        stage.zero_grad()
        return pipeline.run(batch, loss_sum, seed=0, step=0, units=SIZES["length"])
    return step, play(schedule)


def loss_sum(logits, labels):
    """Of a piece."""
    return nn.cross_entropy(logits, labels, reduction="sum")


def theirs(world):
    """torch's Schedule1F1B of the same stages, over gloo."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    torch.set_num_threads(1)
    functional, batch = torch.nn.functional, batch_of()
    whole = _models._gpt(torch, functional, **SIZES)
    whole.load_state_dict({name: torch.from_numpy(value) for name, value in gpt().state_dict().items()})
    half = SIZES["layers"] // 2

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.position, self.blocks = whole.embed, whole.position, whole.blocks[:half]

        def forward(self, tokens):
            return self.blocks(self.embed(tokens) + self.position.weight[:tokens.shape[1]])

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.blocks, self.norm = whole.embed, whole.blocks[half:], whole.norm

        def forward(self, x):
            return functional.linear(self.norm(self.blocks(x)), self.embed.weight)
    module = Last() if world.rank else First()
    stage = PipelineStage(module, world.rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda y, labels: functional.cross_entropy(
        y.flatten(0, 1), labels.flatten()))
    x, labels = (torch.from_numpy(np.ascontiguousarray(a)) for a in (batch.inputs, batch.labels))

    def step():
        module.zero_grad()
        losses = []
        schedule.step(target=labels, losses=losses) if world.rank else schedule.step(x)
        return float(sum(losses) / len(losses)) if losses else None
    return step


def turn(step, world):
    """Seconds of the slower rank's step."""
    world.barrier()
    start = time.perf_counter()
    step()
    taken = np.array([time.perf_counter() - start])
    world.all_reduce(taken, "max")
    return float(taken[0])


def measure(steps, world):
    """{name: (best, median) seconds of a step}, in turns."""
    turns, order = {name: [] for name in steps}, random.Random(0)       # the same on all ranks
    for round_ in range(ROUNDS + 1):
        for name in order.sample(list(steps), len(steps)):
            taken = turn(steps[name], world)
            if round_:      # the first is for warming up
                turns[name].append(taken)
    return {name: (min(times), statistics.median(times)) for name, times in turns.items()}


def main():
    world = world_of(__file__, RANKS, LIMIT)
    if world is None:
        return
    report = Report("slices", "Long sequences in a pipeline, in slices (`slices.py`)")
    alone, _ = ours(world.split(world.rank), 1, False)
    made = {name: ours(world, *way) for name, way in WAYS.items()}
    steps = {name: step for name, (step, _) in made.items()}
    if installed(report.skipped, "torch"):
        join_gloo(world)
        steps["torch 1F1B, whole"] = theirs(world)
    held, losses = {}, {}
    for name, step in steps.items():
        with ledger.record(memory=True) as book:
            loss = step()
        held[name] = max(world.all_gather_object(book.peak["activation"]))
        losses[name] = world.broadcast_object(loss, src=world.size - 1)
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    seconds = measure(steps | {"one rank": alone}, world)   # both ranks at once: each with half of the machine
    work, rows = seconds["one rank"][0] / RANKS, []
    for name in steps:
        best, median = seconds[name]
        bubble = made[name][1].bubble if name in made else made["whole micro-batches"][1].bubble
        ours_ = name in made
        rows.append({"1F1B of 2 ranks": name, "bubble": f"{100 * bubble:.0f} %", "ms": f"{1e3 * best:.0f}",
                     "median": f"{1e3 * median:.0f}", "on paper": f"{1e3 * work / (1 - bubble):.0f}" if ours_ else "",
                     "times as fast": f"{seconds['whole micro-batches'][0] / best:.2f}",
                     "MB at once": f"{held[name] / 1e6:.1f}" if ours_ else ""})
    report.table(f"both passes of a GPT: {SIZES['layers']} blocks of {SIZES['dim']}, {SIZES['heads']} heads, T = "
                 f"{SIZES['length']:,}, {MICRO_BATCHES} micro-batches of {BATCH // MICRO_BATCHES}, float32, {RANKS} "
                 f"ranks; one rank alone: {1e3 * seconds['one rank'][0]:.0f} ms", rows)
    for name, aim in AIMS.items():
        if name in seconds:
            got = seconds[name][0] / seconds["4 slices"][0]
            report.aim(f"4 slices against {name}", f"≥ {aim} ×", f"{got:.2f} ×", got >= aim)
    if world.rank == 0:
        report.save()


if __name__ == "__main__":
    named(__doc__)
    main()
