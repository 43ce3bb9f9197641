"""24.3 token by token, and what known mistakes would give. Slopes are complex steps through whatever is worked out."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

STEP = 1e-30
FAR = 21.0      # of logarithms
LOW = -800.0    # a logarithm of which exp is 0
CURVES = {"ratios": np.linspace(0.4, 1.8, 141), "low": 0.2, "high": 0.28}


# ---------------------------------------------------------------- cases

def cases(rng):
    found = []
    for rewards, group in (([1, 0, 0, 1, 0, 0, 0, 1], 4), ([0.1] * 3 + [3.0, 1.0, 0.5] + [0.7] * 3, 3),
                           ([2, 5, 5, 2, -1, -1], 2), (rng.normal(3, 2, 15), 5), ([0.1] * 6, 6), ([], 4),
                           ([98765.4] * 3 + [1.0, 2.0, 3.0], 3), (np.array([0.1, 0.7, 0.2, 0.4], np.float32), 2),
                           # Close together, but not equal. The means of fours are exact.
                           (1e8 + np.array([0, 1, 3, 0, 2, 2, 2, 2]), 4), (1e-12 * np.array([3, 0, 1, 2, 2, 2]), 3)):
        found.append({"what": "advantages", "rewards": np.array(rewards), "group": group})
    for (rows, time), low, high in (((4, 5), 0.2, 0.28), ((6, 3), 0.1, 0.6), ((2, 1), 0.3, 0.3)):
        old = -rng.gamma(2.0, 0.7, (rows, time))
        away = rng.uniform(0.05, 0.9, (rows, time)) * rng.choice([-1, 1], (rows, time))
        away[:, :2] = [[1.1, -1.1][:time]]
        away[1, -1] = 0
        a = rng.uniform(0.3, 2.0, rows) * (1 - 2 * (np.arange(rows) % 2))
        a[4:5] = 0
        found.append({"what": "clipped", "log_probs": old + away, "old": old, "a": a, "low": low, "high": high})
    old, reference = -rng.gamma(2.0, 0.7, (2, 2, 2))
    away = rng.uniform(FAR, 24, (2, 2)) * [1, -1]
    found.append({"what": "clipped", "log_probs": old + away, "old": old, "a": np.array([0.7, -1.3]), "low": 0.2,
                  "high": 0.28})
    found.append({"what": "k3", "log_probs": reference + away, "reference": reference})
    found.append({"what": "clipped", "log_probs": LOW + old + 0.1 * away / FAR, "old": LOW + old,
                  "a": np.array([0.7, -1.3]), "low": 0.2, "high": 0.28})
    found.append({"what": "k3", "log_probs": LOW + reference + 0.1 * away / FAR, "reference": LOW + reference})
    for shape in ((3, 4), (1, 2)):
        reference = -rng.gamma(2.0, 0.7, shape)
        found.append({"what": "k3", "log_probs": reference + rng.normal(0, 0.8, shape), "reference": reference})
    for scale, beta in ((2.0, 0.3), (0.5, 1.7), (1e4, 0.4)):
        four = -np.abs(scale * rng.normal(1, 1, (4, 6)))
        if scale > 100:     # margins of ±3600, and one that is near 0
            four[:, :3] = [[-9e3, -1, -1], [-1, -9e3, -2], [-1, -1, -3], [-1, -1, -1]]
        names = "chosen", "rejected", "reference_chosen", "reference_rejected"
        found.append({"what": "dpo", **dict(zip(names, four, strict=True)), "beta": beta})
    for groups, group, time, low, high, beta in ((3, 4, 6, 0.2, 0.28, 0.04), (2, 3, 5, 0.3, 0.15, 0.7),
                                                 (1, 2, 1, 0.1, 0.5, 0.0), (0, 3, 4, 0.2, 0.2, 0.1)):
        old = -rng.gamma(2.0, 0.7, (groups * group, time))
        rewards = rng.normal(1, 1, groups * group)
        found.append({"what": "token_losses", "log_probs": old + rng.normal(0, 0.4, old.shape), "old": old,
                      "reference": old + rng.normal(0, 0.5, old.shape), "rewards": rewards, "group": group, "low": low,
                      "high": high, "beta": beta})
    return [*found, {"what": "curves", **CURVES}]


# ---------------------------------------------------------------- rightly

def by_group(rewards, group):
    """Group by group."""
    found = []
    for at in range(0, len(rewards), group):
        r = np.array(rewards[at:at + group], float)
        found += ([0.0] * group if (r == r[0]).all() else
                  ((r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).sum() / (group - 1)) + 1e-4)).tolist())
    return np.array(found)


def between(x, low, high):
    return np.where(x.real < low, low, np.where(x.real > high, high, x))


def smaller(x, y):
    return np.where(x.real < y.real, x, y)


def surrogate(now, old, a, low, high):
    ratio = np.exp(now - old)
    return -smaller(ratio * a, between(ratio, 1 - low, 1 + high) * a)


def estimate(now, reference):
    return np.exp(reference - now) - 1 - (reference - now)


def preference(margin):
    """Of large ones by what the smaller of two exponentials leaves."""
    turned = np.where(margin.real < 0, -1, 1) * margin
    return np.log(1 + np.exp(-turned)) - np.where(margin.real < 0, margin, 0)


def margin(chosen, rejected, reference_chosen, reference_rejected, beta):
    return beta * ((chosen - reference_chosen) - (rejected - reference_rejected))


def stepped(function, now, *others):
    """(values, slopes) of a function, number by number."""
    found = function(now + 1j * STEP, *others)
    return np.real(found), np.broadcast_to(np.imag(found) / STEP, np.shape(now))


def run(case, advantage=by_group, gain=surrogate, slope=None, kl=estimate, kl_slope=None, away=margin, pairs=preference,
        pair_slope=None, settings=None, beside=None):
    """The outputs of one case; the keywords are the mistakes."""
    what = case["what"]
    case = case | (settings or {}) if what == "token_losses" else case

    def clipped(now, old, a, low, high):
        values, slopes = stepped(gain, now, old, a[:, None], low, high)
        if slope:
            slopes = slope(np.exp(now - old), a[:, None], low, high)
        return values, np.broadcast_to(slopes, now.shape)

    def k3(now, reference):
        values, slopes = stepped(kl, now, reference)
        return values, np.broadcast_to(kl_slope(np.exp(reference - now)), now.shape) if kl_slope else slopes

    with np.errstate(all="ignore"):
        if what == "curves":
            return {}
        if what == "advantages":
            return {"advantages": advantage(case["rewards"], case["group"]), "changed": []}
        if what == "clipped":
            losses, slopes = clipped(case["log_probs"], case["old"], case["a"], case["low"], case["high"])
        elif what == "k3":
            losses, slopes = k3(case["log_probs"], case["reference"])
        elif what == "dpo":
            others = [case[name] for name in ("rejected", "reference_chosen", "reference_rejected")]
            losses, slopes = stepped(lambda now: pairs(away(now, *others, case["beta"])), case["chosen"])
            if pair_slope:
                slopes = pair_slope(away(case["chosen"], *others, case["beta"]), case["beta"])
        else:
            a = advantage(case["rewards"], case["group"])
            gains = clipped(case["log_probs"], case["old"], a, case["low"], case["high"])
            kls = [case["beta"] * each for each in k3(case["log_probs"], case["reference"])]
            losses, slopes = beside(gains, kls) if beside else (x + y for x, y in zip(gains, kls, strict=True))
    return {"losses": losses, "slopes": slopes, "changed": []}


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def g(text, **how):
    return gives(text, lambda case: run(case, **how))


def adv(text, formula):
    """An advantage by a formula of groups (questions, group)."""
    def found(rewards, group):
        r = np.array(rewards, float).reshape(-1, group)
        return formula(r).reshape(-1) if r.size else np.zeros(0)
    return g(f"advantages: {text}", advantage=found)


def scaled(r, std=None, mean=None, eps=1e-4):
    """With equal groups' zeros."""
    mean = r.mean(1, keepdims=True) if mean is None else mean
    std = r.std(1, ddof=1, keepdims=True) if std is None else std
    return np.where((r == r[:, :1]).all(1, keepdims=True), 0.0, (r - mean) / (std + eps))


