"""Gossip: ranks that average with a few neighbours, on several graphs, beside data parallelism.

    mpirun -n 8 python examples/gossip.py                           # on the digits; a minute on 2 cores
    mpirun -n 8 python examples/gossip.py --split label             # each rank has few classes: graphs matter
    mpirun -n 4 python examples/gossip.py --show                    # who takes what of whom
    mpirun -n 8 python examples/gossip.py --out runs/gossip         # a picture: loss and consensus, step by step

Each rank has samples of its own, and makes as many steps of SGD with momentum. Messages and bytes are counted, of one
rank; consensus is how far the ranks' values are from their mean at the end, by the root of the mean square; accuracy is
that of the mean, "worst" that of the rank which is worst by itself. An all-reduce is counted as one message; round a
ring it is 2(N - 1), one after the other, for which all ranks wait.

Source: Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?"; Ying et al. 2021,
"Exponential graph is provably efficient for decentralized deep training".
"""

import itertools
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, ledger, nn, optim, program
from minitorch_dist.backend import xp
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.local_sgd import Gossip, split_by_label, split_evenly, topologies
from minitorch_dist.viz.figure import drawn

COLUMNS = "gap", "messages", "MB sent", "consensus", "test loss", "accuracy %", "worst %"
WIDTH = 22          # of the table's first column
POINTS = 60         # of a curve
ROUNDING = 1e-5     # a consensus that is nothing else isn't drawn


class Result(NamedTuple):
    """What came of a way: of this rank's messages and bytes; of all ranks' values at the end."""

    messages: int
    sent: int
    consensus: float
    loss: float
    accuracy: float
    worst: float
    curve: list         # [(step, test loss of the mean, consensus)]


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="gossip.py", description=__doc__)
    p.add_argument("--split", choices=["evenly", "label"], default="evenly", help="which samples a rank has: of all "
                   "classes, or two stretches of the samples in the order of their labels")
    p.add_argument("--every", type=int, default=8, help="H of the last line: steps between two meetings")
    p.add_argument("--show", action="store_true", help="print the graphs' matrices, rank by rank, before")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits", help="which images")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--steps", type=int, default=400, help="of every rank")
    p.add_argument("--batch-size", type=int, default=8, help="samples of a rank per step")
    p.add_argument("--hidden", default="64,64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--lr", type=float, default=0.02, help="of SGD; its momentum is 0.9")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, help="folder for a picture of loss and consensus")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("every", "steps", "batch_size"), program.AT_LEAST_0: ("lr", "seed")})
    args.widths = p.widths(args.hidden)
    return args


