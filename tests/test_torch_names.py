"""PyTorch's names: those that aren't here say what to take, and those that are do what PyTorch's do."""

import importlib
import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.torch_names import NAMES

OWNERS = {"Communicator": mt.comm.world_of_one, "Tensor": lambda: mt.ones(2, 3), "Module": lambda: nn.Linear(2, 3),
          "Optimizer": lambda: mt.optim.SGD(nn.Linear(2, 3).parameters()),
          "LambdaLR": lambda: mt.optim.LambdaLR(mt.optim.SGD(nn.Linear(2, 3).parameters()), mt.optim.constant())}
RECOMMENDED = re.compile(r"\b(?:mt|nn)(?:\.[A-Za-z_]\w*)+|\b(?:x|y|model|world)\.([a-z_]+)")


def owner_of(table):
    return OWNERS[table]() if table in OWNERS else importlib.import_module(table)


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in NAMES.items() for name in names])
def test_a_name_that_is_not_here_says_what_to_take_and_that_is_here(table, name):
    owner, text = owner_of(table), NAMES[table][name]
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}. Here: {text}")):
        getattr(owner, name)
    for found in RECOMMENDED.finditer(text):
        value = {"mt": mt, "nn": nn, "x": OWNERS["Tensor"](), "y": OWNERS["Tensor"](), "model": OWNERS["Module"](),
                 "world": OWNERS["Communicator"]()}
        first, *rest = found[0].split(".")
        value = value[first]
        for attribute in rest:
            value = getattr(value, attribute)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "std", "var", "prod", "cumsum", "any"])
def test_numpys_reductions_are_not_tensors(name):
    with pytest.raises(TypeError, match="NumPy was handed a Tensor" if name == "cumsum" else
                       f"out= and dtype= are NumPy's: call mt.{name}\\(x\\)"):
        getattr(np, name)(mt.ones(2, 3))


def test_parts_that_are_imported_when_they_are_asked_for():
    assert mt.training.train_step and mt.compress and "training" in dir(mt)
    with pytest.raises(TypeError, match="step takes no closure"):
        OWNERS["Optimizer"]().step(lambda: 0.0)


def test_other_names_that_are_missing_get_pythons_own_words():
    with pytest.raises(AttributeError, match="has no attribute 'catt'$"):
        mt.catt         # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'weigth'$"):
        nn.Linear(2, 3).weigth      # noqa: B018


def test_a_users_class_may_use_any_of_the_names():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.compile = nn.Linear(2, 3)

        def get_parameter(self):
            return self.compile.weight

        @property
        def device(self):
            return self.nothing

    assert Own().get_parameter().shape == (3, 2)
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        Own().device        # noqa: B018


def test_casts_sizes_and_moves_have_torchs_names():
    x = mt.tensor(np.array([[0.0, 1.5, -2.0]], np.float32), requires_grad=True)
    dtypes = [getattr(x, name)().dtype for name in ("half", "float", "double", "int", "long", "bool", "bfloat16")]
    assert [d.name for d in dtypes] == ["float16", "float32", "float64", "int32", "int64", "bool", "bfloat16"]
    assert (x.numel(), x.dim()) == (3, 2) and x.bool().tolist() == [[False, True, True]]
    assert x.to("cpu", np.float64).dtype == x.to(dtype="float64").dtype == x.to(device="cpu", dtype="float64").dtype
    assert x.to(device="cpu").dtype == np.float32
    assert x.size == 3 and x.var(False) == x.var(unbiased=False) == x.var(correction=0) == np.float32(37 / 18)
    assert x.std(True) == x.std(-1, unbiased=True) == x.std() == np.float32(37 / 12) ** np.float32(0.5)
    x.double().square().sum().backward()
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [[0.0, 3.0, -4.0]]


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: mt.sum(x, dim=1), "sum: functions have NumPy's arguments, methods torch's: axis= in place of dim="),
    (lambda x: mt.softmax(x, dim=-1), "softmax: .* axis= in place of dim="),
    (lambda x: mt.concatenate([x, x], dim=0), "concatenate: .* axis= in place of dim="),
    (lambda x: mt.mean(x, axis=1, keepdim=True), "mean: .*torch's: keepdims= in place of keepdim="),
    (lambda x: mt.std(x, 0, unbiased=False), "std: .* correction=1 or 0 in place of unbiased="),
    (lambda x: mt.sum(x, axes=1), r"sum\(\) got an unexpected keyword argument 'axes'"),
    (lambda x: nn.ReLU(inplace=True), "ReLU takes no inplace=. Here: leave it out: results are new arrays"),
    (lambda x: nn.Linear(2, 3, device="cuda"), r'Linear takes no device=. Here: model.to\("cuda"\)'),
    (lambda x: mt.parallel.DistributedDataParallel(nn.Linear(2, 3), device_ids=[0]), "takes no device_ids=. Here"),
    (lambda x: mt.parallel.fully_shard(nn.Linear(2, 3), mesh=None), "FullySharded takes no mesh=. Here: comm="),
    (lambda x: mt.optim.Adam(nn.Linear(2, 3).parameters(), fused=True), "Adam takes no fused=. Here: leave it out"),
    (lambda x: nn.Linear(2, 3, wide=True), "unexpected keyword argument 'wide'"),
    (lambda x: nn.Sequential([nn.ReLU()]), r"Sequential.0 must be a Module, got list: .* \*layers"),
    (lambda x: mt.tensor([x[0], x[1]]), r"a list of Tensors, .* mt.stack\(values\) keeps them"),
    (lambda x: repr(mt.Tensor([1.0])), r"made of a list, and Tensor\(…\) takes an array .* mt.tensor\(values\)"),
    (lambda x: mt.Tensor(2, 3).shape, r"made of a int, .* mt.zeros\(shape\)"),
    (lambda x: nn.Sequential(mt.relu), r"Sequential.0 must be a Module, got function: call it in a Module's forward"),
])
def test_torchs_arguments_say_what_they_are_here(call, message):
    with pytest.raises(TypeError, match=message):
        call(mt.ones(2, 3))


