# 24.1: a piece of no pairs begins at a document's last token
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
            for start in range(0, len(document), length)]


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
    rows = best_fit([stop - start for _, start, stop in cut], length)
    packed = Packed(*(np.full((len(rows), length), fill) for fill in (0, IGNORED, PADDING, 0)))
    for row, numbers in enumerate(rows):
        at = 0
        for number, piece in enumerate(numbers):
            i, start, stop = cut[piece]
            here = slice(at, at + stop - start)
            packed.tokens[row, here] = documents[i][start:stop]
            packed.targets[row, here] = documents[i][start + 1:stop + 1]
            packed.documents[row, here] = number
            packed.positions[row, here] = np.arange(stop - start)
            at = here.stop
    return packed


def visible(documents):
    same = documents[:, :, None] == documents[:, None, :]
    return same & np.tri(documents.shape[1], dtype=bool)