def ways(n, every):
    """{name: Gossip's settings}, None for data parallelism."""
    graphs = {"complete": topologies.complete(n), "exponential": topologies.exponential(n),
              "one-peer": topologies.one_peer(n), "ring": topologies.ring(n)}
    rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    if rows > 1 and n > 4:      # of 2 × 2 it is the ring
        graphs[f"torus, {rows} × {n // rows}"] = topologies.torus(rows, n // rows)
    return {
        "data parallel": None,
        **{name: {"topology": graph} for name, graph in sorted(graphs.items(), key=lambda item: -item[1].gap)},
        "one-peer, overlapped": {"topology": graphs["one-peer"], "overlap": 1},
        f"one-peer, H={every}": {"topology": graphs["one-peer"], "every": every},
    }


def prepare(args, world, dataset, settings):
    """(model, SGD, Gossip or None, loader of this rank's samples) of one way. ValueError on all ranks where something
    doesn't fit."""
    mt.manual_seed(args.seed)
    model = nn.mlp(args.widths)
    if settings is None:
        model = DistributedDataParallel(model, world)
    inner = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    gossip = Gossip(model, inner, world, **settings) if settings else None
    clients = split_evenly(len(dataset.train_labels), world.size, args.seed) if args.split == "evenly" else \
        split_by_label(dataset.train_labels, world.size, seed=args.seed)
    if (fewest := min(map(len, clients))) < args.batch_size:
        raise ValueError(f"--batch-size {args.batch_size}: a rank has {fewest} samples only")
    mine = clients[world.rank]
    loader = data.Loader(dataset.train_images[mine], dataset.train_labels[mine], args.batch_size, seed=args.seed,
                         drop_last=True)
    return model, inner, gossip, loader


def train(args, world, dataset, settings):
    """The Result of one way. Collective."""
    model, inner, gossip, loader = prepare(args, world, dataset, settings)
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    messages, sent, curve = 0, 0, []
    for step, batch in enumerate(itertools.islice(batches, args.steps), 1):
        with ledger.record() as book:
            inner.zero_grad()
            loss = nn.cross_entropy(model(batch.inputs), batch.labels)
            (loss if gossip else loss / world.size).backward()      # of the rank's own batch, or of all: DDP sums
            (gossip or inner).step()
        messages += sum(count for (_, op), count in book.calls.items() if op != "recv")
        sent += book.total_bytes_sent()
        if args.out and step % max(1, args.steps // POINTS) == 0:
            consensus = gossip.consensus() if gossip else 0.0
            curve.append((step, outcome(model, inner, gossip, dataset, step)[0], consensus))
    own = xp.array([score(model, dataset)[1]])
    world.all_reduce(own, op="min")
    consensus = gossip.consensus() if gossip else 0.0
    loss, accuracy = outcome(model, inner, gossip, dataset, args.steps)
    if gossip:
        gossip.finish()
    return Result(messages, sent, consensus, loss, accuracy, float(own[0]), curve)


def score(model, dataset):
    """(mean loss, percent right) on the test images."""
    with mt.no_grad():
        scores = model(dataset.test_images)
        return (nn.cross_entropy(scores, dataset.test_labels).item(),
                100.0 * float((scores.numpy().argmax(axis=1) == dataset.test_labels).mean()))


def outcome(model, inner, gossip, dataset, step):
    """The score of the mean of all ranks' values after a step."""
    with gossip.average() if gossip else nullcontext():
        found = score(model, dataset)
    divergence.check(found[0], step, inner)
    return found


def row(name, settings, found):
    """A line of the table."""
    gap = f"{settings['topology'].gap:.3f}" if settings else "-"
    cells = (gap, f"{found.messages:,}", f"{found.sent / 1e6:.2f}", f"{found.consensus:.4f}", f"{found.loss:.3f}",
             f"{found.accuracy:.2f}", f"{found.worst:.2f}")
    return f"{name:{WIDTH}}" + "".join(f"{cell:>11}" for cell in cells)


def picture(found, path):
    """Loss of the mean, and consensus, step by step; the loss alone where all ranks always agree, as one does."""
    curves = {name: xp.array(result.curve).T for name, result in found.items()}
    apart = {name: consensus for name, (_, _, consensus) in curves.items() if consensus.max() > ROUNDING}
    with drawn(path, (10 if apart else 5, 4.2)) as figure:
        losses, *distances = figure.subplots(1, 2 if apart else 1, squeeze=False)[0]
        for name, (steps, loss, _) in curves.items():
            line, = losses.plot(steps, loss, label=name, lw=1.4)
            if name in apart:
                distances[0].plot(steps, apart[name], color=line.get_color(), lw=1.4)
        losses.set_ylabel("test loss of the mean")
        losses.legend(fontsize=8)
        for axes in distances:
            axes.set_ylabel("consensus: distance from the mean")
            axes.set_yscale("log")
        for axes in (losses, *distances):
            axes.set_xlabel("step")


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("gossip.py"):
        world = comm.world()
        args = parse(argv)
        dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
        all_ways = ways(world.size, args.every)
        for settings in all_ways.values():      # what doesn't fit is said before anything is trained
            prepare(args, world, dataset, settings)
        program.make_folder(args.out, world)
        if world.rank == 0:
            if args.show:
                print(*(f"{settings['topology']}\n" for settings in all_ways.values() if settings
                        and settings.keys() == {"topology"}), sep="\n")
            print(f"{dataset.source}\n{world.size} rank{'s' * (world.size > 1)}, samples split "
                  f"{'evenly' if args.split == 'evenly' else 'by label'}, {args.steps:,} steps of SGD in batches of "
                  f"{args.batch_size} each\n{'':{WIDTH}}" + "".join(f"{name:>11}" for name in COLUMNS), flush=True)
        found = {}
        with divergence.ends(world), divergence.quiet():
            for name, settings in all_ways.items():
                found[name] = train(args, world, dataset, settings)
                if world.rank == 0:
                    print(row(name, settings, found[name]), flush=True)
    if args.out and world.rank == 0:
        path = args.out / "consensus.png"
        picture(found, path)
        print(f"loss and consensus: {path}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
