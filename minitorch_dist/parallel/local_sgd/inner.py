"""The optimizer of a worker's, or a rank's, own: which it must be, and how it goes into a checkpoint of all of them."""

from ...comm.reduction import REDUCIBLE


def settings_of(optimizer):
    """What has to be equal on all ranks that step by it."""
    return [optimizer.kind,
            *({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)]


def check_inner(inner, model, author):
    """ValueError unless it updates all that is trained of the model, and nothing else, of one dtype that can be summed
    over ranks. author: who says so."""
    named = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    updated = {id(p): p for group in inner.param_groups for p in group["params"]}
    if frozen := [name for name, p in model.named_parameters() if not p.requires_grad and id(p) in updated]:
        raise ValueError(f"{author}: the inner optimizer updates {', '.join(frozen[:4])}, frozen since it was made: "
                         "freeze parameters first, and make it of those that are left")
    if strange := [p.shape for key, p in updated.items() if key not in named]:
        raise ValueError(f"{author}: the inner optimizer updates {len(strange)} tensors that are no parameters of "
                         f"this model, the first of shape {strange[0]}: make it of the model's parameters(), after "
                         "fully_shard and the like")
    if left := [name for key, (name, _) in named.items() if key not in updated]:
        raise ValueError(f"{author}: the inner optimizer doesn't update {', '.join(left[:4])}, which would be sent "
                         "untrained: give it all parameters, or freeze these")
    if len(dtypes := {p.dtype for _, p in named.values()}) != 1 or not dtypes <= REDUCIBLE:
        raise ValueError(f"{author}: the parameters must all be float32 or all float64; got "
                         f"{', '.join(sorted(map(str, dtypes))) or 'none that is trained'}")


# ---------------------------------------------------------------- in a checkpoint

def by_parameter(optimizer, copy):
    """{id of a parameter: (its updates, {name: array})}."""
    saved, params = optimizer.state_dict(copy), [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): entry for p, entry in zip(params, zip(saved["steps"], saved["state"], strict=True), strict=True)}


def restore(optimizer, author, settings, entries):
    """Load into an optimizer its settings_of, and the entries of by_parameter. author: who says what doesn't fit."""
    kind, *groups = settings
    if kind != optimizer.kind:
        raise ValueError(f"{author}: the saved state is of {kind}, this run has {optimizer.kind}")
    order = [entries[id(p)] for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(optimizer.state_dict(copy=False) | {
        "groups": [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in groups],
        "steps": [updates for updates, _ in order], "state": [arrays for _, arrays in order]})


def own_shapes(optimizer, params, prefix):
    """[{prefix + name: shape}] of its state that isn't of its parameter's shape, of these parameters."""
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    shapes = dict(zip(updated, optimizer.own_shapes(), strict=True))
    return [{prefix + name: shape for name, shape in shapes[id(p)].items()} for p in params]


def with_prefix(prefix, arrays, but=()):
    """{the rest of the name: array} of those whose names begin so; but: names that are left out."""
    found = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return {name: array for name, array in found.items() if name not in but}
