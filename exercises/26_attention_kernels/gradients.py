"""What 26.3 is to give, and what known mistakes in it give."""

import numpy as np

from exercises.frame import gives, when
from exercises.frame.kernels import harm

from .blockwise import IN_BYTES, TF32, anything, block_of, grid_turned, mostly_outside, nearly, own_position_too


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


def begun(of_queries=None, of_keys=None):
    """A function of the case: of the first kernel only the programs of the first of_queries(time, queries, sources)
    positions are begun, of the second those of the first of_keys(…); None: all of them."""
    def found(case):
        time, right = case["q"].shape[1], backward(case)
        ends = [time if f is None else f(time, *block_of(case)) for f in (of_queries, of_keys)]
        if min(ends) >= time:
            return None
        for names, end in zip((("D", "q_bar"), ("k_bar", "v_bar")), ends, strict=True):
            for name in names:
                right[name][:, end:] = np.nan
        if ends[0] < time:
            right["k_bar"][:] = np.nan      # every key is seen by the last query, which has no D
        return right
    return found


def whole(axis):
    """For begun(): those in whole blocks."""
    return lambda time, *sizes: time // sizes[axis] * sizes[axis]


def blocks_of_the_other(axis):
    """For begun(): programs are as many as the other kernel has."""
    return lambda time, *sizes: -(-time // sizes[1 - axis]) * sizes[axis]


def walk(axis, visited):
    """A function of the case: along the keys (axis 0) or the queries (1) only those are met for which visited(rows,
    places, queries, sources, time)."""
    def found(case):
        sizes = (*block_of(case), case["q"].shape[1])
        wrong = backward(case, seen=lambda rows, places, *_: (places <= rows) & visited(rows, places, *sizes))
        names = ("q_bar",) if axis == 0 else ("k_bar", "v_bar")
        return backward(case) | {name: wrong[name] for name in names}
    return found


def last_blocks(aligned):
    """A function of the case: of each sum the last block alone. aligned: along the queries blocks begin at multiples of
    their size, not at the first of the keys."""
    def along_keys(rows, places, queries, sources, time):
        end = np.minimum(rows // queries * queries + queries, time)
        return places >= (end - 1) // sources * sources

    def along_queries(rows, places, queries, sources, time):
        begin = 0 if aligned else places // sources * sources
        return rows >= begin + (time - 1 - begin) // queries * queries

    def found(case):
        return walk(0, along_keys)(case) | {name: walk(1, along_queries)(case)[name] for name in ("k_bar", "v_bar")}
    return found


def by_one_more_scale(case):
    right = backward(case)
    return right | {name: right[name] * case["scale"] for name in ("q_bar", "k_bar")}


def swapped_parts(s, p, q, k, bar):
    return {"q_bar": s @ q, "k_bar": s.swapaxes(1, 2) @ k, "v_bar": p.swapaxes(1, 2) @ bar}


def divided_by_lse(case, got):
    """Whether the weights were exp(score) / lse; of an lse near 0 a rounding is as large as the rest."""
    with np.errstate(all="ignore"):
        theirs = backward(case, weights=lambda scores, lse: np.exp(scores) / lse[..., None])["q_bar"]
    clear = np.abs(case["lse"]) > 0.1
    return np.abs(got["q_bar"] - theirs)[clear].max() <= 1e-3 * np.abs(theirs[clear]).max()


MISTAKES = [
    gives("D is left out: it is Σ p p̄, what the softmax's own sum takes back",
          wrong_gradient(D=lambda bar, out: np.zeros(bar.shape[:2]))),
    gives("D is added: s̄ = p (ō vᵀ - D)", lambda case: backward(case, D=lambda bar, out: -(bar * out).sum(-1))
          | {"D": backward(case)["D"]}),
    gives("D is a sum of ō alone: Σ ō·o", wrong_gradient(D=lambda bar, out: bar.sum(-1))),
    gives("D is Σ o²: one of the two is ō, the gradient by out",
          wrong_gradient(D=lambda bar, out: (out * out).sum(-1))),
    gives("D is a mean over the features: it is a sum", wrong_gradient(D=lambda bar, out: (bar * out).mean(-1))),
    gives("q_bar lacks the scale", wrong_gradient(of_queries=False)),
    gives("k_bar lacks the scale", wrong_gradient(of_keys=False)),
    gives("neither q_bar nor k_bar has the scale", wrong_gradient(of_queries=False, of_keys=False)),
    gives("multiplied by the scale twice: it is in s̄ already", by_one_more_scale),
    gives("v_bar is multiplied by the scale: values have nothing to do with it", lambda case: backward(
        case, of_values=case["scale"])),
    gives("the weights are exp(score), without lse: they don't add up to 1",
          wrong_gradient(weights=lambda scores, lse: np.exp(scores))),
    gives("powers of 2 in the place of e's: exp(x) is exp2(x · log₂ e)",
          wrong_gradient(weights=lambda scores, lse: np.exp2(scores - lse[..., None]))),
    when("the weights are exp(score) / lse: lse is a logarithm already, exp(score - lse)", divided_by_lse),
    gives("the weights are made without the scale: exp(q·k · scale - lse)", lambda case: backward(
        case, weights=lambda scores, lse: np.exp(scores / case["scale"] - lse[..., None]))),
    gives("not causal: every query sees all keys", wrong_gradient(seen=anything)),
    gives("a query sees itself, too: keys up to its own position, <= and not <",
          wrong_gradient(seen=lambda rows, places, *_: places < rows)),
    gives("q_bar is made of queries, and k_bar of keys: q̄ = s̄ k, and k̄ = s̄ᵀ q",
          wrong_gradient(parts=swapped_parts)),
    gives("k_bar and v_bar are swapped", lambda case: (lambda right: right | {
        "k_bar": right["v_bar"], "v_bar": right["k_bar"]})(backward(case))),
    gives("v_bar is made of s̄: v̄ = pᵀ ō", wrong_gradient(parts=lambda s, p, q, k, bar: {
        "q_bar": s @ k, "k_bar": s.swapaxes(1, 2) @ q, "v_bar": s.swapaxes(1, 2) @ bar})),
    gives("k_bar is made of the weights: k̄ = s̄ᵀ q, of their gradients", wrong_gradient(
        parts=lambda s, p, q, k, bar: {"q_bar": s @ k, "k_bar": p.swapaxes(1, 2) @ q,
                                       "v_bar": p.swapaxes(1, 2) @ bar})),
    gives("along the keys the last block is left out, in which these queries are themselves", walk(
        0, lambda rows, places, queries, sources, time: places < -(-(rows // queries * queries) // sources) * sources)),
    gives("along the keys the loop ends with the block of the first of these queries: the last one sees further", walk(
        0, lambda rows, places, queries, sources, time: places // sources <= rows // queries * queries // sources)),
    gives("the loop goes over as many blocks of keys as there are blocks of queries up to here: the two have sizes of "
          "their own", walk(0, lambda rows, places, queries, sources, time: places // sources <= rows // queries)),
    gives("along the queries the first block is left out: a key is seen at its own position already", walk(
        1, lambda rows, places, queries, sources, time: rows >= places // sources * sources + queries)),
    gives("along the queries as many blocks are left out as there are blocks of keys up to here: the two have sizes of "
          "their own", walk(1, lambda rows, places, queries, sources, time: rows // queries >= places // sources)),
    *(gives("a sum's last block alone: what the loop finds is to be added up, and each turn begins anew",
            last_blocks(aligned)) for aligned in (False, True)),
    when(TF32, nearly(backward, 1e-2, together=True)),
    gives("the second kernel's grid has blocks of queries: its programs have keys, cdiv(time, SOURCES) blocks of "
          "them", begun(of_keys=blocks_of_the_other(1))),
    gives("the first kernel's grid has blocks of keys: its programs have queries, cdiv(time, QUERIES) blocks of them",
          begun(of_queries=blocks_of_the_other(0))),
    *(gives(f"{which} rounded down: the last positions, fewer than a block, have no program", begun(*ends))
      for which, ends in (("the first kernel's grid is", (whole(0), None)), ("the second kernel's grid is", (
          None, whole(1))), ("both grids are", (whole(0), whole(1))))),
    *(when(f"the {which} kernel's grid is turned: its first number counts blocks, and tl.program_id(0) goes with it",
           grid_turned(backward, name, axis)) for axis, (which, name) in enumerate((("first", "q_bar"),
                                                                                   ("second", "v_bar")))),
    when("the steps between heads and positions are the arrays' own; those of lse and D are time and 1",
         lambda case, got: case["steps"] != {}),
    when(IN_BYTES, mostly_outside),
    when("D is never written", lambda case, got: np.isnan(got["D"]).all()),
    when("D of all heads lies where head 0's is: heads are `time` apart", lambda case, got: len(case["q"]) > 1
         and np.isnan(got["D"][1:]).all() and not np.isnan(got["D"][0]).any()),
    *(when(f"{name} isn't stored, or is added to what lay there, which may be anything: a sum stays on the chip, and "
           "is stored once", lambda case, got, name=name: got["unwritten"][name] == case[name].size
           and np.isnan(got[name]).all()) for name in ("q_bar", "k_bar", "v_bar")),
    when("D is read before it is written: the queries kernel, which stores it, must be launched first",
         lambda case, got: np.isnan(got["k_bar"]).all() and not np.isnan(got["v_bar"]).any()
         and not np.isnan(got["D"]).any()),
    when("padded lanes are undefined: what lies behind the last position has weight 0, but 0 · nan is nan. "
         "`other=0.0` for all that is multiplied", lambda case, got: any(
             np.isnan(got[name]).any() for name in ("q_bar", "k_bar", "v_bar")) and harm(got, "outside") == 0
         and any(case["q"].shape[1] % size for size in block_of(case))),
    when("an element is written by two programs: a sum over queries belongs to one program of keys, and another's "
         "share would overwrite it", lambda case, got: harm(got, "two programs") > 0),
    when("a store goes beyond the last position: its mask asks for < time",
         lambda case, got: harm(got, "written outside") > 0),
    when("a load goes beyond the last position: queries and keys end at `time`",
         lambda case, got: harm(got, "read outside") > 0),
]
