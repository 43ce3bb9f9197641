"""Post-training quantisation of models: accuracy, bytes, names, checkpoints, folding, what is refused."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import data, nn, optim
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.compress import (
    OBSERVERS,
    QuantizedTensor,
    Scheme,
    describe,
    fold_batch_norm,
    prepare_qat,
    quantize_model,
)
from minitorch_dist.compress.quant_layers import Integer, IntegerSequential, WeightOnly
from tests.device.fake_cupy import installed

KINDS = ("weight-only", "dynamic", "integer")


def trained(model, dataset, epochs, lr=0.02):
    """The model after some epochs of SGD, in evaluation mode."""
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = data.Loader(dataset.train_images, dataset.train_labels, 64)
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            for shard in batch.shards:
                (nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def accuracy(model, dataset):
    with mt.no_grad():
        return 100 * (model(dataset.test_images).numpy().argmax(1) == dataset.test_labels).mean()


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def mlp(digits):
    mt.manual_seed(0)
    return trained(nn.mlp((64, 32)), digits, 8)


def small_of(model, scheme, digits):
    kind = scheme if isinstance(scheme, str) else scheme.kind
    return quantize_model(model, scheme, [digits.train_images[:256]] if kind == "integer" else None)


# ---------------------------------------------------------------- accuracy and bytes

def test_eight_bits_are_as_good_and_two_are_not(mlp, digits):
    """8 and 4 bits keep the accuracy, 2 bits lose it; per channel beats per tensor; the least squared error beats the
    whole range at 2 bits."""
    full = accuracy(mlp, digits)
    assert full > 85
    for kind in KINDS:
        assert abs(accuracy(small_of(mlp, kind, digits), digits) - full) < 1
    assert abs(accuracy(small_of(mlp, Scheme("weight-only", bits=4), digits), digits) - full) < 2
    two = accuracy(small_of(mlp, Scheme("weight-only", bits=2), digits), digits)
    assert two < full - 25
    assert accuracy(small_of(mlp, Scheme("weight-only", bits=2, per_channel=False), digits), digits) < two - 10
    assert accuracy(small_of(mlp, Scheme("weight-only", bits=2, weight_observer="mse"), digits), digits) > two + 10


@pytest.mark.parametrize("observer", sorted(OBSERVERS))
def test_every_observer_finds_a_good_range(mlp, digits, observer):
    small = small_of(mlp, Scheme("integer", observer=observer), digits)
    assert abs(accuracy(small, digits) - accuracy(mlp, digits)) < 1.5


def test_ranges_that_are_too_small_cost_accuracy(mlp, digits):
    """So calibration matters: a tenth of each range, as if it had seen other data."""
    small = small_of(mlp, "integer", digits)
    full = accuracy(small, digits)
    for layer in small:
        if isinstance(layer, Integer):
            layer.input_scale *= 0.1
            layer.bias *= 10        # in units of the input's scale
    assert accuracy(small, digits) < full - 3


def test_channels_of_unequal_size():
    """Per tensor the small channels are lost: their weights are below half a step."""
    mt.manual_seed(1)
    layer = nn.Linear(30, 4, bias=False)
    with mt.no_grad():
        layer.weight[...] = layer.weight.numpy() * np.array([[1], [0.01], [100], [0.001]], np.float32)
    x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    errors = {}
    for per_channel in (True, False):
        with mt.no_grad():
            y = quantize_model(layer, Scheme("weight-only", per_channel=per_channel))(x).numpy() - layer(x).numpy()
        errors[per_channel] = np.linalg.norm(y, axis=0) / np.linalg.norm(layer(x).numpy(), axis=0)
    assert errors[True].max() < 0.02 and errors[False][[1, 3]].min() > 0.5


@pytest.mark.parametrize("bits, share", [(8, 4), (4, 8), (3, 8), (2, 16)])
def test_bytes_are_counted(bits, share):
    """Weights take bits/32 of what they took; then a float32 scale per output and the bias."""
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 9, bias=False))
    for kind in ("weight-only", "dynamic"):
        table = describe(quantize_model(model, Scheme(kind, bits=bits)))
        one, _, two = table.rows
        assert (one.before, one.after) == (4 * (64 * 24 + 24), 64 * 24 * 4 // share + 4 * 24 + 4 * 24)
        assert (two.before, two.after) == (4 * 24 * 9, 24 * 9 * 4 // share + 4 * 9)
        assert table.after == one.after + two.after and table.floating == ["1"]
    single = describe(quantize_model(model, Scheme("weight-only", bits=bits, per_channel=False)))
    assert single.after == (64 * 24 + 24 * 9) * 4 // share + 4 + 4 + 4 * 24
    state = quantize_model(model, Scheme("weight-only", bits=bits)).state_dict()
    assert sum(array.nbytes for array in state.values()) == table.after


def test_the_errors_of_weights_are_told(mlp, digits):
    for bits in (8, 3):
        small = small_of(mlp, Scheme("weight-only", bits=bits), digits)
        for row, new, old in zip(describe(small).rows[::2], list(small)[::2], list(mlp)[::2], strict=True):
            worst = np.abs(new.weight.numpy() - old.weight.numpy()).max()
            assert row.max_error == worst <= 0.5001 * new.weight_scale.max()


def test_the_table(mlp, digits):
    lines = str(describe(small_of(mlp, Scheme("integer", bits=4), digits))).splitlines()
    assert lines[0].split() == ["path", "layer", "kept", "as", "bytes", "before", "after", "max", "|Δweight|"]
    assert lines[1].startswith("0      Linear  integer, w4 per channel, a8       200,960  25,")
    assert lines[2].split() == ["1", "ReLU", "passes", "integers", "0", "0"]
    assert lines[-1].split()[:5] == ["total", "0.129", "of", "the", "bytes"]


# ---------------------------------------------------------------- models of other kinds

def test_a_convolutional_network(digits):
    mt.manual_seed(2)
    model = trained(nn.lenet(), digits, 1, 0.01)
    full = accuracy(model, digits)
    small = small_of(model, "integer", digits)
    assert full > 70 and abs(accuracy(small, digits) - full) < 3
    assert describe(small).floating == ["0"]        # the reshape before the first; all others hand integers on
    for kind in ("dynamic", "weight-only"):
        assert abs(accuracy(small_of(model, kind, digits), digits) - full) < 3


def test_integers_pass_between_layers(mlp, digits):
    """Only the first and the last see real numbers; what is in between comes as int8."""
    small = small_of(mlp, "integer", digits)
    seen = []
    for layer in (small[0], small[2], small[4]):
        layer.register_forward_hook(lambda layer, inputs, out: seen.append((type(inputs[0]), type(out))))
    with mt.no_grad():
        small(mt.tensor(digits.test_images[:3]))
    ints, real = QuantizedTensor, mt.Tensor
    assert seen == [(real, ints), (ints, ints), (ints, real)] and isinstance(small, IntegerSequential)


def test_sequences_inside_of_others():
    mt.manual_seed(3)
    x = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    a, b, c, d, e, f, g = layers = (nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3),
                                    nn.ReLU())
    plain, of = nn.Sequential(*layers), nn.Sequential
    nested = of(of(a), of(b, of(c, d)), e, of(of(f, g)))
    with mt.no_grad():
        results = [quantize_model(model, "integer", [x]) for model in (plain, nested)]
        assert (results[0](x).numpy() == results[1](x).numpy()).all()
        assert np.abs(results[0](x).numpy() - plain(x).numpy()).max() < 0.05
    passing = [[row.path for row in describe(small).rows if row.scheme == "passes integers"] for small in results]
    assert passing == [["1"], ["1.0"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "bias": False}], ids=str)
def test_a_transformer_keeps_its_attention(kind, options):
    mt.manual_seed(4)
    model = nn.GPT(vocabulary=11, length=6, layers=2, heads=2, dim=16, **options).eval()
    tokens = np.random.default_rng(2).integers(0, 11, (4, 6))
    small = quantize_model(model, kind, [tokens] if kind == "integer" else None)
    with mt.no_grad():
        assert np.abs(small(tokens).numpy() - model(tokens).numpy()).max() < 0.02
    table = describe(small)
    assert {"blocks.0.attention", "blocks.1.norm2", "blocks.0.mlp.1", "embed", "norm"} <= set(table.floating)
    assert {row.path for row in table.rows if row.scheme != "float"} == {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")}


def test_a_model_that_looks_at_its_layers_weight():
    """It finds the real weight, not bytes."""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return mt.linear(mt.linear(x, self.inner.weight), self.inner.weight.T) + self.inner(x).sum()
    mt.manual_seed(5)
    model, x = Tied(), np.random.default_rng(3).standard_normal((2, 4)).astype(np.float32)
    with mt.no_grad():
        np.testing.assert_allclose(quantize_model(model, "weight-only")(x).numpy(), model(x).numpy(), atol=0.05)


def test_a_layer_used_twice_and_a_shared_parameter():
    mt.manual_seed(6)
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = layer.weight
    model = nn.Sequential(layer, nn.ReLU(), layer, other)
    x = np.random.default_rng(4).standard_normal((6, 4)).astype(np.float32)
    with mt.no_grad():
        wanted = model(x).numpy()
        for kind in KINDS:
            small = quantize_model(model, kind, [x] if kind == "integer" else None)
            assert small[0] is small[2] is not small[3]
            np.testing.assert_allclose(small(x).numpy(), wanted, atol=0.05)


def test_weight_only_can_be_differentiated():
    """Input and bias get the gradients of the layer with the rounded weight; the others refuse."""
    mt.manual_seed(7)
    layer = nn.Linear(5, 3, dtype=np.float64)
    x, ct = np.random.default_rng(5).standard_normal((4, 5)), np.random.default_rng(6).standard_normal((4, 3))
    small = quantize_model(nn.Sequential(layer), Scheme("weight-only", bits=4))
    tracked = mt.tensor(x, requires_grad=True)
    (small(tracked) * ct).sum().backward()
    np.testing.assert_allclose(tracked.grad.numpy(), ct @ small[0].weight.numpy())
    np.testing.assert_allclose(small[0].bias.grad.numpy(), ct.sum(0))
    assert isinstance(small[0], WeightOnly) and small(x).dtype == np.float64
    for kind in ("dynamic", "integer"):
        refusing = quantize_model(nn.Sequential(layer), kind, [x] if kind == "integer" else None)
        assert not any(p.requires_grad for p in refusing.parameters())
        assert refusing(x).dtype == np.float64
        with pytest.raises(TypeError, match="0 multiplies integers, which has no derivative: run it under no_grad"):
            refusing(tracked)


# ---------------------------------------------------------------- names and checkpoints

@pytest.mark.parametrize("scheme", [*(Scheme(kind) for kind in KINDS), Scheme("integer", bits=2),
                                    Scheme("weight-only", bits=3, per_channel=False)], ids=str)
def test_a_checkpoint_goes_round(mlp, digits, scheme, tmp_path):
    """Into a copy of another model, calibrated with something else."""
    small = small_of(mlp, scheme, digits)
    assert set(mlp.state_dict()) <= set(small.state_dict())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, small, bits=scheme.bits)
    mt.manual_seed(99)
    other = quantize_model(nn.mlp((64, 32)), scheme, [np.zeros((1, 784))] if scheme.kind == "integer" else None)
    assert checkpoints.load(other) == (3, {"bits": scheme.bits, "step": 3})
    with mt.no_grad():
        np.testing.assert_array_equal(other(digits.test_images).numpy(), small(digits.test_images).numpy())
    with pytest.raises(KeyError, match="the model has no .*0.weight_scale"):
        mlp.load_state_dict(small.state_dict())


def test_the_model_stays_as_it_was(mlp, digits):
    before, mode = mlp.state_dict(), mlp.train()
    for kind in KINDS:
        assert not small_of(mlp, kind, digits).training
    prepare_qat(mlp)
    assert mode.training and all(p._hooks is None for p in mlp.modules())
    for name, values in mlp.eval().state_dict().items():
        np.testing.assert_array_equal(values, before[name])


# ---------------------------------------------------------------- batch norm

def normed():
    """A model with BatchNorms of every kind, whose statistics are not those of the beginning."""
    mt.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm(3), nn.ReLU(), nn.ResidualBlock(3, 4, 2),
                          nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm(6), nn.ReLU(), nn.Linear(6, 2))
    x = np.random.default_rng(7).standard_normal((30, 2, 6, 6)).astype(np.float32) * 2 + 1
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm)]:
        with mt.no_grad():
            norm.weight[...] = np.linspace(0.5, -1.5, norm.num_features).astype(np.float32)
            norm.bias[...] = np.linspace(-0.3, 0.4, norm.num_features).astype(np.float32)
    for _ in range(9):
        model(x)
    return model.eval(), x


def test_batch_norms_are_folded():
    model, x = normed()
    wanted = model(x).numpy()
    folded = fold_batch_norm(model)
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm)]
    np.testing.assert_allclose(folded(x).numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert {"0.bias", "3.conv1.bias", "3.conv2.bias"} == \
        {name for name, _ in folded.named_parameters()} - {name for name, _ in model.named_parameters()}
    with mt.no_grad():
        for kind in KINDS:
            found = quantize_model(model, kind, [x] if kind == "integer" else None)(x).numpy()
            assert 0 < np.abs(found - wanted).max() < 0.15
        kept = quantize_model(model, "weight-only", fold=False)
    assert {"1", "3.norm1", "3.norm2", "6"} <= set(describe(kept).floating)
    np.testing.assert_allclose(model(x).numpy(), wanted)


def test_what_can_not_be_folded_stays():
    """A norm that follows nothing of its own; and a linear layer's whose channels turn out to lie elsewhere."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.BatchNorm(4), shared, nn.ReLU(), nn.BatchNorm(4))
    assert sum(isinstance(m, nn.BatchNorm) for m in fold_batch_norm(model).modules()) == 2
    folded = fold_batch_norm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3)))
    with pytest.raises(ValueError, match=r"folded into the Linear before it.* has shape \(2, 3, 3\).*fold=False"):
        folded(np.zeros((2, 3, 4), np.float32))


