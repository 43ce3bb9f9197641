"""What 26.2 and 26.3 are to give, and what known mistakes in them give: the same walk along the keys in float64, with
one thing wrong."""

import numpy as np

DEFAULT = (32, 32)


def block_of(case):
    """(QUERIES, SOURCES)"""
    return tuple(case["block"].get("block", DEFAULT))


def own_position_too(rows, places, *_):
    return places <= rows


def walked(case, by_queries=None):
    """Rows of keys that all programs of a head load together, where blocks in which nobody sees anything are left out;
    by_queries: the rows of queries that programs of keys load."""
    time, (queries, sources) = case["q"].shape[1], block_of(case)
    if by_queries:
        return sum(time - first // queries * queries for first in range(0, time, sources))
    return sum(min(-(-min(first + queries, time) // sources) * sources, time) for first in range(0, time, queries))


def multiplied_at_most(case, along_keys, along_queries=0):
    """Multiply-adds of so many products per pair of blocks, padding and all, of programs of queries that walk along the
    keys, and of the others; blocks of which nothing is seen are left out."""
    heads, time, size = case["q"].shape
    queries, sources = block_of(case)
    by_queries = sum(-(-min(first + queries, time) // sources) for first in range(0, time, queries))
    by_keys = sum(-(-time // queries) - first // queries for first in range(0, time, sources))
    return heads * queries * sources * size * (along_keys * by_queries + along_queries * by_keys)


def forward(case, seen=own_position_too, scale=None, start=-np.inf, keep_total=True, keep_found=True,
            divided=True, last=None, each_block=False, of_lse=None, values="v", base=np.exp, head=None):
    """{"out", "lse"} in float64. The keywords are mistakes:

    seen(rows, places, first query, first place, time)      scale     the scores' factor, in the place of the case's
    start     of the largest                                keep_…   whether the sums are scaled down
    divided     by the total, or "in each block"; each_block: a softmax of each     values    whose are taken
    last(first query, queries, sources, time)   end of the loop     base      of the powers
    of_lse(largest, total)                                      head(h)     whose keys and values
    """
    heads, time, size = case["q"].shape
    queries, sources = block_of(case)
    scale = case["scale"] if scale is None else scale(case)
    out, lse = np.full((heads, time, size), np.nan), np.full((heads, time), np.nan)
    with np.errstate(all="ignore"):
        for h in range(heads):
            other = h if head is None else head(h)
            q = case["q"][h].astype(float)
            k, v = (np.pad(case[name][other].astype(float), ((0, sources), (0, 0))) for name in ("k", values))
            for first in range(0, time, queries):
                rows = np.arange(first, min(first + queries, time))
                largest = np.full(len(rows), float(start))
                total, found = np.zeros(len(rows)), np.zeros((len(rows), size))
                end = first + queries if last is None else last(first, queries, sources, time)
                for place in range(0, min(end, time), sources):
                    places = np.arange(place, place + sources)      # those behind the end are padding, 0
                    scores = q[rows] @ k[places].T * scale
                    scores = np.where(seen(rows[:, None], places, first, place, time), scores, -np.inf)
                    grown = np.maximum(largest, scores.max(axis=1))
                    kept = base(largest - grown)
                    p = base(scores - grown[:, None])
                    if each_block:
                        found, total = found + p / p.sum(axis=1)[:, None] @ v[places], total + 1
                    else:
                        total = total * (kept if keep_total else 1) + p.sum(axis=1)
                        found = found * (kept[:, None] if keep_found else 1) + p @ v[places]
                        found = found / total[:, None] if divided == "in each block" else found
                    largest = grown
                out[h, rows] = found / total[:, None] if divided is True else found
                lse[h, rows] = (largest + np.log(total)) if of_lse is None else of_lse(largest, total)
    return {"out": out, "lse": lse}


def wrong(**how):
    """A function of the case."""
    return lambda case: forward(case, **how)


def wrong_lse(of_lse):
    return lambda case: forward(case, of_lse=of_lse)


def float32_underflow(case):
    """The largest begins at 0, and float32's exponentials of scores far below it are 0."""
    found = forward(case)
    low = found["lse"] < -104
    return {"out": np.where(low[..., None], np.nan, found["out"]), "lse": np.where(low, -np.inf, found["lse"])}


def overflown(case, got):
    """Whether out is right but where exponentials of scores are more, or less, than float32 holds, and not finite
    there."""
    right = forward(case)
    extreme = np.abs(right["lse"]) > 80
    fine = np.isclose(got["out"], right["out"], rtol=1e-4, atol=1e-4).all(axis=-1)
    return extreme.any() and fine[~extreme].all() and not np.isfinite(got["out"][~fine]).any(axis=-1).all()


# ---------------------------------------------------------------- 26.3

def backward(case, D=None, of_queries=True, of_keys=True, of_values=1.0, seen=own_position_too, weights=None,
             parts=None):
    """{"q_bar", "k_bar", "v_bar", "D"} in float64. The keywords are mistakes: what D is (a function of out_bar and out,
    or a number), whether the sums by queries and by keys are multiplied by the scale, a factor of values' gradients,
    who sees whom, weights(scores, lse), and parts(s, p, q, k, bar), which gives the three sums."""
    q, k, v, out, bar = (case[name].astype(float) for name in ("q", "k", "v", "out", "out_bar"))
    scale, at = case["scale"], np.arange(q.shape[1])
    visible = seen(at[:, None], at)
    with np.errstate(all="ignore"):
        scores = np.where(visible, q @ k.swapaxes(1, 2) * scale, -np.inf)
        p = np.exp(scores - case["lse"].astype(float)[..., None]) if weights is None else weights(scores, case["lse"])
        d = (bar * out).sum(axis=-1) if D is None else D(bar, out)
        s = p * (bar @ v.swapaxes(1, 2) - d[..., None])
        if parts is not None:
            return {"D": d, **parts(s * scale, p, q, k, bar)}
        return {"q_bar": s @ k * (scale if of_queries else 1),
                "k_bar": s.swapaxes(1, 2) @ q * (scale if of_keys else 1), "v_bar": of_values * p.swapaxes(1, 2) @ bar,
                "D": d}


def wrong_gradient(**how):
    return lambda case: backward(case, **how)


def grid_of_queries(case):
    """Programs of keys are as many as there are blocks of queries: those behind are left."""
    (queries, sources), found = block_of(case), backward(case)
    begun = -(-case["q"].shape[1] // queries) * sources
    if begun >= case["q"].shape[1]:
        return None
    for name in ("k_bar", "v_bar"):
        found[name][:, begun:] = np.nan
    return found


def left_out(axis):
    """A function of the case: the gradients where the walk along the keys (axis 0) or the queries (1) leaves out the
    blocks on the diagonal."""
    def found(case):
        queries, sources = block_of(case)
        before = {0: lambda rows, places, *_: places < -(-(rows // queries * queries) // sources) * sources,
                  1: lambda rows, places, *_: rows >= places // sources * sources + queries}[axis]
        right = backward(case)
        wrong = backward(case, seen=lambda rows, places, *_: (places <= rows) & before(rows, places))
        names = ("q_bar",) if axis == 0 else ("k_bar", "v_bar")
        return right | {name: wrong[name] for name in names}
    return found
