"""Layers of integers: what takes the place of a Linear, a convolution or an average pooling.

    WeightOnly   integers are kept, real numbers are multiplied: for memory
    Dynamic      activations become int8 by the range of each batch, sums are int32, the result is real: without
                 calibration. (On NumPy it is slower than real numbers, for these have a BLAS)
    Integer      activations come as int8 in a range that was chosen before, and leave as such

What stands in for a layer keeps its names: its state is `weight`, of integers (packed, see pack), `bias`, and beside
them the scales. The attribute `weight` is the real weight that the integers stand for, for those who look at it.
"""

from functools import partial
from math import prod

from ..autodiff.modes import is_grad_enabled
from ..autodiff.ops import max_pool2d
from ..autodiff.ops.convolution import padded
from ..autodiff.ops.linalg import linear
from ..autodiff.ops.windows import per_axis, shifts, view
from ..autodiff.primitive import Traced, lower
from ..autodiff.tensor import Tensor
from ..backend import xp
from ..nn.containers import Sequential
from ..nn.conv import Conv1d, Conv2d, MaxPool2d, Reshape
from ..nn.decoding import by_matrix
from ..nn.layers import Dropout, Flatten, Linear, ReLU
from ..nn.module import Module
from .quant_integer import QuantizedTensor, check_accumulator, exactly, greatest, requantize
from .quant_observers import range_of, weight_params
from .quantize import SMALLEST, QuantParams, dequantize, pack, params_of_range, quantize, unpack

WEIGHTED = (Linear, Conv1d, Conv2d)
BIAS_ROOM = 2 ** 30     # of int32: the other half is the products'


def product_of(layer):
    """f(x, weight, bias) as this Linear or convolution has it, of other arrays than its own."""
    if type(layer) is Linear:
        return linear
    return partial(_convolution, type(layer).function, layer.stride, layer.padding, layer.dilation, layer.groups)


def _convolution(function, stride, padding, dilation, groups, x, weight, bias=None):
    return function(x, weight, bias, stride, padding, dilation, groups)


def padding_of(layer):
    """() of a Linear, one int per axis of a convolution."""
    return () if type(layer) is Linear else per_axis("padding", "padding", layer.padding, layer.axes, 0)


def bias_column(values, ndim, layer_ndim):
    """One value per output channel, to be added to an output of `ndim` axes: they are its last axis for a weight of two
    axes, its second for a convolution's."""
    return values if layer_ndim == 2 else values.reshape((-1,) + (1,) * (ndim - 2))


def scales_for(weight, bias, scheme, input_scale=None):
    """The weight's QuantParams by the scheme. Where the bias, in units of input_scale · scale, would take more than
    half of int32's range, the scale is as coarse as it must be: then the channel's weights are negligible beside it."""
    params = weight_params(weight, scheme.bits, scheme.per_channel, scheme.weight_observer)
    if bias is None or input_scale is None:
        return params
    range_of(bias, what="the quantiser of a bias")
    needed = xp.absolute(lower(bias)).astype(xp.float64) / (float(input_scale) * BIAS_ROOM)
    nothing = xp.absolute(lower(weight)).reshape(len(needed), -1).max(axis=1) == 0
    if params.axis is None:
        needed, nothing = needed.max(), nothing.all()
    scale = xp.where(nothing & (needed > 0), needed, xp.maximum(params.scale, needed))
    return QuantParams(xp.maximum(scale, SMALLEST), params.zero_point, params.bits, True, params.axis)


class Quantized(Module):
    """What the layers of integers share: the packed weight and its scales."""

    kind = ""

    def __init__(self, name, layer, scheme, input_params=None):
        super().__init__()
        weight, bias = lower(layer.weight), layer.bias
        params = scales_for(weight, bias, scheme, input_params and input_params.scale)
        q = quantize(weight, params)
        self.name, self.layer, self.bits, self.axis = name or "the model", repr(layer), params.bits, params.axis
        self.whole, self.dtype = weight.shape, weight.dtype
        self.product, self.bytes_before = product_of(layer), weight.nbytes + (0 if bias is None else lower(bias).nbytes)
        self.max_error = float(xp.absolute(weight - dequantize(q, params, weight.dtype)).max(initial=0))
        self.register_buffer("weight", pack(q, params.bits))
        self.register_buffer("weight_scale", params.scale)
        self.bias = None
        if bias is not None:        # by name, for a frozen one is a parameter too
            self._register(self._parameters, "bias", bias)

    @property
    def weight(self):
        """The real weight that the integers stand for, a Tensor without a gradient."""
        return Tensor(dequantize(self.integers(), self.weight_params, self.dtype))

    @weight.setter
    def weight(self, packed):
        """It is kept among the buffers."""

    @property
    def weight_params(self):
        """The QuantParams of the weight."""
        return QuantParams(self.weight_scale, xp.zeros_like(self.weight_scale), self.bits, True, self.axis)

    def integers(self):
        """The weight's integers, int8 of its shape."""
        return unpack(self._buffers["weight"], self.bits, self.whole)

    @property
    def scheme(self):
        """For people: what is kept how."""
        return f"{self.kind}, w{self.bits} {'per tensor' if self.axis is None else 'per channel'}"

    @property
    def nbytes(self):
        """Of everything that is kept for this layer."""
        return sum(lower(values).nbytes for _, values in (*self.named_parameters(), *self.named_buffers()))

    def extra_repr(self):
        return f"{self.layer}, {self.scheme}"


