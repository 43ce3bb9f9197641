"""Fine-tuning a small GPT: all of it, by LoRA, by QLoRA; what is trained, sent and held, and how soon it can do it.

    mpirun -n 2 python examples/lora.py                     # learns to add first; no file, no network
    mpirun -n 2 python examples/lora.py --from runs/gpt-addition-1      # what examples/gpt.py has learnt
    python examples/lora.py --base 9 --ranks 2,8 --out runs/lora

The model can add two numbers of two digits, and is to do so in base 8: the same text with another meaning, of which
it knows the half. The table has what is counted on rank 0 beside what it is on paper: bytes sent per step (gradients:
2(N-1)/N · 4 for each number that is trained; buckets are padded to 4,096 of them), of the optimizer's state (AdamW's
two numbers for each, padded as well), of weights (QLoRA: 4.127 bits for each of the blocks' matrices). Accuracy is that
of whole sums that it has never seen. The folder gets accuracy.png and each way's adapters, all that a task needs of its
own.

Sources: Hu et al. 2021, "LoRA"; Dettmers et al. 2023, "QLoRA".
"""

import json
import sys
from itertools import count, islice
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import comm, divergence, ledger, nn, optim, program, training
from minitorch_dist.backend import xp
from minitorch_dist.compress import lora
from minitorch_dist.compress.nf4 import NF4Weight
from minitorch_dist.data import Loader
from minitorch_dist.data.text import addition
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.viz.figure import drawn

sys.path.insert(0, str(Path(__file__).parent))      # also where another program runs this file
from gpt import BUILT_BY, network, with_more_ahead  # noqa: E402

MODEL = {"length": 8, "layers": 2, "heads": 4, "dim": 64}
RANGES = {
    program.AT_LEAST_1: ("pretrain", "steps", "batch_size", "eval_every"),
    program.AT_LEAST_0: ("seed",),
    program.POSITIVE: ("lr", "lora_lr", "alpha"),
    program.PROBABILITY: ("dropout",),
}
DIGITS = 3      # of a sum: losses per sample
COLUMNS = "trained", "sent per step", "optimizer", "weights", "unseen right"


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="lora.py", description=__doc__)
    p.add_argument("--from", dest="run", type=Path, help="folder of a run of examples/gpt.py that has learnt addition")
    p.add_argument("--pretrain", type=int, default=500, help="steps of learning to add in base 10, without --from")
    p.add_argument("--base", type=int, choices=range(2, 10), default=8, metavar="2…9", help="in which to add then")
    p.add_argument("--ranks", default="1,4,16", help="r of LoRA, comma-separated; QLoRA has the last")
    p.add_argument("--alpha", type=float, default=16, help="what B A is multiplied by, divided by r")
    p.add_argument("--dropout", type=float, default=0.0, help="of what the adapters get")
    p.add_argument("--steps", type=int, default=150, help="of fine-tuning, each way")
    p.add_argument("--batch-size", type=int, default=128, help="samples per step over all ranks")
    p.add_argument("--lr", type=float, default=3e-3, help="learning rate where all is trained")
    p.add_argument("--lora-lr", type=float, default=1e-2, help="learning rate of adapters")
    p.add_argument("--eval-every", type=int, default=10, help="steps between two looks at the unseen sums")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and problems")
    p.add_argument("--out", type=Path, default=Path("runs/lora"), help="folder for the picture and the adapters")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    p.check_needs(args, {"learning to add first (no --from)": (args.run is None, ["pretrain"])})
    try:
        args.ranks = [int(rank) for rank in args.ranks.split(",")]
    except ValueError:
        p.error(f"--ranks {args.ranks!r}: whole numbers separated by commas, like 1,4,16")
    if min(args.ranks) < 1:
        p.error(f"--ranks {min(args.ranks)}: must be at least 1")
    return args


