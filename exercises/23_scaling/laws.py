"""23.4: runs that are made up, another way to fit them, and what known mistakes would give."""

import functools
import math

import numpy as np

DELTA = 1e-3
NAMES = "E", "A", "B", "alpha", "beta"
HOFFMANN = [1.69, 406.4, 410.7, 0.34, 0.28]      # Hoffmann et al. 2022, section D.3
BUDGETS = [10.0 ** k for k in range(18, 26)]
# For each of STARTS the law of runs whose deepest valley that one alone finds, so that none may be left out. Where a
# start leads hangs on where the runs are: theirs are always drawn with the seed 0
VALLEYS = ([0.756, 84.17, 107.5, 0.579, 0.84], [0.949, 49940.0, 12.42, 0.787, 0.659],
           [2.098, 988.8, 540.1, 0.153, 0.616], [1.115, 4006.0, 146.1, 0.724, 0.699],
           [1.688, 3893.0, 408.7, 0.552, 0.749], [1.284, 26.26, 298.7, 0.877, 0.37])
FAR = 0.03          # of the loss, that large runs may be from what they are expected to be


# ---------------------------------------------------------------- cases

def drawn_law(rng):
    """Its powers are never so near to each other that one could stand for the other."""
    middle, apart = rng.uniform(0.29, 0.35), rng.uniform(0.012, 0.03) * rng.choice([-1, 1])
    return [float(rng.uniform(1.3, 2.2)), float(np.exp(rng.uniform(4.5, 6.5))), float(np.exp(rng.uniform(5, 7))),
            float(middle + apart), float(middle - apart)]


def exact(law, n, d):
    e, a, b, alpha, beta = law
    return e + a * np.exp(-alpha * np.log(n)) + b * np.exp(-beta * np.log(d))


def runs(rng, law, noise, wrong=(), models=6, tokens=4, off=(0.7, 1.4)):
    """{"n", "d", "losses"} of small runs, on a grid that isn't quite one, by factors within `off`. wrong: factors of
    some losses."""
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(5e5, 1e9, models), np.geomspace(2e7, 2e10, tokens)))
    n, d = n * rng.uniform(*off, len(n)), d * rng.uniform(*off, len(d))
    losses = exact(law, n, d) * np.exp(noise * rng.standard_normal(len(n)))
    places = rng.choice(len(n), len(wrong), replace=False)
    losses[places] *= wrong
    return {"n": n, "d": d, "losses": losses}


def near_law(rng, law, by):
    e, a, b, alpha, beta = law
    theta = np.array([math.log(a), math.log(b), math.log(e), alpha, beta])
    return theta + by * rng.standard_normal(5) * [1, 1, 1, 0.05, 0.05]


def cases(rng):
    law, found = drawn_law(rng), []
    some = runs(rng, law, 0.002, (1.1,), 3, 3)
    for theta in (near_law(rng, law, 0.004), near_law(rng, law, 0.5), near_law(rng, law, 0.001),
                  np.array([800.0, 5.0, 0.5, 0.3, 0.3]), np.array([-900.0, -800.0, -750.0, 0.2, 0.1]),
                  np.array([7.0, 5.0, 0.5, -120.0, 0.3])):
        found.append({"what": "objective", "theta": theta} | some)
    found += [{"what": "loss", "law": law, "n": n, "d": d} for n, d in ((some["n"], some["d"]), (3e7, 2e9))]
    for other in (law, drawn_law(rng), HOFFMANN):
        found.append({"what": "optimal", "law": other, "compute": float(10 ** rng.uniform(18, 25))})
    large = {"large n": np.array([1e10, 7e10, 3e11]), "large d": np.array([2e11, 1.4e12, 6e12]), "budgets": BUDGETS}
    drawn, other = ({"what": "fit", "law": law, "noise": noise} | large | runs(rng, law, noise, wrong)
                    for law, noise, wrong in ((drawn_law(rng), 0.0, ()), (HOFFMANN, 0.001, (1.08, 1.15))))
    valleys = [{"what": "fit", "law": law, "noise": 0.0} | large | runs(np.random.default_rng(0), law, 0.0,
                                                                        off=(0.99, 1.01)) for law in VALLEYS]
    return [*found, drawn, other, *valleys]


# ---------------------------------------------------------------- another way to the same

