"""Which piece of which array this rank holds, however the model is cut."""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..autodiff.primitive import lower
from ..nn.module import Module
from ..parallel.data_parallel import annotated
from ..parallel.fully_sharded import FullySharded


@dataclass(frozen=True)
class Layout:
    """What this rank holds of an array.

    shape   of the whole array
    pieces  ((box, place), …): box is ((start, stop) per axis) of the whole, or ((start, stop),) of its elements in
            C order; place is the index of the same elements in what this rank has
    """

    shape: tuple
    pieces: tuple


def layouts(model):
    """{name: Layout} of a model's parameters and buffers: a Module, a list of a pipeline's chunks, all of which may be
    DistributedDataParallel, fully_shard or cut by parallelize_module, or by annotate.shard_parameters."""
    if not isinstance(model, Module):
        found = [pair for chunk in model for pair in layouts(chunk).items()]
        if twice := [name for name, times in Counter(name for name, _ in found).items() if times > 1]:
            raise ValueError(f"{', '.join(twice[:4])} is in several of this rank's chunks: names must be those of the "
                             "whole model, as cut_sequential leaves them")
        return dict(found)
    from ..parallel.tensor_parallel import parts_of  # it brings further ops into the table: not unasked
    cut = parts_of(model)
    found = {name: parted(value.shape, *cut[name][1:]) if name in cut else whole(value.shape)
             for name, value in named_arrays(model)}
    found |= {name: boxed(p.shape, p.layout.local_intervals(p.shape, p.ranks)) for name, p in annotated(model).items()}
    if isinstance(model, FullySharded):
        if cut:
            raise ValueError("a checkpoint of a model that is cut by both parallelize_module and fully_shard is not "
                             "possible: take DistributedDataParallel beside parallelize_module")
        for unit in model.units:
            for name, s, piece in zip(unit.names, unit.segments, unit.pieces, strict=True):
                start, _, _ = unit.piece(piece)
                found[name] = Layout(tuple(s.tensor.shape), ((((start, start + piece.size),), (...,)),))
    return found


def whole(shape):
    """The Layout of who has all of it."""
    return Layout(tuple(shape), ((tuple((0, extent) for extent in shape), (...,)),))


def parted(shape, axis, indices, extent):
    """The Layout of who has these indices along an axis, in this order; `extent` is all there are."""
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    runs = [(int(indices[lo]), int(indices[lo]) + hi - lo) for lo, hi in itertools.pairwise(starts) if lo < hi]
    full = (*shape[:axis], extent, *shape[axis + 1:])
    return boxed(full, [runs if i == axis else [(0, e)] for i, e in enumerate(full)])


def boxed(shape, intervals):
    """The Layout of who has these [(start, stop)] of each axis, one after another."""
    sides = []
    for own in intervals:
        ends = list(itertools.accumulate(stop - start for start, stop in own))
        sides.append([(side, slice(end - (side[1] - side[0]), end)) for side, end in zip(own, ends, strict=True)])
    pieces = (tuple(zip(*piece, strict=True)) or ((), (...,)) for piece in itertools.product(*sides))
    return Layout(tuple(shape), tuple(pieces))


def named_arrays(model):
    """[(name, this rank's array)] of all parameters and buffers."""
    if not isinstance(model, Module):
        return [pair for chunk in model for pair in named_arrays(chunk)]
    return [(name, lower(value)) for name, value in (*model.named_parameters(), *model.named_buffers())]


def named_buffers(model):
    """{name: this rank's array} of the buffers alone."""
    if not isinstance(model, Module):
        return {name: array for chunk in model for name, array in named_buffers(chunk).items()}
    return {name: lower(value) for name, value in model.named_buffers()}


def optimizer_names(model, optimizer):
    """The name of each of the optimizer's parameters, in its order, per group. ValueError where one is no model's."""
    chunks = [model] if isinstance(model, Module) else model
    names = {id(p): name for chunk in chunks for name, p in chunk.named_parameters()}
    try:
        return [[names[id(p)] for p in group["params"]] for group in optimizer.groups]
    except KeyError:
        raise ValueError("the optimizer updates a tensor that is no parameter of this model: make it of the model's "
                         "parameters()") from None


def state_of(model, optimizer):
    """({name: (Layout, this rank's array)}, facts about the optimizer) of everything that is saved."""
    kinds = layouts(model)
    arrays = {f"model.{name}": (kinds[name], array) for name, array in named_arrays(model)}
    if optimizer is None:
        return arrays, None
    groups, saved = optimizer_names(model, optimizer), optimizer.state_dict(copy=False)
    names = [name for group in groups for name in group]
    for name, state in zip(names, saved["state"], strict=True):
        arrays |= {f"optimizer.{kind}.{name}": (kinds[name], array) for kind, array in state.items()}
    return arrays, {"class": saved["class"], "steps": dict(zip(names, saved["steps"], strict=True)),
                    "groups": [{"names": group, "settings": settings}
                               for group, settings in zip(groups, saved["groups"], strict=True)]}


def piece_of(array, layout, place):
    """This rank's array at a place of its Layout: 1-d where that counts elements."""
    flat = any(len(box) != len(layout.shape) for box, _ in layout.pieces)
    return (array.reshape(-1) if flat else array)[place]
