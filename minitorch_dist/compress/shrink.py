"""Whole neurons and channels: masks that take out all of one, and the smaller model without them.

    print(shrink.couplings(model))                  # which layer's outputs are which one's inputs
    masks = shrink.neurons(model, 0.5)              # half of each layer's neurons, the last one's excepted
    prune.Pruning(model, masks); …train…
    small = shrink.shrink(model, masks)             # a model of fewer rows and columns, which computes the same

    Linear 0       rows  a b c d        weight (4, in): rows b and d go, and their biases
    BatchNorm 1          a b c d        scale, shift and running statistics of b and d go
    ReLU 2               0 stays 0
    Linear 3       columns a b c d      weight (out, 4): columns b and d go: they met zeros only

The sums of the smaller model are those of the masked one without terms that are zero: equal up to the order in which
BLAS adds. Source: Li et al. 2017, "Pruning filters for efficient ConvNets".
"""

import copy
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..autodiff.primitive import lower
from ..backend import to, to_device_of
from ..nn.containers import Sequential
from ..nn.conv import AvgPool2d, Conv1d, Conv2d, MaxPool2d
from ..nn.layers import GELU, Dropout, Flatten, LeakyReLU, Linear, ReLU, Tanh
from ..nn.module import Parameter
from ..nn.norm import BatchNorm
from ..nn.transformer import FeedForward
from .prune import check_masks, check_whole, decided, drop_smallest, finite

PASSED = (AvgPool2d, Dropout, Flatten, GELU, LeakyReLU, MaxPool2d, ReLU, Tanh)      # they leave a channel of zeros so
MAKERS = (Linear, Conv1d, Conv2d)


@dataclass(frozen=True)
class Coupling:
    """A layer whose outputs are the inputs of another one, and of it alone.

    maker, norms, taker   names of modules: Linear or convolution, BatchNorms between, Linear or convolution
    each                  inputs of the taker per output of the maker: 1, after Flatten the positions of a channel
    """

    maker: str
    norms: tuple
    taker: str
    each: int


def couplings(model):
    """[Coupling] in the Sequentials of a model, nested ones in a row; those with a forward of their own are none. A
    layer that stands in several places, or shares a parameter, or a convolution of groups has no coupling; between two
    layers may stand what leaves zeros as they are."""
    holders = {}
    for _, m in model.named_modules(remove_duplicate=False):
        for p in m._parameters.values():
            holders.setdefault(id(p), []).append(m)

    def alone(m):
        return getattr(m, "groups", 1) == 1 and all(len(holders[id(p)]) == 1 for p in m._parameters.values()
                                                    if p is not None)
    return [c for chain in _chains("", model) for c in _coupled(chain, alone)]


def _coupled(chain, alone):
    """The Couplings in a chain [(name, layer)]; alone(layer): whether it may be in one."""
    places = Counter(id(m) for _, m in chain)
    maker, norms, flat = None, (), False        # (name, layer) that a taker is sought for, and what stands behind it
    for name, m in chain:
        if places[id(m)] > 1 or not alone(m):
            maker = None
        elif isinstance(m, MAKERS):
            if maker is not None and (each := _each(maker[1], m, flat)):
                yield Coupling(maker[0], norms, name, each)
            maker, norms, flat = (name, m), (), False
        elif isinstance(m, BatchNorm):
            if maker is not None and m.num_features != maker[1].weight.shape[0]:
                maker = None        # behind a Flatten: it has a number per position
            norms = (*norms, name)
        elif isinstance(m, Flatten):
            flat = True
        elif not isinstance(m, PASSED):
            maker = None


def _each(maker, taker, flat):
    """How many inputs of the one are an output of the other: a convolution's channel, flattened for a Linear or as it
    is, or a Linear's feature. 0 where they don't meet. (A Linear's features that are flattened lie far apart.)"""
    outputs, inputs = maker.weight.shape[0], taker.weight.shape[1]
    if isinstance(maker, Linear):
        return int(isinstance(taker, Linear) and inputs == outputs)
    return inputs // outputs if isinstance(taker, Linear) == flat and inputs % outputs == 0 else 0


def _chains(prefix, model):
    """[[(name, layer)]]: the outermost Sequentials, with those directly in them taken apart, then those further in."""
    if _is_chain(model):
        chain = list(_flattened(prefix, model))
        return [chain] + [c for name, m in chain for c in _chains(name, m)]
    return [c for name, m in model._modules.items() for c in _chains(_path(prefix, name), m)]


