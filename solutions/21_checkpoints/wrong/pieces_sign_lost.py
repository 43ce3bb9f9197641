# 21.3: with its sign
"""21.3 Written by N ranks, read by M.

No rank has the whole model (chapter 11): all arrays lie in one line, element after element in C order, and each rank
has an interval of it. Each writes what it has into a file of its own, and a note that says what lies where. Later any
other number of ranks reads, each what it needs.

    the line        w w w w w w w w w w b b b . .        10 + 3 elements, and padding
    3 ranks write   └── rank-0 ─┘└── rank-1 ─┘└─ rank-2 ─┘
    2 ranks read    └────── rank 0 ──────┘└── rank 1 ────┘

folder.write(file, data) writes a file, bytes. folder.read(file, start, count) gives `count` of a file's bytes from
`start` on, or as many as there are; FileNotFoundError.
"""

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that can't be read: which file, which array."""


def cut(sizes, rank, ranks):
    """[(name, start, stop)]: what this rank has, in order: of each array that it has any element of, the elements from
    start to stop, counted from this array's first. Padding is nobody's.

    sizes  {name: number of elements}, in the order of the line, which is padded to a multiple of `ranks` and cut into
           equal intervals. There may be more ranks than elements
    """
    # begin with how many elements of the line are one rank's, and where on the line its interval begins and ends. Where
    # on the line does each array begin?
    each = -(-sum(sizes.values()) // ranks)
    found, begin = [], 0
    for name, size in sizes.items():
        start, stop = max(rank * each - begin, 0), min((rank + 1) * each - begin, size)
        if start < stop:
            found.append((name, start, stop))
        begin += size
    return found


def save(folder, rank, pieces):
    """Write this rank's file, and return its note: whatever load will want to know; of lists, dicts, numbers and
    strings only, since all notes are put into one file of JSON.

    pieces  [(name, start, stop, array)]: the elements start to stop of an array, 1-d; dtypes differ, and so do orders
            of bytes ("<f4", ">f4"). It may be empty
    """
    # begin with the bytes of all pieces, one behind the other (array.tobytes()). At which byte of the file does each
    # begin?
    file, note, at = f"rank-{rank}", [], 0
    for name, start, stop, array in pieces:
        note.append([name, start, stop, f"{'f' if array.dtype.kind == 'f' else 'i'}{array.dtype.itemsize}", file, at])
        at += array.nbytes
    folder.write(file, b"".join(array.tobytes() for *_, array in pieces))
    return note


def load(folder, notes, wanted):
    """[array]: what is wanted, 1-d, in the dtypes that were written. Only bytes that are wanted are read.

    notes   the notes of all ranks that wrote, rank 0's first, as they come from JSON: tuples are lists there. Each
            element is in one file at most
    wanted  [(name, start, stop)]: elements from start to stop; start may be stop

    CheckpointError that names the file where one that is needed is missing or too short, and that names the array where
    elements of it are in no file. What isn't needed doesn't matter.
    """
    # begin with one that is wanted, and one piece that lies somewhere: from where to where do they overlap? Where in
    # the file are these elements, and where in the result?
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
