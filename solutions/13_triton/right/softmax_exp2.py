# 13.2: powers of two, shifted after the conversion
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, columns, step_x, step_out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x += tl.program_id(axis=0) * step_x
    out += tl.program_id(axis=0) * step_out
    row = tl.load(x + lane, mask=lane < columns, other=float("-inf")) * 1.4426950408889634
    row = tl.exp2(row - tl.max(row, axis=0))
    row *= 1 / tl.sum(row, axis=0)
    tl.store(out + lane, row, mask=lane < columns)


def softmax(x, out):
    block = 1
    while block < x.shape[1]:
        block *= 2
    softmax_kernel[lambda meta: (len(x),)](x, out, x.shape[1], x.strides[0] // 4, out.strides[0] // 4, BLOCK=block)
