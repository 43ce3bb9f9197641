"""19.1 and 19.2 in closed form, and with the mistakes that are known: functions that stand in for one another."""

import numpy as np

INF = np.inf
WIDTH = 5


def sees(q_at, k_at):
    return k_at <= q_at[:, None]


def scores_of(q, k):
    return q @ k.transpose(0, 2, 1) * q.shape[2] ** -0.5


# ---------------------------------------------------------------- the truth: row by row, over the keys that are seen

def exact(q, k, v, q_at, k_at):
    """(out, lse, [the keys seen by query t], weights[head][t] of these), in long doubles."""
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    out, lse = np.zeros((len(q), q.shape[1], v.shape[2])), np.full(q.shape[:2], -INF)
    seen = [np.flatnonzero(k_at <= at) for at in q_at]
    weights = [[np.zeros(0)] * len(q_at) for _ in q]
    for head in range(len(q)):
        for t, keys in enumerate(seen):
            if len(keys):
                row = k[head, keys] @ q[head, t] / np.sqrt(np.longdouble(q.shape[2]))
                exps = np.exp(row - row.max())
                weights[head][t] = exps / exps.sum()
                out[head, t] = weights[head][t] @ v[head, keys]
                lse[head, t] = row.max() + np.log(exps.sum())
    return out, lse, seen, weights


def exact_gradients(q, k, v, q_at, k_at, dout, mine=slice(None)):
    """(dq, of the keys `mine` alone, dk, dv), by the softmax's Jacobian, row by row."""
    *_, seen, weights = exact(q, k, v, q_at, k_at)
    dq, dk, dv, counts = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(len(k_at))
    counts[mine] = 1
    for head in range(len(q)):
        for t, keys in enumerate(seen):
            p = weights[head][t].astype(float)
            by_p = v[head, keys] @ dout[head, t]
            by_score = (p * by_p - p * (p @ by_p)) / np.sqrt(q.shape[2])
            dq[head, t] = by_score * counts[keys] @ k[head, keys]
            dk[head, keys] += by_score[:, None] * q[head, t]
            dv[head, keys] += p[:, None] * dout[head, t]
    return dq, dk, dv


# ---------------------------------------------------------------- 19.1, in pieces

def finite(top):
    return np.where(top == -INF, 0, top)


def row_maximum(scores):
    return scores.max(-1, keepdims=True, initial=-INF)


def attend(q, k, v, q_at, k_at, scores=scores_of, seen=sees, hidden=-INF, late=False, top=row_maximum, unit=finite,
           mean=True, lse=lambda top, total: top + np.log(total), empty=None):
    """What is asked for; the keywords are the mistakes.

    scores, seen  (q, k) -> scores, (q_at, k_at) -> mask; hidden: the score of what isn't seen
    late          what isn't seen is left out after the weights have been divided by their sum
    top           scores -> what is subtracted; unit: the same where that is -inf
    mean          whether out is divided by the sum; lse: (greatest, sum) -> lse
    empty         (out, lse) of a query that sees nothing
    """
    mask = seen(q_at, k_at)
    s = scores(q, k) if late else np.where(mask, scores(q, k), hidden)
    greatest = top(s)
    p = np.exp(s - unit(greatest))
    total = p.sum(-1, keepdims=True)
    share = p / (np.where(total == 0, 1, total) if mean else 1)
    found, log = (share * mask if late else share) @ v, lse(greatest, total)[..., 0]
    if empty is not None:
        nothing = ~mask.any(-1)
        found[:, nothing], log[:, nothing] = empty
    return found, log


def over_queries(q, k, v, q_at, k_at):
    """Softmax along the wrong axis."""
    s = np.where(sees(q_at, k_at), scores_of(q, k), -INF)
    p = np.exp(s - finite(s.max(1, keepdims=True)))
    total = p.sum(1, keepdims=True)
    return p / np.where(total == 0, 1, total) @ v, attend(q, k, v, q_at, k_at)[1]


