"""Optimizers on paper: what each holds of a parameter, and what it sends beside the gradients. OPTIMIZERS is the table.

    of each element     numbers, float32 or of 8 bits: Adam's two, Lion's one
    of a matrix         a number per row or column instead, or beside (Adafactor, NorMuon), or directions (Dion)

    sent    norms       Σ p², Σ u² of whole parameters, per 4,096 elements          LAMB, Adafactor
            means       of whole rows and columns                                   Adafactor, NorMuon, Dion2
            together    matrices to their owners, steps back: two all-to-alls       Muon, NorMuon, Dion2
            unsummed    P and R, in the place of a matrix's gradient                Dion

Optimizers of hidden matrices have the blocks', of two axes, as in examples/gpt.py; AdamW has the rest, stacks of
experts, too. Counts are those of optim/ and of the ledger; which rank owns a matrix, optim/matrices.py says itself.
"""

from collections import Counter, defaultdict
from math import prod
from typing import NamedTuple

from ..backend import xp
from ..flat import ALIGN, BLOCK, round_up
from ..optim.clip import SUMS
from ..optim.matrices import owners, work
from ..optim.packed import BLOCK as SHARED_SCALE
from ..optim.settings import share
from .sent import Collective, copy_axis

NUMBER = {32: 4, 8: 1 + 4 / SHARED_SCALE}       # state_bits -> bytes of one, with its part of a scale
EXACT = 4       # bytes of what is updated, and made orthogonal, in either precision
MEANS = 4, 8    # of a row or column: the largest's exponent, the sum (optim/means.py)
ROUNDS = 5      # of Newton and Schulz: Muon's ns_steps

# Of (rows, columns, fraction) of a matrix.
NONE = lambda rows, columns, fraction: 0
ROWS = lambda rows, columns, fraction: rows
BOTH = lambda rows, columns, fraction: rows + columns
LESSER = lambda rows, columns, fraction: min(rows, columns)
DIRECTIONS = lambda rows, columns, fraction: share(fraction, min(rows, columns)) * columns      # Q
ALL = lambda rows, columns, fraction: (rows, columns)


def lines(rows, columns, fraction):
    """The shape of the rows, or columns, that a step of Dion2 is made of."""
    return share(fraction, min(rows, columns)), max(rows, columns)


class Matrices(NamedTuple):
    """What an optimizer makes of matrices otherwise than element by element.

    hidden    which: the blocks', of two axes; False: all of two axes or more, whose last two a matrix has
    elements  numbers per element
    vectors   numbers beside these, which every rank that has a piece of the matrix has all of
    means     of how many rows and columns ranks add up means
    together  the shape of what comes together on a rank, and is made orthogonal there; None: nothing does
    fraction  of lines or directions that a step is made of, if nobody says another one; None: there is none
    unsummed  whether gradients stay each rank's own
    """

    hidden: bool = True
    elements: int = 1
    vectors: object = NONE
    means: object = NONE
    together: object = None
    fraction: float | None = None
    unsummed: bool = False


class Optimizer(NamedTuple):
    """text: its name, for people; elements: numbers per element of what isn't its `matrices`; eight_bits: whether they
    may have 8 bits; norms: whether it needs those of whole parameters."""

    text: str
    elements: int
    eight_bits: bool = False
    norms: bool = False
    matrices: Matrices | None = None


OPTIMIZERS = {
    "adam": Optimizer("Adam", 2, True), "adamw": Optimizer("AdamW", 2, True),
    "sgd": Optimizer("SGD", 1, True),       # it has room for a momentum of 0, too
    "lion": Optimizer("Lion", 1, True), "lamb": Optimizer("LAMB", 2, True, norms=True),
    "schedule-free": Optimizer("schedule-free AdamW", 2),
    "adafactor": Optimizer("Adafactor", 1, norms=True, matrices=Matrices(False, 0, BOTH, means=BOTH)),
    "muon": Optimizer("Muon", 2, matrices=Matrices(together=ALL)),
    "normuon": Optimizer("NorMuon", 2, matrices=Matrices(vectors=ROWS, means=ROWS, together=ALL)),
    "dion2": Optimizer("Dion2", 2, matrices=Matrices(means=LESSER, together=lines, fraction=0.25)),
    "dion": Optimizer("Dion", 2, matrices=Matrices(vectors=DIRECTIONS, fraction=0.25, unsummed=True)),
}


def is_matrix(job, p):
    """Whether a Parameter is one of the optimizer's matrices."""
    kind = OPTIMIZERS[job.optimizer].matrices
    if kind is None or len(p.shape) < 2:
        return False
    return not kind.hidden or len(p.shape) == 2 and p.name.startswith(("attention.", "mlp."))


