# 13.1: programs have no element
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    a = tl.load(x + k * step_x, mask=inside)
    b = tl.load(y + k * step_y, mask=inside)
    tl.store(out + k * step_out, a + b, mask=inside)


def add(x, y, out, block=1024):
    n = x.size
    programs = triton.cdiv(x.nbytes, block)
    add_kernel[(programs,)](x, y, out, n, x.strides[0] // 4, y.strides[0] // 4, out.strides[0] // 4, BLOCK=block)
