"""Train mnist_demo's network by parameter servers, with one slow worker: sync, async, and async with a bound.

    mpirun -n 4 python examples/parameter_server.py                         # a table of all modes, beside DDP
    mpirun -n 4 python examples/parameter_server.py --mode async --slow 3   # one: updates/s, staleness, accuracy, bytes
    mpirun -n 5 python examples/parameter_server.py --mode async --servers 2 --optimizer adagrad --n-push 2 --n-fetch 4

Rank 0 (and more with --servers) keeps the parameters; the others compute. A
worker's step takes a second of virtual time, the last worker's --slow seconds
(with --straggler random any worker's, now and then), and servers serve in the
order of these times: so updates per second depend on no computer, and a run
repeats itself to the last bit. All modes get equally many gradients, each of a
worker's share of a global batch; in sync mode, as in DDP, the shares of a batch
make one update, in async mode one each. A bound helps against stragglers that
change; behind one that is always slow all wait in the end.
"""

import itertools
import sys
from collections import Counter, deque
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, divergence, ledger, nn, optim, program, training
from minitorch_dist.backend import xp
from minitorch_dist.comm.link import VirtualClock
from minitorch_dist.comm.together import together
from minitorch_dist.flat import layout
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.servers.parameter_server import ParameterServer, roles
from minitorch_dist.viz.curves import Run, curves

OPTIMIZERS = {      # name -> (optimizer(parameters, lr), its default lr)
    "sgd": (optim.SGD, 0.05),
    "adagrad": (optim.Adagrad, 0.02),
    "adam": (optim.Adam, 0.002),
}
MODES = {           # label -> (mode, max_staleness)
    "sync": ("sync", None), "async, s=0": ("async", 0), "async, s=2": ("async", 2), "async": ("async", None),
}
RANGES = {
    program.AT_LEAST_1: ("servers", "epochs", "steps", "batch_size", "n_fetch", "n_push"),
    program.FINITE_1: ("slow",),
    program.AT_LEAST_0: ("lr", "seed", "max_staleness", "local_lr"),
}
COLUMNS = "updates/s", "gradients/s", "staleness", "most", "accuracy %", "MB/gradient", "on paper"


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="parameter_server.py", description=__doc__)
    p.add_argument("--mode", choices=["all", "sync", "async"], default="all", help="who waits for whom")
    p.add_argument("--max-staleness", type=int, metavar="S",
                   help="with --mode async: pushes that a worker may be ahead of the slowest (default: any number)")
    p.add_argument("--servers", type=int, default=1, help="ranks that keep the parameters, a block each")
    p.add_argument("--slow", type=float, default=4.0, help="seconds of virtual time that a slow step takes")
    p.add_argument("--straggler", choices=["last", "random"], default="last",
                   help="who is slow: the last worker, or each step of N workers with probability 1/N")
    p.add_argument("--n-fetch", type=int, default=1, help="async: steps from one pull to the next (Downpour)")
    p.add_argument("--n-push", type=int, default=1, help="async: steps from one push to the next")
    p.add_argument("--local-lr", type=float, default=0.0, help="async: learning rate of the copy between two pulls")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, default=15, help="passes over the training set")
    p.add_argument("--steps", type=int, help="stop after this many global batches")
    p.add_argument("--batch-size", type=int, help="samples of all workers' shares (default: mnist 128, digits 64)")
    p.add_argument("--hidden", default="64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="of the servers")
    p.add_argument("--lr", type=float, help="learning rate (default: sgd 0.05, adagrad 0.02, adam 0.002)")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, default=Path("runs/parameter-server"), help="folder for curves.png")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.hidden)
    if args.mode != "async" and (args.max_staleness, args.n_fetch, args.n_push, args.local_lr) != (None, 1, 1, 0.0):
        p.error("--max-staleness, --n-fetch, --n-push and --local-lr are for --mode async")
    return args


def network(args):
    """mnist_demo's."""
    mt.manual_seed(args.seed)
    return nn.mlp(args.widths, 0.0, xp.dtype("float32"))


def optimizer(args, parameters):
    """What --optimizer and --lr say."""
    kind, lr = OPTIMIZERS[args.optimizer]
    return kind(parameters, lr=lr if args.lr is None else args.lr)


def backward(model, batch):
    """The loss of this share of a batch, divided by the global batch's count; its gradients are left on the model."""
    loss = nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count
    loss.backward()
    return loss.item()


def loader_of(args, dataset, rank, size):
    """This worker's shares."""
    return data.Loader(dataset.train_images, dataset.train_labels, args.batch_size or dataset.default_batch_size,
                       seed=args.seed, rank=rank, size=size)


def endless(loader):
    """Batches of all epochs."""
    return (batch for epoch in itertools.count() for batch in loader.epoch(epoch))


def by_ddp(args, group, dataset, steps):
    """(losses of all steps, model) by DistributedDataParallel on the workers alone."""
    model = DistributedDataParallel(network(args), group)
    update, losses = optimizer(args, model.parameters()), []
    batches = itertools.islice(endless(loader_of(args, dataset, group.rank, group.size)), steps)
    for step, batch in enumerate(batches, 1):
        update.zero_grad()
        loss = xp.array([backward(model, batch)])
        group.all_reduce(loss)
        losses.append(float(loss[0]))
        divergence.check(losses[-1], step, update)
        update.step()
    return losses, model.module


def seconds_of(args, step, index, workers):
    """How long a worker's step takes."""
    if args.straggler == "random":
        slow = backend.stream("straggler", args.seed, step, index).random() < 1 / workers
    else:
        slow = index == workers - 1
    return args.slow if slow else 1.0


