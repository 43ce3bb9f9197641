"""A module as a function of its parameters: derivatives of any order, names, and that it is what it was afterwards."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.check import check_grads
from minitorch_dist.autodiff.primitive import lower

random = np.random.default_rng
F8 = {"dtype": np.float64}


def net():
    mt.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, **F8), nn.Tanh(), nn.BatchNorm(5, **F8), nn.Linear(5, 3, **F8))


def values_of(model):
    return {name: p.numpy().copy() for name, p in model.named_parameters()}


X, LABELS = random(0).standard_normal((6, 4)), np.arange(6) % 3


def loss_of(model, reduction="mean"):
    return lambda values: nn.cross_entropy(nn.functional_call(model, values, X), LABELS, reduction)


def test_its_gradient_is_that_of_backward():
    for model, x, labels in ((net(), X, LABELS), (nn.lenet(), random(1).standard_normal((2, 784)), [3, 7]),
                             (nn.GPT(11, 12, 2, 2, 8, positions="rotary", window=("linear", 3)),
                              random(2).integers(0, 11, (2, 6)), random(3).integers(0, 11, (2, 6)))):
        model.to("float64")
        inputs = x if x.dtype.kind == "i" else mt.tensor(x)
        grads = mt.grad(lambda values, model=model, inputs=inputs, labels=labels: nn.cross_entropy(
            nn.functional_call(model, values, inputs), labels))(values_of(model))
        nn.cross_entropy(model(inputs), labels).backward()
        assert set(grads) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            np.testing.assert_allclose(lower(grads[name]), p.grad.numpy(), rtol=1e-10, atol=1e-14, err_msg=name)


def test_all_modes_to_second_order():
    model = net().eval()
    values = values_of(model)
    check_grads(lambda *given: loss_of(model)(dict(zip(values, given, strict=True))), list(values.values()))


def test_a_step_inside_of_a_gradient():
    """MAML: d/dw of the loss behind a step of gradient descent, against central differences."""
    model = net().eval()
    values, loss = values_of(model), loss_of(model)

    def behind(values):
        grads = mt.grad(loss)(values)
        return loss({name: v - 0.5 * grads[name] for name, v in values.items()})
    found, h = mt.grad(behind)(values), 1e-5
    u = {name: random(5).standard_normal(v.shape) for name, v in values.items()}
    up, down = (behind({name: v + s * h * u[name] for name, v in values.items()}) for s in (1, -1))
    assert sum((found[name] * u[name]).sum() for name in u) == pytest.approx(float(up - down) / (2 * h), rel=1e-8)


def test_gradients_of_single_samples():
    model = net().eval()
    each = mt.jacrev(loss_of(model, "none"))(values_of(model))
    for i in range(6):
        model.zero_grad()
        nn.cross_entropy(model(mt.tensor(X[i:i + 1])), LABELS[i:i + 1]).backward()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(each[name][i], p.grad.numpy(), rtol=1e-10, atol=1e-14, err_msg=name)


def test_some_values_and_buffers_and_the_module_afterwards():
    model = net()
    own, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = model.state_dict()
    mean, weight = np.zeros(5), mt.tensor(random(4).standard_normal((3, 5)))
    y = nn.functional_call(model, {"3.weight": weight, "2.running_mean": mean}, X)
    assert (mean != 0).any()        # moved where it was given
    twin = net()
    twin.load_state_dict({**state, "3.weight": weight})
    np.testing.assert_array_equal(y.numpy(), twin(X).numpy())
    with pytest.raises(ValueError):
        nn.functional_call(model, values_of(model), np.ones((6, 9)))
    assert all(p is own[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert model[3].weight is own["3.weight"] and model[2].running_mean is buffers["2.running_mean"]
    np.testing.assert_array_equal(state["3.weight"], model[3].weight.numpy())


def test_shared_parameters_have_one_value():
    layer = nn.Linear(4, 4, bias=False, **F8)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    w = random(6).standard_normal((4, 4))
    for name in ("0.weight", "2.weight"):
        np.testing.assert_array_equal(nn.functional_call(model, {name: w}, X).numpy(), np.tanh(X @ w.T) @ w.T)
    nn.functional_call(model, {"0.weight": w, "2.weight": w}, X)
    with pytest.raises(ValueError, match="0.weight and 2.weight are one and the same .* give one of them"):
        nn.functional_call(model, {"0.weight": w, "2.weight": w + 1}, X)


@pytest.mark.parametrize("values, error, words", [
    ({"4.weight": np.ones((3, 5))}, KeyError, r"no \['4.weight'\]; it has \['0.bias', '0.weight'"),
    ({"0.weight": np.ones((5, 3))}, ValueError, r"0.weight has shape \(5, 4\), the value \(5, 3\)"),
    ({"0.weight": [[1.0]]}, TypeError, "0.weight is list"),
], ids=["name", "shape", "list"])
def test_what_does_not_fit(values, error, words):
    model = net()
    with pytest.raises(error, match=f"functional_call: .*{words}"):
        nn.functional_call(model, values, X)
    assert model[0].weight is dict(model.named_parameters())["0.weight"]
