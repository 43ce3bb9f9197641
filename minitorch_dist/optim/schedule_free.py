"""Schedule-free AdamW: a training that may end at any step, with a rate that never falls.

    y = (1 - β₁) z + β₁ x           where gradients are taken: what the parameters hold
    z ← z - γ (ĝ + λ y)             ĝ = g(y) / (√v̂ + eps): the steps themselves, at the full rate
    x ← (1 - c) x + c z             c = γ²/Σγ²: the mean of all z so far, what is evaluated and kept

A cosine has to know its end: it makes the steps shorter, so that what they overshoot evens out. The mean of all steps
evens it out at any time, and gradients that are taken near it (β₁ = 0.9) hear of it soon enough.

Kept is d = z - y, in the place of Adam's momentum; x is y + (1 - 1/β₁) d. With s = γ (ĝ + λ y) the three lines are

    y ← y + c d - (1 - β₁ (1 - c)) s            d ← (1 - c)(d - β₁ s)

    optimizer = optim.AdamWScheduleFree(model.parameters(), lr=0.0025, warmup=100)
    for step, batch in enumerate(batches):
        …                                                   # as with any other
        optimizer.step()
        if step % 500 == 0:
            with optimizer.averaged(model):                 # its parameters are x here, and y again behind it
                evaluate(model)

Source: Defazio et al. 2024, "The road less scheduled".
"""

import math
from contextlib import contextmanager

from ..autodiff.writes import wrote
from ..backend import to_device_of, xp
from .optimizer import Optimizer
from .settings import AT_LEAST_0, MORE_THAN_0, check_eps, pair

BETAS = (lambda betas, group: isinstance(betas, (tuple, list)) and len(betas) == 2 and 0 < betas[0] <= 1
         and 0 <= betas[1] < 1, "two numbers, the first in (0, 1], the second in [0, 1)")


class AdamWScheduleFree(Optimizer):
    """The optimizer above; no LambdaLR goes with it, only its own warmup.

    lr            γ; usually 1 to 10 times the greatest rate of AdamW's schedule
    betas         β₁, above 0: how near the mean gradients are taken; β₂: of v, as Adam's
    weight_decay  λ, decoupled, of y
    warmup        steps over which the rate rises linearly; their z count less in the mean

    A step whose rate somebody has changed counts as all others in the mean. Where somebody sets a parameter between
    two steps, z and x move as far. ValueError for groups with state_bits=8: d forgets what is rounded in it no sooner
    than the mean does.
    """

    state_names = ("z_minus_y", "exp_avg_sq")
    rules = {"lr": AT_LEAST_0, "betas": BETAS, "eps": MORE_THAN_0, "weight_decay": AT_LEAST_0,
             "warmup": (lambda n, group: 0 <= n < math.inf and n == int(n), "a whole number of steps, at least 0")}
    state_bits = (32,)
    inside = False      # of averaged()

    def __init__(self, params, lr=2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup=0):
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay,
                                  "warmup": warmup})
        check_eps(self)

    def check_step(self):
        self._check_outside("step")
        super().check_step()

    def update(self, p, g, state, group, step):
        d, v, t, root = state["z_minus_y"], state["exp_avg_sq"], self.scratch(p), self.scratch(p, 1)
        beta1, beta2 = group["betas"]
        v *= beta2
        xp.multiply(g, g, out=t)
        t *= 1 - beta2
        v += t
        correction = (1 - beta2 ** step) ** 0.5
        xp.sqrt(v, out=root)
        root += group["eps"] * correction
        xp.divide(g, root, out=t)
        t *= correction
        if group["weight_decay"]:
            xp.multiply(p, group["weight_decay"], out=root)
            t += root
        c = share_of_mean(step, group["warmup"])
        t *= group["lr"] * min(1, step / max(group["warmup"], 1))
        xp.multiply(d, c, out=root)
        p += root
        xp.multiply(t, 1 - beta1 * (1 - c), out=root)
        p -= root
        t *= beta1
        d -= t
        d *= 1 - c

    @contextmanager
    def averaged(self, *models):
        """Inside, the parameters are x, the mean, to be evaluated or exported; afterwards y again, to the bit. models:
        those that are wrapped by fully_shard, which gather what their ranks have written; others may be named too.

        RuntimeError inside for another one, for a step, and for state_dict() and load_state_dict(): a checkpoint wants
        y, whose means can be made at any time; and at the end where DistributedDataParallel has moved the mean.
        """
        self._check_outside("averaged")
        self._follow_moved()
        kept = []
        for flat, state, slot in self._places():
            p, mine = flat.params[slot.segment.start:slot.segment.stop], slot.state(state)
            kept.append((flat, p, p.copy()))
            away = to_device_of(mine["z_minus_y"], p)
            p[...] = self.exact(p, mine) + (1 - 1 / slot.group["betas"][0]) * away
        self.inside = True
        try:
            self._written(kept, models)
            yield
        finally:
            self.inside = False
            for _, p, before in kept:
                p[...] = before
            self._written(kept, models)
        if self._have_moved():
            raise RuntimeError("DistributedDataParallel was made inside averaged(), or had its first backward there, "
                               "and has kept the mean and not what is trained: do that before or behind that block")

    def _written(self, kept, models):
        for flat, p, _ in kept:
            wrote(p if flat.unit is None else flat.params, f"{type(self).__name__}.averaged")
        for model in models:
            if hasattr(model, "stale"):     # the other ranks' pieces are to be gathered
                model.stale = True

    def _check_outside(self, what):
        if self.inside:
            raise RuntimeError(f"AdamWScheduleFree.{what} inside averaged(), where the parameters are the mean and not "
                               "what is trained: end that block before")

    def state_dict(self, copy=True):
        self._check_outside("state_dict")
        return super().state_dict(copy)

    def check_state(self, saved):
        self._check_outside("load_state_dict")      # what is loaded would be overwritten behind the block
        super().check_state(saved)


def share_of_mean(step, warmup):
    """c, how much of x the z of this step is, counted from 1: γ²/Σγ² of rates that rise linearly over `warmup` steps
    and then stay."""
    w = max(warmup, 1)
    risen = min(step, w)
    return (risen / w) ** 2 / (risen * (risen + 1) * (2 * risen + 1) / 6 / w ** 2 + max(step - w, 0))
