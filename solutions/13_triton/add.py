"""13.1 Vector add: out = x + y.

Many programs run at once, all of them the same function; each finds out by its number which elements are its own:

    program         0            1            2
    x         |------------|------------|-----XXXXXXX     X: behind the end; the mask keeps them from being touched

A kernel gets no arrays, only the address of the first element (x, y, out); `x + k` is the address k elements further.
"""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    """What one program does: BLOCK neighbouring elements of the n.

    step_x, step_y, step_out  from one element of an array to the next, in elements
    BLOCK                     a power of 2, known when the kernel is compiled, as tl.arange demands
    """
    # begin with the places of this program's elements, 0 to n - 1 over all programs, by tl.program_id(0) and tl.arange;
    # then which of them are inside; tl.load and tl.store take that as their mask
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    total = tl.load(x + places * step_x, mask=inside) + tl.load(y + places * step_y, mask=inside)
    tl.store(out + places * step_out, total, mask=inside)


def add(x, y, out, block=1024):
    """Write x + y into out: three float32 arrays of shape (n,), n ≥ 1, of any strides. One launch, and no copies.

    block  elements per program, a power of 2

    A launch is add_kernel[(programs,)](arrays and numbers …, BLOCK=…): the grid in brackets is a tuple.
    """
    # begin with the number of programs: how many blocks of `block` elements cover x.size of them, the last one perhaps
    # in part? Then the steps (a.strides[0] is in bytes), and one launch
    steps = [a.strides[0] // a.itemsize for a in (x, y, out)]
    add_kernel[(triton.cdiv(x.size, block),)](x, y, out, x.size, *steps, BLOCK=block)
