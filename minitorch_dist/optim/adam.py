"""Adam and AdamW."""

from math import sqrt

from ..backend import xp
from .optimizer import Optimizer, check_settings


class Adam(Optimizer):
    """m = β₁m + (1-β₁)g,  v = β₂v + (1-β₂)g²,  p -= lr · m̂ / (√v̂ + eps), with bias-corrected m̂ and v̂.

    weight_decay adds weight_decay · p to g (L2). torch's settings and arithmetic.
    Source: Kingma & Ba 2015.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        check_settings(lr=(lr, lr >= 0, "at least 0"), eps=(eps, eps >= 0, "at least 0"),
                       betas=(betas, all(0 <= b < 1 for b in betas), "two numbers in [0, 1)"),
                       weight_decay=(weight_decay, weight_decay >= 0, "at least 0"))
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def update(self, p, g, state, group, step):
        m, v, t = state["exp_avg"], state["exp_avg_sq"], self.scratch(p)
        beta1, beta2 = group["betas"]
        if group["weight_decay"] and self.decoupled:
            p *= 1 - group["lr"] * group["weight_decay"]
        elif group["weight_decay"]:
            decayed = self.scratch(p, 1)
            xp.multiply(p, group["weight_decay"], out=decayed)
            decayed += g
            g = decayed
        m *= beta1
        xp.multiply(g, 1 - beta1, out=t)
        m += t
        v *= beta2
        xp.multiply(g, g, out=t)
        t *= 1 - beta2
        v += t
        # lr · m̂ / (√v̂ + eps) with the two corrections folded into the numbers, not the arrays.
        correction = sqrt(1 - beta2 ** step)
        xp.sqrt(v, out=t)
        t += group["eps"] * correction
        xp.divide(m, t, out=t)
        t *= group["lr"] * correction / (1 - beta1 ** step)
        p -= t


class AdamW(Adam):
    """Adam with decoupled weight decay: p shrinks by lr · weight_decay before the step, and g stays itself.

    Source: Loshchilov & Hutter 2019, "Decoupled weight decay regularization".
    """

    decoupled = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, lr, betas, eps, weight_decay)
