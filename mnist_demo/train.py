"""Train a network on handwritten digits, on one rank or on several.

    python mnist_demo/train.py --out runs/one
    mpirun -n 2 python mnist_demo/train.py --out runs/two
    python mnist_demo/compare.py runs/one runs/two -o runs/curves.png
    mpirun -n 2 python mnist_demo/train.py --mine       # with what you wrote in the course

Each run leaves history.jsonl (one line per optimizer step), summary.json and
parameters.npz in its folder. The loss of a step is that of the GLOBAL batch, so
that the curves of any two runs can be laid over each other. Ctrl-C, or SIGTERM,
ends after the step under way, and saves what there is. A loss that is inf or NaN ends
the run, with status 1.
"""

import argparse
import sys
import time
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, program, training, utilization
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.data.augment import RandomShift
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.noise_scale import GradientNoiseScale

sys.path.insert(0, str(Path(__file__).parent))      # also where another program runs this file
import mine  # noqa: E402

MODELS = {      # name -> constructor from the arguments and a dtype
    "mlp": lambda a, dtype: nn.mlp(a.widths, a.dropout, dtype),
    "cnn": lambda a, dtype: nn.lenet(a.dropout, dtype),
    "transformer": lambda a, dtype: nn.ImageTransformer(a.pieces, dropout=a.dropout, dtype=dtype),
}
DEFAULTS = {    # what trains each model well; the batch size of None is the data set's
    "mlp": {"optimizer": "sgd", "batch_size": None},
    "cnn": {"optimizer": "adamw", "batch_size": 32},
    "transformer": {"optimizer": "adamw", "batch_size": None},
}
WARMUP = {"mlp": 0, "cnn": 100, "transformer": 100}
OPTIMIZERS = {  # name -> (constructor from parameter groups and lr, default learning rate)
    "sgd": (lambda groups, lr: optim.SGD(groups, lr=lr, momentum=0.9), 0.05),
    "adam": (lambda groups, lr: optim.Adam(groups, lr=lr), 2e-3),
    "adamw": (lambda groups, lr: optim.AdamW(groups, lr=lr), 3e-3),
}
RANGES = {      # what depends on data or ranks is checked where it is used
    program.AT_LEAST_1: ("epochs", "steps", "batch_size", "micro_shards", "accumulate", "save_every"),
    program.AT_LEAST_0: ("augment", "lr", "weight_decay", "warmup", "clip", "seed", "trace"),
    program.PROBABILITY: ("dropout",),
    program.MORE_THAN_0: ("bucket_mb",),
}
LIBRARY = mine.Plugged({})     # --mine has other pieces in the five places where there is a choice
# What a curve depends on: a run goes on from a checkpoint with the same settings only.
SETTINGS = ("model", "hidden", "pieces", "dropout", "optimizer", "lr", "weight_decay", "schedule", "warmup", "clip",
            "dtype", "seed", "exact", "micro_shards", "augment", "compile", "amp", "skip_spikes")
