"""What two tables of 16.1 must say, found by experiment: arrays are cut, multiplied and joined, messages counted."""

import numpy as np

LAYOUTS = ("R", "S0", "S1", "P")
NAMES = ("nothing", "slice", "all_gather", "reduce_scatter", "all_to_all", "all_reduce")
RANKS = 3


def share(n, rank, size):
    return slice(n * rank // size, n * (rank + 1) // size)


def parts(rng, x, placement, size):
    """Any parts of x in a layout; of "P" addends that are all different."""
    if placement == "R":
        return [x.copy() for _ in range(size)]
    if placement == "P":
        addends = [rng.standard_normal(x.shape).astype(x.dtype) for _ in range(size - 1)]
        return [*addends, (x - sum(addends)).astype(x.dtype)] if addends else [x.copy()]
    axis = int(placement[1])
    return [np.take(x, range(*share(x.shape[axis], rank, size).indices(x.shape[axis])), axis) for rank in range(size)]


def joined(values, placement):
    if placement == "R":
        same = all(value.shape == values[0].shape and np.allclose(value, values[0]) for value in values)
        return values[0] if same else None
    return sum(values) if placement == "P" else np.concatenate(values, int(placement[1]))


# ---------------------------------------------------------------- products

def experiment(x, w):
    """(what can't be multiplied, or None; the layouts in which the ranks' products are X·W)."""
    rng = np.random.default_rng(16)
    whole = rng.standard_normal((5, 7)), rng.standard_normal((7, 4))
    pairs = list(zip(parts(rng, whole[0], x, RANKS), parts(rng, whole[1], w, RANKS), strict=True))
    for rank, (one, other) in enumerate(pairs):
        if one.shape[1] != other.shape[0]:
            return f"rank {rank} would multiply {list(one.shape)} by {list(other.shape)}", []
    found = []
    for layout in LAYOUTS:
        try:
            value = joined([one @ other for one, other in pairs], layout)
        except ValueError:
            continue
        if value is not None and value.shape == (5, 4) and np.allclose(value, whole[0] @ whole[1]):
            found.append(layout)
    return None, found


def products():
    """{(x, w): the layout of the product, or None}."""
    return {(x, w): (experiment(x, w)[1] or [None])[0] for x in LAYOUTS for w in LAYOUTS}


def said(got, x, w):
    return got["products"][f"{x} {w}"]


def shown(value):
    return f'"{value}"' if isinstance(value, str) else repr(value)


def strange_product(case, got):
    return first_of(lambda x, w: said(got, x, w) not in (*LAYOUTS, None) and (
        f'product("{x}", "{w}") is {shown(said(got, x, w))}; it must be "R", "S0", "S1", "P" or None'))


def taken_for_replicated(case, got):
    if said(got, "S1", "S0") == "R":
        return ('product("S1", "S0") isn\'t "R": every rank has a matrix of the right shape, but only its share of the '
                "contraction is in it. Those are partial sums, another one on each rank")
    return first_of(lambda x, w: said(got, x, w) == "R" and "P" in (x, w) and (
        f'product("{x}", "{w}") isn\'t "R": a rank that multiplies an addend has an addend of the product, not the '
        "product"))


def one_side_only(case, got):
    return first_of(lambda x, w: said(got, x, w) is not None and experiment(x, w)[0] and (
        f'product("{x}", "{w}") can\'t be done: {experiment(x, w)[0]}. The contraction is split on one side only, or '
        "into other pieces"), pairs=[("S1", "R"), ("R", "S0"), ("S1", "S1"), ("S0", "S0"), ("P", "S0"), ("S1", "P")])


def blocks(case, got):
    return said(got, "S0", "S1") is not None and (
        'product("S0", "S1"): rank r makes the block of its rows and its columns, of which there are N on the '
        "diagonal; the blocks beside it nobody makes")


def crossed(case, got):
    return said(got, "P", "P") is not None and (
        'product("P", "P"): (x₀ + x₁)(w₀ + w₁) is more than x₀w₀ + x₁w₁; x₀w₁ and x₁w₀ are missing. Only one of the '
        "two may be partial")


def half_partial(case, got):
    return first_of(lambda x, w: said(got, x, w) is not None and products()[x, w] is None and "P" in (x, w) and (
        f'product("{x}", "{w}") is {shown(said(got, x, w))} in your table: a rank has one addend of the one, and of '
        "the other only its own part, so most of what addends and parts would make together is made by nobody"))


def too_shy(case, got):
    return first_of(lambda x, w: said(got, x, w) is None and products()[x, w] is not None and (
        f'product("{x}", "{w}") isn\'t None: each rank can multiply its parts, and what they get is the product in one '
        "of the layouts. Cut two small matrices, and look"))


def other_layout(case, got):
    return first_of(lambda x, w: said(got, x, w) != products()[x, w] and (
        f'product("{x}", "{w}") is {shown(said(got, x, w))} in your table; the ranks\' products, put together so, '
        "aren't X·W"))


def first_of(sentence, pairs=None):
    """The first sentence that there is, over pairs of layouts; False where there is none."""
    found = (sentence(x, w) for x, w in pairs or [(x, w) for x in LAYOUTS for w in LAYOUTS])
    return next((text for text in found if text), False)


# ---------------------------------------------------------------- moves

def sent(name, nbytes, size):
    """Bytes that one rank sends, message by message."""
    part = nbytes / size
    around = sum(part for _ in range(size - 1))                         # a part in each step of the ring
    return {"nothing": 0, "slice": 0, "all_gather": around, "reduce_scatter": around, "all_reduce": around + around,
            "all_to_all": sum(part / size for _ in range(size - 1))}[name]


def moves(case):
    """{(have, want): (name, bytes)}: what each rank lacks decides."""
    found = {}
    for have in LAYOUTS:
        for want in LAYOUTS[:-1]:
            name = {"R": "slice", "P": "reduce_scatter"}.get(have, "all_to_all")
            if want == "R":
                name = "all_reduce" if have == "P" else "all_gather"
            name = "nothing" if have == want else name
            found[have, want] = name, sent(name, case["nbytes"], case["size"])
    return found


def in_moves(sentence):
    """Rule: the first sentence(case, (have, want), their name, their bytes) that there is."""
    def rule(case, got):
        for pair in moves(case):
            value = got["moves"][" ".join(pair)]
            if not (isinstance(value, list) and len(value) == 2):
                return f"{called(pair)} must give a name and a number of bytes, and gave {shown(value)}"
            text = sentence(case, pair, *value)
            if text:
                return text
        return False
    return rule


def called(pair):
    return f'move("{pair[0]}", "{pair[1]}")'


def unknown_name(case, pair, name, nbytes):
    return name not in NAMES and f"{called(pair)} is {shown(name)}; it must be one of {', '.join(NAMES)}"


def needless(case, pair, name, nbytes):
    return pair[0] == "R" and name not in ("nothing", "slice") and (
        f"{called(pair)} is {shown(name)}, and nothing need be sent: every rank has all of it already")


def too_much(case, pair, name, nbytes):
    if pair[0] == "P" and pair[1] != "R" and name == "all_reduce":
        return (f"{called(pair)}: an all-reduce brings every sum to every rank, at 2(N-1)/N·M bytes; each rank wants "
                "the sums of its own share only, and there is a collective for that at half the price")
    return pair in (("S0", "S1"), ("S1", "S0")) and name == "all_gather" and (
        f"{called(pair)}: an all-gather brings everything to every rank, which then drops most of it; each rank lacks "
        "only where its new share crosses the others' old ones")


def no_sum(case, pair, name, nbytes):
    return pair[0] == "P" and name in ("all_gather", "all_to_all", "slice", "nothing") and (
        f"{called(pair)} is {shown(name)}: that moves the addends, and nobody adds them up")


def summed_for_nothing(case, pair, name, nbytes):
    return pair[0].startswith("S") and name in ("all_reduce", "reduce_scatter") and (
        f"{called(pair)} is {shown(name)}: the parts of a split aren't addends, they lie beside each other")


def other_name(case, pair, name, nbytes):
    return name != moves(case)[pair][0] and f"{called(pair)} is {shown(name)}, after which it isn't \"{pair[1]}\""


# sentence of a wrong number of bytes, {kind of move, or None for any: bytes}
PRICES = [
    ("an all-reduce takes a reduce-scatter and an all-gather, and yours has the bytes of one of them",
     "all_reduce", lambda M, N: (N - 1) / N * M),
    ("in an all-reduce nobody sends the whole array to all others: pieces travel, 2(N-1) of M/N bytes each",
     "all_reduce", lambda M, N: (N - 1) * M),
    ("nothing is sent twice in a reduce-scatter; that is the price of an all-reduce", "reduce_scatter",
     lambda M, N: 2 * (N - 1) / N * M),
    ("in an all-to-all a rank sends each other rank a part of its part, M/N² bytes; yours would be right if it sent "
     "all of its part to everybody", "all_to_all", lambda M, N: (N - 1) / N * M),
    ("a rank keeps the share that is for itself: of N shares it sends N-1", None, lambda M, N: M),
    ("a rank keeps the share that is for itself: of N shares it sends N-1", "all_to_all", lambda M, N: M / N),
    ("a rank keeps the share that is for itself: of N shares it sends N-1", "all_reduce", lambda M, N: 2 * M),
    ("the bytes given are those of the global array; what a rank has, and sends, is an N-th of it", None,
     lambda M, N: (N - 1) * M),
    ("the bytes given are those of the global array, of which N-1 messages go out, a share each; yours is one", None,
     lambda M, N: M / N),
]


def price(case, pair, name, nbytes):
    expected = moves(case)[pair][1]
    number = isinstance(nbytes, (int, float)) or getattr(nbytes, "ndim", None) == 0
    if number and abs(nbytes - expected) <= 1e-9 * (1 + abs(expected)):
        return False
    what = f"{called(pair)} of {case['nbytes']} bytes on {case['size']} ranks: {name} sends {shown(nbytes)} per rank?"
    if not number:
        return f"{what} A number was asked for"
    if expected == 0:
        return f"{what} A rank that only drops something sends 0"
    for sentence, kind, formula in PRICES:
        if kind in (name, None) and abs(nbytes - formula(case["nbytes"], case["size"])) <= 1e-9 * nbytes:
            return f"{what} {sentence[0].upper()}{sentence[1:]}"
    return f"{what} Count: how many messages leave a rank, of how many bytes each?"


PRODUCT_RULES = [strange_product, taken_for_replicated, one_side_only, blocks, crossed, half_partial, too_shy,
                 other_layout]
MOVE_RULES = [in_moves(rule) for rule in (unknown_name, needless, no_sum, summed_for_nothing, too_much, other_name,
                                          price)]
