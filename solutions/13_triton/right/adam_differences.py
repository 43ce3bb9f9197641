# 13.3: a loop over blocks, moments by differences, powers of the betas kept
import numpy as np
import triton
import triton.language as tl


def work_table(ends, block):
    rows, begin, k = [], 0, 0
    while k < len(ends):
        stop = min(begin + block, ends[k])
        rows.append((begin, stop, k))
        begin = stop
        k += begin == ends[k]
    return np.array(rows)


@triton.jit
def adam_kernel(p, g, m, v, table, decays, lr, beta1, beta2, scale1, scale2, eps, BLOCK: tl.constexpr):
    line = tl.program_id(0) * 3
    start, stop, k = tl.load(table + line), tl.load(table + line + 1), tl.load(table + line + 2)
    lanes = start + tl.arange(0, BLOCK)
    mask = lanes < stop
    grad = tl.load(g + lanes, mask, other=0.0)
    m1 = tl.load(m + lanes, mask, other=0.0)
    m1 += (1.0 - beta1) * (grad - m1)
    v1 = tl.load(v + lanes, mask, other=1.0)
    v1 += (1.0 - beta2) * (grad * grad - v1)
    tl.store(m + lanes, m1, mask)
    tl.store(v + lanes, v1, mask)
    old = tl.load(p + lanes, mask, other=0.0)
    new = old - lr * tl.load(decays + k) * old
    tl.store(p + lanes, new - lr * (m1 * scale1) / (tl.sqrt(v1) * tl.sqrt(scale2 + 0.0) + eps), mask)


class Adam:
    def __init__(self, p, g, ends, decays, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, block=1024):
        self.arrays = p, g, np.zeros_like(g), np.zeros_like(g)
        self.table = np.asarray(work_table(ends, block).ravel(), np.int32, like=p)
        self.decays = np.asarray(decays, np.float32, like=p)
        self.numbers = lr, betas, eps
        self.block, self.products = block, np.ones(2)

    def step(self):
        lr, betas, eps = self.numbers
        self.products *= betas
        scale1, scale2 = (1 / (1 - self.products)).tolist()
        adam_kernel[(self.table.size // 3,)](*self.arrays, self.table, self.decays, lr, *betas, scale1, scale2, eps,
                                            BLOCK=self.block)
