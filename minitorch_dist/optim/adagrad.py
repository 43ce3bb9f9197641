"""Adagrad."""

from ..backend import xp
from .optimizer import Optimizer
from .settings import AT_LEAST_0, MORE_THAN_0, check_eps, check_settings


class Adagrad(Optimizer):
    """s += g²,  p -= lr · g / (√s + eps): each element's steps shrink as its gradients add up.

    torch's settings and arithmetic.
    lr_decay                   step t is taken with lr / (1 + (t - 1) · lr_decay)
    weight_decay               adds weight_decay · p to g (L2)
    initial_accumulator_value  s at the beginning
    eps                        more than 0 in the state's dtype (ValueError): an element that never had a gradient
                               would be 0/0
    state_bits                 8: s is kept in 8 bits (packed.py)
    Source: Duchi, Hazan & Singer 2011, "Adaptive subgradient methods for online learning and stochastic optimization".
    """

    state_names = unsigned = ("sum",)
    rules = {"lr": AT_LEAST_0, "lr_decay": AT_LEAST_0, "weight_decay": AT_LEAST_0, "eps": MORE_THAN_0}

    def __init__(self, params, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10,
                 state_bits=32):
        check_settings(initial_accumulator_value=(initial_accumulator_value, initial_accumulator_value >= 0,
                                                  "at least 0"))
        self.initial = {"sum": initial_accumulator_value}
        super().__init__(params, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps,
                                  "state_bits": state_bits})
        check_eps(self)

    def update(self, p, g, state, group, step):
        t, s = self.scratch(p), state["sum"]
        if group["weight_decay"]:
            decayed = self.scratch(p, 1)
            xp.multiply(p, group["weight_decay"], out=decayed)
            decayed += g
            g = decayed
        xp.multiply(g, g, out=t)
        s += t
        root = self.scratch(p, 2)
        xp.sqrt(s, out=root)
        root += group["eps"]
        xp.multiply(g, group["lr"] / (1 + (step - 1) * group["lr_decay"]), out=t)
        t /= root
        p -= t
