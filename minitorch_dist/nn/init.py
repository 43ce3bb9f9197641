"""Initial values, as raw arrays. They come from the default random stream (backend.manual_seed), drawn on the host:
every rank and every device gets the same.

Weights are (out, in, …); fan_in = in · receptive field, fan_out = out · receptive field.
Sources: Glorot & Bengio 2010 (Xavier); He et al. 2015 (He, "Kaiming" in torch).
"""

import math

from ..backend import as_dtype, next_stream, to, xp
from ..torch_names import of_module
from .absent import building

__getattr__ = of_module(__name__)


def fans(shape):
    """(fan_in, fan_out) of a weight of shape (out, in, *kernel)."""
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(f"a weight of shape {tuple(shape)} has no fan-in and fan-out: it needs two axes, (out, in, …),"
                         " of 1 or more")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def drawn(shape, dtype, device, draw):
    """What draw(stream) gives; inside without_values something of the shape, without memory."""
    dtype = as_dtype(dtype)
    if building.without_values:
        return xp.broadcast_to(xp.zeros((), dtype), shape)
    return to(draw(next_stream()).astype(dtype), device)


def uniform(shape, bound, dtype=xp.float32, device="cpu"):
    """U(-bound, bound)."""
    return drawn(shape, dtype, device, lambda stream: stream.uniform(-bound, bound, shape))


def normal(shape, std, dtype=xp.float32, device="cpu"):
    """N(0, std²)."""
    return drawn(shape, dtype, device, lambda stream: stream.standard_normal(shape) * std)


def he_normal(shape, dtype=xp.float32, device="cpu"):
    """N(0, 2/fan_in): keeps the variance of activations through ReLU layers."""
    return normal(shape, math.sqrt(2 / fans(shape)[0]), dtype, device)


def he_uniform(shape, dtype=xp.float32, device="cpu"):
    """U with variance 2/fan_in."""
    return uniform(shape, math.sqrt(6 / fans(shape)[0]), dtype, device)


def xavier_normal(shape, dtype=xp.float32, device="cpu"):
    """N(0, 2/(fan_in + fan_out)): keeps the variance both ways through linear or tanh layers."""
    return normal(shape, math.sqrt(2 / sum(fans(shape))), dtype, device)


def xavier_uniform(shape, dtype=xp.float32, device="cpu"):
    """U with variance 2/(fan_in + fan_out)."""
    return uniform(shape, math.sqrt(6 / sum(fans(shape))), dtype, device)


def torch_linear(shape, dtype=xp.float32, device="cpu"):
    """U(±1/√fan_in): what torch.nn.Linear starts from."""
    return uniform(shape, 1 / math.sqrt(fans(shape)[0]), dtype, device)
