"""Products in few bits: the numbers of ml_dtypes, sums made one by one, and what a scale's group costs its members."""

import contextlib
import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.compress import LowPrecisionLinear, low_precision
from minitorch_dist.compress.formats import E2M1, E4M3, E5M2, SIGNS, hadamard
from minitorch_dist.compress.low_precision import RECIPES, Chances, Operand, Recipe, linear_in, products

from .test_formats import THEIRS, nearest, numbers

MORE = {        # blocks that a small matrix has several of, and not evenly
    "small": Recipe(E4M3, E5M2, (1, 4), (3, 4), "e8m0"),
    "small, 4 bits": Recipe(E2M1, E4M3, (1, 4), (3, 4), "e4m3", random_hadamard=True)}
TO_THE_NEAREST = {name: replace(recipe, stochastic_rounding=False) for name, recipe in {**RECIPES, **MORE}.items()}


def scaled(x, form, block, scale="float32"):
    """(x in few bits, scale by group)."""
    return Operand(x, form, block, scale).scaled()


def product(a, b, forms, blocks, scale):
    """a bᵀ in few bits."""
    return products([tuple(Operand(x, form, block, scale) for x, form, block in zip((a, b), forms, blocks,
                                                                                   strict=True))])[0]


def rounded_by_hand(x, form, block, scale):
    """The numbers that stand for x, group by group and number by number, in Python's floats."""
    out, (height, width) = np.zeros(x.shape), (size or n for size, n in zip(block, x.shape, strict=True))
    whole = max(abs(float(v)) for v in x.flat) / 448 / form.largest
    for i, j in itertools.product(range(0, x.shape[0], height), range(0, x.shape[1], width)):
        group = [(k, m) for k in range(i, min(i + height, x.shape[0])) for m in range(j, min(j + width, x.shape[1]))]
        s = max(1e-12, *(abs(float(x[at])) for at in group)) / form.largest
        if scale == "e8m0":
            s = 2.0 ** math.ceil(math.log2(s))
        if scale == "e4m3":
            s = float(nearest(np.array([min(s / whole, 448)]), E4M3)[0]) * whole
        for at in group:
            value = min(max(x[at] / s, -form.largest), form.largest) if s else 0.0
            out[at] = float(np.float64(value).astype(THEIRS[form])) * s
    return out


def by_hand(a, b, forms, blocks, scale):
    """a bᵀ of such numbers, in sums without rounding."""
    a, b = (rounded_by_hand(x, f, block, scale) for x, f, block in zip((a, b), forms, blocks, strict=True))
    return np.array([[math.fsum(x * y) for y in b] for x in a])


@pytest.mark.parametrize("name", TO_THE_NEAREST)
def test_products_are_those_made_by_hand(name):
    recipe = TO_THE_NEAREST[name]
    random = np.random.default_rng(1)
    a, b = random.standard_normal((5, 35)) * np.exp2(random.uniform(-9, 9, (5, 35))), random.standard_normal((7, 35))
    a[2], b[0, 4:8] = 0.0, 0.0
    for forms, blocks in (((recipe.element, recipe.element), (recipe.block, recipe.weight_block)),
                          ((recipe.gradient, recipe.element), (recipe.block, recipe.block))):
        wanted = by_hand(a, b, forms, blocks, recipe.scale)
        found = product(a, b, forms, blocks, recipe.scale)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
        low = product(a.astype("f4"), b.astype("f4"), forms, blocks, recipe.scale)
        assert low.dtype == np.float32
        assert np.abs(wanted - a @ b.T).max() > 1e-3 * np.abs(wanted).max()


