"""Dion2: Muon on a part of each matrix, which is sent and made orthogonal; the rest waits in the momentum.

    M += G                                      |M| by rows:   ▇▁▃▅▁▂      fraction 1/3
    K = the rows of the largest Σ|M|                           ▇  ▅        O = orthogonalized(M[K])
    p[K] -= lr · O       M[K] *= momentum                      ▆▁▃▅▁▂      what wasn't sent stays whole, and grows

A row that is left out loses nothing: its gradients add up until it is among the largest, and the part of it that a step
has taken is taken off (error feedback). Of a matrix that is cut over ranks only K comes to the owner and goes back:
fraction times Muon's bytes, and of its products, which cost rows² · columns, fraction² as many.

Which rows are K all ranks know by their means of |M|, from whole numbers (means.py): 12 bytes for each row, and the
same choice in any cut. Where a matrix has fewer columns than rows, columns are chosen.

Source: Ahn et al. 2025, "Dion2: a simple method to shrink matrix in Muon", with a choice among all rows where theirs is
among each rank's.
"""

from typing import NamedTuple

from ..backend import argsort, module_of, xp, zeros_like
from .means import Matrix, means
from .muon import COEFFICIENTS, Muon
from .settings import FRACTION, share


class Dion2(Muon):
    """The optimizer above, of matrices, or stacks of them: Muon's settings, parameters, ranks and errors.

    fraction  of the rows, or columns, that a step is made of: more than 0, at most 1. At 1 it is Muon with
              nesterov=False
    momentum  what is left of a row's momentum after its step
    """

    rules = Muon.rules | {"fraction": FRACTION}

    def __init__(self, params, lr=1e-2, fraction=0.25, momentum=0.95, weight_decay=0.01, ns_coefficients=COEFFICIENTS,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None):
        self.take(params, lr=lr, fraction=fraction, momentum=momentum, weight_decay=weight_decay,
                  ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)

    def update_all(self):
        moved = []      # (Matrix, this rank's momentum, its id, its group)
        for flat, state, slot in self._places():
            segment = slot.segment
            if segment.tensor.grad is None:
                continue
            part, mine = slice(segment.start, segment.stop), slot.state(state)
            b = mine["momentum_buffer"]
            b += self.divided(flat.grads[part], b)
            moved.append((Matrix(segment.tensor), b, id(segment.tensor), slot.group))
        shorter = ["rows" if rows <= columns else "columns" for _, rows, columns in (m.whole for m, *_ in moved)]
        sums = means([m for m, *_ in moved], lambda k, tile: moved[k][1][tile], 1, [(side,) for side in shorter])
        chosen = {key: largest_lines(matrix.whole, side, of_each, group["fraction"])
                  for (matrix, _, key, group), side, (of_each,) in zip(moved, shorter, sums, strict=True)}
        for *_, piece, o in self.steps(chosen):
            self.move(piece, o)
        for matrix, b, key, group in moved:
            matrix.multiply(b, chosen[key].of_each(1.0, group["momentum"], b.dtype))

    def direction(self, g, state, group):
        return state["momentum_buffer"]     # which has moved before lines were chosen


class Lines(NamedTuple):
    """Some rows, or columns, of each of a stack of n matrices.

    whole    (n, rows, columns)
    rows     whether they are rows
    indices  (n, k): which, ascending
    """

    whole: tuple
    rows: bool
    indices: object

    @property
    def shape(self):
        """(n, k, how long a line is)"""
        return *self.indices.shape, self.whole[2 if self.rows else 1]

    def of(self, x):
        """These lines of all elements, 1-d: as rows, `shape`."""
        return self._as_rows(x)[self._places(x)]

    def alone(self, lines):
        """The whole stack with zeros elsewhere."""
        found = zeros_like(lines, self.whole)
        self._as_rows(found)[self._places(lines)] = lines
        return found

    def mask(self):
        """Which elements are in one of them: bool, `whole`."""
        return module_of(self.indices).broadcast_to(self.of_each(False, True, bool), self.whole)

    def of_each(self, others, these, dtype):
        """A number per line, (n, rows, 1) or (n, 1, columns)."""
        n, rows, columns = self.whole
        found = zeros_like(self.indices, (n, rows if self.rows else columns), dtype)
        found[...] = others
        found[self._places(found)] = these
        return found[:, :, None] if self.rows else found[:, None]

    def _as_rows(self, x):
        x = x.reshape(self.whole)
        return x if self.rows else x.swapaxes(-1, -2)

    def _places(self, like):
        return module_of(like).arange(self.whole[0])[:, None], self.indices


def largest_lines(whole, side, of_each, fraction):
    """The Lines of (n, rows, columns), rows or columns, with the largest numbers of each. Of equals the first; what is
    NaN before all, so that a step shows it."""
    of_each = of_each.reshape(whole[0], whole[1 if side == "rows" else 2])
    count = share(fraction, of_each.shape[1])
    least_first = argsort(-xp.where(xp.isnan(of_each), xp.inf, of_each), axis=1)
    return Lines(whole, side == "rows", xp.sort(least_first[:, :count], axis=1))
