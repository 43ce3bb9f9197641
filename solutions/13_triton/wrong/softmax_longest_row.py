# 13.2: only its beginning is worked on
"""13.2 Softmax of each row: out[i, j] = exp(x[i, j]) / Σₖ exp(x[i, k]).

In NumPy that is five passes over memory. Here a program holds a whole row in registers: it reads each number once and
writes each once, and what lies between never sees memory.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, columns, step_x, step_out, BLOCK: tl.constexpr):
    """What one program does: one row.

    columns           length of a row
    step_x, step_out  from one row to the next, in elements; inside a row the elements are neighbours
    BLOCK             a power of 2, at least `columns`: the lanes behind the row's end are padding
    """
    # begin with the row and the places in it; load it once. What must the padding hold so that it changes neither the
    # largest nor the sum? (load's `other`.) Then shift, tl.exp, divide, store
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    inside = places < columns
    z = tl.load(x + row * step_x + places, mask=inside, other=-float("inf"))
    e = tl.exp(z - tl.max(z))
    tl.store(out + row * step_out + places, e / tl.sum(e), mask=inside)


def softmax(x, out):
    """Write the softmax of each row of x into out: float32, shape (rows, columns), columns ≥ 1.

    Elements of a row are neighbours in memory (strides[1] is 4 bytes); rows may be any distance apart, and run
    backwards.
    """
    # begin with the grid, a program per row; triton.next_power_of_2 gives the block
    rows, columns = x.shape
    block = min(8192, triton.next_power_of_2(columns))
    softmax_kernel[(rows,)](x, out, columns, x.strides[0] // x.itemsize, out.strides[0] // out.itemsize, BLOCK=block)