def mixed(x):
    """x's columns, 16 at a time, times diag(signs) H / 4, of the definition of Hadamard's matrix; the rest as it is."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    n = x.shape[1] // 16
    matrix = np.kron(np.eye(n), SIGNS[:, None] * h / 4)
    return np.hstack([x[:, :16 * n] @ matrix, x[:, 16 * n:]])


@pytest.mark.parametrize("name", TO_THE_NEAREST)
def test_each_of_three_products_rounds_for_itself(name):
    """Of a layer, on three axes: y, dx, dW with random cotangents, from operands rounded along the axis of the sum."""
    recipe, random = TO_THE_NEAREST[name], np.random.default_rng(2)

    def wide(*shape):       # more than the formats' range: who shares a scale with whom is seen
        return random.standard_normal(shape) * np.exp2(random.uniform(-14, 14, shape))
    layer = LowPrecisionLinear(nn.Linear(11, 6, dtype=np.float64), recipe)
    with mt.no_grad():
        layer.weight[...] = wide(6, 11)
    x, ct = mt.tensor(wide(2, 9, 11), requires_grad=True), wide(2, 9, 6)
    y = layer(x)
    (y * ct).sum().backward()
    rows, g, w = x.numpy().reshape(18, 11), ct.reshape(18, 6), layer.weight.numpy()
    turned, turned_x = (mixed(a.T) if recipe.random_hadamard else a.T for a in (g, rows))
    e, r = recipe.element, recipe
    for found, exact, a, b, forms, blocks in (
            (y.numpy().reshape(18, 6) - layer.bias.numpy(), rows @ w.T, rows, w, (e, e), (r.block, r.weight_block)),
            (x.grad.numpy().reshape(18, 11), g @ w, g, w.T, (r.gradient, e), (r.block, r.weight_block)),
            (layer.weight.grad.numpy(), g.T @ rows, turned, turned_x, (r.gradient, e), (r.block, r.block))):
        size = np.abs(a) @ np.abs(b).T
        np.testing.assert_allclose(found, by_hand(a, b, forms, blocks, r.scale), rtol=1e-11, atol=1e-15 * size.max())
        assert 1e-4 < np.abs(found - exact).max() / size.max() < 2.0 ** -(min(f.bits for f in forms) - 1)
    np.testing.assert_allclose(layer.bias.grad.numpy(), g.sum(0), rtol=1e-12)


# ---------------------------------------------------------------- what nvfp4 does besides

def test_hadamards_matrix_leaves_products_and_spreads_outliers():
    random = np.random.default_rng(8)
    a, b = random.standard_normal((3, 37)), random.standard_normal((5, 37))
    for n in (0, 1, 15, 16, 37):
        found = hadamard(a[:, :n])
        np.testing.assert_allclose(found, mixed(a[:, :n]), rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(found @ hadamard(b[:, :n]).T, a[:, :n] @ b[:, :n].T, rtol=1e-12)
    one = np.zeros((1, 32), "f4")
    one[0, 19] = 48.0
    assert (hadamard(one)[0, :16] == 0).all() and (np.abs(hadamard(one)[0, 16:]) == 12).all()
    assert hadamard(one).dtype == np.float32 and sorted({*SIGNS.tolist()}) == [-1, 1]

    # One 10 in each 16 costs those beside it half of what 4 bits and a power of two leave them.
    x = np.where(np.arange(320) % 16 == 3, 10.0, random.standard_normal((8, 320)))
    plain, spread = (np.linalg.norm(Operand(m, E2M1, (1, 32), "e8m0").rounded() - m) for m in (x, hadamard(x)))
    assert spread < 0.6 * plain


def of_chance(recipe, seed, x, w, ct, scope=None):
    """(y, dx, dW) of a layer by a recipe."""
    mt.manual_seed(seed)
    a, b = (mt.tensor(v, requires_grad=True) for v in (x, w))
    with scope or contextlib.nullcontext():
        y = linear_in(recipe)(a, b)
    (y * ct).sum().backward()
    return y.numpy(), a.grad.numpy(), b.grad.numpy()


def test_gradients_by_chance_have_the_mean_of_unrounded_ones():
    """g alone, in dx and in dW: their means over many draws are those of g as it is, and of W and x rounded."""
    recipe, random = replace(RECIPES["mxfp4"], stochastic_rounding=True, random_hadamard=True), np.random.default_rng(9)
    x, w, ct = (random.standard_normal(shape) for shape in ((20, 7), (5, 7), (20, 5)))
    ct[:, 1:] *= 0.01        # to the nearest nearly all of these are 0
    draws = [of_chance(recipe, seed, x, w, ct) for seed in range(400)]
    plain = of_chance(replace(recipe, stochastic_rounding=False), 0, x, w, ct)
    assert all((y == plain[0]).all() for y, *_ in draws)
    exact = (ct @ rounded_by_hand(w.T, E2M1, (1, 32), "e8m0").T,
             mixed(ct.T) @ rounded_by_hand(mixed(x.T), E2M1, (1, 32), "e8m0").T)
    for i, wanted in enumerate(exact, 1):
        found = np.stack([draw[i] for draw in draws])
        error = np.abs(found.mean(0) - wanted) / np.maximum(found.std(0), 1e-9) * math.sqrt(len(draws))
        assert error.max() < 5 and error.mean() < 1.2
        assert np.abs(plain[i] - wanted).max() > 5 * np.abs(found.mean(0) - wanted).max()


def test_chances_are_keyed_by_their_place():
    recipe, random = RECIPES["nvfp4"], np.random.default_rng(10)
    x, w, ct = (random.standard_normal(shape).astype("f4") for shape in ((18, 7), (5, 7), (18, 5)))

    def bits(seed, **of):
        return [a.tobytes() for a in of_chance(recipe, seed, x, w, ct, **of)]
    assert bits(3) == bits(3) != bits(4) and bits(3)[0] == bits(4)[0]
    # In a scope the keys are its own, and backward may come when it is over.
    scopes = [bits(seed, scope=mt.backend.random_scope(0, step, 18, (0, 18)))
              for seed, step in ((1, 0), (2, 0), (1, 1))]
    assert scopes[0] == scopes[1] != scopes[2]
    chances = [Chances(18, 5, None) for _ in range(2)]
    numbers = [chance.reshape(-1).tolist() for pair in chances for chance in (pair.dx(x), pair.dw(x))]
    assert len({tuple(sorted(n)) for n in numbers}) == 4       # other ones in dx and dW, and in each call
    # Where no gradient is wanted nothing is drawn; what is run again draws the same.
    layer = LowPrecisionLinear(nn.Linear(7, 5), recipe)
    mt.manual_seed(5)
    with mt.no_grad():
        layer(x)
    assert mt.backend.random_state.draws == 0
    grads = []
    for run in (layer, mt.checkpoint(layer)):
        mt.manual_seed(5)
        layer.weight.grad = None
        (run(mt.tensor(x)) * ct).sum().backward()
        grads.append(layer.weight.grad.numpy().tobytes())
    assert grads[0] == grads[1]


def test_for_what_is_frozen_nothing_is_drawn_or_multiplied(monkeypatch):
    """The gradient that is wanted has the bits that it has beside the other; without any the layer is forward alone."""
    recipe, random = RECIPES["nvfp4"], np.random.default_rng(12)
    x, w, ct = (random.standard_normal(shape).astype("f4") for shape in ((18, 7), (5, 7), (18, 5)))
    drawn, multiplied = [], []

    def counted(function, calls):
        return lambda *args: calls.append(args) or function(*args)
    monkeypatch.setattr(low_precision, "uniform_of_draws", counted(low_precision.uniform_of_draws, drawn))
    monkeypatch.setattr(low_precision, "matmul", counted(low_precision.matmul, multiplied))
    _, *wanted = of_chance(recipe, 3, x, w, ct)
    assert (len(drawn), len(multiplied)) == (2, 3)
    for which in ((True, False), (False, True), (False, False)):
        drawn.clear(), multiplied.clear(), mt.manual_seed(3)
        operands = [mt.tensor(values, requires_grad=flag) for values, flag in zip((x, w), which, strict=True)]
        y = (linear_in(recipe)(*operands) * ct).sum()
        assert mt.backend.random_state.draws == 2 * any(which) and y.requires_grad == any(which)
        if any(which):
            y.backward()
        assert (len(drawn), len(multiplied)) == (sum(which), 1 + sum(which))
        for operand, flag, found in zip(operands, which, wanted, strict=True):
            assert (operand.grad is not None) == flag
            assert not flag or (operand.grad.numpy() == found).all()



def test_scales_fit_into_their_formats():
    """Of any float32 numbers: E8M0's exponents suffice, and nothing is cut off; e4m3's are filled up to 448."""
    for largest in (1.4e-45, 1e-30, 1e-12, 1.0, 6.0, np.nextafter(np.float32(6), 7), 448.0,
                    np.nextafter(np.float32(448), 449), 3.4028235e38):
        x = np.array([[largest, -largest / 3, 0.0]], "f4")
        for form in THEIRS:
            q, scale = scaled(x, form, (1, 32), "e8m0")
            assert scale.astype(ml_dtypes.float8_e8m0fnu).astype("f4") == scale > 0
            assert np.abs(x / scale).max() <= form.largest
            assert largest <= 1e-12 or np.abs(q).max() > form.largest / 2.1
    random = np.random.default_rng(11)
    x = (random.standard_normal((6, 50)) * np.exp2(random.uniform(-3, 3, (6, 50)))).astype("f4")
    whole = np.abs(x).max() / (448 * 6)
    q, scale = scaled(x, E2M1, (1, 16), "e4m3")
    assert scale.shape == (6, 4) and np.isclose(scale.max() / whole, 448)
    assert np.isclose(nearest((scale / whole).astype("f8"), E4M3), scale / whole, rtol=1e-6).all()
    assert np.isin(q, numbers(E2M1)).all() and np.abs(q).max() == 6


def test_the_recipes_are_their_sources():
    """torchao's tensorwise and rowwise, DeepSeek-V3's blocks, the MX specification's, NVIDIA's: (rows, elements of a
    sum) that share a scale."""
    assert {name: (r.element.name, r.gradient.name, r.block, r.weight_block, r.scale, r.stochastic_rounding,
                   r.random_hadamard) for name, r in RECIPES.items()} == {
        "tensorwise": ("e4m3", "e5m2", (None, None), (None, None), "float32", False, False),
        "rowwise": ("e4m3", "e4m3", (1, None), (1, None), "e8m0", False, False),
        "blockwise": ("e4m3", "e4m3", (1, 128), (128, 128), "e8m0", False, False),
        "mxfp8": ("e4m3", "e4m3", (1, 32), (1, 32), "e8m0", False, False),
        "mxfp4": ("e2m1", "e2m1", (1, 32), (1, 32), "e8m0", False, False),
        "nvfp4": ("e2m1", "e2m1", (1, 16), (16, 16), "e4m3", True, True)}


def test_one_large_number_costs_its_group_its_digits():
    """5·10⁶ beside ones: of the format's range of 2¹⁷ nothing is left for them. Who is in its group loses all; of 2¹⁷
    of a scale of all, everybody."""
    a, b = np.ones((4, 256), "f4"), np.ones((3, 256), "f4")
    a[1, 200] = 5e6
    kept = {name: (product(a, b, (r.element,) * 2, (r.block, r.weight_block), r.scale)
                   - Operand(a, r.element, r.block, r.scale).rounded()[:, 200:201]).round(3)
            for name, r in RECIPES.items()}
    left = {"tensorwise": 0, "rowwise": 0, "blockwise": 128, "mxfp8": 224, "mxfp4": 224, "nvfp4": 0}
    for name, found in kept.items():
        assert (found[1] == left[name]).all(), name
        assert (found[[0, 2, 3]] == (0 if name in ("tensorwise", "nvfp4") else 255)).all(), name


def test_scales_bring_the_largest_to_the_end_of_the_range():
    x = np.random.default_rng(3).standard_normal((5, 300)) * 1e-5
    q, scale = scaled(x, E5M2, (None, None))
    assert np.abs(q).max() == E5M2.largest and scale.shape == (1, 1)
    q, scale = scaled(x, E4M3, (1, 128), "e8m0")
    assert scale.shape == (5, 3) and (np.frexp(scale)[0] == 0.5).all()
    largest = np.abs(q[:, :128]).max(1)
    assert ((224 <= largest) & (largest <= 448)).all()
    for empty in (np.zeros((0, 5)), np.zeros((3, 0)), np.zeros((3, 5))):
        for rule in ("float32", "e8m0", "e4m3"):
            q, scale = scaled(empty, E4M3, (1, None), rule)
            assert q.shape == empty.shape and not q.any() and np.isfinite(scale).all()
    assert product(np.zeros((3, 0)), np.zeros((2, 0)), (E4M3, E4M3), ((1, None),) * 2, "e8m0").tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_inf_and_nan_are_seen(bad, recipe):
    x, w = np.ones((19, 4), "f4"), np.ones((2, 4), "f4")
    x[1, 2] = bad
    y, dx, dw = of_chance(RECIPES[recipe], 0, x, w, np.ones((19, 2), "f4"))
    assert not np.isfinite(y[1]).any() and not np.isfinite(dw[:, 2]).any() and np.isfinite(dx).all()
    ct = np.ones((19, 2), "f4")
    ct[1, 1] = bad
    y, dx, dw = of_chance(RECIPES[recipe], 0, np.ones((19, 4), "f4"), w, ct)
    assert np.isfinite(y).all() and not np.isfinite(dx[1]).any() and not np.isfinite(dw[1]).any()
