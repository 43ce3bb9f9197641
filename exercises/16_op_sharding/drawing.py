"""The learner's MLP as its ranks hold it, what they have sent, and when data parallel would have sent less."""

import math

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

EMPTY = "#e8ebee"
KIB = 1024


def ring(nbytes, size):
    """Bytes that a rank sends in an all-reduce."""
    return 2 * (size - 1) / size * nbytes


def draw(run, path):
    """One case of the layer and the learner's outputs into a file; a sentence about them."""
    case, got = run
    figure, (left, right) = canvas(1, 2, size=(11, 4.4), width_ratios=(2.1, 1))
    counted = got[0].sent.get("all_reduce", 0)
    layer(left, case, got)
    parameters = sum(x.nbytes for x in case[0]["whole"].values())
    rows, size = len(case[0]["xs"][0]), len(case)
    per_row, replicas = counted / rows, ring(parameters, size)
    meet = replicas / per_row if per_row else float("inf")
    many = np.array([1, 2.2 * max(meet, rows)])
    right.plot(many, per_row * many / KIB, color=COLORS[0], lw=1.8, label="op sharding: y and the gradient by x")
    right.plot(many, [replicas / KIB] * 2, color=COLORS[1], lw=1.8, label="data parallel: all gradients")
    right.plot([rows], [counted / KIB], "o", color=COLORS[0], ms=8, label=f"your run: {rows} rows")
    right.set(xlabel="rows of x (samples, or positions)", ylabel="KiB that a rank sends per step", xlim=(0, many[1]),
              ylim=(0, 1.3 * max(per_row * many[1], replicas) / KIB))
    right.legend(frameon=False, loc="upper left", fontsize=8)
    save(figure, path)
    own = sum(x.nbytes for x in got[0]["params"].values())
    return (f"your layer on {size} ranks: each holds {100 * own / parameters:.0f} % of the parameters and sends "
            f"{counted / KIB:.0f} KiB per step for {rows} rows; data parallel sends {replicas / KIB:.0f} KiB whatever "
            f"the rows, which is less from {fewest(meet)} rows on")


def fewest(meet):
    """The first whole number behind it."""
    return math.floor(meet) + 1 if math.isfinite(meet) else "no number of"


def layer(axes, case, got):
    """x, A, B and y in proportion; the ranks' parts in colours, with the sizes that the learner's ranks hold."""
    size, whole, x = len(case), case[0]["whole"], case[0]["xs"][0]
    inputs, hidden = whole["A"].shape
    outputs, rows = whole["B"].shape[1], len(x)
    gap, at = 0.8 * inputs, 0.0
    top = max(hidden, rows, inputs) / 2
    places = {}
    for name, height, width in (("x", rows, inputs), ("A", inputs, hidden), ("B", hidden, outputs),
                                ("y", rows, outputs)):
        places[name] = at, width
        patch(axes, at, -height / 2, width, height, EMPTY)
        axes.text(at + width / 2, top * 1.06, f"{name}\n{height} × {width}", ha="center", va="bottom", fontsize=9)
        at += width + gap
    begin = {"A": 0, "B": 0}
    for rank in range(size):
        for name, axis in (("A", 1), ("B", 0)):
            (left, width), held = places[name], got[rank]["params"][name].shape
            first, count = begin[name], held[axis]
            if axis:
                box = left + first, -inputs / 2, count, inputs
            else:
                box = left, hidden / 2 - first - count, width, count
            patch(axes, *box, COLORS[rank])
            axes.text(box[0] + box[2] / 2, box[1] + box[3] / 2, f"rank {rank}\n{held[0]} × {held[1]}", color="white",
                      ha="center", va="center", fontsize=8)
            begin[name] += count
    f = (places["x"][0] + places["x"][1] + places["A"][0]) / 2
    g = (places["B"][0] + places["B"][1] + places["y"][0]) / 2
    tanh = (places["A"][0] + places["A"][1] + places["B"][0]) / 2
    for where, label in ((f, "f"), (g, "g"), (tanh, "tanh")):
        axes.text(where, 0, label, ha="center", va="center", fontsize=11, weight="bold" if len(label) == 1 else None)
    forward, backward = (f"{call['bytes'] / KIB:.0f} KiB (a rank sends {ring(call['bytes'], size) / KIB:.0f} KiB)"
                         for call in got[0].calls)
    low = -top * 1.12
    arrow(axes, 0, at - gap, low, f"forward: g all-reduces y, {forward}")
    arrow(axes, at - gap, 0, low * 1.25, f"backward: f all-reduces the gradient by x, {backward}")
    axes.set(xlim=(-0.02 * at, at - gap + 0.02 * at), ylim=(low * 1.42, top * 1.4), xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.axis("off")


def patch(axes, x, y, width, height, color):
    from matplotlib.patches import Rectangle
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", lw=1.5))


def arrow(axes, begin, end, height, text):
    axes.annotate("", (end, height), (begin, height), arrowprops={"arrowstyle": "-|>", "color": "#6c757d", "lw": 1.2})
    axes.text((begin + end) / 2, height, text, ha="center", va="center", fontsize=8.5,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