def _flattened(prefix, sequential):
    for name, m in sequential._modules.items():
        if _is_chain(m):
            yield from _flattened(_path(prefix, name), m)
        else:
            yield _path(prefix, name), m


def _is_chain(m):
    """Whether a module does nothing but call its layers in a row."""
    return type(m).__dict__.get("forward", Sequential.forward) in (Sequential.forward, FeedForward.forward) and \
        isinstance(m, Sequential)


def _path(prefix, name):
    return ".".join(filter(None, (prefix, name)))


def neurons(model, sparsity, order=1):
    """{name: mask} that takes out round(sparsity · outputs) whole outputs of each maker of couplings(model): those
    whose rows (channels) of weights have the smallest norm, the first among equals. Biases go with them, and the
    scales and shifts of BatchNorms behind, so that what comes out is 0. At least one output stays.

    order  of the norm: 1, as in the paper, or 2

    Source: Li et al. 2017.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"neurons: sparsity={sparsity}: a share must be in [0, 1]")
    if order not in (1, 2):
        raise ValueError(f"neurons: order={order!r}: norms are of order 1 or 2")
    pairs, known = couplings(model), [name for name, _ in model.named_parameters()]
    if not pairs:
        raise ValueError("neurons: no layer of this model, in a Sequential, has outputs that one other layer takes")

    def decide(values):
        masks = {}
        for c in pairs:
            weight = finite(f"{c.maker}.weight", values[f"{c.maker}.weight"])
            norms = np.linalg.norm(weight.reshape(len(weight), -1), order, axis=1)
            keep = drop_smallest(norms, min(sparsity, 1 - 1 / len(norms)))
            rows = keep.reshape(-1, *(1,) * (weight.ndim - 1))
            masks[f"{c.maker}.weight"] = np.broadcast_to(rows, weight.shape).copy()
            masks |= dict.fromkeys(_vectors(c, known), keep)
        return masks
    return decided(model, [f"{c.maker}.weight" for c in pairs], decide)


def _vectors(coupling, known):
    """The names of a coupling's parameters that have a number per output."""
    names = [f"{m}.{end}" for m in (coupling.maker, *coupling.norms) for end in ("weight", "bias")][1:]
    return [name for name in names if name in known]


def shrink(model, masks):
    """A copy of the model without the outputs that masks leave out as a whole (row, bias and all): in evaluation it
    computes what the model does, within rounding. Its parameters are new; make its optimizer anew.

    Rows of which something stays are kept as they are, zeros included. ValueError where the model's values under a mask
    aren't zero. A wrapped model raises TypeError: take model.module.
    """
    values = dict(model.named_parameters())
    check_masks({name: p.shape for name, p in values.items()}, masks)
    if revived := [name for name, mask in masks.items() if np.asarray(to(values[name].data, "cpu"))[~mask].any()]:
        raise ValueError(f"shrink: {', '.join(revived)}: some weights under the mask aren't zero, and would be lost: "
                         "call Pruning(model, masks) first")
    check_whole(model, "shrink")
    small = copy.deepcopy(model)
    modules = dict(small.named_modules(remove_duplicate=False))
    for c in couplings(model):
        keep = _kept(c, masks, values)
        if keep.all() or not keep.any():
            continue
        maker, taker = modules[c.maker], modules[c.taker]
        norms = [modules[name] for name in c.norms]
        for m in (maker, *norms):
            for name in ("weight", "bias"):
                _replace(m, name, keep, 0)
        for m in norms:
            m.num_features = int(keep.sum())
            for name in ("running_mean", "running_var"):
                m.register_buffer(name, _taken(lower(getattr(m, name)), keep, 0))
        _replace(taker, "weight", np.repeat(keep, c.each), 1)
    return small


def _kept(coupling, masks, values):
    """Which outputs stay: those of which some parameter isn't masked as a whole."""
    weight = f"{coupling.maker}.weight"
    keep = np.zeros(values[weight].shape[0], bool)
    for name in (weight, *_vectors(coupling, values)):
        mask = masks.get(name, np.ones(values[name].shape, bool))
        keep |= mask.reshape(len(mask), -1).any(axis=1)
    return keep


def _taken(array, keep, axis):
    return array[(slice(None),) * axis + (to_device_of(np.flatnonzero(keep), array),)]


def _replace(m, name, keep, axis):
    p = getattr(m, name)
    if p is not None:
        new = Parameter(_taken(p.data, keep, axis)).requires_grad_(p.requires_grad)
        m._register(m._parameters, name, new)