def ways(args):
    """{its name: (whether it starts from what was learnt, lora.add's arguments, or None: all is trained)}."""
    last, shared = args.ranks[-1], {"alpha": args.alpha, "dropout": args.dropout}
    return {"nothing learnt before": (False, None), "all parameters": (True, None),
            **{f"LoRA, r={rank}": (True, {"rank": rank, **shared}) for rank in args.ranks},
            f"QLoRA, r={last}": (True, {"rank": last, "quantize": "nf4", **shared})}


# ---------------------------------------------------------------- models

def facts_of(run):
    """The summary of a run of examples/gpt.py. ValueError where it isn't one of addition."""
    try:
        facts = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        data, missing = facts.get("data"), [name for name in (*BUILT_BY, "predict") if name not in facts]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--from {run}: summary.json is damaged: {error}") from None
    if data != "addition":
        raise ValueError(f"--from {run}: its summary is of {data!r}, and what has learnt addition is wanted: python "
                         "examples/gpt.py")
    if missing:
        raise ValueError(f"--from {run}: its summary has no {', '.join(missing)}: it is no run of this version's "
                         "examples/gpt.py")
    return facts


def gpt(args, vocabulary, values=None):
    """The model; values: its state, or True for the run's."""
    mt.manual_seed(args.seed)
    if args.run is None:
        model = nn.GPT(len(vocabulary), **MODEL)
    else:
        facts = facts_of(args.run)
        model = network(facts, vocabulary)
        if values is True:
            training.load_parameters(args.run / "parameters.npz", with_more_ahead(model, facts))
    if isinstance(values, dict):
        model.load_state_dict(values)
    return model


def fine_tuned(args, vocabulary, values, learnt, options):
    """(the model of a way, its trained parameters by name)."""
    model = gpt(args, vocabulary, values if learnt else None)
    if options is not None:
        lora.add(model, **options)
    return model, [(name, p) for name, p in model.named_parameters() if p.requires_grad]


# ---------------------------------------------------------------- training

