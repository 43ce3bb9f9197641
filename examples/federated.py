"""Federated averaging: many clients, whose data stay with them, train one model; rounds and bytes are what it costs.

    python examples/federated.py                            # on the digits; a minute
    mpirun -n 2 python examples/federated.py                # the same rows, in about half the time: the same bits
    python examples/federated.py --data mnist --clients 100 --target 94 --rounds 200     # the setting of the paper

The first table: how many rounds the test accuracy takes to --target percent. FedSGD makes one step per round on all of
a client's samples, the others one or five epochs in batches of 10; clients have samples of all classes, or of two. The
second: what the clients have sent by then, where updates are rounded and thinned out on their way up.

Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data"; Konečný et al.
2016, "Federated learning: strategies for improving communication efficiency".
"""

import sys
import time

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, nn, program
from minitorch_dist.parallel.encodings import LowRank, RandomMask, Sketch, Whole
from minitorch_dist.parallel.local_sgd import FederatedAveraging, split_by_label, split_evenly

LOCAL = {       # what a client does in a round
    "FedSGD": {"epochs": 1, "batch_size": None},
    "FedAvg, 1 epoch": {"epochs": 1, "batch_size": 10},
    "FedAvg, 5 epochs": {"epochs": 5, "batch_size": 10},
}
ENCODINGS = {
    "whole, float32": Whole(),
    "random mask, a quarter": RandomMask(1 / 4),
    "low rank, 8": LowRank(8),
    "2 bits": Sketch(levels=4),
    "2 bits, rotated": Sketch(levels=4, rotate=True),
    "2 bits, rotated, a quarter": Sketch(levels=4, rotate=True, keep=1 / 4),
    "2 bits, rotated, a sixteenth": Sketch(levels=4, rotate=True, keep=1 / 16),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="federated.py", description=__doc__)
    p.add_argument("--data", choices=["digits", "mnist"], default="digits", help="which images")
    p.add_argument("--samples", type=int, help="of the training images (default: all)")
    p.add_argument("--hidden", default="64", help="widths of the hidden layers")
    p.add_argument("--clients", type=int, default=50, help="that the samples are split between")
    p.add_argument("--fraction", type=float, default=0.1, help="of them is drawn for a round")
    p.add_argument("--lr", type=float, default=0.1, help="of local SGD")
    p.add_argument("--target", type=float, default=85.0, help="percent of the test images")
    p.add_argument("--rounds", type=int, default=120, help="at most")
    p.add_argument("--seed", type=int, default=0, help="of initial values, splits and draws")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("samples", "clients", "rounds"), program.AT_LEAST_0: ("seed",),
                          program.POSITIVE: ("lr", "target"), program.SHARE: ("fraction",)})
    if args.target > 100:
        p.error(f"--target {args.target:g}: percent of the test images: at most 100")
    args.hidden = p.widths(args.hidden)
    return args


def accuracy(model, images):
    """Percent of the test images."""
    with mt.no_grad():
        return 100 * float((model(images.test_images).numpy().argmax(1) == images.test_labels).mean())


def until(args, images, clients, **settings):
    """(rounds to the target or None, the accuracy then, bytes that clients have sent)."""
    mt.manual_seed(args.seed)
    model = nn.mlp(args.hidden)
    inputs, labels = images.train_images[:args.samples], images.train_labels[:args.samples]
    learning = FederatedAveraging(model, inputs, labels, clients, fraction=args.fraction, lr=args.lr, seed=args.seed,
                                  **settings)
    up = 0
    for number in range(1, args.rounds + 1):
        done = learning.round()
        divergence.check(done.loss, number, learning.local, learned=number > 1 or learning.batch_size is not None)
        up += done.up
        if (reached := accuracy(model, images)) >= args.target:
            return number, reached, up
    return None, reached, up


def rounds_in_words(args, rounds, reached):
    """Of a table's cell."""
    return f"{rounds:,}" if rounds else f"{reached:.1f} % after {args.rounds:,}"


def main(argv=None):
    """The program; returns the exit status."""
    args = parse(argv)
    begin, world = time.perf_counter(), comm.world()

    def say(text):
        if world.rank == 0:
            print(text, flush=True)
    with program.usage_errors("federated.py"), divergence.ends(world), divergence.quiet():
        images = data.load(args.data, rank=world.rank, broadcast=world.broadcast_object)
        labels = images.train_labels[:args.samples]
        splits = {"all classes each": split_evenly(len(labels), args.clients, args.seed),
                  "two classes each": split_by_label(labels, args.clients, 2, args.seed)}
        say(f"{images.source}\n{len(labels):,} samples of {args.clients} clients, of whom "
            f"{max(1, round(args.fraction * args.clients))} take part in a round\n\n"
            f"rounds to {args.target:g} %  " + "".join(f"{name:>22}" for name in splits))
        for name, settings in LOCAL.items():
            found = [until(args, images, clients, **settings) for clients in splits.values()]
            cells = [rounds_in_words(args, rounds, reached) for rounds, reached, _ in found]
            say(f"{name:16}  " + "".join(f"{cell:>22}" for cell in cells))
        say(f"\n{'FedAvg, 1 epoch, all classes each':34}{'rounds':>22}  MB sent by clients")
        for name, encoding in ENCODINGS.items():
            rounds, reached, up = until(args, images, splits["all classes each"], encoding=encoding)
            say(f"{name:34}{rounds_in_words(args, rounds, reached):>22}  {up / 1e6:18.2f}")
    say(f"\n{time.perf_counter() - begin:.0f} s on {world.size} rank{'s' * (world.size > 1)}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
