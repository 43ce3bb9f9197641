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
    raise NotImplementedError("begin with one file: how many rows of 4 have 9 tokens, how many 8, how many 1, and how"
                              " many 0?")


def place(bounds, length, rows):
    """(files, firsts), both int64 of the shape of `rows`, an int64 array: in which file each of these rows lies, and
    which of that file's tokens is its first.

    bounds: as row_bounds gives them. IndexError where one of the rows isn't there: they are 0 to bounds[-1] - 1.
    """
    raise NotImplementedError("begin with the rows that aren't there. Of the others: which is the last file that "
                              "begins at, or before, the row?")


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
    raise NotImplementedError("begin with where the rows lie. Then all tokens of a row in one array: inputs and "
                              "targets are two views of it")
