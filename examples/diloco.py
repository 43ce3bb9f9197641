"""DiLoCo over a slow link: workers that meet every H steps, beside data parallelism, by bytes, messages, and time.

    mpirun -n 4 python examples/diloco.py                               # on the digits; 20 seconds
    mpirun -n 2 python examples/diloco.py --every 5,20,100 --overlap 8 --mix 1
    mpirun -n 4 python examples/diloco.py --bandwidth 1000 --latency 1  # a faster link: less to gain
    mpirun -n 4 python examples/diloco.py --out runs/diloco             # accuracy against seconds

All ways see the same samples in equally many steps, each worker its share of every batch. Bytes and messages are
counted; time is simulated: a step takes --compute, a message --latency and what --bandwidth makes of its bytes, one
after the other, and who waits for one lets that time pass. (Data parallel's messages are not overlapped with backward
here, which of a model this small would hide nothing.)

Source: Douillard et al. 2023, "DiLoCo"; Douillard et al. 2025, "Streaming DiLoCo with overlapping communication".
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, ledger, nn, optim, program
from minitorch_dist.backend import xp
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.encodings import E3M0
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.viz.figure import drawn

RANGES = {
    program.AT_LEAST_1: ("steps", "batch_size", "fragments"),
    program.AT_LEAST_0: ("lr", "seed", "overlap", "latency", "compute"),
    program.MORE_THAN_0: ("bandwidth",),
    program.SHARE: ("mix",),
}
COLUMNS = "messages", "MB sent", "seconds", "waiting", "test loss", "accuracy %"
POINTS = 40         # of a curve


class Result(NamedTuple):
    """What came of a way: of this rank's messages, bytes and virtual seconds; of the common values at the end."""

    messages: int
    sent: int
    seconds: float
    waiting: float
    loss: float
    accuracy: float
    curve: list         # [(seconds, accuracy)]


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="diloco.py", description=__doc__)
    p.add_argument("--every", default="10,50", help="H, steps between two meetings; several, comma-separated")
    p.add_argument("--fragments", type=int, default=3, help="streaming: parts of the model, sent at different steps")
    p.add_argument("--overlap", type=int, default=5, help="streaming: steps that are made while a fragment travels")
    p.add_argument("--mix", type=float, default=0.5, help="streaming: the share of the common values in what follows")
    p.add_argument("--bandwidth", type=float, default=10.0, help="of the link, Mbit/s that a worker can send")
    p.add_argument("--latency", type=float, default=30.0, help="of the link, milliseconds per message")
    p.add_argument("--compute", type=float, default=20.0, help="milliseconds per step")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits", help="which images")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--steps", type=int, default=600, help="of every worker")
    p.add_argument("--batch-size", type=int, help="samples of all workers' shares (default: mnist 128, digits 64)")
    p.add_argument("--hidden", default="64,64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--lr", type=float, default=1e-3, help="of AdamW, in every worker")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, help="folder for a picture of accuracy against seconds")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.hidden)
    try:
        args.every = [int(every) for every in args.every.split(",")]
    except ValueError:
        p.error(f"--every {args.every!r}: whole numbers separated by commas, like 10,50")
    return args


def ways(args):
    """{name: DiLoCo's settings}, None for data parallelism; the last of --every is streamed as well."""
    streaming = {"every": args.every[-1], "fragments": args.fragments, "overlap": args.overlap, "mix": args.mix}
    return {
        "data parallel": None,
        **{f"DiLoCo, H={every}": {"every": every} for every in args.every},
        f"streaming, H={args.every[-1]}": streaming,
        "and in 4 bits": streaming | {"encoding": E3M0()},
    }


