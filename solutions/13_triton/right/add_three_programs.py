# 13.1: three programs, each in a loop; the grid is a function
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, step_x, step_y, step_out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, n, BLOCK * tl.num_programs(0)):
        at = start + lanes
        a = tl.load(x + at * step_x, mask=at < n, other=0.0)
        b = tl.load(y + at * step_y, mask=at < n, other=0.0)
        tl.store(out + at * step_out, b + a, mask=at < n)


def add(x, y, out, block=1024):
    n = len(out)

    def grid(meta):
        return (min(3, triton.cdiv(n, meta["BLOCK"])),)

    add_kernel[grid](x=x, y=y, out=out, n=n, step_x=x.strides[0] // 4, step_y=y.strides[0] // 4,
                     step_out=out.strides[0] // 4, BLOCK=block)
