"""Products in 8 bits: the numbers of ml_dtypes, sums made one by one, and what a scale's group costs its members."""

import contextlib
import itertools
import math

import ml_dtypes
import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.compress import Float8Linear, convert_to_float8_training
from minitorch_dist.compress.float8 import E4M3, E5M2, RECIPES, Operand, Recipe, linear_in, products
from minitorch_dist.parallel.offload import offload_activations
from tests.crews import crews
from tests.device.fake_cupy import installed

THEIRS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
SMALL = Recipe(E5M2, (1, 4), (3, 4), True)      # blocks that a small matrix has several of, and not evenly


def scaled(x, form, block, power_of_two=False):
    """(x in 8 bits, scale by group)."""
    return Operand(x, form, block).scaled(power_of_two)


def product(a, b, forms, blocks, power_of_two):
    """a bᵀ in 8 bits."""
    return products([tuple(map(Operand, (a, b), forms, blocks))], power_of_two)[0]


def numbers(form):
    """All finite numbers of a format, in order."""
    every = np.arange(256, dtype=np.uint8).view(THEIRS[form]).astype(np.float64)
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


def by_hand(a, b, forms, blocks, power_of_two):
    """a bᵀ, group by group and number by number, in Python's floats."""
    def rounded(x, form, block):
        scale, q = np.zeros(x.shape), np.zeros(x.shape)
        height, width = (size or n for size, n in zip(block, x.shape, strict=True))
        for i, j in itertools.product(range(0, x.shape[0], height), range(0, x.shape[1], width)):
            group = (slice(i, i + height), slice(j, j + width))
            s = form.largest / max(np.abs(x[group]).max(), 1e-12)
            scale[group] = 2.0 ** math.floor(math.log2(s)) if power_of_two else s
        for at in np.ndindex(x.shape):
            value = min(max(x[at] * scale[at], -form.largest), form.largest)
            q[at] = float(np.float64(value).astype(THEIRS[form]))
        return q, scale
    (qa, sa), (qb, sb) = (rounded(x, f, block) for x, f, block in zip((a, b), forms, blocks, strict=True))
    return np.array([[math.fsum(qa[i, k] * qb[j, k] / (sa[i, k] * sb[j, k]) for k in range(a.shape[1]))
                      for j in range(b.shape[0])] for i in range(a.shape[0])])


@pytest.mark.parametrize("name", [*RECIPES, "small"])
def test_products_are_those_made_by_hand(name):
    recipe = RECIPES.get(name, SMALL)
    random = np.random.default_rng(1)
    a, b = random.standard_normal((5, 11)) * np.exp2(random.uniform(-9, 9, (5, 11))), random.standard_normal((7, 11))
    a[2], b[0, 4:8] = 0.0, 0.0
    for forms, blocks in (((E4M3, E4M3), (recipe.block, recipe.weight_block)),
                          ((recipe.gradient, E4M3), (recipe.block, recipe.block))):
        wanted = by_hand(a, b, forms, blocks, recipe.power_of_two)
        found = product(a, b, forms, blocks, recipe.power_of_two)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
        low = product(a.astype("f4"), b.astype("f4"), forms, blocks, recipe.power_of_two)
        assert low.dtype == np.float32
        assert np.abs(wanted - a @ b.T).max() > 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("name", [*RECIPES, "small"])
def test_each_of_three_products_rounds_for_itself(name):
    """Of a layer, on three axes: y, dx, dW with random cotangents, from operands rounded along the axis of the sum."""
    recipe, random = RECIPES.get(name, SMALL), np.random.default_rng(2)

    def wide(*shape):       # more than the formats' range: who shares a scale with whom is seen
        return random.standard_normal(shape) * np.exp2(random.uniform(-14, 14, shape))
    layer = Float8Linear(nn.Linear(11, 6, dtype=np.float64), recipe)
    with mt.no_grad():
        layer.weight[...] = wide(6, 11)
    x, ct = mt.tensor(wide(2, 3, 11), requires_grad=True), wide(2, 3, 6)
    y = layer(x)
    (y * ct).sum().backward()
    rows, g, w = x.numpy().reshape(6, 11), ct.reshape(6, 6), layer.weight.numpy()
    for found, a, b, forms, blocks in (
            (y.numpy().reshape(6, 6) - layer.bias.numpy(), rows, w, (E4M3, E4M3), (recipe.block, recipe.weight_block)),
            (x.grad.numpy().reshape(6, 11), g, w.T, (recipe.gradient, E4M3), (recipe.block, recipe.weight_block)),
            (layer.weight.grad.numpy(), g.T, rows.T, (recipe.gradient, E4M3), (recipe.block, recipe.block))):
        np.testing.assert_allclose(found, by_hand(a, b, forms, blocks, recipe.power_of_two), rtol=1e-11, atol=1e-11)
        exact, size = a @ b.T, np.abs(a) @ np.abs(b).T
        assert 1e-4 < np.abs(found - exact).max() / size.max() < 2.0 ** -(min(f.bits for f in forms) - 1)
    np.testing.assert_allclose(layer.bias.grad.numpy(), g.sum(0), rtol=1e-12)


