"""From one layout to another: which differentiable collective does it.

    placement on an axis          forward                 backward
    Replicate → Shard             scatter_to              gather_from
    Shard     → Replicate         gather_from             scatter_to
    Partial   → Replicate         reduce_from             –
    Partial   → Shard             reduce_scatter          all_gather
    Shard     → another Shard     all_to_all              all_to_all
    Replicate → Copies            copy_to                 all-reduce
    Shard     → Copies            all_gather              reduce_scatter
    Replicate → Partial           rank 0 has it, zeros    –

Where the ranks' parts are unequal, reduce_scatter, all_gather and all_to_all can't be had: two of the others take their
place.
"""

from ...autodiff.autocast import SHORT
from ...autodiff.ops import astype, concatenate, reshape, transpose
from ...autodiff.ops.shape import cut_sizes
from ...autodiff.primitive import LinearOp, Primitive, bind
from ...backend import xp
from ..collectives import all_gather, all_to_all, copy_to, gather_from, reduce_from, reduce_scatter, scatter_to
from .layouts import WHOLE, Copies, Partial, Replicate, Shard, even

# As a sum, what is the same on all ranks stands on one of them. The sum's cotangent is on every rank, a copy that goes
# its own way, and all of them are x's: one value again.
_summand = LinearOp("summand", lambda t, comm: bind(_as_summand, (t,), (comm,)),
                    lambda c, comm: bind(_of_copies, (c,), (comm,)), fresh=False, listed=False)
_one = LinearOp("of_copies", lambda t, comm: bind(_of_copies, (t,), (comm,)),
                lambda c, comm: bind(_as_summand, (c,), (comm,)), fresh=False, listed=False)
_of_copies = Primitive("of_copies", lambda x, comm: x, params="comm", x=(_one, "comm"), listed=False)
_as_summand = Primitive("summand", lambda x, comm: x if comm.rank == 0 else xp.zeros_like(x), params="comm",
                        x=(_summand, "comm"), listed=False)


def _between_orders(x, placement, n, to_ranks):
    """Pieces of sections in the order of the ranks instead of that of the dimension, or back:
    q0 q1 k0 k1 ↔ q0 k0 q1 k1."""
    if not placement.sections:
        return x
    sizes = [[s // n for s in placement.sections]] * n           # [rank][section]
    if to_ranks:
        sizes = list(zip(*sizes, strict=True))
    pieces = cut_sizes(x, [size for row in sizes for size in row], placement.dim)
    width = len(sizes[0])
    return concatenate([pieces[i * width + j] for j in range(width) for i in range(len(sizes))], placement.dim)


def _scatter(x, comm, old, new, extent):
    return scatter_to(_between_orders(x, new, comm.size, True), comm, new.dim)


def _gather(x, comm, old, new, extent):
    return _between_orders(gather_from(x, comm, old.dim, extent(old.dim)), old, comm.size, False)


def _in_float32(move):
    """A move that adds up, forward or backward: of floats of 16 bits in float32, for MPI knows no others."""
    def moved(x, *where):
        dtype = getattr(x, "dtype", None)
        if dtype not in SHORT:
            return move(x, *where)
        return astype(move(astype(x, xp.float32), *where), dtype)
    return moved


@_in_float32
def _sum(x, comm, old, new, extent):
    return reduce_from(x, comm)


@_in_float32
def _sum_part(x, comm, old, new, extent):
    if not even(extent(new.dim), new.sections, comm.size):
        return _scatter(_sum(x, comm, old, WHOLE, extent), comm, WHOLE, new, extent)
    return reduce_scatter(_between_orders(x, new, comm.size, True), comm, new.dim)


def _one_of_a_sum(x, comm, old, new, extent):
    return bind(_as_summand, (x,), (comm,)) if hasattr(x, "shape") else x if comm.rank == 0 else type(x)(0)


@_in_float32
def _copy(x, comm, old, new, extent):
    return copy_to(x, comm)


@_in_float32
def _gather_copies(x, comm, old, new, extent):
    if not even(extent(old.dim), old.sections, comm.size):
        return copy_to(_gather(x, comm, old, WHOLE, extent), comm)
    return _between_orders(all_gather(x, comm, old.dim), old, comm.size, False)


@_in_float32
def _sum_copies(x, comm, old, new, extent):
    return copy_to(reduce_from(x, comm), comm)


def _exchange(x, comm, old, new, extent):
    n, (i, j) = comm.size, (old.dim, new.dim)
    if i == j or old.sections or new.sections or extent(i) % n or extent(j) % n:
        return _scatter(_gather(x, comm, old, WHOLE, extent), comm, WHOLE, new, extent)
    # The n parts along j come first, one for each rank; then those that have come follow each other along i.
    shape, dims = list(x.shape), list(range(len(x.shape)))
    x = reshape(x, (*shape[:j], n, shape[j] // n, *shape[j + 1:]))
    dims = [d + (d > j - 1) for d in dims]      # where each is now; n stands at j
    x = all_to_all(transpose(x, (j, *dims)), comm)
    order = list(range(1, len(shape) + 1))
    order.insert(i, 0)
    shape[j] //= n
    shape[i] *= n
    return reshape(transpose(x, tuple(order)), tuple(shape))


MOVES = {       # (from, to): what does it, in the order in which moves are made
    (Replicate, Shard): _scatter, (Partial, Shard): _sum_part, (Shard, Shard): _exchange, (Partial, Replicate): _sum,
    (Partial, Copies): _sum_copies, (Shard, Replicate): _gather, (Shard, Copies): _gather_copies,
    (Replicate, Copies): _copy, (Replicate, Partial): _one_of_a_sum,
}
ORDER = list(MOVES)     # the fewer elements the better: parts first, whole values last


def reshard(x, shape, layout, target, comms):
    """A rank's part x of a value of whole `shape` in `layout`, as the ranks need it for `target`.

    target: {axis: placement}; axes that it doesn't name stay as they are. comms: {axis: Communicator}.
    """
    now = dict(layout.placements)
    waiting = {axis: new for axis, new in target.items() if new != now.get(axis, WHOLE)}
    while waiting:
        def kind(axis):
            return type(now.get(axis, WHOLE)), type(waiting[axis])
        taken = {p.dim: axis for axis, p in now.items() if isinstance(p, Shard)}
        ready = [axis for axis, new in waiting.items()
                 if not isinstance(new, Shard) or taken.get(new.dim, axis) == axis]
        # None is ready where axes exchange dimensions: then one lets go of its own first.
        axis = min(ready, key=lambda a: ORDER.index(kind(a))) if ready else next(
            a for a in waiting if isinstance(now.get(a), Shard))
        old, new = now.get(axis, WHOLE), waiting.pop(axis) if ready else WHOLE
        x = MOVES[type(old), type(new)](x, comms[axis], old, new, lambda dim: shape[dim])
        now[axis] = new
    return x

