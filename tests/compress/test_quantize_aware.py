"""Quantisation-aware training: by hand, on ranks, and the integers that come of it."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.compress import (
    Scheme,
    convert,
    dequantize,
    describe,
    fake_quantize,
    freeze_ranges,
    params_of_range,
    prepare_qat,
    quantize,
    quantize_model,
)
from minitorch_dist.compress.quant_aware import FakeQuantized
from minitorch_dist.compress.quant_layers import Integer, IntegerAvgPool2d
from tests.crews import crews

from .test_quantize_models import accuracy, digits, mlp, small_of, trained  # noqa: F401

HERE = "tests.compress.quant_cases:"


def rounded(x, scale, zero=0, low=-128, high=127):
    """By the definition, in float64."""
    return (np.clip(np.rint(x / scale) + zero, low, high) - zero) * scale


def test_forward_and_gradients_by_hand():
    """y = x' W'ᵀ + b'; the gradients are those of the rounded numbers, 0 where x lies outside of its range."""
    mt.manual_seed(1)
    layer = nn.Linear(5, 3, dtype=np.float64)
    random = np.random.default_rng(1)
    x, ct = random.standard_normal((20, 5)) * np.linspace(1, 2, 20)[:, None], random.standard_normal((20, 3))
    model = prepare_qat(layer, bits=4)
    model(x[:10])
    freeze_ranges(model)
    low, high = x[:10].min(), x[:10].max()
    s_x = float(np.float32((high - low) / 255))
    zero = np.rint(-128 - low / s_x)
    s_w = (np.abs(layer.weight.numpy()).max(1) / 7).astype(np.float32).astype(np.float64)[:, None]
    xq, wq = rounded(x, s_x, zero), rounded(layer.weight.numpy(), s_w, 0, -7, 7)
    tracked = mt.tensor(x, requires_grad=True)
    y = model(tracked)
    np.testing.assert_allclose(y.numpy(), xq @ wq.T + rounded(layer.bias.numpy(), s_x * s_w[:, 0], 0, -2e9, 2e9),
                               atol=1e-13)
    (y * ct).sum().backward()
    free = np.rint(x / s_x) + zero
    inside = (free >= -128) & (free <= 127)
    assert 0 < (~inside).sum() < 30
    np.testing.assert_allclose(tracked.grad.numpy(), np.where(inside, ct @ wq, 0), atol=1e-12)
    np.testing.assert_allclose(model.weight.grad.numpy(), ct.T @ xq, atol=1e-12)
    np.testing.assert_allclose(model.bias.grad.numpy(), ct.sum(0), atol=1e-12)
    assert dict(layer.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_ranges_move_in_training_only():
    model = prepare_qat(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    batches = [np.array([[low, high]], np.float32) for low, high in ((-1, 3), (-2, 2), (0, 8))]
    with pytest.raises(RuntimeError, match="0 has no range for its input yet: run some batches in training mode"):
        model.eval()(batches[0])
    model.train()
    for batch in (*batches, batches[0][:0]):
        model(batch)
    wanted = [(-1 * .9 - .2) * .9 + 0, (3 * .9 + .2) * .9 + .8]
    np.testing.assert_allclose(model[0].input_range, wanted)
    model.eval()(batches[0] * 50)
    freeze_ranges(model.train())(batches[0] * 50)
    np.testing.assert_allclose(model[0].input_range, wanted)
    freeze_ranges(model, False)
    mt.checkpoint(model)(mt.tensor(batches[1], requires_grad=True)).sum().backward()    # runs forward twice
    np.testing.assert_allclose(model[0].input_range, [wanted[0] * .9 - .2, wanted[1] * .9 + .2])
    with pytest.raises(ValueError, match="0's input was given 1 NaN"):
        model(np.array([[np.nan, 0]], np.float32))


def test_two_bits_are_learnt(mlp, digits):  # noqa: F811
    """What rounding afterwards destroys, training with the rounding brings back; and the integers give the same."""
    after = accuracy(small_of(mlp, Scheme("integer", bits=2), digits), digits)
    aware = trained(prepare_qat(mlp, bits=2), digits, 6, 0.01)
    recovered, full = accuracy(aware, digits), accuracy(mlp, digits)
    assert after < full - 25 and recovered > full - 5
    small = convert(aware)
    assert abs(accuracy(small, digits) - recovered) <= 1
    assert describe(small).after < 0.08 * describe(small).before
    kinds = [row.scheme for row in describe(small).rows]
    assert kinds == ["integer, w2 per channel, a8", "passes integers"] * 2 + ["integer, w2 per channel, a8"]


# ---------------------------------------------------------------- convert

def network(dtype):
    mt.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, dtype=dtype), nn.BatchNorm(4, dtype=dtype), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, bias=False, dtype=dtype), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(20, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 3, dtype=dtype))


