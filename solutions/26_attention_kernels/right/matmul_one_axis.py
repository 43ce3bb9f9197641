# 26.1: a grid of one axis, and tl.dot adds up by itself
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(x, y, out, m, n, k, x_rows, x_columns, y_rows, y_columns, out_rows, out_columns,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    right = tl.cdiv(n, COLUMNS)
    rows = tl.program_id(0) // right * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % right * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    at_x = x + rows[:, None] * x_rows + depth[None, :] * x_columns
    at_y = y + depth[:, None] * y_rows + columns[None, :] * y_columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for left in range(k, 0, -DEPTH):
        a = tl.load(at_x, mask=(rows[:, None] < m) & (depth[None, :] < left), other=0.0)
        b = tl.load(at_y, mask=(depth[:, None] < left) & (columns[None, :] < n), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        at_x += DEPTH * x_columns
        at_y += DEPTH * y_rows
    tl.store(out + rows[:, None] * out_rows + columns[None, :] * out_columns, total,
             mask=(rows[:, None] < m) & (columns[None, :] < n))


def matmul(x, y, out, block=(32, 32, 16)):
    (m, k), n, (rows, columns, depth) = x.shape, y.shape[1], block
    steps = [step // a.itemsize for a in (x, y, out) for step in a.strides]
    matmul_kernel[(triton.cdiv(m, rows) * triton.cdiv(n, columns),)](x, y, out, m, n, k, *steps, rows, columns, depth)