def test_the_recipes_are_their_sources():
    """torchao's tensorwise and rowwise, DeepSeek-V3's blocks: (rows, elements of a sum) that share a scale."""
    assert {name: (r.gradient.name, r.block, r.weight_block, r.power_of_two) for name, r in RECIPES.items()} == {
        "tensorwise": ("e5m2", (None, None), (None, None), False),
        "rowwise": ("e4m3", (1, None), (1, None), True),
        "blockwise": ("e4m3", (1, 128), (128, 128), True)}


def test_one_large_number_costs_its_group_its_digits():
    """5·10⁶ beside ones: of the format's range of 2¹⁷ nothing is left for them. Who is in its group loses all."""
    a, b = np.ones((4, 256), "f4"), np.ones((3, 256), "f4")
    a[1, 200] = 5e6
    kept = {name: (product(a, b, (E4M3, E4M3), (recipe.block, recipe.weight_block), recipe.power_of_two)
                   - scaled_back(a, recipe)[:, 200:201]).round(3) for name, recipe in RECIPES.items()}
    assert (kept["tensorwise"] == 0).all()
    assert (kept["rowwise"][[0, 2, 3]] == 255).all() and (kept["rowwise"][1] == 0).all()
    assert (kept["blockwise"][[0, 2, 3]] == 255).all() and (kept["blockwise"][1] == 128).all()


def scaled_back(x, recipe):
    """The numbers that stand for x's."""
    q, scale = scaled(x, E4M3, recipe.block, recipe.power_of_two)
    height, width = (size or n for size, n in zip(recipe.block, x.shape, strict=True))
    return q / np.repeat(np.repeat(scale, height, 0), width, 1)[:x.shape[0], :x.shape[1]]


def test_scales_bring_the_largest_to_the_end_of_the_range():
    x = np.random.default_rng(3).standard_normal((5, 300)) * 1e-5
    q, scale = scaled(x, E5M2, (None, None))
    assert np.abs(q).max() == E5M2.largest and scale.shape == (1, 1)
    q, scale = scaled(x, E4M3, (1, 128), power_of_two=True)
    assert scale.shape == (5, 3) and (np.frexp(scale)[0] == 0.5).all()
    largest = np.abs(q[:, :128]).max(1)
    assert ((224 <= largest) & (largest <= 448)).all()
    for empty in (np.zeros((0, 5)), np.zeros((3, 0)), np.zeros((3, 5))):
        q, scale = scaled(empty, E4M3, (1, None))
        assert q.shape == empty.shape and not q.any() and np.isfinite(scale).all()
    assert product(np.zeros((3, 0)), np.zeros((2, 0)), (E4M3, E4M3), ((1, None),) * 2, True).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_inf_and_nan_are_seen(bad, recipe):
    x, w = np.ones((3, 4), "f4"), np.ones((2, 4), "f4")
    x[1, 2] = bad
    assert not np.isfinite(linear_in(RECIPES[recipe])(x, w)[1]).any()


# ---------------------------------------------------------------- whole models

def test_a_model_is_changed_in_place_and_stays_the_same_to_others():
    mt.manual_seed(0)
    model = nn.GPT(11, 7, layers=2, heads=2, dim=8)
    named, state = dict(model.named_parameters()), model.state_dict()
    optimizer = optim.AdamW(model.parameters())
    seen = []
    assert convert_to_float8_training(model, "rowwise", lambda m, path: seen.append(path) or "mlp" in path) is model
    kinds = {path: type(m) for path, m in model.named_modules()}
    assert {path for path, kind in kinds.items() if kind is Float8Linear} == {
        f"blocks.{i}.mlp.{k}" for i in (0, 1) for k in (0, 2)}
    assert kinds["blocks.0.attention.qkv"] is nn.Linear and "blocks.1.attention.out" in seen
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in named.items()}
    assert list(model.state_dict()) == list(state)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 7))
    nn.cross_entropy(model(tokens).reshape((-1, 11)), tokens.ravel()).backward()
    before = {name: p.numpy().copy() for name, p in named.items()}
    optimizer.step()
    assert all((p.numpy() != before[name]).any() for name, p in named.items())
    assert "Float8Linear(8, 32)" in repr(model)
    pair = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pair[1].forward = lambda x: x       # it does something of its own
    assert [type(m) for m in convert_to_float8_training(pair)] == [Float8Linear, nn.Linear]


def test_what_can_not_be_changed_raises():
    with pytest.raises(ValueError, match="has no Linear$"):
        convert_to_float8_training(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="that module_filter_fn takes"):
        convert_to_float8_training(nn.Linear(2, 3), module_filter_fn=lambda m, path: False)
    with pytest.raises(ValueError, match="recipe 'colwise'; there are tensorwise, rowwise, blockwise"):
        convert_to_float8_training(nn.Linear(2, 3), "colwise")
    with pytest.raises(ValueError, match="groups of the same length along the axis that is summed over"):
        Recipe(E4M3, (1, 128), (128, 64), True)
    layer = convert_to_float8_training(nn.Linear(2, 3, bias=False))
    assert type(layer) is Float8Linear and layer.bias is None


