"""Modules that hold others in order."""

from .module import Module


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
        for layer in self._modules.values():
            x = layer(x, *more)
        return x
