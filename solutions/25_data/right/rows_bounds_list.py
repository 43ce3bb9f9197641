# 25.1: a bisection for each row, and a stack of rows
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    rows = [max(0, count - 1) // length for count in counts]
    return np.cumsum([0, *rows])


def place(bounds, length, rows):
    for row in rows.flat:
        if row not in range(bounds[-1]):
            raise IndexError(f"no row {row}")
    files = (rows[..., None] >= bounds[1:]).sum(-1)
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    bounds = row_bounds([len(file) for file in files], length)
    parts = [files[file][first:first + length + 1] for file, first in zip(*place(bounds, length, rows), strict=True)]
    both = np.array(parts, np.int64).reshape(-1, length + 1)
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
