"""What optimizers do to parameters, in float64 and by unfolded sums; and what they do with a known mistake in them."""

import math

import numpy as np


def rates(case):
    """The learning rate of every step."""
    return [case["settings"]["lr"] if lr is None else lr for lr in case["lrs"]]


def fixed(case):
    """Those of an optimizer that doesn't listen to the argument of step."""
    return [case["settings"]["lr"]] * len(case["lrs"])


def never_0(case):
    """Those of one to which 0 says what None says."""
    return [lr or case["settings"]["lr"] for lr in case["lrs"]]


def kept(case):
    """Those of one that goes on with the last that it was given."""
    found = []
    for lr in case["lrs"]:
        found.append(lr if lr is not None else found[-1] if found else case["settings"]["lr"])
    return found


def unmoved(case):
    return {"parameters": [np.stack([p] * len(case["lrs"])) for p in case["parameters"]]}


def only_decayed(case):
    """Where the decay is written into the arrays, and the step isn't."""
    wd = case["settings"].get("weight_decay", 0.0) if case["settings"].get("decoupled") else 0.0
    return moved(case, lambda i, t, p, g, lr: p * (1 - lr * wd))


def ravelled(case, right):
    """Where only what has one axis or none moves: the flat form of the others, which lie by columns, is a copy. Decay
    may be written into these."""
    return {"parameters": [moves if p.ndim < 2 else stays for p, moves, stays in zip(
        case["parameters"], right(case)["parameters"], only_decayed(case)["parameters"], strict=True)]}


def moved(case, update, lrs=rates):
    """{"parameters": each one's values after every step}. update(i, t, p, g, lr) -> the new p; t counts from 1."""
    found = []
    for i, p in enumerate(case["parameters"]):
        path = []
        for t, (grads, lr) in enumerate(zip(case["grads"], lrs(case), strict=True), 1):
            p = update(i, t, p, grads[i], lr)
            path.append(p)
        found.append(np.stack(path))
    return {"parameters": found}


def draw(rng, shapes, lrs, scale=1.0, **settings):
    """A case for an optimizer: gradients that drift, so that their means aren't 0."""
    drift, parameters = ([np.array(rng.standard_normal(shape)) for shape in shapes] for _ in range(2))
    return {"parameters": parameters, "lrs": lrs, "settings": settings,
            "grads": [[np.array(scale * (d + rng.standard_normal(d.shape))) for d in drift] for _ in lrs]}


# ---------------------------------------------------------------- 05.3

def weighted(weights, values):
    """Σ weights·values; weights is a function of the age, 0 for the newest."""
    if not values:
        return 0.0
    return np.tensordot([weights(age) for age in reversed(range(len(values)))], np.array(values), axes=1)


def sgd(case, velocity=None, step=lambda p, v, g, lr, mu: p - lr * v, lrs=rates):
    """velocity(mu, gradients so far, rates so far); the right one is the sum that the recursion unfolds to."""
    mu, past = case["settings"].get("momentum", 0.0), {}

    def update(i, t, p, g, lr):
        grads, so_far = past.setdefault(i, ([], []))
        grads.append(g)
        so_far.append(lr)
        v = velocity(mu, grads, so_far) if velocity else weighted(lambda age: mu ** age, grads)
        return step(p, v, g, lr, mu)
    return moved(case, update, lrs)


def shared_velocity(case):
    """The other optimizer's steps go into the same velocities: it is given 1 − g, after each of ours."""
    def velocity(mu, grads, _):
        both = [step for g in grads for step in (g, 1.0 - g)][:-1]
        return weighted(lambda age: mu ** age, both)
    return sgd(case, velocity)


def gradient_kept(mu, grads, _):
    """The first velocity is the caller's array, which holds the second gradient by the time it is read again."""
    return weighted(lambda age: mu ** age, [grads[0]] if len(grads) == 1 else [grads[1], *grads[1:]])


def only_with_gradient(mu, grads, _):
    """The velocity, 0 where there is no gradient, and without the steps that had none."""
    return weighted(lambda age: mu ** age, [g for g in grads if g.any()]) if grads[-1].any() else 0.0


def first_moves(case):
    return {"parameters": sgd(case)["parameters"][:1] + unmoved(case)["parameters"][1:]}


# ---------------------------------------------------------------- 05.4

def unbiased(beta, t):
    return 1 - beta ** t


def factors_with(wrong):
    """Of both corrections, of that of m or of that of v."""
    return (wrong, wrong), (wrong, unbiased), (unbiased, wrong)


