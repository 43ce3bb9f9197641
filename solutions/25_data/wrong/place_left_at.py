# 25.1: searchsorted from the left
"""25.1 Rows of tokens, read from disk.

A text that doesn't fit into memory lies in files, and what is trained on are rows. A row is `length` tokens and the one
behind them, which is the last one's target; it is the first token of the file's next row, too:

    a file      T h e   c a t   s a t . | A   d o g         | is the end of a document
    rows of 4   T h e _ c
                        c a t _ s
                                s a t . |                   and so on; what doesn't fill a row is left

Nothing is read but what is asked for, so the row's number must say where it lies.
"""

import numpy as np

IGNORED = -100      # a target that doesn't count


def row_bounds(counts, length):
    """int64 (files + 1,): rows bounds[i] to bounds[i + 1] - 1 lie in file i, so that the last is how many there are.

    counts: how many tokens each file has, 0 or more. The rows of a file begin with its tokens 0, length, 2 · length …;
    no row has tokens of two files.
    """
    # begin with one file: how many rows of 4 have 9 tokens, how many 8, how many 1, and how many 0?
    rows = [max(0, count - 1) // length for count in counts]
    return np.cumsum([0, *rows])


def place(bounds, length, rows):
    """(files, firsts), both int64 of the shape of `rows`, an int64 array: in which file each of these rows lies, and
    which of that file's tokens is its first.

    bounds: as row_bounds gives them. IndexError where one of the rows isn't there: they are 0 to bounds[-1] - 1.
    """
    # begin with the rows that aren't there. Of the others: which is the last file that begins at, or before, the row?
    if rows.size and not 0 <= rows.min() <= rows.max() < bounds[-1]:
        raise IndexError(f"of the rows {rows} one isn't there")
    files = np.searchsorted(bounds, rows, side="left")
    return files, (rows - bounds[files]) * length


def read(files, length, rows, end):
    """(inputs, targets, documents) of these rows, int64 (n,): all int64 (n, length), one row for each, in their order.

    files       a list; len(file) is how many tokens one has, and file[first:stop] reads those from disk: integers of
                any dtype, often uint16. Each row's length + 1 tokens are read once, and nothing else
    end         the token that is a document's last
    inputs      the row's tokens but for its last
    targets     the next tokens; IGNORED where the input is an end, since nobody can know what comes after it
    documents   how many documents of the row ended before this token: 0 at its beginning. An end is of the document
                that it ends
    """
    # begin with where the rows lie. Then all tokens of a row in one array: inputs and targets are two views of it
    bounds = row_bounds([len(file) for file in files], length)
    both = np.empty((len(rows), length + 1), np.int64)
    for row, file, first in zip(both, *place(bounds, length, rows), strict=True):
        row[:] = files[file][first:first + length + 1]
    inputs, targets = both[:, :-1], both[:, 1:]
    ends = inputs == end
    return inputs, np.where(ends, IGNORED, targets), np.cumsum(ends, axis=1) - ends
