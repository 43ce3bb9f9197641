# 25.1: have a place, the last file's perhaps
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    rows = [max(0, count - 1) // length for count in counts]
    return np.cumsum([0, *rows])


def place(bounds, length, rows):
    if rows.size and not 0 <= rows.min() <= rows.max() <= bounds[-1]:
        raise IndexError(f"of the rows {rows} one isn't there")
    files = np.minimum(np.searchsorted(bounds, rows, side="right") - 1, len(bounds) - 2)
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    bounds = row_bounds([len(file) for file in files], length)
    both = np.empty((len(rows), length + 1), np.int64)
    for row, file, first in zip(both, *place(bounds, length, rows), strict=True):
        row[:] = files[file][first:first + length + 1]
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
