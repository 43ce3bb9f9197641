# 13.1: a grid with two axes, the first element of x moved
import triton
import triton.language as tl


@triton.jit
def element(base, at, step):
    return base + at * step


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    first = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < n - first
    x += first * step_x
    total = tl.load(element(x, at, step_x), inside)
    total += tl.load(element(y, first + at, step_y), inside)
    tl.store(element(out, first + at, step_out), total, inside)


def add(x, y, out, block=1024):
    programs = -(-x.shape[0] // block)
    across = min(programs, 2)
    steps = [a.strides[0] // a.dtype.itemsize for a in (x, y, out)]
    add_kernel[(across, -(-programs // across), 1)](x, y, out, x.shape[0], *steps, block)
