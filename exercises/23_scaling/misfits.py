"""The known mistakes of 23.4."""

import math

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from .laws import DELTA, FAR, NAMES, exact, huber, log_law, objective, optimal, refitted, residual, value

# ---------------------------------------------------------------- of the objective


def beyond(case):
    """Whether it is one of the starts where exponentials overflow."""
    return np.abs(case["theta"]).max() > 50


def o(text, **how):
    return gives("objective: " + text, lambda case: objective(case, **how) if case["what"] == "objective" else None)


def seen(text, **how):
    """The same where overflow makes of it what nobody can predict."""
    def alike(case, got):
        return case["what"] == "objective" and (beyond(case) or same(
            got["value"], objective(case, **how)["value"], 1e-9))
    return when("objective: " + text, alike)


def slopes(formula):
    """A wrong gradient beside the right value; formula(slope of Huber, shares (3, runs), log N, log D, r)."""
    def change(case, value, gradient):
        n, d, theta = np.log(case["n"]), np.log(case["d"]), case["theta"]
        terms = np.stack([theta[0] - theta[3] * n, theta[1] - theta[4] * d, theta[2] + 0 * n])
        shares = np.exp(terms - terms.max(0))
        r = np.real(residual(theta, case["n"], case["d"], case["losses"]))
        return value, np.array(formula(np.clip(r, -DELTA, DELTA), shares / shares.sum(0), n, d, r), float)
    return {"change": change}


def gradient(slope, shares, n, d, sign=-1):
    one = slope * shares
    return [*one.sum(1), sign * (one[0] @ n), sign * (one[1] @ d)]


def of_losses(theta, n, d, losses):
    return np.exp(log_law(theta, n, d)) - losses


def less_losses(theta, n, d, losses):
    return log_law(theta, n, d) - losses


def top_twice(theta, n, d, losses):
    a, b, e, alpha, beta = theta
    return log_law(theta, n, d) + np.maximum.reduce([a - alpha * np.log(n), b - beta * np.log(d), e + 0 * n]) - np.log(
        losses)


def tens(theta, n, d, losses):
    """Powers of ten's logarithms."""
    return log_law(theta, np.exp(np.log10(n)), np.exp(np.log10(d))) - np.log(losses)


def plus(theta, n, d, losses):
    return log_law([*theta[:3], -theta[3], -theta[4]], n, d) - np.log(losses)


def plain_e(theta, n, d, losses):
    with np.errstate(all="ignore"):
        found = np.abs(theta[2]) + np.exp(theta[0]) / n ** theta[3] + np.exp(theta[1]) / d ** theta[4]
        return np.log(found) - np.log(losses)


def swapped(theta, n, d, losses):
    return residual(theta, d, n, losses)


def added_logs(theta, n, d, losses):
    """As if the logarithm of a sum were that of a product."""
    a, b, e, alpha, beta = theta
    return a - alpha * np.log(n) + b - beta * np.log(d) + e - np.log(losses)


def largest_only(theta, n, d, losses):
    a, b, e, alpha, beta = theta
    return np.maximum.reduce([a - alpha * np.log(n), b - beta * np.log(d), e + 0 * n]) - np.log(losses)


def pseudo(r):
    return DELTA ** 2 * (np.sqrt(1 + (r / DELTA) ** 2) - 1)


def pieces(below, above):
    """Huber with other pieces, of |r|."""
    def loss(r):
        size = r * np.sign(np.real(r))
        return np.where(np.real(size) <= DELTA, below(size), above(size))
    return {"loss": loss}


def not_finite(case, got):
    return case["what"] == "objective" and beyond(case) and not (
        np.isfinite(got["value"]) and np.isfinite(got["gradient"]).all())


