"""Milliseconds per token that a GPT writes, with keys and values kept and with all tokens worked on anew, on one pinned
core; beside the operations of both on paper.

    python benchmarks/generate.py
"""

from _harness import Report, compare, named, one_core

one_core()

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import nn  # noqa: E402
from minitorch_dist.nn.decoding import KeyValueCache  # noqa: E402
from minitorch_dist.nn.transformer import FAMILIES  # noqa: E402

VOCABULARY, LENGTH, LAYERS, HEADS, DIM = 65, 256, 4, 8, 256
FAMILY = {"gpt": {}, "llama": {**FAMILIES["llama"], "tied": False, "kv_heads": 2}}
AIM = 2.0       # what a token may cost after the most tokens, in units of one after the fewest
PAST = (31, 127, 255)
ROUNDS = 5


def gpt(family):
    """A model of random weights."""
    mt.manual_seed(0)
    return nn.GPT(VOCABULARY, LENGTH, LAYERS, HEADS, DIM, **FAMILY[family]).eval()


def operations(model, past, new):
    """Additions and multiplications per row for `new` positions after `past` ones: each meets each number of all
    matrices once, and in each block the keys and the values of all positions so far."""
    matrices = sum(p.size for name, p in model.named_parameters() if p.ndim == 2 and "position" not in name
                   and not (model.head is not None and name == "embed.weight"))
    return new * (2 * matrices + LAYERS * 4 * DIM * (past + new))


def row(family, batch, past):
    """One token after `past` ones."""
    model = gpt(family)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (batch, past + 1))
    cache = KeyValueCache(model)
    cache.read(tokens[:, :-1])

    def kept():
        cache.past = past       # the last token again
        cache.read(tokens[:, -1:])

    def anew():
        with mt.no_grad():
            model(tokens)
    took = compare({"kept": kept, "anew": anew}, rounds=ROUNDS)
    fewer = operations(model, 0, past + 1) / operations(model, past, 1)
    one, all_of_them = took["kept"].best, took["anew"].best
    return {"model": family, "rows": batch, "tokens before": past, "kept, ms": f"{1e3 * one:.2f}",
            "anew, ms": f"{1e3 * all_of_them:.2f}", "times faster": f"{all_of_them / one:.1f}",
            "fewer operations": f"{fewer:.0f}", "cache, MB": f"{cache.nbytes / 1e6:.1f}"}, one


def main():
    """Print and save."""
    named(__doc__)
    report = Report("generate", "Generation with kept keys and values (`generate.py`)")
    found = [row(family, batch, past) for family in FAMILY for batch in (1, 8) for past in PAST]
    report.table(f"per token of a GPT of {LAYERS} blocks of {DIM}, {HEADS} heads, float32",
                 [cells for cells, _ in found])
    took = [seconds for _, seconds in found]
    worst = max(most / least for least, most in zip(took[::len(PAST)], took[len(PAST) - 1::len(PAST)], strict=True))
    report.aim(f"a token after {PAST[-1]} others, in units of one after {PAST[0]}", f"at most {AIM}", f"{worst:.1f}",
               worst <= AIM)
    report.save()


if __name__ == "__main__":
    main()
