# 25.1: all rows are listed
import numpy as np

IGNORED = -100


def row_bounds(counts, length):
    bounds = [0]
    for count in counts:
        rows = 0
        while (rows + 1) * length < count:
            rows += 1
        bounds.append(bounds[-1] + rows)
    return np.array(bounds)


def place(bounds, length, rows):
    files, firsts = [], []
    for row in rows.ravel():
        if row < 0:
            raise IndexError(row)
        file = 0
        while file + 1 < len(bounds) and row >= bounds[file + 1]:
            file += 1
        if file + 1 == len(bounds):
            raise IndexError(row)
        files.append(file)
        firsts.append(int(row - bounds[file]) * length)
    return np.array(files, int).reshape(rows.shape), np.array(firsts, int).reshape(rows.shape)


def read(files, length, rows, end):
    shape = (len(rows), length)
    inputs, targets, documents = (np.zeros(shape, np.int64) for _ in range(3))
    where = place(row_bounds([len(f) for f in files], length), length, rows)
    for r, (f, first) in enumerate(zip(*where, strict=True)):
        tokens = files[f][first:first + length + 1].tolist()
        document = 0
        for j in range(length):
            inputs[r, j], documents[r, j] = tokens[j], document
            targets[r, j] = IGNORED if tokens[j] == end else tokens[j + 1]
            document += tokens[j] == end
    return inputs, targets, documents
