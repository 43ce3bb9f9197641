"""The learner's own graph, before and after the passes and the fusion, the bytes that move, and a kernel's source."""

import numpy as np

ALONE = "#c9ced6"


def places(nodes):
    """{name: (column, row)}: the depth in the graph, and a place beside those that it needs."""
    depth, rows, found = {}, {}, {}
    for name, op, inputs, *_ in nodes:
        before = [x for x in inputs if isinstance(x, str)]
        depth[name] = 0 if op == "argument" else 1 + max((depth[x] for x in before), default=0)
    for name, op, *_ in nodes:      # an argument stands before the first that uses it
        users = [depth[n[0]] for n in nodes if name in n[2]]
        depth[name] = min(users, default=1) - 1 if op == "argument" else depth[name]
    for name, op, inputs, *_ in nodes:
        before = [found[x][1] for x in inputs if isinstance(x, str) and x in found]
        wanted = float(np.mean(before)) if before and op != "argument" else len(rows.get(depth[name], ()))
        taken = rows.setdefault(depth[name], set())
        row = min((abs(r - wanted), r) for r in range(-30, 31) if r not in taken)[1]
        taken.add(row)
        found[name] = (depth[name], row)
    return found


def draw_graph(axes, nodes, outputs, colour, title):
    """A graph from left to right; colour: {name: of its box}."""
    at = places(nodes)
    for name, _, inputs, *_ in nodes:
        for x in inputs:
            if isinstance(x, str):
                over = abs(at[x][1] - at[name][1]) < 1 and at[name][0] - at[x][0] > 1
                axes.annotate("", at[name], at[x], zorder=1, arrowprops={
                    "arrowstyle": "-", "color": "#9aa3ad", "lw": 0.8, "shrinkA": 0, "shrinkB": 0,
                    "connectionstyle": f"arc3,rad={-0.3 * over}"})
    for name, op, *_ in nodes:
        edge = "#000000" if name in outputs else "none"
        axes.text(*at[name], "arg" if op == "argument" else op, ha="center", va="center", fontsize=6, zorder=3,
                  color="#333333" if colour.get(name, ALONE) == ALONE else "white",
                  bbox={"boxstyle": "round,pad=0.25", "facecolor": colour.get(name, ALONE), "edgecolor": edge,
                        "lw": 0.9})
    columns, rows = zip(*at.values(), strict=True)
    axes.set(xlim=(-0.6, max(columns) + 0.6), ylim=(max(rows) + 0.8, min(rows) - 0.8))
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_axis_off()


def draw(got, path):
    """Both graphs, and bars: bytes before, after the passes, after fusion."""
    from exercises.frame.pictures import COLORS, canvas, save
    drawn = got["drawn"]
    shades = [*COLORS[:5], "#3f7cac", "#7a5c2e", "#5f6caf"]
    sizes = sorted((len(kernel) for kernel in got["kernels"]), reverse=True)
    colour = {name: shades[k % len(shades)] for k, kernel in enumerate(got["kernels"]) for name in kernel}
    counts = [sum(node[1] != "argument" for node in nodes) for nodes in drawn["nodes"]]
    figure, (above, below, bars) = canvas(3, 1, size=(10.4, 7.4), height_ratios=(3, 3, 1.2))
    draw_graph(above, drawn["nodes"][0], drawn["outputs"][0], {}, f"captured: {counts[0]} ops, each a kernel")
    draw_graph(below, drawn["nodes"][1], drawn["outputs"][1], colour,
               f"after the passes {counts[1]} ops, fused into {len(sizes)} kernels: one colour each")
    mega = [n / 1e6 for n in drawn["bytes"]]
    names = ("captured", "after the passes", "fused")
    bars.barh(names[::-1], mega[::-1], color=("#1d3557", "#8fa3bf", ALONE))
    for place, size in zip((2, 1, 0), mega, strict=True):
        bars.text(size + 0.01 * max(mega), place, f"{size:.1f} MB", va="center", fontsize=9)
    bars.set(xlim=(0, 1.12 * max(mega)), xlabel="bytes moved to and from memory [MB]")
    save(figure, path)
    return (f"your compiler: {counts[0]} ops became {counts[1]}, and those {len(sizes)} kernels, the largest of "
            f"{sizes[0]} ops; {mega[0]:.1f} MB moved became {mega[2]:.1f}")


def draw_kernel(case, got, path):
    """The source of a kernel, and the bytes of temporaries that it held with tiles of several sizes."""
    from exercises.frame.pictures import COLORS, canvas, save
    figure, (text, axes) = canvas(1, 2, size=(10.4, 4.2), width_ratios=(1.15, 1))
    text.text(0, 1, got["source"], family="monospace", fontsize=7.5, va="top", transform=text.transAxes)
    text.set_axis_off()
    tiles, peaks = zip(*sorted(zip(case["tiles"], [count[2] for count in got["counts"]], strict=True)), strict=True)
    axes.loglog(tiles, [peak / 1024 for peak in peaks], "o-", color=COLORS[0], lw=2)
    for tile, peak in zip(tiles, peaks, strict=True):
        axes.annotate(f"{peak / 1024:,.1f}", (tile, peak / 1024), xytext=(7, -9), textcoords="offset points",
                      fontsize=8)
    axes.set(xlim=(0.8, 1.6 * tiles[-1]), ylim=(0.6 * peaks[0] / 1024, 2 * peaks[-1] / 1024), xlabel="rows in a tile",
             ylabel="temporaries at a time [KiB]", xticks=tiles, xticklabels=tiles)
    axes.set_title("your kernel's memory", loc="left", fontsize=10)
    axes.minorticks_off()
    save(figure, path)
    return (f"your layer norm of {case['results'][0][0][0]} rows holds {peaks[-1] / 1024:,.0f} KiB of temporaries as "
            f"one tile, {peaks[0] / 1024:,.1f} with a row at a time, and gives the same")