def uniform(q, k, v, q_at, k_at):
    """-1e9 instead of -inf: a query that sees nothing looks at all keys alike."""
    return attend(q, k, v, q_at, k_at, hidden=-1e9)


def added(one, other):
    """log(exp + exp)."""
    return np.logaddexp(one, other)


def shares(one, other, log):
    """The weights of two sets whose sum has the logarithm log; 0 where there is nothing."""
    return [np.where(own == -INF, 0, np.exp(own - finite(log)))[..., None] for own in (one, other)]


def merge(one, other, lse=added, weigh=shares):
    """What is asked for; lse: (one's, the other's) -> lse; weigh: (the two, lse) -> their weights."""
    log = lse(one[1], other[1])
    first, second = weigh(one[1], other[1], added(one[1], other[1]))
    return one[0] * first + other[0] * second, log


def ones_weight(first, second=None):
    """For `weigh`: constants."""
    return lambda one, other, log: (first, first if second is None else second)


def by_logarithm(one, other, log):
    """Weights by lse, not by its exponential."""
    return one[..., None] / (one + other)[..., None], other[..., None] / (one + other)[..., None]


def crossed(one, other, log):
    return shares(one, other, log)[::-1]


def first_stays(one, other, log):
    """The old mean isn't made smaller."""
    return np.where(one == -INF, 0, 1)[..., None], shares(one, other, log)[1]


def second_whole(one, other, log):
    return shares(one, other, log)[0], np.where(other == -INF, 0, 1)[..., None]


def undivided(one, other, log):
    """exp(lse - the greater), not divided by their sum."""
    return shares(one, other, np.maximum(one, other))


def blocks(n, block):
    return [(first, min(first + block, n)) for first in range(0, n, block)]


def attention(q, k, v, q_at, k_at, before, block, piece=attend, put=merge, cut=blocks, start=lambda before: before,
              places=lambda k_at, first, last: k_at[first:last], end=lambda state, before: state):
    """What is asked for; the keywords are the mistakes.

    piece, put  in place of attend and merge
    cut         (keys, block) -> [(first, last)]
    start       what `before` becomes at the beginning; end: (result, before) -> result
    places      (k_at, first, last) -> the positions of these keys
    """
    state = start(before)
    for first, last in cut(len(k_at), block):
        one = piece(q, k[:, first:last], v[:, first:last], q_at, places(k_at, first, last))
        state = one if state is None else put(state, one)
    return end(state, before)


def full_blocks(n, block):
    """The rest is lost."""
    return [(first, first + block) for first in range(0, n - block + 1, block)] or [(0, 0)]


def overlapping(n, block):
    return [(first, min(last + 1, n)) for first, last in blocks(n, block)]


def without_first(n, block):
    return blocks(n, block)[1:] or [(0, 0)]


def first_only(n, block):
    return blocks(n, block)[:1]


def not_later(case, which):
    """For `cut`: without the blocks whose first key (which=0), or last (-1), comes later than all the case's queries.
    """
    return lambda n, block: [(first, last) for first, last in blocks(n, block)
                             if case["k_at"][first:last][which] <= case["q_at"].max()] or [(0, 0)]


def running(scale_sum=True, scale_mean=True, begin=-INF, update=np.maximum):
    """For `run`: attention with a running maximum, sum and unnormalised mean; the keywords are the mistakes.

    begin  the maximum before anything was seen; update: (it, a block's) -> the next
    """
    def of(q, k, v, q_at, k_at, before, block):
        shape = q.shape[:2]
        if before is None:
            m, total, mean = np.full((*shape, 1), begin), np.zeros((*shape, 1)), np.zeros((*shape, v.shape[2]))
        else:
            m, total = before[1][..., None], np.where(before[1] == -INF, 0, 1.0)[..., None]
            mean = before[0] * total
        for first, last in blocks(len(k_at), block):
            s = np.where(sees(q_at, k_at[first:last]), scores_of(q, k[:, first:last]), -INF)
            new = update(m, row_maximum(s))
            shrink, p = np.exp(m - finite(new)), np.exp(s - finite(new))
            total = total * (shrink if scale_sum else 1) + p.sum(-1, keepdims=True)
            mean = mean * (shrink if scale_mean else 1) + p @ v[:, first:last]
            m = new
        return mean / np.where(total == 0, 1, total), (m + np.log(total))[..., 0]
    return of


