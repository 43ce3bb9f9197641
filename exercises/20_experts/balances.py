"""20.2 token by token, and what known mistakes would give."""

import math

import numpy as np

from exercises.frame import gives, when
from exercises.frame.comparing import same

from .routing import softmax

# Tokens, experts, slope. Experts don't divide tokens: of equal shares the gradient is 0, and what is seen is rounding.
SIZES = ((9, 4, 0.0), (7, 5, 1.0), (11, 3, -0.5), (5, 6, 2.0), (1, 3, 0.0), (0, 4, 0.0), (5, 4, 6.0))
LARGE = 1000.0
LEAN = 0.6         # what all tokens have in common, so that they prefer one expert


def draw(rng, tokens, experts, slope):
    """slope: how much later experts are preferred. Every third token's first choice is any one, whatever its logits.
    Nobody's is the last expert, but for the first token's where slope is below 0."""
    logits = rng.normal(0, 1.5, (tokens, experts)) + slope * np.arange(experts)
    first = np.argmax(logits[:, :-1], 1) if tokens else np.zeros(0, int)
    first[::3] = rng.integers(0, experts - 1, len(first[::3]))
    if slope < 0:
        first[0] = experts - 1
    return {"logits": logits, "first": first}


def cases(rng):
    drawn = [draw(rng, *size) for size in SIZES]
    for level in (LARGE, -LARGE):
        large = draw(rng, 6, 4, 0.0)
        drawn.append(large | {"logits": large["logits"] + level})
    return [*({"what": "balance_loss"} | one for one in drawn),
            *({"what": "z_loss", "logits": one["logits"]} for one in
              [*drawn, apart(draw(rng, 6, 4, 0.0)), sunk(draw(rng, 6, 4, 0.0)), risen(draw(rng, 6, 4, 0.0))])]


def apart(case):
    """Each token's logits on a level of their own."""
    return case | {"logits": case["logits"] + LARGE * np.linspace(-1, 1, len(case["logits"]))[:, None]}


def sunk(case):
    """The first expert's logits far below the others'."""
    return case | {"logits": case["logits"] - 1.5 * LARGE * (np.arange(size(case)) == 0)}


def risen(case):
    """The last expert's logits far above the others': the mean of a token's logits is too small to be subtracted."""
    return case | {"logits": case["logits"] + 1.5 * LARGE * (np.arange(size(case)) == size(case) - 1)}


def shares(case):
    """f: counted one by one."""
    tokens, experts = case["logits"].shape
    return np.array([sum(int(e) == expert for e in case["first"]) for expert in range(experts)]) / tokens


def means(case):
    return np.mean(softmax(case["logits"]), 0)


def dot(case, f, P):
    return case["logits"].shape[1] * float(f @ P)


def through_softmax(case, by_P):
    """The gradient by logits: by each token's probabilities it is by_P / T."""
    tokens, found = len(case["logits"]), []
    for p in softmax(case["logits"]):
        found.append((np.diag(p) - np.outer(p, p)) @ by_P / tokens)
    return np.array(found)


def by_product(case, f, P):
    return through_softmax(case, case["logits"].shape[1] * f)


def balance(case, f=shares, P=means, loss=dot, grad=by_product, empty=0.0):
    """The keywords are the mistakes; a loss, or a gradient, that is None is as it should be, whatever f and P are."""
    if case["what"] != "balance_loss":
        return None
    with np.errstate(all="ignore"):
        if not len(case["logits"]):
            return {"loss": empty, "grad": np.zeros(case["logits"].shape)}
        f, P = f(case), P(case)
        return {"loss": float((loss or dot)(case, f, P)), "grad": (grad or by_product)(case, f, P)}


def lse_of(logits):
    top = logits.max(1)
    return np.array([t + math.log(sum(math.exp(x - t) for x in row)) for t, row in zip(top, logits, strict=True)])


def squared(case, lse):
    return np.mean(lse ** 2)


def by_square(case, lse):
    p = softmax(case["logits"])
    return np.array([2 * one * row for one, row in zip(lse, p, strict=True)]) / len(lse)


