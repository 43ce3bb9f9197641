"""Train a multi-layer perceptron on handwritten digits, on one rank or on several.

    python mnist_demo/train.py --out runs/one
    mpirun -n 2 python mnist_demo/train.py --out runs/two
    python mnist_demo/compare.py runs/one runs/two -o runs/curves.png

Each run leaves history.jsonl (one line per optimizer step) and summary.json in
its folder. The loss of a step is that of the GLOBAL batch, so that the curves
of any two runs can be laid over each other.
"""

import argparse
import hashlib
import json
import resource
import sys
import time
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, ledger, nn, optim
from minitorch_dist.backend import xp
from minitorch_dist.parallel import BinaryCounter, DistributedDataParallel

OPTIMIZERS = {   # name -> (constructor, default learning rate)
    "sgd": (lambda params, lr: optim.SGD(params, lr=lr, momentum=0.9), 0.05),
    "adam": (lambda params, lr: optim.Adam(params, lr=lr), 1e-3),
    "adamw": (lambda params, lr: optim.AdamW(params, lr=lr), 1e-3),
}
EVAL_CHUNK = 500    # test images per forward pass: the same on any number of ranks


def parse(argv):
    """The command line. Sizes are checked where they are used, with the values that don't fit."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    p.add_argument("--batch-size", type=int, help="samples per step over all ranks (default: mnist 128, digits 64)")
    p.add_argument("--hidden", default="512,512", help="widths of the hidden layers, comma-separated")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a hidden unit")
    p.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    p.add_argument("--lr", type=float, help="learning rate (default: sgd 0.05, adam and adamw 0.001)")
    p.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    p.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    p.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--exact", action="store_true", help="the same bits on 1, 2, 4 … micro-shards ranks (slower)")
    p.add_argument("--micro-shards", type=int, default=8, help="pieces of a batch in exact mode, a power of two")
    p.add_argument("--bucket-mb", type=float, default=25, help="MiB of gradients per all-reduce")
    p.add_argument("--out", type=Path, help="folder for the run's files (default: runs/RANKS-ranks)")
    args = p.parse_args(argv)
    try:
        args.widths = [int(w) for w in args.hidden.split(",") if w]
    except ValueError:
        p.error(f"--hidden {args.hidden!r}: widths are whole numbers separated by commas, like 512,512")
    for name in ("epochs", "steps", "batch_size", "micro_shards"):
        value = getattr(args, name)
        if value is not None and value < 1:
            p.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if min(args.widths, default=1) < 1:
        p.error(f"--hidden {args.hidden!r}: widths must be at least 1")
    args.lr = OPTIMIZERS[args.optimizer][1] if args.lr is None else args.lr
    return args


def build_model(widths, dropout, dtype):
    """784 -> widths, each with ReLU (and dropout) -> 10 logits; He initialisation."""
    layers, inside = [], 784
    for width in widths:
        layers += [nn.Linear(inside, width, dtype=dtype, weight_init=nn.init.he_normal), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inside = width
    return nn.Sequential(*layers, nn.Linear(inside, 10, dtype=dtype, weight_init=nn.init.he_normal))


class Progress:
    """Rank 0's progress bar on a terminal; elsewhere a line per epoch."""

    def __init__(self, world, total):
        self.bar = self.task = None
        self.speaks = world.rank == 0
        if self.speaks and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            self.bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                                TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("", total=total, note="")

    def step(self, loss):
        if self.bar:
            self.bar.update(self.task, advance=1, note=f"loss {loss:.4f}")

    def epoch(self, text):
        if self.speaks:
            (self.bar.console.print if self.bar else print)(text)

    def close(self):
        if self.bar:
            self.bar.stop()


def train_step(model, optimizer, batch, args, step, world):
    """One optimizer step on a global batch; returns its loss, a float that is equal on all ranks."""
    optimizer.zero_grad()
    total = BinaryCounter()
    for shard in batch.shards:      # one per rank; in exact mode, this rank's micro-shards
        with backend.random_scope(args.seed, step, batch.count, shard.rows, args.micro_shards):
            losses = nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
            (losses / batch.count).backward()
        total.add(xp.array([losses.item()]))
    if args.clip is not None:
        optim.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    loss = total.total()
    world.all_reduce(loss, exact=args.exact)
    return float(loss[0]) / batch.count


def accuracy(model, images, labels, world):
    """Percent of the test set that the model gets right; each rank takes its share of fixed chunks."""
    model.eval()
    right = xp.zeros(1, xp.int64)
    with mt.no_grad():
        for i in range(world.rank * EVAL_CHUNK, len(labels), world.size * EVAL_CHUNK):
            logits = model(images[i:i + EVAL_CHUNK])
            right += (logits.argmax(axis=1).numpy() == labels[i:i + EVAL_CHUNK]).sum()
    model.train()
    world.all_reduce(right)
    return 100.0 * int(right[0]) / len(labels)


