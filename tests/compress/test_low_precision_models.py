"""Whole models that train in few bits: parameters, modes, ranks, and what they keep."""

import contextlib
import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.backend import as_dtype
from minitorch_dist.compress import LowPrecisionLinear, convert_to_low_precision_training, prepare_qat, quantize_model
from minitorch_dist.compress.formats import E4M3
from minitorch_dist.compress.low_precision import RECIPES, Recipe, linear_in
from minitorch_dist.compress.quant_aware import FakeQuantized
from minitorch_dist.parallel.offload import offload_activations
from tests.crews import crews
from tests.device.fake_cupy import installed


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


def test_layers_that_are_quantised_are_no_linears():
    small = [prepare_qat(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))]
    small += [quantize_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), kind) for kind in ("weight-only", "dynamic")]
    for model in small:
        with pytest.raises(ValueError, match="the model has no Linear"):
            convert_to_low_precision_training(model, "rowwise")
    kept = convert_to_low_precision_training(nn.Sequential(prepare_qat(nn.Linear(4, 3)), nn.Linear(3, 2)), "rowwise")
    assert type(kept[0]) is FakeQuantized and type(kept[1]) is LowPrecisionLinear


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


@pytest.mark.thorough
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
    low = x.numpy().astype(as_dtype(dtype))
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
    function = "tests.compress.test_low_precision_models:trained"
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
    function = "tests.compress.test_low_precision_models:sharded"
    (buffers, _), most, sizes, whole = crews.call(function, 2, ("sharded",))[0]
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
