"""What a fully_shard model and its optimizer hold together, as one process would: collected on rank 0, unit by unit.

All functions are collective. What they give and take knows nothing of ranks, nor of how these divide experts: it can be
saved, and loaded on any number of ranks, in any stage, or into an unwrapped model and its optimizer.
"""

from typing import NamedTuple

from ..autodiff.primitive import lower
from ..autodiff.writes import wrote
from ..backend import to, to_device_of, xp, zeros_like
from .same_model import broadcast


def full_state_dict(model):
    """The state dict of the module inside on rank 0; {} on the others. Where parallelize_module has cut that, these are
    its parts: tensor.full_state_dict has them together. (Experts that are cut over ranks with and without samples of
    their own are whole on the first of these ranks' rank 0, and left out on other ones'.)"""
    _check(model, "full_state_dict")
    found = {}
    for unit in model.units:
        found |= unit.collect(unit.part)
    for name, p in model.whole:
        grid = model.grid_of(p)
        if grid.over is not None and grid.everyone.rank == 0 and (shares := grid.gather(p.data)) is not None:
            found[name] = xp.array(to(shares.reshape(grid.whole(p.shape)), "cpu"))
    if model.comm.rank:
        return {}
    return {name: found[name] if name in found else xp.array(to(lower(value), "cpu"))
            for name, value in (*model.module.named_parameters(), *model.module.named_buffers())
            if name in found or model.grid_of(value).over is None}


def load_full_state_dict(model, saved):
    """model.load_state_dict: write what full_state_dict has given, or the unwrapped model's state_dict; rank 0's
    counts. KeyError or ValueError on all ranks where it doesn't fit."""
    if model.stage == 3 and model.values.held > model.keeping:
        raise RuntimeError("load_state_dict inside gathered(), whose values would stay as they were: end that block "
                           "before")
    for unit in model.units:    # their values may be of another dtype than their pieces
        unit.close()
    model.stale = True
    problem, values = None, None
    if model.comm.rank == 0:
        try:
            _, values = model.module.fitting(saved, {name: model.grid_of(p).whole(p.shape)
                                                     for name, p in model.module.named_parameters()})
        except Exception as error:      # whatever it is, the other ranks must hear of it
            problem = error
    if problem := model.comm.broadcast_object(problem):
        raise problem
    for unit in model.units:
        unit.spread(values, unit.part)
    note_written(model, "load_state_dict")
    for name, value in (*model.whole, *model.module.named_buffers()):
        array, grid = lower(value), model.grid_of(value)
        if grid.everyone.rank == 0:
            shares = None if values is None else values[name].reshape(grid.shares, *array.shape)
            grid.scatter(array, shares if shares is None else to_device_of(shares, array))
        broadcast(grid.everyone, array, name)


def note_written(model, by):
    """Let a backward whose forward was before say that its values are others; on all ranks alike, for who has no piece
    of a weight has used it as well."""
    for unit in model.units:
        wrote(unit.part, by)
        if unit.whole is not None and unit.whole.dtype == unit.part.dtype:      # that is a piece of it
            wrote(unit.whole, by)


def full_optimizer_state_dict(model, optimizer):
    """What the optimizer's state_dict would be on the module inside, on rank 0; {} on the others."""
    _check(model, "full_optimizer_state_dict")
    saved = optimizer.state_dict()
    for unit, name, held in _arrays(model, optimizer, saved):
        part = zeros_like(unit.part, dtype=saved["state"][held[0].number][name].dtype)
        for _, i, s in held:
            part[s.start:s.stop] = to_device_of(saved["state"][i][name].reshape(-1), part)
        whole = unit.collect(part)
        for parameter, i, _ in held if whole else ():
            saved["state"][i][name] = whole[parameter]
    for i, name, grid in _own(model, optimizer):    # each rank has it, of its experts alone where these are divided
        if grid.everyone.rank == 0 and (shares := grid.gather(saved["state"][i][name])) is not None:
            saved["state"][i][name] = shares.reshape(grid.whole(shares.shape[1:]))
    return {} if model.comm.rank else saved


