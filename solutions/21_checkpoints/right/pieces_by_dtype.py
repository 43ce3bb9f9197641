# 21.3: each file sorted by dtype; a mask counts what has come
import numpy as np


class CheckpointError(ValueError):
    pass


def cut(sizes, rank, ranks):
    each = -(-sum(sizes.values()) // ranks)
    found, begin = [], 0
    for name, size in sizes.items():
        start, stop = max(rank * each - begin, 0), min((rank + 1) * each - begin, size)
        if start < stop:
            found.append((name, start, stop))
        begin += size
    return found


def save(folder, rank, pieces):
    order = sorted(pieces, key=lambda piece: (-piece[3].dtype.itemsize, piece[0]))
    file, note, data = f"{rank:05d}.bin", [], b""
    for name, start, stop, array in order:
        note.append([name, start, stop, array.dtype.str, file, len(data)])
        data = data + array.tobytes()
    folder.write(file, data)
    return note


def load(folder, notes, wanted):
    found = []
    for name, start, stop in wanted:
        there = [piece for note in notes for piece in note if piece[0] == name]
        if not there:
            raise CheckpointError(f"no rank has written {name!r}")
        dtype = np.dtype(there[0][3])
        array, came = np.zeros(stop - start, dtype), np.zeros(stop - start, bool)
        for _, first, last, _, file, at in there:
            here = slice(max(first - start, 0), max(min(last, stop) - start, 0))
            count = here.stop - here.start
            if count <= 0:
                continue
            try:
                data = folder.read(file, at + (here.start + start - first) * dtype.itemsize, count * dtype.itemsize)
                array[here] = np.frombuffer(data, dtype, count)
            except (FileNotFoundError, ValueError) as error:
                raise CheckpointError(f"{file}, which has a part of {name}: {error}") from None
            came[here] = True
        if not came.all():
            raise CheckpointError(f"{name}[{start + int(np.argmin(came))}] is in no file")
        found.append(array)
    return found
