"""What a memory holds of keys whose values are replaced: attention to all keys, linear attention, the delta rule.

    python examples/recall.py
    python examples/recall.py --keys 4 --length 32 --steps 200

A token writes a value under a key, or asks for the one that was written last under a
key. One block learns to answer. Attention finds all values that a key has had, and
must tell the last one by its place. Linear attention adds values up, and forgets all
keys at once or none. The delta rule takes the old value out: the new one stands there.

Source: Arora et al. 2023, "Zoology" (recall as a task); Schlag et al. 2021, "Linear
transformers are secretly fast weight programmers" (with values that are replaced).
"""

import sys

import numpy as np

from minitorch_dist import nn, optim, program
from minitorch_dist.backend import manual_seed
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.windows import as_text

WINDOWS = None, "linear", "delta"
MODEL = {"layers": 1, "heads": 2, "dim": 32}
LARGER = 5      # than usual are the first matrices: so small a model would wait long before it learns anything
ROWS, HELD_BACK, LOOKS, NOTHING_ASKED = 32, 200, 4, -100


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="recall.py", description=__doc__)
    p.add_argument("--keys", type=int, default=8, help="how many there are")
    p.add_argument("--values", type=int, default=4, help="how many a key may have")
    p.add_argument("--length", type=int, default=48, help="tokens of a sequence")
    p.add_argument("--steps", type=int, default=300, help=f"optimizer steps, of {ROWS} sequences")
    p.add_argument("--seed", type=int, default=0, help="of initial values and sequences")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("keys", "values", "length", "steps"), program.AT_LEAST_0: ("seed",)})
    return args


def sequences(args, rng, rows):
    """(tokens, targets), int64 (rows, length): key · values + value writes, keys · values + key asks; half the tokens
    ask, as far as their key has a value. The target is the value, or NOTHING_ASKED."""
    tokens, targets = np.empty((2, rows, args.length), np.int64)
    row, memory = np.arange(rows), np.full((rows, args.keys), NOTHING_ASKED)
    for t in range(args.length):
        key, value = rng.integers(0, args.keys, rows), rng.integers(0, args.values, rows)
        known = memory[row, key]
        asks = (rng.random(rows) < 0.5) & (known != NOTHING_ASKED)
        tokens[:, t] = np.where(asks, args.keys * args.values + key, key * args.values + value)
        targets[:, t] = np.where(asks, known, NOTHING_ASKED)
        memory[row[~asks], key[~asks]] = value[~asks]
    return tokens, targets


def right(model, tokens, targets):
    """Which share of the answers is."""
    asked = targets != NOTHING_ASKED
    return (model(tokens).numpy().argmax(2) == targets)[asked].mean()


def network(args, window):
    """The model."""
    manual_seed(args.seed)
    model = nn.GPT(args.keys * args.values + args.keys, args.length, window=window, **MODEL)
    for p in model.parameters():
        p.data *= np.float32(LARGER if p.ndim > 1 else 1)
    return model


def asked_at_the_end(args):
    """(tokens, targets) that are never learned from. ValueError where there is no question in them."""
    tokens, targets = sequences(args, np.random.default_rng((args.seed, 1)), HELD_BACK)
    if (targets == NOTHING_ASKED).all():
        raise ValueError(f"--keys {args.keys} --length {args.length}: in {HELD_BACK} sequences no key comes twice, and "
                         "nothing is asked: take fewer keys, or more tokens")
    return tokens, targets


def looks(args):
    """The steps after each of LOOKS parts of the training; of fewer steps each."""
    return sorted({max(1, args.steps * (i + 1) // LOOKS) for i in range(LOOKS)})


def train(args, window, held_back):
    """([share of right answers, after each of the looks], numbers kept of a sequence)."""
    model = network(args, window)
    optimizer, rng, found = optim.AdamW(model.parameters(), lr=0.01), np.random.default_rng(args.seed), []
    for step in range(1, args.steps + 1):
        tokens, targets = sequences(args, rng, ROWS)
        if (targets != NOTHING_ASKED).any():        # of many keys and few tokens none may ask
            logits = model(tokens)
            nn.cross_entropy(logits.reshape((tokens.size, logits.shape[2])), targets.reshape(-1),
                             ignore_index=NOTHING_ASKED).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in looks(args):
            found.append(right(model, *held_back))
    cache = KeyValueCache(model.eval())
    cache.read(held_back[0][:1])
    return found, cache.nbytes // model.embed.weight.dtype.itemsize


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    program.one_process("recall.py")
    args = parse(argv)
    with program.usage_errors("recall.py"):
        held_back = asked_at_the_end(args)
        network(args, None)
    print(f"{args.keys} keys, {args.values} values, {args.length} tokens: right answers, and numbers that are kept")
    print(f"{'step':10}" + "".join(f"{step:8}" for step in looks(args)) + f"{'kept':>10}")
    for window in WINDOWS:
        shares, kept = train(args, window, held_back)
        print(f"{as_text((window,)):10}" + "".join(f"{share:8.1%}" for share in shares) + f"{kept:10,}", flush=True)
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