TOLERANCE = {"float64": 1e-6, "float32": 1e-2}      # of --mine, for losses and parameters; float32 rounds its way off
EVAL_CHUNK = 500    # test images per forward pass: the same on any number of ranks


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="train.py", description=__doc__)
    p.section("data")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--augment", type=int, default=0, metavar="PIXELS", help="shift each image by up to so many pixels")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    p.add_argument("--batch-size", type=int,
                   help="samples per step over all ranks (default: mnist 128, digits 64; cnn 32)")
    p.section("model")
    p.add_argument("--model", choices=list(MODELS), default="mlp", help="cnn: LeNet-5")
    p.add_argument("--hidden", default="512,512", help="mlp: widths of the hidden layers, comma-separated")
    p.add_argument("--pieces", choices=["patches", "rows"], default="patches",
                   help="transformer: how an image is cut")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a unit")
    p.section("training")
    p.add_argument("--optimizer", choices=sorted(OPTIMIZERS), help="default: mlp sgd, the others adamw")
    p.add_argument("--lr", type=float, help="learning rate (default: sgd 0.05, adam 0.002, adamw 0.003)")
    p.add_argument("--weight-decay", type=float, default=0.0, help="of matrices; vectors are never decayed")
    p.add_argument("--schedule", choices=list(optim.SCHEDULES), default="cosine",
                   help="of the learning rate, after the warmup; wsd: it stays, and falls over the last fifth")
    p.add_argument("--warmup", type=int, help="steps over which the learning rate rises (default: mlp 0, others 100 "
                   "or half of the run)")
    p.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    p.add_spikes()
    p.add_argument("--dtype", choices=["float32", "float64"], help="default: float32; with --mine float64")
    p.add_argument("--amp", choices=["float16", "bfloat16"],
                   help="mixed precision: autocast and, in float16, a GradScaler")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and dropout")
    p.section("ranks and devices")
    p.add_argument("--exact", action="store_true", help="the same bits on 1, 2, 4 … micro-shards ranks (slower)")
    p.add_argument("--micro-shards", type=int, default=8, help="pieces of a batch in exact mode, a power of two; "
                   "dropout draws its numbers by them in any mode")
    p.add_argument("--accumulate", type=int, default=1, help="backward passes per step and rank, reduced once")
    p.add_argument("--noise-scale", action="store_true", help="measure the gradient noise scale: which batch size is "
                   "worth it")
    p.add_argument("--bucket-mb", type=float, default=25, help="MiB of gradients per all-reduce")
    p.add_argument("--trace", type=int, nargs="?", const=3, default=0, metavar="STEPS",
                   help="record what every rank does during so many steps (default 3), from the fifth on: trace.json "
                        "for ui.perfetto.dev and timeline.png in the run's folder")
    p.add_argument("--comm", metavar="ALGORITHM",
                   help="who reduces: auto (the node's shared memory, else MPI), mpi, shared, ring, tree, "
                        "recursive_doubling, halving_doubling, FILE.py:FUNCTION (default: $MINITORCH_COMM, else auto)")
    p.add_argument("--device", default="cpu", help="cpu, cuda (a node's ranks take its GPUs in turn) or cuda:NUMBER")
    p.add_argument("--compile", action="store_true", help="run model and optimizer as fused kernels: mt.compile")
    p.add_argument("--mine", action="store_true", help="train with your optimizer, loss, collective, gradient_sync and "
                   "sampler of the course (ours where yours haven't passed), then with the library's, and compare")
    p.add_argument("--out", type=Path, help="folder for the run's files (default: runs/RANKS-ranks)")
    p.add_mfu()
    p.add_checks()
    p.add_checkpoints()
    args = p.parse_args(argv)
    args.widths = p.widths(args.hidden)
    p.check_ranges(args, RANGES)
    p.check_needs(args, {f"--model {model}": (args.model == model, [name])
                         for model, name in (("mlp", "hidden"), ("transformer", "pieces"))})
    if args.accumulate > 1 and args.exact:
        p.error(f"--accumulate {args.accumulate} --exact: exact mode runs one micro-shard at a time by itself; raise "
                "--micro-shards instead")
    if args.amp and (args.mine or args.dtype == "float64"):
        p.error(f"--amp {args.amp}: autocast leaves float64 as it is, and --mine compares in float64: without "
                f"{'--mine' if args.mine else '--dtype float64'}")
    if args.mine:
        if args.exact or args.comm or args.device != "cpu":
            p.error("--mine runs on the CPU, with your own collective and sums: without --exact, --comm and --device")
        if args.noise_scale:
            p.error("--noise-scale measures the library's gradients: without --mine")
        if args.resume or args.save_every or args.async_save:
            p.error("--mine can't go on from a checkpoint, which knows nothing of your optimizer's state: without "
                    "--save-every, --async-save, --resume and a supervisor")
        args.optimizer, args.dtype = args.optimizer or "adam", args.dtype or "float64"
    args.dtype = args.dtype or "float32"
    for name, value in DEFAULTS[args.model].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    args.lr = OPTIMIZERS[args.optimizer][1] if args.lr is None else args.lr
    return args


