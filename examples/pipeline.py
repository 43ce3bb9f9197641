"""Train mnist_demo's network with its layers on different ranks: the same curve.

    python mnist_demo/train.py --exact --epochs 1 --out runs/whole
    mpirun -n 2 python examples/pipeline.py --exact --epochs 1 --out runs/pipeline
    python mnist_demo/compare.py runs/whole runs/pipeline       # identical to the bit

The options that both programs have mean the same in both. On more ranks than
stages the samples are divided too: mpirun -n 4 … --stages 2; and with --zero 1,
2 or 3 the optimizer's state, gradients, parameters of each stage. The schedules are
drawn by python -m minitorch_dist pipeline 1f1b; of those with two stages per
rank, --schedule zb-v has the least bubble, v-min holds least, and dualpipev is for
experts, whose messages it hides. Ctrl-C, or SIGTERM, ends after the step under way,
and saves what there is.
"""

import sys
import time
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, faults, nn, optim, program, training
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import SCHEDULES, placement_of, play, schedule_of

SETTINGS = ("hidden", "dropout", "lr", "seed", "exact")     # what the curve depends on, beside data and steps
EVAL_BATCH = 1000
RANGES = {
    program.AT_LEAST_1: ("stages", "chunks", "epochs", "steps", "batch_size", "micro_batches", "save_every"),
    program.AT_LEAST_0: ("lr", "seed"),
    program.PROBABILITY: ("dropout",),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="pipeline.py", description=__doc__)
    p.add_argument("--stages", type=int, help="ranks along the pipeline (default: all)")
    p.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="who works when")
    p.add_argument("--chunks", type=int, default=2, help="of layers, per rank, in interleaved (the V's have 2)")
    p.add_argument("--micro-batches", type=int, help="pieces of a rank's samples (default: 8; --exact has its own)")
    p.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=0,
                   help="ZeRO's stage, over the ranks that share the samples (default: 0, nothing is cut)")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    p.add_argument("--batch-size", type=int, help="samples per step over all ranks (default: mnist 128, digits 64)")
    p.add_argument("--hidden", default="512,512", help="widths of the hidden layers, comma-separated")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a unit")
    p.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and dropout")
    p.add_argument("--exact", action="store_true", help="the bits of one process; 8 micro-batches over all ranks")
    p.add_argument("--out", type=Path, default=Path("runs/pipeline"), help="folder for the run's files")
    p.add_checks(work=False)
    p.add_checkpoints()
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    p.check_needs(args, {"--schedule interleaved": (args.schedule == "interleaved", ["chunks"])})
    args.widths = p.widths(args.hidden)
    return args


def accuracy(pipeline, dataset, dp, exact):
    """Percent of the test set that the model gets right, without a rank that has all of it."""
    def hits(logits, labels):
        return (logits.numpy().argmax(axis=1) == labels).sum()
    loader = data.Loader(dataset.test_images, dataset.test_labels, EVAL_BATCH, rank=dp.rank, size=dp.size,
                         micro_shards=8 if exact else 1, shuffle=False)
    right = sum(pipeline.evaluate(batch, hits, over=dp) for batch in loader.epoch(0))
    return 100.0 * right / len(dataset.test_labels)


def network(args):
    """The whole model."""
    mt.manual_seed(args.seed)
    return nn.mlp(args.widths, args.dropout, xp.dtype("float32"))


