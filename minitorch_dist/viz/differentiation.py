"""Differentiation to look at: a Jacobian filled by columns and by rows, and the memory that each mode holds."""

import numpy as np

from ..autodiff.primitive import lower
from ..autodiff.transforms import jvp, vjp
from ..backend import device_of, module_of, on
from .figure import drawn, host_values

# ---------------------------------------------------------------- the Jacobian

PANELS = 4


def jacobian_filling(f, x, path):
    """Draw how the Jacobian of f at x comes to be, into the file `path`: column by column, one JVP each (jacfwd), and
    row by row, one VJP each (jacrev). Returns (number of JVPs, number of VJPs) that were made.

    f takes one floating array, on any device, and gives one; of both only the flattened elements are shown.
    """
    x = lower(x)
    x = np.asarray(x) if device_of(x) == "cpu" else x
    with on(device_of(x)):
        eye = module_of(x).eye
        columns = [host_values(jvp(f, (x,), (e.reshape(x.shape),))[1]).ravel() for e in eye(x.size, dtype=x.dtype)]
        y, pull = vjp(f, x)
        y = lower(y)
        rows = [host_values(pull(e.reshape(y.shape))[0]).ravel() for e in eye(y.size, dtype=y.dtype)]
    if not columns or not rows:
        raise ValueError(f"jacobian_filling: from shape {x.shape} to shape {y.shape}: there is nothing to draw")
    largest = max(np.abs(columns).max(), 1e-30)
    cell = min(0.42, 3.2 / max(len(rows), len(columns)))
    across, down = max(1.35, cell * len(columns)), max(0.9, cell * len(rows))
    with drawn(path, (PANELS * (across + 0.45) + 0.9, 2 * (down + 1.0)), layout=None) as figure:
        strips = figure.subfigures(2, 1)
        _strip(strips[0], np.array(columns).T, len(columns), 1, "JVP", largest,
               f"jacfwd: column by column, {_counted(len(columns), 'JVP')} for {_counted(len(columns), 'input')}")
        _strip(strips[1], np.array(rows), len(rows), 0, "VJP", largest,
               f"jacrev: row by row, {_counted(len(rows), 'VJP')} for {_counted(len(rows), 'output')}")
    return len(columns), len(rows)


def _counted(n, name):
    return f"{n} {name}{'s' * (n != 1)}"


def _strip(figure, matrix, passes, axis, name, largest, title):
    """One row of panels: the matrix after some of its passes."""
    stages = sorted({round(1 + (passes - 1) * i / (PANELS - 1)) for i in range(PANELS)})
    figure.suptitle(title, x=0.03, ha="left", fontsize=12, fontweight="bold", color="#333333")
    panels = figure.subplots(1, PANELS, gridspec_kw={"left": 0.03, "right": 0.97, "top": 0.86, "bottom": 0.14,
                                                     "wspace": 0.15})
    for axes in panels[len(stages):]:
        axes.set_axis_off()
    for axes, done in zip(panels, stages, strict=False):
        known = np.arange(matrix.shape[axis]) < done
        shown = np.where(known[None, :] if axis else known[:, None], matrix, np.nan)
        axes.set_facecolor("#f1f1ef")
        axes.imshow(shown, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="equal", interpolation="nearest")
        axes.set_xticks(np.arange(1, matrix.shape[1]) - 0.5, [])
        axes.set_yticks(np.arange(1, matrix.shape[0]) - 0.5, [])
        axes.grid(color="white", linewidth=1.5)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if max(matrix.shape) <= 8:
            for (i, j), value in np.ndenumerate(shown):
                if np.isfinite(value):
                    axes.text(j, i, f"{value:.1f}".replace("-0.0", "0.0"), ha="center", va="center", fontsize=8,
                              color="white" if abs(value) > 0.6 * largest else "#333333")
        at = done - 1.5     # a frame around the newest column or row
        frame = ((at, -0.5), 1, matrix.shape[0]) if axis else ((-0.5, at), matrix.shape[1], 1)
        _frame(axes, *frame)
        axes.set_xlabel(f"after {_counted(done, name)}", fontsize=10)


def _frame(axes, corner, width, height):
    from matplotlib.patches import Rectangle
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="#222222", linewidth=1.6, clip_on=False,
                             zorder=3))


# ---------------------------------------------------------------- memory

LINES = ("#c8553d", "#1d3557", "#2a9d8f", "#9b2c8f", "#e9a55b", "#6c757d")


def memory(books, path, unit=None, kind="activation"):
    """Draw what differentiation holds over the course of forward and backward, into the file `path`.

    books  {label: Ledger} of runs recorded with ledger.record(memory=True); each may have called
           ledger.event("backward") between its two passes, and is drawn as far as it went
    unit   bytes that count as 1, e.g. one activation's (then the axis counts activations); None: megabytes
    kind   the kind of memory, one of ledger.KINDS

    Steps are changes of the amount: each pass is stretched to the same width. Returns {label: peak in the unit}.
    """
    if not books:
        raise ValueError("memory: there is no ledger to draw")
    for label, book in books.items():
        if not any(name == kind for name, _ in book.course):
            raise ValueError(f"memory: the ledger of {label!r} has counted no {kind} bytes: record it with "
                             "ledger.record(memory=True)")
    size = unit or 1e6
    peaks = {label: book.peak[kind] / size for label, book in books.items()}
    passes = {label: _passes_of(book, kind) for label, book in books.items()}
    two = any(backward for _, backward in passes.values())
    with drawn(path, (8.6, 4.6)) as figure:
        axes = figure.subplots()
        for (label, (forward, backward)), color in zip(passes.items(), LINES * len(books), strict=False):
            xs = np.concatenate([np.linspace(0, 1, len(forward)), np.linspace(1, 2, len(backward) + 1)[1:]])
            ys = np.array([*forward, *backward]) / size
            axes.plot(xs, ys, color=color, lw=1.6, drawstyle="steps-post", label=f"{label}: peak {peaks[label]:,.3g}")
            axes.fill_between(xs, 0, ys, step="post", color=color, alpha=0.10, lw=0)
        axes.set_xlim(0, 2 if two else 1)
        axes.set_ylim(0, 1.12 * max(peaks.values()))
        axes.set_xticks([0.5, 1.5] if two else [0.5], ["forward →", "backward →"] if two else ["→"])
        axes.tick_params(axis="x", length=0, labelsize=11)
        if two:
            axes.axvline(1, color="#999999", lw=1, ls=":")
        axes.grid(axis="y", alpha=0.2)
        axes.set_ylabel(f"{kind}s held" if unit else f"{kind}s held (MB)")
        axes.legend(frameon=False, loc="upper left", fontsize=10)
    return peaks


def _passes_of(book, kind):
    """(amounts during forward, amounts during backward), from 0."""
    parts = [[0], []]
    for name, live in book.course:
        if name == "backward":
            parts[1] = parts[1] or [parts[0][-1]]
        elif name == kind:
            parts[bool(parts[1])].append(live)
    return parts
