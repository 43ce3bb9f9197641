"""Sequences cut over the ranks: what a rank keeps and sends, and a training run that one process would have had.

    mpirun -n 4 python examples/long_context.py
    mpirun -n 4 python examples/long_context.py --lengths 1024,2048,4096 --how all_to_all --text play.txt
    mpirun -n 4 python examples/long_context.py --window 64 --layout contiguous
    mpirun -n 4 python examples/long_context.py --window linear --layout contiguous     # or delta
    mpirun -n 4 python examples/long_context.py --window 4x16 --how all_to_all      # 4 blocks of 16, which are chosen

For each length T it runs forward and backward of a small GPT on one sequence:
whole, as a ring, and by all-to-all between sequence and heads. The ledger says
how many MB a rank keeps for backward, and how many it sends for attention,
beside the formula. Then it trains a few steps on the shortest T, in float64,
and rank 0 does the same alone.
"""

import math
import sys
from pathlib import Path

import numpy as np

from minitorch_dist import comm, ledger, nn, optim, program, training
from minitorch_dist.backend import manual_seed
from minitorch_dist.data import Loader
from minitorch_dist.data.text import Windows, read_text
from minitorch_dist.nn.windows import LINEAR, STATES, as_text, blocks_of, window_of, windows_of
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.context.context import HOW, check_heads, context_parallel, cut_sequence
from minitorch_dist.parallel.context.ring_attention import chunks

MODEL = {"layers": 2, "heads": 4, "dim": 64, "dropout": 0.1}
README = Path(__file__).parents[1] / "README.md"
MB = 1e6


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="long_context.py", description=__doc__)
    p.add_argument("--lengths", default="256,512,1024", help="positions per sequence, comma-separated")
    p.add_argument("--how", choices=list(HOW), default="ring", help="what trains")
    p.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag", help="who has which positions")
    p.add_argument("--window", metavar="N", help="positions that one sees at most (default: all before it); 4x16: so "
                   "many blocks, of so many positions, that it chooses; linear or delta, which keep a state of them; "
                   "several, by block: linear,all")
    p.add_argument("--text", type=Path, default=README, help="a UTF-8 file to learn (default: this project's README)")
    p.add_argument("--steps", type=int, default=5, help="optimizer steps")
    p.add_argument("--batch-size", type=int, default=2, help="sequences per step")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and dropout")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("steps", "batch_size"), program.AT_LEAST_0: ("seed",)})
    args.window = windows_of(p.windows(args.window))
    args.lengths = p.widths(args.lengths, "--lengths", fewest=1)
    return args


def gpt(args, vocabulary, length, dtype):
    """The same model on every rank."""
    manual_seed(args.seed)
    return nn.GPT(vocabulary, length, dtype=dtype, window=args.window, **MODEL)


def ways(args):
    """In which the ranks can share sequences: all, or where blocks are chosen, by heads alone."""
    return [how for how in HOW if how != "ring" or not any(map(blocks_of, args.window))]


def count(args, text, length, ranks, how=None):
    """(bytes kept for backward, bytes sent by attention) of one step on one sequence; how=None: all of it here."""
    model = gpt(args, len(text.vocabulary), length, np.float32)
    part = text.train[None, :length].copy()     # what is kept of a view is all of it
    if how is not None:
        context_parallel(model, ranks, how, args.layout)
        model.context.summed = True     # nobody steps
        part = cut_sequence(part, ranks, args.layout)
    with ledger.record(memory=True) as book:
        loss = nn.cross_entropy(model(part), part, reduction="sum")
        kept = book.live["activation"]
        loss.backward()
    return kept, book.total_bytes_sent()


