"""LAMB and LARS: steps in proportion to the parameter that they change, for batches of many thousands.

    ratio = ‖p‖ / ‖u‖           of each parameter by itself; 1 where one of the two is 0
    p -= lr · ratio · u         so a step is lr · ‖p‖ long, however large the gradients are

    LAMB    u is Adam's step, with decoupled weight decay
    LARS    u is the gradient, with weight decay; momentum comes behind the ratio

Norms are of whole parameters: of those that fully_shard or tensor parallelism cut, what other ranks have is added, as
in clip.py, so that they have the same bits in any buckets and units, on any ranks. step() is collective then.

Sources: You et al. 2019, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2 (LAMB);
You, Gitman & Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1 (LARS).
"""

from math import sqrt

from ..autodiff.writes import wrote
from ..backend import on_host, xp, zeros_like
from .clip import check_known, squares_by_16, whole_squares
from .optimizer import Optimizer
from .settings import AT_LEAST_0, BETAS, MORE_THAN_0, check_eps, pair
from .slots import runs


class TrustRatio(Optimizer):
    """Base of the two. A subclass's `update` writes what the ratio is about to state["u"], and leaves p as it is;
    `move` makes the step. A norm that is NaN makes all of its parameter that."""

    elementwise = False

    def __init__(self, params, defaults):
        super().__init__(params, defaults)
        check_known([p for group in self.param_groups for p in group["params"]], type(self).__name__)

    def settle_in(self, home):
        if not all(on_host(flat.params) for flat in self.flats):
            raise ValueError(f"{type(self).__name__}'s state can't lie on the host while its parameters are on a GPU: "
                             "norms are made of both")
        super().settle_in(home)

    def update_all(self):
        vectors = {}        # id of a flat buffer -> what is updated of its parameters, and u, both as they lie there
        for flat, state, slots in zip(self.flats, self.state, self.slots, strict=True):
            exact = xp.promote_types(flat.dtype, xp.float32)
            if id(flat) not in vectors:
                vectors[id(flat)] = (flat.params if exact == flat.dtype else zeros_like(flat.params, dtype=exact),
                                     zeros_like(flat.params, dtype=exact))
            p, u = vectors[id(flat)]
            for start, stop, at, group, steps in runs(slots):
                run, of_state = slice(start, stop), slice(at, at + stop - start)
                arrays = {name: a[of_state] for name, a in state.items()}
                self.tiled(flat.params[run], flat.grads[run], {**arrays, "u": u[run]}, group, steps)
                if "master" in state:
                    p[run] = arrays["master"]
        ratios = self.ratios(vectors)
        for flat, state, slots in zip(self.flats, self.state, self.slots, strict=True):
            _, u = vectors[id(flat)]
            for slot in slots:
                if (tensor := slot.segment.tensor).grad is not None:
                    run = slice(slot.segment.start, slot.segment.stop)
                    self.moved(flat.params[run], u[run], slot.state(state), slot.group, ratios[id(tensor)])

    def moved(self, low, u, state, group, ratio):
        """`move`, of parameters of 16 bits by their master copies."""
        exact = state.get("master", low)
        self.move(exact, u, state, group, ratio)
        if exact is not low:
            low[...] = exact
        wrote(low, f"{type(self).__name__}.step")

    def ratios(self, vectors):
        """{id of a tensor: ratio}, of whole parameters. Collective where they are cut."""
        params = [p for group in self.param_groups for p in group["params"]]
        sums = whole_squares(self.flats, params, *({key: squares_by_16(both[k]) for key, both in vectors.items()}
                                                   for k in (0, 1)))
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return {key: self.ratio(*map(sqrt, row), groups[key]) for key, row in sums.items()}

    def ratio(self, p, u, group):
        """Of two norms."""
        return 1.0 if p == 0 or u == 0 else p / u


class LAMB(TrustRatio):
    """u = m̂ / (√v̂ + eps) + weight_decay · p with Adam's m̂ and v̂, p -= lr · ‖p‖/‖u‖ · u; see above.

    weight_decay  decoupled; a part of u, whose norm counts
    eps           more than 0 in the state's dtype (ValueError)
    state_bits    8: m and v are kept in 8 bits (packed.py)

    The ratio is never clipped (the paper's φ is the identity). Besides its state it takes the memory of a gradient more
    during step, and a GPU is waited for.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    unsigned = ("exp_avg_sq",)
    rules = {"lr": AT_LEAST_0, "betas": BETAS, "eps": MORE_THAN_0, "weight_decay": AT_LEAST_0}

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=1e-2, state_bits=32):
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay,
                                  "state_bits": state_bits})
        check_eps(self)

    def update(self, p, g, state, group, step):
        m, v, u, t = state["exp_avg"], state["exp_avg_sq"], state["u"], self.scratch(p)
        beta1, beta2 = group["betas"]
        m *= beta1
        xp.multiply(g, 1 - beta1, out=t)
        m += t
        v *= beta2
        xp.multiply(g, g, out=t)
        t *= 1 - beta2
        v += t
        xp.multiply(v, 1 / (1 - beta2 ** step), out=t)
        xp.sqrt(t, out=t)
        t += group["eps"]
        xp.divide(m, t, out=u)
        u *= 1 / (1 - beta1 ** step)
        xp.multiply(p, group["weight_decay"], out=t)
        u += t

    def move(self, p, u, state, group, ratio):
        p -= (group["lr"] * ratio) * u


class LARS(TrustRatio):
    """b = momentum · b + lr · trust · (g + weight_decay · p), p -= b; see above.

    trust_coefficient  trust = trust_coefficient · ‖p‖ / (‖g‖ + weight_decay · ‖p‖), the paper's η; where p or g is 0, 1
    """

    state_names = ("momentum",)
    rules = {"lr": AT_LEAST_0, "momentum": AT_LEAST_0, "weight_decay": AT_LEAST_0, "trust_coefficient": MORE_THAN_0}
    state_bits = (32,)      # b is made where the norms are known, of whole parameters

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-4, trust_coefficient=1e-3):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay,
                                  "trust_coefficient": trust_coefficient})

    def update(self, p, g, state, group, step):
        state["u"][...] = g

    def ratio(self, p, u, group):
        """Of two norms: the learning rate's factor."""
        return 1.0 if p == 0 or u == 0 else group["trust_coefficient"] * p / (u + group["weight_decay"] * p)

    def move(self, p, u, state, group, ratio):
        b = state["momentum"]
        b *= group["momentum"]
        b += (group["lr"] * ratio) * (u + group["weight_decay"] * p)
        p -= b
