# 18.3: the subnormal ones
"""18.3 Master weights.

A step changes a weight by a thousandth of itself, or less. float16 has 11 bits: where the weight is near 1, what is
smaller than 1/2048 is rounded away, in every step anew. So the model computes with 16 bits, and the optimizer remembers
32.
"""

import numpy as np


class MixedAdam:
    """Adam on float32 master weights, for a model whose parameters and gradients are float16.

    m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  master ← master − lr · m̂ / (√v̂ + eps),  parameter ← master in 16 bits

    with m̂ = m / (1−β₁ᵗ) and v̂ = v / (1−β₂ᵗ) in the t-th step, from 1 (chapter 5), and g the gradient itself.

    values   list of float32 arrays, the initial values; the caller keeps them, and they don't change
    lr, betas, eps  as in chapter 5

    params   list of float16 arrays, which the model holds: the very same arrays from beginning to end
    masters  list of float32 arrays

    It may hold 14 bytes per parameter: 2 and 12. With the 2 of a gradient that makes 16.
    """

    def __init__(self, values, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        # begin with all arrays that it holds, and their bytes: which four are there per parameter?
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.masters = [value.copy() for value in values]
        self.params = [value.astype(np.float16) for value in values]
        self.m = [np.zeros_like(value) for value in values]
        self.v = [np.zeros_like(value) for value in values]

    def step(self, grads, scale):
        """One step.

        grads  list of float16 arrays, one per parameter: the gradients times `scale`, finite. They belong to the caller
        scale  a float: the loss scaler's factor in this step. It changes from time to time
        """
        # begin with one gradient in float32, divided: 4 bytes that live for one parameter, not for all. Adam's step is
        # the master's; then the model is told, in its own arrays
        beta1, beta2 = self.betas
        self.t += 1
        for p, master, m, v, grad in zip(self.params, self.masters, self.m, self.v, grads, strict=True):
            g = grad.astype(np.float32) / np.float32(scale)
            m += (1 - beta1) * (g - m)
            v += (1 - beta2) * (g * g - v)
            mean, square = m / (1 - beta1 ** self.t), v / (1 - beta2 ** self.t)
            master -= self.lr * mean / (np.sqrt(square) + self.eps)
            p[...] = np.where(np.abs(master) < 2.0 ** -14, 0, master)
