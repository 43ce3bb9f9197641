"""States that load_state_dict can't take: what they lack, or what can't be, is named, and nothing is changed."""

import numpy as np
import pytest

from minitorch_dist import comm, nn, optim
from minitorch_dist.compress.soup import ExponentialMovingAverage
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.local_sgd import DiLoCo, Gossip, topologies
from minitorch_dist.parallel.noise_scale import GradientNoiseScale


def alone(make):
    """make(layer, its SGD, a world of one rank)."""
    layer = nn.Linear(3, 2)
    return make(layer, optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), comm.world())


def diverging(values):
    guard = optim.SpikeGuard(window=4)
    for step, value in enumerate(values, 1):
        guard.spiked(step, loss=value)
    return guard


# What loads a state, whose it says that the state must be, and [(an entry, what it can't be, what is said)].
LISTS = [(name, wrong, f"{name} is a {kind}, and must be a list: it is not an optimizer's state_dict()")
         for name in ("groups", "sizes", "steps", "state") for wrong, kind in ((None, "NoneType"), ("x", "str"))]
LOADING = {
    "optimizer": (lambda layer, sgd, world: sgd, "an optimizer", LISTS),
    "combined": (lambda layer, sgd, world: optim.Combined(
        optim.SGD([layer.weight], lr=0.1), optim.Adam([layer.bias])), "an optimizer", LISTS),
    "DiLoCo": (lambda layer, sgd, world: DiLoCo(layer, sgd, world, every=2), "an optimizer", [
        ("class", "SGD", "the saved state is of SGD, this optimizer is DiLoCo"), *LISTS]),
    "gossip": (lambda layer, sgd, world: Gossip(layer, sgd, world, topology=topologies.ring(1)),
               "an optimizer", [("class", "SGD", "the saved state is of SGD, this optimizer is Gossip"), *LISTS]),
    "scaler": (lambda layer, sgd, world: optim.GradScaler(), "a GradScaler", [
        ("scale", 0.0, r"scale is 0.0; it must be from 2\^-126 to 2\^127"), ("scale", "x", "scale is 'x'"),
        ("growth_factor", 1.0, "above 1"), ("backoff_factor", 1.0, r"in \(0, 1\)"), ("growth_interval", 0.5, "whole"),
        ("_growth_tracker", -1, "_growth_tracker is -1; it must be a whole number, at least 0")]),
    "spikes": (lambda layer, sgd, world: diverging([1.0, 2.0, 1.0, 99.0]), "a SpikeGuard", [
        ("before", [1.0], "not a SpikeGuard's state_dict"), ("before", {"loss": ["x"]}, "float: 'x'"),
        ("found", [[1, "loss"]], "missing 3")]),
    "noise scale": (lambda layer, sgd, world: GradientNoiseScale(DistributedDataParallel(layer, world)),
                    "a GradientNoiseScale", [("trace", None, "trace is None; it must be a number")]),
    "average": (lambda layer, sgd, world: ExponentialMovingAverage(layer), "an average", [
        ("updates", None, "updates is None; it must be at least 0"), ("averages", {}, "bias of shape None, this model"),
        ("averages", {"weight": [1.0], "bias": np.zeros(2)}, r"weight of shape None, this model of shape \(2, 3\)")]),
}


@pytest.mark.parametrize("name", LOADING)
def test_what_a_saved_state_lacks_or_has_instead_is_named(name):
    make, whose, wrong = LOADING[name]
    taking = alone(make)
    before, state = repr(taking.state_dict()), taking.state_dict()
    for odd in ([1], "text"):
        with pytest.raises(TypeError, match=f"takes what {whose}'s state_dict.. gave, got a {type(odd).__name__}"):
            taking.load_state_dict(odd)
    for key in state:
        with pytest.raises(ValueError, match=f"the saved state has no {key}: it is not {whose}'s state_dict"):
            taking.load_state_dict({k: v for k, v in state.items() if k != key})
    for key, value, said in wrong:
        with pytest.raises(ValueError, match=said):
            taking.load_state_dict({**state, key: value})
    assert repr(taking.state_dict()) == before
    taking.load_state_dict(state)


def test_a_model_is_given_arrays():
    layer = nn.Linear(3, 2)
    for odd in (None, [1.0, 2.0], 3.0):
        with pytest.raises(TypeError, match=f"load_state_dict: bias is a {type(odd).__name__}, and must be an array"):
            layer.load_state_dict({"weight": np.zeros((2, 3), np.float32), "bias": odd})
    assert layer.weight.numpy().any()
