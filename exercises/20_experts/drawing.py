"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


def shares(case, got, path):
    """20.2's experiment: whose tokens are how many, step by step, without and with the learner's loss."""
    figure, axes = canvas(2, 1, size=(8.6, 5.6), sharex=True)
    ends = {}
    for panel, name in zip(axes, ("without", "with"), strict=True):
        counts = 100 * np.array(got[name]) / len(case["x"])
        panel.stackplot(range(len(counts)), counts.T, colors=COLORS, alpha=0.85,
                        labels=[f"expert {e}" for e in range(counts.shape[1])])
        ends[name] = counts[-1]
        panel.set(ylabel="tokens, %", ylim=(0, 100), xlim=(0, len(counts) - 1))
        panel.set_title(f"{name} your balance loss" + f", times {case['weight']:g}" * (name == "with"), loc="left",
                        size=10)
        panel.grid(False)
    axes[0].legend(frameon=False, ncols=counts.shape[1], loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axes[1].set_xlabel("step")
    save(figure, path)
    busiest = {name: f"{end.max():.0f} %" for name, end in ends.items()}
    return (f"after {len(counts)} steps the busiest of {counts.shape[1]} experts has {busiest['without']} of all "
            f"tokens without your balance loss, and {busiest['with']} with it")


def curves(case, losses, library, path):
    """20.3's training: the learner's layer on the ranks over the library's in one process, and how far they are apart.
    """
    n, ep = len(case), case[0]["ep"]
    steps = range(1, len(losses) + 1)
    figure, (above, below) = canvas(2, 1, size=(8.6, 5.0), sharex=True, height_ratios=(3, 1))
    above.plot(steps, library, color=COLORS[2], lw=6, alpha=0.5, label="the library, all experts in one process")
    above.plot(steps, losses, color=COLORS[0], lw=1.8, label=f"your layer, {n} ranks: dp {n // ep} × ep {ep}")
    above.set_ylabel("loss")
    above.legend(frameon=False)
    distance = np.abs(np.subtract(losses, library))
    below.plot(steps, distance, color=COLORS[1], lw=1.6)
    below.set(xlabel="step", ylabel="|Δ|", ylim=(0, 1.3 * distance.max() or 1e-16))
    below.xaxis.get_major_locator().set_params(integer=True)
    save(figure, path)
    return (f"a GPT with {case[0]['moe']['experts']} experts on {n} ranks, dp {n // ep} × ep {ep}: from "
            f"{losses[0]:.3f} to {losses[-1]:.3f}, one curve with the library's: max |Δ| = {distance.max():.1e}")
