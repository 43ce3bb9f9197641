"""µP: the learning rate that is best for a narrow model, and for wide ones.

    python examples/mup.py                              # on the digits; a minute or two
    mpirun -n 2 python examples/mup.py                  # ranks share the trainings among them
    python examples/mup.py --widths 64,256,1024 --optimizer sgd --lrs -8 2
    python examples/mup.py --model transformer          # wide heads: attention's scores, too
    python examples/mup.py --out runs/mup               # loss against learning rate, a picture

Each model is trained at each learning rate, as it is and by µP with the narrowest as its base. The table has the loss
over all training images after the last step; the best of each width is marked. As it is the best rate falls with the
width, and has to be searched for at each; by µP it stays about where it was, and wider is better. (A search at each
width as it is may find still less.)

Source: Yang et al. 2022, "Tensor Programs V", figure 1.
"""

import itertools
import math
import sys
import time
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, program
from minitorch_dist.backend import xp
from minitorch_dist.optim import mup
from minitorch_dist.viz.figure import drawn

MODELS = {
    "mlp": lambda width: nn.mlp((width, width, width)),
    "transformer": lambda width: nn.ImageTransformer("patches", heads=4, dim=width),
}
OPTIMIZERS = {"adam": (optim.Adam, (-13, -4)), "sgd": (optim.SGD, (-8, 2))}
RANGES = {program.AT_LEAST_1: ("steps", "batch_size"), program.AT_LEAST_0: ("seed",)}
WAYS = {False: "as it is", True: "by µP"}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="mup.py", description=__doc__)
    p.add_argument("--model", choices=list(MODELS), default="mlp", help="three hidden layers, or two blocks")
    p.add_argument("--widths", default="64,128,256,512", help="of the models; the first is base")
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adam", help="by which rates")
    p.add_argument("--lrs", type=int, nargs=2, metavar=("LOW", "HIGH"),
                   help="learning rates 2^LOW … 2^HIGH (default: adam -13 -4, sgd -8 2)")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits", help="which images")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--steps", type=int, default=100, help="of each training")
    p.add_argument("--batch-size", type=int, default=64, help="samples per step")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, help="folder for a picture of loss against learning rate")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.widths, "--widths", fewest=1)
    low, high = args.lrs or OPTIMIZERS[args.optimizer][1]
    if low > high:
        p.error(f"--lrs {low} {high}: the first must not be greater than the second")
    if not -1000 <= low <= high <= 1000:
        p.error(f"--lrs {low} {high}: exponents of 2, from -1000 to 1000")
    args.lrs = [2.0 ** exponent for exponent in range(low, high + 1)]
    return args


def loader_of(args, dataset):
    """Whole batches, in the same order for each training."""
    return data.Loader(dataset.train_images, dataset.train_labels, args.batch_size, seed=args.seed, drop_last=True)


def trained(args, dataset, width, lr, wide):
    """The mean loss over all training images after one training; inf where it has left all numbers."""
    make, kind = MODELS[args.model], OPTIMIZERS[args.optimizer][0]
    mt.manual_seed(args.seed)
    model, base = make(width), make(args.widths[0])
    optimizer = mup.scale(model, base).optimizer(kind, model, lr) if wide else kind(model.parameters(), lr=lr)
    schedule = optim.LambdaLR(optimizer, optim.cosine(args.steps))
    loader = loader_of(args, dataset)
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    with xp.errstate(over="ignore", invalid="ignore"):
        for batch in itertools.islice(batches, args.steps):
            optimizer.zero_grad()
            nn.cross_entropy(model(batch.inputs), batch.labels).backward()
            optimizer.step()
            schedule.step()
        with mt.no_grad():
            loss = nn.cross_entropy(model(dataset.train_images), dataset.train_labels).item()
    return loss if math.isfinite(loss) else math.inf


def in_seven(loss):
    """A loss as text of up to seven characters."""
    usual = f"{loss:.3f}"
    return usual if len(usual) <= 7 else f"{loss:.1e}"


def table(args, losses):
    """Losses as text: a line per learning rate, a column per width and way, the best of each marked."""
    lines = [f"{'':10}" + "".join(f"{name:^{9 * len(args.widths)}}" for name in WAYS.values()),
             f"{'lr':10}" + "".join(f"{width:>8} " for _ in WAYS for width in args.widths)]
    best = {(width, wide): min(args.lrs, key=lambda lr: losses[width, lr, wide])
            for wide in WAYS for width in args.widths}
    for lr in args.lrs:
        cells = "".join(f"{in_seven(losses[width, lr, wide]):>8}{'*' if best[width, wide] == lr else ' '}"
                        for wide in WAYS for width in args.widths)
        lines.append(f"{f'2^{math.log2(lr):.0f}':10}{cells}")
    return "\n".join(line.rstrip() for line in lines)


def picture(args, losses, path):
    """Loss against learning rate, a curve per width: as it is, and by µP."""
    import matplotlib
    colours = matplotlib.colormaps["viridis"](xp.linspace(0.0, 0.85, len(args.widths)))
    with drawn(path, (8, 3.6)) as figure:
        both = figure.subplots(1, 2, sharey=True)
        for axes, (wide, name) in zip(both, WAYS.items(), strict=True):
            for width, colour in zip(args.widths, colours, strict=True):
                curve = [losses[width, lr, wide] for lr in args.lrs]
                axes.plot(args.lrs, curve, color=colour, label=f"width {width}", lw=1.6)
                lowest = min(range(len(curve)), key=lambda i: curve[i])
                axes.plot(args.lrs[lowest], curve[lowest], "o", color=colour, ms=6)
            axes.set_title(name, fontsize=11)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(top=2 * math.log(10))
            axes.set_xlabel("learning rate")
        both[0].set_ylabel("training loss")
        both[1].legend(frameon=False)


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("mup.py"):
        world, begin = comm.world(), time.perf_counter()
        args = parse(argv)
        dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
        for width in args.widths:       # what doesn't fit is said before anything is trained
            MODELS[args.model](width)
        loader_of(args, dataset)
        program.make_folder(args.out, world)
    if world.rank == 0:
        print(f"{dataset.source}\n{args.steps:,} steps of {args.optimizer}, {args.model} of widths "
              f"{', '.join(map(str, args.widths))}", flush=True)
    jobs = sorted(itertools.product(args.widths, args.lrs, WAYS))
    mine = {job: trained(args, dataset, *job) for job in jobs[world.rank::world.size]}
    losses = {job: loss for part in world.all_gather_object(mine) for job, loss in part.items()}
    if world.rank == 0:
        print(f"\n{table(args, losses)}\n\n{time.perf_counter() - begin:.0f} s")
        if args.out:
            path = args.out / "mup.png"
            picture(args, losses, path)
            print(f"loss against learning rate: {path}")
    world.barrier()     # while rank 0 draws no other may end
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
