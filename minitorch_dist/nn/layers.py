"""Layers."""

import math

from ..autodiff import ops
from ..autodiff.ops.elementwise import floats
from ..backend import number, whole, xp
from . import init
from .loss import linear_cross_entropy
from .module import Module, Parameter


class Linear(Module):
    """y = x Wᵀ + b: (…, in_features) -> (…, out_features).

    weight  (out_features, in_features), from `weight_init(shape, dtype)`; default torch's U(±1/√in)
    bias    (out_features), U(±1/√in) as in torch; zeros where weight_init is given; None with bias=False
    """

    def __init__(self, in_features, out_features, bias=True, dtype=xp.float32, weight_init=None):
        super().__init__()
        in_features, out_features = whole("in_features", in_features), whole("out_features", out_features)
        shape = (out_features, in_features)
        self.weight = Parameter((weight_init or init.torch_linear)(shape, dtype))
        if bias:
            self.bias = Parameter(xp.zeros(out_features, dtype) if weight_init
                                  else init.uniform((out_features,), 1 / math.sqrt(in_features), dtype))
        else:
            self.bias = None

    def forward(self, x):
        return ops.linear(x, self.weight, self.bias)

    def losses(self, x, targets, z_loss=0.0):
        """linear_cross_entropy (…) of y as logits, which aren't made: (…, in_features), integers (…). Without a bias:
        ValueError with one."""
        if self.bias is not None:
            raise ValueError("Linear: losses are of logits x Wᵀ, and this one has a bias: take the loss of its result")
        return linear_cross_entropy(x, self.weight, targets, "none", z_loss=z_loss)

    def extra_repr(self):
        out, inside = self.weight.shape
        return f"{inside}, {out}" + ("" if self.bias is not None else ", bias=False")


class Identity(Module):
    """x: stands where a layer may be left out."""

    def forward(self, x):
        return x


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x):
        return ops.relu(x)


class Tanh(Module):
    """tanh x."""

    def forward(self, x):
        return ops.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x):
        return ops.sigmoid(x)


class LeakyReLU(Module):
    """x where x > 0, else slope · x."""

    def __init__(self, negative_slope=0.01):
        super().__init__()
        self.negative_slope = number(negative_slope)

    def forward(self, x):
        x = floats(x)       # there is no -x of numbers without sign
        return ops.relu(x) - self.negative_slope * ops.relu(-x)

    def extra_repr(self):
        return f"{self.negative_slope}"


class GELU(Module):
    """x·Φ(x); approximate="tanh" is several times faster. See mt.gelu."""

    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        return ops.gelu(x, self.approximate)

    def extra_repr(self):
        return "" if self.approximate == "none" else f"approximate={self.approximate!r}"


class SwiGLU(Module):
    """silu(gate) · up of two halves side by side: (…, 2 · features), the gate's first -> (…, features). See mt.swiglu.
    ValueError where the last axis is odd."""

    def forward(self, x):
        features = x.shape[-1] if x.shape else 1
        if features % 2:
            raise ValueError(f"SwiGLU: {features} features are no two halves, a gate and what passes it")
        return ops.swiglu(*ops.chunk(x, 2, -1))


class Flatten(Module):
    """(n, …) -> (n, product of the rest)."""

    def forward(self, x):
        if not x.shape:
            raise ValueError("Flatten: x has no axis; it must be (n, …)")
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class Dropout(Module):
    """In training, zero each element with probability p and scale the rest by 1/(1-p); in evaluation, nothing.

    Inside backend.random_scope the mask depends on the sample's place in the global batch, not on the rank.
    Source: Srivastava et al. 2014.
    """

    def __init__(self, p=0.5):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout: p is {p}; a probability to drop must be in [0, 1)")
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        return ops.dropout(x, self.p)

    def extra_repr(self):
        return f"p={self.p}"
