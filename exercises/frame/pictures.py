"""What several chapters draw. A picture is made in the parent, from the learner's own outputs."""

import numpy as np

from .messages import messages

LAYERS = ("#bcd4e6", "#e08a5b", "#1d3557", "#2a9d8f")      # of curves over each other: the widest is the lightest
COLORS = ("#1d3557", "#c8553d", "#2a9d8f", "#9b2c8f", "#e9a55b", "#6c757d")


def canvas(rows=1, columns=1, size=(8.6, 4.6), **layout):
    """(figure, axes) in the library's style, without pyplot's global state; save(figure, path) writes it."""
    import matplotlib
    from matplotlib.figure import Figure

    from minitorch_dist.viz import STYLE
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        return figure, figure.subplots(rows, columns, **layout)


def save(figure, path):
    """Write the figure. OSError, naming the file, where that can't be."""
    from minitorch_dist.viz.figure import write
    write(figure, path)


def two_curves(curves, path, ylabel, xlabel="step"):
    """Curves over each other, and below them how far they are from the first: {number of ranks: [at step 1, 2 …]}."""
    curves = {n: np.asarray(curve, dtype=float) for n, curve in curves.items()}
    (first, reference), *others = curves.items()
    figure, (above, below) = canvas(2, 1, size=(8.6, 5.4), sharex=True, height_ratios=(3, 1))
    for width, (n, curve), color in zip(np.linspace(8, 1.4, len(curves)), curves.items(), LAYERS, strict=False):
        above.plot(range(1, len(curve) + 1), curve, color=color, lw=width, label=f"{n} rank{'s' * (n != 1)}")
    above.set_ylabel(ylabel)
    above.legend(frameon=False)
    largest = 0.0
    for (n, curve), color in zip(others, LAYERS[1:], strict=False):
        distance = np.abs(curve - reference)
        largest = max(largest, float(distance.max()))
        below.plot(range(1, len(distance) + 1), distance, color=color, lw=1.6, label=f"{n} ranks")
    below.set_ylim(0, 1.3 * largest or 1)
    if not largest:
        below.set_yticks([0])        # nothing to measure: a scale would be of nobody's numbers
    below.set_ylabel("|Δ|")
    below.set_xlabel(xlabel)
    below.xaxis.get_major_locator().set_params(integer=True)     # there is no step 1.5
    save(figure, path)
    *most, last = curves
    return f"{', '.join(map(str, most))} and {last} ranks, one curve: max |Δ| = {largest:.1e}"


def arrows(axes, found, size, colour=None, label=None):
    """Messages (messages.py) as arrows: ranks down, steps to the right.

    colour  function: Message -> 0, 1 … of COLORS, or None for grey
    label   {number or None: what its colour means}
    """
    steps = max((message.step for message in found), default=0)
    for rank in range(size):
        axes.plot(range(steps + 1), [rank] * (steps + 1), "o-", color="#d5dae0", lw=1, ms=5, zorder=1)
    def shade(number):
        return "#a9b2bd" if number is None else COLORS[number % len(COLORS)]
    for message in found:
        axes.annotate("", (message.step, message.dst), (message.step - 1, message.src), arrowprops={
            "arrowstyle": "-|>", "color": shade(colour(message) if colour else 0), "lw": 1.8, "shrinkA": 3,
            "shrinkB": 3})
    for number, text in (label or {}).items():
        axes.plot([], [], color=shade(number), lw=1.8, label=text)
    if label:
        axes.legend(frameon=False, ncols=len(label), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set(ylim=(size - 0.6, -0.4), xticks=range(steps + 1), yticks=range(size), xlabel="step",
             yticklabels=[f"rank {rank}" for rank in range(size)])
    axes.grid(False)


def message_arrows(got, path, colour=None, label=None):
    """The messages of one case as arrows, into a file; a sentence about them. got: the Outputs of all ranks."""
    found = messages(got)
    steps = max((message.step for message in found), default=0)
    figure, axes = canvas(size=(min(9, 2.5 + 1.2 * steps), 1.2 + 0.7 * len(got)))
    arrows(axes, found, len(got), colour, label)
    save(figure, path)
    return f"your {len(found)} messages between {len(got)} ranks, in {steps} steps"
