"""Bytes per element, of NumPy's operations one by one and of a learner's kernel, as bars."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


class Counting(np.ndarray):
    """An array that notes how many bytes each operation on it reads and writes."""

    noted = []

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        inputs = [x.view(np.ndarray) if isinstance(x, Counting) else x for x in inputs]
        result = getattr(ufunc, method)(*inputs, **more)
        Counting.noted.append((ufunc.__name__, result.nbytes + sum(x.nbytes for x in inputs if np.ndim(x))))
        return result.view(Counting)


def counted(function, *arrays):
    """[(operation, bytes per element)] of a NumPy function of arrays of one shape."""
    Counting.noted = []
    function(*(a.view(Counting) for a in arrays))
    return [(name, count / arrays[0].size) for name, count in Counting.noted]


def numpy_softmax(x):
    e = np.exp(x - np.maximum.reduce(x, axis=1, keepdims=True))
    return e / np.add.reduce(e, axis=1, keepdims=True)


def numpy_adam(p, g, m, v, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, t=1):
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    return p - (lr / (1 - beta1 ** t)) * m / (np.sqrt(v / (1 - beta2 ** t)) + eps), m, v


def bars(path, title, passes, got, elements):
    """Bytes per element that NumPy moves, operation by operation, and those of the learner's kernel.

    passes: [(operation, bytes per element)]
    """
    figure, axes = canvas(size=(8.6, 2.6))
    at = 0.0
    for i, (name, width) in enumerate(passes):
        axes.barh(0, width, left=at, color=("#bcd4e6", "#9dbfd9")[i % 2])
        axes.text(at + width / 2, 0, name, ha="center", va="center", rotation=90, fontsize=7, color=COLORS[0])
        at += width
    read, written = got["bytes_read"] / elements, got["bytes_written"] / elements
    axes.barh(1, read, color=COLORS[2], label="read")
    axes.barh(1, written, left=read, color=COLORS[1], label="written")
    for place, total in ((0, at), (1, read + written)):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=11)
    axes.set(yticks=(0, 1), yticklabels=("NumPy", "your kernel"), xlabel=f"{title}: bytes moved per element",
             xlim=(0, 1.08 * at))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)
    return (f"your kernel moves {read + written:.3g} bytes per element, NumPy's {len(passes)} operations {at:.3g}: "
            f"where memory is what one waits for, that is {at / (read + written):.1f} times as fast")