def prepare(args, world, dataset, settings):
    """(model, AdamW, DiLoCo or None, loader) of one way. ValueError on all ranks where something doesn't fit."""
    mt.manual_seed(args.seed)
    model = nn.mlp(args.widths)
    if settings is None:
        model = DistributedDataParallel(model, world)
    inner = optim.AdamW(model.parameters(), lr=args.lr)
    diloco = DiLoCo(model, inner, world, **settings) if settings else None
    loader = data.Loader(dataset.train_images, dataset.train_labels, args.batch_size or dataset.default_batch_size,
                         seed=args.seed, rank=world.rank, size=world.size, drop_last=True)
    return model, inner, diloco, loader


def train(args, world, dataset, settings):
    """The Result of one way. Collective."""
    (model, inner, diloco, loader), clock = prepare(args, world, dataset, settings), VirtualClock()
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    link, curve = SimulatedLink(args.latency / 1e3, args.bandwidth * 1e6 / 8, clock), []
    world.hooks.append(link)
    try:
        with ledger.record() as book:
            for step, batch in enumerate(itertools.islice(batches, args.steps), 1):
                clock.sleep(args.compute / 1e3)
                inner.zero_grad()
                loss = nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum")
                if diloco is None:
                    (loss / batch.count).backward()         # of the global batch: DDP sums
                    inner.step()
                else:
                    (loss / len(batch.labels)).backward()   # of the worker's own
                    diloco.step(len(batch.labels))
                if args.out and step % max(1, args.steps // POINTS) == 0:
                    curve.append((clock(), outcome(model, inner, diloco, dataset, step)[1]))
            if diloco is not None:
                diloco.finish()
    finally:
        world.hooks.remove(link)
    computing = args.steps * args.compute / 1e3
    return Result(book.calls.total(), book.total_bytes_sent(), clock(), clock() - computing,
                  *outcome(model, inner, diloco, dataset, args.steps), curve)


def outcome(model, inner, diloco, dataset, step):
    """(mean loss, percent right) on the test images after a step, by the common values."""
    with mt.no_grad(), diloco.common() if diloco else mt.no_grad():
        scores = model(dataset.test_images)
        loss = nn.cross_entropy(scores, dataset.test_labels).item()
        divergence.check(loss, step, inner)
        return loss, 100.0 * float((scores.numpy().argmax(axis=1) == dataset.test_labels).mean())


def row(name, found):
    """A line of the table."""
    cells = (f"{found.messages:,}", f"{found.sent / 1e6:.2f}", f"{found.seconds:.1f}", f"{found.waiting:.1f}",
             f"{found.loss:.3f}", f"{found.accuracy:.2f}")
    return f"{name:18}" + "".join(f"{cell:>12}" for cell in cells)


def picture(found, path):
    """Accuracy against virtual seconds."""
    with drawn(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        for name, result in found.items():
            axes.plot(*xp.array(result.curve).T, label=name, lw=1.6)
        axes.set_xlabel("seconds, simulated")
        axes.set_ylabel("test accuracy, %")
        axes.set_xscale("log")
        axes.legend(loc="lower right")


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("diloco.py"):
        world = comm.world()
        args = parse(argv)
        dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
        for settings in ways(args).values():    # what doesn't fit is said before anything is trained
            prepare(args, world, dataset, settings)
        program.make_folder(args.out, world)
        if world.rank == 0:
            print(f"{dataset.source}\n{world.size} worker{'s' * (world.size > 1)}, {args.steps:,} steps of AdamW; a "
                  f"step computes {args.compute:g} ms, a message takes {args.latency:g} ms and its bytes at "
                  f"{args.bandwidth:g} Mbit/s\n{'':18}" + "".join(f"{name:>12}" for name in COLUMNS), flush=True)
        found = {}
        with divergence.ends(world), divergence.quiet():
            for name, settings in ways(args).items():
                found[name] = train(args, world, dataset, settings)
                if world.rank == 0:
                    print(row(name, found[name]), flush=True)
    if args.out and world.rank == 0:
        path = args.out / "accuracy.png"
        picture(found, path)
        print(f"accuracy against seconds: {path}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