def mean_of_pieces(q, k, v, q_at, k_at, before, block):
    """For `run`: the mean over the blocks, whatever their keys weigh."""
    found = [attend(q, k[:, first:last], v[:, first:last], q_at, k_at[first:last])
             for first, last in blocks(len(k_at), block)] + [before] * (before is not None)
    log = found[0][1]
    for _, more in found[1:]:
        log = added(log, more)
    return sum(out for out, _ in found) / len(found), log


def run(case, piece=attend, put=merge, whole=None, **how):
    """The outputs of a case, with mistakes in any of the functions. whole: in place of attention."""
    given = {name: value for name, value in case.items() if name != "what"}
    with np.errstate(all="ignore"):
        if case["what"] == "attend":
            found = piece(**given)
        elif case["what"] == "merge":
            found = put(case["one"], case["other"])
        elif case["what"] == "attention":
            found = whole(**given) if whole else attention(**given, piece=piece, put=put, **how)
        else:
            return {}
    return {"out": found[0], "lse": found[1]}


# ---------------------------------------------------------------- 19.2

def weights(q, k, q_at, k_at, lse, scores=scores_of, seen=sees, late=False):
    """What is asked for. late: what isn't seen is multiplied by 0 after exp, which may be inf."""
    mask, s = seen(q_at, k_at), scores(q, k) - lse[..., None]
    return np.exp(s) * mask if late else np.exp(np.where(mask, s, -INF))


