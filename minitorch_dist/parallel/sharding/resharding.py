"""Which differentiable collective makes a move (moves.py).

    placement on an axis          forward                 backward
    Replicate → Shard             scatter_to              gather_from
    Shard     → Replicate         gather_from             scatter_to
    Partial   → Replicate         reduce_from             –
    Partial   → Shard             reduce_scatter          all_gather
    Shard     → another Shard     all_to_all              all_to_all
    Replicate → Copies            copy_to                 all-reduce
    Shard     → Copies            all_gather              reduce_scatter
    Replicate → Partial           rank 0 has it, zeros    –

Collectives know n equal parts, one after another: q0 k0 v0 q1 k1 v1. The dimension has q0 q1 k0 k1 v0 v1, and parts
that may be of unequal length: in between pieces change their order, and shorter parts are filled up with zeros.
"""

from math import prod

from ...autodiff.modes import is_grad_enabled
from ...autodiff.ops import astype, concatenate, pad, reshape, transpose
from ...autodiff.ops.shape import cut_sizes
from ...autodiff.primitive import TRACED, LinearOp, Primitive, bind
from ...backend import is_short, xp
from ..collectives import all_gather, all_to_all, copy_to, gather_from, reduce_from, reduce_scatter, scatter_to
from .layouts import Copies, Partial, Replicate, Shard
from .moves import moves
from .notes import pages

# As a sum, what is the same on all ranks stands on one of them. The sum's cotangent is on every rank, a copy that goes
# its own way, and all of them are x's: one value again.
_summand = LinearOp("summand", lambda t, comm: bind(_as_summand, (t,), (comm,)),
                    lambda c, comm: bind(_of_copies, (c,), (comm,)), fresh=False, listed=False)
_one = LinearOp("of_copies", lambda t, comm: bind(_of_copies, (t,), (comm,)),
                lambda c, comm: bind(_as_summand, (c,), (comm,)), fresh=False, listed=False)
_of_copies = Primitive("of_copies", lambda x, comm: x, params="comm", x=(_one, "comm"), listed=False)
_as_summand = Primitive("summand", lambda x, comm: x if comm.rank == 0 else xp.zeros_like(x), params="comm",
                        x=(_summand, "comm"), listed=False)


def _filled(x, cut):
    """A rank's part with zeros at its end: as long as the longest."""
    longest, dim = max(cut.lengths), cut.dim
    if x.shape[dim] == longest:
        return x
    return pad(x, [(0, longest - x.shape[dim] if i == dim else 0) for i in range(len(x.shape))])


def _own(x, cut, comm):
    """A rank's part without them."""
    length = cut.lengths[comm.rank]
    return x if x.shape[cut.dim] == length else x[(slice(None),) * cut.dim + (slice(length),)]


def _is_plain(cut):
    """Whether the ranks' parts are equal, and one after another in the dimension."""
    return len(set(cut.lengths)) == 1 and all(len(own) < 2 for own in cut.pieces) and sorted(cut.pieces) == cut.pieces


def _by_rank(x, cut):
    """What lies in the order of the dimension in that of the ranks: all parts, filled."""
    if _is_plain(cut):
        return x
    places = sorted(interval for own in cut.pieces for interval in own)
    piece = dict(zip(places, cut_sizes(x, [hi - lo for lo, hi in places], cut.dim), strict=True))
    return concatenate([_filled(concatenate([piece[interval] for interval in own], cut.dim), cut)
                        for own in cut.pieces], cut.dim)


def _by_place(x, cut):
    """Back: all parts, filled, as they lie in the dimension."""
    if _is_plain(cut):
        return x
    longest, sizes, places = max(cut.lengths), [], []
    for own, length in zip(cut.pieces, cut.lengths, strict=True):
        sizes += [hi - lo for lo, hi in own] + [longest - length] * (length < longest)
        places += [lo for lo, _ in own] + [None] * (length < longest)
    pieces = zip(places, cut_sizes(x, sizes, cut.dim), strict=True)
    return concatenate([piece for _, piece in sorted((p for p in pieces if p[0] is not None), key=lambda p: p[0])],
                       cut.dim)


