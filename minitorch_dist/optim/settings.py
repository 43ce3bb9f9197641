"""Settings of optimizers: rules that say what each must be, and what is said where one isn't so."""

from math import ceil

from ..backend import xp

# Rules for settings: (whether a group's value fits, what it must be).
AT_LEAST_0 = lambda value, group: value >= 0, "at least 0"
MORE_THAN_0 = lambda value, group: value > 0, "more than 0"
FRACTION = lambda value, group: 0 < value <= 1, "more than 0, at most 1"
BETAS = (lambda betas, group: isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= b < 1 for b in betas),
         "two numbers in [0, 1)")


def pair(betas):
    """Two numbers, in whatever they stand, as a tuple; one alone as it is, for BETAS to refuse."""
    return tuple(betas) if xp.ndim(betas) else betas


def share(fraction, count):
    """That fraction of `count` things, rounded up; 1 at least, if there are some."""
    return min(count, max(1, ceil(fraction * count - 1e-9)))       # 0.28 · 25 is 7.000000000000001


def check_settings(**rules):
    """Raise ValueError for a setting outside of its range: check_settings(lr=(lr, lr >= 0, "at least 0"))."""
    for name, (value, ok, wanted) in rules.items():
        if not ok:
            raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def check_keys(saved, names, whose):
    """ValueError unless a saved state has these entries, TypeError unless it has names at all. whose: state_dict gave
    it, "a GradScaler" say."""
    if not hasattr(saved, "keys"):
        raise TypeError(f"load_state_dict: takes what {whose}'s state_dict() gave, got a {type(saved).__name__}")
    if missing := [name for name in names if name not in saved]:
        raise ValueError(f"the saved state has no {', '.join(missing)}: it is not {whose}'s state_dict()")


def check_saved_optimizer(saved, kind):
    """ValueError unless saved state is that of an optimizer of this kind, TypeError unless it has names at all."""
    lists = "groups", "sizes", "steps", "state"
    check_keys(saved, ("class", *lists), "an optimizer")
    if odd := [name for name in lists if not isinstance(saved[name], (list, tuple))]:
        raise ValueError(f"the saved state's {odd[0]} is a {type(saved[odd[0]]).__name__}, and must be a list: it is "
                         "not an optimizer's state_dict()")
    if saved["class"] != kind:
        raise ValueError(f"the saved state is of {saved['class']}, this optimizer is {kind}")


def holds(fits, value, group):
    """Whether a setting fits; one that is no number doesn't."""
    try:
        return bool(fits(value, group))
    except (TypeError, ValueError):
        return False


def check_elementwise(optimizer, what):
    """ValueError for an optimizer that can't update pieces of parameters which don't know each other."""
    if not optimizer.elementwise:
        raise ValueError(f"{what}: {optimizer.kind} makes an element's step of all of its parameter, of which there is "
                         "a piece here, or may be: take SGD, Adam, AdamW, Adagrad or Lion")


def check_eps(optimizer):
    """ValueError for an eps that is 0 in the dtype in which a parameter is updated: 0/0 where it never had a gradient,
    and in the padding, which norms count."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            exact = xp.promote_types(p.dtype, xp.float32)
            if not exact.type(group["eps"]) > 0:
                raise ValueError(f"{type(optimizer).__name__}: eps={group['eps']} is 0 in {exact}, in which a "
                                 f"parameter of shape {p.shape} is updated, and would make 0/0: take some 1e-10")
