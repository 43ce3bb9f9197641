"""Who works in a mixture of experts: loads over steps, left alone, with an auxiliary loss, and with biases instead.

    mpirun -n 2 python examples/experts.py                  # two-digit addition; a minute
    python examples/experts.py --experts 16 --top-k 4 --shared 1
    python examples/experts.py --out runs/experts           # MaxVio over steps as a picture

The same small GPT learns the same batches in each way. MaxVio is by how much the busiest expert of a layer exceeds the
mean, as a part of it (the mean over the last tenth of the steps, and over the layers); "over" is the share of choices
beyond an expert's capacity then, which are dropped where a batch is routed as one. The losses are the task's alone, and
after so few steps they differ more from seed to seed than from way to way.

Source: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts".
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import minitorch_dist as mt
from minitorch_dist import comm, divergence, nn, optim, program, training
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.data import Loader
from minitorch_dist.data.text import addition
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.experts import expert_bias
from minitorch_dist.viz.figure import drawn

RANGES = {program.AT_LEAST_1: ("steps", "batch_size", "experts", "top_k"), program.POSITIVE: ("lr", "speed"),
          program.AT_LEAST_0: ("shared", "balance", "seed")}
DIGITS = 3          # of a sum: characters that are to be answered


class Result(NamedTuple):
    """What came of a way: MaxVio of each step, the mean over the layers; choices over capacity at the end, percent; the
    loss on unseen sums; the last step's Loads."""

    violations: list
    over: float
    loss: float
    loads: expert_bias.Loads


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="experts.py", description=__doc__)
    p.add_argument("--experts", type=int, default=8, help="of each of the two layers")
    p.add_argument("--top-k", type=int, default=2, help="of these for each token")
    p.add_argument("--shared", type=int, default=0, help="experts beside, which every token goes through")
    p.add_argument("--score", choices=["sigmoid", "softmax"], default="sigmoid", help="what logits become")
    p.add_argument("--capacity-factor", type=float, default=1.25, help="places, as a multiple of the mean load")
    p.add_argument("--balance", type=float, default=0.01, help="weight of the auxiliary loss")
    p.add_argument("--speed", type=float, default=0.005, help="how far a bias moves in a step")
    p.add_argument("--steps", type=int, default=300, help="optimizer steps of each way")
    p.add_argument("--batch-size", type=int, default=64, help="sums per step over all ranks")
    p.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, help="folder for the picture")
    p.add_checks()
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    return args


def ways(args):
    """{name: (weight of the auxiliary loss, speed of the biases)}; speed 0 only counts."""
    return {"left alone": (0.0, 0.0), f"loss, {args.balance:g}": (args.balance, 0.0), "biases": (0.0, args.speed)}


def loss_sum(model, shard):
    """The sum over a shard's answers, with the auxiliary loss of each."""
    logits, aux = model(shard.inputs)
    return nn.cross_entropy(logits, shard.labels, reduction="sum") + DIGITS * len(shard.labels) * aux


def build(args, problems, balance):
    """The model, alike in all ways but for the weight."""
    mt.manual_seed(args.seed)
    return nn.GPT(len(problems.vocabulary), 8, layers=2, heads=4, dim=64, mlp="swiglu", hidden=64, moe={
        "experts": args.experts, "k": args.top_k, "shared": args.shared, "score": args.score, "balance": balance,
        "capacity_factor": args.capacity_factor, "expert_bias": True})


def batches_of(args, world, problems):
    """The Loader, alike in all ways."""
    return Loader(*problems.windows(problems.train), args.batch_size, seed=args.seed, rank=world.rank, size=world.size,
                  drop_last=True)


def train(args, world, problems, balance, speed):
    """The Result of one way. Collective."""
    with program.usage_errors("experts.py"):
        model = DistributedDataParallel(build(args, problems, balance), world)
        checks = Checks(args, world, model, args.steps, loss_sum, seed=args.seed)
    optimizer = optim.AdamW(training.decay_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.99))
    loader = batches_of(args, world, problems)
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    history, say = [], print if world.rank == 0 else lambda text: None
    checks.begin()
    for step, batch in enumerate(itertools.islice(batches, args.steps)):
        training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed, step=step, units=DIGITS, clip=1.0)
        history.append(expert_bias.update(model, speed))
        checks.after(step + 1, batch, False, say)
    checks.end(say)
    inputs, labels = problems.windows(problems.test)
    model.eval()
    with mt.no_grad():
        loss = nn.cross_entropy(model.module(inputs)[0], labels, reduction="sum").item() / (DIGITS * len(labels))
    violations = [mean([expert_bias.max_violation(load) for load in loads.values()]) for loads in history]
    over = [mean([beyond(load, args.capacity_factor) for load in loads.values()]) for loads in ending(history)]
    return Result(violations, 100 * mean(over), loss, history[-1])


def beyond(load, factor):
    """The share of the choices for which experts with so many times the mean's places have none."""
    return float(xp.maximum(load - factor * load.mean(), 0).sum() / load.sum())


def mean(numbers):
    """The mean of a list."""
    return sum(numbers) / len(numbers)


def ending(values):
    """The last tenth."""
    return values[-max(1, len(values) // 10):]


def picture(found, path):
    """MaxVio over steps, each way's as it is, and smoothed."""
    with drawn(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        for (name, result), colour in zip(found.items(), ("C3", "C1", "C0"), strict=True):
            width = max(1, len(result.violations) // 30)
            smooth = [mean(result.violations[max(0, i - width):i + 1]) for i in range(len(result.violations))]
            axes.plot(result.violations, color=colour, lw=0.5, alpha=0.35)
            axes.plot(smooth, color=colour, lw=1.8, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("MaxVio: the busiest expert above the mean")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("experts.py"):
        world = comm.world()
        args = parse(argv)
        problems = addition(2, seed=args.seed)
        build(args, problems, 0.0)      # what doesn't fit is said before anything is trained
        batches_of(args, world, problems)
        program.make_folder(args.out, world)
        if world.rank == 0:
            print(f"{args.top_k} of {args.experts} experts, {args.steps:,} steps of {args.batch_size} sums on "
                  f"{world.size} rank{'s' * (world.size > 1)}\n{'':16}  MaxVio    over   unseen sums' loss", flush=True)
    found = {}
    for name, (balance, speed) in ways(args).items():
        with divergence.ends(world):
            found[name] = train(args, world, problems, balance, speed)
        if world.rank == 0:
            print(f"{name:16}{mean(ending(found[name].violations)):8.3f}{found[name].over:6.1f} %"
                  f"{found[name].loss:21.3f}", flush=True)
    if world.rank == 0:
        for name in ("left alone", "biases"):
            print(f"\n{name}, the last step:\n{found[name].loads}")
    if args.out and world.rank == 0:
        picture(found, args.out / "loads.png")
        print(f"\nMaxVio over steps: {args.out / 'loads.png'}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
