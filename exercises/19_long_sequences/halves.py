"""19.4 in closed form, and what comes out with a mistake in it."""

import re

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from . import mistakes, softmaxes
from .softmaxes import INF

ALL = 10 ** 6       # keys in a block
KEYS = ("k", "v", "k_at")


# ---------------------------------------------------------------- what is asked for

def zigzag(time, rank, size):
    part = time // (2 * size)
    return np.concatenate([np.arange(rank * part, (rank + 1) * part),
                           np.arange(time - (rank + 1) * part, time - rank * part)])


def in_order(time, rank, size):
    return np.arange(time // size) + rank * (time // size)


def seen_by_any(q_at, k_at):
    """A pair of halves is needed if any query of the one sees any key of the other."""
    return bool((k_at[None, :] <= q_at[:, None]).any())


def chosen(rule):
    """(q_at, k_at) -> [[i, j]] for which rule(positions of half i, positions of half j)."""
    def of(q_at, k_at):
        return [[i, j] for i, mine in enumerate(np.split(q_at, 2)) for j, theirs in enumerate(np.split(k_at, 2))
                if rule(mine, theirs)]
    return of


def by_place(wanted):
    """(q_at, k_at) -> [[i, j]] for which wanted(i, j), whatever the positions."""
    return lambda q_at, k_at: [[i, j] for i in range(2) for j in range(2) if wanted(i, j)]


needed = chosen(seen_by_any)


def exchanged(q_at, k_at):
    return sorted([j, i] for i, j in needed(q_at, k_at))


def truth(case):
    """Of one rank's inputs."""
    if case["what"] == "layout":
        return {"positions": [zigzag(time, case["rank"], case["size"]) for time in case["times"]]}
    if case["what"] == "refused":
        return {"refused": True}
    if case["what"] == "products":
        return {"products": [needed(*pair) for pair in case["pairs"]]}
    if case["what"] in ("training", "unequal"):
        return {}
    q, k, v, q_at, k_at, mine = *(case[name] for name in ("q", "k", "v", "q_at", "k_at")), slice(*case["mine"])
    out, lse = softmaxes.exact(q, k[:, mine], v[:, mine], q_at, k_at[mine])[:2]
    forward = {"out": out, "lse": lse} if case["before"] is None else mistakes.joined((out, lse), case["before"])
    dq, dk, dv = softmaxes.exact_gradients(q, k, v, q_at, k_at, case["dout"], mine)
    return forward | {"dq": dq, "dk": dk[:, mine], "dv": dv[:, mine]}


# ---------------------------------------------------------------- the same with mistakes

def by_halves(case, find=needed, chain=True, start=lambda before: before, row=lambda i: i, again=False, nothing=-INF,
              idle=lambda before: before, exchanged=()):
    """(out, lse); the keywords are the mistakes.

    find   the needed products; row: (queries' half) -> that into which their result is written
    chain  whether a product's attention is told what its queries have seen before
    start  what `before` becomes at the beginning; again: it is counted anew with every product
    nothing    lse of who has seen nothing; idle: what `before` becomes where no product is needed
    exchanged  names of what is cut by the other side's half
    """
    q, k, v, q_at, k_at = parts(case)
    before = start(case["before"])
    before = before if find(q_at, k_at) else idle(before)
    out, lse = ((np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], nothing)) if before is None else
                (x.copy() for x in before))
    for i, j in find(q_at, k_at):
        cut = cuts(i, j, len(q_at), exchanged)
        one = softmaxes.attend(cut("q", q), cut("k", k), cut("v", v), cut("q_at", q_at), cut("k_at", k_at))
        rows = half(i, len(q_at))
        if again and before is not None:
            one = softmaxes.merge(one, tuple(x[:, rows] for x in before))
        into = half(row(i), len(q_at))
        out[:, into], lse[:, into] = softmaxes.merge((out[:, into], lse[:, into]), one) if chain else one
    return out, lse


def backward_by_halves(case, find=needed, add=(True, True), row=lambda i, j: (i, j), alone=False, exchanged=()):
    """(dq, dk, dv). add: whether a product's part is added to dq, and to dk and dv; row: (i, j) -> into which halves of
    these it goes; alone: with out and lse of the product by itself; exchanged: what is cut by the other side's half."""
    q, k, v, q_at, k_at = parts(case)
    found = [np.zeros(x.shape) for x in (q, k, v)]
    for i, j in find(q_at, k_at):
        cut = cuts(i, j, len(q_at), exchanged)
        given = cut("q", q), cut("k", k), cut("v", v), cut("q_at", q_at), cut("k_at", k_at)
        out, lse = softmaxes.attend(*given) if alone else (cut("out", case["out"]), cut("lse", case["lse"]))
        shares = softmaxes.backward(*given, out, lse, cut("dout", case["dout"]), ALL)
        to_q, to_k = (half(place, len(q_at)) for place in row(i, j))
        for grad, place, share, adds in zip(found, (to_q, to_k, to_k), shares, (add[0], add[1], add[1]), strict=True):
            grad[:, place] = grad[:, place] * adds + share
    return found