def loss_sum(model, shard):
    """The sum of the shard's losses."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def accuracy(model, images, labels, world):
    """Percent of the test set that the model gets right; each rank takes its share of fixed chunks."""
    model.eval()
    right, device = xp.zeros(1, xp.int64), next(model.parameters()).device
    with mt.no_grad():
        for i in range(world.rank * EVAL_CHUNK, len(labels), world.size * EVAL_CHUNK):
            logits = model(mt.backend.to(images[i:i + EVAL_CHUNK], device))
            right += (logits.argmax(axis=1).cpu().numpy() == labels[i:i + EVAL_CHUNK]).sum()
    model.train()
    world.all_reduce(right)
    return 100.0 * int(right[0]) / len(labels)


def finite(number):
    """What JSON has of a number: None for inf and NaN."""
    return number if xp.isfinite(number) else None


def prepare(args, world, plugged):
    """All that training needs, and nothing begun. ValueError or OSError on all ranks where something doesn't fit."""
    world.algorithm = plugged.algorithm(args.comm or world.algorithm)
    device = program.take_device(args.device, world)
    if args.exact:
        training.prepare_exact(world, args.micro_shards)
    dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
    dtype = xp.dtype(args.dtype)
    images, test_images = (xp.asarray(a, dtype) for a in (dataset.train_images, dataset.test_images))
    batch_size = args.batch_size or dataset.default_batch_size
    loader = data.Loader(images, dataset.train_labels, batch_size, seed=args.seed,
                         parts=plugged.parts(len(images), batch_size, world.size, args.seed),
                         rank=world.rank, size=world.size, micro_shards=args.micro_shards if args.exact else 1,
                         augment=RandomShift(len(images), reach=args.augment, seed=args.seed) if args.augment else None)
    epochs, steps = program.length(args, len(loader), dataset.default_epochs)

    mt.manual_seed(args.seed)
    model = MODELS[args.model](args, dtype).to(device)
    use = utilization.measure(world, model, mt.backend.to(images[:1], device), dtype=args.amp or dtype,
                              device=device) if args.mfu else None
    model = DistributedDataParallel(mt.compile(model) if args.compile else model, world, bucket_cap_mb=args.bucket_mb,
                                    exact=args.exact, micro_shards=args.micro_shards)
    plugged.hook(model)
    noise = GradientNoiseScale(model) if args.noise_scale else None
    spikes = optim.SpikeGuard(args.skip_spikes) if args.skip_spikes else None
    if noise and min(batch_size, args.micro_shards if args.exact else world.size * args.accumulate) < 2:
        raise ValueError("--noise-scale compares gradients of parts of a batch: take 2 samples or more, and " +
                         ("--micro-shards 2" if args.exact else "2 ranks, or --accumulate 2"))
    if args.accumulate > batch_size:
        raise ValueError(f"--accumulate {args.accumulate}: a batch of {batch_size} has no more pieces than samples; "
                         f"take {batch_size} or fewer")
    groups = training.decay_groups(model, args.weight_decay)
    optimizer = plugged.optimizer(groups, args.lr, args.optimizer) or OPTIMIZERS[args.optimizer][0](groups, args.lr)
    if args.compile and isinstance(optimizer, optim.Optimizer):
        mt.compile(optimizer)
    args.warmup = program.warmup(args.warmup, WARMUP[args.model], steps)
    schedule = optim.LambdaLR(optimizer, optim.SCHEDULES[args.schedule](steps, args.warmup))
    scaler = optim.GradScaler(comm=world) if args.amp == "float16" else None
    checks = Checks(args, world, model, steps, plugged.loss_sum or loss_sum, seed=args.seed, amp=args.amp,
                    micro_shards=args.micro_shards)
    settings = {name: getattr(args, name) for name in SETTINGS} | {
        "data": dataset.name, "data_crc32": training.crc32(dataset.train_images, dataset.train_labels),
        "batch_size": batch_size, "steps": steps}
    # Last: what doesn't fit leaves the files of an earlier run alone.
    run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
    watches = {name: watch for name, watch in (("noise", noise), ("spikes", spikes)) if watch}
    run.restore(model, optimizer, schedule, scaler, **watches)
    return argparse.Namespace(run=run, device=device, dataset=dataset, test_images=test_images, loader=loader,
                              epochs=epochs, steps=steps, model=model, optimizer=optimizer, schedule=schedule,
                              scaler=scaler, noise=noise, spikes=spikes, watches=watches, checks=checks, use=use)


