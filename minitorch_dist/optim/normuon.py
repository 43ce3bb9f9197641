"""NorMuon: Muon, in whose steps all neurons move equally far.

    O = orthogonalized(momentum)                  lengths of O's rows     ▂▇▁▃▂▅▁▂     all directions are alike in it,
    v = β₂ v + (1-β₂) · mean of each row's O²                                          the neurons aren't
    Ô = O / √v, row by row                                      of Ô's    ▄▄▃▄▄▅▃▄
    p -= lr · 0.2 Ô / RMS(Ô)

v is a number per neuron, an output of the layer: of a row, or of a stack's columns. It is nearly all that this adds to
Muon, in memory, and on the wire 12 bytes for each of them: the means are of whole matrices (means.py), the same
in any cut, also in one through the rows. Every rank that has a piece of a matrix, or a part, has all of v.

Source: Li et al. 2025, "NorMuon: making Muon more efficient and scalable", algorithm 1.
"""

from ..backend import xp
from .adafactor import lerp
from .matrices import OfMatrices
from .means import Matrix, means, whole_shape
from .muon import COEFFICIENTS, Muon

EPS = 1e-8      # beside √v
RMS = 0.2       # of a step, over lr: about AdamW's


class NorMuon(Muon):
    """The optimizer above, of matrices, or stacks of them: Muon's settings, parameters, ranks and errors. Steps have an
    RMS of 0.2 · lr, so AdamW's rates and weight decay fit.

    beta2  of v's moving average; 0: all of a step's rows have one length

    State besides Muon's: neuron_var, (rows, 1), of a stack (n, 1, columns), float32 or float64.
    """

    rules = {name: rule for name, rule in Muon.rules.items() if name != "adjust_lr_fn"} | {
        "beta2": (lambda value, group: 0 <= value < 1, "in [0, 1)")}

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, beta2=0.95, nesterov=False,
                 ns_coefficients=COEFFICIENTS, eps=1e-7, ns_steps=5):
        self.take(params, lr=lr, weight_decay=weight_decay, momentum=momentum, beta2=beta2, nesterov=nesterov,
                  ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps)

    move = OfMatrices.move      # of a length of its own

    def kinds_of_state(self, tensor):
        names, _ = super().kinds_of_state(tensor)
        *stack, rows, columns = whole_shape(tensor)
        return names, {"neuron_var": (*stack, 1, columns) if stack else (rows, 1)}

    def update_all(self):
        found = [(Matrix(tensor), state["neuron_var"], piece, o) for tensor, state, piece, o in self.steps()]
        neurons = [("rows" if len(piece.shape) == 2 else "columns",) for *_, piece, _ in found]
        squares = means([matrix for matrix, *_ in found], lambda k, tile: found[k][-1][tile], 2, neurons)
        for (matrix, v, piece, o), (mean,) in zip(found, squares, strict=True):
            v = v.reshape(mean.shape)
            lerp(v, mean.astype(v.dtype), 1 - piece.group["beta2"])
            matrix.multiply(o, balanced(mean, v).astype(o.dtype))
            self.move(piece, o)


def balanced(mean, v):
    """What O's rows, or columns, are to be multiplied by, float64: by 1/√v, and all of a matrix by what brings its RMS
    to 0.2. mean: of their O². Zeros stay zeros."""
    each = 1 / (xp.sqrt(v.astype(xp.float64)) + EPS)
    square = (mean * each * each).sum(axis=(1, 2), keepdims=True) / max(mean.shape[1] * mean.shape[2], 1)
    return RMS / xp.sqrt(xp.where(square > 0, square, 1.0)) * each
