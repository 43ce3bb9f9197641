"""A rate is a number, Python's or NumPy's, with the same bits; no tensor."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim

KINDS = optim.SGD, optim.Adam, optim.LAMB, optim.LARS, optim.Muon, optim.Adagrad


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_rate_is_no_tensor(make):
    with pytest.raises(TypeError, match=r"lr is a tensor; it must be a number: float\(lr\)"):
        make(nn.Linear(2, 2).parameters(), lr=mt.tensor(0.1))
    for rate in (np.float32(0.5), np.float64(0.5), np.array(0.5)):
        layer, plain = (nn.Linear(2, 2, bias=False) for _ in range(2))
        plain.load_state_dict(layer.state_dict())
        for model, lr in ((layer, rate), (plain, 0.5)):
            optimizer = make(model.parameters(), lr=lr * 1)
            optimizer.param_groups[0]["lr"] = lr
            mt.sum(model(mt.tensor(np.ones((3, 2), np.float32)))).backward()
            optimizer.step()
        assert all(np.array_equal(a, plain.state_dict()[name]) for name, a in layer.state_dict().items())


@pytest.mark.parametrize("numbers", [tuple, list])
def test_numbers_in_a_groups_list_are_pythons_too(numbers):
    layer, plain = (nn.Linear(3, 2, bias=False) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    for model, betas in ((layer, numbers(np.array([0.9, 0.99]))), (plain, (0.9, 0.99))):
        optimizer = optim.Adam([{"params": model.parameters(), "betas": betas}], lr=0.003)
        for _ in range(3):
            mt.sum(mt.tanh(model(mt.tensor(np.ones((3, 3), np.float32))))).backward()
            optimizer.step()
    assert layer.weight.numpy().tobytes() == plain.weight.numpy().tobytes()
    with pytest.raises(TypeError, match="betas is a tensor"):
        optim.Adam([{"params": layer.parameters(), "betas": numbers([mt.tensor(0.9), 0.99])}])
