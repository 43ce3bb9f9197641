# 26.1: the transpose of y's tile times that of x's, turned back at the end; programs count tiles from right to left
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(x, y, out, m, n, k, x_rows, x_columns, y_rows, y_columns, out_rows, out_columns,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = (tl.cdiv(n, COLUMNS) - 1 - tl.program_id(0)) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    first = 0
    while first < k:
        depth = first + tl.arange(0, DEPTH)
        a = tl.load(x + rows[None, :] * x_rows + depth[:, None] * x_columns, mask=(rows[None, :] < m)
                    & (depth[:, None] < k), other=0.0)
        b = tl.load(y + depth[None, :] * y_rows + columns[:, None] * y_columns, mask=(depth[None, :] < k)
                    & (columns[:, None] < n), other=0.0)
        total += tl.dot(b, a, input_precision="ieee")
        first += DEPTH
    tl.store(out + rows[:, None] * out_rows + columns[None, :] * out_columns, tl.trans(total),
             mask=(rows[:, None] < m) & (columns[None, :] < n))


def matmul(x, y, out, block=(32, 32, 16)):
    (m, k), n, (rows, columns, depth) = x.shape, y.shape[1], block
    steps = [step // a.itemsize for a in (x, y, out) for step in a.strides]
    matmul_kernel[(triton.cdiv(n, columns), triton.cdiv(m, rows))](x, y, out, m, n, k, *steps, rows, columns, depth)
