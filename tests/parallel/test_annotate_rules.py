"""Layouts, sharding rules and choices as data, without ranks. What they make of ops is test_annotate.py's."""

import itertools
import math

import numpy as np
import pytest

from minitorch_dist.parallel.sharding import choice
from minitorch_dist.parallel.sharding.layouts import (
    COPIES,
    SUM,
    WHOLE,
    Layout,
    Shard,
    held,
    inside,
    nested,
    parts,
    scaled,
)
from minitorch_dist.parallel.sharding.moves import moves, sent
from minitorch_dist.parallel.sharding.rules import RULES, factors, named


def operand(shape, wants_gradient=True, **placements):
    return choice.Operand(shape, Layout(len(shape), placements), math.prod(shape) * 8, wants_gradient)


def test_layouts_print():
    assert str(Layout(2, {"dp": Shard(0), "tp": Shard(1)})) == "(dp, tp)"
    assert str(Layout(2, {"tp": SUM})) == "(·, ·) + Σtp"
    assert str(Layout(1, {"tp": Shard(0, (8, 4, 4))})) == "(tp[8|4|4],)"
    assert str(Layout(0, {"dp": SUM, "tp": WHOLE})) == "() + Σdp"
    assert str(Layout(2, {"tp": Shard(0, (4, 4)), "dp": Shard(0), "ep": Shard(1, (3, 4))})) == "(dp × tp:2, ep:2)"
    assert Layout(2, {"tp": WHOLE}) == Layout(2) and Layout(2)["tp"] == WHOLE


@pytest.mark.parametrize(("extent", "sections"), [(7, ()), (12, ()), (12, (6, 3, 3)), (3, ())])
def test_parts_are_disjoint_and_complete(extent, sections):
    for n in (1, 3):
        held = [[i for lo, hi in parts(extent, sections, rank, n) for i in range(lo, hi)] for rank in range(n)]
        assert sorted(i for own in held for i in own) == list(range(extent))
        layout, ranks = Layout(2, {"tp": Shard(1, sections)}), range(n)
        assert [layout.local_shape((5, extent), {"tp": (r, n)}) for r in ranks] == [(5, len(own)) for own in held]
    assert scaled((8, 4), 3, 12) == (2, 1) and scaled((2, 1), 12, 3) == (8, 4) and scaled((3, 1), 2, 4) is None


@pytest.mark.parametrize(("extent", "sizes"), [(9, (4, 2)), (7, (2, 3)), (13, (3, 1, 2)), (12, (2, 2, 3))])
def test_parts_of_parts_are_disjoint_and_complete(extent, sizes):
    """Against one cut after another, by hand."""
    cuts = []
    for n in sizes:
        cuts.append((inside(extent, cuts), n))
    assert nested(extent, cuts)
    for at in itertools.product(*map(range, sizes)):
        lo, hi = 0, extent
        for rank, n in zip(at, sizes, strict=True):
            lo, hi = lo + (hi - lo) * rank // n, lo + (hi - lo) * (rank + 1) // n
        here = [(sections, rank, n) for (sections, n), rank in zip(cuts, at, strict=True)]
        assert [i for a, b in held(extent, here) for i in range(a, b)] == list(range(lo, hi)) and lo < hi


def random_layout(rng, shape, sizes):
    """A legal one: each axis cuts some dimension or none, inside of what those before it have left."""
    placements, cuts = {}, [[] for _ in shape]
    for axis in rng.permutation(list(sizes)).tolist():
        dim = int(rng.integers(-1, len(shape)))
        if dim >= 0:
            placements[axis] = Shard(dim, inside(shape[dim], cuts[dim]))
            cuts[dim].append((placements[axis].sections, sizes[axis]))
    return Layout(len(shape), placements)


