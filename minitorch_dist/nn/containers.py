"""Modules that hold others in order."""

from contextlib import contextmanager, nullcontext

from .module import Module

AS_IT_IS = nullcontext()


class ModuleList(Module):
    """Modules named 0, 1, 2, …, for a forward() around them to call."""

    def __init__(self, modules=()):
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module):
        """Add a module at the end, numbered after all others. Returns self."""
        numbers = [int(name) for name in self._modules if name.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def __iter__(self):
        return iter(self._modules.values())

    def __len__(self):
        return len(self._modules)

    def __getitem__(self, i):
        """A module; for a slice a list of them."""
        return list(self._modules.values())[i]

    def __setitem__(self, i, module):
        """Put another module in the place of one. Before the model is wrapped, and its optimizer made."""
        self.add_module(list(self._modules)[i], module)


class Sequential(ModuleList):
    """Modules one after another, named 0, 1, 2, … What is given besides x, all of them are given."""

    def __init__(self, *layers):
        super().__init__(layers)

    def forward(self, x, *more):
        for name, layer in self._modules.items():
            with called(layer, name):
                x = layer(x, *more)
        return x


def called(layer, name):
    """Inside, the layer is called by this name. One that stands in several places has that of the last: its random
    numbers are each place's own, as in a pipeline, whose stages know their own places only."""
    return AS_IT_IS if layer._name == name else _renamed(layer, name)


@contextmanager
def _renamed(layer, name):
    last = layer._name
    object.__setattr__(layer, "_name", name)
    try:
        yield
    finally:
        object.__setattr__(layer, "_name", last)
