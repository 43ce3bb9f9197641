"""Differentiation: one op table, read forwards (dual numbers) and backwards (the tape)."""

from . import methods, ops
from .check import GradientError, check_grads
from .forward import Dual
from .primitive import LINEAR, OPS, LinearOp, Primitive
from .reverse import at_end_of_backward, is_grad_enabled, no_grad
from .tensor import Tensor, from_numpy, tensor
from .transforms import grad, jvp, value_and_grad, vjp
from .writes import wrote

__all__ = ["LINEAR", "OPS", "Dual", "GradientError", "LinearOp", "Primitive", "Tensor", "at_end_of_backward",
           "check_grads", "from_numpy", "grad", "is_grad_enabled", "jvp", "methods", "no_grad", "ops", "tensor",
           "value_and_grad", "vjp", "wrote"]
