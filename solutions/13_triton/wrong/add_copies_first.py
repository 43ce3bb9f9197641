# 13.1: elements of x are read by no kernel
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = places < n
    tl.store(out + places, tl.load(x + places, mask=m) + tl.load(y + places, mask=m), mask=m)


def add(x, y, out, block=1024):
    total = out.copy()
    add_kernel[(triton.cdiv(x.size, block),)](x.copy(), y.copy(), total, x.size, BLOCK=block)
    out[...] = total
