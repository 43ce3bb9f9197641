"""Train mnist_demo's network with its state cut over the ranks (ZeRO 1, 2, 3; 3 is FSDP): the same curve.

    python mnist_demo/train.py --exact --epochs 1 --out runs/whole
    mpirun -n 2 python examples/fully_sharded.py --stage 3 --epochs 1 --out runs/sharded
    python mnist_demo/compare.py runs/whole runs/sharded        # identical to the bit
    mpirun -n 4 python examples/fully_sharded.py --replicas 2   # hybrid: two copies, each cut over two neighbours

First it runs a step of every stage with Adam, and prints what a rank sends in
it and holds after it, counted, beside the formula of the ZeRO paper. The
options that this program and train.py have mean the same in both; but here
--exact is the default, and --no-exact is faster. Ctrl-C, or SIGTERM, ends
after the step under way, and saves what there is.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, program, training
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.parallel import DistributedDataParallel, MixedPrecisionPolicy, full_state_dict, fully_shard
from minitorch_dist.parallel.encodings import Blocks
from minitorch_dist.parallel.fsdp.zero import BYTES, BYTES_MIXED, held, sent, sent_near

SETTINGS = ("hidden", "dropout", "lr", "clip", "seed", "exact")     # what the curve depends on, beside data and steps
RANGES = {
    program.AT_LEAST_1: ("epochs", "steps", "batch_size", "save_every", "replicas"),
    program.AT_LEAST_0: ("lr", "seed", "clip"),
    program.PROBABILITY: ("dropout",),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="fully_sharded.py", description=__doc__)
    p.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="what is cut (default: 3, parameters too)")
    p.add_argument("--keep", action="store_true", help="stage 3: keep gathered parameters from forward to backward")
    p.add_argument("--replicas", type=int, default=1, help="copies of the state, each cut over its part of the ranks")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    p.add_argument("--batch-size", type=int, help="samples per step over all ranks (default: mnist 128, digits 64)")
    p.add_argument("--hidden", default="512,512", help="widths of the hidden layers, comma-separated")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a unit")
    p.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    p.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and dropout")
    p.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True, help="the bits of one process")
    p.add_argument("--compile", action="store_true", help="run each layer, and the optimizer, as fused kernels: "
                   "mt.compile")
    p.add_argument("--out", type=Path, default=Path("runs/sharded"), help="folder for the run's files")
    p.add_checks(work=False)
    p.add_checkpoints()
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.hidden)
    return args


def network(args):
    """mnist_demo's."""
    mt.manual_seed(args.seed)
    return nn.mlp(args.widths, args.dropout, xp.dtype("float32"))


def loss_sum(model, shard):
    """The sum of the shard's losses."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def shards(args, world):
    """The Communicator of the ranks that share a copy. ValueError where the ranks don't make up the copies."""
    if world.size % args.replicas:
        raise ValueError(f"--replicas {args.replicas} must divide the {world.size} rank{'s' * (world.size > 1)}")
    return world.split(world.rank // (world.size // args.replicas), name="shard") if args.replicas > 1 else world


class Way(NamedTuple):
    """A line of the table: a stage (0 is DistributedDataParallel), cut over the ranks of `over`, of which so many
    neighbours keep values until backward (None: no group does). On paper: bytes held per parameter, by kind, and sent.
    """

    name: str
    stage: int
    over: object
    policy: MixedPrecisionPolicy
    sizes: dict
    sent: float
    near: int | None = None


def ways(args, world, over, size):
    """[Way] of a model of so many parameters: of every stage, in 16 bits, by ZeRO++ where the ranks can be grouped, and
    with copies where there are some."""
    n, copies = world.size, world.size // over.size
    whole, short = MixedPrecisionPolicy(), MixedPrecisionPolicy("bfloat16", "bfloat16")
    found = [Way(f"{stage}" if stage else "0, DDP", stage, world, whole, BYTES, 4 * sent(stage, size, n)[0])
             for stage in range(4)]
    found += [Way(f"{stage}, 16 bits", stage, world, short, BYTES_MIXED, 2 * sent(stage, size, n)[0])
              for stage in (1, 3)]
    if near := next((group for group in range(2, n) if n % group == 0), None):
        values, gradients = sent_near(size, n, near)
        few = replace(short, param_encoding=Blocks(8), reduce_encoding=Blocks(4))
        found += [Way(f"3, near {near}", 3, world, whole, BYTES, 4 * (values + gradients), near),
                  Way("3, ZeRO++", 3, world, few, BYTES_MIXED, values + gradients / 2, near)]
    if copies > 1:
        found.append(Way(f"{args.stage}, {copies} copies", args.stage, over, whole, BYTES,
                         4 * sum(sent(args.stage, size, over.size, copies))))
    return found


def count(args, world, batch, way):
    """The ledger of the second step with Adam."""
    model = DistributedDataParallel(network(args), world) if way.stage == 0 else \
        fully_shard(network(args), world, way.stage, shard_over=way.over, mp_policy=way.policy,
                    reshard_after_forward=way.near)
    optimizer = optim.Adam(model.parameters())
    for step in range(2):       # before the run's, whose steps faults on purpose name
        with ledger.record(memory=True) as book:
            training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed, step=step - 2)
        model.zero_grad()
    return {"sent": sum(n for (_, op), n in book.bytes_sent.items()),
            **{kind: book.live[kind] for kind in BYTES}, "gathered": book.peak["buffer"]}


