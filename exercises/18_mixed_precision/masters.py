"""18.3: Adam with master weights, in float64; and what it does with a known mistake in it."""

import numpy as np

AGAIN = [(4, 3), (5,)]      # shapes of two optimizers' arrays


def draw(rng, shapes, scales, size, values=1.0, **settings):
    """A case: a step per scale. Gradients come times the scale, in float16; `size` is theirs before."""
    drift = [rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape) for shape in shapes]
    grads = [[(scale * size * (d + 0.5 * rng.standard_normal(d.shape))).astype(np.float16) for d in drift]
             for scale in scales]
    return {"values": [(values * rng.standard_normal(shape)).astype(np.float32) for shape in shapes], "grads": grads,
            "scales": scales, "settings": {"betas": [0.8, 0.96], **settings}}


def cases(rng):
    return [draw(rng, AGAIN, [1024.0] * 24, size=1e-4, values=3.0, lr=1e-4, eps=1e-8),
            draw(rng, [(6,), (2, 1, 3)], [65536.0] * 8, size=2e-6, lr=0.03, eps=1e-6),
            draw(rng, [(3, 5)], [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 256.0, 512.0], size=1e-2, lr=0.02, eps=1e-3),
            draw(rng, [(3,), (3,)], [512.0] * 4, size=1e-3, lr=0.02, eps=1e-6),
            draw(rng, [(7,), (3, 2)], [1024.0] * 3, size=1e-3, values=2e-5, lr=1e-6, eps=1e-6),
            resting(draw(rng, [(4,), (2, 2)], [2.5, 1.5, 1.5, 3.5, 2.5], size=1e-2, lr=0.02, eps=1e-2)),
            draw(rng, AGAIN, [512.0] * 6, size=3e-6, lr=0.02, eps=1e-6)]


def resting(case):
    """The case, in whose third step the first array's gradient is 0."""
    case["grads"][2][0][...] = 0
    return case


def one_shape(case, got):
    """Whether all arrays have one shape, of several."""
    return len(case["values"]) > 1 and len({v.shape for v in case["values"]}) == 1


def flushed(got):
    """Whether params are 0 wherever they aren't what masters are in 16 bits."""
    return all(not p[p != half(m)].any() for of_step in zip(got["params"], got["masters"], strict=True)
               for p, m in zip(*of_step, strict=True))


def again(case, got):
    """Whether that is the second one with these shapes."""
    return [v.shape for v in case["values"]] == AGAIN and len(case["scales"]) == 6


# ---------------------------------------------------------------- mistakes

def float64(x):
    return np.asarray(x, np.float64)


def adam(case, start=float64, divided=lambda g, scale: float64(g) / scale, moment=lambda x, square: x,
         square=lambda g, scale: g * g, after=lambda m, v, scale: (m, v), clock=lambda t: t, corrected=(True, True),
         clock_of=None, below=lambda root, eps, grown: root + eps, settings=lambda given: given, of_first=False,
         rests=False, before=float64, forgets=()):
    """What is asked for, after every step; the keywords are the mistakes.

    start       an initial value -> what is kept of it
    divided     (a gradient, the scale) -> g; square: (g, the scale) -> g²
    moment      (a mean, whether it is of squares) -> what is kept of it; after: (m̂, v̂, the scale) -> those used
    clock       of t; corrected: which means are divided by 1 - βᵗ, that of g, that of g²
    clock_of    of t, an array's number and how many there are, in place of clock
    below       (√v̂, eps, √(1-β₂ᵗ)) -> what m̂ is divided by
    settings    those given -> those used
    of_first    whether all gradients are divided by the first step's scale
    rests       whether an array stays as it is where its gradient is 0
    before      a master -> what a step begins with; forgets: of what it forgets the means, False: g, True: g²
    """
    settings = settings(case["settings"])
    (beta1, beta2), lr, least = settings["betas"], settings["lr"], settings["eps"]
    masters = [start(value) for value in case["values"]]
    means = [[np.zeros(m.shape), np.zeros(m.shape)] for m in masters]
    found = {"masters": [], "apart": [0] * len(case["grads"])}
    with np.errstate(all="ignore"):
        for t, (grads, scale) in enumerate(zip(case["grads"], case["scales"], strict=True), 1):
            for i, (of_both, grad) in enumerate(zip(means, grads, strict=True)):
                if rests and not grad.any():
                    continue
                g = float64(divided(grad, scale)) / (case["scales"][0] if of_first else 1)
                of_both[:] = [moment((0 if new_is_square in forgets else beta * mean) + (1 - beta) * new, new_is_square)
                              for beta, mean, new, new_is_square
                              in zip((beta1, beta2), of_both, (g, square(g, scale)), (False, True), strict=True)]
                m, v = of_both
                now = clock(t) if clock_of is None else clock_of(t, i, len(grads))
                m, v = (mean / (1 - beta ** now) if divides else mean
                        for mean, beta, divides in zip((m, v), (beta1, beta2), corrected, strict=True))
                m, v = after(m, v, scale)
                masters[i] = before(masters[i]) - lr * m / below(np.sqrt(v), least, np.sqrt(1 - beta2 ** now))
            found["masters"].append([m.copy() for m in masters])
    return found


SETTINGS = [
    ("betas were given, and 0.9 and 0.999 are used", lambda given: given | {"betas": [0.9, 0.999]}),
    ("β₁ and β₂ are exchanged", lambda given: given | {"betas": given["betas"][::-1]}),
    ("lr was given, and 0.001 is used", lambda given: given | {"lr": 1e-3}),
    ("eps was given, and 1e-8 is used", lambda given: given | {"eps": 1e-8}),
    ("the masters go uphill: master − lr · …", lambda given: given | {"lr": -given["lr"]}),
]


def half(x):
    """Rounded to float16."""
    with np.errstate(over="ignore"):
        return float64(np.asarray(x).astype(np.float16))


def counted_on(case, got, steps=range(1, 60)):
    """Whether t begins with so many steps, of optimizers that were there before."""
    mine = np.concatenate([np.ravel(m) for m in got["masters"][0]])
    first = case | {name: case[name][:1] for name in ("grads", "scales")}
    return np.isfinite(mine).all() and any(np.allclose(mine, np.concatenate([np.ravel(m) for m in adam(
        first, clock=lambda t, done=done: t + done)["masters"][0]]), rtol=1e-6, atol=2e-7 * np.abs(mine).max())
               for done in steps)


def only_16(case, got):
    """Whether all masters could as well be float16."""
    return all(np.array_equal(half(m), m) for step in got["masters"] for m in step)


def moments_in_16(case, got):
    """Whether m, v or both seem to be float16. What is nearly 0 there hangs on the last bit: nearer to what they would
    give than to the truth is near enough."""
    right, mine = (np.concatenate([np.ravel(m) for step in steps["masters"] for m in step])
                   for steps in (adam(case), got))
    for which in ((False, True), (True,), (False,)):
        theirs = adam(case, moment=lambda x, square, which=which: half(x) if square in which else x)["masters"]
        theirs = np.concatenate([np.ravel(m) for step in theirs for m in step])
        if np.abs(mine - theirs).max() <= 0.3 * np.abs(theirs - right).max():
            return True
    return False
