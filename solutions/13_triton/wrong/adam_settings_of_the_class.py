# 13.3: wrong where another optimizer, of other parameters
import numpy as np
import triton
import triton.language as tl


def work_table(ends, block):
    starts = [0, *ends[:-1]]
    return [[at, min(at + block, stop), k]
            for k, (start, stop) in enumerate(zip(starts, ends, strict=True)) for at in range(start, stop, block)]


@triton.jit
def adam_kernel(p, g, m, v, table, decays, lr, beta1, beta2, scale1, scale2, eps, BLOCK: tl.constexpr):
    row = table + 3 * tl.program_id(0)
    places = tl.load(row) + tl.arange(0, BLOCK)
    inside = places < tl.load(row + 1)
    decay = tl.load(decays + tl.load(row + 2))
    gradient = tl.load(g + places, mask=inside)
    mean = tl.load(m + places, mask=inside)
    square = tl.load(v + places, mask=inside)
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    weight = tl.load(p + places, mask=inside) * (1 - lr * decay)
    tl.store(p + places, weight - lr * mean * scale1 / (tl.sqrt(square * scale2) + eps), mask=inside)
    tl.store(m + places, mean, mask=inside)
    tl.store(v + places, square, mask=inside)


class Adam:
    def __init__(self, p, g, ends, decays, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, block=1024):
        self.p, self.g, self.m, self.v = p, g, np.zeros_like(p), np.zeros_like(p)
        Adam.lr, Adam.betas, Adam.eps, Adam.block, self.t = lr, betas, eps, block, 0
        self.table = np.asarray(work_table(ends, block), np.int32, like=p)
        self.decays = np.asarray(decays, np.float32, like=p)

    def step(self):
        self.t += 1
        beta1, beta2 = self.betas
        adam_kernel[(len(self.table),)](
            self.p, self.g, self.m, self.v, self.table, self.decays, self.lr, beta1, beta2,
            1 / (1 - beta1 ** self.t), 1 / (1 - beta2 ** self.t), self.eps, BLOCK=self.block)
