# 21.3: where an integer was asked for
import numpy as np


class CheckpointError(ValueError):
    pass


def cut(sizes, rank, ranks):
    each = np.ceil(sum(sizes.values()) / ranks)
    found, begin = [], 0
    for name, size in sizes.items():
        start, stop = max(rank * each - begin, 0), min((rank + 1) * each - begin, size)
        if start < stop:
            found.append((name, start, stop))
        begin += size
    return found


def save(folder, rank, pieces):
    file, note, at = f"rank-{rank}", [], 0
    for name, start, stop, array in pieces:
        note.append([name, start, stop, array.dtype.str, file, at])
        at += array.nbytes
    folder.write(file, b"".join(array.tobytes() for *_, array in pieces))
    return note


def load(folder, notes, wanted):
    found = []
    for name, start, stop in wanted:
        there = [piece for note in notes for piece in note if piece[0] == name]
        if not there:
            raise CheckpointError(f"{name} is in no file")
        array, missing = np.empty(stop - start, there[0][3]), stop - start
        for _, first, last, _, file, at in there:
            lo, hi = max(start, first), min(stop, last)
            if lo < hi:
                where = at + (lo - first) * array.itemsize
                array[lo - start:hi - start] = read(folder, file, where, hi - lo, array.dtype)
                missing -= hi - lo
        if missing:
            raise CheckpointError(f"{name}: {missing} of the elements {start} to {stop} are in no file")
        found.append(array)
    return found


# ours
def read(folder, file, start, count, dtype):
    try:
        data = folder.read(file, start, count * dtype.itemsize)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    if len(data) < count * dtype.itemsize:
        raise CheckpointError(f"{file} is too short: of {count * dtype.itemsize} bytes at {start} it has {len(data)}")
    return np.frombuffer(data, dtype)
