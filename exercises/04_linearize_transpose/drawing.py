"""A linear program and its transpose, as two graphs."""

import numpy as np


def places(program):
    """{variable: (how far along, how far up)}, and per arrow the places that it goes through.

    Along: the longest way from the inputs; outputs that nobody uses are last. Where an arrow is longer than a step,
    something invisible holds its place in between. Up: by the mean of those that arrows come from.
    """
    made = {out: inputs for out, _, inputs in program["equations"]}
    depth = dict.fromkeys(range(program["inputs"]), 0)
    for out, inputs in made.items():
        depth[out] = 1 + max((depth[i] for i in inputs), default=0)
    used = {i for inputs in made.values() for i in inputs}
    depth |= {v: max(depth.values()) for v in program["outputs"] if v in made and v not in used}
    before, ways = {v: [] for v in depth}, []
    for out, inputs in made.items():
        for k, i in enumerate(inputs):
            way = [i, *((out, k, d) for d in range(depth[i] + 1, depth[out])), out]
            ways.append(way)
            for one, other in zip(way[:-1], way[1:], strict=True):
                before.setdefault(other, []).append(one)
    along = depth | {held: held[2] for way in ways for held in way[1:-1]}
    up = {}
    for column in range(max(along.values()) + 1):
        here = [v for v, d in along.items() if d == column]
        wanted = {v: float(np.mean([up[i] for i in before[v]])) if before[v] else -k for k, v in enumerate(here)}
        ranked = sorted(here, key=lambda v: -wanted[v])
        middle = np.mean([wanted[v] for v in ranked]) if column else 0.0
        up |= {v: middle + (len(ranked) - 1) / 2 - k for k, v in enumerate(ranked)}
    return {v: (along[v], up[v]) for v in along}, ways


def draw_program(axes, program, title, colour, mirrored):
    """One program as a graph, flowing to the right, or mirrored to the left."""
    from exercises.frame.pictures import COLORS
    found, ways = places(program)
    at = {v: np.array([-x if mirrored else x, y]) for v, (x, y) in found.items()}
    ops = {out: op for out, op, _ in program["equations"]}
    for way in ways:
        axes.plot(*np.array([at[v] for v in way[:-1]]).T, color=colour, lw=1.6, zorder=1)
        axes.annotate("", at[way[-1]], at[way[-2]], zorder=1, arrowprops={
            "arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 13})
    for v in range(program["inputs"] + len(ops)):
        kind = 2 if v < program["inputs"] else 3 if v in program["outputs"] else 0
        axes.text(*at[v], "abcdefghijklmnopqrstuvwxyz"[v % 26], ha="center", va="center", fontsize=10, color="white",
                  zorder=3, bbox={"boxstyle": "circle,pad=0.35", "color": COLORS[kind]})
        says = ops.get(v, "input") + ", output" * (v in program["outputs"])
        axes.text(at[v][0], at[v][1] - 0.4, says, ha="center", va="center", fontsize=8, color="#555555", zorder=3,
                  bbox={"color": "white", "alpha": 0.8, "pad": 0.5, "linewidth": 0})
    xs, ys = zip(*at.values(), strict=True)
    axes.set_xlim(min(xs) - 0.6, max(xs) + 0.6)
    axes.set_ylim(min(ys) - 0.7, max(ys) + 0.5)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_axis_off()


def draw_both_ways(got, path):
    """A program above, its transpose below with the arrows reversed, and the text of both."""
    from exercises.frame.pictures import COLORS, canvas, save
    figure, axes = canvas(2, 2, size=(10.4, 6.2), width_ratios=(2.7, 1))
    titles = (("the program: tangents go to the right", COLORS[0]),
              ("its transpose: cotangents come back to the left", COLORS[1]))
    for (graph, text), program, (title, colour) in zip(axes, got["drawn"], titles, strict=True):
        draw_program(graph, program, title, colour, mirrored=graph is axes[1, 0])
        text.text(0, 1, program["text"], family="monospace", fontsize=8.5, va="top", transform=text.transAxes)
        text.set_axis_off()
    save(figure, path)
    counts = [len(program["equations"]) for program in got["drawn"]]
    return (f"your transpose: {counts[0]} equations read upwards became {counts[1]}. Where an arrow forks above, there "
            "is an add below, and each add above is a fork below")