def is_unsummed(job, p):
    """Whether its gradient stays each rank's own."""
    return is_matrix(job, p) and OPTIMIZERS[job.optimizer].matrices.unsummed


def takes_pieces(name):
    """Whether an optimizer takes what ZeRO and tensor parallelism leave of matrices."""
    kind = OPTIMIZERS.get(name)
    return kind is None or kind.matrices is None or not kind.matrices.unsummed


def per_element(job, matrix=False):
    """Bytes of state per element, a master copy of one of 16 bits included: of its matrices, or of all else."""
    kind, master = OPTIMIZERS[job.optimizer], EXACT * (job.precision == "mixed")
    return master + (EXACT * kind.matrices.elements if matrix else NUMBER[job.state_bits] * kind.elements)


def of_each(job, function, shape):
    """What a function of (rows, columns, fraction) says of all matrices of a stack, together."""
    fraction = job.fraction or OPTIMIZERS[job.optimizer].matrices.fraction
    return prod(shape[:-2]) * function(*shape[-2:], fraction)


# ---------------------------------------------------------------- held

def held_by_rank(job, pieces):
    """Bytes of state of each of the ranks that share a copy, an array: their parts of the parameters are other ones, of
    which not all take as much."""
    found = xp.zeros(job.shards if job.stage else 1)
    alike = Counter((piece.elements, piece.ranks if job.stage else 1, tuple(
        (p.shape, p.whole, is_matrix(job, p)) for p in piece.members)) for piece in pieces if piece.trained)
    for (elements, ranks, members), count in alike.items():
        kinds = {matrix for *_, matrix in members}
        if len(kinds) == 1:     # the state is as long as what it is of, padding included
            found += count * per_element(job, *kinds) * elements / ranks
        else:
            for (_, _, matrix), at in zip(members, starts([shape for shape, *_ in members]), strict=True):
                found += count * per_element(job, matrix) * round_up(here(*at, elements // ranks, ranks), ALIGN)
        found += sum(count * EXACT * of_each(job, OPTIMIZERS[job.optimizer].matrices.vectors, whole)
                     for _, whole, matrix in members if matrix)
    return found


def starts(shapes):
    """[(start, stop)] of parameters in a unit, or a bucket."""
    found, at = [], 0
    for shape in shapes:
        found.append((at, at + prod(shape)))
        at = round_up(found[-1][1], ALIGN)
    return found


def here(start, stop, length, ranks):
    """How many of the elements start to stop each rank has, if each has so many."""
    first = length * xp.arange(ranks)
    return xp.clip(xp.minimum(first + length, stop) - xp.maximum(first, start), 0, None)


# ---------------------------------------------------------------- sent

class Cut(NamedTuple):
    """A Parameter in a unit of so many ranks, each of which has so many elements of it: from where on, and to where."""

    p: object
    start: int
    stop: int
    length: int
    ranks: int

    @property
    def divided(self):
        """Whether tensor parallelism has left a part of it."""
        return self.p.shape != self.p.whole

    def share_of(self, rank):
        """Which share of its elements a rank has."""
        first = rank * self.length
        return max(0, min(first + self.length, self.stop) - max(first, self.start)) / (self.stop - self.start)


def cuts(job, pieces):
    """[Cut] of all that is trained, in the order of the model, which optimizers go by."""
    found = []
    for piece in pieces:
        if piece.trained:
            ranks = piece.ranks if job.stage else 1
            found += [Cut(p, *at, piece.elements // ranks, ranks) for p, at in zip(
                piece.members, starts([p.shape for p in piece.members]), strict=True)]
    return sorted(found, key=lambda cut: cut.p.place)


def sent_by_optimizer(job, pieces):
    """[Collective] of a step."""
    kind = OPTIMIZERS[job.optimizer]
    if kind.matrices is None and not kind.norms:
        return []
    everything = cuts(job, pieces)
    found = norms(job, everything) if kind.norms else []
    if kind.matrices is not None:
        matrices = [cut for cut in everything if is_matrix(job, cut.p)]
        found += means(job, matrices, kind.matrices.means)
        if kind.matrices.together is not None:
            found += together(job, matrices)
        if kind.matrices.unsummed:
            found += thin_sums(job, matrices)
    return [each for each in (Collective(*what) for what in found) if each.ranks > 1 and each.nbytes]


def norms(job, everything):
    """Two numbers of each parameter: Σ of squares per block of 4,096 of its elements, each of which one rank knows; of
    blocks that two have parts of, per 16. Then those of tensor parallelism's parts."""
    blocks = sum(-(-(cut.stop - cut.start) // BLOCK) + SUMS * shared_blocks(cut) for cut in everything if cut.ranks > 1)
    parts = sum(cut.divided for cut in everything)
    return [(copy_axis(job), job.shards, "all_reduce", 8 * blocks, 2), ("tp", job.tp, "all_reduce", 16 * parts, 1)]


def shared_blocks(cut):
    """How many of a parameter's blocks two ranks have parts of."""
    ends = range(cut.start // cut.length + 1, -(-cut.stop // cut.length))
    inside = {(rank * cut.length - cut.start) // BLOCK for rank in ends if (rank * cut.length - cut.start) % BLOCK}
    return len(inside)


def means(job, matrices, lines):
    """Of their rows and columns, along the axes on which some of a matrix is elsewhere: largest, then sums."""
    along = {(copy_axis(job), job.shards): [cut for cut in matrices if cut.ranks > 1],
             ("tp", job.tp): [cut for cut in matrices if cut.divided]}
    return [(*axis, "all_reduce", nbytes * sum(of_each(job, lines, cut.p.whole) for cut in some), 1)
            for axis, some in along.items() for nbytes in MEANS]


def together(job, matrices):
    """Each matrix on its owner, and back: of fully_shard's pieces, and of tensor parallelism's parts. The mean over the
    ranks. Of lines of matrices: as if all ranks had equally many of them."""
    n, crossing, between = job.shards if job.stage else 1, 0, 0
    for group, owner in owned(job, matrices):
        for cut, rank in zip(group, owner, strict=True):
            size = prod(coming(job, cut))
            crossing += size / (job.tp if cut.divided else 1) * (1 - cut.share_of(rank)) if n > 1 else 0
            between += size / n / job.tp if cut.divided else 0
    return [(copy_axis(job), n, "all_to_all", EXACT * crossing / max(n - 1, 1), 2),
            ("tp", job.tp, "all_to_all", EXACT * between, 2)]


def coming(job, cut):
    """The shape of what comes together of a matrix."""
    kind = OPTIMIZERS[job.optimizer].matrices
    return kind.together(*cut.p.whole, job.fraction or kind.fraction)


def owned(job, matrices):
    """[([Cut], [rank of the unit that owns it])], of those that travel together."""
    n, groups = job.shards if job.stage else 1, defaultdict(list)
    for cut in matrices:
        groups[cut.divided].append(cut)
    # More ranks than matrices: each has one, or none.
    return [(group, owners([coming(job, cut) for cut in group], min(n, len(group)))) for group in groups.values()]


def thin_sums(job, matrices):
    """Dion's P, of all matrices, and R."""
    r = lambda rows, columns, fraction: share(fraction, min(rows, columns))
    sizes = [[side * of_each(job, r, cut.p.shape) for side in cut.p.shape] for cut in matrices]
    return [("dp", job.replicas, "all_reduce", EXACT * sum(side), 1) for side in zip(*sizes, strict=True)]


# ---------------------------------------------------------------- computed

def products(job, pieces):
    """FLOPs of the busiest rank's products of matrices in a step: rounds of Newton and Schulz of those that it owns, or
    Dion's of all, with their QR."""
    kind = OPTIMIZERS[job.optimizer].matrices
    if kind is None or not kind.hidden:
        return 0
    matrices = [cut for cut in cuts(job, pieces) if is_matrix(job, cut.p)]
    if kind.unsummed:
        return sum(of_each(job, of_dion, cut.p.shape) for cut in matrices)
    n = job.shards if job.stage else 1
    busy = xp.zeros((n, job.tp))
    for group, owner in owned(job, matrices):
        mine = defaultdict(list)
        for cut, rank in zip(group, owner, strict=True):
            mine[rank].append(coming(job, cut))
        for rank, shapes in mine.items():
            parts = owners(shapes, job.tp) if group[0].divided else [slice(None)] * len(shapes)
            for shape, part in zip(shapes, parts, strict=True):
                busy[rank, part] += 2 * ROUNDS * work(shape)
    return float(busy.max())


def of_dion(rows, columns, fraction):
    """B Q, Bᵀ P, P Rᵀ, P Qᵀ; and P orthonormal by reflections, as LAPACK counts: to R, and to Q."""
    r = share(fraction, min(rows, columns))
    return 8 * rows * columns * r + 4 * rows * r ** 2 - 4 * r ** 3 / 3
