"""What 26.1 is to give, and what known mistakes in it give."""

import numpy as np

DEFAULT = (32, 32, 16)


def sizes(case):
    """(m, n, k)"""
    return case["x"].shape[0], case["y"].shape[1], case["x"].shape[1]


def block_of(case):
    """(ROWS, COLUMNS, DEPTH)"""
    return tuple(case["block"] or DEFAULT)


def tiles(case):
    """How many downwards, and how many to the right."""
    (m, n, _), (rows, columns, _) = sizes(case), block_of(case)
    return -(-m // rows), -(-n // columns)


def bytes_at_most(case):
    """Of loads: a strip of x for each tile to the right, and a strip of y for each downwards."""
    (m, n, k), (down, right) = sizes(case), tiles(case)
    return 4 * (m * k * right + k * n * down)


def right_product(case):
    return case["x"].astype(float) @ case["y"].astype(float)


def of_depths(case, depths):
    """The product of these columns of x and rows of y alone (an index, perhaps with repetitions); None: of all."""
    if len(depths) == sizes(case)[2]:
        return None
    return case["x"][:, depths].astype(float) @ case["y"][depths].astype(float)


def whole_blocks(case):
    """Without what is left behind the last whole block of depth."""
    k, depth = sizes(case)[2], block_of(case)[2]
    return of_depths(case, np.arange(k // depth * depth))


def first_block(case):
    return of_depths(case, np.arange(min(sizes(case)[2], block_of(case)[2])))


def last_block(case):
    """tl.dot in the place of a sum."""
    k, depth = sizes(case)[2], block_of(case)[2]
    return of_depths(case, np.arange((k - 1) // depth * depth, k))


def steps_of(number):
    """A function of the case: the blocks begin as far apart as rows or columns of a tile (0, 1), not as the depth."""
    def found(case):
        k, step, depth = sizes(case)[2], block_of(case)[number], block_of(case)[2]
        if step == depth:
            return None
        every = np.concatenate([np.arange(first, min(first + depth, k)) for first in range(0, k, step)])
        return case["x"][:, every].astype(float) @ case["y"][every].astype(float)
    return found


def written(case, rows, columns):
    """The product where these rows and columns of tiles have been worked on, else nan."""
    of_rows, of_columns, _ = block_of(case)
    m, n, _ = sizes(case)
    here = (np.arange(m)[:, None] // of_rows < rows) & (np.arange(n) // of_columns < columns)
    return None if here.all() else np.where(here, right_product(case), np.nan)


def rounded_down(case):
    """The grid has whole tiles only."""
    (m, n, _), (rows, columns, _) = sizes(case), block_of(case)
    return written(case, m // rows, n // columns)


def grid_turned(case):
    """The grid's two numbers are swapped, or those of the programs."""
    down, right = tiles(case)
    return written(case, right, down)


def first_tile(case):
    return written(case, 1, 1)


def in_tf32(case):
    """Factors lose the last 13 bits of their fractions."""
    x, y = ((np.ascontiguousarray(case[name]).view(np.uint32) & np.uint32(0xffffe000)).view(np.float32).astype(float)
            for name in ("x", "y"))
    return x @ y


def in_half(case):
    """Factors are rounded to 16 bits."""
    return case["x"].astype(np.float16).astype(float) @ case["y"].astype(np.float16).astype(float)


def steps_of_array(case, name):
    """In elements."""
    return tuple(case["steps"].get(name) or (case[name].shape[1], 1))


def at(shape, steps):
    """Where the elements lie."""
    return np.arange(shape[0])[:, None] * steps[0] + np.arange(shape[1]) * steps[1]


def taken(case, name, steps):
    """What is read of an array, if its elements are taken to be so many elements apart; nan where it has none."""
    own, theirs = (at(case[name].shape, each) for each in (steps_of_array(case, name), steps))
    memory = np.full(max(own.max(), theirs.max()) + 1, np.nan)
    memory[own] = case[name]
    return memory[theirs]


def put(case, values, steps):
    """out, if its elements are put so many elements apart."""
    own, theirs = (at(case["out"].shape, each) for each in (steps_of_array(case, "out"), steps))
    memory = np.full(max(own.max(), theirs.max()) + 1, np.nan)
    memory[theirs] = values
    return memory[own]


def with_steps(*names, way):
    """A function of the case: out, if these arrays' steps are taken for way(case, name); None where they are."""
    def found(case):
        steps = {name: way(case, name) if name in names else steps_of_array(case, name) for name in ("x", "y", "out")}
        if all(steps[name] == steps_of_array(case, name) for name in names):
            return None
        with np.errstate(invalid="ignore"):
            return put(case, taken(case, "x", steps["x"]) @ taken(case, "y", steps["y"]), steps["out"])
    return found


def walked_alike(case):
    """Behind each block of depth, x's and y's pointers go on by the depth, in elements, whatever the steps are."""
    (m, n, k), depth = sizes(case), block_of(case)[2]
    total = np.zeros((m, n))
    for first in range(0, k, depth):
        lanes = np.arange(min(depth, k - first))
        parts = []
        for name, rows, columns in (("x", np.arange(m), lanes), ("y", lanes, np.arange(n))):
            steps = steps_of_array(case, name)
            own = at(case[name].shape, steps)
            theirs = first + rows[:, None] * steps[0] + columns * steps[1]
            memory = np.full(max(own.max(), theirs.max()) + 1, np.nan)
            memory[own] = case[name]
            parts.append(memory[theirs])
        with np.errstate(invalid="ignore"):
            total += parts[0] @ parts[1]
    return total


def contiguous(case, name):
    return case[name].shape[1], 1


def swapped(case, name):
    return steps_of_array(case, name)[::-1]


def in_bytes(case, name):
    return tuple(4 * step for step in steps_of_array(case, name))


def off(case, got):
    """The greatest difference, relative to the largest number there."""
    right = right_product(case)
    return np.abs(got["out"] - right).max() / np.abs(right).max()
