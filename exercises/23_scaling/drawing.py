"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


def coordinates(case, got, path):
    """23.1: how far a few steps move each layer, over the width."""
    figure, axes = canvas(1, 2, size=(8.6, 4.2), sharey=True)
    for panel, way in zip(axes, ("as it is", "by µP"), strict=True):
        for i, (name, color) in enumerate(zip(("input", "hidden", "output"), COLORS, strict=False)):
            panel.loglog(case["widths"], [sizes[i] for sizes in got["changes"][way]], "o-", color=color, lw=2,
                         label=f"{name}: width^{got['powers'][way][i]:.2f}")
        panel.set_title(way, loc="left", size=10)
        panel.set(xlabel="width", xticks=case["widths"], xticklabels=case["widths"])
        panel.minorticks_off()
        panel.legend(frameon=False)
    axes[0].set_ylabel(f"change of a layer's output in {case['steps']} steps")
    save(figure, path)
    plain, wide = (got["powers"][way][-1] for way in ("as it is", "by µP"))
    return (f"{case['steps']} steps move the net's output by width^{plain:.2f} as it is, by width^{wide:.2f} with your "
            "multipliers: the coordinate check")


def noise(got, closed, decay, path):
    """23.2: each step's own ratio, the ratio of averages, and the closed form."""
    figure, ax = canvas()
    steps = range(1, len(got["ratios"]) + 1)
    ax.plot(steps, got["ratios"], ".", color="#a9b2bd", ms=5, label="tr(Σ)/|G|² of each step")
    ax.plot(steps, got["scales"], color=COLORS[0], lw=2, label=f"your scale(), decay {decay:g}")
    ax.axhline(closed, color=COLORS[1], ls="--", lw=1.6, label="by the distribution they are drawn from")
    ax.set(xlabel="step", ylabel="samples", ylim=(0, 3 * closed))
    ax.legend(frameon=False)
    save(figure, path)
    outside = sum(not 0.5 < ratio / closed < 2 for ratio in got["ratios"])
    return (f"B_simple is {closed:.1f}, and after {len(got['scales'])} steps yours is {got['scales'][-1]:.1f}; the "
            f"steps' own ratios are off by a factor of 2 or more {outside} times")


def frontier(case, got, measured, path):
    """23.3: steps against samples, from two runs, over all of them; and how rates go with the batch."""
    figure, (left, right) = canvas(1, 2, size=(9.2, 4.4))
    left.loglog(got["samples"], got["steps"], color=COLORS[0], lw=2, label="your curve, through two of them")
    left.loglog([b * s for b, s in measured.items()], list(measured.values()), "o", color=COLORS[1], ms=5,
                label="SGD on a noisy quadratic, best rates")
    for batch, s, e, price in zip(got["chosen"], got["chosen steps"], got["chosen samples"], case["prices"],
                                  strict=True):
        left.plot(e, s, "*", ms=13, color=COLORS[4], mec="white")
        left.annotate(f"B = {batch}: a step costs {price:g} samples", (e, s), xytext=(8, 4), textcoords="offset points",
                      size=8)
    left.set(xlabel="samples to the goal", ylabel="steps to the goal")
    left.legend(frameon=False, fontsize=8)
    right.loglog(case["batches"], got["sgd"], color=COLORS[0], lw=2, label="SGD: 1 / (1 + noise / B)")
    right.loglog(case["batches"], got["adam"], color=COLORS[2], lw=2, label="Adam: √B")
    right.axvline(got["critical"], color="#888888", ls="--", lw=1)
    right.set(xlabel="batch", ylabel="best rate, beside the smallest batch's")
    right.legend(frameon=False, fontsize=8)
    save(figure, path)
    far = max(abs(ours / theirs - 1) for ours, theirs in zip(got["steps"], measured.values(), strict=True))
    return (f"B_crit is {got['critical']:.0f} by the runs with batches of {case['two'][0][0]} and {case['two'][1][0]}; "
            f"those with others are within {100 * far:.0f} % of the curve")


def scaling(case, got, path):
    """23.4: the runs, what the fit says of each budget, and the large runs that it has never seen."""
    from .laws import exact
    figure, (left, right) = canvas(1, 2, size=(9.2, 4.4))
    sizes, law = np.geomspace(3e5, 1e12, 200), got["fit"]
    for budget, (n, d), color in zip(case["budgets"][1::2], got["best"][1::2], COLORS, strict=False):
        left.semilogx(sizes, exact(law, sizes, budget / 6 / sizes), color=color, lw=1.6, label=f"C = {budget:.0e}")
        left.plot(n, exact(law, n, d), "*", ms=12, color=color, mec="white")
    left.set(xlabel="parameters", ylabel="loss, by your fit", ylim=(0.95 * law[0], 5))
    left.legend(frameon=False, fontsize=8)
    seen, large = exact(law, case["n"], case["d"]), exact(case["law"], case["large n"], case["large d"])
    right.loglog(case["losses"], seen, "o", color=COLORS[5], ms=4, label="the runs (two of them went wrong)")
    right.plot(large, got["large"], "*", color=COLORS[1], ms=11, label="larger ones, never seen")
    right.minorticks_off()
    ends = [large.min() * 0.98, case["losses"].max() * 1.02]
    right.plot(ends, ends, color="#888888", lw=1, ls="--")
    right.set(xlabel="loss", ylabel="loss, by your fit", xticks=[2, 4, 8], yticks=[2, 4, 8])
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    right.legend(frameon=False, fontsize=8)
    save(figure, path)
    (n, d), budget = got["best"][-2], case["budgets"][-2]
    return (f"for {budget:.0e} operations your fit wants {n / 1e9:,.0f} billion parameters and {d / 1e12:,.1f} "
            f"trillion tokens; of the largest model it expects {got['large'][-1]:.3f}, and the law that the runs were "
            f"made with says {large[-1]:.3f}")


def clipped(pairs, greatest, path):
    """23.5: each head's greatest score, as you tell it, and with your weights."""
    figure, panels = canvas(1, 2, size=(8.6, 4.0))
    for panel, (case, got), whose in zip(panels, pairs, ("keys of their own", "keys that heads share"), strict=True):
        after = greatest(case | {"w_q": got["w_q"], "w_k": got["w_k"]})
        heads = np.arange(case["heads"])
        panel.bar(heads, got["scores"], 0.72, color="#e3e7ec", label="before")
        panel.bar(heads, after, 0.4, color=COLORS[2], label="after")
        panel.axhline(case["threshold"], color=COLORS[1], ls="--", lw=1.4, label="τ")
        panel.set_title(whose, loc="left", size=10)
        panel.set(xlabel="head", xticks=heads, ylim=(0, 1.35 * got["scores"].max()))
        panel.legend(frameon=False, ncols=3, loc="upper right")
    panels[0].set_ylabel("greatest score")
    save(figure, path)
    counts = [int((got["scores"] > case["threshold"]).sum()) for case, got in pairs]
    return (f"{counts[0]} of {pairs[0][0]['heads']} heads, and {counts[1]} of {pairs[1][0]['heads']}, were above τ, "
            "and their greatest scores are τ now; the others are what they were")
