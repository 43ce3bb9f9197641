"""26.1 A matrix product in tiles: out = x y.

Written row by column, every element of out reads a row of x and a column of y: each number of x is fetched n times, and
each of y m times. A program that makes a tile of out fetches a strip of x and a strip of y, tile by tile:

                        y   ┌──┬──┬──┐
                            │  │▒▒│  │  DEPTH rows at a time
                            │  │▒▒│  │
                            └──┴──┴──┘       x is fetched  ⌈n / COLUMNS⌉ times
    x   ┌─────────┐   out   ┌──┬──┬──┐       y is fetched  ⌈m / ROWS⌉ times
        │         │         │  │  │  │
        │▒▒▒▒▒▒▒▒▒│         │  │██│  │  ROWS
        └─────────┘         └──┴──┴──┘
                           COLUMNS
"""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(x, y, out, m, n, k, x_rows, x_columns, y_rows, y_columns, out_rows, out_columns,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """What one program does: one tile of out, of ROWS by COLUMNS elements.

    m, n, k              x is (m, k), y is (k, n), out is (m, n)
    x_rows, x_columns …  from one row of an array to the next, and from one column to the next, in elements

    Numbers that axis 0 of a tile is to have are a column, a[:, None], those of axis 1 a row, a[None, :]; what is put
    together of both is a tile. tl.dot(a, b, input_precision="ieee") is the product of two tiles, in float32. The edges
    of all three matrices may run through a tile; lanes behind them load nothing.
    """
    # begin with the rows and columns of this program's tile: tl.program_id(0) counts tiles downwards, tl.program_id(1)
    # to the right. Then a tile of zeros, tl.zeros((ROWS, COLUMNS), tl.float32), to which DEPTH columns of x times DEPTH
    # rows of y are added at a time: for first in range(0, k, DEPTH). What must the lanes behind k hold?
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, k, DEPTH):
        across, down = first + tl.arange(0, DEPTH)[None, :], first + tl.arange(0, DEPTH)[:, None]
        a = tl.load(x + rows * x_rows + across * x_columns, mask=(rows < m) & (across < k), other=0.0)
        b = tl.load(y + down * y_rows + columns * y_columns, mask=(down < k) & (columns < n), other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(out + rows * out_rows + columns * out_columns, total, mask=(rows < m) & (columns < n))


def matmul(x, y, out, block=(32, 32, 16)):
    """Write x y into out: float32, shapes (m, k), (k, n) and (m, n), all ≥ 1, of any strides above 0: x may be a
    transpose, a.T, and y some columns of a wider matrix. One launch, and no copies.

    block  (ROWS, COLUMNS, DEPTH) of the kernel: powers of 2, 16 or more
    """
    # begin with the grid, a tuple of two numbers: how many tiles downwards, how many to the right? Of each array both
    # strides are handed over, in elements
    (m, k), n, (rows, columns, depth) = x.shape, y.shape[1], block
    steps = [step // a.itemsize for a in (x, y, out) for step in a.strides]
    matmul_kernel[(triton.cdiv(m, rows), triton.cdiv(n, columns))](x, y, out, m, n, k, *steps, ROWS=rows,
                                                                   COLUMNS=columns, DEPTH=depth)