OBJECTIVE = [
    when("objective: inf or nan where exponentials overflow, or all are 0. Take each run's largest exponent "
         "away from its three, and add it to the logarithm (logsumexp)", not_finite),
    o("the gradient's sign: r grows with a", change=lambda case, value, gradient: (value, -gradient)),
    o("the gradient is that of squares: beyond DELTA, Huber's slope is DELTA or -DELTA",
      **slopes(lambda slope, shares, n, d, r: gradient(r, shares, n, d))),
    o("Huber's slope within DELTA is r, not DELTA or -DELTA", **slopes(
        lambda slope, shares, n, d, r: gradient(DELTA * np.sign(r), shares, n, d))),
    o("the gradient has no log N and log D: α stands before log N in its exponent", **slopes(
        lambda slope, shares, n, d, r: gradient(slope, shares, np.ones_like(n), np.ones_like(d)))),
    o("the gradient's sign for α and β: with a larger α the term gets smaller", **slopes(
        lambda slope, shares, n, d, r: gradient(slope, shares, n, d, 1))),
    o("the gradient lacks the terms' shares of the sum: log(x + y + z) changes with log x by x / (x + y + z)", **slopes(
        lambda slope, shares, n, d, r: gradient(slope, np.ones_like(shares), n, d))),
    o("the gradient's exponentials aren't divided by their sum", **slopes(lambda slope, shares, n, d, r: gradient(
        slope, shares / shares.max(0), n, d))),
    o("the gradient's order: theta is (a, b, e, α, β)", change=lambda case, value, gradient: (
        value, gradient[[0, 1, 3, 4, 2]])),
    o("the gradient's order: theta is (a, b, e, α, β)", change=lambda case, value, gradient: (
        value, gradient[[2, 0, 1, 3, 4]])),
    o("the gradient is the mean's, and the value the sum", change=lambda case, value, gradient: (
        value, gradient / len(case["n"]))),
    o("squares: Huber goes on as a straight line where |r| is above DELTA, so that a run that went wrong doesn't pull",
      loss=lambda r: r * r / 2),
    o("|r|: within DELTA it is r²/2", loss=lambda r: DELTA * r * np.sign(np.real(r))),
    o("|r|: within DELTA it is r²/2, and beyond it DELTA (|r| - DELTA/2)", loss=lambda r: r * np.sign(np.real(r))),
    o("r² without its half: the pieces don't meet at DELTA", **pieces(
        lambda x: x * x, lambda x: DELTA * (x - DELTA / 2))),
    o("DELTA |r| without - DELTA²/2: the pieces don't meet at DELTA", **pieces(
        lambda x: x * x / 2, lambda x: DELTA * x)),
    o("DELTA is missing in front of the line: the pieces don't meet at DELTA", **pieces(
        lambda x: x * x / 2, lambda x: x - DELTA / 2)),
    o("the pieces are the wrong way round: squares where |r| is small", **pieces(
        lambda x: DELTA * (x - DELTA / 2), lambda x: x * x / 2)),
    o("Huber divided by DELTA: that is another loss's name (smooth L1)", loss=lambda r: huber(r) / DELTA),
    o("the pseudo-Huber loss, which is smooth; asked for is Huber's own", loss=pseudo),
    o("Huber with 1 for DELTA: nearly everything is a square then", loss=lambda r: huber(r, 1.0)),
    o("the mean over the runs; asked for is the sum", mean=True),
    seen("the losses' difference, not that of their logarithms: large losses would count more", of=of_losses),
    seen("log L of the law less the runs' losses: of these the logarithm is taken, too", of=less_losses),
    seen("the largest exponent is taken away twice, or added though it was never taken away: exp(z - m), and m + log "
         "of the sum", of=top_twice),
    seen("logarithms to base 10: exp undoes that to base e", of=tens),
    seen("N^α for 1 / N^α: with a larger model the loss falls", of=plus),
    seen("E is exp(e), as A and B: so it stays above 0", of=plain_e),
    seen("N and D have changed places", of=swapped),
    seen("the logarithm of a sum isn't the sum of logarithms: that would be a product", of=added_logs),
    seen("the largest of the three terms alone: L is their sum", of=largest_only),
    when("objective: the value is right, the gradient isn't: compare it with (value(theta + h) - value(theta - h)) / "
         "2h, one number of theta at a time", lambda case, got: case["what"] == "objective" and same(
             got["value"], objective(case)["value"], 1e-9)),
]


# ---------------------------------------------------------------- of loss and optimal

