# 13.3: the others wait
"""13.3 AdamW: the update of all parameters of a model in one launch.

All parameters lie one behind the other in one flat array. A small model has a hundred of them, and a launch takes
longer than the update of a bias; so there is one launch, and a table that tells each program where it works:

    parameters     |---------- 0 ----------|- 1 -|--------- 2 ---------|      ends = [25, 31, 54], block = 16
    programs       |---- 0 ----|---- 1 ----|- 2 -|---- 3 ----|--- 4 ---|
    table          [[0, 16, 0], [16, 25, 0], [25, 31, 1], [31, 47, 2], [47, 54, 2]]
"""

import numpy as np
import triton
import triton.language as tl


def work_table(ends, block):
    """[[start, stop, parameter]], a row per program: its elements are start to stop - 1, all of one parameter.

    ends   where each parameter ends in the flat arrays, which is where the next one begins
    block  the most elements that a program takes
    """
    # begin with where each parameter begins, then cut it into pieces of `block`: the last one is shorter
    starts = [0, *ends[:-1]]
    return [[at, min(at + block, stop), k]
            for k, (start, stop) in enumerate(zip(starts, ends, strict=True)) for at in range(start, stop, block)]


@triton.jit
def adam_kernel(p, g, m, v, table, decays, lr, beta1, beta2, scale1, scale2, eps, BLOCK: tl.constexpr):
    """What one program does: the update of those elements that its row of the table names.

    p, g, m, v      flat arrays: parameters, gradients, means of the gradients, means of their squares
    table           int32, three numbers per program: start, stop, parameter
    decays          float32, by parameter: its weight decay λ
    scale1, scale2  1 / (1 - β₁ᵗ) and 1 / (1 - β₂ᵗ)
    """
    # begin with the three numbers of this program's row, three loads; then the places and the mask. Load p, g, m and v
    # once each, compute in registers, store p, m and v once each
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
    """AdamW, for step t = 1, 2 … and each parameter with a decay λ of its own:

    p ← p · (1 - lr · λ),  m ← β₁m + (1-β₁)g,  v ← β₂v + (1-β₂)g²,  p ← p - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)

    p, g    flat float32 arrays of one length; steps are written into p, and read from g, whose owner fills it anew
    ends    list: where each parameter ends in them
    decays  list: λ of each parameter
    block   elements per program, a power of 2
    """

    def __init__(self, p, g, ends, decays, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, block=1024):
        # begin with the state: two flat arrays (np.zeros_like puts them where p is, on a GPU too) and the number of
        # steps; then the table and the decays as arrays: np.asarray(…, np.int32, like=p)
        self.p, self.g, self.m, self.v = p, g, np.zeros_like(p), np.zeros_like(p)
        self.lr, self.betas, self.eps, self.block, self.t = lr, betas, eps, block, 0
        self.table = np.asarray(work_table(ends, block), np.int32, like=p)
        self.decays = np.asarray(decays, np.float32, like=p)

    def step(self):
        """One step of all parameters, in one launch."""
        # begin with the number of this step, then the two scales, then the launch: a program per row of the table
        self.t += 1
        beta1, beta2 = self.betas
        adam_kernel[(len(self.table),)](
            self.p, self.g, self.m, self.v, self.table, self.decays, self.lr, beta1, beta2,
            1 / (1 - beta1 ** self.t), 1 / (1 - beta2 ** self.t), self.eps, BLOCK=1024)
