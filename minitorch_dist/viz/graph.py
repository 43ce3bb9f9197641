"""The tape, as text and as a picture: what a tensor was made of, and what is kept for its gradient."""

from dataclasses import dataclass, field

from ..autodiff.primitive import lower
from ..autodiff.saved import Packed
from ..autodiff.tensor import Leaf
from .figure import drawn

MOST_NODES = 60         # a picture of more is no picture
MOST_LINES = 400


@dataclass(eq=False)
class Box:
    """One node of the tape, ready to be shown.

    number   its place in the order of recording, leaves before their first use
    inputs   per input of the op its Box; None for constants
    saves    names of what is kept for backward, or why nothing can be seen
    nbytes   of the arrays that are kept
    """

    number: int
    name: str
    shape: str
    leaf: bool
    inputs: list = field(default_factory=list)
    saves: str = ""
    nbytes: int = 0


def boxes(tensor, names=None):
    """The tape under a tensor as Boxes, inputs first. Names: see graph."""
    if getattr(tensor, "node", None) is None:
        raise ValueError("there is no tape under this tensor: no input had requires_grad, or it was made under "
                         "no_grad()")
    known = _named_leaves(names)
    found, stack = set(), [tensor.node]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(p for p in node.parents if p is not None)
    by_node, unnamed = {}, 0
    for node in sorted((n for n in found if not isinstance(n, Leaf)), key=lambda n: n.date) or [tensor.node]:
        for one in (*node.parents, node):
            if one is not None and one not in by_node:
                if isinstance(one, Leaf):
                    unnamed += one not in known
                    name = known.get(one, f"leaf {unnamed}")
                    by_node[one] = Box(len(by_node), name, _shape(one), True)
                else:
                    saves, nbytes = _saved(one)
                    by_node[one] = Box(len(by_node), _op_name(one), _shape(one), False,
                                       [by_node.get(p) for p in one.parents], saves, nbytes)
    return list(by_node.values())


def _named_leaves(names):
    """{leaf: name} from a module, a dict {name: tensor} or (name, tensor) pairs."""
    if names is None:
        return {}
    pairs = names.named_parameters() if hasattr(names, "named_parameters") else \
        names.items() if isinstance(names, dict) else names
    return {t.node: name for name, t in pairs if t.node is not None}


def _shape(node):
    return "several outputs" if node.shape is None else f"{node.dtype}{list(node.shape)}".replace(" ", "")


def _op_name(node):
    if node.primitive.name == "pick":
        return f"output {node.saved[2]}" if isinstance(node.saved, tuple) else "output"
    return node.primitive.name


def _saved(node):
    """(what the node keeps for backward in words, the bytes of it)."""
    saved = node.saved
    if isinstance(saved, Packed):
        return "packed", 0
    if not isinstance(saved, tuple):
        return "freed", 0
    kept = [(name, lower(value)) for name, value in zip(node.primitive.layout, saved, strict=False)]
    kept = [(name, value) for name, value in kept if hasattr(value, "nbytes")]
    return ", ".join(dict(kept)), sum(value.nbytes for _, value in kept)


def _bytes(n):
    return f"{n} bytes" if n < 1000 else f"{n / 1e3:,.1f} kB" if n < 1e6 else f"{n / 1e6:,.1f} MB"


# ---------------------------------------------------------------- as text