def refuse_gradients(name, x):
    """TypeError where somebody would want the derivative of a layer of integers."""
    traced = x.requires_grad if isinstance(x, Tensor) else isinstance(x, Traced)
    if traced and is_grad_enabled():
        raise TypeError(f"{name} multiplies integers, which has no derivative: run it under no_grad(), or train with "
                        "compress.prepare_qat")


class WeightOnly(Quantized):
    """A layer whose weight is kept in few bits, and is a real one again whenever it is used. Its bias stays a
    parameter, and gradients flow to bias and input."""

    kind = "weight-only"

    @by_matrix
    def forward(self, x):
        return self.product(x, self.weight, self.bias)


class _Products(Quantized):
    """What multiplies integers."""

    def __init__(self, name, layer, scheme, input_params=None):
        super().__init__(name, layer, scheme, input_params)
        self.padding = padding_of(layer)
        if self.padding:        # done here, with the integer that stands for 0
            self.product = partial(_convolution, type(layer).function, layer.stride, 0, layer.dilation, layer.groups)
        self.activation_bits = scheme.activation_bits

    def sums(self, q, params):
        """Σ (q_x - z)·q_w, int64: as Σ q_x·q_w - z·Σ q_w, for q_x has one bit less than q_x - z."""
        weight, zero = self.integers(), int(params.zero_point)
        x = padded(q.astype(xp.int8), self.padding, zero) if self.padding else q
        acc = exactly(self.product, x, weight, prod(self.whole[1:]), -params.qmin * greatest(weight))
        total = weight.reshape(len(weight), -1).sum(axis=1, dtype=xp.int64)
        return acc - bias_column(zero * total, acc.ndim, weight.ndim)

    def per_output(self, values, ndim):
        """Values per output channel (or one), to broadcast against an output."""
        return values if values.ndim == 0 else bias_column(values, ndim, len(self.whole))

    @property
    def scheme(self):
        return f"{super().scheme}, a{self.activation_bits}"


class Dynamic(_Products):
    """A layer that makes int8 of its input by the batch's own range, adds up in int32, and gives real numbers."""

    kind = "dynamic"

    def __init__(self, name, layer, scheme, input_params=None):
        super().__init__(name, layer, scheme)
        ends = 1 << self.activation_bits - 1
        for zero in (-ends, ends - 1):      # the input's range may lie on one side of 0
            check_accumulator(self.name, self.integers(), None,
                              QuantParams(1.0, zero, self.activation_bits))

    def forward(self, x):
        refuse_gradients(self.name, x)
        x = lower(x)
        low, high = range_of(x, what=f"{self.name}'s input") if x.size else (0.0, 0.0)
        params = params_of_range(low, high, self.activation_bits)
        acc = self.sums(quantize(x, params), params)
        unit = self.per_output(self.weight_scale.astype(xp.float64) * float(params.scale), acc.ndim)
        y = acc * unit
        if self.bias is not None:
            y += self.per_output(lower(self.bias), acc.ndim)
        return Tensor(y.astype(self.dtype))


class _FixedInput:
    """What takes its input in a range that was chosen before, as integers or to make them."""

    def set_input(self, params):
        self.register_buffer("input_bits", xp.array(params.bits, xp.int8))
        self.register_buffer("input_scale", params.scale)
        self.register_buffer("input_zero_point", params.zero_point)

    @property
    def input(self):
        """The QuantParams of the input."""
        return QuantParams(self.input_scale, self.input_zero_point, int(self.input_bits))

    def taken(self, x):
        """The input's integers."""
        refuse_gradients(self.name, x)
        return x.values if isinstance(x, QuantizedTensor) else quantize(x, self.input)

    def given(self, acc, unit, into, dtype):
        """Sums of integers, whose unit is a real number (or one per channel), as what comes out: real numbers of this
        dtype where `into` is None, else the QuantizedTensor of these QuantParams."""
        if into is None:
            return Tensor((acc * unit).astype(dtype))
        return requantize(acc, unit / float(into.scale), into, dtype)