def on_paper(how, length, n, args):
    """Bytes that attention of float32 sends, forward and backward."""
    return sum(of_block(how, window_of(args.window, i), length // n, n, args.layout) for i in range(MODEL["layers"]))


def of_block(how, window, part, n, layout):
    """on_paper, of a block with such a window; part: positions of a rank."""
    if window in STATES:        # a matrix of each head, and what is left of one before, of each piece, to all and back
        pieces, state = len(chunks(0, n, layout)), (MODEL["dim"] // MODEL["heads"]) ** 2
        return 2 * (n - 1) * pieces * MODEL["heads"] * (state + (1 if window == LINEAR else state)) * 4
    once = 2 * part * MODEL["dim"] * 4      # this rank's keys and values
    hops = n - 1        # and with a window as far as it reaches, where neighbours in the sequence are so in the ring
    if isinstance(window, int) and (layout == "contiguous" or window == 1):
        hops = min(hops, math.ceil((window - 1) / part))
    return {"ring": 3 * hops * once, "all_to_all": 4 * (n - 1) * once / n}[how]


def table(args, text, ranks):
    """What a rank keeps and sends, for every length, as lines of text. Collective."""
    heads = "".join(f"{f'{how}: kept':>18}{'sent':>16}" for how in ways(args))
    lines = [f"one sequence on {ranks.size} rank{'s' * (ranks.size > 1)}, float32; MB of this rank, sent: counted / on "
             "paper", f"{'T':>6}{'whole: kept':>14}{heads}"]
    for length in args.lengths:
        line = f"{length:6}{count(args, text, length, ranks)[0] / MB:14.2f}"
        for how in ways(args):
            kept, sent = count(args, text, length, ranks, how)
            line += f"{kept / MB:18.2f}{sent / MB:9.3f}/{on_paper(how, length, ranks.size, args) / MB:6.3f}"
        lines.append(line)
    return lines


def loss_sum(model, shard):
    """The sum of the losses of all characters here."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def train(args, text, ranks, divided):
    """The loss of every step, equal on all ranks; divided: each has a part of every sequence."""
    length = min(args.lengths)
    model = gpt(args, len(text.vocabulary), length, np.float64)
    if divided:
        context_parallel(model, ranks, args.how, args.layout)
    model = DistributedDataParallel(model, ranks)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    windows, losses = Windows(text.train, length), []
    batches = Loader(windows.inputs, windows.targets, args.batch_size, seed=args.seed).epoch(0)
    for step, batch in zip(range(args.steps), batches, strict=False):
        part = cut_sequence(batch, ranks, args.layout) if divided else batch
        losses.append(training.train_step(model, optimizer, part, loss_sum, ranks, seed=args.seed, step=step,
                                          units=length)[0])
    return losses


def check(args, text, world):
    """ValueError on all ranks for what can't be done."""
    if args.how not in ways(args):
        raise ValueError(f"--how {args.how} --window {as_text(args.window)}: a ring doesn't have all blocks to choose "
                         f"from: --how {' or '.join(ways(args))}")
    if not set(args.window) <= set(STATES):     # states are of all heads on each rank
        check_heads("all-to-all, which is counted beside the ring", MODEL["heads"], MODEL["heads"], world)
    for length in args.lengths:
        Windows(text.train, length)
        cut_sequence(text.train[None, :length], world, args.layout)


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be done."""
    with program.usage_errors("long_context.py"):
        world = comm.world()
        args = parse(argv)
        text = read_text(args.text)
        check(args, text, world)
    alone = world.split(world.rank, name="alone")
    lines = table(args, text, world)
    parts = train(args, text, world, divided=True)
    whole = world.broadcast_object(train(args, text, alone, divided=False) if world.rank == 0 else None)
    lines += ["", f"training, T = {min(args.lengths)}, {args.how}: loss in nats per character",
              f"{'step':>6}{'one process':>16}{f'{world.size} ranks':>16}{'difference':>14}"]
    lines += [f"{step:6}{a:16.10f}{b:16.10f}{abs(a - b):14.1e}" for step, (a, b) in enumerate(zip(whole, parts,
                                                                                                  strict=True))]
    if world.rank == 0:
        print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
