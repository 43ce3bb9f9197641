"""Which piece of which array this rank holds, however the model is cut."""

import itertools
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ..autodiff.primitive import lower
from ..flat import boxes_of
from ..nn.module import Module
from ..parallel.fsdp.fully_sharded import FullySharded
from ..parallel.tied import name_of, tie_of
from ..parallel.wrapping import annotated


class Place(NamedTuple):
    """Where elements are in what this rank has of an array: at `index` of it; or, where `elements` is a slice, at
    `index` of these of its elements in C order, as an array of this shape."""

    index: tuple
    elements: slice | None = None
    shape: tuple = ()


@dataclass(frozen=True)
class Layout:
    """What this rank holds of an array.

    shape   of the whole array
    pieces  ((box, Place), …): box is ((start, stop) per axis) of the whole, or ((start, stop),) of its elements in
            C order; the Place has the same elements, in an array of the box's shape
    """

    shape: tuple
    pieces: tuple

    def ends(self):
        """Where its ranges of elements begin and end: those of boxes with one side."""
        return {end for box, _ in self.pieces if len(box) == 1 for end in box[0]}

    def cut_at(self, ends):
        """The same Layout with its ranges of elements in smaller pieces, which end wherever one of `ends` is inside."""
        pieces = []
        for box, place in self.pieces:
            inside = [end for end in sorted(ends) if box[0][0] < end < box[0][1]] if len(box) == 1 else ()
            if not inside:
                pieces.append((box, place))
                continue
            (first, last), = box
            shift = place.index[0].start - first
            pieces += [(((start, stop),), place._replace(index=(slice(shift + start, shift + stop),)))
                       for start, stop in itertools.pairwise([first, *inside, last])]
        return Layout(self.shape, tuple(pieces))


def layouts(model):
    """{name: Layout} of a model's parameters and buffers: a Module, a list of a pipeline's chunks, all of which may be
    DistributedDataParallel, fully_shard or cut by parallelize_module, or by annotate.shard_parameters."""
    if not isinstance(model, Module):
        found = [pair for chunk in model for pair in layouts(chunk).items()]
        tied = {name_of(p, name) for chunk in model for name, p in chunk.named_parameters() if tie_of(p)}
        if twice := [name for name, times in Counter(name for name, _ in found).items()
                     if times > 1 and name not in tied]:
            raise ValueError(f"{', '.join(twice[:4])} is in several of this rank's chunks: names must be those of the "
                             "whole model, as cut_sequential leaves them")
        return dict(found)
    from ..parallel.tensor.tensor_parallel import parts_of  # it brings further ops into the table: not unasked
    cut = parts_of(model)
    found = {name: parted(value.shape, *cut[name][1:]) if name in cut else whole(value.shape)
             for name, value in (*model.named_parameters(), *model.named_buffers())}
    found |= {name: boxed(p.shape, p.layout.local_intervals(p.shape, p.ranks)) for name, p in annotated(model).items()}
    if isinstance(model, FullySharded):
        for unit in model.units:
            for name, s, piece in zip(unit.names, unit.segments, unit.pieces, strict=True):
                start, _, _ = unit.piece(piece)
                mine = start, start + piece.size
                found[name] = (parted(s.tensor.shape, *cut[name][1:], mine) if name in cut
                               else ranged(s.tensor.shape, mine))
    names = {name: name_of(p, name) for name, p in model.named_parameters()}
    return {names.get(name, name): kind for name, kind in found.items()}


def whole(shape):
    """The Layout of who has all of it."""
    return boxed(shape, [[(0, extent)] for extent in shape])


def ranged(shape, mine):
    """The Layout of who has the elements (start, stop) in C order, 1-d or otherwise."""
    count = mine[1] - mine[0]
    return Layout(tuple(shape), (((mine,), Place((slice(0, count),), slice(None), (count,))),))


def parted(shape, axis, indices, extent, mine=None):
    """The Layout of who has these indices along an axis, in this order; `extent` is all there are. mine: boxed's."""
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    runs = [(int(indices[lo]), int(indices[lo]) + hi - lo) for lo, hi in itertools.pairwise(starts) if lo < hi]
    full = (*shape[:axis], extent, *shape[axis + 1:])
    return boxed(full, [runs if i == axis else [(0, e)] for i, e in enumerate(full)], mine)


def boxed(shape, intervals, mine=None):
    """The Layout of who has these [(start, stop)] of each axis, one after another.

    mine  (start, stop): only these elements of that, in C order, which are what this rank has, 1-d or otherwise
    """
    extents, pieces, at = [sum(stop - start for start, stop in own) for own in intervals], [], 0
    for part in boxes_of(extents, *(mine or (0, prod(extents)))):
        sizes = tuple(stop - start for start, stop in part)
        elements = None if mine is None else slice(at, at := at + prod(sizes))
        for sides in itertools.product(*map(common, intervals, part)):
            index = (*(there for _, there in sides), ...)       # so that a number is an array, too
            pieces.append((tuple(side for side, _ in sides), Place(index, elements, () if mine is None else sizes)))
    return Layout(tuple(shape), tuple(pieces))


def common(own, side):
    """[((start, stop) of an axis, the slice where these are in `side`)] of who has the intervals `own` of it, one after
    another; side: (start, stop) of what that rank has."""
    found, at = [], -side[0]        # where an interval begins in `side`
    for start, stop in own:
        lo, hi = max(at, 0), min(at + stop - start, side[1] - side[0])
        if lo < hi or start == stop:
            found.append(((start - at + lo, start - at + hi), slice(lo, hi)))
        at += stop - start
    return found


def chunks_of(model):
    """[Module]: a pipeline's chunks, or the one model."""
    return [model] if isinstance(model, Module) else model


def named_arrays(model):
    """[(name in the whole model, this rank's array)] of all parameters and buffers. What a pipeline's stages share
    comes for each."""
    return [(name, lower(value)) for chunk in chunks_of(model)
            for name, value in (*((name_of(p, name), p) for name, p in chunk.named_parameters()),
                                *chunk.named_buffers())]


def buffer_names(model):
    """{name} of the buffers alone."""
    return {name for chunk in chunks_of(model) for name, _ in chunk.named_buffers()}


def optimizer_names(model, optimizer):
    """The name of each of the optimizer's parameters, in its order, per group. ValueError where one is no model's."""
    names = {id(p): name_of(p, name) for chunk in chunks_of(model) for name, p in chunk.named_parameters()}
    try:
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
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
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for name, p, state, own in zip(names, params, saved["state"], optimizer.own_shapes(), strict=True):
        arrays |= {f"optimizer.{kind}.{name}": (own_layout(p, own[kind]) if kind in own else kinds[name], array)
                   for kind, array in state.items()}
    return arrays, {"class": saved["class"], "steps": dict(zip(names, saved["steps"], strict=True)),
                    "groups": [{"names": group, "settings": settings}
                               for group, settings in zip(groups, saved["groups"], strict=True)]}


def own_layout(tensor, shape):
    """The Layout of an optimizer's state of a shape of its own: whole, however its parameter's matrices are cut; of a
    stack of which others have matrices as well, its own ones'."""
    part = tensor.leaf.part
    return whole(shape) if part is None or part.axis >= tensor.ndim - 2 else parted(
        shape, part.axis, part.indices, part.extent)


def piece_of(array, place):
    """The elements at a Place of this rank's array: a view of the box's shape."""
    if place.elements is not None:
        array = array.reshape(-1)[place.elements].reshape(place.shape)
    return array[place.index]