def test_a_users_class_may_have_any_of_the_settings():
    class Own(nn.Module):
        def __init__(self, inplace, **more):
            super().__init__()
            self.settings = inplace, more

    assert Own(inplace=True, device="cuda").settings == (True, {"device": "cuda"})


def test_what_torch_and_numpy_mean_otherwise_is_refused():
    """torch's transpose exchanges two axes, and both dots of matrices are other than a sum over all elements."""
    x = mt.tensor(np.arange(6.0).reshape(2, 3))
    with pytest.raises(ValueError, match=r"takes the axes' order.*swapaxes\(x, 0, 1\)"):
        mt.transpose(x, 0, 1)
    with pytest.raises(ValueError, match=r"not an order of the 3 axes of shape \(2, 3, 1\); swapaxes\(x, 0, 1\)"):
        mt.transpose(x.reshape(2, 3, 1), 0, 1)
    np.testing.assert_array_equal(mt.transpose(x, (0, 1)).numpy(), x.numpy())
    np.testing.assert_array_equal(x.transpose(0, 1).numpy(), x.numpy().T)
    np.testing.assert_array_equal(mt.transpose(x, 1, 0).numpy(), x.numpy().T)
    for y in (x, mt.ones(3), [1, 2, 3], x.tolist()):
        with pytest.raises(ValueError, match=r"dot: shapes .* x @ y multiplies matrices"):
            mt.dot(y, x)
    with pytest.raises(ValueError, match=r"dot: shapes \(\) and \(\): it takes vectors"):
        mt.dot([[1, 2]], [[3, 4]])
    for y in (x, mt.ones(2, dtype=np.float64), mt.ones(4, 2, 5, dtype=np.float64)):
        with pytest.raises(ValueError, match=r"matmul: shapes \(2, 3\) and .* x has rows of 3, and y columns of 2$"):
            x @ y       # noqa: B018
    with pytest.raises(ValueError, match=r"could not be broadcast"):
        mt.ones(2, 3, 4) @ mt.ones(3, 4, 2)     # noqa: B018


def test_what_a_wrapper_lacks_its_model_may_have():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

    wrapped = mt.parallel.DistributedDataParallel(Own(), mt.comm.world_of_one())
    assert wrapped.module.layer.weight.shape == (3, 2)
    with pytest.raises(AttributeError, match="no attribute 'layer'. Here: model.module.layer$"):
        wrapped.layer       # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        wrapped.nothing     # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'double'. Here: model.to"):
        wrapped.double      # noqa: B018


def test_an_optimizer_written_as_torchs_are_is_told_how_they_are_here():
    class Own(mt.optim.Optimizer):
        def step(self):
            return [self.state[p] for group in self.param_groups for p in group["params"]]

    optimizer = Own(nn.Linear(2, 3).parameters(), {"lr": 0.1})
    with pytest.raises(TypeError, match=r"none per parameter. A subclass names its arrays, state_names"):
        optimizer.step()
    assert optimizer.state[0] == {}


def test_a_batch_and_a_tensor_say_what_to_take():
    batch = next(iter(mt.data.Loader(np.ones((4, 2)), np.ones(4), batch_size=2).epoch(0)))
    with pytest.raises(TypeError, match="a Batch is no pair: it has batch.inputs, batch.labels"):
        inputs, labels = batch     # noqa: F841
    world = mt.comm.world_of_one()
    for x, message in ((mt.ones(3), r"got Tensor: of a loss take np.array\(\[x.item\(\)\]\)"),
                       (3.0, r"got float: take x = np.array\(\[x\]\)"), ([1.0], "got list$")):
        with pytest.raises(TypeError, match=message):
            world.all_reduce(x)