def test_a_derivative_of_the_first_order_in_reverse_mode():
    """By the tape, by transforms at any level, of all arguments; others are refused when they are asked for."""
    layer, random = convert_to_float8_training(nn.Linear(6, 5), "rowwise"), np.random.default_rng(7)
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
    with pytest.raises(TypeError, match="'float8_linear' has a reverse rule only"):
        mt.jvp(layer, (x,), (x,))


def test_digits_are_learned_as_well_as_in_float32():
    """Of 360 unseen ones, within 3 % of what float32 gets right."""
    digits, right = data.load("digits"), {}
    x, unseen = (images.reshape(len(images), -1) for images in (digits.train_images, digits.test_images))
    for kind in ("float32", *RECIPES):
        mt.manual_seed(1)
        model = nn.Sequential(nn.Linear(x.shape[1], 48), nn.ReLU(), nn.Linear(48, 10))
        if kind != "float32":
            convert_to_float8_training(model, kind)
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
    layer, x = Float8Linear(linear), mt.tensor(random.standard_normal((2, 4, 6)).astype("f4"), requires_grad=True)
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
    after = nn.summary(convert_to_float8_training(model), tokens)
    assert before.flops == after.flops > 0 and [r.flops for r in before.rows] == [r.flops for r in after.rows]
    assert Float8Linear(nn.Linear(0, 3, weight_init=np.zeros))(np.zeros((4, 0), "f4")).shape == (4, 3)


def test_the_bits_on_a_gpu():
    """The stand-in's: no copy to the host, and the host's numbers."""
    random = np.random.default_rng(4)
    x, w, g = (random.standard_normal(shape).astype("f4") for shape in ((5, 200), (7, 200), (5, 7)))

    def run(device, recipe):
        a, b = (mt.tensor(v, device=device, requires_grad=True) for v in (x, w))
        y = linear_in(recipe)(a, b)
        (y * mt.tensor(g, device=device)).sum().backward()
        return [t.cpu().numpy() for t in (y, a.grad, b.grad)]
    with installed():
        for recipe in RECIPES.values():
            for here, there in zip(run("cpu", recipe), run("cuda", recipe), strict=True):
                assert here.tobytes() == there.tobytes()


def trained(exact):
    """The digest of the parameters after some steps of a small model, on these ranks."""
    world = comm.world()
    mt.manual_seed(2)
    model = mt.parallel.DistributedDataParallel(
        convert_to_float8_training(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5)), "tensorwise"),
        world, exact=exact)
    random, optimizer = np.random.default_rng(5), optim.SGD(model.parameters(), 0.1)
    x, labels = random.standard_normal((48, 12)).astype("f4"), random.integers(0, 5, 48)
    loader = data.Loader(x, labels, 24, seed=1, rank=world.rank, size=world.size, micro_shards=8 if exact else 1)
    for batch in loader.epoch(0):
        optimizer.zero_grad()
        for shard in batch.shards:
            (nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count).backward()
        optimizer.step()
    return [p.numpy().copy() for p in model.parameters()]


def test_exact_mode_has_one_set_of_bits_and_other_ranks_round_alike():
    exact = {n: crews.call("tests.compress.test_float8:trained", n, (True,))[0] for n in (1, 2)}
    assert all((a == b).all() for a, b in zip(exact[1], exact[2], strict=True))
    loose = trained(False), crews.call("tests.compress.test_float8:trained", 2, (False,))[0]
    for a, b in zip(*loose, strict=True):
        assert 0 < np.abs(a - b).max() < 0.01


def sharded(kind):
    """kind: "alone", "sharded", or a folder for activations. Returns (bytes of gathered values and of activations after
    forward, of the former at most, of each unit, the parameters after two steps)."""
    world = comm.world()
    mt.manual_seed(2)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(),
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
    (buffers, _), most, sizes, whole = crews.call("tests.compress.test_float8:sharded", 2, ("sharded",))[0]
    assert buffers == 0 < most <= sum(sorted(sizes)[-2:]) < sum(sizes)
    for name, value in alone.items():
        assert (offloaded[name] == value).all()
        # a sum over tokens, of which each rank has half, has other groups there: what is rounded is within a part in 8
        np.testing.assert_allclose(whole[name], value, rtol=0, atol=0.1)
        assert value.std() > 0.03


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_inputs_that_are_too_narrow_or_integers(recipe):
    layer = Float8Linear(nn.Linear(256, 3), recipe)
    for width in (4, 128, 257):
        with pytest.raises(ValueError, match=f"last axis of x \\(2, {width}\\) must be 256"):
            layer(np.ones((2, width), np.float32))
    x = np.arange(512).reshape(2, 256) % 7
    np.testing.assert_array_equal(layer(mt.tensor(x)).numpy(), layer(x.astype(np.float32)).numpy())