def rows(extent, layout, dim, ranks):
    """By hand: what a rank has of a dimension, those rows that it has by every axis."""
    found = np.arange(extent)
    for axis, p in layout.shards.items():
        if p.dim == dim:
            pieces = np.split(np.arange(extent), np.cumsum(p.sections)[:-1]) if p.sections else [np.arange(extent)]
            r, n = ranks[axis]
            found = np.intersect1d(found, np.concatenate([s[len(s) * r // n:len(s) * (r + 1) // n] for s in pieces]))
    return found


def test_a_move_sees_what_the_other_axes_leave_of_three():
    rng, sizes, shape, tried = np.random.default_rng(0), {"dp": 2, "tp": 2, "ep": 3}, (13, 25), 0
    for _ in range(40):
        old, new = random_layout(rng, shape, sizes), random_layout(rng, shape, sizes)
        ranks, now = {axis: (int(rng.integers(n)), n) for axis, n in sizes.items()}, dict(old.placements)
        for move in moves(shape, old, {axis: new[axis] for axis in sizes}, sizes):
            for p, cut in zip((move.old, move.new), move.cuts(shape, ranks), strict=True):
                left = rows(shape[p.dim], move.beside, p.dim, ranks) if cut else ()
                for rank in range(sizes[move.axis]) if cut else ():
                    there = Layout(2, move.beside.placements | {move.axis: p})
                    own = rows(shape[p.dim], there, p.dim, ranks | {move.axis: (rank, sizes[move.axis])})
                    assert np.concatenate([left[lo:hi] for lo, hi in cut.pieces[rank]]).tolist() == own.tolist()
                    tried += len(own) > 0
            assert now.pop(move.axis, WHOLE) == move.old
            now[move.axis] = move.new
            Layout(2, now).check("moves", shape, sizes)
        assert Layout(2, now) == new
    assert tried > 200


def test_axes_that_cut_across_each_others_parts_are_refused():
    assert nested(8, [((4, 4), 2), ((), 2)]) and nested(8, [((), 2), ((), 1)])
    assert not nested(8, [((), 2), ((), 2)]) and not nested(8, [((4, 4), 2), ((4, 4), 2)])
    assert not nested(8, [((), 2), ((2, 6), 2)]) and not nested(4, [((), 2), ((2, 2), 3)])
    sizes = {"dp": 2, "tp": 2}
    with pytest.raises(ValueError, match=r"axes 'dp' and 'tp' are to cut dimension 0 of shape \(8, 3\)"):
        Layout(2, {"dp": Shard(0), "tp": Shard(0)}).check("f", (8, 3), sizes)
    with pytest.raises(ValueError, match="3 elements, fewer than the 4 ranks of axes 'dp' and 'tp'"):
        Layout(1, {"dp": Shard(0), "tp": Shard(0, (1, 2))}).check("f", (3,), sizes)


@pytest.mark.parametrize(("text", "shapes", "expected"), [
    ("…ik,…kj->…ij", [(5, 1, 2, 3), (4, 3, 2)], "(…2, ·, i, k) (…1, k, j) -> (…2, …1, i, j)"),
    ("…,…->…", [(3, 1), (4,)], "(…2, ·) (…1) -> (…2, …1)"),
    ("bc*,oc*,o->bo*", [(2, 3, 5, 5), (4, 3, 2, 2), ()], "(b, c, ·, ·) (o, c, ·, ·) () -> (b, o, ·, ·)"),
])
def test_letters_become_factors(text, shapes, expected):
    assert str(named(text, shapes)) == expected


def test_extents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 6\), \(2, 6\) don't fit: 4 meets 2"):
        named("…,…->…", [(4, 6), (2, 6)])
    assert factors([["a", "b"]], [["b"]], [(4, 1)]).lost == {"a"}


def test_what_a_rule_cuts_in_a_reshape_lies_together_before_and_after():
    """Against NumPy: the part of a rank, reshaped, is the part of the reshaped whole."""
    rng, tried = np.random.default_rng(0), 0
    for _ in range(300):
        old = tuple(rng.choice([1, 2, 3, 4, 6], rng.integers(1, 4)).tolist())
        total, new = math.prod(old), []
        while total > 1 and len(new) < 3:
            new.append(int(rng.choice([d for d in range(1, total + 1) if total % d == 0])))
            total //= new[-1]
        new = (*new, total)
        rule = RULES["reshape"]([old], {"old": old, "new": new})
        for i, dim in enumerate(rule.operands[0]):
            for n in (2, 3):
                if not dim or old[i] < n or not choice.fits(rule, (dim[0], ()), n):
                    continue
                at = next(k for k, result in enumerate(rule.results[0]) if dim[0] in result)
                x, tried = np.arange(math.prod(old)).reshape(old), tried + 1
                for rank in range(n):
                    (a, b), (c, d) = parts(old[i], (), rank, n)[0], parts(new[at], (), rank, n)[0]
                    np.testing.assert_array_equal(np.take(x, range(a, b), i).ravel(),
                                                  np.take(x.reshape(new), range(c, d), at).ravel())
    assert tried > 100


def test_the_cheapest_of_what_excludes_each_other_is_chosen():
    rule = RULES["matmul"]([(8, 12), (12, 16)], {})
    sizes = {"tp": 2, "dp": 2}

    def chosen(x, w):
        found = choice.choices("matmul", rule, [x, w], sizes)
        return {axis: factor for axis, (factor, _) in found[0].cuts.items()}, [c.nbytes for c in found]
    small, large = operand((8, 12), tp=Shard(0)), operand((12, 16), tp=Shard(1))
    assert chosen(small, large) == ({"tp": "j"}, [768.0, 1536.0])      # x is gathered, and its gradient scattered
    frozen = operand((12, 16), wants_gradient=False, tp=Shard(1))
    assert chosen(small, frozen) == ({"tp": "i"}, [768.0, 768.0])       # a draw: the earlier operand has its way
    assert chosen(small, operand((12, 16), dp=Shard(1))) == ({"tp": "i", "dp": "j"}, [0.0])
    assert chosen(small, operand((12, 16))) == ({"tp": "i"}, [0.0])
    # one factor, two axes: one of them lets go, for fewest bytes
    assert chosen(operand((8, 12), tp=Shard(1)), operand((12, 16), dp=Shard(0)))[0] == {"dp": "k"}


def test_pending_sums_pass_through_linear_ops_alone():
    p, x, c = operand((4, 6), tp=SUM), operand((4, 6)), operand((4, 6), wants_gradient=False)
    small, cut = operand((6,)), operand((4, 6), tp=Shard(0))
    assert choice.passes("add", [p, p], "tp") and choice.passes("add", [x, p], "tp") and choice.passes("sum", [p], "tp")
    assert not choice.passes("add", [x, operand((6,), tp=SUM)], "tp")       # the sum would have more elements
    assert choice.passes("add", [p, small], "tp") and not choice.passes("add", [p, cut], "tp")
    assert choice.passes("mul", [p, c], "tp") and not choice.passes("mul", [p, x], "tp")
    assert not choice.passes("mul", [p, p], "tp") and not choice.passes("tanh", [p], "tp")
    assert choice.passes("div", [p, c], "tp") and not choice.passes("div", [c, p], "tp")
    assert not choice.passes("add", [x, x], "tp")


def test_bytes_of_each_move_are_the_rings():
    for n in (2, 3, 4):
        ring = 960 * (n - 1) / n
        assert sent(WHOLE, WHOLE, 960, n, True) == sent(Shard(1), Shard(1), 960, n, True) == 0
        assert sent(SUM, WHOLE, 960, n, True) == sent(WHOLE, COPIES, 960, n, True) == 2 * ring
        assert sent(Shard(0), WHOLE, 960, n, True) == sent(Shard(0), COPIES, 960, n, False) == ring
        assert sent(Shard(0), Shard(1), 960, n, False) == ring / n      # all but an n-th of an n-th
        assert sent(SUM, WHOLE, 960, n, True, short=True) == sent(WHOLE, COPIES, 960, n, True, short=True) == 4 * ring
        assert sent(Shard(0), WHOLE, 960, n, True, short=True) == ring
