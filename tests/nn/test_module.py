"""The tree of modules: names, state, modes."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.backend import random_state
from minitorch_dist.flat import FlatBuffer


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.scale = nn.Parameter(np.ones(width, np.float32))
        self.register_buffer("mean", np.zeros(width, np.float32))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(mt.tanh(self.up(x))) * self.scale


def net():
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), Block(3))


NAMES = ["0.weight", "0.bias", "2.scale", "2.up.weight", "2.up.bias", "2.down.weight"]


def test_names_are_paths_parents_first():
    model = net()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert [name for name, _ in model.named_buffers()] == ["2.mean"]
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2", "2.up", "2.down"]
    assert dict(model.named_parameters())["2.up.weight"] is model[2].up.weight
    assert [p.shape for p in model.parameters()] == [(3, 5), (3,), (3,), (6, 3), (6,), (3, 6)]
    assert len(model) == 3 and list(model)[1] is model[1]


def test_a_module_may_take_the_place_of_another():
    model = net()
    head = nn.Linear(3, 7)
    model[-1] = head
    assert model[2] is head and [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight",
                                                                                   "2.bias"]
    assert model(mt.ones(2, 5)).shape == (2, 7)
    with pytest.raises(TypeError, match="must be a Module, got int"):
        model[0] = 3
    with pytest.raises(IndexError):
        model[3] = head


def test_loading_what_fits():
    model, other = net(), nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    before, state = model.state_dict(), other.state_dict()
    with pytest.raises(KeyError, match=r"no values for \['2.down.weight', .*strict=False"):
        model.load_state_dict(state)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["2.down.weight", "2.mean", "2.scale", "2.up.bias", "2.up.weight"]
    assert unexpected == ["2.bias", "2.weight"]
    after = model.state_dict()
    for name in before:
        np.testing.assert_array_equal(after[name], state[name] if name in state else before[name])
    assert model.load_state_dict(before) == ([], [])
    with pytest.raises(ValueError, match="0.weight has shape"):
        model.load_state_dict({"0.weight": np.ones((3, 4), np.float32)}, strict=False)


def test_the_empty_name_is_transparent():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.add_module("", module)
    assert [name for name, _ in Wrapper(Wrapper(net())).named_parameters()] == NAMES


def test_a_shared_parameter_comes_once_under_its_first_name():
    model = net()
    model[2].down.weight = nn.Parameter(np.ones((3, 6), np.float32))
    model[2].tied = model[2].down.weight
    names = [name for name, _ in model.named_parameters()]
    assert "2.tied" in names and "2.down.weight" not in names and len(names) == len(NAMES)
    layer = nn.Linear(2, 2)
    assert len(list(nn.Sequential(layer, nn.ReLU(), layer).parameters())) == 2


def test_attributes_before_init_raise():
    class Early(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="super"):
        Early()


def test_a_parameter_is_replaced_by_a_leaf_only():
    layer = nn.Linear(2, 3)
    for wrong in (np.zeros((3, 2), np.float32), layer.weight * 2.0, 3.0):
        with pytest.raises(TypeError, match="weight"):
            layer.weight = wrong
    new = nn.Parameter(np.ones((3, 2), np.float32))
    layer.weight = new
    assert dict(layer.named_parameters())["weight"] is new
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]     # its place stays


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(np.arange(6.0).reshape(2, 3), requires_grad=False)
        self.linear = nn.Linear(3, 3, dtype="float64")
        self.linear.weight = nn.Parameter(np.eye(3), requires_grad=False)       # in a trained one's place
        self.again = self.table

    def forward(self, x):
        return self.linear(x + self.table)


def test_a_parameter_that_is_frozen_from_its_beginning_is_one():
    model = Positions()
    names = ["table", "linear.weight", "linear.bias"]
    for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [name for name, _ in m.named_parameters()] == list(m.state_dict()) == names
        assert [p.requires_grad for p in m.parameters()] == [False, False, True]
        m.table = m.table
        assert m.again is m.table
        m(np.ones((2, 3))).sum().backward()
        assert m.table.grad is None and m.linear.weight.grad is None
    model.load_state_dict({**model.state_dict(), "table": np.ones((2, 3))})
    np.testing.assert_array_equal(model.table.numpy(), 1)
    assert model.to("float32").table.dtype == np.float32
    assert model.requires_grad_().table.requires_grad
    with pytest.raises(TypeError, match="ModuleList"):
        model.some = [nn.Parameter(np.ones(2), requires_grad=False)]
    with pytest.raises(TypeError, match="int64"):
        nn.Parameter(np.arange(3), requires_grad=False)
    with nn.without_values():
        assert list(dict(Positions().named_parameters())) == names


def test_a_buffer_without_axes_stays_an_array():
    """Where forward counts, x + 1 is a number for NumPy."""
    block = Block(3)
    block.register_buffer("steps", np.array(0))
    block.register_buffer("rate", 0.5)
    state = block.state_dict()
    block.steps = block.steps + 1
    block.rate = 2
    assert isinstance(block.steps, np.ndarray) and block.steps == 1 and isinstance(block.rate, np.ndarray)
    block.rate = np.float64(2.0)
    block.load_state_dict(state)
    assert block.steps == 0 and block.rate == 0.5
    for act in (lambda: block.register_buffer("words", "none"), lambda: setattr(block, "rate", [0.5])):
        with pytest.raises(TypeError, match="Block.* is a buffer, an array"):
            act()
    assert [name for name, _ in block.named_buffers()] == ["mean", "steps", "rate"]


def test_what_is_set_to_none_is_gone():
    layer = nn.Linear(2, 3)
    layer.bias = None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer(mt.tensor(np.ones((1, 2), np.float32))).shape == (1, 3)
    layer.bias = nn.Parameter(np.ones(3, np.float32))       # and may come back
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    block = Block(3)
    block.down = None
    assert "down.weight" not in dict(block.named_parameters()) and block.down is None
    block.mean = None
    assert list(block.named_buffers()) == []


def test_what_changes_its_kind_is_in_one_table():
    block = Block(3)
    block.scale = nn.Linear(3, 3)
    assert "scale" not in dict(block.named_parameters()) and "scale.weight" in dict(block.named_parameters())
    block.scale = nn.Parameter(np.ones(3, np.float32))
    assert "scale" in dict(block.named_parameters()) and "scale.weight" not in dict(block.named_parameters())
    del block.scale
    assert "scale" not in dict(block.named_parameters()) and not hasattr(block, "scale")


def test_state_round_trip():
    mt.manual_seed(1)
    source, target = net(), net()
    source[2].mean = np.arange(3, dtype=np.float32)
    state = source.state_dict()
    assert list(state) == [*NAMES, "2.mean"]
    target.load_state_dict(state)
    for name, value in target.state_dict().items():
        assert value.tobytes() == source.state_dict()[name].tobytes(), name
    for value in state.values():        # a copy: nobody is changed by it
        value[...] = 99
    assert not any((value == 99).any() for value in (*source.state_dict().values(), *target.state_dict().values()))


def test_state_that_does_not_fit_changes_nothing():
    model = net()
    before = model.state_dict()
    good = {name: value + 1 for name, value in before.items()}
    with pytest.raises(KeyError, match="2.mean"):
        model.load_state_dict({name: v for name, v in good.items() if name != "2.mean"})
    with pytest.raises(KeyError, match="stranger"):
        model.load_state_dict({**good, "stranger": np.ones(1)})
    with pytest.raises(ValueError, match=r"2\.down\.weight.*\(3, 6\).*\(6, 3\)"):
        model.load_state_dict({**good, "2.down.weight": good["2.down.weight"].T})
    with pytest.raises(ValueError, match="float64"):
        model.load_state_dict({**good, "2.mean": good["2.mean"].astype(np.float64)})
    assert all((value == before[name]).all() for name, value in model.state_dict().items())


def test_loading_writes_in_place_and_tells_the_tape():
    model = nn.Linear(3, 2)
    flat = FlatBuffer(model.parameters())
    y = model(mt.tensor(np.ones((4, 3), np.float32), requires_grad=True))
    model.load_state_dict({"weight": np.full((2, 3), 5, np.float32), "bias": np.full(2, 6, np.float32)})
    assert (flat.params[:6] == 5).all()
    with pytest.raises(RuntimeError, match="load_state_dict"):
        y.sum().backward()


def test_modes_and_gradients_of_the_whole_tree():
    model = net()
    assert model.eval() is model and not any(m.training for m in model.modules())
    assert model.train() is model and all(m.training for m in model.modules())
    model(mt.tensor(np.ones((2, 5), np.float32))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_copies_are_apart_and_whole():
    model = net()
    model[2].tied = model[2].up.weight
    x = mt.tensor(np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32))
    wanted = model(x).numpy().copy()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert twin[2].tied is twin[2].up.weight is dict(twin.named_parameters())["2.tied"]
        for p in twin.parameters():
            assert p.requires_grad
            p.data[...] = 0
        assert (model(x).numpy() == wanted).all() and (twin(x).numpy() == 0).all()


def test_random_numbers_are_keyed_by_the_running_modules_path():
    class Probe(nn.Module):
        def forward(self, x):
            seen.append(random_state.path)
            return x

    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError
    seen = []
    model = nn.Sequential(nn.Sequential(Probe(), Probe()), Probe(), Failing())
    with pytest.raises(ZeroDivisionError):
        model(1)
    assert seen == [("0", "0"), ("0", "1"), ("1",)] and random_state.path == ()


def test_what_is_cast_while_it_is_frozen_gets_gradients_of_its_dtype():
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    layer.to("float64").weight.requires_grad_()
    layer(np.full((1, 3), 1 / 3)).sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == np.float64
    np.testing.assert_array_equal(layer.weight.grad.numpy(), np.full((2, 3), 1 / 3))


def test_printing_and_the_missing_forward():
    assert repr(nn.Linear(5, 3, bias=False)) == "Linear(5, 3, bias=False)"
    assert repr(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Dropout(0.25))) == (
        "Sequential(\n  (0): Sequential(\n    (0): ReLU()\n  )\n  (1): Dropout(p=0.25)\n)")
    with pytest.raises(NotImplementedError, match="Module"):
        nn.Module()(1)


def test_a_module_is_replaced_by_a_module_only():
    block = Block(3)
    with pytest.raises(TypeError, match="down"):
        block.down = lambda x: x
    block.down = nn.ReLU()
    assert [name for name, _ in block.named_modules()] == ["", "up", "down"]


def test_children_and_what_is_done_to_the_whole_tree():
    model, seen = net(), []
    assert [name for name, _ in model[2].named_children()] == ["up", "down"]
    assert list(model.children()) == list(model) and list(model.buffers()) == [model[2].mean]
    assert model.apply(seen.append) is model
    assert seen == [model[0], model[1], model[2].up, model[2].down, model[2], model]    # parents last
    assert model[2].requires_grad_(False) is model[2]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.weight", "0.bias"]
    model.requires_grad_()
    assert all(p.requires_grad for p in model.parameters())


def test_a_list_of_modules_is_registered_or_refused():
    class Own(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.layers = make(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Own(nn.ModuleList)
    names = [f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert [name for name, _ in model.named_parameters()] == names
    assert model.layers.append(nn.Identity()) is model.layers and len(model.layers) == 3
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(model(x).numpy(), nn.Sequential(*model.layers)(x).numpy())
    with pytest.raises(TypeError, match="Own.layers is a list of modules.*nn.ModuleList"):
        Own(list)
    with pytest.raises(TypeError, match="Own.layers is a dict of modules"):
        Own(lambda layers: dict(enumerate(layers)))
    for make in (set, lambda layers: [[layer] for layer in layers], lambda layers: {"deep": list(layers)},
                 lambda layers: [nn.Parameter(np.ones(3, np.float32))]):
        with pytest.raises(TypeError, match="Own.layers is a .* of modules or parameters.*nn.ModuleList"):
            Own(make)
    assert not list(Own(tuple).parameters())        # which says that it is meant
    model.order = [model.layers[1], [model.layers[0], model.layers[1].weight], 3, "x"]
    assert len(list(model.named_parameters())) == 4


def test_a_list_that_is_filled_later_is_refused_as_soon_as_somebody_asks_for_parameters():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.by_name, self.words, self.child = [], {}, ["x"], nn.Linear(2, 2)
            self.places, self.stages = [None, None], {"a": []}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = Own()

    for fill, name in ((lambda own: own.layers.append(nn.Linear(3, 3)), "layers is a list"),
                       (lambda own: own.by_name.update(a=[nn.Linear(3, 3)]), "by_name is a dict"),
                       (lambda own: own.places.__setitem__(1, nn.Linear(3, 3)), "places is a list"),
                       (lambda own: own.stages["a"].append(nn.Linear(3, 3)), "stages is a dict"),
                       (lambda own: own.words.append(nn.Parameter(np.ones(2))), "words is a list")):
        outer = Outer()
        fill(outer.own)
        for ask in (outer.state_dict, lambda o=outer: list(o.parameters()), lambda o=outer: copy.deepcopy(o).cpu(),
                    lambda o=outer: optim.SGD(o.parameters(), 1)):
            with pytest.raises(TypeError, match=f"Own.{name} of modules or parameters.*nn.ModuleList"):
                ask()
    outer = Outer()
    outer.own.layers.extend([outer.own.child, 3])      # known already
    outer.own.words.append("y")
    outer.own.stages["a"].append(outer.own.stages)     # of lists in each other each is looked at once
    outer.own.by_name = None
    assert [*outer.state_dict()] == ["own.child.weight", "own.child.bias"]


def test_a_list_takes_modules_only_and_never_one_in_the_place_of_another():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    for stranger in (None, np.tanh, [nn.Tanh()]):
        with pytest.raises(TypeError, match=r"Sequential.3 must be a Module, got (NoneType|ufunc|list)"):
            layers.append(stranger)
    assert len(layers) == 3
    delattr(layers, "1")
    assert [*layers.append(nn.ReLU()).state_dict()] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_model_is_moved_and_cast_by_torchs_arguments():
    model = nn.Linear(2, 3)
    assert model.to("cpu", np.float64) is model and model.weight.dtype == np.float64
    assert model.to(dtype="float16").weight.dtype == np.float16
    assert model.to(device="cpu", dtype="float32").weight.dtype == np.float32


@pytest.mark.parametrize("dtype", ["int32", np.uint8, bool])
def test_a_model_is_cast_to_floats_alone(dtype):
    model = nn.Linear(2, 3)
    before = model.state_dict()
    with pytest.raises(TypeError, match=r"Linear.to\(.*\): parameters are cast to floating dtypes alone"):
        model.to("cpu", dtype)
    assert all(np.array_equal(p.numpy(), before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["0", "a.b", "forward", "parameters"])
def test_a_buffer_takes_no_other_s_name(name):
    model = nn.Sequential(nn.Linear(2, 3))
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=f"Sequential.register_buffer\\('{name}'\\): take a name without dots"):
        model.register_buffer(name, np.ones(2))
    assert list(model.state_dict()) == before and model(np.ones((1, 2), np.float32)).shape == (1, 3)


@pytest.mark.parametrize("state", ["model.npz", None, [np.ones((3, 2))]])
def test_what_is_no_state_is_told(state):
    with pytest.raises(TypeError, match=r"takes {name: array}, got a (str|NoneType|list); a file is read before"):
        nn.Linear(2, 3).load_state_dict(state)


def test_bfloat16_that_numpy_has_stored_says_how_to_read_it():
    model = nn.Linear(2, 3).to("bfloat16")
    stored = {name: array.view("V2") for name, array in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"give values.view\(mt.bfloat16\)"):
        model.load_state_dict(stored)
    model.load_state_dict({name: array.view(mt.bfloat16) for name, array in stored.items()})


@pytest.mark.parametrize("layer", ["Linear(2, 3", "Conv2d(1, 2, 3", "LayerNorm(4", "RMSNorm(4", "BatchNorm(4",
                                   "Embedding(3, 2", "MoE(2, 4, 8"])
def test_bfloat16_by_name_before_anybody_has_loaded_it(layer):
    """NumPy knows the name only then."""
    code = (f"import minitorch_dist as mt; from minitorch_dist import nn; m = nn.{layer}, dtype='bfloat16'); "
            "assert all(p.dtype == mt.bfloat16 for p in m.parameters())")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_list_is_looked_at_when_it_has_grown(monkeypatch):
    module, looked = nn.Module(), []
    module.seen = [0.5] * 1001
    look = nn.Module._look_at
    monkeypatch.setattr(nn.Module, "_look_at", lambda self, *what: looked.append(what) or look(self, *what))
    list(module.parameters())
    assert not looked
    module.seen.append(nn.Linear(2, 3))
    with pytest.raises(TypeError, match="seen is a list of modules"):
        list(module.parameters())


@pytest.mark.parametrize("given, kind", [([[1.0, 2.0, 3.0]], "list"), ((1.0, 2.0, 3.0), "tuple"), (2.0, "float")])
def test_a_layer_that_is_given_no_array_says_so(given, kind):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    for call in (model, lambda x: nn.summary(model, x),
                 lambda x: nn.functional_call(model, dict(model.named_parameters()), x)):
        with pytest.raises(TypeError, match=rf"^Linear takes arrays and tensors; got a {kind}: .* mt\.tensor"):
            call(given)


def test_an_error_of_its_own_is_left_as_it_is():
    class Broken(nn.Module):
        def forward(self, x):
            return [x].nothing

    with pytest.raises(AttributeError, match="nothing"):
        Broken()([1.0])