def turned(rewards, group):
    """Groups that don't stand one after another."""
    r = np.array(rewards, float).reshape(group, -1).T
    return scaled(r).T.reshape(-1)


def leave_one_out(r):
    return (r.sum(1, keepdims=True) - r) / (r.shape[1] - 1)


def token(text, function, **how):
    """A mistake of a token's loss; function(ρ, A, low, high)."""
    return g(f"clipped: {text}", gain=lambda now, old, a, low, high: function(np.exp(now - old), a, low, high), **how)


def t(text, beside):
    return g(f"token_losses: {text}", beside=beside)


def of_slope(text, function):
    return g(f"clipped: {text}", slope=function)


def outside(ratio, low, high):
    return (ratio < 1 - low) | (ratio > 1 + high)


def bitten(ratio, a, low, high):
    return np.where(a > 0, ratio > 1 + high, (a < 0) & (ratio < 1 - low))


def nan(case, got):
    return case["what"] == "advantages" and np.isnan(got["advantages"]).any()


def infinite(case, got):
    return case["what"] == "dpo" and not all(np.isfinite(got[name]).all() for name in ("losses", "slopes"))


def close(case):
    """Whether all rewards of the case are nearly equal."""
    return case["what"] == "advantages" and np.allclose(case["rewards"], case["rewards"][:1])


