"""24.5 answer by answer, and what known mistakes would give."""

import contextlib
import functools

import numpy as np

from exercises.frame import demand, gives, when

# ---------------------------------------------------------------- cases

COLD = 0.004        # a temperature at which exp(logits / temperature) overflows


def rollout(rng, ranks, questions, time, vocabulary, ending=0.0, **how):
    """The same on all ranks. ending: by how much more likely `end` is, in logits."""
    tables = [rng.normal(0, 1.2, (rows, vocabulary)) for rows in (vocabulary, vocabulary, 13)]
    tables[0][:, how["end"]] += ending
    asked = rng.integers(0, vocabulary, (questions, time))
    if ending:
        asked[asked == how["end"]] = (how["end"] + 1) % vocabulary
    else:
        asked[0, -1] = how["end"]       # which doesn't end its answer
    one = {"what": "roll_out", "tables": tables, "questions": asked,
           "worth": rng.uniform(0, 1, vocabulary), "how": {"temperature": 1.0, **how}}
    return [one] * ranks


def cases(rng, ranks):
    shares = [[questions, size] for questions, size in ((7, 3), (8, 4), (2, 4), (5, 1), (11, 4), (0, 2))]
    found = [[{"what": "share", "of": shares}] * ranks]
    for temperature in (1.0, 0.5, 3.0, COLD):
        logits, noise = rng.normal(0, 2, (9, 6)), rng.gumbel(size=(9, 6))
        logits[0, :2], noise[0, :2] = (5.0, 5.0 + 1e-8), 8.0      # in float32 they are equal
        if temperature == COLD:
            logits[1] = np.arange(3, 9)                           # exp of each is inf, the last is drawn
        found.append([{"what": "draw", "logits": logits, "noise": noise, "temperature": temperature}] * ranks)
    seeds = iter(rng.permutation(900).tolist())
    found.append(rollout(rng, ranks, 5, 3, 7, group=3, count=5, end=2, seed=next(seeds), step=next(seeds)))
    found.append(rollout(rng, ranks, 6, 2, 5, group=2, count=6, end=4, seed=next(seeds), step=next(seeds),
                         temperature=0.6))
    found.append(rollout(rng, ranks, 3, 4, 9, group=4, count=3, end=0, seed=next(seeds), step=next(seeds),
                         temperature=1.8))
    found.append(rollout(rng, ranks, 7, 2, 6, group=2, count=1, end=1, seed=next(seeds), step=0))
    found.append(rollout(rng, ranks, 4, 2, 6, 60.0, group=2, count=4, end=3, seed=next(seeds), step=next(seeds)))
    return found


# ---------------------------------------------------------------- rightly, and with mistakes

def policy(tables, tokens):
    last, before, everything = tables
    at = (tokens * (1 + np.arange(tokens.shape[1]))).sum(1) % len(everything)
    return last[tokens[:, -1]] + before[tokens[:, -2]] + everything[at]


def shared(questions, rank, size):
    """[first, behind the last], by what np.array_split does."""
    sizes = [len(part) for part in np.array_split(np.arange(questions), size)]
    return [sum(sizes[:rank]), sum(sizes[:rank + 1])]


def probabilities(x, less):
    """Softmax; less: how many times the greatest is taken away before exp."""
    with np.errstate(all="ignore"):
        exps = np.exp(x - less * x.max(1, keepdims=True))
        return exps / exps.sum(1, keepdims=True)


def drawn(logits, noise, temperature):
    return np.argmax(noise * temperature + logits, axis=1)


def piece(pair, questions):
    """An empty piece may begin anywhere: here at the end, as drive.py says it."""
    first, behind = pair
    return [first, behind] if first != behind else [questions, questions]


def keyed(how, question, answer, rank, local):
    return [how["seed"], how["step"], question, answer]


