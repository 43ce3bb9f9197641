"""Convolution and pooling layers; images are (n, channels, height, width), sequences (n, channels, length)."""

import math

from ..autodiff import ops
from ..autodiff.ops.windows import per_axis
from ..backend import is_whole, wholes, xp
from . import init
from .module import Module, Parameter, at_least_1


def _setting(name, what, value, n, least):
    """A setting of a layer, checked: an int, or one per axis."""
    values = per_axis(name, what, value, n, least)
    return values[0] if is_whole(value) else values


class _Conv(Module):
    """What Conv1d and Conv2d share; `axes` and `function` are theirs."""

    axes = 0
    function = None

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True,
                 dtype=xp.float32, weight_init=None):
        super().__init__()
        name = type(self).__name__
        in_channels, out_channels, groups = at_least_1(name, in_channels=in_channels, out_channels=out_channels,
                                                       groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"{name}: {in_channels} channels in and {out_channels} out don't divide "
                             f"into {groups} groups")
        shape = (out_channels, in_channels // groups, *per_axis(name, "kernel_size", kernel_size, self.axes, 1))
        self.stride = _setting(name, "stride", stride, self.axes, 1)
        self.padding = _setting(name, "padding", padding, self.axes, 0)
        self.dilation, self.groups = _setting(name, "dilation", dilation, self.axes, 1), groups
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
        name = type(self).__name__
        self.kernel_size = _setting(name, "kernel_size", kernel_size, 2, 1)
        self.stride = None if stride is None else _setting(name, "stride", stride, 2, 1)
        self.padding = _setting(name, "padding", padding, 2, 0)

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
        self.shape = wholes("shape", shape)

    def forward(self, x):
        return ops.reshape(x, (len(x), *self.shape))

    def extra_repr(self):
        return ", ".join(map(str, self.shape))
