"""Texts on disk, in shares that change: a GPT reads the bytes of several sources.

    python examples/mixture.py                          # this repository's prose and code
    mpirun -n 2 python examples/mixture.py --exact --out runs/mixture-2     # the bits of one process
    python examples/mixture.py --source web='web/*.txt' --source code='src/**/*.py' --shares web=3,code=1

Each source's texts are written as tokens into OUT/tokens first, a file after another;
training reads from there what each batch needs, and keeps nothing. The last steps have
shares of their own ("annealing"). mixture.png shows what becomes of the validation
losses, source by source, in bits per byte: 8 is what an unpacked file takes.
"""

import glob
import shutil
import sys
import time
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim, program, training
from minitorch_dist.comm.together import together
from minitorch_dist.data import Loader, Mixture, StoredTokens, TokenWriter, ahead
from minitorch_dist.data.packing import apart
from minitorch_dist.data.text import IGNORED, Bytes
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.viz.curves import COLORS
from minitorch_dist.viz.figure import drawn

ROOT = Path(__file__).resolve().parents[1]
# (pattern: neither hidden folders nor runs/)
SOURCES = {"prose": f"{ROOT}/[!.r]*/**/*.md", "code": f"{ROOT}/minitorch_dist/**/*.py"}
VOCABULARY, HELD_BACK, LOOKS = Bytes(), 10, 12      # every so many texts is for validation; validations of a run
# What the curve doesn't depend on: with all else the same a run can go on from a checkpoint.
OUTSIDE = ("out", "source", "save_every", "async_save", "resume")


def shares(text):
    """{"web": 3, "code": 1} of web=3,code=1. ValueError where it isn't that."""
    found = {}
    for part in text.split(","):
        name, equals, weight = part.partition("=")
        if not equals or not weight.isdecimal() or name in found:
            raise ValueError(f"shares {text!r}: expected NAME=WHOLE NUMBER,NAME=WHOLE NUMBER")
        found[name] = int(weight)
    return found


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="mixture.py", description=__doc__)
    p.add_argument("--source", action="append", metavar="NAME=PATTERN", help="UTF-8 files, as name=folder/**/*.txt; "
                   "several times for several (default: this repository's prose and code)")
    p.add_argument("--shares", help="weights of the sources (default: prose=1,code=3; of sources given: all alike)")
    p.add_argument("--last-shares", help="their weights in the last steps (default: prose=3,code=1; of sources given: "
                   "as before)")
    p.add_argument("--last", type=float, default=0.2, help="share of the steps that these are")
    p.add_argument("--length", type=int, default=64, help="bytes that the model sees")
    p.add_argument("--layers", type=int, default=2, help="blocks")
    p.add_argument("--heads", type=int, default=4, help="attention heads")
    p.add_argument("--dim", type=int, default=64, help="width")
    p.add_argument("--batch-size", type=int, default=16, help="rows per step over all ranks")
    p.add_argument("--steps", type=int, default=500, help="optimizer steps")
    p.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate, after warm-up")
    p.add_argument("--seed", type=int, default=0, help="of initial values and the order within each source")
    p.add_argument("--exact", action="store_true", help="one set of bits, on 1, 2, 4 or 8 ranks")
    p.add_argument("--out", type=Path, default=Path("runs/mixture"), help="folder for the run's files")
    p.add_checkpoints()
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("length", "layers", "heads", "dim", "batch_size", "steps", "save_every"),
                          program.AT_LEAST_0: ("lr", "seed"), program.PROBABILITY: ("last",)})
    args.sources, first, then = dict(SOURCES), "prose=1,code=3", "prose=3,code=1"
    if args.source:
        args.sources = dict(source.partition("=")[::2] for source in args.source)
        if len(args.sources) < len(args.source) or not all(args.sources.values()):
            p.error(f"--source {' --source '.join(args.source)}: expected NAME=PATTERN, each name once")
        first = args.shares or ",".join(f"{name}=1" for name in args.sources)
        then = first
    try:
        args.shares, args.last_shares = shares(args.shares or first), shares(args.last_shares or then)
    except ValueError as error:
        p.error(str(error))
    return args