def written(policy, questions, how, streams, draw=drawn, count_end=True, fill=None, running=False, again=False):
    """(tokens, counted) of the answers to questions (rows, time), one stream each, or one generator for all."""
    tokens, counted = questions, np.ones((len(questions), how["count"]), bool)
    over = (questions[:, -1] == how["end"]) & running
    for at in range(how["count"]):
        logits = policy(tokens)
        if not at:
            size = how["count"], logits.shape[1]
            noise = streams.gumbel(size=(len(tokens), *size)) if isinstance(streams, np.random.Generator) else np.array(
                [stream.gumbel(size=size) for stream in streams]).reshape(-1, *size)
        new = draw(logits, noise[:, 0 if again else at], how["temperature"])
        if fill != "goes on":
            new = np.where(over, how["end"] if fill is None else fill, new)
        ends = ~over & (new == how["end"])
        counted[:, at] = ~over & (count_end | ~ends)
        over |= ends
        tokens = np.concatenate([tokens, new[:, None]], 1)
    return tokens, counted


def run(case, share=shared, draw=drawn, key=keyed, policy=policy, mean=None, one_stream=False, order=None,
        settings=None, counts=None, cut=None, tiled=False, paid=None, **how_written):
    """Outputs of all ranks; the keywords are the mistakes."""
    one, ranks = case[0], len(case)
    if one["what"] == "training":
        return [{}] * ranks
    if one["what"] == "share":
        return [{"result": [piece(share(questions, rank, size), questions) for questions, size in one["of"]
                            for rank in range(size)]}] * ranks
    if one["what"] == "draw":
        return [{"result": draw(one["logits"], one["noise"], one["temperature"])}] * ranks
    how, found = one["how"] | (settings or {}), []
    questions, group = one["questions"], how["group"]
    for rank in range(ranks):
        first, last = share(len(questions), rank, ranks)
        rows = [(q, a) for q in range(first, last) for a in range(group)]
        if cut:
            rows = cut([(q, a) for q in range(len(questions)) for a in range(group)], rank, ranks)
        rows = order(rows, group) if order else rows
        where = np.array(by_turns(rows, group) if tiled else rows, int).reshape(-1, 2)[:, 0]
        streams = np.random.default_rng(key(how, first, 0, rank, 0)) if one_stream else [
            np.random.default_rng(key(how, q, a, rank, q - first)) for q, a in rows]
        tokens, counted = written(functools.partial(policy, one["tables"]), questions[where], how, streams, draw,
                                  **how_written)
        rewards = one["worth"][tokens[:, paid(questions.shape[1]):] if paid else tokens].sum(1) / 3
        if counts:
            counted = counts(counted, questions.shape[1])
        found.append({"tokens": tokens, "counted": counted, "rewards": rewards})
    means = mean([each["rewards"] for each in found], case) if mean else [
        sum(each["rewards"].sum() for each in found) / np.float64(sum(len(each["rewards"]) for each in found))] * ranks
    return [each | {"mean": float(m), "changed": False} for each, m in zip(found, means, strict=True)]


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def g(text, **how):
    def found(case):
        with np.errstate(all="ignore"):
            return run(case, **how)
    return gives(text, found)


def keys(text, key):
    return g(text, key=key)