def _scatter(x, comm, old, new):
    return _own(scatter_to(_by_rank(x, new), comm, new.dim), new, comm)


def _gather(x, comm, old, new):
    return _by_place(gather_from(_filled(x, old), comm, old.dim), old)


def _in_float32(move):
    """A move that adds up, forward or backward: of floats of 16 bits in float32, for MPI knows no others."""
    def moved(x, *where):
        dtype = getattr(x, "dtype", None)
        if dtype is None or not is_short(dtype):
            return move(x, *where)
        return astype(move(astype(x, xp.float32), *where), dtype)
    return moved


@_in_float32
def _sum(x, comm, old, new):
    return reduce_from(x, comm)


@_in_float32
def _sum_part(x, comm, old, new):
    return _own(reduce_scatter(_by_rank(x, new), comm, new.dim), new, comm)


def _one_of_a_sum(x, comm, old, new):
    return bind(_as_summand, (x,), (comm,)) if hasattr(x, "shape") else x if comm.rank == 0 else type(x)(0)


@_in_float32
def _copy(x, comm, old, new):
    return copy_to(x, comm)


@_in_float32
def _gather_copies(x, comm, old, new):
    return _by_place(all_gather(_filled(x, old), comm, old.dim), old)


@_in_float32
def _sum_copies(x, comm, old, new):
    return copy_to(reduce_from(x, comm), comm)


def _exchange(x, comm, old, new):
    n, i, j = comm.size, old.dim, new.dim
    if i == j:
        return _scatter(_gather(x, comm, old, None), comm, None, new)
    # The n parts along j come first, one for each rank; then those that have come follow each other along i.
    x = _by_rank(_filled(x, old), new)
    shape, dims = list(x.shape), list(range(len(x.shape)))
    x = reshape(x, (*shape[:j], n, shape[j] // n, *shape[j + 1:]))
    dims = [d + (d > j - 1) for d in dims]      # where each is now; n stands at j
    x = all_to_all(transpose(x, (j, *dims)), comm)
    order = list(range(1, len(shape) + 1))
    order.insert(i, 0)
    shape[j] //= n
    shape[i] *= n
    return _own(_by_place(reshape(transpose(x, tuple(order)), tuple(shape)), old), new, comm)


BY = {       # (from, to): what does it
    (Replicate, Shard): _scatter, (Partial, Shard): _sum_part, (Shard, Shard): _exchange, (Partial, Replicate): _sum,
    (Partial, Copies): _sum_copies, (Shard, Replicate): _gather, (Shard, Copies): _gather_copies,
    (Replicate, Copies): _copy, (Replicate, Partial): _one_of_a_sum,
}


def on_tape(x):
    """Whether a derivative flows to it: it is on the tape, or a dual number."""
    return x.__class__ in TRACED and getattr(x, "node", True) is not None


def reshard(x, shape, layout, target, comms):
    """A rank's part x of a value of whole `shape` in `layout`, as the ranks need it for `target`.

    target: {axis: placement}; axes that it doesn't name stay as they are. comms: {axis: Communicator}.
    """
    sizes = {axis: comm.size for axis, comm in comms.items()}
    for move in moves(shape, layout, target, sizes):
        if pages and on_tape(x) and is_grad_enabled():
            what = prod(shape) * x.dtype.itemsize, sizes
            pages[-1].backward += move.sent(*what, True, is_short(x.dtype)) - move.sent(*what, False, is_short(x.dtype))
        cuts = move.cuts(shape, {axis: (comm.rank, comm.size) for axis, comm in comms.items()})
        x = BY[type(move.old), type(move.new)](x, comms[move.axis], *cuts)
    return x
