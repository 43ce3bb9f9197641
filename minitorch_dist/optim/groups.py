"""Groups of parameters, and their settings, as an optimizer takes them."""

from ..autodiff.tensor import Tensor
from ..backend import number

PLAIN = float, int, bool, str, type(None)       # of settings: nothing to make of them before a step


def groups_of(params, defaults, author):
    """[{**settings, "params": [leaf]}] of what a class called `author` was given: tensors, (name, tensor) pairs, or
    groups. TypeError and ValueError for what no optimizer can update."""
    groups = [{**defaults, **group, "params": tensors(group["params"])} for group in as_groups(params)]
    everything = [p for group in groups for p in group["params"]]
    if not everything:
        raise ValueError("an optimizer needs at least one parameter")
    if odd := sorted({name for group in groups for name in group} - {"params", *defaults}):
        raise ValueError(f"{author}: a group has {', '.join(odd)}, and its settings are {', '.join(defaults)}")
    if len({id(p) for p in everything}) != len(everything):
        raise ValueError("a parameter stands in two groups, or twice in one: each must be updated once")
    for p in everything:
        if not isinstance(p, Tensor):
            raise TypeError(f"an optimizer updates tensors, got a {type(p).__name__}: of a model its parameters()")
        if not (p.is_leaf and p.requires_grad):
            raise ValueError(f"an optimizer updates leaves that require grad; one of shape {p.shape} is not. "
                             "Where some are frozen: [p for p in model.parameters() if p.requires_grad]")
    return groups


def as_groups(params):
    """[{"params": …, settings}] of tensors, of one, or of groups as they are."""
    if isinstance(params, Tensor) or not hasattr(params, "__iter__"):
        params = [params]
    params = list(params.items()) if isinstance(params, dict) else list(params)
    dicts = [isinstance(each, dict) for each in params]
    if any(dicts) and not all(dicts):
        raise TypeError("an optimizer takes tensors, or groups, which are dicts, and got both: put those that are in "
                        "no group into one, {\"params\": [tensor, …]}")
    groups = params if any(dicts) else [{"params": params}]
    if without := [sorted(group) for group in groups if "params" not in group]:
        raise ValueError("a group is a dict with its \"params\", which one of "
                         f"{', '.join(without[0]) or 'nothing'} hasn't")
    return groups


def tensors(params):
    """[tensor] of tensors, of one, or of (name, tensor) pairs."""
    params = [params] if isinstance(params, Tensor) else list(params)
    return [p[1] if isinstance(p, tuple) else p for p in params]


def as_numbers(group, author):
    """NumPy's numbers among a group's settings become Python's, with which arrays are worked on in their own dtype: a
    rate of float64 and the same one of float32 would give different bits. TypeError for a tensor."""
    for name, value in group.items():
        if name != "params" and value.__class__ not in PLAIN:
            group[name] = _as_number(name, value, author)


def _as_number(name, value, author):
    if isinstance(value, Tensor):
        raise TypeError(f"{author}: {name} is a tensor; it must be a number: float({name})")
    if isinstance(value, (tuple, list)):
        return tuple(_as_number(name, each, author) for each in value)
    return number(value)
