"""24.1 Several documents to a row.

A model takes rows of one length, and documents have many. One to a row is mostly padding; cut wherever a row is full,
most documents lose their beginning. Packed, the longest first, each goes where it leaves the least room:

    documents       aaaaaaa bbb cccc dd         (pairs of a token and the next; a row has room for 5)
    cut             aaaaa  aabbb  ccccd  d----
    best fit        aaaaa  cccc-  bbbaa  dd---

What is learned must be what the documents would teach alone. So a row says which position is of which document.
"""

from typing import NamedTuple

import numpy as np

IGNORED = -100      # the target of padding: it doesn't count
PADDING = -1        # the document of padding


class Packed(NamedTuple):
    """Four arrays, int64 (rows, length).

    tokens     0 at padding
    targets    the next token of the same document; IGNORED at padding
    documents  which of its row's pieces a position belongs to: 0, 1, 2 … in the order in which they came into the row;
               PADDING behind the last
    positions  how far a position is from its piece's beginning: 0, 1, 2 …; 0 at padding
    """

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    positions: np.ndarray


def pieces(documents, length):
    """[(document, start, stop)]: what is to be packed, in the order of the documents.

    A document of n tokens is n - 1 pairs of a token and the next; documents[i][start:stop] are the first tokens of a
    piece's pairs. One of more than `length` pairs is cut into pieces of `length`, from its beginning on, and a rest. A
    document of fewer than two tokens has nothing to be learned, and no piece.
    """
    raise NotImplementedError("begin with where the pieces of one document start. Which is the last token that has a "
                              "next one?")


def best_fit(sizes, length):
    """[[numbers of pieces]], a list for each row; sizes are those of the pieces, each at most `length`, and stay so.

    The longest piece goes first, of equal ones the one that stands first in sizes; each goes into the row that has the
    least room of those in which it fits, of equal ones the first; and into a new row, the last, where it fits in none.
    """
    raise NotImplementedError("begin with the order in which the pieces go")


def pack(documents, length):
    """Packed, of documents, integer arrays of one axis, of any integer dtype: files of tokens are often uint16."""
    raise NotImplementedError("begin with the pieces, and in which rows they are. Then four arrays as they would be "
                              "with nothing but padding")


def visible(documents):
    """bool (rows, length, length), of Packed.documents: may attention look from position i at position j? It looks at
    no later position, and at none of another document; padding looks at padding (a softmax of nothing is nan)."""
    raise NotImplementedError("begin with one row: which pairs of positions have the same number?")