# ---------------------------------------------------------------- what is refused

def test_a_model_on_a_gpu_is_refused():
    with installed(), pytest.raises(ValueError, match=r"weight is on cuda:0: quantised layers run on the CPU"):
        quantize_model(nn.Linear(3, 2).to("cuda"))


def test_what_is_refused(mlp, digits):
    x = digits.train_images[:4]
    bad = np.where(np.arange(784) < 3, np.nan, x)
    for words, call in {
        "'integer' needs calibration: some batches": lambda: quantize_model(mlp, "integer"),
        "'integer' needs calibration": lambda: quantize_model(mlp, "integer", []),
        "calibration never reached 0, 2, 4": lambda: quantize_model(mlp, "integer", [x[:0]]),
        "was given 12 NaN and 0 infinite values of 3136": lambda: quantize_model(mlp, "integer", [x, bad]),
        "'dynamic' takes no ranges from data": lambda: quantize_model(mlp, "dynamic", [x]),
        "Scheme: kind='int8'; there is 'weight-only', 'dynamic', 'integer'": lambda: quantize_model(mlp, "int8"),
        "observer='max'; there is 'minmax'": lambda: Scheme(observer="max"),
        "of 9 bits: it must be 2 to 8": lambda: Scheme(bits=9),
        "of 1 bits": lambda: Scheme(activation_bits=1),
        "skip: the model has no 7; it has 0, 1": lambda: quantize_model(mlp, Scheme("dynamic", skip=("7",))),
        "there is no Linear, Conv1d, Conv2d to quantise": lambda: quantize_model(nn.Sequential(nn.ReLU())),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    weight = np.full((2, 3), np.nan, np.float32)
    layer = nn.Linear(3, 2, weight_init=lambda shape, dtype: weight)
    with pytest.raises(ValueError, match="the quantiser of a weight was given 6 NaN"):
        quantize_model(layer, "weight-only")
    layer = nn.Linear(3, 2)
    with mt.no_grad():
        layer.bias[...] = np.array([0, np.inf], np.float32)
    with pytest.raises(ValueError, match="the quantiser of a bias was given 0 NaN and 1 infinite"):
        quantize_model(layer, "integer", np.ones((1, 3), np.float32))


def test_inputs_that_are_no_numbers(mlp, digits):
    x = np.where(np.arange(784) == 5, np.nan, digits.test_images[:1]).astype(np.float32)
    for kind, words in (("dynamic", "0's input was given 1 NaN"), ("integer", "1 of 784 values are NaN")):
        with mt.no_grad(), pytest.raises(ValueError, match=words):
            small_of(mlp, kind, digits)(x)
    with mt.no_grad():
        for kind in KINDS:
            assert small_of(mlp, kind, digits)(x[:0]).shape == (0, 10)
        constant = np.full((3, 784), -2.5, np.float32)      # activations of one value, of one sign
        np.testing.assert_allclose(quantize_model(mlp, "integer", constant)(constant).numpy(),
                                   mlp(constant).numpy(), atol=0.15)


def test_a_name_alone_is_one_name_and_bits_are_whole():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(13)])
    for small in (quantize_model(model, Scheme("dynamic", skip="12")), prepare_qat(model, skip="12")):
        assert [path for path, m in small.named_modules() if type(m) is nn.Linear] == ["12"]
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    with mt.no_grad():
        expected = quantize_model(model, Scheme("dynamic", 8, 8))(x).numpy()
        found = quantize_model(model, Scheme("dynamic", np.int8(8), np.uint8(8)))(x).numpy()
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(TypeError, match="bits=8.0: must be a whole number"):
        Scheme(bits=8.0)