def table(args, world, over, dataset):
    """What a rank sends and holds, in every way, as lines of text. Collective."""
    loader = data.Loader(dataset.train_images, dataset.train_labels, dataset.default_batch_size, seed=args.seed,
                         rank=world.rank, size=world.size)
    batch = next(iter(loader.epoch(0)))
    size, n = sum(p.size for p in network(args).parameters()), world.size
    lines = [f"{size:,} parameters, Adam, {n} rank{'s' * (n > 1)}; MB of this rank, counted / on paper",
             f"{'stage':12}" + "".join(f"{head:>15}" for head in ("sent per step", *(f"{kind}s" for kind in BYTES),
                                                                   "most gathered"))]
    for way in ways(args, world, over, size):
        counted = count(args, world, batch, way)
        paper = held(way.stage, size, way.over.size, way.sizes) | {"sent": way.sent}
        cells = [f"{counted[key] / 1e6:7.2f}/{paper[key] / 1e6:5.2f}" for key in ("sent", *BYTES)]
        lines.append(f"{way.name:12}" + "".join(f"{cell:>15}" for cell in cells)
                     + f"{counted['gathered'] / 1e6:15.2f}")
    return lines


def accuracy(model, images, labels):
    """Percent of the test set that the whole model gets right."""
    model.eval()
    with mt.no_grad():
        return 100.0 * float((model(images).argmax(axis=1).numpy() == labels).mean())


def prepare(args, world):
    """All that training needs. ValueError on all ranks where something doesn't fit."""
    if args.exact:
        training.prepare_exact(world)
    if args.keep and args.stage < 3:
        raise ValueError(f"--keep --stage {args.stage}: parameters are cut in stage 3 only")
    over = shards(args, world)
    dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
    loader = data.Loader(dataset.train_images, dataset.train_labels, args.batch_size or dataset.default_batch_size,
                         seed=args.seed, rank=world.rank, size=world.size, micro_shards=8 if args.exact else 1)
    whole = network(args)
    for i, layer in enumerate(whole) if args.compile else ():       # what a unit is, before its values come and go
        whole[i] = mt.compile(layer)
    model = fully_shard(whole, world, args.stage, reshard_after_forward=not args.keep, exact=args.exact,
                        shard_over=over)
    return dataset, loader, model, over


def train(args, world):
    """Train, and return the summary."""
    with program.usage_errors("fully_sharded.py"):
        dataset, loader, model, over = prepare(args, world)
        epochs, steps = program.length(args, len(loader), dataset.default_epochs)
        optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        if args.compile:
            mt.compile(optimizer)
        plan = optim.LambdaLR(optimizer, optim.cosine(steps, 0))
        settings = {name: getattr(args, name) for name in SETTINGS} | {
            "data": dataset.name, "data_crc32": training.crc32(dataset.train_images, dataset.train_labels),
            "batch_size": loader.sampler.batch_size, "steps": steps}
        checks = Checks(args, world, model, steps)
        # With --resume in another stage as well.
        run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
        run.restore(model, optimizer, plan)
    stop = False
    lines = table(args, world, over, dataset)
    with run, program.Progress(world, steps) as progress, program.Interrupt() as interrupt:
        progress.say("\n".join([dataset.source, *lines]))
        checks.begin()
        for epoch, batches in run.epochs(loader, steps):
            for batch in batches:
                begin = time.perf_counter()
                loss, stop = training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed,
                                                 step=run.step, clip=args.clip, stop=interrupt.wanted)
                plan.step()
                run.log(loss, epoch, batch.count, begin)
                progress.step(loss)
                saves = stop or run.due(args.save_every, steps)
                checks.after(run.step, batch, saves, progress.say)
                if saves:
                    run.save(model, optimizer)
                if stop or run.step == steps:
                    break
            progress.say(f"epoch {epoch + 1} of {epochs}: loss {loss:.4f}, {run.speed:,.0f} samples/s")
            if stop:
                progress.say(interrupt.said(run, steps))
                break
        whole = network(args)
        whole.load_state_dict(world.broadcast_object(full_state_dict(model)))
        percent = accuracy(whole, dataset.test_images, dataset.test_labels)
        checks.end(progress.say)
        status = interrupt.status(world)
    return run.finish(whole, data=dataset.name, test_accuracy=percent, model="mlp", hidden=args.widths,
                      dropout=args.dropout, stage=args.stage, keep=args.keep, replicas=args.replicas, lr=args.lr,
                      clip=args.clip, epochs=epochs, batch_size=loader.sampler.batch_size, seed=args.seed,
                      exact=args.exact, compile=args.compile, table=lines, interrupted=stop, exit_status=status)


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM. SystemExit(2) for what can't be
    trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("fully_sharded.py"):
        world = comm.world()
        args = parse(argv)
    summary = train(args, world)
    if world.rank == 0:
        print(program.closing(summary, args.out))
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
