"""18.2: what a loss scaler does in some steps on several ranks, and what it does with a known mistake in it."""

import numpy as np

LOSS = 2.5
FINITE = "."
NAMES = ("scaled", "seen", "used", "scales", "refused")
# What goes wrong in a step: (on which rank, in which of its arrays, what is there).
FAULTS = {"o": (-1, 0, 1e9), "O": (0, -1, -1e9), "n": (0, 0, np.nan), "N": (-1, -1, np.nan),
          "f": (0, 0, 65504 / 1024)}      # no fault: with a factor of 1024 float16's largest number, which is finite


def draw(rng, ranks, pattern, shapes, size=1e-7, sign=True, clip=False, half=False, **settings):
    """A case: a step per letter of the pattern, "." or a fault.

    shapes  of the arrays of ranks 0, 1 …; of 3 ranks, whatever their number
    size    of the gradients; sign: whether they have both signs
    clip    whether the step's caller calls unscale_ first, halves what it finds there, and in step 2 calls it again
    half    whether the loss comes in float16
    """
    steps = [[[(rng.uniform(1, 3, shape) * (rng.choice([-1, 1], shape) if sign else 1) * size).astype(np.float32)
               for shape in of_rank] for of_rank in shapes] for _ in pattern]
    case = []
    for rank in range(ranks):
        grads = [[g.copy() for g in step[rank]] for step in steps]
        for letter, arrays in zip(pattern, grads, strict=True):
            if letter != FINITE:
                who, which, value = FAULTS[letter]
                if who % ranks == rank:
                    arrays[which].flat[arrays[which].size // 2] = value
        case.append({"grads": grads, "clip": clip, "half": half, "settings": settings,
                     "looked_at": [clip and letter == FINITE for letter in pattern]})
    return case


def cases(rng, ranks):
    small, uneven = [[(3, 2), (5,)]] * 3, [[(4,), (0,), (2, 3)], [], [(6,), (0,)]]
    if ranks == 2:
        uneven = uneven[::2]
    return [draw(rng, ranks, ".......", small, init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5,
                 growth_interval=3),
            draw(rng, ranks, "..o....n..O.N......", small, init_scale=2.0 ** 15, growth_factor=4.0,
                 backoff_factor=0.25, growth_interval=3),
            draw(rng, ranks, ".....o..", uneven, size=1.2, sign=False, clip=True, init_scale=2.0 ** 10,
                 growth_factor=1.5, backoff_factor=0.75, growth_interval=4),
            draw(rng, ranks, ".f..", [[(40,)], [(3,)], [(50,), (7,)]], size=10.0, sign=False, init_scale=1024.0,
                 growth_factor=2.0, backoff_factor=0.5, growth_interval=9),
            draw(rng, ranks, "..", [[(2,)], [], [(3,)]], half=True, init_scale=1024.0, growth_factor=2.0,
                 backoff_factor=0.5, growth_interval=9),
            draw(rng, ranks, "....", [[(2,)], [], [(3,)]], half=True, init_scale=2.0 ** 17, growth_factor=2.0,
                 backoff_factor=0.5, growth_interval=9),
            # far down, and far up
            draw(rng, ranks, "ooo..", small, size=1.0, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5,
                 growth_interval=9),
            draw(rng, ranks, ".....", small, size=1e-12, init_scale=2.0 ** 20, growth_factor=4.0, backoff_factor=0.5,
                 growth_interval=1)]


# ---------------------------------------------------------------- mistakes

def not_finite(grads):
    return any(not np.isfinite(g).all() for g in grads)


def any_rank(own):
    return [any(own)] * len(own)


def alone(own):
    return own


def all_ranks(own):
    return [all(own)] * len(own)


def in_float32(grad, factor):
    return (grad.astype(np.float64) / factor).astype(np.float32)


def as_it_is(grad, factor):
    return grad.astype(np.float32)


def multiplied(grad, factor):
    return grad.astype(np.float32) * np.float32(factor)


def largest(grads):
    return any((abs(g) >= 65504).any() or np.isnan(g).any() for g in grads)


def into_float16(grad, factor):
    return in_float32(grad, factor).astype(np.float16)


def by_float16(grad, factor):
    return grad / np.float16(factor)


def no_inf(grad, factor):
    return np.nan_to_num(in_float32(grad, factor), posinf=0, neginf=0)


def at_the_end(grad, factor):
    return np.nan_to_num(in_float32(grad, factor))


def counted(found, clean, interval):
    """(how many clean updates in a row there were now, whether the factor grows)."""
    clean = 0 if found else clean + 1
    return (0, True) if clean == interval else (clean, False)


def world(case, bad=not_finite, together=any_rank, divide=in_float32, again=lambda grad, factor: grad,
          second="raises", skips=True, settings=lambda given: given, factors=lambda given, found:
          given["backoff_factor"] if found else 1.0, counts=counted, stuck=False, product=np.float64):
    """What is asked for; the keywords are the mistakes.

    bad       a rank's arrays -> whether one holds inf or NaN
    together  [what each rank has found] -> what it goes by
    divide    a gradient by the factor; again: the same in step, where unscale_ has been called before
    second    what unscale_ does the second time: raises, divides, or nothing
    skips     whether a step is left out
    settings  those given -> those used
    factors   (settings, found) -> what a step does to the factor; counts: how long it stays, as `counted`
    stuck     whether what was found once is never forgotten
    product   the loss's dtype while it is scaled, where it comes in float16
    """
    used = [settings(rank["settings"]) for rank in case]
    factor, clean = [one["init_scale"] for one in used], [0] * len(case)
    found, out = [False] * len(case), [{name: [] for name in NAMES} for _ in case]
    with np.errstate(all="ignore"):
        for t in range(len(case[0]["grads"])):
            scaled = [float(product(LOSS * f)) if rank["half"] else LOSS * f
                      for f, rank in zip(factor, case, strict=True)]
            grads = [[(g * np.float32(s / LOSS)).astype(np.float16) for g in rank["grads"][t]]
                     for s, rank in zip(scaled, case, strict=True)]
            now = together([bad(of_rank) for of_rank in grads])
            found = [new or stuck and old for new, old in zip(now, found, strict=True)]
            for r, rank in enumerate(case):
                divided = [divide(g, factor[r]) for g in grads[r]]
                if rank["clip"] and t == 2 and second == "divides":
                    divided = [divide(g, factor[r]) for g in divided]
                out[r]["scaled"].append(scaled[r])
                out[r]["seen"].append(divided if rank["looked_at"][t] else None)
                out[r]["refused"].append(second == "raises" if rank["clip"] and t == 2 else None)
                if rank["clip"]:
                    divided = [again(g * g.dtype.type(0.5), factor[r]) for g in divided]
                out[r]["used"].append(None if found[r] and skips else divided)
                clean[r], grows = counts(found[r], clean[r], used[r]["growth_interval"])
                factor[r] *= factors(used[r], found[r]) * (used[r]["growth_factor"] if grows else 1.0)
                out[r]["scales"].append(factor[r])
    return out


def bounded(case, got):
    """Whether the factors are the right ones, but for a least or a greatest value."""
    pairs = [(rank["scales"], right["scales"]) for rank, right in zip(got, world(case), strict=True)]
    return any(mine != right for mine, right in pairs) and all(
        np.array_equal(mine, np.clip(right, min(mine), max(mine))) for mine, right in pairs)


def stepped(case, got):
    """Whether some rank has taken a step that was to be left out."""
    return any(mine is not None and right is None for rank, of_rank in zip(got, world(case), strict=True)
               for mine, right in zip(rank["used"], of_rank["used"], strict=True))


def undivided(case):
    """As if step did nothing where unscale_ wasn't called."""
    return None if case[0]["clip"] else world(case, divide=as_it_is, skips=False, factors=lambda given, found: 1.0,
                                              counts=unknowing)


def wrong_factor(case, got):
    """What is wrong with the first factor that is; "" where none is."""
    right, last = world(case), [rank["settings"]["init_scale"] for rank in case]
    for t in range(len(right[0]["scales"])):
        bad = any(of_rank["used"][t] is None for of_rank in right)
        for rank, (mine, of_rank) in enumerate(zip(got, right, strict=True)):
            if not np.isclose(mine["scales"][t], of_rank["scales"][t], rtol=1e-6):
                what = "with inf or NaN on some rank" if bad else "in which all is finite"
                return (f"after step {t + 1}, {what}, the factor goes from {last[rank]:g} to {mine['scales'][t]:g} on "
                        f"rank {rank}, and {of_rank['scales'][t]:g} is right: {case[0]['settings']}".replace("'", ""))
        last = [of_rank["scales"][t] for of_rank in right]
    return ""


def unknowing(found, clean, interval):
    """As if no step had been left out."""
    return counted(False, clean, interval)


def never_reset(found, clean, interval):
    """Overflows don't begin the count anew."""
    clean += not found
    return (0, True) if clean == interval else (clean, False)


def all_counted(found, clean, interval):
    """Steps that were left out count as well."""
    return (0, True) if clean + 1 == interval else (clean + 1, False)


def grows_on(found, clean, interval):
    """Growth doesn't begin the count anew, and from the interval on each step grows."""
    clean = 0 if found else clean + 1
    return clean, clean >= interval


def grows_once(found, clean, interval):
    """Growth doesn't begin the count anew, and comes only once."""
    clean = 0 if found else clean + 1
    return clean, clean == interval


def one_later(found, clean, interval):
    clean = 0 if found else clean + 1
    return (0, True) if clean > interval else (clean, False)


def every_step(found, clean, interval):
    return 0, not found


def never(found, clean, interval):
    return 0, False