def log_law(theta, n, d):
    """log L, of complex numbers too."""
    a, b, e, alpha, beta = theta
    terms = [a - alpha * np.log(n), b - beta * np.log(d), e + 0 * n]
    top = np.maximum.reduce([np.real(term) for term in terms])
    return top + np.log(sum(np.exp(term - top) for term in terms))


def huber(r, delta=DELTA):
    size = r * np.sign(np.real(r))
    return np.where(np.real(size) <= delta, r * r / 2, delta * (size - delta / 2))


def residual(theta, n, d, losses):
    return log_law(theta, n, d) - np.log(losses)


def value(case, theta, loss=huber, of=residual, mean=False):
    total = loss(of(theta, case["n"], case["d"], case["losses"]))
    return total.mean() if mean else total.sum()


def gradient(case, **how):
    """By complex steps."""
    step = 1e-30
    return np.array([np.imag(value(case, case["theta"] + 1j * step * np.eye(5)[i], **how)) / step for i in range(5)])


def objective(case, change=lambda case, value, gradient: (value, gradient), **how):
    with np.errstate(all="ignore"):
        found = float(np.real(value(case, case["theta"].astype(complex), **how))), gradient(case, **how)
        return dict(zip(("value", "gradient"), change(case, *found), strict=True))


def jacobian(theta, n, d, of):
    return np.stack([np.imag(of(theta + 1e-30j * np.eye(len(theta))[i], n, d)) / 1e-30 for i in range(len(theta))], 1)


def refit(case, weight=None, logs=True, tied=False):
    """The law's five numbers, by Gauss-Newton with weights (Huber's, unless others are given) from the true ones."""
    e, a, b, alpha, beta = case["law"]
    free = np.array([math.log(a), math.log(b), math.log(e), alpha, beta])

    def whole(x):
        x = x.astype(complex) if np.iscomplexobj(x) else x
        return np.array([x[0], x[1], x[2], x[3], x[3] if tied else x[4]])

    def of(x, n, d):
        found = log_law(whole(x), n, d)
        return found if logs else np.exp(found)
    weight = weight or (lambda r: np.minimum(1, DELTA / np.maximum(np.abs(r), 1e-300)))
    n, d, goal = case["n"], case["d"], np.log(case["losses"]) if logs else case["losses"]
    damping, keep = 1e-3, [i for i in range(5) if not (tied and i == 4)]

    def total(r):
        return (weight(r) * r ** 2).sum() if weight(r).min() == 1 else huber(r).sum()
    r = of(free, n, d) - goal
    for _ in range(300):
        matrix, w = jacobian(free, n, d, of)[:, keep], weight(r)
        normal = matrix.T @ (w[:, None] * matrix)
        move = np.zeros(5)
        move[keep] = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -matrix.T @ (w * r))
        new = of(free + move, n, d) - goal
        if total(new) <= total(r):
            free, r, damping = free + move, new, max(damping / 5, 1e-12)
            if np.abs(move).max() < 1e-11:
                break
        else:
            damping *= 10
            if damping > 1e12:
                break
    a, b, e, alpha, beta = whole(free)
    return [math.exp(e), math.exp(a), math.exp(b), float(alpha), float(beta)]


@functools.lru_cache(maxsize=64)
def _refitted(key, how):
    n, d, losses, law = (np.frombuffer(part) for part in key)
    return refit({"n": n, "d": d, "losses": losses, "law": law.tolist()}, **dict(how))


def refitted(case, **how):
    """refit, worked out once."""
    key = tuple(np.asarray(case[name], float).tobytes() for name in ("n", "d", "losses", "law"))
    return _refitted(key, tuple(how.items()))


def truth(case):
    if case["what"] == "objective":
        return objective(case)
    if case["what"] == "loss":
        return {"result": exact(case["law"], case["n"], case["d"])}
    return {"result": optimal(case)} if case["what"] == "optimal" else {}


def optimal(case):
    """(N, D) by halving an interval of log N until the derivative of the loss by it is 0."""
    e, a, b, alpha, beta = case["law"]
    both = math.log(case["compute"] / 6)
    low, high = -100.0, 200.0
    for _ in range(200):
        x = (low + high) / 2
        slope = -alpha * a * math.exp(-alpha * x) + beta * b * math.exp(-beta * (both - x))
        low, high = (x, high) if slope < 0 else (low, x)
    return [math.exp(low), math.exp(both - low)]
