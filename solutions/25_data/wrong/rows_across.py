# 25.1: rows go on from file to file
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    ends = np.cumsum(counts)
    total = max(0, int(ends[-1]) - 1) // length
    files = np.searchsorted(ends, np.arange(total) * length, side="right")
    return np.searchsorted(files, np.arange(len(counts) + 1))


def place(bounds, length, rows):
    if rows.size and not 0 <= rows.min() <= rows.max() < bounds[-1]:
        raise IndexError("no such row")
    files = np.searchsorted(bounds, rows, side="right") - 1
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    every = np.concatenate([file[:] for file in files]).astype(np.int64)
    total = max(0, len(every) - 1) // length
    if len(rows) and not 0 <= rows.min() <= rows.max() < total:
        raise IndexError("no such row")
    both = every[rows[:, None] * length + np.arange(length + 1)]
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
