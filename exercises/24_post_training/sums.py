"""24.4 over the ranks, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from . import gains

TOKENS = "log_probs", "old", "reference"


# ---------------------------------------------------------------- cases

def answers(rng, groups, group, time, **settings):
    """[each rank's] answers to its questions, of uneven length; groups[rank] questions."""
    found = []
    for many in groups:
        old = -rng.gamma(2.0, 0.7, (many * group, time))
        found.append({"what": "grpo", "log_probs": old + rng.normal(0, 0.4, old.shape), "old": old,
                      "reference": old + rng.normal(0, 0.5, old.shape), "rewards": rng.normal(1, 1, len(old)),
                      "counted": np.arange(time) < rng.integers(1, time + 1, (len(old), 1)), "group": group,
                      **settings})
    return found


def cases(rng, ranks):
    full = answers(rng, [3, 1, 2], 4, 6, low=0.2, high=0.28, beta=0.04)
    idle = answers(rng, [2, 0, 1], 3, 5, low=0.3, high=0.15, beta=0.7)
    for one in idle:
        for name, fill in zip(TOKENS, (900.0, -np.inf, np.nan), strict=True):
            one[name][~one["counted"]] = fill
    silent = answers(rng, [2, 1, 1], 2, 3, low=0.1, high=0.5, beta=0.1)
    silent[1]["counted"][:] = False
    nothing = answers(rng, [1, 1, 0], 3, 2, low=0.2, high=0.2, beta=0.04)
    for one in nothing:
        one["counted"][:] = False
    single = answers(rng, [1, 1, 0], 2, 3, low=0.2, high=0.2, beta=0.04)
    for rank, one in enumerate(single):
        one["counted"][:] = False
        one["counted"][:1, 1] = rank == 0
    found = [each[:ranks] for each in (full, idle, silent, nothing, single)]
    # Of the second the means are exact: 4 is a power of 2.
    for shape, far, wide in (((3, 7), 0.0, 1.0), ((2, 4), 1e8, 1.0), ((1, 5), -3e-5, 1e-5), ((2, 5), 0.0, 1e-11)):
        rewards = far + wide * rng.integers(0, 4, shape)
        rewards[:, 0], rewards[:, -1] = far, far + 2 * wide
        edges = {1: [], 2: [3], 3: [2, 2]}[ranks]
        found.append([{"what": "spread", "rewards": part.copy()} for part in np.split(rewards, edges, 1)])
    return found


# ---------------------------------------------------------------- rightly, and with mistakes

def everything(case, tokens, rank):
    return max(sum(tokens), 1)


def own(case, tokens, rank):
    return max(tokens[rank], 1)


def total(losses, tokens, rank, case):
    return sum(losses) / everything(case, tokens, rank)


def run(case, loss=total, divisor=everything, weigh=None, passed=None, centre=None, deviation=None, spread=None):
    """Outputs of all ranks; the keywords are the mistakes."""
    if case[0]["what"] == "spread":
        with np.errstate(all="ignore"):
            return [{"result": each, "changed": []} for each in (spread or spreads)(
                [one["rewards"] for one in case], centre, deviation)]
    losses, tokens, slopes = [], [], []
    for one in case:
        counted = one["counted"]
        clean = one | {name: np.where(counted, one[name], 0) for name in TOKENS} | {"what": "token_losses"}
        found = gains.run(clean | (passed(clean) if passed else {}))
        weights = counted * 1.0 if weigh is None else weigh(counted)
        losses.append((found["losses"] * weights).sum())
        slopes.append(found["slopes"] * weights)
        tokens.append(counted.sum())
    return [{"loss": loss(losses, tokens, rank, case), "slopes": each / divisor(case, tokens, rank), "changed": []}
            for rank, each in enumerate(slopes)]


def spreads(parts, centre, deviation):
    """Of all ranks' rewards side by side. centre(all, part), deviation(all, part): of each question."""
    everyone = np.concatenate(parts, 1)
    found = []
    for part in parts:
        mean = everyone.mean(1, keepdims=True) if centre is None else centre(everyone, part)
        std = everyone.std(1, ddof=1, keepdims=True) if deviation is None else deviation(everyone, part)
        found.append((part - mean) / (std + 1e-4))
    return found


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def g(text, **how):
    return gives(text, lambda case: run(case, **how))


def by(divisor):
    """Loss and slopes are divided by it."""
    return {"divisor": divisor, "loss": lambda losses, tokens, rank, case: sum(losses) / divisor(case, tokens, rank)}


def rows(case, tokens, rank):
    return max(sum(len(one["counted"]) for one in case), 1)


def written(case, tokens, rank):
    """Answers with a token that counts."""
    return max(sum(one["counted"].any(1).sum() for one in case), 1)


def one_at_least(case, tokens, rank):
    return sum(max(each, 1) for each in tokens)


def positions(case, tokens, rank):
    return max(sum(one["counted"].size for one in case), 1)


def of_one(losses, tokens, rank, case):
    return losses[rank] / own(case, tokens, rank)


def mean_of_means(losses, tokens, rank, case):
    return sum(of_one(losses, tokens, i, case) for i in range(len(case))) / len(case)


def per_answer(counted):
    return counted / np.maximum(counted.sum(1, keepdims=True), 1)


def s(text, **how):
    return g(f"spread_advantages: {text}", **how)


def of_parts(part_wise):
    """A spread by a formula of all parts."""
    return {"spread": lambda parts, centre, deviation: part_wise(parts)}


def means_of_means(parts):
    mean = np.mean([p.mean(1, keepdims=True) if p.shape[1] else np.zeros((len(p), 1)) for p in parts], 0)
    std = np.sqrt(sum(((p - mean) ** 2).sum(1, keepdims=True) for p in parts) / (sum(p.shape[1] for p in parts) - 1))
    return [(p - mean) / (std + 1e-4) for p in parts]


def own_centres(parts):
    """Squares about each rank's own mean."""
    mean = np.concatenate(parts, 1).mean(1, keepdims=True)
    squares = sum(((p - p.mean(1, keepdims=True)) ** 2).sum(1, keepdims=True) for p in parts if p.shape[1])
    std = np.sqrt(squares / (sum(p.shape[1] for p in parts) - 1))
    return [(p - mean) / (std + 1e-4) for p in parts]


def own_number(parts):
    """The squares of all ranks over each rank's own number of answers less one."""
    everyone = np.concatenate(parts, 1)
    mean = everyone.mean(1, keepdims=True)
    squares = ((everyone - mean) ** 2).sum(1, keepdims=True)
    return [(p - mean) / (np.sqrt(squares / max(p.shape[1] - 1, 1)) + 1e-4) for p in parts]


def times_ranks(parts):
    """Each rank takes all others for as large as itself."""
    total = np.concatenate(parts, 1).sum(1, keepdims=True)
    centred = [p - total / np.float64(p.shape[1] * len(parts)) for p in parts]
    squares = sum((c ** 2).sum(1, keepdims=True) for c in centred)
    return [c / (np.sqrt(squares / (c.shape[1] * len(parts) - 1)) + 1e-4) for c in centred]


def close_for_equal(width):
    """0 where a question's rewards differ by less."""
    def found(parts):
        equal = np.ptp(np.concatenate(parts, 1), axis=1, keepdims=True) < width
        return [np.where(equal, 0.0, each) for each in spreads(parts, None, None)]
    return of_parts(found)


def own_part(r, part):
    return part.mean(1, keepdims=True) if part.shape[1] else np.zeros((len(r), 1))


def own_std(r, part):
    return part.std(1, ddof=1, keepdims=True) if part.shape[1] > 1 else np.full((len(r), 1), np.nan)


def nan(case, got):
    return case[0]["what"] == "grpo" and any(np.isnan(rank["loss"]) or np.isnan(rank["slopes"]).any() for rank in got)


def cancelled(case, got):
    """Wrong where rewards lie far from 0 alone."""
    return case[0]["what"] == "spread" and abs(truth(case)[0]["result"]).max(initial=0) < 100 and any(
        abs(one["rewards"]).max(initial=0) > 1e6 for one in case)


def near(case, got):
    return all(same(np.asarray(x[name]), np.asarray(y[name]), 1e-4) for x, y in zip(got, truth(case), strict=True)
               for name in y if name != "changed")


SIGNATURES = [
    when(lambda case, got: f"{', '.join(next(rank['changed'] for rank in got if rank['changed']))}: not what it was "
         "before the call; work on a copy", lambda case, got: any(rank["changed"] for rank in got)),
    when("nan: where a token isn't counted its log-probabilities may be anything, and 0 · nan is nan: np.where, not a "
         "product; or a rank has no token, and divides by its own 0; or nobody has one", nan),
    g("mean of means: every rank's mean counts the same, whatever number of tokens it has", loss=mean_of_means,
      divisor=lambda case, tokens, rank: own(case, tokens, rank) * len(case)),
    g("the loss is right, but slopes are divided by this rank's own tokens: they are of the same loss", divisor=own),
    g("mean of means: the loss is the ranks' mean, and slopes are divided by this rank's own tokens", divisor=own,
      loss=mean_of_means),
    g("divided by this rank's own tokens, and the loss is this rank's alone: then a token of a rank with few of them "
      "counts more", loss=of_one, divisor=own),
    g("the loss is of this rank alone: all ranks' losses belong together", loss=lambda losses, tokens, rank, case:
      losses[rank] / everything(case, tokens, rank)),
    g("the loss is divided by the number of tokens, and the slopes aren't", divisor=lambda case, tokens, rank: 1),
    g("the slopes are divided by the number of tokens, and the loss isn't", loss=lambda losses, tokens, rank, case: sum(
        losses)),
    g("the slopes are multiplied by the number of ranks: they will be summed over ranks, not averaged",
      divisor=lambda case, tokens, rank: everything(case, tokens, rank) / len(case)),
    g("the slopes are divided by the number of ranks: they will be summed over ranks, as parts of one mean",
      divisor=lambda case, tokens, rank: everything(case, tokens, rank) * len(case)),
    g("neither loss nor slopes are divided by the number of tokens", **by(lambda case, tokens, rank: 1)),
    g("each answer counts the same here, however long it is (mean over its tokens, then over answers): so a token of a "
      "long wrong answer costs less", weigh=per_answer, **by(rows)),
    g("divided by the number of answers, not of tokens", **by(rows)),
    g("divided by the number of answers that have a token, not of tokens", **by(written)),
    g("divided by the number of all positions: only the counted ones", **by(positions)),
    g("a rank without tokens is taken for one with one: a sum is 0 only where no rank has a token, so look at the sum",
      **by(one_at_least)),
    *[g(f"{some:g} is added to the number of tokens: it isn't 0 but where nobody has a token, and the fewer there are, "
        "the smaller become loss and slopes", **by(lambda case, tokens, rank, some=some: sum(tokens) + some))
      for some in (1e-8, 1e-6, 1)],
    g("divided by the number of ranks", **by(lambda case, tokens, rank: len(case))),
    g("low and high are exchanged on their way to token_losses", passed=lambda one: {"low": one["high"],
                                                                                     "high": one["low"]}),
    g("low, high and beta aren't passed on: token_losses has defaults, and these aren't they",
      passed=lambda one: {"low": 0.2, "high": 0.28, "beta": 0.04}),
    g("old and reference are exchanged on their way to token_losses", passed=lambda one: {
        "old": one["reference"], "reference": one["old"]}),
    g("the tokens of one rank times the number of ranks: they have different numbers of tokens",
      **by(lambda case, tokens, rank: own(case, tokens, rank) * len(case))),
    s("each rank's own mean and standard deviation: the group is spread over all ranks", centre=own_part,
      deviation=own_std),
    s("each rank's own mean is taken away: that of the whole group", centre=own_part),
    s("each rank's own standard deviation: that of the whole group", deviation=own_std),
    s("mean of means: a rank with more answers weighs more, and one without any has no mean",
      **of_parts(means_of_means)),
    s("the squares are about each rank's own mean: about that of the group", **of_parts(own_centres)),
    s("mean and standard deviation over all questions: each question has its own", centre=lambda r, part: r.mean(),
      deviation=lambda r, part: r.std(ddof=1)),
    s("divided by the number of answers: of a sample, by one less", deviation=lambda r, part: r.std(1, keepdims=True)),
    s("the squares are divided by this rank's number of answers less one: by that of all", **of_parts(own_number)),
    s("the number of this rank's answers times the number of ranks: they have different numbers of answers",
      **of_parts(times_ranks)),
    *[s("rewards that are close together are taken for equal ones: theirs is a small number, and not 0",
        **close_for_equal(width)) for width in (1e-9, 1e-3)],
    s("the variance is taken for the standard deviation", deviation=lambda r, part: r.var(1, ddof=1, keepdims=True)),
    s("the greater of the standard deviation and EPSILON is taken: their sum is asked for", deviation=lambda r, part:
      np.maximum(r.std(1, ddof=1, keepdims=True), 1e-4) - 1e-4),
    s("EPSILON is left out", deviation=lambda r, part: r.std(1, ddof=1, keepdims=True) - 1e-4),
    s("not divided by the standard deviation", deviation=lambda r, part: 1 - 1e-4),
    s("the mean isn't taken away", centre=lambda r, part: 0.0),
    when("spread_advantages: wrong where rewards are 10⁸ and a little more. Σ r² less n · mean² is the difference of "
         "two numbers of 10¹⁶, of which a float64 has the first 16 digits: sum the squares of what is left when the "
         "mean is taken away, in a second message", cancelled),
    when("nearly right: is something in float32, or a small number added?", near),
]


def calls(got):
    return max(len(rank.calls) for rank in got)


def is_grpo(case):
    return case[0]["what"] == "grpo"


DEMANDS = [
    demand(lambda case, got: f"the right numbers, but with {calls(got)} messages: the loss and the number of tokens "
           "may go in one", lambda case, got: not is_grpo(case) or calls(got) <= 1),
    demand("the right numbers, but more than two of them were sent: the slopes of a rank's tokens are its own",
           lambda case, got: not is_grpo(case) or all(call["bytes"] <= 16 for rank in got for call in rank.calls)),
    demand("slopes: exactly 0 where a token isn't counted", lambda case, got: not is_grpo(case) or all(
        (np.asarray(rank["slopes"])[~one["counted"]] == 0).all() for rank, one in zip(got, case, strict=True))),
    demand(lambda case, got: f"spread_advantages: right, but with {calls(got)} messages: two are enough, sums and the "
           "number of answers in one, squares in the other", lambda case, got: is_grpo(case) or calls(got) <= 2),
    demand("spread_advantages: right, but the rewards themselves were sent: sums are enough, whatever the number of "
           "answers", lambda case, got: is_grpo(case) or all(
               call["bytes"] <= 8 * (2 * len(case[0]["rewards"]) + 2) for rank in got for call in rank.calls)),
]
