# 13.2: two rows per program, padding masked where it counts
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, rows, columns, step_x, step_out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * step_x + column, mask=inside, other=0.0)
    largest = tl.max(tl.where(inside, z, -float("inf")), axis=1)[:, None]
    e = tl.where(inside, tl.exp(z - largest), 0.0)
    total = tl.sum(e, axis=1)[:, None]
    tl.store(out + row * step_out + column, e / total, mask=inside)


def softmax(x, out):
    rows, columns = x.shape
    softmax_kernel[(triton.cdiv(rows, 2),)](x, out, rows, columns, x.strides[0] // x.itemsize,
                                            out.strides[0] // out.itemsize, 2, triton.next_power_of_2(columns))
