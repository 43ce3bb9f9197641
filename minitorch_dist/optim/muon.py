"""Muon: steps along the momentum, with the same length in all of its directions.

    b = momentum · b + g          u = g + momentum · b          p -= lr · orthogonalized(u)

    u = U S Vᵀ     S: 9.1  2.0  0.3  0.04            a few directions have nearly all of a gradient's length
      → U Vᵀ          1    1    1    1               and get, under Adam and SGD, nearly all of the step's

U Vᵀ comes without a singular value decomposition, by products alone: X → a·X + b·(X Xᵀ)X + c·(X Xᵀ)²X leaves U and V as
they are and maps each singular value s to a·s + b·s³ + c·s⁵, which five times over brings [0.003, 1] into [0.68, 1.21].
Of a matrix that is cut over ranks no rank can do that with its part: matrices.py.

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
scalable for LLM training" (adjust_lr_fn="match_rms_adamw").
"""

import math

from ..backend import is_whole, module_of
from .matrices import OfMatrices
from .settings import AT_LEAST_0, MORE_THAN_0

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUST = {      # name -> what lr is multiplied by, for a matrix of so many rows and columns
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(OfMatrices):
    """The optimizer above, of matrices; torch's settings and defaults. Parameters, ranks and errors as in OfMatrices;
    meant for hidden layers: give embeddings, the output layer, biases and norms to AdamW.

    weight_decay  decoupled: p shrinks by lr · weight_decay before the step
    nesterov      False: u = b
    ns_coefficients, ns_steps, eps   of orthogonalized; eps is for this b: torch's is (1 - momentum) times it. Three
                  numbers, or three for each step, as polar_express() gives
    adjust_lr_fn  what lr is multiplied by: None or "original", √max(1, out/in); "match_rms_adamw", 0.2·√max(out, in),
                  with which steps are as long as AdamW's usually are, and its lr and weight decay fit

    Products are made in the parameters' dtype, at least float32 (torch's: in bfloat16). 8 bits for its state are
    refused: in a step each direction has the same length, that of rounding too.
    """

    state_names = ("momentum_buffer",)
    rules = {"lr": AT_LEAST_0, "weight_decay": AT_LEAST_0, "momentum": AT_LEAST_0, "eps": MORE_THAN_0,
             "ns_coefficients": (lambda values, group: all(len(each) == 3 for each in triples(values)),
                                 "three numbers, or three for each step"),
             "ns_steps": (lambda n, group: is_whole(n) and 1 <= n < 100, "a whole number from 1 to 99"),
             "adjust_lr_fn": (lambda name, group: name in (None, *ADJUST), f"None, {' or '.join(ADJUST)}")}

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=COEFFICIENTS,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None):
        self.take(params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                  ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)

    def take(self, params, **settings):
        coefficients = settings["ns_coefficients"]
        if hasattr(coefficients, "__iter__"):       # what isn't its rule refuses
            settings["ns_coefficients"] = tuple(coefficients)
        super().take(params, **settings)

    def direction(self, g, state, group):
        b = state["momentum_buffer"]
        b *= group["momentum"]
        b += g
        return g + group["momentum"] * b if group["nesterov"] else b.copy()

    def made(self, piece, state, u):
        settings = piece.group["ns_coefficients"], piece.group["ns_steps"], piece.group["eps"]
        if piece.lines is None:
            return orthogonalized(u.reshape(piece.shape), *settings).reshape(-1)
        return piece.lines.alone(orthogonalized(piece.lines.of(u), *settings)).reshape(-1)

    def move(self, piece, o):
        piece.move(o, adjusted(piece.shape, piece.group["adjust_lr_fn"]), type(self).__name__)


def adjusted(shape, name):
    """What lr is multiplied by, by a name in ADJUST, or None: for a matrix (out, in), or a stack (n, in, out)."""
    rows, columns = shape if len(shape) == 2 else shape[:0:-1]
    return ADJUST[name or "original"](rows, max(columns, 1))


def orthogonalized(u, coefficients=COEFFICIENTS, steps=5, eps=1e-7):
    """About U Vᵀ of u = U S Vᵀ: (…, rows, columns), floating, at least 32 bits -> the same. With the defaults singular
    values from 0.003 of u's norm come out between 0.68 and 1.21, smaller ones as at most 485 times their share of it.

    coefficients  (a, b, c), or one such for each step, the last one for all that follow
    eps           the least norm that u is divided by: zeros stay zeros
    """
    each = triples(coefficients)
    arrays, wide = module_of(u), u.shape[-2] <= u.shape[-1]     # of X Xᵀ and XᵀX the smaller
    # Row by row, as products come out: sums of arrays in two orders would take as long as the products.
    x = u if wide else u.swapaxes(-1, -2).copy()
    x = x / arrays.maximum(arrays.sqrt((x * x).sum(axis=(-1, -2), keepdims=True)), eps)
    for k in range(steps):
        a, b, c = each[min(k, len(each) - 1)]
        square = x @ x.swapaxes(-1, -2)
        more = (b * square + c * (square @ square)) @ x
        x *= a
        x += more
    return arrays.ascontiguousarray(x if wide else x.swapaxes(-1, -2))


def triples(coefficients):
    """[(a, b, c)], by step, of one or of several."""
    return list(coefficients) if len(coefficients) and isinstance(coefficients[0], tuple) else [coefficients]
