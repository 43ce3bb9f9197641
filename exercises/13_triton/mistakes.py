"""What the kernels of 13.1 and 13.2 are to give, and what known mistakes in them give."""

import numpy as np

from exercises.frame.kernels import is_out

# ---------------------------------------------------------------- 13.1

def block_of(case):
    return case["block"].get("block", 1024)


def places(case):
    return np.arange(case["x"].size)


def right_sum(case):
    return case["x"].astype(float) + case["y"].astype(float)


def amid_nans(values, step):
    """What lies in memory from the first element on, up to as many elements as there are values."""
    memory = np.full(values.size * max(abs(step), 1), np.nan)
    if step <= 0:     # the others lie before it, or in one place
        memory[0] = values[0]
    else:
        memory[::step] = values
    return memory[:values.size]


def neighbours(case, blind=(0, 1, 2)):
    """out, if the steps of these arrays (x, y, out) are taken for 1."""
    if all(case["steps"][i] == 1 for i in blind):
        return None
    x, y = (amid_nans(case[name], case["steps"][i]) if i in blind else case[name].astype(float)
            for i, name in ((0, "x"), (1, "y")))
    step = case["steps"][2]
    if 2 not in blind or step == 1:
        return x + y
    if step < 0:
        return np.where(places(case) == 0, x + y, np.nan)
    memory = np.full(x.size * step, np.nan)
    memory[:x.size] = x + y
    return memory[::step]


def without_last_block(case):
    return np.where(places(case) < case["x"].size // block_of(case) * block_of(case), right_sum(case), np.nan)


def first_block_only(case):
    return np.where(places(case) < block_of(case), right_sum(case), np.nan)


def first_only(case):
    return np.where(places(case) == 0, right_sum(case), np.nan)


def one_element_each(case):
    """Programs begin one element further than their neighbour, not a block."""
    programs = -(-case["x"].size // block_of(case))
    return np.where(places(case) < programs - 1 + block_of(case), right_sum(case), np.nan)


def every_fourth(case):
    return np.where(places(case) % 4 == 0, right_sum(case), np.nan)


def by_thousands(case):
    """The launcher's grid is for blocks of 1,024, whatever `block` says."""
    programs = -(-case["x"].size // 1024)
    return np.where(places(case) < programs * block_of(case), right_sum(case), np.nan)


# ---------------------------------------------------------------- 13.2

def softmax(z, axis=1):
    with np.errstate(invalid="ignore"):      # of -inf and -inf
        z = z - z.max(axis=axis, keepdims=True)      # whose log Σ exp is lost beside 1e38
        return np.exp(z - np.logaddexp.reduce(z, axis=axis, keepdims=True))


def right_softmax(case):
    return softmax(case["x"].astype(float))


def padding(case):
    columns = case["x"].shape[1]
    return (1 << (columns - 1).bit_length()) - columns


def padded_with(case, value):
    """The softmax of rows that are filled up to a power of 2 with this number (a function of the case)."""
    x = case["x"].astype(float)
    filled = np.concatenate([x, np.broadcast_to(value(x), (x.shape[0], padding(case)))], axis=1)
    return softmax(filled)[:, :x.shape[1]].astype(np.float32)      # what float32 can't hold is 0


def tight_rows(case):
    """The right formula on rows taken to lie right behind each other."""
    (rows, columns), step = case["x"].shape, case["steps"][0]
    if step == columns:
        return None
    memory = np.full((rows, abs(step)), np.nan)
    reach = rows if step > 0 else 1     # of the first row on; the others may lie before it
    memory[:reach, :columns] = case["x"][:reach]
    return softmax(memory.ravel()[:rows * columns].reshape(rows, columns))


def unshifted(case):
    with np.errstate(all="ignore"):
        e = np.exp(case["x"])      # in float32, as the kernel does
        return (e / e.sum(axis=1, keepdims=True)).astype(float)


def shifted_by_padding(case):
    """Rows shifted by the larger of their own largest and the 0 behind them, which the sum leaves out."""
    x = case["x"]
    largest = x.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        e = np.exp(x - (np.maximum(largest, 0) if padding(case) else largest))
        return (e / e.sum(axis=1, keepdims=True)).astype(float)


def in_fours(rows, read, written):
    """Row k of out, if a program takes its rows of x or out for four times as far as they are."""
    found = np.full(rows.shape, np.nan)
    reach = range(-(-len(rows) // 4))
    for k in range(len(rows)) if not written else reach:
        if not read or k in reach:
            found[k * (4 if written else 1)] = rows[k * (4 if read else 1)]
    return found


# out, if the steps of x, of out or of both are in bytes.
fours = [lambda case, read=read, written=written: in_fours(right_softmax(case), read, written) if len(case["x"]) > 1
         else None for read, written in ((True, True), (True, False), (False, True))]


def first_row(case):
    return np.where(np.arange(len(case["x"]))[:, None] == 0, right_softmax(case), np.nan)


def no_sum(case):
    return np.exp(case["x"].astype(float) - case["x"].max(axis=1, keepdims=True))


def rows_of_out_at(step_of):
    """Hypothesis: rows of out are written so many elements apart."""
    def found(case):
        (rows, columns), step, theirs = case["x"].shape, case["steps"][1], step_of(case)
        if step == theirs:
            return None
        if step < 0:
            return first_row(case)
        memory = np.full(rows * step, np.nan)
        for row, values in enumerate(right_softmax(case)):
            here = memory[row * theirs:row * theirs + columns]
            here[...] = values[:here.size]
        return memory.reshape(rows, step)[:, :columns]
    return found


def program_per_column(case, got):
    rows, columns = case["x"].shape
    expected = np.where(np.arange(rows)[:, None] < columns, right_softmax(case), np.nan)
    return got["programs"] == columns and is_out("out", lambda case: expected)(case, got)


def one_largest(case):
    """All rows are shifted by the largest number of the whole matrix."""
    with np.errstate(all="ignore"):
        e = np.exp(case["x"] - case["x"].max())
        return (e / e.sum(axis=1, keepdims=True)).astype(float)


def cut_at_a_block(case, got):
    """Whether of a long row the first BLOCK elements are written, and sum up to 1."""
    known = np.isfinite(got["out"])
    width = int(known[0].sum())
    return known[:, :width].all() and not known[:, width:].any() and 0 < width < case["x"].shape[1] and \
        np.allclose(np.nansum(got["out"], axis=1), 1, rtol=1e-4)