def work(args, ps, clock, model, dataset, steps):
    """A worker's part; the loss of each of its pushes."""
    losses, wanted = [0.0], steps * len(ps.workers)
    for batch in endless(loader_of(args, dataset, ps.index, len(ps.workers))):
        ps.zero_grad()
        loss = backward(model, batch)
        divergence.check(loss, ps.steps + 1)
        losses[-1] += loss / ps.n_push
        clock.sleep(seconds_of(args, ps.steps, ps.index, len(ps.workers)))
        ps.step()
        if ps.steps % ps.n_push == 0:
            losses.append(0.0)
        if ps.steps == steps if ps.sync else ps.version * ps.n_push >= wanted:
            return losses


def by_servers(args, world, dataset, steps, mode, max_staleness):
    """{what: value} of one run, on rank 0. Collective."""
    model, clock = network(args), VirtualClock()
    with ledger.record() as book, ParameterServer(
            model, lambda parameters: optimizer(args, parameters), world, args.servers, mode, max_staleness,
            args.n_fetch, args.n_push, args.local_lr, clock) as ps:
        losses = work(args, ps, clock, model, dataset, steps) if ps.is_worker else []
    sent, gathered = book.bytes_sent["rpc", "send"], world.gather_object((losses, ps.steps))
    sent = world.gather_object(sent)
    if world.rank:
        return None
    history, gradients = ps.history[0], sum(made for _, made in gathered)
    of_worker = {rank: deque(gathered[rank][0]) for rank in ps.workers}
    in_order = [of_worker[push.worker].popleft() for push in history]
    workers = len(ps.workers)
    padded = layout(model.parameters())[0][-1].end
    return {"losses": [sum(in_order[i:i + workers]) for i in range(0, len(in_order) - workers + 1, workers)],
            "model": model, "staleness": Counter(ps.staleness()), "seconds": history[-1].time,
            "updates": ps.version, "gradients": gradients,
            "bytes": sum(sent) / gradients, "paper": 4 * padded * (1 / ps.n_push + 1 / ps.n_fetch)}


def accuracy(model, dataset):
    """Percent of the test set that the model gets right."""
    with mt.no_grad():
        return 100.0 * float((model(dataset.test_images).argmax(axis=1).numpy() == dataset.test_labels).mean())


def row(label, found, percent):
    """A line of the table."""
    counts = found["staleness"]
    mean = sum(k * n for k, n in counts.items()) / counts.total()
    rates = (found[what] / found["seconds"] for what in ("updates", "gradients"))
    sizes = (found[what] / 1e6 for what in ("bytes", "paper"))
    cells = (*(f"{rate:.2f}" for rate in rates), f"{mean:.2f}", str(max(counts)), f"{percent:.2f}",
             *(f"{size:.3f}" for size in sizes))
    return f"{label:12}" + "".join(f"{cell:>13}" for cell in cells)


def histogram(label, counts):
    """Lines of text: how many pushes had which staleness."""
    most = max(counts.values())
    return [f"staleness of {counts.total():,} pushes, {label}:"] + [
        f"{staleness:6d} {counts[staleness]:8,d}  {'#' * round(50 * counts[staleness] / most)}"
        for staleness in range(max(counts) + 1)]


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("parameter_server.py"):
        world = comm.world()
        args = parse(argv)
        servers, workers = roles(world.size, args.servers)
        dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
        batches = len(loader_of(args, dataset, 0, len(workers)))
        program.make_folder(args.out, world)
    _, steps = program.length(args, batches, args.epochs)
    modes = MODES if args.mode == "all" else {args.mode: (args.mode, args.max_staleness)}
    group = world.split(0 if world.rank in workers else None)
    with divergence.ends(world), divergence.quiet():
        reference = world.gather_object(
            together(world, lambda: by_ddp(args, group, dataset, steps) if group else None))
        found = {label: by_servers(args, world, dataset, steps, *mode) for label, mode in modes.items()}
    if world.rank == 0:
        report(args, dataset, steps, workers, reference[workers[0]], found)
    world.barrier()
    return 0


def report(args, dataset, steps, workers, reference, found):
    """Print the table, and draw the curves."""
    losses, model = reference
    facts = {"data": dataset.name, "seed": args.seed, "ranks": len(workers)}
    slow = "the last of them" if args.straggler == "last" else f"each with probability 1/{len(workers)}"
    print(f"{dataset.source}\n{steps:,} global batches, {len(workers)} workers, a step takes 1 s, or {args.slow:g} s "
          f"({slow}); {args.servers} server{'s' * (args.servers > 1)}, {args.optimizer}")
    print(f"{'':12}" + "".join(f"{name:>13}" for name in COLUMNS))
    print(f"{'DDP':12}" + "".join(f"{cell:>13}" for cell in "----") + f"{accuracy(model, dataset):13.2f}")
    runs = [Run("DDP", xp.arange(1, steps + 1), xp.array(losses),
                facts | {"parameters_sha256": training.parameters_sha256(model)})]
    for label, run in found.items():
        print(row(label, run, accuracy(run["model"], dataset)))
        count = min(len(run["losses"]), steps)
        runs.append(Run(label, xp.arange(1, count + 1), xp.array(run["losses"][:count]),
                        facts | {"parameters_sha256": training.parameters_sha256(run["model"])}))
    for label, run in found.items():
        if len(run["staleness"]) > 1:
            print("\n".join(histogram(label, run["staleness"])))
    for run in runs[1:]:
        same = run.summary["parameters_sha256"] == runs[0].summary["parameters_sha256"]
        print(f"{run.name}: parameters {run.summary['parameters_sha256'][:12]}" + ", DDP's to the last bit" * same)
    path = args.out / "curves.png"
    curves(runs, path, title="by servers, beside data parallelism: late gradients have curves of their own")
    print(f"curves: {path}")


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
