"""A rate is a number, Python's or NumPy's, with the same bits; no tensor. And what settings are by default."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim

KINDS = optim.SGD, optim.Adam, optim.LAMB, optim.LARS, optim.Muon, optim.Adagrad, optim.Adafactor, \
    optim.AdamWScheduleFree, optim.Lion, optim.Dion2, optim.Dion, optim.NorMuon


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS = {    # torch's; of those that torch lacks their papers', but for the learning rate
    "SGD": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
    "Adam": ADAM | {"maximize": False},
    "AdamW": ADAM | {"maximize": False, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
    "Muon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7, "ns_steps": 5,
             "ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None},
    "NorMuon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95, "nesterov": False, "eps": 1e-7,
                "ns_steps": 5, "ns_coefficients": (3.4445, -4.775, 2.0315)},
    "Dion": {"lr": 0.01, "rank_fraction": 0.25, "momentum": 0.95, "weight_decay": 0.01, "eps": 1e-8,
             "right": "columns", "adjust_lr_fn": None, "seed": 0},
    "Dion2": {"lr": 0.01, "fraction": 0.25, "momentum": 0.95, "weight_decay": 0.01, "eps": 1e-7, "ns_steps": 5,
              "ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None},
    "Adafactor": {"lr": 0.01, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0,
                  "maximize": False},
    "LAMB": ADAM | {"eps": 1e-6, "weight_decay": 0.01},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "LARS": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 1e-3},
    "AdamWScheduleFree": ADAM | {"lr": 2.5e-3, "warmup": 0},
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_settings_by_default(kind):
    group, = getattr(optim, kind)([nn.Linear(2, 2).weight]).param_groups
    del group["params"]
    assert group == DEFAULTS[kind] | {"state_bits": 32}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_rate_is_no_tensor(make):
    with pytest.raises(TypeError, match=r"lr is a tensor; it must be a number: float\(lr\)"):
        make(nn.Linear(2, 2).parameters(), lr=mt.tensor(0.1))


@pytest.mark.parametrize("rate", [np.float32(1.3), np.float64(1.3), np.array(1.3)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_numpys_rate_has_the_bits_of_pythons(make, rate):
    """In float64 one of 1.3 would change the bits of each: steps are as large as the parameters then."""
    mt.manual_seed(0)
    layer, plain = (nn.Linear(40, 30, bias=False) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    for model, lr in ((layer, rate), (plain, float(rate))):
        optimizer = make(model.parameters(), lr=lr)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr        # as a schedule does
            mt.sum(mt.tanh(model(x))).backward()
            optimizer.step()
    assert layer.weight.numpy().tobytes() == plain.weight.numpy().tobytes()


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
