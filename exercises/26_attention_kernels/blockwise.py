"""What 26.2 is to give, and what known mistakes in it give: the same walk along the keys in float64, with one thing
wrong; and what 26.3 shares with it."""

import numpy as np

from exercises.frame.kernels import harm

DEFAULT = (32, 32)


def block_of(case):
    """(QUERIES, SOURCES)"""
    return tuple(case["block"] or DEFAULT)


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
            divided=True, last=None, each_block=False, of_lse=None, values="v", base=np.exp, keys_of=None,
            queries_of=None, unseen=-np.inf, replaced=True):
    """{"out", "lse"} in float64. The keywords are mistakes:

    seen(rows, places, first query, first place, time)      scale     the scores' factor, in the place of the case's
    start     of the largest                                keep_…   whether the sums are scaled down
    divided     by the total, or "in each block"; each_block: a softmax of each     values    whose are taken
    last(first query, queries, sources, time)   end of the loop     base      of the powers
    of_lse(largest, total)                      keys_of(h), queries_of(h)     of which head keys and values, queries are
    unseen    the score of keys that aren't seen            replaced  whether a larger score becomes the largest
    """
    heads, time, size = case["q"].shape
    queries, sources = block_of(case)
    scale = case["scale"] if scale is None else scale(case)
    out, lse = np.full((heads, time, size), np.nan), np.full((heads, time), np.nan)
    with np.errstate(all="ignore"):
        for h in range(heads):
            other = h if keys_of is None else keys_of(h)
            q = case["q"][h if queries_of is None else queries_of(h)].astype(float)
            k, v = (np.pad(case[name][other].astype(float), ((0, sources), (0, 0))) for name in ("k", values))
            for first in range(0, time, queries):
                rows = np.arange(first, min(first + queries, time))
                largest = np.full(len(rows), float(start))
                total, found = np.zeros(len(rows)), np.zeros((len(rows), size))
                end = first + queries if last is None else last(first, queries, sources, time)
                for place in range(0, min(end, time), sources):
                    places = np.arange(place, place + sources)      # those behind the end are padding, 0
                    scores = q[rows] @ k[places].T * scale
                    scores = np.where(seen(rows[:, None], places, first, place, time), scores, unseen)
                    grown = np.maximum(largest, scores.max(axis=1))
                    kept = base(largest - grown)
                    p = base(scores - grown[:, None])
                    if each_block:
                        found, total = found + p / p.sum(axis=1)[:, None] @ v[places], total + 1
                    else:
                        total = total * (kept if keep_total else 1) + p.sum(axis=1)
                        found = found * (kept[:, None] if keep_found else 1) + p @ v[places]
                        found = found / total[:, None] if divided == "in each block" else found
                    largest = grown if replaced else largest
                out[h, rows] = found / total[:, None] if divided is True else found
                lse[h, rows] = (largest + np.log(total)) if of_lse is None else of_lse(largest, total)
    return {"out": out, "lse": lse}


def wrong(**how):
    """A function of the case."""
    return lambda case: forward(case, **how)


def wrong_lse(of_lse):
    return lambda case: forward(case, of_lse=of_lse)


def of_head_0(which):
    """A function of the case, which says nothing where there is no other head."""
    return lambda case: None if len(case["q"]) == 1 else forward(case, **{which: lambda h: 0})


def begun(queries_of_programs):
    """A predicate: out and lse are there of the first queries_of_programs(time, queries, sources), and of no others."""
    def predicate(case, got):
        time, right = case["q"].shape[1], forward(case)
        end = queries_of_programs(time, *block_of(case))
        return end < time and all(
            np.isnan(got[name][:, end:]).all() and np.allclose(got[name][:, :end], a[:, :end], rtol=1e-4, atol=1e-4)
            for name, a in right.items())
    return predicate


def grid_turned(truth, name, axis):
    """A predicate: of truth(case)[name], whose blocks are of block_of(case)[axis], all is there that a program works on
    if the grid's numbers are swapped, and no more."""
    def predicate(case, got):
        heads, time = case["q"].shape[:2]
        blocks = np.arange(time) // block_of(case)[axis]
        worked_on = (blocks < heads)[None, :] & (np.arange(heads) <= blocks[-1])[:, None]
        right = np.where(worked_on[..., None], truth(case)[name], np.nan)
        return not worked_on.all() and np.allclose(got[name], right, rtol=1e-4, atol=1e-4, equal_nan=True)
    return predicate


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


# ---------------------------------------------------------------- both

TF32 = ('right to three digits: without input_precision="ieee" tl.dot multiplies float32 as tf32, whose numbers have '
        "10 bits behind the leading one")


def nearly(truth, off, together=False):
    """A predicate: all of truth(case) is there, but for such a part of the largest number: of each output's own, or,
    together, of all outputs', where differences of larger numbers may be almost 0."""
    def predicate(case, got):
        right = truth(case)
        most = {name: np.abs(a).max() for name, a in right.items()}
        return harm(got, "") == 0 and all(np.abs(got[name] - a).max() <= off * (max(most.values()) if together
                                                                                else most[name])
                                          for name, a in right.items())
    return predicate


def all_there_are(rows, places, first, place, time):
    """In the place of the causal mask."""
    return np.broadcast_to(places < time, np.broadcast_shapes(rows.shape, places.shape))


def anything(rows, places, *_):
    """The same, padding as well."""
    return np.full(np.broadcast_shapes(rows.shape, places.shape), True)


IN_BYTES = "the steps are in bytes: strides are, but pointers in a kernel count elements. Divide by itemsize"


def mostly_outside(case, got):
    """Whether more is written outside than padding could be, of the arrays that have steps."""
    names = {"out", "q_bar", "k_bar", "v_bar"} & case.keys()
    made = sum(case[name].size for name in names if np.isnan(case[name]).all())
    return harm(got, "written outside") >= 0.6 * made
