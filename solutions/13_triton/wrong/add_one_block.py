# 13.1: the caller chooses it
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    m = places < n
    tl.store(out + places * step_out, tl.load(x + places * step_x, mask=m) + tl.load(y + places * step_y, mask=m), mask=m)


def add(x, y, out, block=1024):
    steps = [a.strides[0] // a.itemsize for a in (x, y, out)]
    add_kernel[(1,)](x, y, out, x.size, *steps, BLOCK=triton.next_power_of_2(x.size))
