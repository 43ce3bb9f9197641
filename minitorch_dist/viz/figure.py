"""How every picture is made: one style, one figure, one file."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..autodiff.primitive import lower
from ..backend import to

STYLE = {"font.family": "DejaVu Sans", "font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False,
         "axes.edgecolor": "#888888", "axes.labelcolor": "#333333", "xtick.color": "#555555", "ytick.color": "#555555"}


@contextmanager
def drawn(path, size, layout="constrained"):
    """A matplotlib Figure of `size` inches, to be filled inside of the block; at its end it is written into the file
    `path`, as PNG, SVG or PDF by the name's ending. layout: matplotlib's; None: the caller places the axes. ValueError
    for a name without an ending, to which matplotlib would give one; OSError, naming it, where it can't be written."""
    if not Path(path).suffix:
        raise ValueError(f"{path} needs an ending, as in {Path(path).name}.png")
    import matplotlib
    from matplotlib.figure import Figure
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150, layout=layout)
        yield figure
        write(figure, path)


def write(figure, path):
    """Write a Figure into the file `path`, whose folder is made. OSError, naming the file, where that can't be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except OSError as error:
        error.filename = error.filename or str(path)    # of a full disk matplotlib doesn't name the file
        raise


def host_values(array):
    """The values of an array or tensor of any device, or of a list, as NumPy's array."""
    return np.asarray(to(lower(array), "cpu"))