def adam(case, *, lrs=rates, decoupled=None, decay=lambda p, lr, wd: p * (1 - lr * wd), decay_after=False,
         swapped=False, clock=lambda i, t, n: t, correct=(True, True), power=2, inside=False, eps_before=False, sign=1,
         second=None, factors=(unbiased, unbiased), rooted=np.sqrt, both=False):
    """Adam by the unfolded sums, (1−β) Σ βᵏ g, in float64. The keywords are the mistakes."""
    settings = case["settings"]
    beta1, beta2 = settings["betas"][::-1 if swapped else 1]
    eps, wd = settings["eps"], settings.get("weight_decay", 0.0)
    decoupled = settings.get("decoupled", False) if decoupled is None else decoupled
    past, n = {}, len(case["parameters"])

    def update(i, t, p, g, lr):
        if decoupled and not decay_after:
            p = decay(p, lr, wd)
        if both or not decoupled:
            g = g + wd * p
        grads = past.setdefault(i, [])
        grads.append(g)
        t = clock(i, t, n)
        mean = (1 - beta1) * weighted(lambda age: beta1 ** age, grads)
        square = (1 - beta2) * weighted(lambda age: beta2 ** age, [abs(g) ** power for g in grads])
        if second is not None:
            mean, square = second(mean, square, grads, beta1, beta2)
        factor1, factor2 = (factor(beta, t) if do else 1.0 for factor, beta, do in zip(
            factors, (beta1, beta2), correct, strict=True))
        with np.errstate(invalid="ignore", divide="ignore"):
            root = np.sqrt(square / factor2 + eps) if inside else \
                (np.sqrt(square) + eps) / math.sqrt(factor2) if eps_before else rooted(square / factor2) + eps
            p = p - sign * lr * (mean / factor1) / root
        return p * (1 - lr * wd) if decoupled and decay_after else p
    return moved(case, update, lrs)


def corrected_in_place(mean, square, grads, beta1, beta2):
    """m /= 1 − β₁ᵗ, and what is remembered is that."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m = (beta1 * m + (1 - beta1) * g) / (1 - beta1 ** t)
        v = (beta2 * v + (1 - beta2) * g * g) / (1 - beta2 ** t)
    return m, v


def not_kept(m, v):
    """Which of the two is 0 before each step."""
    return lambda mean, square, grads, beta1, beta2: (
        (1 - beta1) * grads[-1] if m else mean, (1 - beta2) * grads[-1] ** 2 if v else square)


def counted_on(case, got):
    """Whether t counts other optimizers' steps, too: one after each of ours, and those of the cases before."""
    begin = case | {name: case[name][:2] for name in ("grads", "lrs")}
    return any(all(np.allclose(mine[:2], right, 1e-7, 1e-12) for mine, right in zip(
        got["parameters"], adam(begin, clock=lambda i, t, n, done=done: done + 2 * t - 1)["parameters"], strict=True))
        for done in range(200))


def one_array(mean, square, grads, beta1, beta2):
    """m and v are the same array: each step first takes in g, then g²."""
    value = np.zeros_like(grads[0])
    for g in grads:
        value = beta1 * value + (1 - beta1) * g
        value = beta2 * value + (1 - beta2) * g * g
    return value, value


def forgotten(mean, square, grads, beta1, beta2):
    """Of a parameter without axes m and v are 0 before each step."""
    return (mean, square) if grads[0].ndim else ((1 - beta1) * grads[-1], (1 - beta2) * grads[-1] ** 2)


def states_by_shape(case):
    """Parameters of one shape share m and v: each takes in the gradients of all of these, in turn."""
    settings, found, state = case["settings"], [[] for _ in case["parameters"]], {}
    beta1, beta2 = settings["betas"]
    values = list(case["parameters"])
    if len({p.shape for p in values}) == len(values):
        return adam(case)
    for t, (grads, lr) in enumerate(zip(case["grads"], rates(case), strict=True), 1):
        for i, g in enumerate(grads):
            if settings.get("decoupled"):
                values[i] = values[i] * (1 - lr * settings["weight_decay"])
            else:
                g = g + settings.get("weight_decay", 0.0) * values[i]
            m, v = state.get(g.shape, (0.0, 0.0))
            m, v = state[g.shape] = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            root = np.sqrt(v / (1 - beta2 ** t)) + settings["eps"]
            values[i] = values[i] - lr * m / (1 - beta1 ** t) / root
            found[i].append(values[i])
    return {"parameters": [np.stack(path) for path in found]}
