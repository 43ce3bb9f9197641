# 13.3: m is forgotten from step to step
import numpy as np
import triton
import triton.language as tl


def work_table(ends, block):
    rows = []
    begin = 0
    for i, end in enumerate(ends):
        for start in range(begin, end, block):
            rows.append([start, min(start + block, end), i])
        begin = end
    return rows


@triton.jit
def adam_kernel(p, g, m, v, table, decays, lr, beta1, beta2, scale1, scale2, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(table + 3 * row)
    stop = tl.load(table + 3 * row + 1)
    which = tl.load(table + 3 * row + 2)
    decay = tl.load(decays + which)
    k = start + tl.arange(0, BLOCK)
    inside = k < stop
    P = tl.load(p + k, mask=inside)
    G = tl.load(g + k, mask=inside)
    M = tl.load(m + k, mask=inside)
    V = tl.load(v + k, mask=inside)
    P = P * (1 - lr * decay)
    M = beta1 * M + (1 - beta1) * G
    V = beta2 * V + (1 - beta2) * G * G
    P = P - lr * (M * scale1) / (tl.sqrt(V * scale2) + eps)
    tl.store(p + k, P, mask=inside)
    tl.store(v + k, V, mask=inside)


class Adam:
    def __init__(self, p, g, ends, decays, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, block=1024):
        self.p, self.g = p, g
        self.m, self.v = np.zeros_like(p), np.zeros_like(p)
        self.t = 0
        self.rows = work_table(ends, block)
        self.table = np.asarray(self.rows, np.int32, like=p)
        self.decays = np.asarray(decays, np.float32, like=p)
        self.lr, self.betas, self.eps, self.block = lr, betas, eps, block

    def step(self):
        self.t += 1
        b1, b2 = self.betas
        adam_kernel[(len(self.rows),)](self.p, self.g, self.m, self.v, self.table, self.decays, self.lr, b1, b2,
            1 / (1 - b1 ** self.t), 1 / (1 - b2 ** self.t), self.eps, BLOCK=self.block)
