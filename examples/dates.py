"""An encoder and a decoder: dates as people write them, read, and written as ISO 8601 has them.

    python examples/dates.py
    mpirun -n 2 python examples/dates.py --exact --out runs/dates-2     # the bits of one process

    the 29th of November 2026     →     2026-11-29

The encoder sees the whole line. The decoder writes a character after another, and
looks back at the line by attention to what the encoder has made of it; alignment.png
shows where. Dates that are asked were not among those to learn from.

Sources: Bahdanau, Cho, Bengio 2015, "Neural machine translation by jointly learning
to align and translate" (such pictures); Vaswani et al. 2017 (the two stacks).
"""

import datetime
import sys
import time
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim, program, training, viz
from minitorch_dist.data import Loader
from minitorch_dist.nn.decoding import KeyValueCache, by_position
from minitorch_dist.parallel import DistributedDataParallel

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")
FORMS = {       # name -> a date as people write it
    "numbers": lambda d: f"{d.day}.{d.month}.{d.year}",
    "day first": lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    "month first": lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    "short": lambda d: f"{MONTHS[d.month - 1][:3]} {d.day}, {d.year}",
    "spoken": lambda d: f"the {d.day}{ORDINALS.get(d.day, 'th')} of {MONTHS[d.month - 1]} {d.year}",
}
ORDINALS = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"}
FROM, DAYS = datetime.date(1900, 1, 1).toordinal(), 73_000      # some two hundred years
SOURCES, WRITTEN = 26, 10
CHARACTERS = sorted(set(" -.,0123456789thsndrdof" + "".join(MONTHS)))       # number 0 is padding, and the beginning
HELD_BACK, ASKED_AT_ONCE = 400, 200


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="dates.py", description=__doc__)
    p.add_argument("--rows", type=int, default=12_800, help="dates to learn from")
    p.add_argument("--epochs", type=int, default=2, help="passes over them")
    p.add_argument("--batch-size", type=int, default=64, help="dates per step over all ranks")
    p.add_argument("--dim", type=int, default=64, help="features of a character")
    p.add_argument("--heads", type=int, default=4, help="of each attention")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a weight of attention")
    p.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate, after warm-up")
    p.add_argument("--seed", type=int, default=0, help="of initial values, dates, their order, dropout")
    p.add_argument("--exact", action="store_true", help="one set of bits, on 1, 2, 4 or 8 ranks")
    p.add_argument("--out", type=Path, default=Path("runs/dates"), help="folder for the run's files")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("rows", "epochs", "batch_size", "dim", "heads"),
                          program.AT_LEAST_0: ("lr", "seed"), program.PROBABILITY: ("dropout",)})
    return args


def encoded(text, length):
    """A text as numbers, padded with 0: int64 (length,)."""
    row = np.zeros(length, np.int64)
    row[:len(text)] = [CHARACTERS.index(c) + 1 for c in text]
    return row


def decoded(row):
    """The text of such numbers."""
    return "".join(CHARACTERS[c - 1] for c in row if c)


def rows_of(days, rng):
    """(lines (n, SOURCES), dates (n, WRITTEN)), int64, of days by number, each in one of FORMS."""
    dates = [datetime.date.fromordinal(FROM + int(day)) for day in days]
    forms = [list(FORMS.values())[i] for i in rng.integers(0, len(FORMS), len(dates))]
    return (np.stack([encoded(form(date), SOURCES) for form, date in zip(forms, dates, strict=True)]),
            np.stack([encoded(date.isoformat(), WRITTEN) for date in dates]))


class Encoder(nn.Module):
    """Lines (batch, SOURCES) -> (what is made of each character (batch, SOURCES, dim), where there is one)."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.embed, self.places = (nn.Embedding(n, dim, std=0.5) for n in (len(CHARACTERS) + 1, SOURCES))
        self.block = nn.TransformerBlock(dim, heads, attention_dropout=dropout)

    def forward(self, lines):
        there = lines != 0
        x = self.embed(lines) + self.places(slice(SOURCES))
        return self.block(x, there.astype(int)), there[:, None, None]       # padding is a document of its own


class Decoder(nn.Module):
    """What is written so far (batch, time), and an Encoder's -> logits of what comes next (batch, time, characters)."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.embed = nn.Embedding(len(CHARACTERS) + 1, dim, std=0.5)
        self.block = nn.TransformerBlock(dim, heads, causal=True, rotary=True, cross=True, attention_dropout=dropout)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, len(CHARACTERS) + 1)

    @by_position
    def forward(self, written, memory, there=None):
        return self.head(self.norm(self.block(self.embed(written), None, memory, there)))