def write_tokens(folder, sources):
    """Each source's texts as tokens, in the place of what is there: folder/NAME to learn from, folder/NAME-held-back
    every tenth. ValueError for a source without a text."""
    files = {name: sorted(path for path in map(Path, glob.iglob(pattern, recursive=True)) if path.is_file())
             for name, pattern in sources.items()}
    for name, paths in files.items():
        if len(paths) < 2:
            raise ValueError(f"source {name!r}: {len(paths)} files match {sources[name]!r}; one is held back, and one "
                             "is wanted to learn from")
    shutil.rmtree(folder, ignore_errors=True)
    for name, paths in files.items():
        with TokenWriter(folder / name) as learnt, TokenWriter(folder / f"{name}-held-back") as held_back:
            for i, path in enumerate(paths):
                try:
                    text = path.read_text(encoding="utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"source {name!r}: {path} is not UTF-8: {error}") from None
                (learnt if i % HELD_BACK else held_back).add(VOCABULARY.encode(text), end=VOCABULARY.end)


def loss_sum(model, shard):
    """The sum of the losses of a shard's bytes."""
    return nn.cross_entropy(model(*apart(shard.inputs)), shard.labels, reduction="sum")


def bits_per_byte(model, rows, targets, world):
    """What the model needs for a byte of these rows; ranks share them, sums are added in one order."""
    model.eval()
    with mt.no_grad():
        mine = {i: nn.cross_entropy(model(*apart(rows[i:i + 1])), targets[i:i + 1], reduction="sum").item()
                for i in range(world.rank, len(rows), world.size)}
    model.train()
    sums = {i: value for part in world.all_gather_object(mine) for i, value in part.items()}
    return sum(sums[i] for i in sorted(sums)) / np.log(2) / int((targets != IGNORED).sum())


def prepare(args, world):
    """All that training needs. ValueError or OSError on all ranks where something doesn't fit."""
    if args.exact:
        training.prepare_exact(world)
    settings = {name: value for name, value in vars(args).items() if name not in OUTSIDE}
    run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
    folder = args.out / "tokens"

    def write():
        if world.rank == 0 and not run.resume:
            write_tokens(folder, args.sources)
    together(world, write)
    stored = together(world, lambda: {name: StoredTokens(folder / name, args.length, len(VOCABULARY), VOCABULARY.end)
                                      for name in [*args.sources, *(f"{name}-held-back" for name in args.sources)]})
    samples, last = args.steps * args.batch_size, round(args.steps * args.last) * args.batch_size
    phases = [(samples - last, args.shares), (last, args.last_shares)]
    mixture = Mixture({name: stored[name] for name in args.sources}, [phase for phase in phases if phase[0]], args.seed)
    held_back = {name: stored[f"{name}-held-back"] for name in args.sources}
    return run, mixture, {name: some(data, 32) for name, data in held_back.items()}


def some(data, count):
    """(inputs, targets) of so many of its rows, from beginning to end."""
    count = min(count, len(data))
    return data.read(np.arange(count) * len(data) // count)


def train(args, world):
    """Train; returns (summary, {source: [(step, bits per byte)]}, the step at which the shares change)."""
    with program.usage_errors("mixture.py"):
        run, mixture, held_back = prepare(args, world)
        loader = Loader(mixture, None, args.batch_size, shuffle=False, rank=world.rank, size=world.size,
                        micro_shards=8 if args.exact else 1)
        mt.manual_seed(args.seed)
        network = nn.GPT(len(VOCABULARY), args.length, args.layers, args.heads, args.dim, **FAMILIES["llama"])
        model = DistributedDataParallel(network, world, exact=args.exact)
        optimizer = optim.AdamW(training.decay_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.99))
        schedule = optim.LambdaLR(optimizer, optim.cosine(args.steps, min(50, args.steps // 2), final=0.05))
        run.restore(model, optimizer, schedule)
        tokens = [source.fingerprint() for source in mixture.sources.values()]
        if run.facts.get("tokens", tokens) != tokens:
            raise ValueError(f"the tokens in {args.out / 'tokens'} are others than those of the checkpoint: begin "
                             "anew, without --resume")
    found, stop = run.facts.get("validation", {name: [] for name in args.sources}), False
    every = -(-args.steps // LOOKS)
    with run, program.Progress(world, args.steps) as progress, program.Interrupt() as interrupt:
        progress.say(str(mixture))
        for epoch, batches in run.epochs(loader, args.steps):       # one epoch: the mixture has all steps' samples
            for batch in ahead(batches):
                begin = time.perf_counter()
                loss, stop = training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed,
                                                 step=run.step, units=args.length, clip=1.0, stop=interrupt.wanted)
                schedule.step()
                run.log(loss, epoch, batch.count, begin)
                progress.step(loss)
                last = stop or run.step == args.steps
                if last or run.step % every == 0:
                    for name, rows in held_back.items():
                        found[name].append((run.step, bits_per_byte(network, *rows, world)))
                    progress.say(f"step {run.step:,} of {args.steps:,}: loss {loss:.3f}; bits per byte: "
                                 + ", ".join(f"{name} {values[-1][1]:.3f}" for name, values in found.items()))
                if stop or run.due(args.save_every, args.steps):
                    run.save(model, optimizer, validation=found, tokens=tokens)
                if last:
                    break
            if stop:
                break
        if stop:
            progress.say(interrupt.said(run, args.steps))
        read = sum(source.read_bytes for source in mixture.sources.values())
        progress.say(f"read from disk by rank 0: {read / 1e6:.2f} MB")
        status = interrupt.status(world)
    settings = {name: value for name, value in run.settings.items() if name != "steps"}
    summary = run.finish(network, data=" + ".join(args.sources), bits_per_byte={n: v[-1][1] for n, v in found.items()},
                         validation_of=found, interrupted=stop, exit_status=status, read_bytes=read, **settings)
    return summary, found, mixture.phases[0].samples // args.batch_size


def picture(found, change, path):
    """Bits per byte of each source over the steps, and where the shares change."""
    with drawn(path, (8.6, 4)) as figure:
        axes = figure.subplots()
        for color, (name, values) in zip(COLORS, found.items(), strict=False):
            steps, bits = np.array(values).T
            axes.plot(steps, bits, color=color, lw=1.6, marker="o", markersize=3.5, label=name)
        axes.axvline(change, color="#888888", lw=1, ls=":")
        axes.annotate("other shares", (change, axes.get_ylim()[1]), xytext=(4, -12), textcoords="offset points",
                      color="#888888", fontsize=9.5)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("bits per byte of texts held back")
        axes.grid(axis="y", alpha=0.2)
        axes.legend(frameon=False)


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM."""
    with program.usage_errors("mixture.py"):
        world = comm.world()
        args = parse(argv)
    summary, found, change = train(args, world)
    if world.rank == 0:
        picture(found, change, args.out / "mixture.png")
        print(f"{' and '.join(f'{bits:.3f} bits per byte of {n}' for n, bits in summary['bits_per_byte'].items())}; "
              f"parameters {summary['parameters_sha256'][:12]}, picture in {args.out / 'mixture.png'}")
    world.barrier()     # while rank 0 draws no other may end, which after a signal would end the job
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
