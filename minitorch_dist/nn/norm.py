"""Normalisation layers."""

import math

from ..autodiff import ops
from ..autodiff.create import full
from ..autodiff.modes import is_recomputing
from ..autodiff.ops.elementwise import narrow, wide
from ..autodiff.primitive import lower
from ..backend import as_dtype, assign, is_short, number, result_type, weak, whole, wholes, xp
from .module import Module, Parameter, at_least_1


class LayerNorm(Module):
    """Normalise each sample over its last axes, then scale and shift. Source: Ba et al. 2016."""

    def __init__(self, normalized_shape, eps=1e-5, dtype=xp.float32):
        super().__init__()
        self.normalized_shape = wholes("normalized_shape", normalized_shape)
        self.eps = eps
        self.weight = Parameter(xp.ones(self.normalized_shape, as_dtype(dtype)))
        self.bias = Parameter(xp.zeros(self.normalized_shape, as_dtype(dtype)))

    def forward(self, x):
        return ops.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self):
        return ", ".join(map(str, self.normalized_shape))


class RMSNorm(Module):
    """Divide each sample by its root mean square over the last axes, then scale. Source: Zhang & Sennrich 2019."""

    def __init__(self, normalized_shape, eps=1e-6, dtype=xp.float32):
        super().__init__()
        self.normalized_shape = wholes("normalized_shape", normalized_shape)
        self.eps = eps
        self.weight = Parameter(xp.ones(self.normalized_shape, as_dtype(dtype)))

    def forward(self, x):
        return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self):
        return ", ".join(map(str, self.normalized_shape))


class GroupNorm(Module):
    """Normalise each sample over groups of its channels, then scale and shift each channel: (n, channels) or (n,
    channels, …). No sample looks at another, so that a batch can be cut over ranks with no word between them.

    num_groups groups of num_channels / num_groups channels in order, each with all places of them. ValueError unless
    they are equally large. Source: Wu & He 2018.
    """

    def __init__(self, num_groups, num_channels, eps=1e-5, dtype=xp.float32):
        super().__init__()
        num_groups, num_channels = at_least_1("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ValueError(f"GroupNorm: {num_groups} groups must divide {num_channels} channels")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Parameter(xp.ones(num_channels, as_dtype(dtype)))
        self.bias = Parameter(xp.zeros(num_channels, as_dtype(dtype)))

    def forward(self, x):
        if len(x.shape) < 2 or x.shape[1] != self.num_channels:
            raise ValueError(f"GroupNorm of {self.num_channels} channels was given an input of shape {tuple(x.shape)}: "
                             "channels are the second axis")
        size = self.num_channels // self.num_groups * math.prod(x.shape[2:])
        column, weight, bias = (-1,) + (1,) * (len(x.shape) - 2), self.weight, self.bias
        kind = result_type(x.dtype, weight.dtype)
        x, weight, bias = map(wide, (x, weight, bias))      # the gradient times the weight is an array of its own here
        y = ops.layer_norm(ops.reshape(x, (x.shape[0], self.num_groups, size)), size, eps=self.eps)
        y = ops.reshape(y, x.shape) * weight.reshape(column) + bias.reshape(column)
        return narrow(y, kind)

    def extra_repr(self):
        return f"{self.num_groups}, {self.num_channels}"


class BatchNorm(Module):
    """Normalise each channel over the batch: (n, channels) or (n, channels, …).

    In training by the batch's own mean and variance, which also move the running ones by `momentum` (the variance
    unbiased, as torch keeps it); in evaluation by the running ones. An empty batch moves nothing.
    Source: Ioffe & Szegedy 2015.

    The batch is what forward is given, unless one of these is set (DistributedDataParallel does, so that the batch is
    the global one; in exact mode, one micro-shard):

    reduce   reduce(x): the sum of all ranks' x, a differentiable op; the statistics are then those of all ranks' rows
    move     move(layer, mean, var): takes a batch's statistics, to move the running ones later by `layer.moved`; its
             `batch`, where it has one, says in errors what a batch is
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, dtype=xp.float32):
        super().__init__()
        num_features = whole("num_features", num_features)
        self.num_features, self.eps, self.momentum = num_features, number(eps), number(momentum)
        dtype = as_dtype(dtype)
        self.weight = Parameter(xp.ones(num_features, dtype))
        self.bias = Parameter(xp.zeros(num_features, dtype))
        self.register_buffer("running_mean", xp.zeros(num_features, dtype))
        self.register_buffer("running_var", xp.ones(num_features, dtype))
        self.reduce, self.move = None, BatchNorm.moved

    def forward(self, x):
        if len(x.shape) < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"BatchNorm of {self.num_features} channels was given an input of shape {x.shape}: "
                             "channels are the second axis")
        column = (1, -1) + (1,) * (len(x.shape) - 2)
        if not self.training:
            scale = self.weight / xp.sqrt(self.running_var + weak(self.eps, self.running_var))
            return x * scale.reshape(column) + (self.bias - self.running_mean * scale).reshape(column)
        count = lower(x).size // self.num_features
        if self.reduce is not None:
            y, mean, var, count = self._over_ranks(x, count, column)
        elif count == 0:
            return x * self.weight.reshape(column) + self.bias.reshape(column)
        else:
            self._check(count, x)
            y, mean, var = ops.batch_norm(x, self.weight, self.bias, self.eps)
        if not is_recomputing():
            self.move(self, lower(mean), lower(var) * (count / (count - 1)))
        return y

    def _check(self, count, x):
        if count < 2:
            raise ValueError(f"BatchNorm in training needs 2 or more values per channel, got {count} (input {x.shape})"
                             f"{getattr(self.move, 'batch', '')}")

    def _over_ranks(self, x, count, column):
        """Two sums over the ranks: the mean must be known before the variance, or large means would drown it. Of 16
        bits in float32, as the op itself adds them: of all ranks' values there are more than float16 can count."""
        given, axes = x.dtype, (0, *range(2, len(x.shape)))
        x = wide(x)
        sums = self.reduce(ops.concatenate([ops.sum(x, axes), full((1,), count, x.dtype, x.device)], 0))
        count = int(lower(sums)[-1])
        self._check(count, x)
        mean = sums[:-1] / count
        centred = x - mean.reshape(column)
        var = self.reduce(ops.sum(centred * centred, axes)) / count
        scale = self.weight * ops.rsqrt(var + self.eps)
        y = centred * scale.reshape(column) + self.bias.reshape(column)
        return y.astype(given) if is_short(self.weight.dtype) else y, mean, var, count

    def moved(self, mean, var):
        """Move the running statistics towards these."""
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            assign(running, running * (1 - self.momentum) + self.momentum * new)

    def extra_repr(self):
        return f"{self.num_features}"