def z(case, loss=squared, grad=by_square, empty=0.0):
    if case["what"] != "z_loss":
        return None
    with np.errstate(all="ignore"):
        if not len(case["logits"]):
            return {"loss": empty, "grad": np.zeros(case["logits"].shape)}
        lse = lse_of(case["logits"])
        return {"loss": float(loss(case, lse)), "grad": grad(case, lse)}


def truth(case):
    return balance(case) or z(case)


# ---------------------------------------------------------------- mistakes

def counts(case):
    return shares(case) * len(case["logits"])


def greatest(case):
    """Of the greatest logits, instead of the first choices that were given."""
    tokens, experts = case["logits"].shape
    return np.bincount(case["logits"].argmax(1), minlength=experts) / tokens


def sums(case):
    return means(case) * len(case["logits"])


def over_experts(case, f, P):
    return float(f @ P)


def size(case):
    return case["logits"].shape[1]


def tokens(case):
    return len(case["logits"])


def hard(case, f, P):
    return size(case) * float(f @ f)


def soft(case, f, P):
    return size(case) * float(P @ P)


def by_soft(case, f, P):
    return through_softmax(case, 2 * size(case) * P)


def by_soft_once(case, f, P):
    return through_softmax(case, size(case) * P)


def times(factor):
    return lambda case, f, P: factor(case) * by_product(case, f, P)


def nothing(case, *_):
    return np.zeros(case["logits"].shape)


def no_softmax(case, f, P):
    return np.tile(size(case) * f / tokens(case), (tokens(case), 1))


def no_sum(case, f, P):
    return softmax(case["logits"]) * size(case) * f / tokens(case)


def diagonal(case, f, P):
    p = softmax(case["logits"])
    return p * (1 - p) * size(case) * f / tokens(case)


def of_P(case, f, P):
    """The sum in the Jacobian made of the means over tokens."""
    return softmax(case["logits"]) * (f - f @ P) * size(case) / tokens(case)


def of_mean(case, f, P):
    """The gradient of the means' softmax: the same for all tokens."""
    return np.tile(P * (f - f @ P) * size(case) / tokens(case), (tokens(case), 1))


def only_chosen(case, f, P):
    found = by_product(case, f, P)
    return np.where(np.arange(size(case)) == case["first"][:, None], found, 0)


def variation(case, f, P):
    """Shazeer's: the squared coefficient of variation of the shares."""
    return f.var() / f.mean() ** 2


def tokens_axis(case):
    return np.mean(softmax(case["logits"], 0), 0)


def b(text, **how):
    return gives(text, lambda case: balance(case, **how))


def zz(text, **how):
    return gives(text, lambda case: z(case, **how))


def nan_of_nothing(case, got):
    return not len(case["logits"]) and bool(np.isnan(got["loss"]))


def overflow(case, got):
    """Only where logits are thousands."""
    return np.abs(case["logits"]).max(initial=0) > 700 and not (
        np.isfinite(got["loss"]) and np.isfinite(np.asarray(got["grad"])).all())


def nearly(case, got):
    return all(same(got[name], value, 1e-2) for name, value in truth(case).items())


def levels(case, got):
    """Only where the tokens' logits are on several levels."""
    return len(case["logits"]) and np.ptp(case["logits"].max(1)) > LARGE and overflow(case, got)


def only_chosen_ones(case):
    """np.unique's counts, without those of experts that nobody has chosen."""
    found = np.unique(case["first"], return_counts=True)[1] / len(case["first"])
    return np.pad(found, (0, size(case) - len(found)))


def without_last(case):
    return np.append(shares(case)[:-1], 0.0)


def over_tokens(case):
    """lse along the wrong axis."""
    return np.logaddexp.reduce(case["logits"], 0)


