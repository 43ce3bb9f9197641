"""Stochastic gradient descent with momentum."""

from ..backend import xp
from .optimizer import Optimizer
from .settings import AT_LEAST_0


class SGD(Optimizer):
    """b = momentum · b + g,  p -= lr · b; torch's settings and arithmetic.

    nesterov      step along g + momentum · b instead
    weight_decay  adds weight_decay · p to g (L2)
    state_bits    8: the momentum is kept in 8 bits (packed.py)
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".
    """

    state_names = ("momentum",)
    rules = {"lr": AT_LEAST_0, "momentum": AT_LEAST_0, "weight_decay": AT_LEAST_0, "nesterov": (
        lambda nesterov, group: not nesterov or group["momentum"] > 0, "False without momentum")}

    def __init__(self, params, lr=1e-3, momentum=0.0, weight_decay=0.0, nesterov=False, state_bits=32):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
                                  "state_bits": state_bits})

    def update(self, p, g, state, group, step):
        t, momentum = self.scratch(p), group["momentum"]
        if group["weight_decay"]:
            g_decayed = self.scratch(p, 1)
            xp.multiply(p, group["weight_decay"], out=g_decayed)
            g_decayed += g
            g = g_decayed
        if momentum:
            b = state["momentum"]
            b *= momentum
            b += g
            if group["nesterov"]:
                xp.multiply(b, momentum, out=t)
                t += g
                t *= group["lr"]
            else:
                xp.multiply(b, group["lr"], out=t)
        else:
            xp.multiply(g, group["lr"], out=t)
        p -= t
