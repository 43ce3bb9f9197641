"""Lion: a step of one length for every element, and state half as large as Adam's."""

from ..backend import xp
from .optimizer import Optimizer
from .settings import AT_LEAST_0, BETAS, pair


class Lion(Optimizer):
    """p -= lr · (sign(β₁m + (1-β₁)g) + weight_decay · p),  m = β₂m + (1-β₂)g; the authors' settings and defaults.

    weight_decay  decoupled. A sign's step is longer than Adam's usually is, so their advice is an lr 3 to 10 times
                  smaller than AdamW's, and a weight_decay as many times larger
    state_bits    8: m is kept in 8 bits, with its scales 1.25 bytes per parameter instead of 4 (packed.py)

    How large gradients are doesn't matter, their rounding does: where β₁m + (1-β₁)g is all but 0, it decides which way
    an element goes. So curves of several ranks are one rank's to the bit in exact mode, and otherwise only alike.
    Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms".
    """

    state_names = ("exp_avg",)
    rules = {"lr": AT_LEAST_0, "betas": BETAS, "weight_decay": AT_LEAST_0}

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, state_bits=32):
        super().__init__(params, {"lr": lr, "betas": pair(betas), "weight_decay": weight_decay,
                                  "state_bits": state_bits})

    def update(self, p, g, state, group, step):
        m, way, share = state["exp_avg"], self.scratch(p), self.scratch(p, 1)
        beta1, beta2 = group["betas"]
        xp.multiply(m, beta1, out=way)
        xp.multiply(g, 1 - beta1, out=share)
        way += share
        xp.sign(way, out=share)     # not in its place: NumPy takes ten times as long for that
        share *= group["lr"]
        if group["weight_decay"]:
            p *= 1 - group["lr"] * group["weight_decay"]
        p -= share
        m *= beta2
        xp.multiply(g, 1 - beta2, out=share)
        m += share
