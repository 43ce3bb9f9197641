"""Convolution and pooling layers; images are (n, channels, height, width), sequences (n, channels, length)."""

import math

from ..autodiff import ops
from ..backend import xp
from . import init
from .module import Module, Parameter, at_least_1


class _Conv(Module):
    """What Conv1d and Conv2d share; `axes` and `function` are theirs."""

    axes = 0
    function = None

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True,
                 dtype=xp.float32, weight_init=None):
        super().__init__()
        at_least_1(type(self).__name__, in_channels=in_channels, out_channels=out_channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"{type(self).__name__}: {in_channels} channels in and {out_channels} out don't divide "
                             f"into {groups} groups")
        kernel = (kernel_size,) * self.axes if isinstance(kernel_size, int) else tuple(kernel_size)
        shape = (out_channels, in_channels // groups, *kernel)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.weight = Parameter((weight_init or init.torch_linear)(shape, dtype))
        if bias:
            bound = 1 / math.sqrt(init.fans(shape)[0])
            self.bias = Parameter(xp.zeros(out_channels, dtype) if weight_init
                                  else init.uniform((out_channels,), bound, dtype))
        else:
            self.bias = None

    def forward(self, x):
        return type(self).function(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self):
        out, inside, *kernel = self.weight.shape
        settings = {"stride": (self.stride, 1), "padding": (self.padding, 0), "dilation": (self.dilation, 1),
                    "groups": (self.groups, 1)}
        more = "".join(f", {name}={value}" for name, (value, usual) in settings.items() if value != usual)
        more += "" if self.bias is not None else ", bias=False"
        return f"{inside * self.groups}, {out}, {tuple(kernel)}{more}"


class Conv1d(_Conv):
    """(n, in, length) -> (n, out, length'); torch's settings, initial values and extents. See mt.conv1d."""

    axes, function = 1, staticmethod(ops.conv1d)


class Conv2d(_Conv):
    """(n, in, height, width) -> (n, out, height', width'); torch's settings and initial values. See mt.conv2d."""

    axes, function = 2, staticmethod(ops.conv2d)


class MaxPool2d(Module):
    """The largest element of each window; stride defaults to kernel_size. See mt.max_pool2d."""

    def __init__(self, kernel_size, stride=None, padding=0):
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x):
        return ops.max_pool2d(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self):
        return f"{self.kernel_size}"


class AvgPool2d(MaxPool2d):
    """The mean of each window; stride defaults to kernel_size. See mt.avg_pool2d."""

    def forward(self, x):
        return ops.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class Reshape(Module):
    """(n, …) -> (n, *shape)."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return ops.reshape(x, (len(x), *self.shape))

    def extra_repr(self):
        return ", ".join(map(str, self.shape))
