"""Who averages with whom: mixing matrices, for gossip.py.

    x_i ← Σ_j W(k)_ij x_j           W(k)_ij: with which weight rank i takes what rank j sends, at the k-th meeting

Rows that sum to 1 make of equal values equal values; columns that do keep the mean over the ranks. All weights being at
least 0, the distance from that mean never grows then: it shrinks by |λ₂|, the largest but one of W's eigenvalues.

    print(ring(4))                              ring of 4 ranks; spectral gap 0.667
                                                    x0 ← 0.333 x0 + 0.333 x1 + 0.333 x3
                                                    …
    graph           messages per rank           gap 1 - |λ₂| of N ranks
    ring            2                           2/3 (1 - cos 2π/N), about 13/N²
    torus           4                           2/5 (1 - cos 2π/m), m the longer side (of 3 or more)
    exponential     ⌈log₂ N⌉                    2/(1 + ⌈log₂ N⌉), for odd N more
    one-peer        1                           1 where N is a power of two: after log₂ N meetings all have the mean
    complete        N - 1                       1

Sources: Xiao, Boyd 2004, "Fast linear iterations for distributed averaging" (weights by degrees, named after
Metropolis); Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training".
"""

import hashlib
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from ...backend import whole

TOLERANCE = 1e-12       # of sums of weights, which are rounded
APART = 1e-9            # a gap below is none


@dataclass(frozen=True, eq=False)
class Topology:
    """Mixing matrices that take turns.

    name      in words
    matrices  W(0), W(1), …, each (N, N), at least 0, whose rows and columns sum to 1; after the last comes the first

    size, period  N, and how many matrices there are
    gap           spectral_gap, per meeting

    ValueError for other matrices, and for those by which some ranks never hear of others. print shows who takes what.
    """

    name: str
    matrices: tuple
    size: int = field(init=False)
    gap: float = field(init=False)

    def __post_init__(self):
        matrices = tuple(np.array(matrix, np.float64) for matrix in self.matrices)
        if not matrices or any(m.ndim != 2 or m.shape != (len(matrices[0]),) * 2 or not m.size for m in matrices):
            raise ValueError(f"{self.name}: matrices of shapes {', '.join(str(m.shape) for m in matrices) or 'none'}; "
                             "they must be (N, N), all of one N of at least 1")
        for k, m in enumerate(matrices):
            _check(f"{self.name}: W({k})", m)
            m.flags.writeable = False
        object.__setattr__(self, "matrices", matrices)
        object.__setattr__(self, "size", len(matrices[0]))
        object.__setattr__(self, "gap", spectral_gap(matrices))
        if self.gap < APART:
            raise ValueError(f"{self.name}: by these matrices some ranks never come nearer to others (spectral gap 0): "
                             "connect them, and let each keep a share of its own values")

    @property
    def period(self):
        return len(self.matrices)

    def takes(self, k, rank):
        """[(rank j, weight)] of what a rank takes of others at meeting k."""
        return self._others(self.matrices[k % self.period][rank], rank)

    def sends(self, k, rank):
        """[rank i] of those that a rank sends to at meeting k."""
        return [i for i, _ in self._others(self.matrices[k % self.period][:, rank], rank)]

    def _others(self, weights, rank):
        return [(j, w) for j, w in enumerate(weights.tolist()) if w and j != rank]

    def __repr__(self):
        """Equal for equal matrices only."""
        digest = hashlib.sha256(np.stack(self.matrices).tobytes()).hexdigest()[:8]
        return f"{self.name} of {self.size} rank{'s' * (self.size > 1)} ({digest})"

    def __str__(self):
        turns = f", {self.period} matrices in turns" if self.period > 1 else ""
        lines = [f"{self.name} of {self.size} rank{'s' * (self.size > 1)}{turns}; spectral gap {self.gap:.3g}"]
        for k, matrix in enumerate(self.matrices):
            lines += [f"  W({k})"] * (self.period > 1)
            lines += [f"    x{i} ← " + " + ".join(f"{w:.3g} x{j}" for j, w in enumerate(row) if w)
                      for i, row in enumerate(matrix.tolist())]
        return "\n".join(lines)


