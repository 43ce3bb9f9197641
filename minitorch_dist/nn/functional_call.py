"""A module as a function of its parameters: grad, jvp, hvp and their like, which are of functions, are had of it.

    values = dict(model.named_parameters())
    loss = lambda values: nn.cross_entropy(nn.functional_call(model, values, x), labels)
    grads = mt.grad(loss)(values)                                           # a dict of the same names
    ahead = {name: p - 0.1 * grads[name] for name, p in values.items()}     # inside another grad: MAML's inner step

With reduction="none" mt.jacrev(loss) has the gradients of single samples.
"""

from contextlib import contextmanager

from ..autodiff.primitive import TRACED, lower
from ..autodiff.tensor import Tensor
from ..backend import is_array


def functional_call(module, values, *inputs, **options):
    """module(*inputs, **options) with {name: value} in place of the parameters and buffers of these names; the others
    are its own, and afterwards all are.

    values  arrays, tensors, or what a transform works on, under the names of named_parameters() and named_buffers(); of
            what is shared any of its names stands for all. A buffer that training moves is moved there
    KeyError for unknown names, TypeError for what is no array, ValueError for another shape, and where names of one
    parameter have different values. (In torch the inputs are a tuple.)
    """
    with _instead(module, values):
        return module(*inputs, **options)


@contextmanager
def _instead(module, values):
    """Inside, the module has these values."""
    places = [(f"{path}.{name}" if path else name, m, name, own)
              for path, m in module.named_modules(remove_duplicate=False)
              for name, own in (*m._parameters.items(), *m._buffers.items()) if own is not None]
    if unknown := sorted(set(values) - {key for key, *_ in places}):
        raise KeyError(f"functional_call: the module has no {unknown}; it has {sorted(key for key, *_ in places)}")
    keys, given = {}, {}        # by the id of a module's own: the name of its value, and this
    for key, m, name, own in places:
        if key in values:
            if values[first := keys.setdefault(id(own), key)] is not values[key]:
                raise ValueError(f"functional_call: {first} and {key} are one and the same in this module, and have "
                                 "different values here: give one of them")
            given[id(own)] = _fitting(key, values[key], own, name in m._parameters)
    changed = [(m, name, own) for _, m, name, own in places if id(own) in given]
    try:
        for m, name, own in changed:
            object.__setattr__(m, name, given[id(own)])
        yield
    finally:
        for m, name, own in changed:
            object.__setattr__(m, name, own)


def _fitting(key, value, own, trained):
    """The value as an attribute of a module: a Tensor, or traced, in a parameter's place; as it is in a buffer's."""
    if not is_array(lower(value)):
        raise TypeError(f"functional_call: {key} is {type(value).__name__}; give an array or a tensor")
    if value.shape != own.shape:
        raise ValueError(f"functional_call: {key} has shape {tuple(own.shape)}, the value {tuple(value.shape)}")
    return Tensor(value) if trained and value.__class__ not in TRACED else value
