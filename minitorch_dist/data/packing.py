"""Packing: documents of unequal length, several to a row, for models that take rows of one length.

    documents      aaaaaaa bbb cccc dd
    concatenate    aaaaa aabbb ccccd d----      a row is full where it is full: a and d are cut
    pack           aaaaa cccc- bbbaa dd---      the longest first, where they fit best: a alone is longer than a row

A document is trained on in pairs, a token and the next one: of n tokens that is n - 1 positions of `inputs` and
`targets`. Where it ends there is no target from the next document, and `documents` says which positions are of one:
GPT(tokens, documents) doesn't look from one into another, and counts positions from 0 in each.

    packed = pack(documents, length=64)
    loader = Loader(packed.rows, packed.targets, batch_size=16, rank=…, size=…)
    for shard in …:     logits = model(*apart(shard.inputs))

Sources: Ding et al. 2024, "Fewer truncations improve language modeling" (best fit, and what is done with documents that
are longer than a row); Dubey et al. 2024, "The Llama 3 herd of models", 3.2 (the mask).
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..backend import whole
from .text import IGNORED

PADDING = -1        # the document that padding belongs to


@dataclass(frozen=True)
class Packed:
    """Rows of documents.

    rows       int64 (n, length, 2): of each position the token, 0 at padding, and the number of its document in the
               row: 0, 1, 2, …, PADDING behind the last. One array, so that a Loader, cut_sequence and all that shards
               samples take it as they take tokens; apart(rows) makes two of it
    targets    int64 (n, length): the next token of the same document, IGNORED at padding
    whole      how many documents there are, of two tokens and more
    cut        how many of these stand in several rows
    """

    rows: np.ndarray
    targets: np.ndarray
    whole: int
    cut: int

    @property
    def inputs(self):
        """int64 (n, length): the tokens."""
        return self.rows[..., 0]

    @property
    def documents(self):
        """int64 (n, length): the number of each position's document in its row."""
        return self.rows[..., 1]

    @property
    def padding(self):
        """The share of positions that are padding."""
        return float((self.documents == PADDING).mean())

    @property
    def units(self):
        """Targets per row, on average: with train_step(…, units=packed.units) each target of the data weighs the same,
        however full its row is."""
        return int((self.targets != IGNORED).sum()) / len(self.targets)

    def __str__(self):
        return (f"{len(self.targets):,} rows of {self.targets.shape[1]}, {100 * self.padding:.1f} % padding; "
                f"{self.cut:,} of {self.whole:,} documents cut ({100 * self.cut / self.whole:.1f} %)")


def apart(rows):
    """(tokens, documents), both (…, time), of packed rows (…, time, 2): a model's two arguments."""
    if rows.shape[-1] != 2:
        raise ValueError(f"packing.apart: rows of shape {tuple(rows.shape)}; packed ones are (…, time, 2)")
    return rows[..., 0], rows[..., 1]


def pack(documents, length):
    """Documents, each an array of tokens, in rows of `length`, by best fit: Packed.

    What is longer than a row is cut into full rows and a rest. Pieces go, the longest first, each into the row that it
    leaves the least room in, or into a new one. A document of one token has nothing to follow it, and is left out.
    Deterministic: equal lengths go in the order of the documents, and of rows with equal room into the one that has had
    it the longest. ValueError where nothing is left.
    """
    length = whole("length", length)
    pieces = [(i, start, min(start + length, end)) for i, end in _pairs(documents, length)
              for start in range(0, end, length)]
    rows, with_room = [], [deque() for _ in range(length + 1)]      # the numbers of those with so much room
    rooms = 0       # a bit for each room that some row has
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        size = piece[2] - piece[1]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].popleft()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if room > size:
            with_room[room - size].append(row)
            rooms |= 1 << room - size
    return _packed(documents, rows, length)


def concatenate(documents, length):
    """The same documents one after another, cut wherever a row is full: what pack is compared with. Only the last row
    has padding."""
    length = whole("length", length)
    rows, room = [], 0
    for i, end in _pairs(documents, length):
        start = 0
        while start < end:
            if not room:
                rows.append([])
                room = length
            stop = min(start + room, end)
            rows[-1].append((i, start, stop))
            room, start = room - (stop - start), stop
    return _packed(documents, rows, length)


def _pairs(documents, length):
    """[(number of a document, its pairs of a token and the next)], of those that have one."""
    if length < 1:
        raise ValueError(f"packing: rows of length={length}; they have 1 position or more")
    if bad := [f"document {i} is {d.dtype} {d.shape}" for i, d in enumerate(map(np.asarray, documents))
               if d.ndim != 1 or d.size and d.dtype.kind not in "iu"]:
        raise ValueError(f"packing: {bad[0]}; a document is integers (time,)")
    found = [(i, len(d) - 1) for i, d in enumerate(documents) if len(d) > 1]
    if not found:
        raise ValueError(f"packing: none of {len(documents)} documents has two tokens or more: nothing to learn from")
    return found


def _packed(documents, rows, length):
    """Packed, of rows that are lists of pieces: (number of a document, its first pair, the one behind its last)."""
    both = np.zeros((len(rows), length, 2), np.int64)
    both[..., 1] = PADDING
    targets = np.full((len(rows), length), IGNORED, np.int64)
    times = {}      # in how many pieces a document is
    for r, row in enumerate(rows):
        at = 0
        for number, (i, start, stop) in enumerate(row):
            there = slice(at, at + stop - start)
            both[r, there, 0], both[r, there, 1] = documents[i][start:stop], number
            targets[r, there] = documents[i][start + 1:stop + 1]
            at, times[i] = there.stop, times.get(i, 0) + 1
    return Packed(both, targets, len(times), sum(n > 1 for n in times.values()))