def train(args, world, plugged=LIBRARY):
    """Train, and return the summary; rank 0 writes the history as it goes. plugged: a mine.Plugged."""
    with program.usage_errors("train.py"):
        ready = prepare(args, world, plugged)
    run, dataset, loader, model, stop = ready.run, ready.dataset, ready.loader, ready.model, False
    steps, epochs, optimizer, noise, percent = ready.steps, ready.epochs, ready.optimizer, ready.noise, None
    tracer = program.Tracer(world, args.out, steps=range(run.step + 4, run.step + 4 + args.trace))
    with run, tracer, program.Progress(world, steps) as progress, program.Interrupt() as interrupt:
        progress.say(f"{dataset.source}\n{sum(p.size for p in model.parameters()):,} parameters, {world.size} "
                     f"rank{'s' * (world.size > 1)}, {steps:,} steps of {loader.sampler.batch_size} samples"
                     f"{', exact' * args.exact}" + f", from step {run.step:,} on" * run.resume)
        ready.checks.begin()
        for epoch, batches in run.epochs(loader, steps):
            for batch in plugged.watch(batches):
                tracer.at(run.step)
                begin = time.perf_counter()
                loss, stop = training.train_step(
                    model, optimizer, batch, plugged.loss_sum or loss_sum, world, seed=args.seed, step=run.step,
                    clip=args.clip, micro_shards=args.micro_shards, accumulate=args.accumulate, stop=interrupt.wanted,
                    amp=args.amp, scaler=ready.scaler, noise=noise, spikes=ready.spikes)
                ready.schedule.step()
                run.log(loss, epoch, batch.count, begin)
                progress.step(loss)
                if ready.spikes and (spike := ready.spikes.at(run.step)):
                    progress.say(str(spike))
                saves = not args.mine and (stop or run.due(args.save_every, steps))
                ready.checks.after(run.step, batch, saves, progress.say)
                if saves:
                    run.save(model, optimizer, ready.scaler, **ready.watches)
                if stop or run.step == steps:
                    break
            percent = accuracy(model, ready.test_images, dataset.test_labels, world)
            progress.say(f"epoch {epoch + 1} of {epochs}: loss {loss:.4f}, test accuracy {percent:.2f} %, "
                         f"{run.speed:,.0f} samples/s")
            if noise:
                progress.say(noise.told(loader.sampler.batch_size))
            if stop:
                progress.say(interrupt.said(run, steps, goes_on=not args.mine))
                break
        if percent is None:     # a checkpoint of the last step
            percent = accuracy(model, ready.test_images, dataset.test_labels, world)
        ready.checks.end(progress.say)
        if ready.use:
            progress.say(ready.use.told(run.speed))
        status = interrupt.status(world)
    return run.finish(
        model, data=dataset.name, test_accuracy=percent, model=args.model, hidden=args.widths, pieces=args.pieces,
        optimizer=args.optimizer, lr=args.lr, weight_decay=args.weight_decay, schedule=args.schedule,
        warmup=args.warmup, batch_size=loader.sampler.batch_size, augment=args.augment, dropout=args.dropout,
        clip=args.clip, dtype=args.dtype, seed=args.seed, exact=args.exact, micro_shards=args.micro_shards,
        compile=args.compile, amp=args.amp, comm=comm.name_of(world.algorithm), device=ready.device, epochs=epochs,
        interrupted=stop, exit_status=status, **{"gradient_noise_scale": finite(noise.scale)} if noise else {},
        **{"left_out": [spike.step for spike in ready.spikes.found]} if ready.spikes else {},
        **ready.use.facts(run.speed) if ready.use else {})


def train_mine(args, world):
    """Train with the pieces of the course, then on the same batches with the library's; (summary, one curve or not)."""
    with program.usage_errors("train.py"):
        pieces, whose = mine.of_the_course()
    library = argparse.Namespace(**vars(args) | {"out": args.out / "library"})
    if world.rank == 0:
        print("\n".join(["what runs where:", *whose]), flush=True)
        if args.optimizer == "sgd":
            print("  …but the optimizer is the library's SGD, as you asked: the course's is Adam")
    usual = world.algorithm
    summary = train(args, world, mine.Plugged(pieces))
    if summary["exit_status"]:
        return summary, True
    if world.rank == 0:
        print("the same batches, with the library's own:", flush=True)
    world.algorithm = usual
    if status := train(library, world, mine.Plugged({}, order=pieces["sampler"]))["exit_status"]:
        return summary | {"exit_status": status}, True
    one = True
    if world.rank == 0:
        lines, one = mine.compare(args.out, library.out, TOLERANCE[args.dtype])
        print("\n".join(lines), flush=True)
    return summary, world.broadcast_object(one)


def main(argv=None):
    """The program; returns the exit status: 0, 1 where --mine draws another curve than the library, 130 after Ctrl-C,
    143 after SIGTERM. SystemExit(2) for what can't be trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("train.py"):
        world = comm.world()
        args = parse(argv)
    args.out = args.out or Path("runs") / f"{'mine-' * args.mine}{world.size}-rank{'s' * (world.size > 1)}"
    summary, one = train_mine(args, world) if args.mine else (train(args, world), True)
    if world.rank == 0:
        print(program.closing(summary, args.out))
    return summary["exit_status"] or int(not one)


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