def load_full_optimizer_state_dict(model, optimizer, saved):
    """Write what full_optimizer_state_dict has given, or an optimizer of the unwrapped model: rank 0's counts.
    ValueError on all ranks where it doesn't fit."""
    _check(model, "load_full_optimizer_state_dict")
    mine, problem = optimizer.state_dict(), None
    if model.comm.rank == 0:
        problem = _misfit(model, optimizer, saved, mine)
    settings = (None, None) if problem or model.comm.rank else (saved["groups"], saved["steps"])
    problem, (groups, steps) = model.comm.broadcast_object((problem, settings))
    if problem:
        raise ValueError(problem)
    for unit, name, held in _arrays(model, optimizer, mine):
        part = zeros_like(unit.part, dtype=mine["state"][held[0].number][name].dtype)
        unit.spread({parameter: saved["state"][i][name] for parameter, i, _ in held} if saved else None, part)
        part = to(part, "cpu")
        for _, i, s in held:
            mine["state"][i][name] = part[s.start:s.stop].reshape(s.tensor.shape)
    for i, name, grid in _own(model, optimizer):
        array = mine["state"][i][name]
        if grid.everyone.rank == 0:
            shares = saved["state"][i][name].reshape(grid.shares, *array.shape) if saved else None
            grid.scatter(array, shares if shares is None else shares.astype(array.dtype))
        grid.everyone.broadcast(array, src=0)
    optimizer.load_state_dict({**mine, "groups": groups, "steps": steps})


def _check(model, call):
    """TypeError for a model that isn't fully_shard's."""
    if not hasattr(model, "grid_of"):
        raise TypeError(f"{call}: a {type(model).__name__} is not what fully_shard gives; a rank that has all of a "
                        "model takes state_dict() and load_state_dict(), the model's and its optimizer's")


def _misfit(model, optimizer, saved, mine):
    """What is wrong with saved state, or None. mine: this rank's state_dict."""
    try:
        optimizer.check_kind(saved)
        found = [{name: (a.shape, str(a.dtype)) for name, a in arrays.items()} for arrays in saved["state"]]
    except Exception as error:      # whatever it is, the other ranks must hear of it
        return f"{type(optimizer).__name__}: {error}"
    whole = {id(piece): unit.grid.whole(s.tensor.shape) for unit in model.trained
             for s, piece in zip(unit.segments, unit.pieces, strict=True)}
    wanted = [{name: (whole.get(id(p), p.shape), str(a.dtype)) for name, a in arrays.items()}      # by parameter
              for p, arrays in zip(_parameters(optimizer), mine["state"], strict=True)]
    for i, name, grid in _own(model, optimizer):
        a = mine["state"][i][name]
        wanted[i][name] = grid.whole(a.shape), str(a.dtype)
    for i in range(max(len(found), len(wanted))):
        if found[i:i + 1] != wanted[i:i + 1]:
            return (f"the saved optimizer state is of {len(found)} parameters, this optimizer has {len(wanted)}; the "
                    f"first difference: parameter {i}, {found[i:i + 1]} saved for {wanted[i:i + 1]}")
    return None


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Piece(NamedTuple):
    """A parameter's name, its number in the optimizer, and where its piece lies in the unit's `flat`."""

    parameter: str
    number: int
    segment: object


def _own(model, optimizer):
    """[(a parameter's number in the optimizer, name, the Grid of its ranks)] of state of a shape of its own."""
    number, own = {id(p): i for i, p in enumerate(_parameters(optimizer))}, optimizer.own_shapes()
    return [(i, name, unit.grid) for unit in model.trained for i in (number.get(id(p)) for p in unit.pieces)
            if i is not None for name in own[i]]


def _arrays(model, optimizer, saved):
    """For each unit and each kind of state that is of its parameters' shape: (unit, its name, [_Piece] of the
    parameters that have it)."""
    number = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    own = optimizer.own_shapes()
    for unit in model.trained:
        pieces = [_Piece(name, number[id(s.tensor)], s) for name, s in zip(unit.names, unit.flat.segments, strict=True)
                  if id(s.tensor) in number]
        for name in dict.fromkeys(name for piece in pieces for name in saved["state"][piece.number]
                                  if name not in own[piece.number]):
            yield unit, name, [piece for piece in pieces if name in saved["state"][piece.number]]
