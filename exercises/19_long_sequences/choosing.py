"""19.5: its cases, position by position, and with the mistakes that are known: functions that stand in for one another.
"""

import numpy as np

from .softmaxes import INF, attend, merge

SYMBOLS, BATCH, STEPS, FEATURES = 24, 4, 60, 24      # of the training run
LONG = {"what": "memory", "time": 1024, "size": 32, "count": 2}
RUN = {"size": 4, "count": 3, "rate": 0.05, "gain": 8.0}


# ---------------------------------------------------------------- the truth: a query after the other

def chosen_by(q, means, size, count):
    """[the blocks that each query of a head looks at], of a head's queries and mean keys."""
    found = []
    for at, query in enumerate(q):
        own = at // size
        products = [float(np.sum(query * means[block])) for block in range(own)]
        found.append(sorted(sorted(range(own), key=lambda block: -products[block])[:count - 1]) + [own])
    return found


def exact_choice(q, means, size, count):
    which = np.zeros((*q.shape[:2], -(-q.shape[1] // size)), bool)
    for head in range(len(q)):
        for at, blocks in enumerate(chosen_by(q[head], means[head], size, count)):
            which[head, at, blocks] = True
    return which


def exact_means(k, size):
    """In long doubles, a block after the other."""
    whole = range(k.shape[1] // size)
    found = [np.sum(k[:, block * size:block * size + size].astype(np.longdouble), 1) / size for block in whole]
    return np.stack(found, 1).astype(float) if found else np.zeros((len(k), 0, k.shape[2]))


def exact_attention(q, k, v, size, count):
    means, out = exact_means(k, size), np.zeros(v.shape)
    for head in range(len(q)):
        for at, blocks in enumerate(chosen_by(q[head], means[head], size, count)):
            seen = [s for block in blocks for s in range(block * size, min(block * size + size, at + 1))]
            scores = k[head, seen].astype(np.longdouble) @ q[head, at] / np.sqrt(np.longdouble(q.shape[2]))
            weights = np.exp(scores - scores.max())
            out[head, at] = weights / weights.sum() @ v[head, seen]
    return out


def truth(case):
    """Of a training run nothing: it is measured."""
    size, count = case["size"], case.get("count")
    if case["what"] == "means":
        return {"means": exact_means(case["k"], size)}
    if case["what"] == "choose":
        return {"chosen": exact_choice(case["q"], case["means"], size, count)}
    return {"out": exact_attention(case["q"], case["k"], case["v"], size, count)} if case["what"] == "attention" else {}


def wanted(case):
    """Pairs of a query and a key in chosen blocks, all heads'."""
    which = exact_choice(case["q"], exact_means(case["k"], case["size"]), case["size"], case["count"])
    return int((which.sum((0, 1)) * lengths(which.shape[2], case)).sum())


def lengths(blocks, case):
    """How many keys each block has."""
    return np.minimum(case["size"], case["q"].shape[1] - case["size"] * np.arange(blocks))


# ---------------------------------------------------------------- rightly, and with mistakes: mean keys

def mean_keys(k, size):
    return grouped(k, size).mean(2)


def grouped(k, size):
    """The keys of whole blocks, [heads, blocks, size, features]."""
    blocks = k.shape[1] // size
    return k[:, :blocks * size].reshape(len(k), blocks, size, k.shape[2])


def of_groups(reduce):
    return lambda k, size: reduce(grouped(k, size))


def last_too(divide):
    """With the mean of the last block, if it is shorter: its sum over divide(its keys, size)."""
    def of(k, size):
        rest = k[:, k.shape[1] // size * size:]
        if not rest.shape[1]:
            return mean_keys(k, size)
        return np.concatenate([mean_keys(k, size), rest.sum(1, keepdims=True) / divide(rest.shape[1], size)], 1)
    return of


def strided(k, size):
    """Every n-th key, of n blocks."""
    blocks = k.shape[1] // size
    return k[:, :blocks * size].reshape(len(k), size, blocks, k.shape[2]).mean(1)


def from_the_end(k, size):
    """Blocks that end with the last key."""
    return mean_keys(k[:, k.shape[1] % size:], size)


def of_all_before(k, size):
    """The mean of all keys up to the block's end."""
    ends = np.arange(size, k.shape[1] + 1, size)
    return np.cumsum(k, 1)[:, ends - 1] / ends[:, None]


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def single(function):
    """In float32."""
    return lambda *args: np.asarray(function(*(x.astype(np.float32) if isinstance(x, np.ndarray) else x for x in args)),
                                    dtype=float)


# ---------------------------------------------------------------- the choice

def products(q, means, size):
    return q @ means.transpose(0, 2, 1)


def greatest(scores, n):
    """The n greatest of each query; the earlier of equals."""
    return ranks(-scores) < n


def ranks(scores):
    return np.argsort(np.argsort(scores, 2, kind="stable"), 2)


def choose(q, means, size, count, score=products, here=lambda at, size: at // size, before=np.less, blank=-INF,
           pick=greatest, others=lambda count: count - 1, put=lambda best, allowed, own: best & allowed | own,
           together=False):
    """What is asked for; the keywords are the mistakes.

    score   (q, means, size) -> [heads, queries, blocks]; blank: that of a block that isn't allowed
    here    (position, size) -> its own block; before: (block, own) -> whether it may be chosen
    pick    (scores, others(count)) -> bool; put: (it, allowed, own) -> the result
    together  the own block is picked with the others, as the best of all
    """
    at, number = np.arange(q.shape[1]), np.arange(-(-q.shape[1] // size))
    own = here(at, size)[:, None]
    scores = np.full((*q.shape[:2], len(number)), -INF)
    found = score(q, means, size)[:, :, :len(number)]
    scores[:, :, :found.shape[2]] = found
    allowed = before(number, own)
    scores = np.where(allowed, scores, blank)
    if together:
        scores = np.where(number == own, INF, scores)
    return put(pick(scores, others(count) + together), allowed, number == own)


def rounded_down(q, means, size, count, together):
    """Where a last block that is shorter isn't among those to choose from."""
    found, whole = choose(q, means, size, count)[:, :, :q.shape[1] // size], q.shape[1] // size * size
    if together:        # of its queries none takes its own block's place
        found[:, whole:] = choose(q, means, size, count + 1)[:, whole:, :found.shape[2]]
    return found


def least_alike(q, means, size):
    return -products(q, means, size)


def absolute(q, means, size):
    return np.abs(products(q, means, size))


def cut_at_0(q, means, size):
    return np.maximum(products(q, means, size), 0)


def nearest(q, means, size):
    return products(q, means, size) * 0 + np.arange(means.shape[1])


def earliest(q, means, size):
    return -nearest(q, means, size)


def by_distance(q, means, size):
    return -((q[:, :, None] - means[:, None]) ** 2).sum(3)


def by_angle(q, means, size):
    return products(q, unit(means), size)


def heads_together(q, means, size):
    return np.broadcast_to(products(q, means, size).sum(0), (len(q), q.shape[1], means.shape[1]))


def of_first_head(q, means, size):
    return np.broadcast_to(products(q, means, size)[0], (len(q), q.shape[1], means.shape[1]))


def of_first_mean(q, means, size):
    """Mean keys of head 0."""
    return q @ means[0].T


def queries_together(q, means, size):
    """One choice for a block's queries, by their mean."""
    at = np.arange(q.shape[1]) // size
    mean = np.stack([q[:, at == block].mean(1) for block in range(at[-1] + 1)], 1)
    return products(mean[:, at], means, size)


def first_of_block(q, means, size):
    """One choice for a block's queries, by the first of them."""
    return products(q[:, np.arange(q.shape[1]) // size * size], means, size)


def all_so_far(q, means, size):
    """By the sum of the queries so far."""
    return products(np.cumsum(q, 1), means, size)


def later_of_equals(scores, n):
    return ranks(scores[:, :, ::-1] * -1)[:, :, ::-1] < n


def sorted_once(scores, n):
    """The numbers of the best taken for ranks."""
    return np.argsort(-scores, 2, kind="stable") < n


def all_as_good(scores, n):
    """And those that are as good as the last of them."""
    n = min(n, scores.shape[2])
    return scores >= np.sort(scores, 2)[:, :, -n:-n + 1 or None] if n > 0 else np.zeros(scores.shape, bool)


def last_of_none(scores, n):
    """[-n:], which is everything for n = 0."""
    return greatest(scores, n) if n else np.ones(scores.shape, bool)


def by_blocks(scores, n):
    """Each block takes the n queries that agree with it most."""
    return greatest(scores.swapaxes(1, 2), n).swapaxes(1, 2)


def above_mean(scores, n):
    return scores >= np.where(np.isfinite(scores), scores, 0).sum(2, keepdims=True) / np.maximum(
        1, np.isfinite(scores).sum(2, keepdims=True))


# ---------------------------------------------------------------- attention, block by block

def rising(blocks, whole):
    return range(blocks)


def attention(q, k, v, which, size, order=rising, q_at=lambda rows, at, size: rows, k_at=lambda at, size: at,
              before=lambda out, lse, rows: (out[:, rows], lse[:, rows]), into=lambda rows: rows, put=merge,
              values_of=lambda v, head: v[head:head + 1], keys_of=lambda k, head: k[head:head + 1], nothing=(0.0, -INF),
              of=attend, twice=False, end=lambda out, which: out):
    """What is asked for; the keywords are the mistakes.

    which    as choose gives it; order: (blocks, whole ones) -> in which they are taken
    q_at     (rows, positions of the block, size) -> the queries' positions; k_at: (positions of the block, size) -> the
             keys'
    before   (out, lse, rows) -> what is merged with the block's; put: in place of merge; nothing: out and lse at first
    into     rows -> where the result is written; twice: the own block once more
    values_of, keys_of  (v or k, head) -> the head's values, or keys
    of       in place of attend; end: (out, which) -> out
    """
    out, lse = np.full(v.shape, nothing[0]), np.full(q.shape[:2], nothing[1])
    at = np.arange(q.shape[1])
    for head in range(len(q)):
        one = out[head:head + 1], lse[head:head + 1]
        for block in order(which.shape[2], q.shape[1] // size):
            keys, rows = slice(block * size, (block + 1) * size), np.flatnonzero(which[head, :, block])
            takes = [rows, rows[rows // size == block]] if twice else [rows]
            for rows in takes:
                found = of(q[head:head + 1, rows], keys_of(k, head)[:, keys], values_of(v, head)[:, keys],
                           q_at(rows, at[keys], size), k_at(at[keys], size))
                found = put(found, before(*one, rows))
                for mine, new in zip(one, found, strict=True):
                    mine[:, into(rows)] = new
    return end(out, which)


def added(one, other):
    """Two softmaxes, one beside the other."""
    return one[0] + other[0], one[1]


def halved(one, other):
    """A mean of what was and what is new, whatever they weigh."""
    return np.where((other[1] == -INF)[..., None], one[0], (one[0] + other[0]) / 2), one[1]


def by_count(out, which):
    return out / which.sum(2)[:, :, None]


def replaced(one, other):
    return one


def lse_of_block(one, other):
    """The mean is merged, and lse is that of the block."""
    return merge(one, other)[0], one[1]


def run(case, means=mean_keys, pick=choose, whole=attention, end=lambda out: out, kept=False):
    """The outputs of a case, with mistakes in any of the functions. kept: the choice is the first call's."""
    size, count = case["size"], case.get("count")
    with np.errstate(all="ignore"):
        if case["what"] == "means":
            return {"means": means(case["k"], size)}
        if case["what"] == "choose":
            return {"chosen": pick(case["q"], case["means"], size, count)}
        if case["what"] == "attention":
            q, k, v = (case[name] for name in "qkv")
            by = case.get("first", case) if kept else case
            which = pick(by["q"], means(by["k"], size), size, count)
            return {"out": end(whole(q, k, v, np.asarray(which, bool), size))}
    return {}


# ---------------------------------------------------------------- cases

def sizes(rng, heads, time, features, width):
    return {"q": rng.standard_normal((heads, time, features)), "k": rng.standard_normal((heads, time, features)) + 0.3,
            "v": rng.standard_normal((heads, time, width)) + 1}


def means_cases(rng):
    return [{"what": "means", "k": rng.standard_normal(shape) + 0.5, "size": size}
            for *shape, size in ((2, 14, 3, 4), (1, 9, 2, 3), (3, 5, 4, 1), (2, 3, 3, 4), (2, 24, 2, 6))]


def choose_cases(rng):
    found = []
    for heads, time, features, size, count, sign in (
            (3, 27, 4, 4, 3, 0), (2, 22, 3, 3, 2, -1), (2, 13, 2, 2, 1, 0), (2, 14, 3, 4, 9, 0), (1, 9, 2, 1, 3, 0),
            (2, 3, 2, 4, 2, 0), (2, 24, 3, 3, 2, 1), (2, 41, 3, 5, 4, 0)):
        q, means = rng.standard_normal((heads, time, features)), rng.standard_normal((heads, time // size, features))
        if sign:
            q, means = sign * np.abs(q), np.abs(means)
        if sign < 0:
            q *= 1e10        # nobody's -1e9 is below these products
        if sign > 0:
            means[:, 1::2] = means[:, :-1:2] * (1 + 1e-10)      # a little better than the one before
        found.append({"what": "choose", "q": q, "means": means, "size": size, "count": count})
    # Small whole numbers, whose products are equal to the last bit where they are equal: and a query of zeros.
    q, means = (rng.integers(-1, 2, shape).astype(float) for shape in ((2, 80, 2), (2, 40, 2)))
    q[:, [11, 20, 75]] = 0
    return [*found, {"what": "choose", "q": q, "means": means, "size": 2, "count": 4}]


def attention_cases(rng):
    found = [{"what": "attention", **sizes(rng, *shape), "size": size, "count": count} for *shape, size, count in (
        (2, 23, 3, 4, 4, 3), (2, 23, 3, 4, 4, 3), (1, 13, 2, 3, 5, 2), (2, 9, 3, 2, 2, 1), (1, 6, 2, 3, 8, 2),
        (2, 12, 3, 3, 3, 9), (1, 10, 3, 2, 1, 3), (3, 32, 4, 4, 4, 2), (1, 96, 4, 2, 8, 3))]
    found[2]["q"] = found[2]["q"] * 900      # scores in the thousands, of either sign
    # What somebody would go on with who keeps something from the first call.
    found[1]["first"] = {name: found[0][name] for name in "qk"}
    return found


def training(rng):
    """Of every sequence the second half is the first one again."""
    half = np.argsort(rng.random((STEPS, BATCH, SYMBOLS)), 2)
    return {"what": "training", "symbols": np.concatenate([half, half], 2),
            "table": rng.standard_normal((2, SYMBOLS + 1, FEATURES)), **RUN}


def cases(rng):
    return [*means_cases(rng), *choose_cases(rng), *attention_cases(rng), LONG, training(rng)]
