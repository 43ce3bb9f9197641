# 13.1: the mask asks whether places * step < n
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + places * step_x, mask=places * step_x < n) + tl.load(y + places * step_y, mask=places * step_y < n)
    tl.store(out + places * step_out, total, mask=places * step_out < n)


def add(x, y, out, block=1024):
    steps = [a.strides[0] // a.itemsize for a in (x, y, out)]
    add_kernel[(triton.cdiv(x.size, block),)](x, y, out, x.size, *steps, BLOCK=block)
