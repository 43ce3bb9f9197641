"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


def valley(case, got, path):
    """22.1's descent: two panels, without what was left out and with it."""
    slope, start = case["slope"], case["start"]
    figure, axes = canvas(1, 2, size=(8.6, 4.2), sharey=True)
    ticks = np.linspace(-0.4, 1.4, 80)
    x, y = np.meshgrid(ticks, ticks)
    ends = {}
    for panel, name in zip(axes, ("without", "with"), strict=True):
        way = np.array(got[name])
        panel.contour(x, y, slope * np.abs(x + y) + np.abs(x - y), levels=12, colors="#d5dae0", linewidths=0.8)
        panel.plot(*way.T, color=COLORS[0], lw=1.2)
        panel.plot(*start, "o", color=COLORS[4], ms=6)
        panel.plot(*way[-1], "o", color=COLORS[1], ms=6)
        panel.set_title(f"{name} what was left out", loc="left", size=10)
        panel.set(xlabel="x", aspect="equal")
        panel.grid(False)
        ends[name] = slope * abs(way[-1].sum()) + abs(way[-1][0] - way[-1][1])
    axes[0].set_ylabel("y")
    save(figure, path)
    return (f"{slope:g}·|x + y| + |x - y| after {len(way) - 1} steps by the signs of its gradient: "
            f"{ends['without']:.2f} without what was left out, {ends['with']:.2f} with it")


def compressed(case, got, compress, plain, full, path):
    """22.2's run over the library's PowerSGD, and over the gradients as they are."""
    losses, figure_and_axes = got["losses"], canvas(2, 1, size=(8.6, 5.0), sharex=True, height_ratios=(3, 1))
    figure, (above, below) = figure_and_axes
    steps = range(1, len(losses) + 1)
    above.plot(steps, plain, color=COLORS[5], lw=1.6, ls="--", label=f"all numbers: {full:,.0f} bytes per step")
    above.plot(steps, compress, color=COLORS[2], lw=6, alpha=0.5, label="the library's PowerSGD, in one process")
    above.plot(steps, losses, color=COLORS[0], lw=1.8, label=f"yours, on several: {got['bytes']:,.0f} bytes per step")
    above.set_ylabel("loss")
    above.legend(frameon=False)
    distance = np.abs(np.subtract(losses, compress))
    below.plot(steps, distance, color=COLORS[1], lw=1.6)
    below.set(xlabel="step", ylabel="|Δ|", ylim=(0, 1.3 * distance.max() or 1e-16))
    save(figure, path)
    return (f"a GPT whose matrices are summed by your PowerSGD: one curve with the library's, max |Δ| = "
            f"{distance.max():.1e}; {got['bytes']:,.0f} bytes per step and rank, all numbers would be {full:,.0f}")


def apart(case, got, library, together, full, path):
    """22.3's runs, over steps and over bytes; together: the losses of data parallelism, full: its bytes per step."""
    figure, axes = canvas(1, 2, size=(8.6, 4.2), sharey=True)
    steps = np.arange(1, len(together) + 1)
    for panel, at in zip(axes, (steps, steps * full / 1000), strict=True):
        panel.plot(at, together, color=COLORS[5], lw=1.6, ls="--", label="data parallel")
    for color, (every, losses) in zip(COLORS, got["losses"].items(), strict=False):
        axes[0].plot(steps, library[every], color=color, lw=6, alpha=0.3)
        axes[0].plot(steps, losses, color=color, lw=1.6, label=f"H = {every}")
        axes[1].plot(steps * got["bytes"][every] / 1000, losses, color=color, lw=1.6, label=f"H = {every}")
    axes[0].set(xlabel="step", ylabel="loss")
    axes[1].set(xlabel="kilobytes sent by a rank", xscale="log")
    axes[0].legend(frameon=False)
    save(figure, path)
    far = max(np.abs(np.subtract(losses, library[every])).max() for every, losses in got["losses"].items())
    told = "; ".join(f"H = {every}: loss {losses[-1]:.2f}, {got['bytes'][every]:,.0f} bytes per step"
                     for every, losses in got["losses"].items())
    told = f"data parallel: loss {together[-1]:.2f}, {full:,.0f} bytes per step; {told}"
    return f"{told}. Over the same workers with the library's optimizers, one after the other: max |Δ| = {far:.1e}"


def without_sums(case, got, library, compress, full, path):
    """22.5's run, over steps and over bytes. library: the losses of one process with the library's Dion; compress:
    those with what PowerSGD makes of the gradients; full: bytes per step, were gradients summed."""
    figure, axes = canvas(1, 2, size=(8.6, 4.2), sharey=True)
    steps = np.arange(1, len(library) + 1)
    axes[0].plot(steps, compress, color=COLORS[5], lw=1.6, ls="--", label="PowerSGD's sum, then Dion")
    axes[0].plot(steps, library, color=COLORS[2], lw=6, alpha=0.5, label="the library's Dion, in one process")
    axes[0].plot(steps, got["losses"], color=COLORS[0], lw=1.8, label="yours, on several")
    axes[1].plot(steps * full / 1000, library, color=COLORS[2], lw=3, alpha=0.5, label="gradients summed")
    axes[1].plot(steps * got["bytes"] / 1000, got["losses"], color=COLORS[0], lw=1.8, label="yours")
    axes[0].set(xlabel="step", ylabel="loss")
    axes[1].set(xlabel="kilobytes sent by a rank for these matrices", xscale="log")
    for panel in axes:
        panel.legend(frameon=False)
    save(figure, path)
    far, lost = (np.abs(np.subtract(losses, library)).max() for losses in (got["losses"], compress))
    return ("a GPT whose matrices are moved by your Dion, by momenta that nobody has added up: one curve with the "
            f"library's in one process, max |Δ| = {far:.1e}; if PowerSGD sums what Dion gets, {lost:.2f}. "
            f"{got['bytes']:,.0f} bytes per step and rank, summed gradients would be {full:,.0f}")


def prices(case, got, path):
    """22.4: seconds per step over the bandwidth, and who is fastest."""
    lines, bandwidths = got["lines"], case["bandwidths"]
    bits = [8 * b / 1e6 for b in bandwidths]
    figure, ax = canvas()
    for color, (way, seconds) in zip(COLORS, lines.items(), strict=False):
        ax.loglog(bits, seconds, color=color, lw=2, label=way)
    compute = case["job"]["forward"] + case["job"]["backward"]
    ax.axhline(compute, color="#888888", ls="--", lw=1)
    ax.text(bits[0], 0.93 * compute, "computing alone", va="top", size=9, color="#666666")
    ax.set(xlabel="Mbit/s", ylabel="seconds per step")
    ax.set_title(f"{case['job']['numbers'] / 1e6:g} million numbers, {case['link']['ranks']} ranks, "
                 f"{1000 * case['link']['latency']:g} ms per message", loc="left", size=10)
    ax.legend(frameon=False)
    save(figure, path)
    own = {way: seconds for way, seconds in lines.items() if not way.startswith("DiLoCo")}
    first = [min(own, key=lambda way: own[way][i]) for i in range(len(bits))]
    changes = [f", and {now} from {at:,.0f} Mbit/s on"
               for before, now, at in zip(first, first[1:], bits[1:], strict=False) if now != before]
    return f"of the ways that meet in every step {first[0]} is the fastest on a slow link{''.join(changes)}"