def spectral_gap(matrices):
    """1 - |λ₂|, float, of what matrices (N, N) that take turns do per meeting: of one, of its largest eigenvalue but
    the 1; of several, of the geometric mean over a turn. 1 for N = 1."""
    turn = reduce(lambda done, matrix: matrix @ done, matrices)
    second = np.abs(np.linalg.eigvals(turn - 1 / len(turn))).max()      # where λ₁ = 1 was, 0 is
    return float(1 - second ** (1 / len(matrices)))


def _check(what, matrix):
    if not (matrix >= 0).all() or not np.isfinite(matrix).all():
        raise ValueError(f"{what} has weights from {matrix.min():g} to {matrix.max():g}: they must be at least 0, and "
                         "finite")
    for axis, of, why in ((1, "row", "what a rank has then must be a mean"),
                          (0, "column", "or the mean over the ranks would move")):
        sums = matrix.sum(axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(f"{what}: {of} {worst} sums to {sums[worst]:g}, and must to 1: {why}")


# ---------------------------------------------------------------- graphs

def ring(n):
    """Each rank and its two neighbours, by thirds; two ranks by halves."""
    return Topology("ring", [_shifts(n, (1, -1))])


def complete(n):
    """All with all: after a meeting each has the mean."""
    n = _ranks(n)
    return Topology("complete graph", [_shifts(n, range(n))])


def exponential(n):
    """Static exponential graph: rank i sends to i + 1, i + 2, i + 4 … (mod n), all below i + n."""
    n = _ranks(n)
    return Topology("exponential graph", [_shifts(n, [2 ** j for j in range((n - 1).bit_length())])])


def one_peer(n):
    """One-peer exponential graph: at meeting k rank i sends to i + 2^(k mod ⌈log₂ n⌉), and has the mean of two then."""
    n = _ranks(n)
    return Topology("one-peer graph", [_shifts(n, (2 ** j,)) for j in range((n - 1).bit_length())] or [np.ones((1, 1))])


def torus(rows, columns):
    """A grid of rows × columns whose edges meet: each rank and those above, below, left and right of it."""
    rows, columns = whole("rows", rows), whole("columns", columns)
    place = np.arange(max(rows, 0) * max(columns, 0)).reshape(max(rows, 0), max(columns, 0))
    edges = [(a, b) for axis in (0, 1) for a, b in zip(place.flat, np.roll(place, -1, axis).flat, strict=True)
             if a != b]
    return metropolis(place.size, edges, f"{rows} × {columns} torus")


def metropolis(n, edges, name="graph"):
    """Any undirected graph of edges (i, j): two neighbours take 1/(1 + the larger of their degrees) of each other, and
    each keeps the rest of itself."""
    n = whole("ranks", n)
    matrix = np.zeros((n, n))
    for i, j in edges:
        if not (0 <= i < n and 0 <= j < n and i != j):
            raise ValueError(f"{name}: edge {i, j} isn't one of two of the ranks 0 to {n - 1}")
        matrix[i, j] = matrix[j, i] = 1
    degrees = matrix.sum(1)
    matrix /= 1 + np.maximum.outer(degrees, degrees)
    return Topology(name, [matrix + np.diag(1 - matrix.sum(1))])


def _ranks(n):
    """A number of ranks, as an int."""
    if (n := whole("ranks", n)) < 1:
        raise ValueError(f"a topology of {n} ranks: it has at least 1")
    return n


def _shifts(n, ahead):
    """The matrix by which each rank sends to those that are so far ahead of it, all with one weight."""
    n = _ranks(n)
    places = sorted({0, *(shift % n for shift in ahead)})
    return sum(np.roll(np.eye(n), shift, axis=0) for shift in places) / len(places)