def loss_sum(model, shard):
    """The sum of the shard's losses."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def accuracy(model, problems, world):
    """Percent of the unseen sums that the model gets right, all digits of each. Collective."""
    mine, question = problems.test[world.rank::world.size], problems.question
    written = model.generate(mine[:, :question], mine.shape[1] - question, temperature=0)
    right = xp.array([(written == mine).all(1).sum()])
    world.all_reduce(right)
    return 100.0 * int(right[0]) / len(problems.test)


def train(args, world, model, problems, steps, lr, look=None):
    """(AdamW, [(step, accuracy)], bytes of the last step's gradients) of so many steps. look: steps between two."""
    inputs, targets = problems.windows(problems.train)
    loader = Loader(inputs, targets, args.batch_size, seed=args.seed, rank=world.rank, size=world.size)
    replica = DistributedDataParallel(model, world)
    optimizer = optim.AdamW(training.decay_groups([p for p in replica.parameters() if p.requires_grad], 0.1), lr=lr,
                            betas=(0.9, 0.99))
    schedule = optim.LambdaLR(optimizer, optim.cosine(steps, min(50, steps // 4), final=0.1))
    batches, curve = (batch for epoch in count() for batch in loader.epoch(epoch)), []
    if look:
        curve.append((0, accuracy(model, problems, world)))
    for step, batch in enumerate(islice(batches, steps), 1):
        with ledger.record() as book, divergence.ends(world):
            training.train_step(replica, optimizer, batch, loss_sum, world, seed=args.seed, step=step, units=DIGITS,
                                clip=1.0)
        schedule.step()
        if look and (step % look == 0 or step == steps):
            curve.append((step, accuracy(model, problems, world)))
    sums = 2 * (world.size - 1) / world.size * 2 * 8        # train_step's: the loss, and whether somebody stops
    return optimizer, curve, book.total_bytes_sent() - sums


def pretrained(args, world, problems):
    """{name: array} of a model that can add in base 10; and a line about it. Collective."""
    model = gpt(args, problems.vocabulary, args.run is not None)
    if args.run is None:
        train(args, world, model, problems, args.pretrain, args.lr)
    percent = accuracy(model, problems, world)
    how = f"of {args.run}" if args.run is not None else f"after {args.pretrain:,} steps"
    return model.state_dict(), f"base 10, {how}: {percent:.1f} % of the sums that it has never seen are right"


# ---------------------------------------------------------------- what comes of it

def paper(model, trained, ranks):
    """(bytes sent per step, of the optimizer's state, of weights) as formulas say."""
    numbers = sum(p.size for _, p in trained)
    weights = sum(p.data.nbytes for p in model.parameters())
    for m in (m for m in model.modules() if isinstance(m, NF4Weight)):
        weights += m.shape[0] * m.shape[1] * (4 + 8 / 64 + 32 / (64 * 256)) / 8 - m.nbytes
    return 2 * (ranks - 1) / ranks * 4 * numbers, 2 * 4 * numbers, weights


def row(name, cells):
    """A line of the table."""
    return f"{name:22}" + "".join(f"  {cell:>18}" for cell in cells)


def outcome(args, world, values, problems, learnt, options):
    """(the table's cells, the curve, {name: array} of the adapters, or None) of a way. Collective."""
    model, trained = fine_tuned(args, problems.vocabulary, values, learnt, options)
    optimizer, curve, sent = train(args, world, model, problems, args.steps, args.lr if options is None else
                                   args.lora_lr, args.eval_every)
    held = sum(array.nbytes for state in optimizer.state for array in state.values())
    counted = sent, held, sum(p.data.nbytes for p in model.parameters())
    cells = [f"{sum(p.size for _, p in trained):,}"]
    cells += [f"{c:,.0f} / {p:,.0f}" for c, p in zip(counted, paper(model, trained, world.size), strict=True)]
    return [*cells, f"{curve[-1][1]:.1f} %"], curve, None if options is None else lora.state_dict(model)


def picture(curves, path):
    """Accuracy over steps."""
    with drawn(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(*xp.array(curve).T, label=name, lw=1.6, ls="--" if "nothing" in name or "QLoRA" in name else "-")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("unseen sums that are right, %")
        axes.set_ylim(0, 102)
        axes.legend()


def prepare(args, world):
    """(problems in base 10, those in the other one); all else is tried out. ValueError or OSError on all ranks where
    something doesn't fit."""
    before, after = addition(2, seed=args.seed), addition(2, seed=args.seed, base=args.base)
    values = gpt(args, before.vocabulary, args.run is not None).state_dict()
    for way in ways(args).values():
        fine_tuned(args, after.vocabulary, values, *way)
    Loader(after.train, after.train, args.batch_size, rank=world.rank, size=world.size)
    program.make_folder(args.out, world)
    return before, after


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("lora.py"):
        world = comm.world()
        args = parse(argv)
        before, after = prepare(args, world)
    say = print if world.rank == 0 else lambda *said, **options: None
    values, line = pretrained(args, world, before)
    size = min(args.batch_size, len(after.train))
    say(f"{line}\nbase {args.base}, {args.steps:,} step{'s' * (args.steps > 1)} of {size:,} sums on {world.size} "
        f"rank{'s' * (world.size > 1)}; bytes counted / on paper\n{row('', COLUMNS)}", flush=True)
    curves = {}
    for name, way in ways(args).items():
        cells, curves[name], adapters = outcome(args, world, values, after, *way)
        say(row(name, cells), flush=True)
        if adapters is not None and world.rank == 0:
            training.save_arrays(args.out / f"{name.replace(', r=', '-')}.npz", adapters)
    if world.rank == 0:
        picture(curves, args.out / "accuracy.png")
    say(f"accuracy over steps: {args.out / 'accuracy.png'}")
    world.barrier()
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
