"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

from . import crashes


def crash_points(run, path):
    """21.1: what latest may find if the power fails after each of the calls of a save."""
    case, got = run
    table = crashes.table(got)
    steps = [one["step"] for one in case["saves"]]
    old, new = str(steps[-2]), str(steps[-1])
    figure, axes = canvas(size=(8.6, 1.4 + 0.26 * len(table)))
    for at, (_, finds) in enumerate(table):
        for x, find in enumerate((old, new)):
            if find in finds:
                axes.plot(x, at, "s", ms=11, color=COLORS[x])
    axes.set(xlim=(-0.6, 1.6), ylim=(len(table) - 0.5, -0.5), xticks=(0, 1), yticks=range(len(table)),
             xticklabels=(f"step {old}", f"step {new}"),
             yticklabels=[f"{number}  {call[:44]}" for (number, call), _ in table])
    axes.set_title("the power fails after this call, and latest finds", loc="left", size=10)
    axes.tick_params(axis="y", labelsize=8)
    save(figure, path)
    either = sum(len(finds) > 1 for _, finds in table)
    return (f"{len(table) - 1} calls of your save: after {either} of them it is open which of the two is found, and "
            "never is it a third")


def resumed(case, got, path):
    """21.2: the curve of the whole run, and over it those that were killed and resumed."""
    figure, axes = canvas(size=(8.6, 4.2))
    whole = np.array(got["whole"])
    axes.plot(range(1, len(whole) + 1), whole, color="#bcd4e6", lw=7, label="never killed")
    largest = 0.0
    for color, (kill, curve) in zip(COLORS, got["resumed"].items(), strict=False):
        steps = range(int(kill) + 1, len(whole) + 1)
        axes.plot(steps, curve, color=color, lw=1.4, label=f"killed after step {kill}, and resumed")
        axes.axvline(int(kill) + 0.5, color=color, lw=0.8, ls=":")
        largest = max(largest, np.abs(np.subtract(curve, whole[int(kill):])).max())
    axes.set(xlabel="step", ylabel="loss of the batch")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return (f"{len(got['resumed'])} runs killed and resumed, {got['bytes']:,} bytes of arrays in each checkpoint: one "
            f"curve, max |Δ| = {largest:g}")


def curves(case, losses, library, path):
    """21.3: a run that was killed and resumed by fewer ranks over the library's, and how far they are apart."""
    steps = range(1, len(losses) + 1)
    figure, (above, below) = canvas(2, 1, size=(8.6, 5.0), sharex=True, height_ratios=(3, 1))
    above.plot(steps, library, color="#bcd4e6", lw=7, label="the library, one process, never killed")
    for part, color, label in ((slice(0, case["kill"]), COLORS[0], "3 ranks of ZeRO, saved by you"),
                               (slice(case["kill"], None), COLORS[1], f"{case['later']} ranks, read by you")):
        above.plot(steps[part], losses[part], "o-", color=color, lw=1.8, label=label)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    distance = np.abs(np.subtract(losses, library))
    below.plot(steps, distance, color=COLORS[1], lw=1.6)
    below.set(xlabel="step", ylabel="|Δ|", ylim=(0, 1.3 * distance.max() or 1e-16))
    save(figure, path)
    return (f"a network under ZeRO on 3 ranks, killed after step {case['kill']}, and resumed by {case['later']} from "
            f"what you wrote: one curve with the library's, max |Δ| = {distance.max():.1e}")


def intervals(runs, path):
    """21.5: how much longer than its work a run takes, over the interval; and where the formula has the least."""
    (_, formula), *_, waiting, beside = runs
    figure, axes = canvas(size=(8.6, 4.4))
    found = {}
    for (case, got), color, how in ((waiting, COLORS[1], "waits"), (beside, COLORS[0], "writes beside")):
        every = np.array(case["intervals"])
        longer = 100 * (np.reshape(got["seconds"], (len(every), -1)) / case["work"] - 1)
        middle = longer.mean(1)
        axes.fill_between(every, longer.min(1), longer.max(1), color=color, alpha=0.12, lw=0)
        axes.plot(every, middle, "o-", color=color, ms=4, lw=1.8,
                  label=f"{how}: stands still for {case['pause']:.0f} s, counts after {case['behind']:.0f}")
        found[how] = middle.min()
    young = float(np.asarray(formula["result"])[0])
    axes.axvline(young, color=COLORS[1], ls=":", lw=1.4, label=f"√(2 · pause · MTBF) = {young:,.0f} s")
    axes.set(xscale="log", xlabel="seconds of training between two saves", ylabel="longer than the work, %")
    axes.legend(frameon=False)
    save(figure, path)
    return (f"two days of work on a machine that fails every 4 hours: at the best interval {found['waits']:.0f} % "
            f"longer where training waits for the disk, {found['writes beside']:.0f} % where it is written beside; the "
            f"formula says {young / 60:.0f} minutes")