def floor_share(questions, rank, size):
    return [questions * rank // size, questions * (rank + 1) // size]


def last_takes_rest(questions, rank, size):
    least = questions // size
    return [rank * least, questions if rank == size - 1 else (rank + 1) * least]


def rest_is_lost(questions, rank, size):
    least = questions // size
    return [rank * least, (rank + 1) * least]


def rounded_up(questions, rank, size):
    most = -(-questions // size)
    return [min(rank * most, questions), min((rank + 1) * most, questions)]


def rounded_up_beyond(questions, rank, size):
    most = -(-questions // size)
    return [rank * most, min((rank + 1) * most, questions)]


def last_ranks_more(questions, rank, size):
    sizes = [len(part) for part in np.array_split(np.arange(questions), size)][::-1]
    return [sum(sizes[:rank]), sum(sizes[:rank + 1])]


def with_last(questions, rank, size):
    first, behind = shared(questions, rank, size)
    return [first, behind - 1]


def how_many(questions, rank, size):
    first, behind = shared(questions, rank, size)
    return [first, behind - first]


def all_of_them(questions, rank, size):
    return [0, questions]


def cut_answers(rows, rank, ranks):
    return [tuple(row) for row in np.array_split(np.array(rows), ranks)[rank]]


def by_turns(rows, group):
    """All questions' first answers, then their second ones."""
    return sorted(rows, key=lambda row: (row[1], row[0]))


def per_rank(rewards, case):
    return [r.mean() if len(r) else np.nan for r in rewards]


def reward_sum(rewards, case):
    return [sum(r.sum() for r in rewards)] * len(rewards)


def by_questions(rewards, case):
    return [sum(r.sum() for r in rewards) / len(case[0]["questions"])] * len(rewards)


def by_rank_count(rewards, case):
    return [sum(r.sum() for r in rewards) / len(rewards)] * len(rewards)


def mean_of_means(rewards, case):
    return [np.mean([r.mean() if len(r) else 0.0 for r in rewards])] * len(rewards)


def over_rank_rows(rewards, case):
    return [sum(r.sum() for r in rewards) / max(len(r), 1) / len(rewards) for r in rewards]


def whole_width(counted, time):
    return np.concatenate([np.zeros((len(counted), time), bool), counted], 1)


def narrow(case, got):
    """Rows are shorter than time + count on some rank."""
    shapes = [getattr(rank["tokens"], "shape", ()) for rank in got] if case[0]["what"] == "roll_out" else []
    width = case[0]["questions"].shape[1] + case[0]["how"]["count"] if shapes else 0
    return any(len(shape) == 2 and shape[1] < width for shape in shapes)


def misplaced(case, got):
    """The first wrong piece of questions, in words; None where there is none."""
    one, ranks = case[0], len(case)
    if one["what"] == "share":
        at = [(questions, rank, size) for questions, size in one["of"] for rank in range(size)]
        for (questions, rank, size), pair, right in zip(at, got[0]["result"], truth(case)[0]["result"], strict=True):
            if list(pair) != right:
                return (f"share: of {questions} questions rank {rank} of {size} gets ({pair[0]}, {pair[1]}): "
                        f"({right[0]}, {right[1]}) is its piece")
    elif one["what"] == "roll_out":
        questions, group = len(one["questions"]), one["how"]["group"]
        for rank in range(ranks):
            (first, behind), rows = shared(questions, rank, ranks), len(got[rank]["tokens"])
            if rows != (behind - first) * group:
                return (f"rank {rank} of {ranks} has {rows} rows of tokens: of {questions} questions it has those from "
                        f"{first} up to {behind}, without the latter, and {group} answers to each")
    return None


def misshared(case, got):
    with contextlib.suppress(TypeError, ValueError, IndexError):     # of another shape: the frame says it
        return misplaced(case, got) is not None
    return False


def otherwise_drawn(case, got):
    """Rows of the right shape, with other tokens."""
    if case[0]["what"] != "roll_out":
        return False
    pairs = [(np.asarray(rank["tokens"]), right["tokens"]) for rank, right in zip(got, truth(case), strict=True)]
    return all(a.shape == b.shape for a, b in pairs) and any((a != b).any() for a, b in pairs)


SIGNATURES = [
    when("the questions aren't what they were before the call", lambda case, got: any(rank["changed"] for rank in got)),
    g("share: the pieces are right, but the larger ones must be the first ranks'", share=last_ranks_more),
    g("share: questions · rank // size puts the larger pieces anywhere: the first ranks have them", share=floor_share),
    g("share: the last rank has all that is left over: pieces differ by one at most", share=last_takes_rest),
    g("share: what is left over is nobody's", share=rest_is_lost),
    g("share: all have the same number, rounded up, until there are none left: then the last ones have less, or "
      "nothing; pieces differ by one at most", share=rounded_up),
    g("share: all have the same number, rounded up, until there are none left: then the last ones begin beyond the "
      "end; pieces differ by one at most", share=rounded_up_beyond),
    g("share: the second number is behind the last question, as in range", share=with_last),
    g("share: the first and how many; asked for is the first, and behind the last", share=how_many),
    g("share: every rank has all questions", share=all_of_them),
    g("the temperature isn't given on: draw gets 1", settings={"temperature": 1.0}),
    g("draw: the temperature has no effect: it is left out, or divides the noise as well",
      draw=lambda logits, noise, t: drawn(logits, noise, 1)),
    g("draw: logits are multiplied by the temperature: a high one makes them more alike", draw=lambda logits, noise, t:
      drawn(logits, noise, 1 / t)),
    g("draw: the likeliest, without noise: all answers of a group would be the same", draw=lambda logits, noise, t:
      logits.argmax(1)),
    g("draw: the noise is taken away: its long tail is above", draw=lambda logits, noise, t: drawn(logits, -noise, t)),
    *(g("draw: the noise is added to the probabilities: to logits / temperature",
        draw=lambda logits, noise, t, less=less: (probabilities(logits / t, less) + noise).argmax(1))
      for less in (0, 1)),
    g("draw: in float32, to which 5 and 5 + 1e-8 are the same: the first of the two is taken, not the greater",
      draw=lambda logits, noise, t: (logits / t + noise).astype(np.float32).argmax(1)),
    g("draw: the noise alone decides", draw=lambda logits, noise, t: noise.argmax(1)),
    g("draw: the least likely is drawn", draw=lambda logits, noise, t: (logits / t + noise).argmin(1)),
    keys("the rank is in the key of a stream, in the question's place: with another number of ranks other answers are "
         "drawn", lambda how, q, a, rank, local: [how["seed"], how["step"], rank, a]),
    keys("the stream is by the number of the question on its rank: that is another one with another number of ranks, "
         "and two ranks' first questions get the same numbers. By its number in the global batch",
         lambda how, q, a, rank, local: [how["seed"], how["step"], local, a]),
    keys("all answers to a question have the same stream, so they are all the same: where nobody is better than the "
         "others, there is nothing to learn", lambda how, q, a, rank, local: [how["seed"], how["step"], q, 0]),
    keys("all questions have the same streams: by question and answer", lambda how, q, a, rank, local: [
        how["seed"], how["step"], 0, a]),
    keys("the step is left out: in each step the same numbers are drawn", lambda how, q, a, rank, local: [
        how["seed"], 0, q, a]),
    keys("the seed is left out", lambda how, q, a, rank, local: [0, how["step"], q, a]),
    keys("the seed and the step have changed places", lambda how, q, a, rank, local: [how["step"], how["seed"], q, a]),
    keys("the question and the answer have changed places", lambda how, q, a, rank, local: [how["seed"], how["step"], a,
                                                                                            q]),
    keys("answers are counted through all questions: by the number of the question, and that in the group",
         lambda how, q, a, rank, local: [how["seed"], how["step"], q, q * how["group"] + a]),
    keys("answers are counted through this rank's questions: by the number of the question, and that in the group",
         lambda how, q, a, rank, local: [how["seed"], how["step"], q, local * how["group"] + a]),
    keys("the rank is in the key, with the seed: with another number of ranks other answers are drawn",
         lambda how, q, a, rank, local: [how["seed"] + rank, how["step"], q, a]),
    g("one stream for all of a rank: what an answer gets depends on how many are drawn beside it", one_stream=True),
    g("a stream is made anew for every token: each gets the same numbers. One per answer", again=True),
    g("the answers are cut, not the questions: a group must stay on one rank, or nobody can compare its answers",
      cut=cut_answers),
    g("the questions are dealt out in turn: a rank has one piece of them, in order", cut=lambda rows, rank, ranks: [
        row for row in rows if row[0] % ranks == rank]),
    g("the answers to one question must stand one after another: repeat, not tile", order=by_turns),
    g("the questions stand tile by tile, and the streams answer by answer: a row gets the stream of another question. "
      "Repeat, not tile", tiled=True),
    when("rows are shorter where all answers have ended early: they are filled up with `end` to time + count tokens, "
         "or ranks have rows of different lengths", narrow),
    g("an answer goes on behind its `end`: it is filled up with `end`", fill="goes on"),
    g("behind `end` it is filled up with 0: with `end`", fill=0),
    g("`end` itself counts: the model must learn to stop", count_end=False),
    g("all tokens of an answer count, also those behind its `end`", counts=lambda counted, time: np.ones_like(counted)),
    g("`end` doesn't stop an answer: behind it nothing counts", settings={"end": -1}),
    g("`end` in the question doesn't end its answer: only the answer's own tokens can", running=True),
    g("counted: of the answers' tokens only, (rows, count): the question isn't the model's", counts=whole_width),
    g("counted: these are the tokens that don't count", counts=lambda counted, time: ~counted),
    g("the policy is asked about the tokens that it has written alone, or a part of them: about all, the question too",
      policy=lambda tables, tokens: policy(tables, tokens[:, -2:])),
    g("rewards: of the answers alone; reward is given the questions too, (rows, time + count)", paid=lambda time: time),
    g("mean of means: ranks have different numbers of answers", mean=mean_of_means),
    g("mean: of this rank alone", mean=per_rank),
    g("mean: the sum of the rewards: divide by the number of answers of all ranks", mean=reward_sum),
    g("mean: divided by the number of questions: of answers", mean=by_questions),
    g("mean: divided by the number of ranks: of answers", mean=by_rank_count),
    g("mean: divided by this rank's answers times the ranks: they have different numbers of them", mean=over_rank_rows),
    when("draw: wrong only at a low temperature, where exp(logits / temperature) is inf: the trick needs no exp",
         lambda case, got: case[0].get("temperature") == COLD),
    when(misplaced, misshared),
    when("other tokens than the streams give: each token takes gumbel(size=vocabulary), once, of its answer's stream, "
         "stream(seed, step, question, answer), and is what draw makes of it and of the policy's logits for all tokens "
         "before it", otherwise_drawn),
]


def rolled(predicate):
    """A demand on the cases in which answers are drawn."""
    return lambda case, got: case[0]["what"] != "roll_out" or predicate(case, got)


def asked(case, got):
    """For how many rows the policy was asked, on all ranks together, and how many there are at most."""
    how = case[0]["how"]
    return sum(rank["rows"] for rank in got), len(case[0]["questions"]) * how["group"] * how["count"]


def kinds(got):
    """The dtypes of tokens and counted on some rank: where they are wrong, if they are."""
    found = [[str(np.asarray(rank[name]).dtype) for name in ("tokens", "counted")] for rank in got]
    return next((each for each in found if each != ["int64", "bool"]), found[0])


DEMANDS = [
    demand(lambda case, got: "right, but tokens are {}, and counted is {}: int64 and bool are asked for".format(*kinds(
        got)), rolled(lambda case, got: kinds(got) == ["int64", "bool"])),
    demand(lambda case, got: "right, but the policy was asked about {} rows, where {} are needed: each rank's own "
           "answers, once for each token".format(*asked(case, got)),
           rolled(lambda case, got: asked(case, got)[0] <= asked(case, got)[1])),
    demand("right, but with more than one message: the sum of rewards and their number may go in one, and tokens stay "
           "where they are", rolled(lambda case, got: all(len(rank.calls) <= 1 for rank in got))),
]
