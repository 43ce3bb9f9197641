"""23.3 by trying, and what known mistakes would give."""

import functools
import math

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

MEASURED = [2 ** k for k in range(3, 14)]      # batches of the picture's quadratic
TRIED = [24, 3000]      # batches at which all that have a job are asked for steps and samples as well
TWO = 32, 1024                             # those from which the curve is found


# ---------------------------------------------------------------- a training whose expected loss is known

@functools.cache
def measured():
    """{batch: steps} to a loss, at the best of many rates, of SGD on a quadratic with noise; without drawing any.

    Of E x² each step makes (1 - ε h)² E x² + 10 ε² h/B, where h is the curvature, and the noise's variance is 10 h (as
    in Zhang et al. 2019).
    """
    curvature = 1 / np.arange(1, 31)
    rates, batch = np.geomspace(0.002, 1.8, 40)[:, None, None], np.array(MEASURED)[:, None]
    spread, needed = np.ones((40, len(MEASURED), 30)) * 30.0, np.full((40, len(MEASURED)), np.inf)
    for step in range(1, 4000):
        spread = (1 - rates * curvature) ** 2 * spread + 10 * rates ** 2 * curvature / batch
        there = 0.5 * (curvature * spread).sum(-1) < 0.6
        needed[there & np.isinf(needed)] = step
        if step % 100 == 0 and np.isfinite(needed.min(0)).all() and step > needed.min(0).max():
            break
    return dict(zip(MEASURED, needed.min(0).tolist(), strict=True))


# ---------------------------------------------------------------- cases

def job(rng):
    return [float(rng.uniform(200, 900)), float(rng.uniform(2e4, 9e4))]


def cases(rng):
    found = []
    for batch in (1, int(rng.integers(20, 60)), int(rng.integers(300, 900))):
        one = {"job": job(rng)}
        found += [one | {"what": "steps", "more": [batch]}, one | {"what": "samples", "more": [batch]}]
    found.append({"what": "critical", "job": job(rng), "more": []})
    for b1, b2 in ((8, 64), (700, 30)):
        s, e = job(rng)
        found.append({"what": "of_two", "more": [[b1, s + e / b1], [b2, s + e / b2]]})
    found += [{"what": "of_two", "more": runs} for runs in (
        [[8, 50.25], [64, 6.5]], [[8, 100.0], [64, 12.0]],
        [[64, 15.0], [8, 14.0]], [[10, 80.0], [20, 90.0]], [[8, 800.0], [64, 100.0]])]
    for low, high, largest in ((3, 9, 4000), (200, 900, 4000), (1e-5, 1e-4, 4000), (1e6, 2e6, 4000), (20, 60, 7),
                               (2, 3, 1)):
        price = float(rng.uniform(0.1, 2))
        found.append({"what": "cheapest", "job": job(rng), "more": [price * float(rng.uniform(low, high)), price,
                                                                    largest]})
    found += [{"what": "cheapest", "job": job(rng), "more": more} for more in ([1.5, 0.0, 321], [0.0, 0.2, 321])]
    found += [{"what": "cheapest", "job": [s, s * root * root], "more": [1.0, 1.0, 4000]}      # best: b < root < b + 1
              for s, root in ((300.0, 1.39), (300.0, 1.43), (300.0, 1.6), (200.0, 7.47), (200.0, 7.492))]
    found.append({"what": "cheapest", "job": [2.0, 8e6], "more": [3.0, 1.0, 10 ** 12]})
    far = int(rng.integers(2e6, 3e6)) + 0.75      # where nobody looks who tries one batch after the other
    found.append({"what": "cheapest", "job": [2.0, 8e6], "more": [far ** 2 * 2.0 / 8e6, 1.0, 10 ** 12]})
    for batch, new in ((32, 256), (500, 20)):
        found.append({"what": "sgd_rate", "more": [float(rng.uniform(0.01, 0.5)), batch, new,
                                                   float(rng.uniform(60, 200))]})
    found.append({"what": "sgd_rate", "more": [0.3, 64, 512, 0.0]})
    for batch, new, betas in ((64, 256, [0.9, 0.99]), (256, 32, [0.8, 0.999]), (8, 64, [0.875, 0.96]),
                              (10, 101, [0.9, 0.999]), (10, 90, [0.95, 0.88])):
        found.append({"what": "adam_settings", "more": [float(rng.uniform(1e-3, 1e-2)), betas, 1e-8, batch, new]})
    steps = measured()
    found = [case | {"tried": TRIED} if "job" in case else case for case in found]
    return [*found, {"what": "lines", "batches": MEASURED, "two": [[b, steps[b]] for b in TWO],
                     "prices": [8.0, 64.0, 512.0]}]


