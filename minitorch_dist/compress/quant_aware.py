"""Quantisation-aware training: a model learns to work with the numbers that it will have.

    model = prepare_qat(model, bits=2)          # a copy that rounds weights and activations in forward
    …                                           # trained like any other, DistributedDataParallel included
    small = convert(model)                      # the integers themselves; see describe

In forward each weight is rounded to its few bits (per output channel, by its own range of the moment), and each input
of a layer to the bits of activations; in backward rounding counts for nothing (the straight-through estimator). The
ranges of activations are averages over the batches, moving while the model is in training mode.

What `convert` gives computes the same numbers: biases are rounded to int32 here too, so the sums are equal but for
floating rounding, and a rescaled activation is one step off only where the real one lies so near to a half.

Sources: Jacob et al. 2018, 3; Nagel et al. 2021, 4.
"""

import copy

from .. import comm as communication
from ..autodiff.modes import as_at_first
from ..autodiff.primitive import lower
from ..backend import assign, xp
from ..nn.conv import AvgPool2d
from ..nn.module import Module
from .quant_layers import WEIGHTED, IntegerSequential, product_of, scales_for
from .quant_model import Scheme, chosen, frozen_if, made, prepared, replaced
from .quant_observers import moved, range_of
from .quantize import fake_quantize, fake_round, params_of_range


class Ranks:
    """Those whose batches are one batch. A copy of a layer, deep or pickled, has none."""

    def __init__(self, comm):
        self.comm = comm

    def widest(self, ends):
        """The greatest of all ranks' values, in place."""
        self.comm.all_reduce(ends, op="max")

    def __reduce__(self):
        return type(None), ()


class Observing(Module):
    """What rounds its input in a range that it learns.

    input_range   buffer (2,): least and greatest value, an average moving by `momentum`; NaN before the first batch
    observing     whether the range still moves, in training mode
    ranks         None, or Ranks: their ranges are equal to the last bit
    """

    momentum = 0.1

    def __init__(self, name, layer, scheme, comm):
        super().__init__()
        self.name, self.scheme, self.observing = name or "the model", scheme, True
        self.ranks = Ranks(comm) if comm.size > 1 else None
        self.source = layer,        # in a tuple: no module of this one's, or its names would be there twice
        self.register_buffer("input_range", xp.full(2, xp.nan))

    def observe(self, x):
        """Move the range by a batch. Collective where there are ranks: the batch is that of them all."""
        ends = xp.full(2, -xp.inf)      # (-least, greatest), so that one maximum serves both
        if lower(x).size:
            low, high = range_of(x, what=f"{self.name}'s input")
            ends[:] = -low, high
        if self.ranks is not None:
            self.ranks.widest(ends)
        if xp.isfinite(ends).all():
            old = None if xp.isnan(self.input_range).any() else tuple(self.input_range)
            assign(self.input_range, xp.array(moved(old, (-ends[0], ends[1]), self.momentum)))

    def input_params(self):
        """The QuantParams of the input. RuntimeError before the first batch."""
        if xp.isnan(self.input_range).any():
            raise RuntimeError(f"{self.name} has no range for its input yet: run some batches in training mode first")
        return params_of_range(*self.input_range, self.scheme.activation_bits)

    def params_for(self, x):
        """The QuantParams to round a batch in, by which the range moves in training."""
        if self.training and self.observing:
            self.observe(x)
        return self.input_params()

    def rounded(self, x):
        """(x as the integers will stand for it, their QuantParams); (x, None) where only weights are rounded."""
        if self.scheme.kind == "weight-only":
            return x, None
        params = as_at_first(lambda: self.params_for(x))
        return fake_quantize(x, params), params

    def converted(self):
        """The layer of integers."""
        params = None if self.scheme.kind == "weight-only" else self.input_params()
        layer = self.source[0]
        for name, p in self._parameters.items():        # they may have been exchanged since
            layer._register(layer._parameters, name, p)
        return made(self.name, layer, self.scheme, params)

    def extra_repr(self):
        return f"{self.source[0]!r}, w{self.scheme.bits} a{self.scheme.activation_bits}"


class FakeQuantized(Observing):
    """A Linear or a convolution that rounds its input, weight and bias. Its parameters are the layer's own."""

    def __init__(self, name, layer, scheme, comm):
        super().__init__(name, layer, scheme, comm)
        for parameter in ("weight", "bias"):
            self._register(self._parameters, parameter, getattr(layer, parameter))
        self.product = product_of(layer)

    def forward(self, x):
        x, rounding = self.rounded(x)
        if rounding is None:
            return self.product(x, fake_quantize(self.weight, scales_for(self.weight, None, self.scheme)), self.bias)
        step = rounding.scale
        params = scales_for(self.weight, self.bias, self.scheme, step)
        bias = None if self.bias is None else fake_round(self.bias, params.scale.astype(xp.float64) * float(step), 32)
        return self.product(x, fake_quantize(self.weight, params), bias)


class FakeQuantizedAvgPool2d(Observing):
    """An average pooling that rounds its input."""

    def forward(self, x):
        return self.source[0](self.rounded(x)[0])


def prepare_qat(model, bits=8, activation_bits=8, per_channel=True, weight_observer="minmax", skip=(), comm=None,
                fold=True):
    """A copy of the model, in training mode, that trains with the roundings of its later self.

    bits, activation_bits  2 to 8; activation_bits=None: only weights are rounded, `convert` gives WeightOnly layers
    comm                   of the ranks that train it together, each on its part of the batch (default: the world's):
                           ranges are all-reduced in forward, so that all must call it equally often (not under
                           DistributedDataParallel.join)
    others                 as in Scheme and quantize_model; BatchNorms are folded before training

    Names of parameters are the model's. In exact mode a range would move between micro-shards, so that the bits depend
    on the number of ranks: freeze_ranges first. What is checkpointed rounds again in the ranges of its first run.
    """
    rounds = activation_bits is not None
    scheme = Scheme("integer" if rounds else "weight-only", bits, activation_bits if rounds else 8, per_channel,
                    weight_observer=weight_observer, skip=skip)
    comm = comm if comm is not None else communication.world()
    model = prepared(model, fold).train()
    layers = chosen(model, scheme.skip, (*WEIGHTED, AvgPool2d) if rounds else WEIGHTED)
    return replaced(model, {
        id(layer): (FakeQuantizedAvgPool2d if type(layer) is AvgPool2d else FakeQuantized)(name, layer, scheme, comm)
        for name, layer in layers.items()})


def freeze_ranges(model, frozen=True):
    """Let the ranges of activations stay, in training mode too; or let them move again. Returns the model. That isn't
    part of the state: a run that goes on from a checkpoint calls it again."""
    for layer in observing(model):
        layer.observing = not frozen
    return model


def observing(model):
    """The layers that `prepare_qat` has made. ValueError where there are none."""
    if layers := [module for module in model.modules() if isinstance(module, Observing)]:
        return layers
    raise ValueError(f"{type(model).__name__} has no layers that were prepared: call prepare_qat first")


def convert(model):
    """A copy of a model from prepare_qat (in a wrapper: of its `.module`) with integers in place of the layers that
    rounded, in evaluation mode. Errors as quantize_model's; RuntimeError for a layer that has seen no batch."""
    model = copy.deepcopy(model).eval()
    layers = observing(model)
    integer = layers[0].scheme.kind == "integer"
    model = replaced(model, {id(layer): layer.converted() for layer in layers}, IntegerSequential if integer else None)
    return frozen_if(integer, model)