def taken_for_equal(case, got):
    """0 where rewards are close together, and right elsewhere."""
    found, right = np.asarray(got["advantages"]) if close(case) else None, truth(case).get("advantages")
    return found is not None and found.shape == right.shape and same(found, np.where(found == 0, 0, right), 1e-9)


def cancelled(case, got):
    found = got["advantages"]
    return close(case) and case["rewards"].max() > 1e5 and isinstance(found, np.ndarray) and np.isfinite(found).all()


def far(case, got):
    """Probabilities that lie far apart."""
    others = case.get({"clipped": "old", "k3": "reference"}.get(case["what"]))
    return others is not None and np.abs(case["log_probs"] - others).max() > FAR


def not_quite_0(case, got):
    """Right but for rounding errors where all rewards of a group are equal."""
    found, right = np.asarray(got.get("advantages")), truth(case).get("advantages")
    return right is not None and found.shape == right.shape and (found[right == 0] != 0).any() and same(
        np.where(right == 0, 0, found), right, 1e-9) and np.abs(found[right == 0]).max() < 1e-3


def near(case, got):
    if close(case):     # where float32 leaves nothing of the differences
        return getattr(got["advantages"], "dtype", None) == np.float32
    return all(same(np.asarray(got[name]), np.asarray(right), 1e-4) for name, right in truth(case).items()
               if name != "changed")


NOT_QUITE_0 = ("advantages: nearly 0, where all rewards of a group are equal: their mean may be rounded, so exactly 0 "
               "must be put there")

