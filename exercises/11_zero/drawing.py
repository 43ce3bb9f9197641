"""The picture of chapter 11: what a rank holds in the course of a step."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

KINDS = ("parameters", "Adam's state", "gradients", "gathered, and buffers")
COLUMNS = (0, 2, 1, 3)      # where they stand in a row
SHADES = (COLORS[0], "#bcd4e6", COLORS[2], COLORS[1])
TITLES = {"0": "stage 0: all is whole (DDP)", "1": "stage 1: your ShardedAdam", "3": "stage 3: your Unit"}


def stages(found, ranks, path):
    """found: {stage: rows of bytes by kind, at each moment of a step}."""
    figure, axes = canvas(1, len(found), size=(10.5, 4.2), sharey=True)
    peaks = {}
    for axis, (stage, rows) in zip(axes, found.items(), strict=True):
        rows = np.asarray(rows, dtype=float) / 1e3
        peaks[stage] = rows.sum(1).max()
        axis.stackplot(range(len(rows)), rows[:, COLUMNS].T, colors=SHADES, labels=KINDS, step="post")
        axis.axhline(peaks[stage], color=COLORS[5], lw=0.8, ls="--")
        axis.set_title(TITLES[stage], loc="left")
        axis.set_xlabel("forward, backward, step")
        axis.set_xticks([])
        axis.margins(x=0)
        axis.annotate(f"{peaks[stage]:.0f} kB", (0, peaks[stage]), (3, 2), textcoords="offset points", fontsize=9)
    axes[0].set_ylabel("kB held by rank 0")
    axes[0].set_ylim(0, 1.12 * max(peaks.values()))
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")
    save(figure, path)
    return f"{ranks} ranks: a rank holds at most " + ", ".join(f"{peak:.0f} kB in stage {stage}"
                                                              for stage, peak in peaks.items())
