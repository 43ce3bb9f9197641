"""Lottery tickets: a small part of a network learns as well as all of it, if it starts from the values it had.

    python examples/lottery_ticket.py
    python examples/lottery_ticket.py --data mnist --samples 20000 --share 0.2 --rounds 9 --repeats 1
    python examples/lottery_ticket.py --rewind 20       # tickets start from the values after 20 steps

LeNet-300-100 is trained, the smallest weights of each layer go, the rest is put back to its initial values, trained
again, and so on. Beside each ticket two controls: its mask on other initial values, and its values under a mask of as
many weights at random places. Then what the last ticket weighs.
"""

import sys
import time
from statistics import mean

import minitorch_dist as mt
from minitorch_dist import data, divergence, nn, optim, program
from minitorch_dist.compress import prune, sparse
from minitorch_dist.compress.lottery import lottery_ticket


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="lottery_ticket.py", description=__doc__)
    p.add_argument("--data", choices=["digits", "mnist"], default="digits", help="which images")
    p.add_argument("--samples", type=int, help="train on so many (default: all)")
    p.add_argument("--hidden", default="300,100", help="widths of the hidden layers")
    p.add_argument("--epochs", type=int, default=10, help="of each training")
    p.add_argument("--lr", type=float, default=1.2e-3, help="Adam's learning rate")
    p.add_argument("--rounds", type=int, default=6, help="of pruning")
    p.add_argument("--share", type=float, default=0.4, help="of what is left goes in each round")
    p.add_argument("--rewind", type=int, default=0, help="back to the values after so many steps")
    p.add_argument("--scope", choices=["layer", "global"], default="layer", help="where the smallest are looked for")
    p.add_argument("--controls", type=int, default=3, help="rounds, the last ones, in which they are trained, too")
    p.add_argument("--repeats", type=int, default=2, help="the whole with so many seeds; the table shows means")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("samples", "epochs", "rounds", "repeats"),
                          program.POSITIVE: ("lr",), program.AT_LEAST_0: ("rewind", "controls")})
    args.hidden = p.widths(args.hidden)
    return args


def trainer(args, images):
    """train(model, after_step, start) for lottery_ticket: the test accuracy, in percent."""
    loader = data.Loader(images.train_images[:args.samples], images.train_labels[:args.samples], batch_size=60)

    def train(model, after_step, start):
        optimizer = optim.Adam(model.parameters(), args.lr)
        first, skip = divmod(start, len(loader))
        for epoch in range(first, args.epochs):
            batches = loader.epoch(epoch, skip if epoch == first else 0)
            for step, batch in enumerate(batches, 1 + max(start, epoch * len(loader))):
                loss = nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count
                divergence.check(loss.item(), step, optimizer)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after_step()
        with mt.no_grad():
            right = model(images.test_images).numpy().argmax(axis=1) == images.test_labels
        return 100 * float(right.mean())
    return train


def table(found):
    """Means over the repeats, one line per round."""
    lines = ["weights kept    ticket  reinitialised  random mask"]
    for rounds in zip(*(tickets.rounds for tickets in found), strict=True):
        kinds = ("ticket", "reinitialised", "random") if rounds[0].random is not None else ("ticket",)
        scores = [mean(getattr(r, kind) for r in rounds) for kind in kinds]
        cells = [f"{score:.2f} %".rjust(width) for score, width in zip(scores, (8, 13, 11), strict=False)]
        lines.append(f"{100 * rounds[0].kept:10.1f} %  {'  '.join(cells)}")
    return "\n".join(lines)


def weighed(state, masks):
    """Bytes of a ticket's parameters, dense and without its zeros."""
    state = {name: value * masks[name] if name in masks else value for name, value in state.items()}
    dense, packed = (sparse.nbytes(sparse.pack_all(state, m)) for m in ({}, masks))
    return f"{dense:,} bytes; as bitmasks and values {packed:,}, 1/{dense / packed:.1f}"


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("lottery_ticket.py")
    args = parse(argv)
    begin = time.perf_counter()

    def make_model(seed):
        mt.manual_seed(seed)
        return nn.mlp(args.hidden)
    with program.usage_errors("lottery_ticket.py"), divergence.ends(), divergence.quiet():
        images = data.load(args.data)
        train = trainer(args, images)
        found = [lottery_ticket(make_model, train, args.rounds, args.share, args.rewind, args.scope,
                                controls=range(max(1, args.rounds - args.controls + 1), args.rounds + 1),
                                seed=1000 * repeat)
                 for repeat in range(args.repeats)]
    print(f"{images.source}\ntest accuracy, means over {args.repeats} "
          f"{'seeds' if args.repeats > 1 else 'seed'}\n\n{table(found)}\n")
    last = found[-1]
    print(f"The last ticket\n{prune.sparsity(make_model(0), last.rounds[-1].masks)}\n")
    print(f"stored: {weighed(last.start, last.rounds[-1].masks)}\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
