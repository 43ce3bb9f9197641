"""Adam and AdamW."""

from math import sqrt
from operator import is_not

from .. import kernels
from ..autodiff.writes import wrote
from ..backend import device_of, to, xp
from .optimizer import Optimizer
from .packed import Packed, arrays_of, dynamic_levels
from .settings import AT_LEAST_0, BETAS, pair


class Adam(Optimizer):
    """m = β₁m + (1-β₁)g,  v = β₂v + (1-β₂)g²,  p -= lr · m̂ / (√v̂ + eps), with bias-corrected m̂ and v̂.

    weight_decay  adds weight_decay · p to g (L2)
    amsgrad       v̂ is made of the largest v so far
    maximize      goes up the gradient
    state_bits    8: the moments are kept in 8 bits, with scales 2.5 bytes per parameter instead of 8 (packed.py)

    torch's settings and arithmetic. On a GPU with Triton the whole model is updated in one launch (kernels/adam.py),
    which takes step's grad_scale and found_inf where they are; on the CPU in tiles that fit into the cache. Groups of 8
    bits and groups of 32 are a launch each.
    Sources: Kingma & Ba 2015; Reddi et al. 2018 (amsgrad); Dettmers et al. 2022 (state_bits).
    """

    state_names = ("exp_avg", "exp_avg_sq")
    unsigned = ("exp_avg_sq", "max_exp_avg_sq")
    rules = {"lr": AT_LEAST_0, "betas": BETAS, "eps": AT_LEAST_0, "weight_decay": AT_LEAST_0}
    decoupled = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False,
                 state_bits=32):
        self.amsgrad = amsgrad
        if amsgrad:
            self.state_names = (*self.state_names, "max_exp_avg_sq")
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay,
                                  "maximize": maximize, "state_bits": state_bits})

    def empty_state(self, parts, bits, names):
        self.fused = None       # kernels.adam.Update per kind, with the slots it updates; made at the first step
        return super().empty_state(parts, bits, names)

    def apply(self, grad_scale, found_inf):
        if self.home is None and all(kernels.usable(flat.params) and flat.dtype != xp.float64 for flat in self.flats):
            return self.apply_fused(grad_scale, found_inf)
        self.count_on_host()
        self.fused = None
        super().apply(grad_scale, found_inf)

    def update(self, p, g, state, group, step):
        m, v, t = state["exp_avg"], state["exp_avg_sq"], self.scratch(p)
        beta1, beta2 = group["betas"]
        if group["maximize"]:
            g = xp.negative(g, out=self.scratch(p, 1))
        if group["weight_decay"] and self.decoupled:
            p *= 1 - group["lr"] * group["weight_decay"]
        elif group["weight_decay"]:
            decayed = self.scratch(p, 2)
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
        if self.amsgrad:
            v = xp.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
        # lr · m̂ / (√v̂ + eps) with the two corrections folded into the numbers, not the arrays.
        correction = sqrt(1 - beta2 ** step)
        xp.sqrt(v, out=t)
        t += group["eps"] * correction
        xp.divide(m, t, out=t)
        t *= group["lr"] * correction / (1 - beta1 ** step)
        p -= t

    # ---------------------------------------------------------------- on a GPU: one launch

    def apply_fused(self, *scaling):
        """Update all parameters of one kind in one launch. scaling: grad_scale and found_inf."""
        ups, homes = [group["maximize"] for group in self.param_groups], [flat.params for flat in self.flats]
        if self.fused is None or ups != self.ups or any(map(is_not, homes, self.homes)):
            self.count_on_host()
            self.fused, self.ups, self.homes = self.tables(), ups, homes
        alike = {id(group): (group["lr"], group["betas"], group["eps"], group["weight_decay"])
                 for group in self.param_groups}
        scaling = [None if s is None else kernels.load("adam").number(s, self.flats[0].params) for s in scaling]
        rests = False
        for update, slots in self.fused:
            settings = [None if slot.segment.tensor.grad is None else alike[id(slot.group)] for slot in slots]
            rests = rests or None in settings
            update(settings, *scaling)
        for flat, slots in zip(self.flats, self.slots, strict=True):
            whole = not rests and len(slots) == len(flat.segments)
            for array in [flat.params] if whole else [
                    slot.segment.tensor.data for slot in slots if slot.segment.tensor.grad is not None]:
                wrote(array, f"{type(self).__name__}.step")

    def tables(self):
        """[(Update, its slots)], one per dtype of parameters, device, direction and bits of state."""
        kinds = {}      # (dtype, device, whether it goes up, of 8 bits) -> ([the arrays of each slot], [slot])
        for flat, state, slots in zip(self.flats, self.state, self.slots, strict=True):
            names = {"m": state["exp_avg"], "v": state["exp_avg_sq"]}
            names |= {"master": state["master"]} if "master" in state else {}
            names |= {"largest": state["max_exp_avg_sq"]} if self.amsgrad else {}
            eight = isinstance(state["exp_avg"], Packed)
            for slot in slots:
                kind = flat.dtype, device_of(flat.params), slot.group["maximize"], eight
                arrays, here = kinds.setdefault(kind, ([], []))
                start, end = slot.segment.start, slot.segment.end
                part, of_state = slice(start, end), slice(slot.at, slot.at + end - start)
                mine = {"p": flat.params[part], "g": flat.grads[part]}
                for name, array in names.items():
                    mine |= zip((name, f"{name}_scales"), arrays_of(array[of_state]), strict=False)
                arrays.append(mine)
                here.append(slot)
        update = kernels.load("adam").Update
        return [(update(arrays, [slot.steps for slot in slots], self.decoupled, self.amsgrad, maximize,
                        every_level(device) if eight else None), slots)
                for (_, device, maximize, eight), (arrays, slots) in kinds.items()]

    def count_on_host(self):
        """Bring the numbers of updates, which the kernel counts on the device, back to the slots."""
        for update, slots in self.fused or ():
            for slot, steps in zip(slots, update.counts(), strict=True):
                slot.steps = steps

    def state_dict(self, copy=True):
        self.count_on_host()
        return super().state_dict(copy)

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.fused = None


class AdamW(Adam):
    """Adam with decoupled weight decay: p shrinks by lr · weight_decay before the step, and g stays itself.

    Source: Loshchilov & Hutter 2019, "Decoupled weight decay regularization".
    """

    decoupled = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, maximize=False,
                 state_bits=32):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize, state_bits)


def every_level(device):
    """float32 (512,): dynamic_levels of numbers with a sign, and behind them of those without."""
    return to(xp.concatenate([dynamic_levels(signed) for signed in (True, False)]), device)