# ---------------------------------------------------------------- rightly, and with mistakes

def steps(case):
    """The greater root of the equation, which is quadratic in S."""
    (s, e), b = case["job"], case["more"][0]
    return float(np.roots([b, -(e + s * b), 0]).max().real)


def samples(case):
    return case["more"][0] * steps(case)


def critical(case):
    """Where both are twice the fewest."""
    s, e = case["job"]
    return 2 * e / (2 * s)


def of_two(case):
    """By Cramer's rule."""
    (b1, s1), (b2, s2) = case["more"]
    found = np.linalg.solve([[1, 1 / b1], [1, 1 / b2]], [s1, s2])
    return [float(x) for x in found] if found.min() > 1e-9 else None


def costs(case, batch):
    (s, e), (per_step, per_sample) = case["job"], case["more"][:2]
    return per_step * (s + e / batch) + per_sample * (e + s * batch)


def cheapest(case):
    """Of all that come into question."""
    (s, e), (per_step, per_sample, largest) = case["job"], case["more"]
    around = int(np.sqrt(per_step * e / (per_sample * s))) if per_sample else 1      # where the two parts are equal
    batches = np.unique(np.r_[1:min(largest, 20_000) + 1, np.clip(np.arange(-9, 10) + around, 1, largest)])
    return int(batches[np.argmin(costs(case, batches))])


def sgd_rate(case):
    lr, batch, new, noise = case["more"]
    return lr * (noise / batch + 1) * new / (new + noise)


def adam_settings(case):
    lr, betas, eps, batch, new = case["more"]
    betas = [1 - (1 - beta) * new / batch for beta in betas]
    return [lr * (new / batch) ** 0.5, betas, eps * (batch / new) ** 0.5] if min(betas) > -1e-12 else None


RIGHT = {"steps": steps, "samples": samples, "critical": critical, "of_two": of_two, "cheapest": cheapest,
         "sgd_rate": sgd_rate, "adam_settings": adam_settings}


def truth(case):
    return {"result": RIGHT[case["what"]](case)} if case["what"] in RIGHT else {}


def f(what, text, formula):
    """A mistake of one function."""
    return gives(f"{what}: {text}", lambda case: {"result": formula(case)} if case["what"] == what else None)


def own(what, text, formula):
    """A mistake of critical, steps or samples, which the file's other functions may call; formula(S_min, E_min, B)."""
    def seen(case, got):
        if "own" not in got:
            return False
        expected = [formula(*case["job"], b) for b in case["tried"]]
        return all(same(x, y, 1e-9) for x, y in zip(got["own"][what], expected, strict=True))
    return when(f"{what}: {text}", seen)


def pair(formula):
    """Of two runs."""
    def found(case):
        (b1, s1), (b2, s2) = case["more"]
        job = formula(b1, s1, b2, s2)
        return [float(x) for x in job] if min(job) > 1e-9 else None
    return found


def unchecked(case):
    (b1, s1), (b2, s2) = case["more"]
    e = (s1 - s2) / (1 / b1 - 1 / b2)
    return [s1 - e / b1, e]


def not_below_0(case):
    return [max(x, 0.0) for x in unchecked(case)]


def batch(formula, whole=None, lowest=1):
    """A batch by a formula of (B_crit, per_step / per_sample), kept between 1 and largest. whole: how it is rounded."""
    def found(case):
        per_step, per_sample, largest = case["more"]
        best = formula(critical(case), per_step / per_sample if per_sample else math.inf)
        return max(lowest, (whole or by_cost(case, largest))(min(best, largest)))
    return found


def by_cost(case, largest):
    def whole(best):
        low = min(max(1, math.floor(best)), largest)
        return min((low, min(low + 1, largest)), key=lambda b: costs(case, b))
    return whole


