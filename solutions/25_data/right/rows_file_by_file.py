# 25.1: a file is gone through after the other; the bounds are Python's own
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    rows = [max(0, count - 1) // length for count in counts]
    return [sum(rows[:i]) for i in range(len(rows) + 1)]


def place(bounds, length, rows):
    if rows.size and not 0 <= rows.min() <= rows.max() < bounds[-1]:
        raise IndexError(f"of the rows {rows} one isn't there")
    bounds = np.asarray(bounds)
    files = np.searchsorted(bounds, rows, side="right") - 1
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    bounds = row_bounds([len(file) for file in files], length)
    both = np.empty((len(rows), length + 1), np.int64)
    found, firsts = place(np.array(bounds), length, rows)
    for file in range(len(files)):
        for row in np.flatnonzero(found == file):
            both[row] = files[file][int(firsts[row]):int(firsts[row]) + length + 1]
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
