"""A module or parameter that stands in several places comes once, under its first name; its other names work, too."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, comm, compress, nn
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.tensor import parallelize_module


class Twice(nn.Module):
    """A Linear in three places, one of them below another module, and a weight of its own that is tied to it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inside = nn.Sequential(nn.Tanh(), self.first, self.first)
        self.tied = self.first.weight

    def forward(self, x):
        return self.inside(self.first(x)) @ self.tied


# Other classes of the same kind come out so in torch 2.13: named_modules, named_children, named_parameters, apply.
ONCE = ["", "first", "inside", "inside.0"]
EACH = ["", "first", "inside", "inside.0", "inside.1", "inside.2"]


def test_modules_come_once_under_their_first_path():
    model = Twice()
    assert [path for path, _ in model.named_modules()] == ONCE
    assert [path for path, _ in model.named_modules(remove_duplicate=False)] == EACH
    assert [path for path, _ in model.named_modules("a")] == ["a", "a.first", "a.inside", "a.inside.0"]
    assert list(model.modules()) == [model, model.first, model.inside, model.inside[0]]
    assert dict(model.named_modules(remove_duplicate=False))["inside.2"] is model.first


def test_children_come_once_and_layers_as_often_as_they_are_called():
    model = Twice()
    assert [name for name, _ in model.inside.named_children()] == ["0", "1"] and len(list(model.inside.children())) == 2
    assert len(model.inside) == 3 and list(model.inside)[2] is model.first is model.inside[2]
    seen = []
    model.inside.apply(seen.append)
    assert seen == [model.inside[0], model.first, model.inside]


def test_a_layer_in_several_places_draws_each_place_s_own_numbers():
    drop, ones = nn.Dropout(0.5), mt.tensor(np.ones((8, 6)))

    def drawn(layers):
        with backend.random_scope(1, 2, 8, (0, 8)):
            return layers(ones).numpy()
    first, second = (drawn(nn.Sequential(*(drop if at == i else nn.Identity() for i in range(2)))) for at in range(2))
    assert (first != second).any() and {*first.flat} == {0.0, 2.0}
    for kind in (nn.Sequential, nn.transformer.FeedForward):
        np.testing.assert_array_equal(drawn(kind(drop, drop)), first * second)


def test_a_module_may_be_inside_of_itself():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model)
    for duplicates in (False, True):
        assert [path for path, _ in model.named_modules(remove_duplicate=not duplicates)] == ["", "0"]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


def test_parameters_have_one_name_or_all_of_theirs():
    model = Twice()
    assert [name for name, _ in model.named_parameters()] == ["tied", "first.bias"]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        "tied", "first.weight", "first.bias", "inside.1.weight", "inside.1.bias", "inside.2.weight", "inside.2.bias"]
    assert list(model.state_dict()) == ["tied", "first.bias"]


def test_names_may_begin_with_a_prefix_and_be_of_one_module_alone():
    """torch's arguments, in torch's order."""
    model = Twice()
    wanted = [(f"net.{name}", p) for name, p in model.named_parameters(remove_duplicate=False)]
    for wrapped in (model, mt.compile(model), DistributedDataParallel(Twice(), comm.world())):
        assert [name for name, _ in wrapped.named_parameters("net", True, False)] == [name for name, _ in wanted]
    assert all(p is q for (_, p), (_, q) in zip(wanted, model.named_parameters("net", True, False), strict=True))
    assert [name for name, _ in model.named_parameters("net", recurse=False)] == ["net.tied"]
    assert list(model.parameters(recurse=False)) == [model.tied] and list(model.buffers(False)) == []
    norm = nn.Sequential(nn.BatchNorm(3))
    assert [name for name, _ in norm.named_buffers("a.b")] == [f"a.b.{name}" for name, _ in norm.named_buffers()]
    assert not list(norm.named_buffers(recurse=False)) and list(norm[0].buffers(recurse=False))


def test_a_state_may_say_any_of_the_names():
    model, other = Twice(), Twice()
    state = model.state_dict()
    each = {name: p.numpy() for name, p in model.named_parameters(remove_duplicate=False)}      # torch's states are so
    for given in (state, each, {"inside.2.weight": state["tied"], "first.bias": state["first.bias"]}):
        for p in other.parameters():
            p.data[...] = 0
        other.load_state_dict(given)
        assert all(np.array_equal(other.state_dict()[name], values) for name, values in state.items())


def test_a_state_can_not_say_two_things_of_one_parameter():
    model = Twice()
    state = model.state_dict()
    with pytest.raises(ValueError, match="inside.1.weight and tied are one and the same"):
        model.load_state_dict(state | {"inside.1.weight": state["tied"] + 1})
    with pytest.raises(KeyError, match="no values for .'tied'"):
        model.load_state_dict({"first.bias": state["first.bias"]})
    with pytest.raises(KeyError, match="the model has no .'inside.7.weight'"):
        model.load_state_dict(state | {"inside.7.weight": state["tied"]})
    assert np.array_equal(model.state_dict()["tied"], state["tied"])


def test_gradients_of_all_places_meet():
    model = Twice()
    x, w = np.ones((2, 3), np.float32), model.first.weight
    mt.sum(model(x)).backward()
    before, step = w.data.copy(), 1e-2

    def value(change):
        w.data[...] = before
        w.data[0, 1] += change
        return float(mt.sum(model(x)).numpy())
    slope = (value(step) - value(-step)) / (2 * step)
    assert abs(float(w.grad.numpy()[0, 1]) - slope) < 1e-2 * max(1, abs(slope))


def test_what_is_skipped_is_found_under_its_other_names():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2))
    x = [np.ones((3, 4), np.float32)]
    quantized = compress.quantize_model(model, compress.Scheme("integer", skip=("2",)), x)
    assert type(quantized[0]) is nn.Linear and quantized[0] is quantized[2]


@pytest.mark.parametrize("path", ["first", "inside.1"])
def test_a_module_that_stands_elsewhere_too_is_not_cut(path):
    model = Twice()
    with pytest.raises(ValueError, match="shares a parameter with .*: untie them, or let one module, in one place"):
        parallelize_module(model, comm.world(), {path: "column"})
    assert type(model.first) is nn.Linear is type(model.inside[1])
