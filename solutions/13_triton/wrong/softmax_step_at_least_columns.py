# 13.2: rows may run backwards in memory
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, columns, step_x, step_out, BLOCK: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    inside = places < columns
    z = tl.load(x + row * step_x + places, mask=inside, other=-float("inf"))
    e = tl.exp(z - tl.max(z))
    tl.store(out + row * step_out + places, e / tl.sum(e), mask=inside)


def softmax(x, out):
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    steps = [max(a.strides[0] // a.itemsize, columns) for a in (x, out)]
    softmax_kernel[(rows,)](x, out, columns, *steps, BLOCK=block)
