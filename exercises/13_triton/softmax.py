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
    raise NotImplementedError("begin with the row and the places in it; load it once. What must the padding hold so "
                              "that it changes neither the largest nor the sum? (load's `other`.) Then shift, tl.exp,"
                              " divide, store")


def softmax(x, out):
    """Write the softmax of each row of x into out: float32, shape (rows, columns), columns ≥ 1.

    Elements of a row are neighbours in memory (strides[1] is 4 bytes); rows may be any distance apart, and run
    backwards.
    """
    raise NotImplementedError("begin with the grid, a program per row; triton.next_power_of_2 gives the block")
