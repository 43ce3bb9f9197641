"""What the pieces give when they are called one by one, with known numbers, and what mistakes in handing on give."""

import numpy as np

from exercises.frame import gives, when

SHARES = {2: [(16, 17), (9, 4), (0, 1)], 1: [(33,), (13,), (1,)]}      # samples of the ranks, call by call
SHAPES = [(3, 5), (7,), (2, 4)]      # of the gradients
LENGTHS = [7, 1]                     # of the arrays that are reduced
COMBINES = {"sum": np.add, "max": np.maximum, "min": np.minimum}
SAMPLES, BATCH = 67, 33              # the last batch of an epoch has one sample: some rank has none
QUESTIONS = {      # to the sampler: seed, epoch, number of ranks
    "first": (5, 0, 2), "again": (5, 0, 2), "next epoch": (5, 1, 2), "other seed": (6, 0, 2), "one rank": (5, 0, 1),
    "three ranks": (5, 0, 3)}


def case(rng, ranks):
    """Inputs of all ranks: gradients as the library hands them out, arrays to reduce, questions to the sampler."""
    calls = [[{"grads": [rng.uniform(0.5, 2, shape) * (-1) ** rank * count / sum(counts) for shape in SHAPES],
               "count": count, "total": sum(counts)} for rank, count in enumerate(counts)] for counts in SHARES[ranks]]
    arrays = [rng.standard_normal((ranks, n)) for n in LENGTHS]
    return [{"calls": [call[rank] for call in calls], "arrays": [array[rank] for array in arrays],
             "ops": list(COMBINES), "samples": SAMPLES, "batch_size": BATCH,
             "questions": {name: list(question) for name, question in QUESTIONS.items()}} for rank in range(ranks)]


def truth(case):
    return [synced | reduced for synced, reduced in
            zip(mixed(lambda counts, first, i: 1.0)(case), combined(list(COMBINES))(case), strict=True)]


# ---------------------------------------------------------------- gradient_sync

def mixed(mixing):
    """For gives: case -> what is in grads after the calls, if a rank had added up the ranks' shares, each times
    mixing(counts, first, i): one factor, one per rank that it comes from, or a matrix [to, from].

    counts  array of the ranks' samples; first: those of the first call; i: which one of grads
    """
    def outputs(case):
        ranks, of_calls = len(case), []
        for number, counts in enumerate(np.array(SHARES[len(case)])):
            arrays = []
            for i in range(len(SHAPES)):
                factors = np.broadcast_to(mixing(counts, np.array(SHARES[ranks][0]), i), (ranks, ranks))
                arrays.append(np.tensordot(factors, np.stack([r["calls"][number]["grads"][i] for r in case]), 1))
            of_calls.append(arrays)
        return [{"synced": [[array[rank] for array in arrays] for arrays in of_calls]} for rank in range(ranks)]
    return outputs


def means(counts):
    """What makes a mean over a rank's own samples of its share."""
    return counts.sum() / np.maximum(counts, 1)


def weights(counts):
    """By what average_gradients multiplies."""
    return counts / counts.sum()


def every_turn(counts, i):
    """All arrays are averaged as often as there are arrays; the i-th is converted before its turn."""
    factors = np.eye(len(counts))
    for turn in range(len(SHAPES)):
        factors = np.outer(np.ones(len(counts)), weights(counts)) @ (
            np.diag(means(counts)) @ factors if turn == i else factors)
    return factors


NOT_IN_PLACE = "every rank has still its own gradients: write into the arrays themselves (an element of a list that " \
               "is replaced is another array), and give average_gradients these very arrays"
