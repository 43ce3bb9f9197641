# 25.1: rows go on from file to file
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    ends = np.cumsum(counts)
    starts = np.arange(max(0, int(ends[-1]) - 1) // length) * length
    rows = np.bincount(np.searchsorted(ends, starts, side="right"), minlength=len(counts))
    return np.cumsum([0, *rows])


def place(bounds, length, rows):
    if rows.size and not 0 <= rows.min() <= rows.max() < bounds[-1]:
        raise IndexError(f"of the rows {rows} one isn't there")
    files = np.searchsorted(bounds, rows, side="right") - 1
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    counts = [len(file) for file in files]
    bounds = row_bounds(counts, length)
    starts = np.cumsum([0, *counts])
    both = np.empty((len(rows), length + 1), np.int64)
    place(bounds, length, rows)
    for row, number in zip(both, rows):
        file = int(np.searchsorted(starts, number * length, side="right")) - 1
        first = int(number * length - starts[file])
        row[:] = files[file][first:first + length + 1]
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
