# 13.2: the first row alone is worked on
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, columns, step_x, step_out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    inside = j < columns
    a = tl.load(x + row * step_x + j, mask=inside, other=-float("inf"))
    e = tl.exp(a - tl.max(a, axis=0))
    tl.store(out + row * step_out + j, e / tl.sum(e, axis=0), mask=inside)


def softmax(x, out):
    rows, columns = x.shape
    softmax_kernel[(1,)](x, out, columns, x.strides[0] // 4, out.strides[0] // 4, BLOCK=triton.next_power_of_2(columns))