def cuts(i, j, n, exchanged):
    """(name, array) -> its half for the product (i, j). As many keys as queries, n."""
    def cut(name, x):
        place = half(j if (name in KEYS) != (name in exchanged) else i, n)
        return x[place] if x.ndim == 1 else x[:, place]
    return cut


def parts(case):
    mine = slice(*case["mine"])
    return case["q"], case["k"][:, mine], case["v"][:, mine], case["q_at"], case["k_at"][mine]


def half(i, n):
    return slice(i * n // 2, (i + 1) * n // 2)


def world(case, positions=zigzag, find=needed, forward=None, backward=None):
    """All ranks' outputs of a case; the keywords are the mistakes. forward, backward: keywords of the two above."""
    def of(rank):
        if rank["what"] == "layout":
            return {"positions": [positions(time, rank["rank"], rank["size"]) for time in rank["times"]]}
        if rank["what"] == "products":
            return {"products": [find(*pair) for pair in rank["pairs"]]}
        if rank["what"] != "halves":
            return truth(rank)
        with np.errstate(all="ignore"):
            out, lse = by_halves(rank, find, **(forward or {}))
            grads = backward_by_halves(rank, find, **(backward or {}))
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return of_each(case, of)


def of_each(case, function):
    """[function(a rank's inputs)]; once, where all ranks have the same."""
    if all(rank is case[0] for rank in case):
        return [function(case[0])] * len(case)
    return [function(rank) for rank in case]


def two_parts(numbers, second=1):
    """positions of two parts, numbers(rank, size); second: -1 for the second one from its end."""
    def of(time, rank, size):
        part = time // (2 * size)
        one, other = numbers(rank, size)
        return np.concatenate([one * part + np.arange(part), other * part + np.arange(part)[::second]])
    return of


POSITIONS = [
    ("a negative number counts from the end of a list; a position is a number, and the late part is 2·size - 1 - r",
     two_parts(lambda rank, size: (rank, -1 - rank))),
    ("the positions lie in order, rank after rank: so the last rank sees all, and the first one only itself. Rank r "
     "has part r and part 2·size - 1 - r of 2·size", in_order),
    ("positions are dealt out like cards, every size-th one to a rank: that balances as well (striped attention), but "
     "asked for are two stretches, part r and part 2·size - 1 - r",
     lambda time, rank, size: np.arange(rank, time, size)),
    ("parts r and r + size: then rank 0 has early ones of both halves. The late part is 2·size - 1 - r",
     two_parts(lambda rank, size: (rank, rank + size))),
    ("the late part is one too far: the parts are 0 … 2·size - 1, so it is 2·size - 1 - r",
     two_parts(lambda rank, size: (rank, 2 * size - rank))),
    ("the late part is one too early: it is 2·size - 1 - r", two_parts(lambda rank, size: (rank, 2 * size - 2 - rank))),
    ("the late part comes first: the early one, part r, does",
     two_parts(lambda rank, size: (2 * size - 1 - rank, rank))),
    ("the late part runs backwards: within a part positions rise",
     two_parts(lambda rank, size: (rank, 2 * size - 1 - rank), second=-1)),
    ("these are places on the rank, 0, 1, 2 …; asked for are positions in the whole sequence",
     lambda time, rank, size: np.arange(time // size)),
    ("only the early part: rank r has part 2·size - 1 - r, too",
     lambda time, rank, size: zigzag(time, rank, size)[:time // (2 * size)]),
    ("the parts are time // size long: there are 2·size of them, two for each rank",
     lambda time, rank, size: np.concatenate([np.arange(time // size) + number * (time // size)
                                              for number in (rank, 2 * size - 1 - rank)])),
]

PRODUCTS = [    # what is said, and which products are taken for the needed ones
    ("halves are pairs (queries' half, keys' half), in this order", exchanged),
    ("only products of a half with itself: a late query sees early keys, too", by_place(lambda i, j: i == j)),
    ("which products are needed isn't a matter of i and j: the positions say it, and they differ from rank to rank",
     by_place(lambda i, j: i >= j)),
    ("all four products are listed: one is left out if none of its queries sees any of its keys",
     chosen(lambda q, k: True)),
    ("a query sees the key at its own position: ≥, not >", chosen(lambda q, k: q[-1] > k[0])),
    ("a product is needed as soon as any of its queries sees any of its keys; you ask whether all queries see all keys",
     chosen(lambda q, k: q[0] >= k[-1])),
    ("ask the last query, which sees most: where the first one sees nothing, others may",
     chosen(lambda q, k: q[0] >= k[0])),
    ("ask for the first key, which is seen by most: where nobody sees the last one, others may be seen",
     chosen(lambda q, k: q[-1] >= k[-1])),
    ("the comparison is upside down: a query sees the keys at its own position and before it",
     chosen(lambda q, k: q[0] <= k[-1])),
]

HALVES = [
    ("`before` is lost where no product is needed: it is the result then", {"forward": {"idle": lambda before: None}}),
    ("`before` is lost: what the queries have seen of other keys counts",
     {"forward": {"start": lambda before: None}}),
    ("the second product of a half of queries replaces the first one's result: attention is to be told what these "
     "queries have seen by then", {"forward": {"chain": False}}),
    ("each product begins with `before` alone, so that a half's second one loses the first: attention is to be told "
     "what these queries have seen by then", {"forward": {"chain": False, "again": True}}),
    ("lse begins with 0, whose exponential is a weight of 1: a query that has seen nothing has -inf",
     {"forward": {"nothing": 0.0}}),
    ("`before` is counted with each product: after the first one it is in the result already",
     {"forward": {"again": True}}),
    ("the halves' results are exchanged: that of half i of the queries goes into half i of the result",
     {"forward": {"row": lambda i: 1 - i}}),
    ("dq of a half of queries is its last product's share: each product adds to it",
     {"backward": {"add": (False, True)}}),
    ("dk and dv of a half of keys are the last product's share: each product adds to it",
     {"backward": {"add": (True, False)}}),
    ("each product's last share replaces what was there: in dq, dk and dv it is added",
     {"backward": {"add": (False, False)}}),
    ("a product's dk and dv go into the keys' half j, not into i", {"backward": {"row": lambda i, j: (i, i)}}),
    ("a product's dq goes into the queries' half i, not into j", {"backward": {"row": lambda i, j: (j, j)}}),
    *[(f"{name} is cut by {'queries' if name in KEYS else 'keys'}' half: of the product (i, j) it is half "
       f"{'j, like the keys' if name in KEYS else 'i, like the queries'}",
       dict.fromkeys(passes, {"exchanged": (name,)}))
      for passes, names in ((("forward", "backward"), ("q_at", "k_at")), (("forward",), ("q_at", "k_at")),
                            (("backward",), ("q_at", "k_at", "out", "lse", "dout"))) for name in names],
    ("out and lse of each product by itself: backward is given those of all keys", {"backward": {"alone": True}}),
]

SIGNATURES = [
    when("no ValueError where time can't be cut into 2·size equal parts: some rank would have more positions than "
         "another, and a ring's messages are all of one size",
         lambda case, got: case[0]["what"] == "refused" and not all(rank["refused"] for rank in got)),
    *[gives(text, lambda case, positions=positions: world(case, positions)) for text, positions in POSITIONS],
    # Those that leave the list of products right come first: they explain nothing else by chance.
    *[gives(text, lambda case, how=how: world(case, **how)) for text, how in HALVES],
    *[gives(text, lambda case, find=find: world(case, find=find)) for text, find in PRODUCTS],
]


# ---------------------------------------------------------------- what is asked for beside right numbers

def most(case):
    """Pairs of a query and a key that the needed products hold."""
    q_at, k_at = case["q_at"], parts(case)[4]
    return len(needed(q_at, k_at)) * len(q_at) * len(k_at) // 4


def unlike(case, got):
    """What is wrong with a product of unequally many queries and keys, or None."""
    if "failed" in got["found"]:
        return got["found"]["failed"]
    right = truth(case | {"what": "halves"})
    wrong = [name for name, value in right.items() if not same(got["found"][name], value, 1e-9)]
    return " and ".join(wrong) + " wrong" if wrong else None


def names_both(said, time, size):
    """Whether a text names the length, and the ranks or their parts; which may be the same number, and is there twice
    then."""
    numbers = re.findall(r"\d+", said)
    if str(time) in numbers:
        numbers.remove(str(time))
        return not {str(size), str(2 * size)}.isdisjoint(numbers)
    return False


def of_halves(predicate):
    return lambda case, got: case[0]["what"] != "halves" or all(predicate(one, rank) for one, rank
                                                                in zip(case, got, strict=True))


DEMANDS = [
    demand(lambda case, got: f"the ValueError says {got[0]['said']!r:.70}: name both numbers, {case[0]['time']} and "
                             f"{2 * case[0]['size']} (or {case[0]['size']} ranks), so that one knows what to change",
           lambda case, got: case[0]["what"] != "refused" or all(
               names_both(rank["said"], one["time"], one["size"]) for one, rank in zip(case, got, strict=True))),
    demand(lambda case, got: f"right, but not of {len(case[0]['q_at'])} queries and {len(case[0]['k_at'])} keys: "
                             f"{unlike(case[0], got[0])}. Keys' halves are halves of the keys",
           lambda case, got: case[0]["what"] != "unequal" or unlike(case[0], got[0]) is None),
    demand(lambda case, got: f"right, but {got[0]['changed'][0]} isn't what it was before the call: work on a copy",
           of_halves(lambda one, rank: not rank["changed"])),
    demand(lambda case, got: f"right, but {got[0]['pairs'][0]} pairs of query and key are multiplied, where "
                             f"{most(case[0])} are in products of which anything is seen: give attention the halves",
           of_halves(lambda one, rank: rank["pairs"][0] <= most(one))),
    demand(lambda case, got: f"right, but in backward {got[0]['pairs'][1]} pairs of query and key are multiplied, "
                             f"where {most(case[0])} are in products of which anything is seen",
           of_halves(lambda one, rank: rank["pairs"][1] <= most(one))),
]


# ---------------------------------------------------------------- cases

def blocks(rng, layout, rank, sources, size=3, part=2, heads=2, features=3, width=4, mine=1):
    """A case of halves: rank's queries, the keys of one or two ranks; those of the last `mine` of these are at hand."""
    time = 2 * size * part
    q_at, k_at = layout(time, rank, size), np.concatenate([layout(time, source, size) for source in sources])
    q, k = rng.standard_normal((heads, len(q_at), features)), rng.standard_normal((heads, len(k_at), features))
    v, dout = rng.standard_normal((heads, len(k_at), width)), rng.standard_normal((heads, len(q_at), width))
    out, lse = softmaxes.exact(q, k, v, q_at, k_at)[:2]
    first = len(k_at) - mine * len(q_at)
    before = list(softmaxes.exact(q, k[:, :first], v[:, :first], q_at, k_at[:first])[:2]) if first else None
    return {"what": "halves", "q": q, "k": k, "v": v, "q_at": q_at, "k_at": k_at, "mine": [first, len(k_at)],
            "out": out, "lse": lse, "dout": dout, "before": before}


def cases(rng, ranks):
    """All of them but the training; most are the same on all ranks."""
    layouts = [{"what": "layout", "times": [2 * ranks, 6 * ranks, 10 * ranks], "rank": rank, "size": ranks}
               for rank in range(ranks)]
    fifths = [{"what": "layout", "times": [10, 30], "rank": 4 - rank, "size": 5} for rank in range(ranks)]
    pairs = [[layout(2 * 3 * part, rank, 3), layout(2 * 3 * part, source, 3)] for layout, part in
             ((zigzag, 2), (zigzag, 1), (in_order, 2)) for rank in range(3) for source in range(3)]
    # Positions with others between them, as they are with yet other layouts.
    pairs += [[np.array(q_at), np.array(k_at)] for q_at, k_at in (
        ([1, 5, 8, 12], [2, 6, 7, 9]), ([3, 4, 10, 11], [5, 9, 11, 14]), ([3, 9, 10, 20], [4, 6, 8, 30]))]
    drawn = [blocks(rng, *which) for which in (
        (zigzag, 1, (1, 0)), (zigzag, 1, (1, 2)), (zigzag, 2, (2,)), (zigzag, 0, (1, 0)), (in_order, 0, (2,)),
        (in_order, 1, (0, 1)), (in_order, 1, (0, 2)))]
    unequal = blocks(rng, zigzag, 1, (0, 2), mine=2) | {"what": "unequal"}
    refused = [{"what": "refused", "time": time, "size": ranks} for time in (3 * 7 * ranks, ranks)]
    return [layouts, fifths, *([case] * ranks for case in refused),
            [{"what": "products", "pairs": pairs}] * ranks, *([case] * ranks for case in drawn),
            [unequal] * ranks]