def prepare(args, world):
    """All that training needs. ValueError on all ranks where something doesn't fit."""
    if world.size % (args.stages or 1):
        raise ValueError(f"--stages {args.stages}: must divide the number of ranks, which is {world.size}")
    mesh = comm.DeviceMesh(world, dp=-1, pp=args.stages or world.size)
    dp, pp = mesh["dp"], mesh["pp"]
    if args.exact:
        training.prepare_exact(dp)
        if args.micro_batches:
            raise ValueError(f"--micro-batches {args.micro_batches} --exact: exact mode has 8 over all ranks")
    dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
    loader = data.Loader(dataset.train_images, dataset.train_labels, args.batch_size or dataset.default_batch_size,
                         seed=args.seed, rank=dp.rank, size=dp.size, micro_shards=8 if args.exact else 1)
    schedule = schedule_of(args.schedule, pp.size, 8 // dp.size if args.exact else args.micro_batches or 8, args.chunks)
    placement = placement_of(schedule)
    whole, count = network(args), sum(map(len, placement))
    if len(whole) < count:
        raise ValueError(f"--hidden {args.hidden}: {len(whole)} layers can't be cut into {count} stages, "
                         f"{count // pp.size} on each of {pp.size} ranks: lower --stages or --chunks, or give more "
                         "widths")
    parts = cut_sequential(whole, count)

    def wrapped(part):
        if not args.zero or not list(part.parameters()):     # an activation alone has nothing to cut
            return DistributedDataParallel(part, dp, exact=args.exact)
        return fully_shard(part, dp, args.zero, exact=args.exact)
    stages = [wrapped(parts[stage]) for stage in placement[pp.rank]]
    return mesh, dataset, loader, schedule, Pipeline(stages, pp, schedule)


def loss_sum(logits, labels):
    """The sum of the samples' losses."""
    return nn.cross_entropy(logits, labels, reduction="sum")


def train(args, world):
    """Train, and return the summary."""
    with program.usage_errors("pipeline.py"):
        mesh, dataset, loader, schedule, pipeline = prepare(args, world)
        epochs, steps = program.length(args, len(loader), dataset.default_epochs)
        parameters = [p for stage in pipeline.chunks for p in stage.parameters()]
        optimizer = optim.SGD(parameters, lr=args.lr, momentum=0.9) if parameters else None
        plan = optim.LambdaLR(optimizer, optim.cosine(steps, 0)) if parameters else None
        settings = {name: getattr(args, name) for name in SETTINGS} | {
            "data": dataset.name, "data_crc32": training.crc32(dataset.train_images, dataset.train_labels),
            "batch_size": loader.sampler.batch_size, "steps": steps}
        checks = Checks(args, world, pipeline.chunks, steps, peers=mesh["dp"])
        # With --resume with another cut as well.
        run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
        run.restore(pipeline.chunks, optimizer, plan)
    stop = False
    played = play(schedule)
    with run, program.Progress(world, steps) as progress, program.Interrupt() as interrupt:
        progress.say(f"{dataset.source}\n{args.schedule}, ranks: {mesh.axes['pp']} along the pipeline × "
                     f"{mesh.axes['dp']} sharing the samples{f', ZeRO {args.zero}' * (args.zero > 0)}; "
                     f"{pipeline.micro_batches} micro-batches\n"
                     f"the bubble: ranks wait for {100 * played.bubble:.0f} % of the time; micro-batches"
                     f"{' of one stage' * (len(pipeline.chunks) > 1)} of which a rank holds something for backward at "
                     f"once: {', '.join(map(str, played.held))}")
        checks.begin()
        for epoch, batches in run.epochs(loader, steps):
            for batch in batches:
                begin = time.perf_counter()
                strike = faults.of_step(world, run.step + 1)
                strike("begin", parameters)
                for stage in pipeline.chunks:
                    stage.zero_grad()
                with divergence.quiet():
                    loss = pipeline.run(batch, lambda *shard, strike=strike: strike("computed", loss_sum(*shard)),
                                        seed=args.seed, step=run.step, over=mesh["dp"])
                strike("reduced", parameters)
                divergence.check(loss, run.step + 1, optimizer)
                if parameters:
                    optimizer.step()
                    plan.step()
                run.log(loss, epoch, batch.count, begin)
                progress.step(loss)
                stop = interrupt.agreed(world)
                saves = stop or run.due(args.save_every, steps)
                checks.after(run.step, batch, saves, progress.say)
                if saves:
                    run.save(pipeline.chunks, optimizer)
                if stop or run.step == steps:
                    break
            progress.say(f"epoch {epoch + 1} of {epochs}: loss {loss:.4f}, {run.speed:,.0f} samples/s")
            if stop:
                progress.say(interrupt.said(run, steps))
                break
        percent = accuracy(pipeline, dataset, mesh["dp"], args.exact)
        whole = network(args)
        whole.load_state_dict(full_state_dict(pipeline.chunks, mesh["pp"]))
        checks.end(progress.say)
        status = interrupt.status(world)
    return run.finish(whole, data=dataset.name, test_accuracy=percent, model="mlp", hidden=args.widths,
                      dropout=args.dropout, pipeline_schedule=args.schedule, zero=args.zero, lr=args.lr, epochs=epochs,
                      batch_size=loader.sampler.batch_size, seed=args.seed, exact=args.exact, mesh=mesh.axes,
                      micro_batches=pipeline.micro_batches, bubble=played.bubble, interrupted=stop, exit_status=status)


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM. SystemExit(2) for what can't be
    trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("pipeline.py"):
        world = comm.world()
        args = parse(argv)
    summary = train(args, world)
    if world.rank == 0:
        print(program.closing(summary, args.out))
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