def without_limit(case):
    """Still of the two whole numbers the cheaper one."""
    per_step, per_sample, largest = case["more"]
    return batch(best)(case | {"more": [per_step, per_sample, 10 ** 15]}) if per_sample else largest


def best(critical, ratio):
    return math.sqrt(ratio * critical)


def product_of_prices(case):
    per_step, per_sample, largest = case["more"]
    root = math.sqrt(per_step * per_sample * critical(case)) if per_sample else math.inf
    return by_cost(case, largest)(min(root, largest))


def nearest(x):
    return math.floor(x + 0.5)


def dearest(case):
    batches = np.arange(1, min(case["more"][2], 4000) + 1)
    return int(batches[np.argmax(costs(case, batches))])


def rate(formula):
    return lambda case: formula(*case["more"])


def adam(rate=math.sqrt, keep=lambda beta, k: 1 - k * (1 - beta), eps=lambda k: 1 / math.sqrt(k), none=None,
         checked=True):
    def found(case):
        lr, betas, small, batch, new = case["more"]
        k = new / batch
        kept = [keep(beta, k) for beta in betas]
        return [lr * rate(k), kept, small * eps(k)] if min(kept) > -1e-12 or not checked else none
    return found


def at_least_0(beta, k):
    return max(0.0, 1 - k * (1 - beta))


def first_only(case):
    lr, betas, eps, batch, new = case["more"]
    kept = [1 - new / batch * (1 - betas[0]), betas[1]]
    return [lr * math.sqrt(new / batch), kept, eps * math.sqrt(batch / new)] if kept[0] > -1e-12 else None


def second_only(case):
    lr, betas, eps, batch, new = case["more"]
    kept = [betas[0], 1 - new / batch * (1 - betas[1])]
    return [lr * math.sqrt(new / batch), kept, eps * math.sqrt(batch / new)] if kept[1] > -1e-12 else None


def strict(case):
    found = adam_settings(case)
    return None if found is None or min(found[1]) < 1e-12 else found


def near(case, got):
    return case["what"] != "cheapest" and same(got["result"], truth(case)["result"], 1e-2)


def ends_early(case, got):
    """Whether the best batch is far away and the answer one that is nearer, and still a long way off."""
    return case["what"] == "cheapest" and 0 < got["result"] < truth(case)["result"] / 1.01 > 1e5


