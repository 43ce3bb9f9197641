"""Normalisation layers."""

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import xp
from .module import Module, Parameter


class LayerNorm(Module):
    """Normalise each sample over its last axes, then scale and shift. Source: Ba et al. 2016."""

    def __init__(self, normalized_shape, eps=1e-5, dtype=xp.float32):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(xp.ones(self.normalized_shape, dtype))
        self.bias = Parameter(xp.zeros(self.normalized_shape, dtype))

    def forward(self, x):
        return ops.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self):
        return ", ".join(map(str, self.normalized_shape))


class RMSNorm(Module):
    """Divide each sample by its root mean square over the last axes, then scale. Source: Zhang & Sennrich 2019."""

    def __init__(self, normalized_shape, eps=1e-6, dtype=xp.float32):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(xp.ones(self.normalized_shape, dtype))

    def forward(self, x):
        return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self):
        return ", ".join(map(str, self.normalized_shape))


class BatchNorm(Module):
    """Normalise each channel over the batch: (n, channels) or (n, channels, …).

    In training by the batch's own mean and variance, which also move the running ones by `momentum` (the variance
    unbiased, as torch keeps it); in evaluation by the running ones. The batch is what forward is given: on several
    ranks this rank's rows, in exact mode one micro-shard. Source: Ioffe & Szegedy 2015.
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, dtype=xp.float32):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = Parameter(xp.ones(num_features, dtype))
        self.bias = Parameter(xp.zeros(num_features, dtype))
        self.register_buffer("running_mean", xp.zeros(num_features, dtype))
        self.register_buffer("running_var", xp.ones(num_features, dtype))

    def forward(self, x):
        if x.shape[1] != self.num_features:
            raise ValueError(f"BatchNorm of {self.num_features} channels was given an input of shape {x.shape}: "
                             "channels are the second axis")
        if not self.training:
            shape = (1, -1) + (1,) * (len(x.shape) - 2)
            scale = self.weight / xp.sqrt(self.running_var + self.eps)
            return x * scale.reshape(shape) + (self.bias - self.running_mean * scale).reshape(shape)
        count = lower(x).size // self.num_features
        if count < 2:
            raise ValueError(f"BatchNorm in training needs 2 or more values per channel, got {count} (input {x.shape})")
        y, mean, var = ops.batch_norm(x, self.weight, self.bias, self.eps)
        for running, new in ((self.running_mean, lower(mean)), (self.running_var, lower(var) * (count / (count - 1)))):
            running *= 1 - self.momentum
            running += self.momentum * new
        return y

    def extra_repr(self):
        return f"{self.num_features}"
