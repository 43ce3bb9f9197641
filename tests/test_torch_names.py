"""PyTorch's names: those that aren't here say what to take, and those that are do what PyTorch's do."""

import importlib
import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.torch_names import NAMES

OWNERS = {"Tensor": lambda: mt.ones(2, 3), "Module": lambda: nn.Linear(2, 3),
          "Optimizer": lambda: mt.optim.SGD(nn.Linear(2, 3).parameters()),
          "LambdaLR": lambda: mt.optim.LambdaLR(mt.optim.SGD(nn.Linear(2, 3).parameters()), mt.optim.constant())}
RECOMMENDED = re.compile(r"\b(?:mt|nn)(?:\.[A-Za-z_]\w*)+|\b(?:x|y|model)\.([a-z_]+)")


def owner_of(table):
    return OWNERS[table]() if table in OWNERS else importlib.import_module(table)


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in NAMES.items() for name in names])
def test_a_name_that_is_not_here_says_what_to_take_and_that_is_here(table, name):
    owner, text = owner_of(table), NAMES[table][name]
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}. Here: {text}")):
        getattr(owner, name)
    for found in RECOMMENDED.finditer(text):
        value = {"mt": mt, "nn": nn, "x": OWNERS["Tensor"](), "y": OWNERS["Tensor"](), "model": OWNERS["Module"]()}
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
    x.double().square().sum().backward()
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [[0.0, 3.0, -4.0]]