SYNC = [
    ("only the first of grads is turned into means: all of them must be",
     lambda counts, first, i: weights(counts) if i else 1.0),
    ("average_gradients is called with all of grads once for each of them: it must be called once, when all are means",
     lambda counts, first, i: every_turn(counts, i)),
    ("your average_gradients weighs each rank's gradients by count / total, and what the library hands out is weighed "
     "like that already: turn it into means over the rank's own samples first, in the arrays themselves (grad = grad * "
     "factor makes another one)",
     lambda counts, first, i: weights(counts)),
    ("you multiply by the number of ranks, which makes means only while all ranks hold equally many samples: here they "
     "hold 16 and 17, 9 and 4, 0 and 1",
     lambda counts, first, i: len(counts) * weights(counts)),
    ("the conversion is upside down: a share, divided by the samples of all ranks, becomes a mean over the rank's own "
     "by total / count",
     lambda counts, first, i: weights(counts) ** 2),
    ("total // count cuts the fraction off: of 33 samples a rank with 17 has 1.94 times its share, not once",
     lambda counts, first, i: weights(counts) * (counts.sum() // np.maximum(counts, 1))),
    ("a rank without samples says that it has one, and then all are divided by one too many: what must not be 0 is "
     "what you divide by, not the count that average_gradients gets",
     lambda counts, first, i: counts.sum() / np.maximum(counts, 1).sum()),
    ("the factor is the first call's for ever: each batch has a count and a total of its own",
     lambda counts, first, i: means(first) * weights(counts)),
    ("the count is the first call's for ever: each batch has a count and a total of its own",
     lambda counts, first, i: counts.sum() / first.sum()),
    ("they are sums over the samples of all ranks: nobody divided by their number",
     lambda counts, first, i: counts.sum()),
    ("average_gradients gets sums over the rank's samples and wants their means: multiplied by total, they are still "
     "to be divided by count",
     lambda counts, first, i: counts.sum() * weights(counts)),
    ("each rank's mean is added up: the ranks' means must be weighed by their numbers of samples",
     lambda counts, first, i: means(counts)),
    ("divided by the number of ranks: the library's shares add up to the mean as they are; or average_gradients gets "
     "total, alike on all ranks, where it asks for this rank's count",
     lambda counts, first, i: 1 / len(counts)),
    ("the mean of the ranks' means, which is right only while all hold equally many samples: average_gradients must "
     "get this rank's count, not another number",
     lambda counts, first, i: means(counts) / len(counts)),
    ("only the last of grads goes through average_gradients: the others are still each rank's own means",
     lambda counts, first, i: 1.0 if i == len(SHAPES) - 1 else np.diag(means(counts))),
    ("the conversion comes after average_gradients: then each rank multiplies the common mean by a factor of its own",
     lambda counts, first, i: np.outer(means(counts), weights(counts))),
    ("the conversion comes after average_gradients: then the ranks with samples multiply the common mean by a factor "
     "of their own, and those without make it 0",
     lambda counts, first, i: np.outer(means(counts) * (counts > 0), weights(counts))),
    (NOT_IN_PLACE, lambda counts, first, i: np.eye(len(counts))),
    (NOT_IN_PLACE, lambda counts, first, i: np.diag(means(counts))),
]


def averaged(case, got):
    """How often each number of grads went through average_gradients, on the average."""
    return got[0]["averaged"] / sum(grad.size for call in case[0]["calls"] for grad in call["grads"])


# ---------------------------------------------------------------- collective

def combined(by):
    """For gives: case -> the arrays after all-reduces that combine by these, where the ops are asked for."""
    def outputs(case):
        arrays = [np.stack(of_ranks) for of_ranks in zip(*(rank["arrays"] for rank in case), strict=True)]
        return [{"reduced": {op: [COMBINES[done].reduce(array) for array in arrays]
                             for op, done in zip(COMBINES, by, strict=True)}}] * len(case)
    return outputs


def untouched(case):
    return [{"reduced": dict.fromkeys(COMBINES, rank["arrays"])} for rank in case]


# ---------------------------------------------------------------- all that is computed

def wrong(name):
    """For when: whether an output isn't what it should be, in some way that no formula above explains."""
    def same(a, b):
        return np.allclose(a, b, rtol=1e-9, equal_nan=True)
    return lambda case, got: not all(same(a, b) for rank, right in zip(got, truth(case), strict=True)
                                     for a, b in zip(flat(rank[name]), flat(right[name]), strict=True))


def flat(value):
    """The arrays in lists and dicts, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    return [array for item in (value.values() if isinstance(value, dict) else value) for array in flat(item)]


SIGNATURES = [
    *(gives("your gradient_sync (08.3): " + sentence, mixed(mixing)) for sentence, mixing in SYNC),
    gives("your collective (10.3) adds where the maximum or the minimum of two arrays is asked for: hand `combine` on",
          combined(["sum"] * 3)),
    gives("your collective (10.3) leaves x as it was: reduce x itself, not a copy", untouched),
    when("your gradient_sync (08.3) leaves nan: of a rank without samples, total / count is no number, and its zeros "
         "times that are no zeros", lambda case, got: any(np.isnan(g).any() for r in got for g in flat(r["synced"]))),
    when("your gradient_sync (08.3) doesn't leave the mean over all ranks' samples in grads", wrong("synced")),
    when("your collective (10.3) doesn't leave the reduction of all ranks' x in x", wrong("reduced")),
]


# ---------------------------------------------------------------- sampler

def not_the_batches(batches, ranks):
    """A sentence if batches[rank][step] aren't all samples, each once and in batches of the right sizes."""
    if len({len(of_rank) for of_rank in batches}) > 1:
        return f"the ranks have different numbers of batches on {ranks} ranks"
    seen = np.bincount(np.concatenate([part for of_rank in batches for part in of_rank]), minlength=SAMPLES)
    if seen.max() > 1:
        return f"sample {seen.argmax()} is trained on {seen.max()} times in one epoch on {ranks} ranks"
    if seen.min() == 0:
        return f"{(seen == 0).sum()} of {SAMPLES} samples never come in an epoch on {ranks} ranks"
    for step, parts in enumerate(zip(*batches, strict=True)):
        size, right = sum(map(len, parts)), min(BATCH, SAMPLES - step * BATCH)
        if size != right:
            return f"batch {step + 1} has {size} samples instead of {right} on {ranks} ranks"
    return None


def same_batches(one, other, ordered=True):
    """Whether two answers batches[rank][step] have the same samples in every batch, and the ranks in the same order."""
    one, other = ([np.concatenate(parts) for parts in zip(*answer, strict=True)] for answer in (one, other))
    return all(np.array_equal(a, b) if ordered else np.array_equal(np.sort(a), np.sort(b))
               for a, b in zip(one, other, strict=True))


def wrong_sampler(got):
    """A sentence if some rank's answers to QUESTIONS don't fit together; None if they do."""
    for answers in (rank["batches"] for rank in got):
        first = answers["first"]
        if not same_batches(first, answers["again"]):
            return "asked twice for one epoch, it gives two orders: seed and epoch alone must decide, not how often " \
                   "it was called"
        for name, (_, _, ranks) in QUESTIONS.items():
            if found := not_the_batches(answers[name], ranks):
                return found
        if same_batches(first, answers["next epoch"]):
            return "two epochs have one order: hand the epoch on"
        if same_batches(first, answers["other seed"]):
            return "two seeds have one order: hand the seed on"
        for name in ("one rank", "three ranks"):
            if not same_batches(first, answers[name], ordered=False):
                return f"the batches on {name} aren't those on two ranks: the number of ranks must not touch the order"
    return None


def of_sampler(got):
    """wrong_sampler, of whatever it was that came back."""
    try:
        return wrong_sampler(got)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"what it returns can't be read as an index array per batch: {error}"
