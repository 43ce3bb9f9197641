# 24.1: rows as lists that are put together
from typing import NamedTuple

import numpy as np

IGNORED = -100
PADDING = -1


class Packed(NamedTuple):
    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    positions: np.ndarray


def pieces(documents, length):
    return [(i, start, min(start + length, len(document) - 1)) for i, document in enumerate(documents)
            for start in range(0, len(document) - 1, length)]


def best_fit(sizes, length):
    rows, room = [], []
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [row for row, free in enumerate(room) if free >= sizes[piece]]
        if fitting:
            row = min(fitting, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(length)
        rows[row].append(piece)
        room[row] -= sizes[piece]
    return rows


def pack(documents, length):
    cut = pieces(documents, length)
    found = []
    for numbers in best_fit([stop - start for _, start, stop in cut], length):
        parts = [cut[piece] for piece in numbers]
        columns = [[], [], [], []]
        for number, (i, start, stop) in enumerate(parts):
            for column, values in zip(columns, (documents[i][start:stop], documents[i][start + 1:stop + 1],
                                                [number] * (stop - start), range(stop - start)), strict=True):
                column.extend(values)
        for column, fill in zip(columns, (0, IGNORED, PADDING, 0), strict=True):
            column.extend([fill] * (length - len(column)))
        found.append(columns)
    arrays = np.array(found, np.int64).reshape(len(found), 4, length)
    return Packed(*arrays.transpose(1, 0, 2))


def visible(documents):
    same = documents[:, :, None] == documents[:, None, :]
    return same & np.tri(documents.shape[1], dtype=bool)