def law_of(text, formula):
    """formula(law, n, d)."""
    return gives("loss: " + text, lambda case: {"result": formula(case["law"], case["n"], case["d"])}
                 if case["what"] == "loss" else None)


def best(text, formula):
    """formula(law, C): (N, D)."""
    return gives("optimal: " + text, lambda case: {"result": [float(x) for x in formula(case["law"], case["compute"])]}
                 if case["what"] == "optimal" else None)


def closed(law, c, ratio=lambda e, a, b, alpha, beta: (alpha * a / (beta * b)) ** (1 / (alpha + beta)), per=6.0,
           power=lambda alpha, beta: beta / (alpha + beta)):
    """N, and what is left for D."""
    n = ratio(*law) * (c / per) ** power(*law[3:])
    return n, c / per / n


def swapped_results(law, c):
    return closed(law, c)[::-1]


def tokens_without_6(law, c):
    n, _ = closed(law, c)
    return n, c / n


LAWS = [
    law_of("without E", lambda law, n, d: exact([0.0, *law[1:]], n, d)),
    law_of("powers above 0: with larger N and D the loss falls", lambda law, n, d: exact(
        [*law[:3], -law[3], -law[4]], n, d)),
    law_of("N and D have changed places", lambda law, n, d: exact(law, d, n)),
    law_of("α and β have changed places", lambda law, n, d: exact([*law[:3], law[4], law[3]], n, d)),
    law_of("α stands at both, N and D: D has β", lambda law, n, d: exact([*law[:4], law[3]], n, d)),
    law_of("β stands at both, N and D: N has α", lambda law, n, d: exact([*law[:3], law[4], law[4]], n, d)),
    law_of("(A/N)^α: A isn't under the power", lambda law, n, d: law[0] + (law[1] / n) ** law[3] + (
        law[2] / d) ** law[4]),
    law_of("that is log L", lambda law, n, d: np.log(exact(law, n, d))),
    law_of("the two terms are multiplied: each is for itself", lambda law, n, d: law[0] + law[1] * law[2] / (
        n ** law[3] * d ** law[4])),
    best("both are multiplied by the factor: N · D must be C / 6", lambda law, c: (
        closed(law, c)[0], closed(law, c)[1] * ((law[3] * law[1]) / (law[4] * law[2])) ** (2 / (law[3] + law[4])))),
    best("(D, N): the model first", swapped_results),
    best("the powers have changed places: N goes with C^(β / (α + β)). Where models soon have what they need, α is "
         "large, and the budget goes into tokens", lambda law, c: closed(
             law, c, power=lambda alpha, beta: alpha / (alpha + beta))),
    best("6 operations for each parameter and token: N · D = C / 6, not C", lambda law, c: closed(law, c, per=1.0)),
    best("D is C / 6 / N, not C / N", tokens_without_6),
    best("2 operations are those of forward; backward takes 4 more", lambda law, c: closed(law, c, per=2.0)),
    best("half for each, N = D: only if α = β and A = B", lambda law, c: (math.sqrt(c / 6), math.sqrt(c / 6))),
    best("20 tokens for each parameter: that comes out for one law, at one budget", lambda law, c: (
        math.sqrt(c / 120), 20 * math.sqrt(c / 120))),
    best("N and D each as √C: the powers are β / (α + β) and α / (α + β)", lambda law, c: closed(
        law, c, power=lambda alpha, beta: 0.5)),
    best("the factor is without its root 1 / (α + β)", lambda law, c: closed(law, c, lambda e, a, b, alpha, beta: (
        alpha * a / (beta * b)))),
    best("the factor is upside down: a large A wants a large N", lambda law, c: closed(
        law, c, lambda e, a, b, alpha, beta: (beta * b / (alpha * a)) ** (1 / (alpha + beta)))),
    best("the factor has no α / β: it is the derivatives that are equal, not the terms", lambda law, c: closed(
        law, c, lambda e, a, b, alpha, beta: (a / b) ** (1 / (alpha + beta)))),
    best("the factor has no A / B", lambda law, c: closed(law, c, lambda e, a, b, alpha, beta: (
        alpha / beta) ** (1 / (alpha + beta)))),
    best("α and β have changed places in the factor", lambda law, c: closed(law, c, lambda e, a, b, alpha, beta: (
        beta * a / (alpha * b)) ** (1 / (alpha + beta)))),
    best("the factor is missing: (C / 6)^(β / (α + β)) alone", lambda law, c: closed(
        law, c, lambda *law: 1.0)),
    when("nearly right: is something rounded?", lambda case, got: case["what"] == "optimal" and all(
        same(one, other, 1e-2) for one, other in zip(got["result"], optimal(case), strict=True))),
]
SIGNATURES = OBJECTIVE + LAWS


