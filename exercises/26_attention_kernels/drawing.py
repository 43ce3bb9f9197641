"""What the kernels of 26.1 and 26.2 move, counted while they ran, beside what else one might do."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

# NumPy's way through the scores, float32: passes over (time, time) numbers, read and written.
PASSES = {"q kᵀ": 1, "· scale": 2, "mask": 2, "max": 1, "- max": 2, "exp": 2, "sum": 1, "/ sum": 2, "· v": 1}


def tiles(path, runs):
    """Bytes loaded per multiply-add, by the size of a tile. runs: [(case, got)] of one product."""
    found = [("row by column", 8.0)]
    for case, got in runs:
        rows, columns, _ = case["block"]
        multiplied = np.prod([*case["out"].shape, case["x"].shape[1]])
        found.append((f"your kernel, {rows} × {columns}", got["bytes_read"] / multiplied))
    figure, axes = canvas(size=(8.6, 2.8))
    axes.barh([name for name, _ in found], [count for _, count in found], color=[COLORS[5], *[COLORS[1]] * len(runs)])
    for place, (_, count) in enumerate(found):
        axes.text(count, place, f" {count:.3g}", va="center", fontsize=11)
    axes.set(xscale="log", xlim=(0.05, 20), xlabel="bytes loaded per multiply-add")
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    save(figure, path)
    (small, of_small), (large, of_large) = found[1], found[-1]
    return (f"{large}: {of_large:.3g} bytes loaded per multiply-add; {small}: {of_small:.3g}. Twice as wide, half as "
            "much")


def bytes_by_length(path, runs):
    """Megabytes moved, by the length of the sequence. runs: [(case, got)] of one head."""
    times = np.array([case["q"].shape[1] for case, _ in runs])
    size = runs[0][0]["q"].shape[2]
    yours = np.array([got["bytes_read"] + got["bytes_written"] for _, got in runs])
    least = 4 * times * (4 * size + 1)
    plain = 4 * times ** 2 * sum(PASSES.values()) + least
    figure, axes = canvas(size=(8.6, 4.2))
    for label, values, color in (("NumPy, operation by operation: all scores", plain, COLORS[5]),
                                 ("your kernel", yours, COLORS[1]),
                                 ("q, k, v and the result, once", least, COLORS[0])):
        axes.plot(times, values / 1e3, "o-", color=color)
        axes.annotate(label, (times[-1], values[-1] / 1e3), xytext=(8, 0), textcoords="offset points", va="center",
                      color=color)
    axes.set(xscale="log", yscale="log", xticks=times, xticklabels=[f"{time}" for time in times], xlabel="positions",
             ylabel=f"kB moved, a head of {size}", xlim=(times[0] * 0.9, times[-1] * 4))
    axes.minorticks_off()
    save(figure, path)
    return (f"of {times[-1]} positions your kernel moves {yours[-1] / 1e3:,.0f} kB, operation by operation it would be "
            f"{plain[-1] / 1e3:,.0f}: {plain[-1] / yours[-1]:.0f} times as many")
