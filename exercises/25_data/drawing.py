"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


def rows(case, got, path):
    """25.1: rows, a colour for each of a row's documents; hollow where there is no target."""
    documents, targets = np.asarray(got["documents"]), np.asarray(got["targets"])
    figure, axes = canvas(size=(8.6, 0.9 + 0.24 * len(documents)))
    for row, numbers in enumerate(documents):
        for number in np.unique(numbers):
            (at,) = np.nonzero(numbers == number)
            axes.barh(row, len(at), left=at[0], color=COLORS[number % len(COLORS)], edgecolor="white")
        for at in np.flatnonzero(targets[row] == -100):
            axes.plot(at + 0.5, row, "o", color="white", ms=4)
    axes.set(xlim=(0, case["length"]), ylim=(len(documents) - 0.4, -0.6), xlabel="position", ylabel="row", yticks=[])
    axes.grid(False)
    save(figure, path)
    tokens = sum(len(file) for file in case["files"])
    return (f"{len(documents)} rows out of {len(case['files'])} files, {(documents.max(1) + 1).mean():.1f} documents "
            f"to a "
            f"row; {(targets == -100).sum()} ends (white) have no target. Read: {got['read']:,} of {tokens:,} tokens")


def orders(runs, path):
    """25.2: which number stands in which place, with more and more rounds."""
    figure, panels = canvas(1, len(runs), size=(11, 3.2), sharey=True)
    last = []
    for axes, (case, got) in zip(panels, runs, strict=True):
        numbers, rounds = np.asarray(got["result"]), len(case["keys"])
        axes.plot(numbers, ".", color=COLORS[0], ms=2.5)
        axes.set_title(f"{rounds} round{'s' * (rounds != 1)}", loc="left", size=10)
        axes.set_xlabel("place")
        steps = np.diff(numbers)
        last.append(np.unique(steps, return_counts=True)[1].max() / len(steps))
    panels[0].set_ylabel("number")
    save(figure, path)
    return (f"{len(runs[-1][0]['places'])} places have {len(np.unique(runs[-1][1]['result']))} numbers. From a place "
            f"to the next the most frequent "
            f"step comes in {last[0]:.1%} of them with 1 round, in {last[-1]:.1%} with {len(runs[-1][0]['keys'])}; "
            f"{(np.diff(runs[-1][1]['result']) > 0).mean():.0%} of the steps go up")


def turns(case, got, path):
    """25.3: how many samples each source has had more than its share, and the same of samples in random order."""
    weights, order = case["weights"], list(got["result"])
    twelve = np.repeat(np.arange(len(weights)), weights)
    figure, panels = canvas(1, 2, size=(9.2, 3.4), sharey=True)
    worst = []
    shuffled = np.concatenate([np.random.default_rng(i).permutation(twelve) for i in range(8)])
    for axes, each, title in zip(panels, (order * 8, shuffled), ("yours", "shuffled"), strict=True):
        had = np.cumsum(np.eye(len(weights))[list(each)], 0)
        off = had - np.outer(np.arange(1, len(each) + 1), weights) / sum(weights)
        for i, color in zip(range(len(weights)), COLORS, strict=False):
            axes.plot(range(1, len(each) + 1), off[:, i], color=color, lw=1.4, label=f"source {i}, weight {weights[i]}")
        axes.set_title(title, loc="left", size=10)
        axes.set_xlabel("turns")
        axes.axhspan(-1, 1, color="#eef2f6", zorder=0)
        worst.append(np.abs(off).max())
    panels[0].set_ylabel("samples more than the share")
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")       # nothing of yours is above 1
    save(figure, path)
    return (f"{' '.join('wcb'[i] for i in order)} (web, code, book): never more than {worst[0]:.2f} samples from a "
            f"share. Shuffled, twelve by twelve: up to {worst[1]:.2f}")


def run(case, got, path):
    """25.4: bits per token of each source over the steps; the second half again, taken up by several ranks."""
    figure, (left, right) = canvas(1, 2, size=(9.6, 3.8))
    bits, change = np.array(got["bits"]), case["phases"][0][0] // case["batch"]
    for source, color in zip(range(bits.shape[1]), COLORS, strict=False):
        shares = " then ".join(f"{weights[source]} of {sum(weights)}" for _, weights in case["phases"])
        left.plot(bits[:, source], color=color, lw=1.8, label=f"source {source}: {shares}")
    left.axvline(change, color="#888888", lw=1, ls=":")
    left.set(xlabel="step", ylabel="bits per token")
    left.legend(frameon=False, fontsize=8)
    right.plot(got["losses"], color="#bcd4e6", lw=6, label="1 rank")
    right.plot(range(case["begin"], case["steps"]), got["later"], color=COLORS[0], lw=1.4,
               label=f"{case['size']} ranks, taken up at step {case['begin']}")
    right.set(xlabel="step", ylabel="loss")
    right.legend(frameon=False, fontsize=8)
    save(figure, path)
    off = np.abs(np.subtract(got["later"], got["losses"][case["begin"]:])).max()
    return (f"source 1 takes {bits[change, 1]:.2f} bits per token when it comes to be the more, {bits[-1, 1]:.2f} at "
            f"the "
            f"end. Taken up at step {case['begin']} by {case['size']} ranks, the losses are the same: max |Δ| = "
            f"{off:.1e}")


def ahead(case, got, path):
    """25.5: reads and steps by the clock, and how long the same would have taken one after the other."""
    spans = {who: np.array([[begin, end] for name, begin, end in got["spans"] if name == who]) * 1e3
             for who in ("step", "read")}
    figure, axes = canvas(size=(9.2, 2.6))
    for row, (times, color) in enumerate(zip(spans.values(), COLORS, strict=False)):
        axes.barh([row] * len(times), times[:, 1] - times[:, 0], left=times[:, 0], color=color, edgecolor="white")
        for number, (begin, end) in enumerate(times):
            axes.text((begin + end) / 2, row, number, ha="center", va="center", color="white", size=8)
    axes.set(xlim=(0, None), yticks=[0, 1], yticklabels=["the loop: steps", "the thread: reads"], xlabel="ms")
    axes.grid(False)
    save(figure, path)
    alone = sum((times[:, 1] - times[:, 0]).sum() for times in spans.values())
    return (f"{len(spans['step'])} steps with {case['depth']} batches read ahead took {spans['step'].max():.0f} ms; "
            f"reads and steps one after the other would have taken {alone:.0f} ms")
