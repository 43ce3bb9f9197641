"""A pipeline that never runs empty, beside one that does after every batch: what late gradients cost.

    mpirun -n 2 python examples/no_flush.py
    mpirun -n 4 python examples/no_flush.py --micro-batches 4 --lr 0.005,0.01

PipeDream-2BW begins with the next batch while gradients of the last one are under way,
so each gradient is that of the weights before the last step, and each rank keeps these,
too. mnist_demo's network, cut by layers, is trained both ways, at several learning
rates: at small ones there is no difference to be seen, at large ones only gradients in
time do. Times are of one step, between two evaluations.

Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training".
"""

import sys
import time

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, nn, optim, program
from minitorch_dist.parallel.pipelines import PipeDream2BW, Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward, play
from minitorch_dist.tables import aligned


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="no_flush.py", description=__doc__)
    p.add_argument("--micro-batches", type=int, help="pieces of a batch (default: as many as ranks, or 2)")
    p.add_argument("--lr", default="0.002,0.005,0.01,0.02", help="learning rates of SGD, comma-separated; its momentum "
                   "is 0.9")
    p.add_argument("--hidden", default="256,256,256", help="widths of the hidden layers, comma-separated")
    p.add_argument("--batch-size", type=int, default=64, help="samples per step")
    p.add_argument("--epochs", type=int, default=10, help="passes over the digits")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("micro_batches", "batch_size", "epochs"), program.AT_LEAST_0: ("seed",)})
    args.widths = p.widths(args.hidden)
    try:
        args.rates = [float(rate) for rate in args.lr.split(",")]
        if not all(0 < rate < float("inf") for rate in args.rates):
            raise ValueError
    except ValueError:
        p.error(f"--lr {args.lr}: expected numbers above 0, separated by commas")
    return args


def loss_sum(logits, labels):
    """The sum of the samples' losses."""
    return nn.cross_entropy(logits, labels, reduction="sum")


def hits(logits, labels):
    """How many are right."""
    return (logits.numpy().argmax(axis=1) == labels).sum()


def stage_of(args, world):
    """This rank's part of the network."""
    mt.manual_seed(args.seed)
    return cut_sequential(nn.mlp(args.widths), world.size)[world.rank]


def loader_of(args, digits):
    """Whole batches."""
    return data.Loader(digits.train_images, digits.train_labels, args.batch_size, seed=args.seed, drop_last=True)


def made(late, lr, args, world):
    """(this rank's part of the network, its optimizer or None, the pipeline, without a flush if late)."""
    stage = stage_of(args, world)
    params = list(stage.parameters())
    optimizer = optim.SGD(params, lr=lr, momentum=0.9) if params else None
    if late:
        return stage, optimizer, PipeDream2BW(stage, world, optimizer, args.micro_batches)
    return stage, optimizer, Pipeline([stage], world, one_forward_one_backward(world.size, args.micro_batches))


def train(late, lr, args, world, digits):
    """(mean loss of the last epoch, percent of the test set, ms per step) of one training."""
    stage, optimizer, pipeline = made(late, lr, args, world)
    loader = loader_of(args, digits)
    step, best = 0, float("inf")
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        if late:
            losses = pipeline.train(list(loader.epoch(epoch)), loss_sum, seed=args.seed, step=step)
        else:
            losses = []
            for i, batch in enumerate(loader.epoch(epoch)):
                stage.zero_grad()
                losses.append(pipeline.run(batch, loss_sum, seed=args.seed, step=step + i))
                if optimizer is not None:
                    optimizer.step()
        step += len(loader)
        best = min(best, (time.perf_counter() - begin) / len(loader))
    test = data.Loader(digits.test_images, digits.test_labels, 360, shuffle=False)
    right = sum(pipeline.evaluate(batch, hits) for batch in test.epoch(0))
    return sum(losses) / len(losses), 100 * right / len(digits.test_labels), 1000 * best


def main(argv=None):
    """The program; returns the exit status."""
    with program.usage_errors("no_flush.py"):
        world = comm.world()
        args = parse(argv)
        args.micro_batches = args.micro_batches or max(2, world.size)
        digits = data.load("digits")
        made(True, args.rates[0], args, world)      # what doesn't fit is said before anything is trained
        batches = len(loader_of(args, digits))
    p, m = world.size, args.micro_batches
    flushed, late = (play(one_forward_one_backward(p, n)).bubble for n in (m, m * batches))
    rows = [["", "with a flush", "", "", "2BW", "", ""],
            ["lr", "loss", "test", "ms/step", "loss", "test", "ms/step"]]
    for lr in args.rates:
        with divergence.quiet():
            found = [train(kind, lr, args, world, digits) for kind in (False, True)]
        rows.append([f"{lr:g}", *(cell for loss, percent, ms in found for cell in (
            f"{loss:.4f}", f"{percent:.1f} %", f"{ms:.2f}"))])
    if world.rank == 0:
        print(f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}; on paper ranks wait for {100 * flushed:.0f} "
              f"% of the time with a flush, {100 * late:.1f} % without\n" + "\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