def test_layers_that_are_skipped(mlp, digits):
    small = small_of(mlp, Scheme("integer", skip=("0", "4")), digits)
    assert describe(small).floating == ["0", "1", "3", "4"]
    assert abs(accuracy(small, digits) - accuracy(mlp, digits)) < 1


def test_a_hook_between_layers_is_called():
    """What looks at a ReLU, or changes what it gives, sees real numbers."""
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    seen = []
    model[1].register_forward_hook(lambda layer, inputs, out: seen.append(type(out)) or out * 0.5)
    x = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    small = quantize_model(model, "integer", calibration=[x])
    with mt.no_grad():
        seen.clear()
        found, expected = small(mt.tensor(x)).numpy(), model(mt.tensor(x)).numpy()
    assert seen == [mt.Tensor, mt.Tensor]
    np.testing.assert_allclose(found, expected, atol=0.03 * abs(expected).max())


def test_a_state_of_other_bits_says_so(mlp, digits):
    eight, four = (quantize_model(mlp, Scheme("integer", activation_bits=bits), calibration=[digits.test_images[:64]])
                   for bits in (8, 4))
    four.load_state_dict(eight.state_dict())
    with mt.no_grad():
        np.testing.assert_array_equal(four(mt.tensor(digits.test_images[:9])).numpy(),
                                      eight(mt.tensor(digits.test_images[:9])).numpy())


def test_forward_mode_through_integers_is_refused(mlp, digits):
    small = quantize_model(mlp, "dynamic")
    x = digits.test_images[:2]
    with pytest.raises(TypeError, match="multiplies integers, which has no derivative"):
        mt.jvp(small, (x,), (x,))