def parameters_sha256(model):
    """Digest of all parameters in name order: equal digests, equal bits."""
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        digest.update(p.numpy().tobytes())
    return digest.hexdigest()


def peak_memory_bytes():
    """The most memory that this process has had resident. (macOS counts in bytes, Linux in KiB.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(args, world):
    """Train, and return the summary; rank 0 writes the history as it goes."""
    dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
    dtype = xp.dtype(args.dtype)
    images, test_images = (xp.asarray(a, dtype) for a in (dataset.train_images, dataset.test_images))
    loader = data.Loader(images, dataset.train_labels, args.batch_size or dataset.default_batch_size, seed=args.seed,
                         rank=world.rank, size=world.size, micro_shards=args.micro_shards if args.exact else 1)
    epochs = args.epochs or (-(-args.steps // len(loader)) if args.steps else dataset.default_epochs)
    steps = min(args.steps or epochs * len(loader), epochs * len(loader))
    epochs = -(-steps // len(loader))

    mt.manual_seed(args.seed)
    model = DistributedDataParallel(build_model(args.widths, args.dropout, dtype), world, bucket_cap_mb=args.bucket_mb,
                                    exact=args.exact, micro_shards=args.micro_shards)
    make, _ = OPTIMIZERS[args.optimizer]
    optimizer = make(model.parameters(), args.lr)
    schedule = optim.LambdaLR(optimizer, optim.cosine(steps) if args.schedule == "cosine" else optim.constant())
    if world.rank == 0:
        print(f"{dataset.source}\n{sum(p.size for p in model.parameters()):,} parameters, {world.size} "
              f"rank{'s' * (world.size > 1)}, {steps:,} steps of {loader.sampler.batch_size} samples"
              f"{', exact' * args.exact}", flush=True)

    progress = Progress(world, steps)
    history = (args.out / "history.jsonl").open("w") if world.rank == 0 else None
    step, samples, busy = 0, 0, 0.0
    try:
        with ledger.record() as book:
            for epoch in range(epochs):
                for batch in loader.epoch(epoch):
                    if step == steps:
                        break
                    begin = time.perf_counter()
                    loss = train_step(model, optimizer, batch, args, step, world)
                    schedule.step()
                    busy += time.perf_counter() - begin
                    step, samples = step + 1, samples + batch.count
                    if history:
                        line = {"step": step, "epoch": epoch, "loss": loss, "samples": samples}
                        history.write(json.dumps(line) + "\n")
                    progress.step(loss)
                percent = accuracy(model, test_images, dataset.test_labels, world)
                progress.epoch(f"epoch {epoch + 1} of {epochs}: loss {loss:.4f}, test accuracy {percent:.2f} %, "
                               f"{samples / busy:,.0f} samples/s")
    finally:
        progress.close()
        if history:
            history.close()

    digest = parameters_sha256(model)
    digests = world.all_gather_object(digest)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different parameters: {dict(enumerate(digests))}")
    return {
        "ranks": world.size, "data": dataset.name, "test_accuracy": percent, "parameters_sha256": digest,
        "samples_per_second": samples / busy, "steps": step, "samples": samples, "final_loss": loss,
        "bytes_sent_per_rank": book.total_bytes_sent(),
        "peak_memory_bytes": peak_memory_bytes(),
        "optimizer": args.optimizer, "lr": args.lr, "schedule": args.schedule, "hidden": args.widths,
        "batch_size": loader.sampler.batch_size, "dropout": args.dropout, "clip": args.clip, "dtype": args.dtype,
        "seed": args.seed, "exact": args.exact, "micro_shards": args.micro_shards, "epochs": epochs,
    }


def main(argv=None):
    """The program; returns the exit status."""
    args = parse(argv)
    world = comm.world()
    if args.exact:      # a product split over threads adds up in another order
        from threadpoolctl import threadpool_limits
        threadpool_limits(1)
    args.out = args.out or Path("runs") / f"{world.size}-rank{'s' * (world.size > 1)}"
    if world.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").unlink(missing_ok=True)     # a run that breaks off leaves no summary behind
    try:
        summary = run(args, world)
    except (data.DataNotFound, data.IdxError, ValueError) as error:
        if world.size > 1:
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if world.rank == 0:
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"test accuracy {summary['test_accuracy']:.2f} %, {summary['samples_per_second']:,.0f} samples/s, "
              f"parameters {summary['parameters_sha256'][:12]}, run written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
