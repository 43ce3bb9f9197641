"""Products in few bits: the numbers of ml_dtypes, sums made one by one, and what a scale's group costs its members."""

import contextlib
import itertools
import math
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.compress import LowPrecisionLinear, convert_to_low_precision_training
from minitorch_dist.compress.formats import E2M1, E4M3, E5M2, SIGNS, hadamard
from minitorch_dist.compress.low_precision import RECIPES, Chances, Operand, Recipe, linear_in, products
from minitorch_dist.parallel.offload import offload_activations
from tests.crews import crews
from tests.device.fake_cupy import installed

THEIRS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}
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


def numbers(form):
    """All finite numbers of a format, in order."""
    every = np.arange(16 if form is E2M1 else 256, dtype=np.uint8).view(THEIRS[form]).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def nearest(x, form):
    """By search, halves to the one whose last bit is 0."""
    every = numbers(form)
    codes = every.astype(THEIRS[form]).view(np.uint8)
    above = np.clip(np.searchsorted(every, x), 1, len(every) - 1)
    up, down = every[above] - x, x - every[above - 1]
    return every[np.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, above - 1)]


@pytest.mark.parametrize("form", THEIRS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rounding_is_to_the_nearest_number_halves_to_even(form, dtype):
    every = numbers(form)
    assert every[-1] == form.largest and every[every > 0][0] == 2.0 ** (form.least - form.bits)
    between, ends = ((every[1:] + every[:-1]) / 2).astype(dtype), np.array([np.inf, -np.inf], dtype)
    random = np.random.default_rng(0)
    spread = random.standard_normal(20_000) * np.exp2(random.uniform(-30, 20, 20_000))
    x = np.concatenate([every, between, *(np.nextafter(between, end) for end in ends), spread,
                        [1e30, -1e30, 3.0 * form.largest]]).astype(dtype)
    found = form.rounded(x)
    assert found.dtype == x.dtype and (found == nearest(x.astype("f8"), form)).all()
    if dtype == "f4":       # (theirs rounds float64 twice)
        theirs = np.clip(x, -form.largest, form.largest).astype(THEIRS[form]).astype(dtype)
        assert (found == theirs).all() and (np.signbit(found) == np.signbit(theirs)).all()
    assert np.isnan(form.rounded(np.array([np.nan], dtype))).all()


def test_e2m1_is_fifteen_numbers():
    every = [0.5, 1, 1.5, 2, 3, 4, 6]
    assert numbers(E2M1).tolist() == [-v for v in every[::-1]] + [0] + every
    halves = [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.1, 6), (9, 6)]
    assert E2M1.rounded(np.array([x for x, _ in halves])).tolist() == [q for _, q in halves]