def renewed(q, k, q_at, k_at, lse):
    """A softmax of these keys alone."""
    s = np.where(sees(q_at, k_at), scores_of(q, k), -INF)
    p = np.exp(s - finite(row_maximum(s)))
    total = p.sum(-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


def unscaled(q, k):
    return q @ k.transpose(0, 2, 1)


def of_all_keys(p, by_p, out, dout):
    return (dout * out).sum(-1, keepdims=True)


def of_these_keys(p, by_p, out, dout):
    return (p * by_p).sum(-1, keepdims=True)


def by_scores(p, by_p, D):
    return p * (by_p - D)


def total(shares):
    return sum(shares)


def backward(q, k, v, q_at, k_at, out, lse, dout, block, p=weights, D=of_all_keys, s=by_scores,
             scale=(-0.5, -0.5, 0.0), dv=lambda p, s, dout: p.transpose(0, 2, 1) @ dout,
             dk=lambda s, q, k: s.transpose(0, 2, 1) @ q, dq=total, cut=blocks, places=lambda k_at, first, last:
             k_at[first:last]):
    """What is asked for; the keywords are the mistakes.

    p, D, s     weights; (p, p̄, out, dout) -> D; (p, p̄, D) -> s̄
    scale       the powers of size by which dq, dk and dv are multiplied
    dv, dk      from (p, s̄, dout) and (s̄, q, k), of a block; dq: [a block's share] -> dq
    cut, places as above
    """
    size, shares, found = q.shape[2], [], [np.zeros(k.shape), np.zeros(v.shape)]
    for first, last in cut(len(k_at), block):
        keys, values = k[:, first:last], v[:, first:last]
        weight = p(q, keys, q_at, places(k_at, first, last), lse)
        by_p = dout @ values.transpose(0, 2, 1)
        slope = s(weight, by_p, D(weight, by_p, out, dout))
        shares.append(slope @ keys)
        found[0][:, first:last] += dk(slope, q, keys)
        found[1][:, first:last] += dv(weight, slope, dout)
    found = [dq(shares) if shares else np.zeros(q.shape), *found]
    return [x * size ** power for x, power in zip(found, scale, strict=True)]


def run_backward(case, p=weights, **how):
    """The outputs of a case of 19.2."""
    if case["what"] == "memory":
        return {}
    mine = slice(*case["mine"])
    q, k, v, q_at, k_at = case["q"], case["k"][:, mine], case["v"][:, mine], case["q_at"], case["k_at"][mine]
    with np.errstate(all="ignore"):
        if case["what"] == "weights":
            return {"weights": p(q, k, q_at, k_at, case["lse"])}
        found = backward(q, k, v, q_at, k_at, case["out"], case["lse"], case["dout"], case["block"], p=p, **how)
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


# ---------------------------------------------------------------- cases

def positions(rng, queries, keys):
    """(q_at, k_at): one query sees nothing, one everything, one the first key only, and two stand at a key's position;
    keys in any order."""
    k_at = 3 + rng.permutation(2 * keys)[:keys]
    q_at = np.concatenate([[2, 3 + 2 * keys, k_at.min()], rng.choice(k_at, 2, replace=False),
                           3 + rng.integers(2 * keys, size=max(queries - 5, 0))])
    return rng.permutation(q_at), k_at


def draw(rng, heads=2, queries=6, keys=7, size=2, width=WIDTH, level=0.0, slope=0.0,
         future=0.0):
    """q, k, v, q_at, k_at. level: about what scores are moved by; per query it is that, or less, of either sign if
    level is complex. slope: by how much scores grow from the first to the last key. future: what the scores of the
    later half of positions have more."""
    q, k = rng.standard_normal((heads, queries, size)), rng.standard_normal((heads, keys, size))
    # A feature of its own carries the level, so that differences between scores stay what they are.
    lift = np.full(queries, level.real + future)
    if isinstance(level, complex):
        lift = level.imag * np.linspace(-1, 1, queries)
    root = (size + 1) ** 0.5
    q = np.concatenate([q, np.broadcast_to(lift[None, :, None] + 1, (heads, queries, 1)) * root], -1)
    k = np.concatenate([k, np.ones((heads, keys, 1))], -1)
    k[..., 0] += slope * np.linspace(-0.5, 0.5, keys)
    q[..., 0] = np.abs(q[..., 0]) + 1 if slope else q[..., 0]
    q_at, k_at = positions(rng, queries, keys)
    if future:
        k[..., -1] = k_at > np.median(k_at)
    return {"q": q, "k": k, "v": rng.standard_normal((heads, keys, width)) + 1, "q_at": q_at, "k_at": k_at}


def hidden_above(case, by=1500.0):
    """Some query that sees something has a greater score by far with a key that it doesn't see."""
    scores, mask = scores_of(case["q"], case["k"]), sees(case["q_at"], case["k_at"])
    seen, rest = (np.where(which, scores, -INF).max(-1) for which in (mask, ~mask))
    return bool(((rest > seen + by) & np.isfinite(seen)).any())


def draw_hidden_above(rng, **how):
    """draw until it is so: whether one sees little depends on the positions."""
    while not hidden_above(case := draw(rng, future=3000.0, **how)):
        pass
    return case


def one_key(case):
    """Of the keys the middle one alone: some queries see it, some don't."""
    middle = np.argsort(case["k_at"])[[len(case["k_at"]) // 2]]
    return case | {"k": case["k"][:, middle], "v": case["v"][:, middle], "k_at": case["k_at"][middle]}


def hide(case, block):
    """The case, with keys that come later than all queries: the whole first block, the first key of each other one, and
    the second one's last."""
    k_at, number = case["k_at"].copy(), np.arange(len(case["k_at"]))
    hidden = (number < block) | (number % block == 0) | (number == 2 * block - 1)
    k_at[hidden] = case["q_at"].max() + 1 + number[hidden]
    return case | {"k_at": k_at}


def pieces(rng, lses, width=3):
    """(out, lse) with these lse, [heads, queries]; out is 0 where lse is -inf."""
    lse = np.array(lses, float)
    return [np.where(lse == -INF, 0, 1 + rng.standard_normal((width, *lse.shape))).transpose(1, 2, 0), lse]
