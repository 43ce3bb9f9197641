"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

from . import packs, tiny


def packed(case, got, path):
    """24.1: the rows, a colour for each piece; and what a GPT's loss is of them, and of the documents alone."""
    numbers, length = np.asarray(got["documents"]), case["length"]
    figure, axes = canvas(size=(8.6, 0.9 + 0.2 * len(numbers)))
    for row, each in enumerate(numbers):
        for number in range(each.max() + 1):
            (at,) = np.nonzero(each == number)
            axes.barh(row, len(at), left=at[0], color=COLORS[number % len(COLORS)], edgecolor="white")
    axes.set(xlim=(0, length), ylim=(len(numbers) - 0.4, -0.6), xlabel="position", ylabel="row", yticks=[])
    axes.grid(False)
    save(figure, path)
    alone, together = losses(case, got)
    pieces = [stop - start for text in case["documents"] for start, stop in packs.cut(text, length)]
    padding, one_each = (1 - sum(pieces) / (rows * length) for rows in (len(numbers), len(pieces)))
    return (f"{len(case['documents'])} documents in {len(numbers)} rows of {length}, {padding:.0%} padding; one to a "
            f"row they were {len(pieces)} rows, {one_each:.0%}. A GPT's loss of them all: {together:.9f} by your rows, "
            f"{alone:.9f} by each piece alone")


def losses(case, got):
    """(mean loss of a small GPT per target, pieces one after the other; the same by packed rows)."""
    rng, length = np.random.default_rng(case["seed"]), case["length"]
    p, heads = tiny.parameters(rng, packs.PICTURE["vocabulary"], length, 2, 8), 2
    alone = [tiny.losses(tiny.logits(p, heads, text[None, start:stop]), text[None, start + 1:stop + 1]).sum()
             for text in case["documents"] for start, stop in packs.cut(text, length)]
    targets = np.asarray(got["targets"])
    together = tiny.losses(tiny.logits(p, heads, np.asarray(got["tokens"]), np.asarray(got["positions"]),
                                       np.asarray(got["visible"])), targets)
    count = (targets != -100).sum()
    return sum(alone) / count, together.sum() / count


def written(runs, path):
    """24.2: positions worked on over tokens written, counted; and operations, by the learner's formulas."""
    case, got = next(run for run in reversed(runs) if run[0]["what"] == "generate")
    lines, found = runs[-1]
    time, count = case["tokens"].shape[1], len(case["noise"])
    figure, (left, right) = canvas(1, 2, size=(9.2, 4.2))
    steps = range(1, count + 1)
    read = np.cumsum([positions for layer, _, positions in got["worked"] if layer == 0])    # in any number of reads
    yours = [read[np.searchsorted(read, time + i)] for i in range(count)]
    left.plot(steps, np.cumsum([time + i for i in range(count)]), color=COLORS[1], lw=2, label="all tokens anew")
    left.plot(steps, yours, color=COLORS[0], lw=2, label="yours, counted")
    left.set(xlabel="tokens written", ylabel="positions worked on", ylim=(0, None))
    right.loglog(lines["counts"], found["anew"], "o-", color=COLORS[1], lw=2, label="all tokens anew")
    right.loglog(lines["counts"], found["kept"], "o-", color=COLORS[0], lw=2, label="keys and values kept")
    right.set(xlabel="tokens written by a GPT-2", ylabel="operations")
    for axes in (left, right):
        axes.legend(frameon=False)
    save(figure, path)
    anew, kept = found["anew"][-1], found["kept"][-1]
    return (f"a GPT-2 writes {lines['counts'][-1]} tokens: {anew:.2g} operations if all is worked on anew, {kept:.2g} "
            f"with what is kept, {anew / kept:.0f} times fewer, for {found['nbytes'] / 1e6:.0f} MB")


def gains(case, got, path):
    """24.3: what a token gains, and what its KL is, over ρ."""
    figure, panels = canvas(1, 3, size=(9.6, 3.6))
    for axes, name, title, color in zip(panels, ("good", "bad", "k3"), (
            "gain, A = 1", "gain, A = -1", "k3, over policy / reference"), COLORS, strict=False):
        values = np.asarray(got[name])
        axes.plot(case["ratios"], values if name == "k3" else -values, color=color, lw=2)
        axes.axvline(1, color="#888888", ls="--", lw=1)
        axes.set_title(title, loc="left", size=10)
        axes.set_xlabel("ρ" if name != "k3" else "ratio")
    save(figure, path)
    ratios, flat = case["ratios"], {name: np.abs(np.diff(got[name])) < 1e-9 for name in ("good", "bad")}
    return (f"nothing more is gained above ρ = {ratios[:-1][flat['good']].min():.2f} of a good answer's token, below "
            f"{ratios[1:][flat['bad']].max():.2f} of a bad one's; k3 is never below {np.min(got['k3']):.1g}")