@pytest.mark.parametrize("form", THEIRS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rounding_by_chance_has_the_numbers_mean(form, dtype):
    """Over chances that are evenly spread: x's neighbours a ≤ x ≤ b alone, mean x, variance (x - a)(b - x)."""
    every, count = numbers(form), 1 << 12
    random, chance = np.random.default_rng(1), (np.arange(count, dtype="f4") + 0.5) / count
    x = random.choice([-1, 1], 200) * np.exp2(random.uniform(form.least - form.bits - 2, np.log2(form.largest), 200))
    x = np.concatenate([x, every[::max(1, len(every) // 40)], [2 * form.largest]]).astype(dtype)
    drawn = form.rounded(np.repeat(x[:, None], count, 1), np.broadcast_to(chance, (len(x), count)))
    assert drawn.dtype == x.dtype
    wide, inside = drawn.astype("f8"), np.clip(x.astype("f8"), -form.largest, form.largest)
    above = np.clip(np.searchsorted(every, inside), 1, len(every) - 1)
    a, b = every[above - 1], every[above]
    assert ((drawn == a[:, None]) | (drawn == b[:, None])).all()
    assert (np.abs(wide.mean(1) - inside) <= (b - a) / count).all()
    assert (np.abs(wide.var(1) - (inside - a) * (b - inside)) <= 2 * (b - a) ** 2 / count).all()
    assert np.isnan(form.rounded(np.array([np.nan], dtype), chance[:1])).all()


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
    chances = [Chances(18, 5, None)(x) for _ in range(2)]
    numbers = [chance.reshape(-1).tolist() for pair in chances for chance in pair]
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


# ---------------------------------------------------------------- whole models

def test_a_model_is_changed_in_place_and_stays_the_same_to_others():
    mt.manual_seed(0)
    model = nn.GPT(11, 7, layers=2, heads=2, dim=8)
    named, state = dict(model.named_parameters()), model.state_dict()
    optimizer = optim.AdamW(model.parameters())
    seen = []
    chosen = convert_to_low_precision_training(model, "rowwise", lambda m, path: seen.append(path) or "mlp" in path)
    assert chosen is model
    kinds = {path: type(m) for path, m in model.named_modules()}
    assert {path for path, kind in kinds.items() if kind is LowPrecisionLinear} == {
        f"blocks.{i}.mlp.{k}" for i in (0, 1) for k in (0, 2)}
    assert kinds["blocks.0.attention.qkv"] is nn.Linear and "blocks.1.attention.out" in seen
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in named.items()}
    assert list(model.state_dict()) == list(state)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 7))
    nn.cross_entropy(model(tokens).reshape((-1, 11)), tokens.ravel()).backward()
    before = {name: p.numpy().copy() for name, p in named.items()}
    optimizer.step()
    assert all((p.numpy() != before[name]).any() for name, p in named.items())
    assert "LowPrecisionLinear(8, 32, e4m3)" in repr(model)
    pair = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pair[1].forward = lambda x: x       # it does something of its own
    assert [type(m) for m in convert_to_low_precision_training(pair)] == [LowPrecisionLinear, nn.Linear]


def test_what_can_not_be_changed_raises():
    with pytest.raises(ValueError, match="has no Linear$"):
        convert_to_low_precision_training(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="that module_filter_fn takes"):
        convert_to_low_precision_training(nn.Linear(2, 3), module_filter_fn=lambda m, path: False)
    with pytest.raises(ValueError, match=f"recipe 'colwise'; there are {', '.join(RECIPES)}"):
        convert_to_low_precision_training(nn.Linear(2, 3), "colwise")
    with pytest.raises(ValueError, match="groups of the same length along the axis that is summed over"):
        Recipe(E4M3, E4M3, (1, 128), (128, 64), "e8m0")
    with pytest.raises(ValueError, match="scale='bfloat16'; there are float32, e8m0, e4m3"):
        Recipe(E4M3, E4M3, (1, 128), (128, 128), "bfloat16")
    for block in ((1, 0), (-1, 8), (1, 2.0)):
        with pytest.raises(ValueError, match=re.escape(f"block {block} must be of numbers from 1, or None")):
            Recipe(E4M3, E4M3, block, block, "e8m0")
    layer = convert_to_low_precision_training(nn.Linear(2, 3, bias=False))
    assert type(layer) is LowPrecisionLinear and layer.bias is None


def test_a_derivative_of_the_first_order_in_reverse_mode():
    """By the tape, by transforms at any level, of all arguments; others are refused when they are asked for."""
    layer, random = convert_to_low_precision_training(nn.Linear(6, 5), "rowwise"), np.random.default_rng(7)
    x, ct = random.standard_normal((4, 6)).astype("f4"), random.standard_normal((4, 5)).astype("f4")

    def loss(x):
        return (layer(x) * ct).sum()
    t = mt.tensor(x, requires_grad=True)
    loss(t).backward()
    wanted, of_weight = t.grad.numpy().copy(), layer.weight.grad.numpy().copy()
    found = mt.grad(loss)(x)
    assert (found.numpy() == wanted).all() and (mt.vjp(layer, x)[1](ct)[0].numpy() == wanted).all()
    assert (mt.grad(lambda w: (linear_in(layer.recipe)(x, w) * ct).sum())(layer.weight.numpy()) == of_weight).all()
    t.grad = None
    loss(t).backward(create_graph=True)
    assert (t.grad.numpy() == wanted).all()
    for second in (lambda: t.grad.sum().backward(), lambda: found.sum().backward(),
                   lambda: mt.grad(lambda z: mt.grad(loss)(z).sum())(x),
                   lambda: mt.grad(lambda s: mt.grad(lambda z: s * loss(z))(x).sum())(np.float32(2))):
        with pytest.raises(TypeError, match="can be differentiated once only"):
            second()
    with pytest.raises(TypeError, match="'low_precision_linear' has a reverse rule only"):
        mt.jvp(layer, (x,), (x,))


def test_digits_are_learned_as_well_as_in_float32():
    """Of 360 unseen ones, within 3 % of what float32 gets right."""
    digits, right = data.load("digits"), {}
    x, unseen = (images.reshape(len(images), -1) for images in (digits.train_images, digits.test_images))
    for kind in ("float32", *RECIPES):
        mt.manual_seed(1)
        model = nn.Sequential(nn.Linear(x.shape[1], 48), nn.ReLU(), nn.Linear(48, 10))
        if kind != "float32":
            convert_to_low_precision_training(model, kind)
        optimizer = optim.Adam(model.parameters(), 3e-3)
        for epoch in range(4):
            for batch in data.Loader(x, digits.train_labels, 50, seed=3).epoch(epoch):
                optimizer.zero_grad()
                nn.cross_entropy(model(batch.shards[0].inputs), batch.shards[0].labels).backward()
                optimizer.step()
        with mt.no_grad():
            right[kind] = (model(unseen).numpy().argmax(1) == digits.test_labels).mean()
    assert right["float32"] > 0.8 and all(right[kind] > right["float32"] - 0.03 for kind in RECIPES), right


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_the_layer_takes_and_gives_16_bits(dtype, bias):
    """As a Linear does; the weight's gradient is that of float32."""
    random = np.random.default_rng(0)
    linear = nn.Linear(6, 5, bias=bias)
    layer, x = LowPrecisionLinear(linear), mt.tensor(random.standard_normal((2, 4, 6)).astype("f4"), requires_grad=True)
    low = x.numpy().astype(dtype)
    with mt.autocast(dtype):
        y = layer(x)
        assert y.dtype == linear(x).dtype == low.dtype
    y.astype("float32").sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == np.float32
    wide = linear_in(layer.recipe)(low.astype("f4").reshape(8, 6), layer.weight.numpy()).astype(dtype)
    wide = wide + layer.bias.numpy().astype(dtype) if bias else wide
    assert (y.numpy() == wide.reshape(2, 4, 5)).all()
    one = np.ones((8, 5), dtype).astype("f4")
    t = mt.tensor(layer.weight.numpy(), requires_grad=True)
    (linear_in(layer.recipe)(low.astype("f4").reshape(8, 6), t) * one).sum().backward()
    assert (layer.weight.grad.numpy() == t.grad.numpy()).all()
    with mt.autocast(dtype):
        assert layer(x.numpy().astype("f8")).dtype == np.float64
        with mt.autocast(enabled=False):
            assert layer(x).dtype == np.float32
    assert layer(mt.tensor(low)).dtype == low.dtype     # without autocast too it gives what it is given


def test_operations_are_counted_as_a_linears():
    model = nn.GPT(11, 7, layers=2, heads=2, dim=8)
    tokens = np.zeros((2, 3), int)
    before = nn.summary(model, tokens)
    after = nn.summary(convert_to_low_precision_training(model), tokens)
    assert before.flops == after.flops > 0 and [r.flops for r in before.rows] == [r.flops for r in after.rows]
    assert LowPrecisionLinear(nn.Linear(0, 3, weight_init=np.zeros))(np.zeros((4, 0), "f4")).shape == (4, 3)


def test_the_bits_on_a_gpu():
    """The stand-in's: no copy to the host, and the host's numbers."""
    random = np.random.default_rng(4)
    x, w, g = (random.standard_normal(shape).astype("f4") for shape in ((19, 200), (7, 200), (19, 7)))

    def run(device, recipe):
        mt.manual_seed(0)
        a, b = (mt.tensor(v, device=device, requires_grad=True) for v in (x, w))
        y = linear_in(recipe)(a, b)
        (y * mt.tensor(g, device=device)).sum().backward()
        return [t.cpu().numpy() for t in (y, a.grad, b.grad)]
    with installed():
        for recipe in RECIPES.values():
            for here, there in zip(run("cpu", recipe), run("cuda", recipe), strict=True):
                assert here.tobytes() == there.tobytes()


def trained(exact, recipe):
    """The parameters after two steps of a small model, on these ranks."""
    world = comm.world()
    mt.manual_seed(2)
    model = mt.parallel.DistributedDataParallel(convert_to_low_precision_training(
        nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5)), recipe), world, exact=exact)
    random, optimizer = np.random.default_rng(5), optim.SGD(model.parameters(), 0.1)
    x, labels = random.standard_normal((288, 12)).astype("f4"), random.integers(0, 5, 288)
    loader = data.Loader(x, labels, 144, seed=1, rank=world.rank, size=world.size, micro_shards=8 if exact else 1)
    for step, batch in enumerate(loader.epoch(0)):
        optimizer.zero_grad()
        for shard in batch.shards:
            with mt.backend.random_scope(3, step, batch.count, shard.rows):
                (nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count).backward()
        optimizer.step()
    return [p.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_exact_mode_has_one_set_of_bits_and_other_ranks_round_alike(recipe):
    """Of chances too: whoever has a sample draws the same for it."""
    function = "tests.compress.test_low_precision:trained"
    exact = {n: crews.call(function, n, (True, recipe))[0] for n in (1, 2, 4)}
    for n in (2, 4):
        assert all((a == b).all() for a, b in zip(exact[1], exact[n], strict=True))
    loose = trained(False, recipe), crews.call(function, 2, (False, recipe))[0]
    for a, b in zip(*loose, strict=True):
        assert 0 < np.abs(a - b).max() < 0.01


def sharded(kind):
    """kind: "alone", "sharded", or a folder for activations. Returns (bytes of gathered values and of activations after
    forward, of the former at most, of each unit, the parameters after two steps)."""
    world = comm.world()
    mt.manual_seed(2)
    model = convert_to_low_precision_training(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(),
                                                     nn.Linear(80, 100)), "rowwise")
    model = mt.parallel.fully_shard(model, world, stage=3) if kind == "sharded" else model
    folder = kind if kind not in ("alone", "sharded") else None
    optimizer, random = optim.SGD(model.parameters(), 0.1), np.random.default_rng(5)
    for _ in range(2):
        x, ct = (random.standard_normal((8, n)).astype("f4") for n in (64, 100))
        mine = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
        optimizer.zero_grad()
        with ledger.record(memory=True) as book:
            with offload_activations(model, folder, min_bytes=1) if folder else contextlib.nullcontext():
                loss = (model(x[mine]) * ct[mine]).sum()
            kept = book.live["buffer"], book.live["activation"]
            loss.backward()
        optimizer.step()
    whole = mt.parallel.full_state_dict(model) if kind == "sharded" else model.state_dict()
    sizes = [unit.size * 4 for unit in model.units] if kind == "sharded" else None
    return kept, book.peak["buffer"], sizes, whole