def aware_model(dtype, **options):
    """A model that has learnt its ranges and taken some steps, and data."""
    model = prepare_qat(network(dtype), **options)
    x = np.random.default_rng(4).standard_normal((40, 1, 12, 12)).astype(dtype)
    for _ in range(4):
        (model(x) ** 2).sum().backward()
        for p in model.parameters():
            with mt.no_grad():
                p[...] = p.numpy() - 1e-4 * p.grad.numpy()
            p.grad = None
    return model.eval(), x


@pytest.mark.parametrize("dtype, bits, activation_bits", [(np.float64, 8, 8), (np.float32, 4, 8), (np.float64, 2, 5),
                                                         (np.float64, 2, 2)])
def test_convert_is_the_model_that_was_trained(dtype, bits, activation_bits):
    """Layer by layer, on the same integers: what leaves is the rounding of what the trained model computes, but for one
    step where that lies at a half, within the floating error. Then the whole."""
    aware, x = aware_model(dtype, bits=bits, activation_bits=activation_bits)
    small = convert(aware)
    taken = {}
    for name, layer in small.named_modules():
        if isinstance(layer, (Integer, IntegerAvgPool2d)):
            layer.register_forward_pre_hook(lambda _, inputs, name=name: taken.__setitem__(name, inputs[0]))
    with mt.no_grad():
        found, wanted = small(mt.tensor(x)).numpy(), aware(x).numpy()
        for first, then, consumer in (("0", ("2", "3"), "4"), ("6", ("7",), "8"), ("8", ("9",), "10")):
            given, params = taken[first], small._modules[consumer].input
            given = given if first == "0" else mt.tensor(dequantize(given.values, given.params, dtype))
            y = aware._modules[first](given)
            for name in then:
                y = aware._modules[name](y)
            steps = y.numpy() / np.float64(params.scale)
            wrong = quantize(y, params) != taken[consumer].values
            assert (np.abs(quantize(y, params).astype(int) - taken[consumer].values) <= 1).all()
            slack = 1e-7 if dtype == np.float64 else 1e-4      # (a multiplier has 31 bits)
            assert (np.abs(steps - np.floor(steps) - 0.5) <= slack)[wrong].all() and wrong.mean() <= 0.01
    assert found.dtype == dtype and np.abs(found - wanted).max() < 5 / 2 ** activation_bits * np.abs(wanted).max()


def test_half_precision_stays_finite():
    """float16 has no room for the scale of a bias, nor for its integers."""
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 10))
    x = np.random.default_rng(0).standard_normal((6, 784)).astype(np.float32)
    model.load_state_dict({name: value * np.float32(0.01) for name, value in model.state_dict().items()})
    expected = prepare_qat(model)(x).numpy()
    found = prepare_qat(model.to(np.float16))(x.astype(np.float16))
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=0.02 * abs(expected).max())