class Integer(_FixedInput, _Products):
    """A layer of integers alone: int8 in, int32 sums and bias, and int8 again where the next one wants it.

    forward(x, into): x real numbers or a QuantizedTensor; into None: real numbers, or the QuantParams of the
    QuantizedTensor to give
    """

    kind = "integer"

    def __init__(self, name, layer, scheme, input_params):
        super().__init__(name, layer, scheme, input_params)
        self.set_input(input_params)
        if self.bias is not None:
            unit = self.weight_scale.astype(xp.float64) * float(self.input_scale)
            q_bias = xp.rint(lower(self.bias).astype(xp.float64) / unit).astype(xp.int32)
            self.bias = None
            self.register_buffer("bias", q_bias)
        check_accumulator(self.name, self.integers(), self.bias, self.input)

    def forward(self, x, into=None):
        acc = self.sums(self.taken(x), self.input)
        if self.bias is not None:
            acc += self.per_output(self.bias, acc.ndim)
        unit = self.per_output(self.weight_scale.astype(xp.float64) * float(self.input_scale), acc.ndim)
        return self.given(acc, unit, into, self.dtype)


class IntegerAvgPool2d(_FixedInput, Module):
    """The mean of each window of integers; forward as Integer's."""

    def __init__(self, name, layer, input_params):
        super().__init__()
        self.name = name or "the model"
        self.kernel = per_axis("AvgPool2d", "kernel_size", layer.kernel_size, 2, 1)
        self.stride = self.kernel if layer.stride is None else per_axis("AvgPool2d", "stride", layer.stride, 2, 1)
        self.padding = per_axis("AvgPool2d", "padding", layer.padding, 2, 0)
        self.set_input(input_params)

    def forward(self, x, into=None):
        params = self.input
        q = padded(self.taken(x), self.padding, int(params.zero_point)).astype(xp.int64) - int(params.zero_point)
        counts = view(q, self.kernel, self.stride, (1, 1)).shape[2:4]
        acc = sum(part for _, part in shifts(q, counts, self.kernel, self.stride, (1, 1)))
        return self.given(acc, float(params.scale) / prod(self.kernel), into, x.dtype)

    @property
    def scheme(self):
        """For people: what is kept how."""
        return f"integer, a{self.input_bits}"

    def extra_repr(self):
        return f"{self.kernel}"


# ---------------------------------------------------------------- one after another

def _pool(layer, q, params):
    wide = padded(q, per_axis("MaxPool2d", "padding", layer.padding, 2, 0), params.qmin)
    return max_pool2d(wide, layer.kernel_size, layer.stride)


def _flat(layer, q, params):
    return q.reshape(len(q), prod(q.shape[1:]))


class Folded(Module):
    """Where a BatchNorm was that is part of the layer before it now: gives what it is given."""

    def __init__(self, axes=None):
        super().__init__()
        self.axes = axes        # that its input must have, where that tells whether it could be folded

    def forward(self, x):
        if self.axes is not None and len(x.shape) != self.axes:
            raise ValueError("a BatchNorm was folded into the Linear before it, which is right for inputs of (n, "
                             f"channels); this one has shape {tuple(x.shape)}: leave it as it is (fold=False)")
        return x


# Layers that do the same to integers as to real numbers, in whatever range: type -> (layer, q, params) -> q.
PASSING = {
    ReLU: lambda layer, q, params: xp.maximum(q, params.zero_point.astype(q.dtype)),
    MaxPool2d: _pool,
    Flatten: _flat,
    Reshape: lambda layer, q, params: q.reshape(len(q), *layer.shape),
    Dropout: lambda layer, q, params: q,
    Folded: lambda layer, q, params: layer(q),
}


def plain(layer):
    """Whether a call of the layer does what its class says, and nothing else."""
    return layer._hooks is None and "forward" not in vars(layer)


class IntegerSequential(Sequential):
    """Layers one after another, between which integers pass where both sides can: each is asked to give what the next
    one that multiplies wants; ReLU, maxima and reshapes in between work on the integers. forward as Integer's."""

    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def wants(self, into=None):
        """The QuantParams that an integer input must have, None where it must be real."""
        return self.goals(into)[0]

    def goals(self, into):
        """What is wanted before each layer, and after the last."""
        goals = [into]
        for layer in reversed(self._modules.values()):
            if isinstance(layer, IntegerSequential):
                goals.append(layer.wants(goals[-1]))
            elif isinstance(layer, _FixedInput):
                goals.append(layer.input)
            else:
                goals.append(goals[-1] if type(layer) in PASSING and plain(layer) else None)
        return goals[::-1]

    def forward(self, x, into=None):
        for layer, goal in zip(self, self.goals(into)[1:], strict=True):
            if isinstance(layer, (_FixedInput, IntegerSequential)):
                x = layer(x, into=goal)
            elif isinstance(x, QuantizedTensor):
                x = QuantizedTensor(PASSING[type(layer)](layer, x.values, x.params), x.params, x.dtype)
            else:
                x = layer(x)
        return x