# ---------------------------------------------------------------- of the fit

def theta(law):
    e, a, b, alpha, beta = law
    return np.array([math.log(a), math.log(b), math.log(e), alpha, beta])


def height(case, law):
    """The objective there, inf of what is no law."""
    return float(value(case, theta(law))) if min(law[:3]) > 0 else math.inf


def near(law, other, by=0.003):
    return all(abs(x / y - 1) < by if y else x == y for x, y in zip(law, other, strict=True))


def logs(law):
    return [math.log(law[0]), math.log(law[1]), math.log(law[2]), *law[3:]]


MISFITS = [
    ("these are the logarithms, e, a and b; a Law has E = exp(e), A = exp(a), B = exp(b)", logs),
    ("a Law's order is E, A, B; theta's is a, b, e", lambda law: [law[1], law[2], law[0], *law[3:]]),
    ("A and B have changed places", lambda law: [law[0], law[2], law[1], *law[3:]]),
    ("α and β have changed places", lambda law: [*law[:3], law[4], law[3]]),
    ("N and D have changed places", lambda law: [law[0], law[2], law[1], law[4], law[3]]),
    ("E is e: it must be exp(e)", lambda law: [math.log(law[0]), *law[1:]]),
]
REFITS = [
    ("the squares' smallest sum: two runs went wrong, and pull it away. Huber's loss", {"weight": np.ones_like}),
    ("the squares' smallest sum, of the losses, not of their logarithms", {"weight": np.ones_like, "logs": False}),
    ("the losses were fitted, not their logarithms", {"logs": False}),
    ("the law with α = β", {"tied": True}),
]


def diagnosis(case, got):
    """Which mistake a fit looks like."""
    law, right = got["fit"], refitted(case)
    for text, change in MISFITS:
        if near(law, change(right)):
            return f"fit: {text}"
    if 0 < law[0] < 0.01:       # fixed there, or gone there from one of the starts
        return (f"fit: the law without E, which is {law[0]:.0e}: is e one of the numbers that your fit moves? If so, "
                "this is another valley: try all STARTS, and take the result with the smallest value")
    for text, how in REFITS:
        if near(law, refitted(case, **how)):
            return f"fit: {text}"
    said = ", ".join(f"{name} {x:.4g}" for name, x in zip(NAMES, law, strict=True))
    if not min(law[:3]) > 0:
        return f"fit: {said}: E, A and B are above 0"
    times = height(case, law) / max(height(case, right), 1e-12)
    return (f"fit: another valley: {said}, where the objective is {times:.3g} times as high as at the bottom of the "
            "deepest. Try all STARTS, and take the result with the smallest value")


def fits(case, got):
    if case["what"] != "fit":
        return True
    if not case["noise"]:
        return near(got["fit"], case["law"], 0.01)
    return height(case, got["fit"]) <= 1.01 * height(case, refitted(case))


def far(case, got):
    """The largest relative difference of what the fit expects of large runs."""
    return max(np.abs(np.array(got["large"]) / exact(case["law"], case["large n"], case["large d"]) - 1))


DEMANDS = [
    demand(lambda case, got: f"{case['what']}: right, but {' and '.join(got['changed'])}: not what it was before "
           "the call. Work on a copy", lambda case, got: not got.get("changed")),
    demand(diagnosis, fits),
    demand(lambda case, got: f"the fit is right, but what it expects of larger runs is {100 * far(case, got):.0f} % "
           "off: is loss right?", lambda case, got: case["what"] != "fit" or far(case, got) < FAR),
]