def test_what_is_frozen_stays_frozen():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3), nn.ReLU(), nn.Linear(3, 2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    trained = {name for name, p in prepare_qat(model).named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"3"}


def test_weights_alone():
    """The integers give the trained model's numbers to the last bit, and nothing is observed."""
    aware, x = aware_model(np.float32, bits=3, activation_bits=None)
    assert all(np.isnan(b).all() for name, b in aware.named_buffers())
    with mt.no_grad():
        small = convert(aware)
        np.testing.assert_array_equal(small(x).numpy(), aware(x).numpy())
    assert {row.scheme for row in describe(small).rows} == {"weight-only, w3 per channel", "float"}


def test_rounding_weights_by_least_error_and_skipping():
    aware, _ = aware_model(np.float32, bits=4, weight_observer="mse", skip=("10",), per_channel=False)
    small = convert(aware)
    assert isinstance(small[10], nn.Linear) and isinstance(aware[0], FakeQuantized) and small[0].axis is None
    assert (small[0].weight.numpy() == fake_quantize(aware[0].weight, small[0].weight_params).numpy()).all()
    assert small[0].weight_scale < np.abs(aware[0].weight.numpy()).max() / 7 * 1.0001


def test_a_checkpoint_of_the_training_goes_round(tmp_path):
    aware, x = aware_model(np.float32, bits=4)
    Checkpoints(tmp_path).save(4, aware)
    other = prepare_qat(network(np.float32), bits=4)
    Checkpoints(tmp_path).load(other)
    with mt.no_grad():
        np.testing.assert_array_equal(other.eval()(x).numpy(), aware(x).numpy())
        np.testing.assert_array_equal(convert(other)(x).numpy(), convert(aware)(x).numpy())


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
def test_a_checkpoint_rounds_again_as_it_did(nested):
    """In the ranges of its own forward, which others have moved since, once each; also where it is in another one."""
    found = []
    for checkpointed in (False, True):
        aware, x = aware_model(np.float64, bits=4)
        aware.train()
        if checkpointed:
            for layer in aware if nested else ():
                layer.forward = mt.checkpoint(layer.forward)
            aware.forward = mt.checkpoint(aware.forward)
        sum(aware(k * x).sum() for k in (1, 3, -2)).backward()
        aware(x)
        found.append([*(p.grad.numpy() for p in aware.parameters()),
                      *(layer.input_range for layer in aware.modules() if hasattr(layer, "input_range"))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_refused():
    with pytest.raises(RuntimeError, match="0 has no range for its input yet"):
        convert(prepare_qat(nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match="Sequential has no layers that were prepared: call prepare_qat first"):
        convert(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="there is no Linear"):
        prepare_qat(nn.Sequential(nn.ReLU()))
    for bits in (0, 1, 9):
        with pytest.raises(ValueError, match=f"numbers of {bits} bits: it must be 2 to 8"):
            prepare_qat(nn.Linear(2, 2), activation_bits=bits)


# ---------------------------------------------------------------- on ranks

def test_ranks_agree_on_the_ranges():
    """Float64 parameters and ranges of one process within 1e-10, the ranges on all ranks to the last bit; without the
    all-reduce each rank would have its own."""
    (alone, logits), = crews.call(HERE + "trained", 1)
    states, results = zip(*crews.call(HERE + "trained", 2), strict=True)
    for state, found in zip(states, results, strict=True):
        for name, values in state.items():
            np.testing.assert_allclose(values, alone[name], rtol=0, atol=1e-10, err_msg=name)
            assert "input_range" not in name or (values == states[0][name]).all()
        np.testing.assert_allclose(found, logits, atol=1e-9)
    apart = [state["0.input_range"] for state, _ in crews.call(HERE + "trained", 2, (False,))]
    assert np.abs(apart[0] - apart[1]).max() > 0.01


def test_exact_mode_with_frozen_ranges():
    (alone, _), = crews.call(HERE + "trained", 1, (True, True))
    for state, _ in crews.call(HERE + "trained", 2, (True, True)):
        assert all((state[name] == alone[name]).all() for name in alone)


def test_the_closed_range_is_the_one_of_the_observer():
    """prepare_qat, one batch, convert is quantize_model calibrated with that batch."""
    mt.manual_seed(9)
    model, x = nn.Linear(4, 3), np.random.default_rng(9).standard_normal((8, 4)).astype(np.float32)
    aware = prepare_qat(model)
    aware(x)
    assert str(aware.input_params()) == str(params_of_range(x.min(), x.max()))
    with mt.no_grad():
        np.testing.assert_array_equal(convert(aware)(x).numpy(), quantize_model(model, "integer", [x])(x).numpy())