SIGNATURES = [
    own("critical", "S_min / E_min: a batch is samples per step", lambda s, e, b: s / e),
    own("critical", "twice both is the same batch: 2 E_min / 2 S_min", lambda s, e, b: 2 * e / s),
    own("critical", "twice both is the same batch: 2 E_min / 2 S_min", lambda s, e, b: e / s / 2),
    own("critical", "the geometric mean of S_min and E_min; a batch is samples per step", lambda s, e, b: math.sqrt(
        s * e)),
    own("critical", "the root of E_min / S_min: nothing is squared here", lambda s, e, b: math.sqrt(e / s)),
    own("critical", "S_min · E_min: a batch is samples per step", lambda s, e, b: s * e),
    own("steps", "S_min (1 + B / B_crit): that grows with the batch, as samples do", lambda s, e, b: s + s * s * b
                                                                                        / e),
    own("steps", "E_min / B: that is perfect scaling, without a fewest number of steps", lambda s, e, b: e / b),
    own("steps", "the larger of S_min and E_min / B: there is no corner, the two are added", lambda s, e, b: max(
        s, e / b)),
    own("steps", "S_min / (1 + B_crit / B) is fewer than the fewest", lambda s, e, b: s / (1 + e / s / b)),
    own("steps", "the 1 in S / S_min - 1 is lost: S_min is missing once", lambda s, e, b: max(e / b - s, 0.0)),
    own("steps", "rounded up: nothing is rounded here", lambda s, e, b: math.ceil(s + e / b)),
    *(own("steps", "rounded down: nothing is rounded here", down) for down in (
        lambda s, e, b: math.floor(s + e / b), lambda s, e, b: s + e // b)),
    own("steps", "the fewest, whatever the batch: noise takes E_min / B more", lambda s, e, b: s),
    own("steps", "S_min - E_min / B is fewer than the fewest: the two are added", lambda s, e, b: s - e / b),
    own("steps", "E_min · B: the larger a batch, the fewer steps", lambda s, e, b: s + e * b),
    own("steps", "these are the samples", lambda s, e, b: e + s * b),
    own("samples", "E_min (1 + B_crit / B): that falls with the batch, as steps do", lambda s, e, b: e * (
        1 + e / s / b)),
    own("samples", "S_min · B: that many the fewest steps would take; E_min is missing", lambda s, e, b: s * b),
    own("samples", "E_min, whatever the batch: larger batches waste some", lambda s, e, b: e),
    *(own("samples", "the steps are rounded before they are multiplied by the batch: nothing is rounded here", of)
      for of in (lambda s, e, b: b * math.floor(s + e / b), lambda s, e, b: b * math.ceil(s + e / b),
                 lambda s, e, b: b * round(s + e / b))),
    own("samples", "steps / batch: each step takes a batch, so steps times batch", lambda s, e, b: (s + e / b) / b),
    own("samples", "E_min · B: E_min are samples already, and each of the fewest steps adds B", lambda s, e, b: e * b),
    own("samples", "these are the steps", lambda s, e, b: s + e / b),
    own("samples", "E_min + B: each of the fewest steps has B", lambda s, e, b: e + b),
    own("samples", "the larger of E_min and S_min · B: there is no corner, the two are added",
        lambda s, e, b: max(e, s * b)),
    f("of_two", "the two runs contradict each other there: None, where S_min or E_min isn't above 0", unchecked),
    f("of_two", "what isn't above 0 is no 0 either: such runs aren't of one goal. None", not_below_0),
    f("of_two", "the slope's sign: with a larger B, 1/B and the steps are both less, so E_min is above 0", pair(
        lambda b1, s1, b2, s2: (s1 + (s1 - s2) / (1 / b1 - 1 / b2) / b1, -(s1 - s2) / (1 / b1 - 1 / b2)))),
    f("of_two", "what is below 0 is taken without its sign: such runs aren't of one goal. None", lambda case: [
        abs(x) for x in unchecked(case)]),
    f("of_two", "E_min / B of the other run is taken from a run's steps: each has its own batch", pair(
        lambda b1, s1, b2, s2: (s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b2, (s1 - s2) / (1 / b1 - 1 / b2)))),
    f("of_two", "rounded to whole numbers: nothing is rounded here", pair(lambda b1, s1, b2, s2: [
        round(x) for x in (s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b1, (s1 - s2) / (1 / b1 - 1 / b2))])),
    f("of_two", "a line through the steps over B: they are a line over 1/B", pair(lambda b1, s1, b2, s2: (
        s1 - (s2 - s1) / (b2 - b1) * b1, (s2 - s1) / (b2 - b1)))),
    f("of_two", "a power of the batch: that has no fewest steps at all. S is a line over 1/B", pair(
        lambda b1, s1, b2, s2: (s1 * b1 ** (-math.log(s2 / s1) / math.log(b2 / b1)), -math.log(s2 / s1) / math.log(
            b2 / b1)))),
    f("of_two", "S_min and E_min have changed places", pair(lambda b1, s1, b2, s2: (
        (s1 - s2) / (1 / b1 - 1 / b2), s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b1))),
    f("of_two", "a Job's second number is E_min, the samples; here stands E_min / S_min, which is B_crit", pair(
        lambda b1, s1, b2, s2: (s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b1, (s1 - s2) / (1 / b1 - 1 / b2) / (
            s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b1)))),
    f("of_two", "the fewer of the two runs' steps, and the fewer of their samples: they are fewer still with larger, "
      "and with smaller batches", pair(lambda b1, s1, b2, s2: (min(s1, s2), min(b1 * s1, b2 * s2)))),
    f("of_two", "S_min is a run's steps: E_min / B of them are for the noise", pair(lambda b1, s1, b2, s2: (
        min(s1, s2), (s1 - s2) / (1 / b1 - 1 / b2)))),
    f("of_two", "E_min is a run's samples: S_min · B of them are for the batch's size", pair(lambda b1, s1, b2, s2: (
        s1 - (s1 - s2) / (1 / b1 - 1 / b2) / b1, min(b1 * s1, b2 * s2)))),
    f("cheapest", "at B_crit, whatever the prices: that is best where a step costs as much as B_crit samples",
      batch(lambda c, ratio: c)),
    f("cheapest", "the prices have changed places: where time is dear, a large batch", batch(
        lambda c, ratio: best(c, 1 / ratio) if ratio else math.inf)),
    f("cheapest", "B_crit · price of a step / price of a sample is B²: take the root", batch(
        lambda c, ratio: c * ratio)),
    f("cheapest", "the root is of the prices and of B_crit: dimensions must be samples", batch(
        lambda c, ratio: c * math.sqrt(ratio))),
    f("cheapest", "the batch at which both cost the same, without B_crit: it is a mean of that and of B_crit", batch(
        lambda c, ratio: ratio)),
    f("cheapest", "the price of a step is left out of the root", batch(lambda c, ratio: math.sqrt(c))),
    f("cheapest", "B_crit is left out of the root", batch(lambda c, ratio: math.sqrt(ratio))),
    f("cheapest", "the prices are multiplied under the root: their quotient stands there",
      product_of_prices),
    f("cheapest", "divided by B_crit under the root: times B_crit", batch(
        lambda c, ratio: math.sqrt(ratio / c))),
    when(lambda case, got: f"cheapest: with the best batch far away it is {got['result']:,} here: the search ends too "
                           "early, or its steps grow. largest may be 10¹², and a formula leaves two to be compared",
         ends_early),
    f("cheapest", "the largest batch, whatever the prices: samples cost something", lambda case: case["more"][2]),
    f("cheapest", "the smallest batch, whatever the prices: steps cost something", lambda case: 1),
    f("cheapest", "rounded to the nearest: of the two whole numbers around it the cheaper one is asked for (costs grow "
      "more slowly above than below)", batch(best, nearest)),
    f("cheapest", "rounded down: of the two whole numbers around it the cheaper one is asked for", batch(best,
                                                                                                     math.floor)),
    f("cheapest", "rounded up: of the two whole numbers around it the cheaper one is asked for", batch(best,
                                                                                                   math.ceil)),
    f("cheapest", "a batch is an int", batch(best, float)),
    f("cheapest", "more than `largest`", without_limit),
    f("cheapest", "a batch of 0 samples: it is 1 at least", batch(best, math.floor, lowest=0)),
    f("cheapest", "the dearest of all: the least of the costs is asked for", dearest),
    f("sgd_rate", "linear, whatever the noise: once the batch is well above it, a larger one changes nothing", rate(
        lambda lr, b, new, noise: lr * new / b)),
    f("sgd_rate", "√ of the batch: that is Adam's", rate(lambda lr, b, new, noise: lr * math.sqrt(new / b))),
    f("sgd_rate", "a larger batch gets a lower rate here: noise / batch is what holds it back", rate(
        lambda lr, b, new, noise: lr * (1 + noise / new) / (1 + noise / b))),
    f("sgd_rate", "lr is taken for that of endless batches: it is the best for those of `batch`, so first multiply by "
      "1 + noise / batch", rate(lambda lr, b, new, noise: lr / (1 + noise / new))),
    f("sgd_rate", "that is the rate of endless batches: divide by 1 + noise / new", rate(
        lambda lr, b, new, noise: lr * (1 + noise / b))),
    f("sgd_rate", "batch / noise for noise / batch: the more noise the lower the rate", rate(
        lambda lr, b, new, noise: lr * (1 + new / noise if noise else math.inf) / (1 + b / noise if noise else 1))),
    f("sgd_rate", "linear up to the noise scale, and then none: there is no corner", rate(
        lambda lr, b, new, noise: lr * min(new, noise) / min(b, noise) if noise else lr)),
    f("sgd_rate", "both factors are multiplied: first to endless batches, and from there back, by a division", rate(
        lambda lr, b, new, noise: lr * (1 + noise / b) * (1 + noise / new))),
    f("sgd_rate", "(batch + noise) / (new + noise) lacks the quotient of the batches: 1 + noise / B is (B + noise) / B",
      rate(lambda lr, b, new, noise: lr * (b + noise) / (new + noise))),
    f("sgd_rate", "(new + noise) / (batch + noise): the rate would grow without an end", rate(
        lambda lr, b, new, noise: lr * (new + noise) / (b + noise))),
    f("sgd_rate", "noise is divided by κ: it is measured in samples, and each of the two batches has its own quotient",
      rate(lambda lr, b, new, noise: lr / (1 + noise * b / new))),
    f("sgd_rate", "linear up to the rate of endless batches, and then none: there is no corner", rate(
        lambda lr, b, new, noise: lr * min(new / b, 1 + noise / b))),
    f("sgd_rate", "the 1 is lost: noise / batch alone is linear", rate(lambda lr, b, new, noise: lr * new / b if noise
                                                                      else math.nan)),
    f("sgd_rate", "nothing changes: where noise is most of a gradient, a larger batch bears a larger rate", rate(
        lambda lr, b, new, noise: lr)),
    f("adam_settings", "a β of 0 is one that remembers nothing, and not below 0", strict),
    f("adam_settings", "the rate is linear in κ: that is SGD's. Adam divides by the noise, which gets smaller by √κ",
      adam(rate=lambda k: k)),
    f("adam_settings", "the rate stays", adam(rate=lambda k: 1)),
    f("adam_settings", "κ is new / batch, not batch / new", adam(lambda k: math.sqrt(1 / k), lambda beta, k: 1 - (
        1 - beta) / k, lambda k: math.sqrt(k))),
    f("adam_settings", "the rate is divided by √κ: a larger batch bears a larger rate", adam(
        rate=lambda k: 1 / math.sqrt(k))),
    f("adam_settings", "the β stay: then κ times as many samples are remembered", adam(keep=lambda beta, k: beta)),
    f("adam_settings", "β ** κ is what κ steps would remember, and nearly that; the rule is 1 - κ (1 - β)", adam(
        keep=lambda beta, k: beta ** k)),
    f("adam_settings", "the κ-th root of β: that forgets more slowly; what is forgotten, 1 - β, is κ times as much",
      adam(keep=lambda beta, k: beta ** (1 / k))),
    f("adam_settings", "β1 and β2 have changed places", lambda case: (found := adam_settings(case)) and [
        found[0], found[1][::-1], found[2]]),
    f("adam_settings", "κ · β: it is what is forgotten, 1 - β, that is κ times as much", adam(
        keep=lambda beta, k: k * beta)),
    f("adam_settings", "κ · β: it is what is forgotten, 1 - β, that is κ times as much", adam(
        keep=lambda beta, k: 1 - k * beta, checked=False)),
    f("adam_settings", "κ · β: it is what is forgotten, 1 - β, that is κ times as much", adam(
        keep=lambda beta, k: 1 - k * beta)),
    f("adam_settings", "1 - β is divided by κ: a larger batch must forget faster, in steps", adam(
        keep=lambda beta, k: 1 - (1 - beta) / k)),
    f("adam_settings", "1 - β goes with √κ: the number of samples that are remembered would change", adam(
        keep=lambda beta, k: 1 - math.sqrt(k) * (1 - beta))),
    f("adam_settings", "these are 1 - β, not β", adam(keep=lambda beta, k: k * (1 - beta), checked=False)),
    f("adam_settings", "only β1 is changed", first_only),
    f("adam_settings", "only β2 is changed", second_only),
    f("adam_settings", "eps stays: what it is added to is the noise, and 1/√κ times as large", adam(eps=lambda k: 1)),
    f("adam_settings", "eps is multiplied by √κ: what it is added to gets smaller", adam(eps=math.sqrt)),
    f("adam_settings", "eps is multiplied by κ: what it is added to is 1/√κ times as large", adam(eps=lambda k: k)),
    f("adam_settings", "eps is divided by κ: what it is added to is 1/√κ times as large", adam(eps=lambda k: 1 / k)),
    f("adam_settings", "a β below 0 is no average: None there", adam(checked=False)),
    f("adam_settings", "a β that would be below 0 is set to 0: then it isn't the same training. None there", adam(
        keep=at_least_0)),
    when("nearly right: is something rounded?", near),
]

DEMANDS = [
    demand("all right by itself, but of two runs of SGD on a quadratic of_two finds no job", lambda case, got: case[
        "what"] != "lines" or "steps" in got),
]
