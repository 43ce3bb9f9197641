"""Differentiation: one op table, read forwards (dual numbers) and backwards (the tape)."""

from . import methods, ops
from .autocast import autocast, autocast_table
from .check import GradientError, check_grads
from .checkpointing import checkpoint
from .create import arange, eye, full, ones, ones_like, rand, randn, zeros, zeros_like
from .custom import custom_jvp, custom_vjp, stop_gradient
from .forward import Dual
from .jacobian import hessian, hvp, jacfwd, jacrev
from .linear import linear_transpose, linearize
from .modes import detect_anomaly, enable_grad, is_grad_enabled, no_grad, saved_tensors_hooks
from .primitive import LINEAR, OPS, LinearOp, Primitive
from .reverse import at_end_of_backward
from .tensor import Tensor, from_numpy, tensor
from .transforms import grad, jvp, value_and_grad, vjp
from .writes import wrote

__all__ = [
    "LINEAR", "OPS", "Dual", "GradientError", "LinearOp", "Primitive", "Tensor", "arange", "at_end_of_backward",
    "autocast", "autocast_table", "check_grads", "checkpoint", "custom_jvp", "custom_vjp", "detect_anomaly",
    "enable_grad", "eye", "from_numpy", "full", "grad", "hessian", "hvp", "is_grad_enabled", "jacfwd", "jacrev", "jvp",
    "linear_transpose", "linearize", "methods", "no_grad", "ones", "ones_like", "ops", "rand", "randn",
    "saved_tensors_hooks", "stop_gradient", "tensor", "value_and_grad", "vjp", "wrote", "zeros", "zeros_like",
]
