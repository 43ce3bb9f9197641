# 21.3: cut by counting, a file per array, dicts in the note
import numpy as np


class CheckpointError(ValueError):
    pass


def cut(sizes, rank, ranks):
    total = sum(sizes.values())
    while total % ranks:
        total += 1
    line = [(name, i) for name, size in sizes.items() for i in range(size)]
    part = line[rank * (total // ranks):(rank + 1) * (total // ranks)]
    found = {}
    for name, i in part:
        found.setdefault(name, []).append(i)
    return [[name, there[0], there[-1] + 1] for name, there in found.items()]


def save(folder, rank, pieces):
    note = {}
    for name, start, stop, array in pieces:
        folder.write(f"{name}.{rank}", memoryview(array).cast("B") if array.size else b"")
        note[name] = {"from": start, "to": stop, "dtype": str(array.dtype), "file": f"{name}.{rank}"}
    return note


def load(folder, notes, wanted):
    return [one(folder, [note[name] for note in notes if name in note], name, start, stop)
            for name, start, stop in wanted]


def one(folder, there, name, start, stop):
    parts, at = [np.zeros(0, there[0]["dtype"])] if there else [], start
    for piece in sorted(there, key=lambda piece: piece["from"]):
        if piece["from"] <= at < min(piece["to"], stop):
            size, count = np.dtype(piece["dtype"]).itemsize, min(piece["to"], stop) - at
            try:
                data = folder.read(piece["file"], (at - piece["from"]) * size, count * size)
            except OSError as error:
                raise CheckpointError(f"{piece['file']}: {error}") from error
            if len(data) != count * size:
                raise CheckpointError(f"{piece['file']} ends too early")
            parts.append(np.frombuffer(data, piece["dtype"]))
            at += count
    if at < stop or not there:
        raise CheckpointError(f"nobody has {name} from {at} on")
    return np.concatenate(parts)