def graph_text(tensor, names=None):
    """The tape as text, a line per leaf or op in the order of recording; `%3` is the value made in line 3, `·` a
    constant. Of very long tapes the last lines. Names: see graph."""
    shown = boxes(tensor, names)
    ops = [b for b in shown if not b.leaf]
    leaves = len(shown) - len(ops)
    lines = [f"tape: {len(ops)} op{'s' * (len(ops) != 1)}, {leaves} lea{'ves' if leaves != 1 else 'f'}"]
    left_out = max(0, len(shown) - MOST_LINES)
    if left_out:
        lines.append(f"  … {left_out:,} earlier lines left out")
    rows = []
    for b in shown[left_out:]:
        inputs = ", ".join("·" if i is None else f"%{i.number}" for i in b.inputs)
        kept = b.saves and (f"({b.saves})" if b.saves in ("freed", "packed") else f"keeps {b.saves}")
        rows.append((f"%{b.number}", b.name if b.leaf else f"{b.name}({inputs})", b.shape, "leaf" if b.leaf else kept))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for number, what, shape, kept in rows:
        lines.append(f"  {number:>{widths[0]}} = {what:{widths[1]}}  {shape:{widths[2]}}  {kept}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------- as a picture

def graph(tensor, path=None, names=None):
    """Draw the tape under a tensor into the file `path` (.svg, .png, …; None: no picture); returns graph_text.

    names  what the leaves are called: a Module, {name: tensor}, or (name, tensor) pairs

    Inputs are at the top, the tensor at the bottom; each op stands below all that it needs. Under an op's name stands
    what it keeps for backward. Raises ValueError for more than 60 nodes: draw a smaller part, or read the text.
    """
    text = graph_text(tensor, names)
    if path is None:
        return text
    shown = boxes(tensor, names)
    if len(shown) > MOST_NODES:
        raise ValueError(f"this tape has {len(shown):,} nodes, and a picture holds {MOST_NODES}: draw a part of the "
                         "model, or print(graph_text(tensor))")
    rows, links = layers(shown)
    width = max(len(row) for row in rows)
    with drawn(path, (max(4.5, 2.3 * width + 0.3), 0.3 + 0.86 * len(rows))) as figure:
        axes = figure.subplots()
        axes.set_axis_off()
        places = _places(rows, links)
        for above, below in links:
            _draw_link(axes, places[above], places[below], isinstance(below, Box))
        for box, (x, y) in places.items():
            if isinstance(box, Box):
                _draw_box(axes, box, x, y, last=box is shown[-1])
        xs = [x for x, _ in places.values()]
        axes.set_xlim(min(xs) - 0.55, max(xs) + 0.55)
        axes.set_ylim(-len(rows) + 0.5, 0.5)
    return text


class Bend:
    """A place where a long link passes through a layer, so that it goes around the boxes there."""


def layers(shown):
    """(rows of Boxes and Bends from top to bottom, links between neighbouring rows). An op is in the row below the
    lowest of its inputs; a leaf right above the first op that uses it."""
    depth = {}
    for b in shown:     # inputs come first in this order
        if not b.leaf:
            depth[b] = 1 + max((depth[i] for i in b.inputs if i is not None and not i.leaf), default=0)
    for b in shown:
        if b.leaf:
            depth[b] = min((depth[user] for user in shown if b in user.inputs), default=1) - 1
    rows, links = [[] for _ in range(1 + max(depth.values()))], []
    for b in shown:
        rows[depth[b]].append(b)
    for b in shown:
        for above in dict.fromkeys(i for i in b.inputs if i is not None):
            for d in range(depth[above] + 1, depth[b]):
                bend = Bend()
                rows[d].append(bend)
                links.append((above, bend))
                above = bend
            links.append((above, b))
    return rows, links


def _places(rows, links):
    """{Box or Bend: (x, y)}: every one near the middle of what it is linked with, none on top of another."""
    over, under = {}, {}
    for above, below in links:
        under.setdefault(above, []).append(below)
        over.setdefault(below, []).append(above)
    x = {b: float(i) - (len(row) - 1) / 2 for row in rows for i, b in enumerate(row)}
    for sweep in range(12):     # upwards by what lies under, then downwards by what lies over
        for row in (rows if sweep % 2 else rows[::-1]):
            linked = over if sweep % 2 else under
            wanted = {b: sum(x[n] for n in linked.get(b, [b])) / len(linked.get(b, [b])) for b in row}
            row.sort(key=lambda b: (wanted[b], x[b]))
            at = []
            for b in row:
                gap = 0.78 if at and (isinstance(b, Bend) or isinstance(row[len(at) - 1], Bend)) else 1.0
                at.append(max(wanted[b], at[-1] + gap) if at else wanted[b])
            shift = sum(wanted[b] - a for b, a in zip(row, at, strict=True)) / max(1, len(row))
            for b, a in zip(row, at, strict=True):
                x[b] = a + shift
    return {b: (x[b], -float(d)) for d, row in enumerate(rows) for b in row}


HEIGHT = 0.27       # half of a box's height, where a row is 1
LEAF, OP, LAST = ("#fdebd3", "#e9a55b"), ("#eaf1f8", "#7d9cc0"), ("#dff1ea", "#2a9d8f")


def _draw_box(axes, box, x, y, last):
    from matplotlib.patches import FancyBboxPatch
    face, edge = LEAF if box.leaf else LAST if last else OP
    axes.add_patch(FancyBboxPatch((x - 0.45, y - HEIGHT), 0.9, 2 * HEIGHT, facecolor=face, edgecolor=edge, linewidth=1,
                                  boxstyle="round,pad=0,rounding_size=0.04", mutation_aspect=2.5, zorder=3))
    name = box.name if len(box.name) < 23 else box.name[:21] + "…"
    kept = "" if not box.saves else box.saves if box.saves in ("freed", "packed") else \
        f"keeps {box.saves if len(box.saves) < 20 else box.saves[:18] + '…'} · {_bytes(box.nbytes)}"
    top = 0.12 if kept else 0.08
    axes.text(x, y + top, name, ha="center", va="center", fontsize=min(9.5, 160 / len(name)), fontweight="bold",
              color="#222222", zorder=4)
    axes.text(x, y + top - (0.15 if kept else 0.19), box.shape, ha="center", va="center", fontsize=7.5, color="#555555",
              zorder=4)
    if kept:
        axes.text(x, y - 0.17, kept, ha="center", va="center", fontsize=6.5, color="#b3541e", zorder=4)


def _draw_link(axes, start, end, arrow):
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line
    (x0, y0), (x1, y1) = start, end
    y0, y1 = y0 - HEIGHT, y1 + HEIGHT
    half = (y0 + y1) / 2
    line = Line([(x0, y0), (x0, half), (x1, half), (x1, y1)], [Line.MOVETO, Line.CURVE4, Line.CURVE4, Line.CURVE4])
    axes.add_patch(FancyArrowPatch(path=line, arrowstyle="-|>" if arrow else "-", mutation_scale=8, color="#8a8f98",
                                   linewidth=1, shrinkA=0, shrinkB=0, zorder=2))
    if not arrow:       # on through the row to the next link
        axes.plot([x1, x1], [y1, y1 - 2 * HEIGHT], color="#8a8f98", linewidth=1, zorder=2)