def test_gathered_weights_are_freed_and_what_is_kept_can_be_offloaded(tmp_path):
    (_, activations), _, _, alone = sharded("alone")
    (_, on_disk), _, _, offloaded = sharded(str(tmp_path))
    assert on_disk < activations / 4
    (buffers, _), most, sizes, whole = crews.call("tests.compress.test_low_precision:sharded", 2, ("sharded",))[0]
    assert buffers == 0 < most <= sum(sorted(sizes)[-2:]) < sum(sizes)
    for name, value in alone.items():
        assert (offloaded[name] == value).all()
        # a sum over tokens, of which each rank has half, has other groups there: what is rounded is within a part in 8
        np.testing.assert_allclose(whole[name], value, rtol=0, atol=0.1)
        assert value.std() > 0.03


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_that_are_too_narrow_or_integers(recipe):
    layer = LowPrecisionLinear(nn.Linear(256, 3), recipe)
    for width in (4, 128, 257):
        with pytest.raises(ValueError, match=f"last axis of x \\(2, {width}\\) must be 256"):
            layer(np.ones((2, width), np.float32))
    x = np.arange(512).reshape(2, 256) % 7
    np.testing.assert_array_equal(layer(mt.tensor(x)).numpy(), layer(x.astype(np.float32)).numpy())
