# 13.1: a step of 0 is taken for 1
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    total = tl.load(x + places * step_x, mask=inside) + tl.load(y + places * step_y, mask=inside)
    tl.store(out + places * step_out, total, mask=inside)


def add(x, y, out, block=1024):
    steps = [a.strides[0] // a.itemsize or 1 for a in (x, y, out)]
    add_kernel[(triton.cdiv(x.size, block),)](x, y, out, x.size, *steps, BLOCK=block)