class Rewriter(nn.Module):
    """(lines, what is written so far) -> logits of what comes next."""

    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.encoder, self.decoder = Encoder(dim, heads, dropout), Decoder(dim, heads, dropout)

    def forward(self, lines, written):
        return self.decoder(written, *self.encoder(lines))

    def write(self, lines):
        """The likeliest dates, a character after another: int64 (n, WRITTEN)."""
        memory, there = self.encoder(lines)
        written, cache = np.zeros((len(lines), 1), np.int64), KeyValueCache(self.decoder, WRITTEN)
        for _ in range(WRITTEN):
            logits = cache.read(written[:, -1:], memory, there)
            written = np.concatenate([written, logits.numpy().argmax(2)], 1)
        return written[:, 1:]

    def looks(self, line, written):
        """Where the decoder looks for each character of what it writes: (heads, WRITTEN, characters of the line)."""
        memory, there = self.encoder(line[None])
        block, x = self.decoder.block, self.decoder.embed(before(written[None]))
        x = x + block.attention(block.norm1(x))
        return block.cross_attention.weights(block.cross_norm(x), memory, there)[0][..., :np.count_nonzero(line)]


def before(dates):
    """What is written before each character of a date."""
    return np.pad(dates, ((0, 0), (1, 0)))[:, :-1]


def loss_sum(model, shard):
    """The sum of the losses of a shard's characters."""
    logits = model(shard.inputs, before(shard.labels))
    return nn.cross_entropy(logits.reshape((-1, logits.shape[2])), shard.labels.reshape(-1), reduction="sum")


def right(model, lines, dates, world):
    """Percent of dates that are written without a mistake; each rank asks for its share."""
    found = np.zeros(1, np.int64)
    for i in range(world.rank * ASKED_AT_ONCE, len(lines), world.size * ASKED_AT_ONCE):
        some = slice(i, i + ASKED_AT_ONCE)
        found += (model.write(lines[some]) == dates[some]).all(1).sum()
    world.all_reduce(found)
    return 100 * int(found[0]) / len(lines)


def train(args, world):
    """Train; returns (the model, summary, lines and dates that were held back)."""
    with program.usage_errors("dates.py"):
        if args.rows > DAYS - HELD_BACK:
            raise ValueError(f"--rows {args.rows:,}: there are {DAYS - HELD_BACK:,} dates to learn from")
        if args.exact:
            training.prepare_exact(world)
        rng = np.random.default_rng(args.seed)
        days = rng.permutation(DAYS)[:args.rows + HELD_BACK]
        lines, dates = rows_of(days, rng)
        loader = Loader(lines[HELD_BACK:], dates[HELD_BACK:], args.batch_size, seed=args.seed, rank=world.rank,
                        size=world.size, micro_shards=8 if args.exact else 1)
        mt.manual_seed(args.seed)
        network = Rewriter(args.dim, args.heads, args.dropout)
        model = DistributedDataParallel(network, world, exact=args.exact)
        optimizer, steps = optim.AdamW(training.decay_groups(model, 0.01), lr=args.lr), args.epochs * len(loader)
        schedule = optim.LambdaLR(optimizer, optim.cosine(steps, min(50, steps // 2), final=0.05))
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        run = training.Run(args.out, world, settings)
    held_back = lines[:HELD_BACK], dates[:HELD_BACK]
    with run, program.Progress(world, steps) as progress:
        progress.say(f"{args.rows:,} dates to learn from, {HELD_BACK} others to ask for; "
                     f"{sum(p.size for p in network.parameters()):,} parameters, {world.size} "
                     f"rank{'s' * (world.size > 1)}, {steps:,} steps of {args.batch_size}")
        for epoch, batches in run.epochs(loader, steps):
            for batch in batches:
                begin = time.perf_counter()
                loss, _ = training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed, step=run.step,
                                              units=WRITTEN)
                schedule.step()
                run.log(loss, epoch, batch.count, begin)
                progress.step(loss)
            percent = evaluated(network, *held_back, world)
            progress.say(f"epoch {epoch + 1} of {args.epochs}: loss {loss:.4f}, {percent:.1f} % of the dates right, "
                         f"{run.speed:,.0f} lines/s")
    return network, run.finish(network, data="dates", **settings, test_accuracy=percent), *held_back


def evaluated(network, lines, dates, world):
    """right(…), in evaluation mode."""
    network.eval()
    with mt.no_grad():
        percent = right(network, lines, dates, world)
    network.train()
    return percent


def main(argv=None):
    """The program; returns the exit status."""
    with program.usage_errors("dates.py"):
        world = comm.world()
        args = parse(argv)
    network, summary, lines, dates = train(args, world)
    if world.rank == 0:
        network.eval()
        with mt.no_grad():
            written = network.write(lines[:len(FORMS) * 2])
            longest = np.count_nonzero(lines, axis=1).argmax()
            looks = network.looks(lines[longest], dates[longest])
        for line, date, found in zip(lines, dates, written, strict=False):
            print(f"{decoded(line):26} → {decoded(found)}{'' if (found == date).all() else f'   not {decoded(date)}'}")
        viz.attention_maps(looks, args.out / "alignment.png", decoded(dates[longest]), "where it looks",
                           decoded(lines[longest]))
        print(program.closing(summary, args.out))
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
