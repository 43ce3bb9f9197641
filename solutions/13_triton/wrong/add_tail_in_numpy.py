# 13.1: elements of out are written by no kernel
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = places < n
    tl.store(out + places * step_out, tl.load(x + places * step_x, mask=m) + tl.load(y + places * step_y, mask=m), mask=m)


def add(x, y, out, block=1024):
    steps = [a.strides[0] // a.itemsize for a in (x, y, out)]
    whole = max(1, x.size // block)
    add_kernel[(whole,)](x, y, out, x.size, *steps, BLOCK=block)
    out[whole * block:] = x[whole * block:] + y[whole * block:]