SIGNATURES = [
    when(lambda case, got: f"{', '.join(got['changed'])}: not what it was before the call; work on a copy",
         lambda case, got: got["changed"]),
    when(lambda case, got: f"{case['what']}: nan where both log-probabilities are far below 0: a quotient of their "
         "exponentials is 0 / 0 there, and exp of the difference is what it should be", lambda case, got: case[
             "what"] in ("clipped", "k3") and case["log_probs"].max() < LOW / 2 and np.isnan(got["losses"]).any()),
    when("dpo: a margin of ±1000 has an exponential that overflows, or a logarithm of 0: log(1 + exp(x)) is to be had "
         "without (np.logaddexp)", infinite),
    t("the KL is in the loss, but not in the slopes", lambda gains, kl: (gains[0] + kl[0], gains[1])),
    t("the KL is in the slopes, but not in the loss", lambda gains, kl: (gains[0], gains[1] + kl[1])),
    t("the KL is left out", lambda gains, kl: gains),
    t("the KL's sign: it is to become small, so it is added to the loss", lambda gains, kl: (gains[0] - kl[0],
                                                                                           gains[1] - kl[1])),
    g("token_losses: beta is left out", settings={"beta": 1.0}),
    g("token_losses: beta is 0.04, whatever was asked for", settings={"beta": 0.04}),
    g("token_losses: low and high are 0.2 and 0.28, whatever was asked for", settings={"low": 0.2, "high": 0.28}),
    g("advantages: the mean is over all answers, and so is the standard deviation: each question's answers are "
      "compared with each other",
      advantage=lambda rewards, group: scaled(np.array(rewards, float).reshape(1, -1)).reshape(-1) if len(rewards) else
      np.zeros(0)),
    adv("mean and standard deviation over the wrong axis: over questions, where they are to be over the answers to one",
        lambda r: (r - r.mean(0)) / (np.sqrt(((r - r.mean(0)) ** 2).sum(0) / np.float64(len(r) - 1)) + 1e-4)),
    g("advantages: a group's answers stand one after another: reshape(-1, group), not (group, -1)", advantage=turned),
    adv("the standard deviation is that of a sample: divided by group - 1 (ddof=1)", lambda r: scaled(
        r, r.std(1, keepdims=True))),
    adv("the variance is taken for the standard deviation", lambda r: scaled(r, r.var(1, ddof=1, keepdims=True))),
    adv("the standard deviation is over all answers; it is the group's", lambda r: scaled(r, r.std(ddof=1))),
    adv("the mean is over all answers; it is the group's", lambda r: scaled(r, mean=r.mean())),
    adv("not divided by the standard deviation (Dr. GRPO leaves it out, for a reason; here it is asked for)",
        lambda r: scaled(r, 1.0, eps=0.0)),
    adv("EPSILON is left out: a group in which one reward is a little better than others gets advantages as large as "
        "any", lambda r: scaled(r, eps=0.0)),
    adv("the greater of the standard deviation and EPSILON is taken: their sum is asked for", lambda r: scaled(
        r, np.maximum(r.std(1, ddof=1, keepdims=True), 1e-4), eps=0.0)),
    adv("EPSILON is added to the variance, under the root: it is added to the standard deviation", lambda r: scaled(
        r, np.sqrt(r.var(1, ddof=1, keepdims=True) + 1e-4), eps=0.0)),
    adv("the mean isn't taken away: then all answers to an easy question get likelier, the wrong ones too",
        lambda r: r / (r.std(1, ddof=1, keepdims=True) + 1e-4)),
    adv("the mean isn't taken away: then all answers to an easy question get likelier, the wrong ones too",
        lambda r: scaled(r, mean=0.0)),
    adv("each answer is compared with the others only: asked for is the mean of the whole group", lambda r: scaled(
        r, mean=leave_one_out(r))),
    adv("compared with the best of the group: asked for is the mean", lambda r: scaled(
        r, mean=r.max(1, keepdims=True))),
    adv("the sign: mean - reward makes bad answers likelier", lambda r: -scaled(r)),
    when("advantages: nan where all rewards of a group are equal: such a group teaches nothing, so exactly 0; and "
         "EPSILON is added to every group's standard deviation", nan),
    of_slope("the slope where nothing is clipped is -ρ A: the derivative of ρ by the log-probability is ρ itself (-A "
             "is right only as long as ρ is 1)", lambda r, a, low, high: np.where(bitten(r, a, low, high), 0.0, -a)),
    of_slope("the slope is 0 outside of the range on both sides: min takes the clipped one only on the side where "
             "there is more gain", lambda r, a, low, high: np.where(outside(r, low, high), 0.0, -r * a)),
    of_slope("a clipped token's slope is 0: it gains nothing any more", lambda r, a, low, high: -r * a),
    of_slope("a clipped token has no slope: 1 + high and 1 - low are constants", lambda r, a, low, high: -between(
        r, np.where(a < 0, 1 - low, -np.inf), np.where(a > 0, 1 + high, np.inf)) * a),
    of_slope("the clip is on the wrong side: with A > 0 nothing is gained above 1 + high, with A < 0 below 1 - low",
             lambda r, a, low, high: np.where(np.where(a > 0, r < 1 - low, r > 1 + high), 0.0, -r * a)),
    of_slope("A < 0: there the slope is 0 below 1 - low; this one is as if all A were above 0", lambda r, a, low, high:
             np.where(r > 1 + high, 0.0, -r * a)),
    of_slope("the slope's sign: a better answer's tokens are to become likelier", lambda r, a, low, high: np.where(
        bitten(r, a, low, high), 0.0, r * a)),
    of_slope("A is left out of the slope", lambda r, a, low, high: np.where(bitten(r, a, low, high), 0.0, -r)),
    of_slope("all slopes are 0: old is a constant, log_probs isn't", lambda r, a, low, high: 0 * r),
    token("the sign: what is to grow is the gain, so its negative is the loss", lambda r, a, low, high: smaller(
        r * a, between(r, 1 - low, 1 + high) * a)),
    token("the greater of the two is taken, by which nothing is ever held back where it should be: min",
          lambda r, a, low, high: -smaller(r * a, between(r, 1 - low, 1 + high) * a) - np.abs(
              (r - between(r, 1 - low, 1 + high)).real) * np.abs(a) * 1.0,
          slope=lambda r, a, low, high: np.where(np.where(a > 0, r < 1 - low, r > 1 + high), 0.0, -r * a)),
    token("the clipped ratio alone: min with ρ A is missing. A good answer's token that has become less likely must "
          "not lose its slope", lambda r, a, low, high: -between(r, 1 - low, 1 + high) * a),
    token("nothing is clipped", lambda r, a, low, high: -r * a),
    token("the minimum of ratios, which is multiplied by A then: with A < 0 that is the greater product, and the clip "
          "is on the wrong side", lambda r, a, low, high: -smaller(r, between(r, 1 - low, 1 + high)) * a),
    token("low and high have changed places: 1 - low and 1 + high", lambda r, a, low, high: -smaller(
        r * a, between(r, 1 - high, 1 + low) * a)),
    token("above, `high` is meant: 1 + high", lambda r, a, low, high: -smaller(
        r * a, between(r, 1 - low, 1 + low) * a)),
    token("below, `low` is meant: 1 - low", lambda r, a, low, high: -smaller(
        r * a, between(r, 1 - high, 1 + high) * a)),
    token("good answers' tokens are clipped from above, but bad ones' not from below", lambda r, a, low, high: -smaller(
        r * a, between(r, -1e300, 1 + high) * a)),
    token("bad answers' tokens are clipped from below, but good ones' not from above", lambda r, a, low, high: -smaller(
        r * a, between(r, 1 - low, 1e300) * a)),
    token("clipped to between 1/(1 + low) and 1 + high", lambda r, a, low, high: -smaller(
        r * a, between(r, 1 / (1 + low), 1 + high) * a)),
    token("clipped between low and high: between 1 - low and 1 + high", lambda r, a, low, high: -smaller(
        r * a, between(r, low, high) * a)),
    token("ρ is upside down: the probability now over the old one", lambda r, a, low, high: -smaller(
        a / r, between(1 / r, 1 - low, 1 + high) * a)),
    token("ρ is upside down: the probability now over the old one", lambda r, a, low, high: -smaller(
        a / r, between(1 / r, 1 - low, 1 + high) * a),
        slope=lambda r, a, low, high: np.where(bitten(1 / r, a, low, high), 0, -a / r)),
    token("ρ is a difference of logarithms: exp of it", lambda r, a, low, high: -smaller(
        np.log(r) * a, between(np.log(r), 1 - low, 1 + high) * a)),
    token("the logarithm of ρ is what is multiplied by A: ρ itself", lambda r, a, low, high: -smaller(
        np.log(r) * a, np.log(between(r, 1 - low, 1 + high)) * a)),
    token("the size of A alone counts: a bad answer's tokens are made likelier", lambda r, a, low, high: -smaller(
        r * np.abs(a), between(r, 1 - low, 1 + high) * np.abs(a))),
    g("k3: its slope is that of k1, 1", kl_slope=lambda r: np.ones_like(r)),
    g("k3: the slope's sign: r falls where log_probs grows", kl_slope=lambda r: r - 1),
    g("k3: log r has a slope, too: 1 - r", kl_slope=lambda r: -r),
    g("k3: its slope is 0, as if log_probs were a constant", kl_slope=lambda r: 0 * r),
    g("k3: its slope is that of k2, -log r", kl_slope=lambda r: -np.log(r)),
    g("k3: this slope is by the probability: by its logarithm, 1 - r", kl_slope=lambda r: 1 - 1 / r),
    g("k3: r is upside down: the reference's probability over the policy's", kl=lambda now, reference: np.exp(
        now - reference) - 1 - (now - reference), kl_slope=lambda r: 1 - 1 / r),
    g("k3: that is k1, the mean of which is right, too, but whose single values are below 0 half of the time",
      kl=lambda now, reference: now - reference),
    g("k3: that is k1 with the wrong sign", kl=lambda now, reference: reference - now),
    g("k3: that is k2, half the square of log r", kl=lambda now, reference: 0.5 * (reference - now) ** 2),
    g("k3: r is upside down: the reference's probability over the policy's", kl=lambda now, reference: np.exp(
        now - reference) - 1 - (now - reference)),
    g("k3: log r is added: r - 1 - log r is never below 0", kl=lambda now, reference: np.exp(reference - now) - 1 + (
        reference - now)),
    g("k3: the 1 is missing: where both are alike it must be 0", kl=lambda now, reference: np.exp(
        reference - now) - (reference - now)),
    g("k3: r - 1 alone: its mean is 0, whatever the two models are", kl=lambda now, reference: np.exp(
        reference - now) - 1),
    g("k3: the sum over the policy's own probability, p log(p / q), is over all tokens; these ones were drawn",
      kl=lambda now, reference: np.exp(now) * (now - reference)),
    g("dpo: the slope has beta in it: the margin has", pair_slope=lambda m, beta: -1 / (1 + np.exp(m))),
    g("dpo: the slope's sign: the chosen answer is to become likelier", pair_slope=lambda m, beta: beta / (
        1 + np.exp(m))),
    g("dpo: σ(margin) where σ(-margin) is right: pairs that are in the right order already count less",
      pair_slope=lambda m, beta: -beta / (1 + np.exp(-m))),
    g("dpo: σ(m) (1 - σ(m)) is the derivative of σ, not of its logarithm", pair_slope=lambda m, beta: -beta / (
        1 + np.exp(m)) / (1 + np.exp(-m))),
    g("dpo: what counts is how much likelier than by the reference they have become: the references are left out",
      away=lambda chosen, rejected, c, r, beta: beta * (chosen - rejected)),
    g("dpo: chosen and rejected have changed places in the margin", away=lambda chosen, rejected, c, r, beta: -margin(
        chosen, rejected, c, r, beta)),
    g("dpo: the references are added: their difference is taken away",
      away=lambda chosen, rejected, c, r, beta: beta * (chosen - rejected + c - r)),
    g("dpo: beta is left out of the margin", away=lambda chosen, rejected, c, r, beta: margin(
        chosen, rejected, c, r, 1)),
    g("dpo: divided by beta", away=lambda chosen, rejected, c, r, beta: margin(chosen, rejected, c, r, 1 / beta)),
    g("dpo: that is σ(-margin); its loss is -log σ(margin)", pairs=lambda m: np.exp(-np.logaddexp(0, m.real)),
      pair_slope=lambda m, beta: -beta / (1 + np.exp(m)) / (1 + np.exp(-m))),
    g("dpo: the sign: log σ is below 0, and a loss isn't", pairs=lambda m: -preference(m)),
    g("dpo: the loss is a hinge, max(0, 1 - margin)", pairs=lambda m: np.where(m.real < 1, 1 - m, 0)),
    when("advantages: 0 where rewards are close together: only where all of a group are equal, to the last digit",
         taken_for_equal),
    when("advantages: wrong where rewards are 10⁸ and a little more. Σ r² less n · mean² is the difference of two "
         "numbers of 10¹⁶, of which a float64 has the first 16 digits: square what is left when the mean is taken away",
         cancelled),
    when(NOT_QUITE_0, not_quite_0),
    when(lambda case, got: f"{case['what']}: only where probabilities lie far apart: is the difference of logarithms "
         "cut? exp is asked for whatever it is", far),
    when("nearly right: is something in float32, or a small number added?", near),
]


DEMANDS = [
    demand(NOT_QUITE_0, lambda case, got: case["what"] != "advantages" or (
               np.asarray(got["advantages"])[truth(case)["advantages"] == 0] == 0).all()),
]