SIGNATURES = [
    when("nan: the mean of no tokens is 0 / 0. A rank may have none (20.3), and its loss is 0", nan_of_nothing),
    when("the greatest logit of all tokens is subtracted, not each token's own: all exponentials of a token far "
         "below are 0, and their logarithm is -inf", levels),
    when("exp overflows, or all of it is 0 and the logarithm -inf: subtract the greatest logit, and add it again after "
         "the logarithm", overflow),
    b("the shares are of the experts that somebody has chosen, one behind the other: an expert that nobody has chosen "
      "has the share 0, at its own place (np.bincount with minlength)", f=only_chosen_ones),
    b("the last expert's share is missing: f has E numbers, of experts 0 to E-1", f=without_last),
    b("E is missing in the loss, but not in its gradient", loss=over_experts, grad=None),
    b("E is missing in the gradient, but not in the loss", loss=None, grad=times(lambda case: 1 / size(case))),
    b("E is missing in the loss: if all experts are used alike it is 1/E, and the more experts the less it weighs",
      loss=over_experts, grad=times(lambda case: 1 / size(case))),
    b("the gradient is T times too large: P is a mean, and a token's probability has 1/T of it", grad=times(tokens)),
    b("loss and gradient are T times too large: f is a share, P a mean; one of the two isn't divided by T, and the "
      "loss would grow with the batch", f=counts),
    b("the gradient is T times too small: f has been divided by T, and P once; not twice",
      grad=times(lambda case: 1 / tokens(case))),
    b("f is counted of the greatest logits in the gradient: given are the first choices",
      grad=lambda case, f, P: by_product(case, greatest(case), P)),
    b("f is counted of the greatest logits: given are the first choices, and a router with noise makes others",
      f=greatest),
    b("the gradient is zero: f has none, but P has", grad=nothing),
    b("f·f in the loss: one of the two is P, the mean probability", loss=hard),
    b("f·f: both are counts, and the loss has no gradient. One of the two is P", loss=hard, grad=nothing),
    b("P·P: one of the two is f, the share of first choices", loss=soft),
    b("P·P: one of the two is f, the share of first choices", loss=soft, grad=by_soft_once),
    b("P·P: one of the two is f, the share of first choices. P·P is smallest where all are alike, too, but doesn't "
      "know what was chosen", loss=soft, grad=by_soft),
    b("the gradient is that by the probabilities, E f / T: between them and the logits stands a softmax",
      grad=no_softmax),
    b("p (dp - Σ p dp): the sum is missing, so that all logits sink together", grad=no_sum),
    b("only the diagonal of the softmax's Jacobian, p (1 - p): a logit moves the other experts' probabilities as well",
      grad=diagonal),
    b("in p (dp - Σ p dp) the sum is over the token's own probabilities, not over the means P", grad=of_P),
    b("in p (dp - Σ p dp) the sum is over the tokens; it is over the experts, for each token", grad=lambda case, f, P:
      softmax(case["logits"]) * (f - P * tokens(case) * f) * size(case) / tokens(case)),
    b("all tokens have the same gradient: the softmax is each token's own, and the mean comes after it", grad=of_mean),
    b("only the first choice's logit has a gradient: each probability depends on all logits", grad=only_chosen),
    b("the sign of the gradient", grad=times(lambda case: -1)),
    b("the gradient is twice as large: f is a constant, and not differentiated", grad=times(lambda case: 2)),
    b("1 is subtracted: it is the loss's value where all are alike, and stays in it",
      loss=lambda case, f, P: dot(case, f, P) - 1),
    b("that is the mean of f·P over the experts; it is the sum, times E",
      loss=lambda case, f, P: float(f @ P) / size(case),
      grad=times(lambda case: size(case) ** -2.0)),
    b("that is the squared coefficient of variation of the shares (Shazeer et al. 2017); asked for is E Σ f P",
      loss=variation),
    b("the softmax is over the tokens: axis 1 is the experts'", P=tokens_axis),
    zz("the square is missing in the loss, but not in its gradient", loss=lambda case, lse: np.mean(lse)),
    zz("the square is missing", loss=lambda case, lse: np.mean(lse), grad=lambda case, lse: softmax(case["logits"])
       / len(lse)),
    zz("the square of the mean; asked for is the mean of the squares", loss=lambda case, lse: np.mean(lse) ** 2),
    zz("the square of the mean; asked for is the mean of the squares", loss=lambda case, lse: np.mean(lse) ** 2,
       grad=lambda case, lse: 2 * lse.mean() * softmax(case["logits"]) / len(lse)),
    zz("the loss is a mean over the tokens, the gradient that of the sum", grad=lambda case, lse: by_square(case, lse)
       * len(lse)),
    zz("the sum over the tokens; asked for is the mean", loss=lambda case, lse: np.sum(lse ** 2),
       grad=lambda case, lse: by_square(case, lse) * len(lse)),
    zz("the mean of the logits' squares; asked for is that of log Σ exp", loss=lambda case, lse:
       np.mean(case["logits"] ** 2), grad=lambda case, lse: 2 * case["logits"] / case["logits"].size),
    zz("the gradient lacks 2: of a square", grad=lambda case, lse: by_square(case, lse) / 2),
    zz("the gradient lacks log Σ exp: of lse² it is 2 lse times the gradient of lse",
       grad=lambda case, lse: 2 * softmax(case["logits"]) / len(lse)),
    zz("the gradient lacks the softmax: that is the gradient of log Σ exp",
       grad=lambda case, lse: np.tile((2 * lse / len(lse))[:, None], (1, size(case)))),
    zz("the gradient goes by the greatest logit alone: log Σ exp is nearly the maximum, its gradient is the softmax",
       grad=lambda case, lse: (2 * lse / len(lse))[:, None] * (
           case["logits"] == case["logits"].max(1, keepdims=True))),
    zz("the greatest logit was subtracted, and not added again", loss=lambda case, lse:
       np.mean((lse - case["logits"].max(1)) ** 2)),
    zz("the greatest logit was subtracted, and not added again", loss=lambda case, lse:
       np.mean((lse - case["logits"].max(1)) ** 2), grad=lambda case, lse:
       by_square(case, lse - case["logits"].max(1))),
    zz("log₂; asked for is the natural logarithm", loss=lambda case, lse: np.mean((lse / np.log(2)) ** 2)),
    zz("the mean of the exponentials; asked for is their sum", loss=lambda case, lse:
       np.mean((lse - np.log(size(case))) ** 2), grad=lambda case, lse: by_square(case, lse - np.log(size(case)))),
    zz("log Σ exp is over the tokens: axis 1 is the experts'", loss=lambda case, lse: np.mean(over_tokens(case) ** 2),
       grad=lambda case, lse: 2 * over_tokens(case) * softmax(case["logits"]) / len(lse)),
    zz("log Σ exp is over the tokens: axis 1 is the experts'", loss=lambda case, lse: np.mean(over_tokens(case) ** 2),
       grad=lambda case, lse: 2 * over_tokens(case) * softmax(case["logits"], 0) / size(case)),
    zz("the gradient is divided by the number of all logits: the loss is a mean over the tokens", grad=lambda case, lse:
       by_square(case, lse) / size(case)),
    zz("the sign of the gradient", grad=lambda case, lse: -by_square(case, lse)),
    when("nearly right: are probabilities clipped, is a small number added to them, or something kept in float32?",
         nearly),
]


# ---------------------------------------------------------------- the experiment

def experiment(rng, tokens=128, size=6, experts=4, steps=200):
    """Tokens of four kinds of their own, each with another linear answer to be learned, and a router that begins with
    small weights."""
    kind = rng.integers(0, experts, tokens)
    x = rng.normal(0, 1, (experts, size))[kind] * 0.7 + rng.normal(0, 0.4, (tokens, size)) + LEAN
    maps = rng.normal(0, 0.5, (experts, size, size))
    return {"what": "experiment", "x": x, "target": np.einsum("ti,tio->to", x, maps[kind]), "rate": 0.2, "weight": 1.0,
            "params": {"router": rng.normal(0, 0.1, (size, experts)), "steps": steps,
                       "experts": rng.normal(0, 0.3, (experts, size, size))}}
