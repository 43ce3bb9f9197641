"""Collectives that can be differentiated: entries of the op table, like any other op.

    y = all_gather(x, comm, axis=0)          # of tensors, arrays, duals: whatever ops take

Each is a linear map between what all ranks hold together, and its transpose is another one:

    copy_to        y_r = x                    ↔   reduce_from     y = Σ x_r
    scatter_to     y_r = part r of x          ↔   gather_from     y = (x_0, x_1, …)
    all_gather     y_r = (x_0, x_1, …)        ↔   reduce_scatter  y_r = Σ_s (part r of x_s)
    all_to_all     y_r = (part r of every x)  ↔   all_to_all      with the counts exchanged
    broadcast      y_r = x_src                ↔   reduce          y_dst = Σ x_r, 0 on the others

What stands without an index in the first two lines is the same on all ranks and is one value: its cotangent is the
same on all ranks too, and counts once. So the loss may be worked out on every rank after reduce_from or gather_from,
and backward sends nothing there; Megatron-LM calls the first two f and g. All other values belong to their ranks, and
the loss is the sum over the ranks. Source: Shoeybi et al. 2019, "Megatron-LM".

All ranks call them in the same order, and then backward is in the same order too. `axis` is where parts are laid
together or cut; all ranks' parts have the same shape, but those of scatter_to and gather_from may differ by one (they
are those of `share`). Sums only.
"""

from ..autodiff.ops import transpose
from ..autodiff.primitive import LinearOp, Primitive, bind
from ..backend import in_float32, is_short, module_of, xp
from ..data.loader import share
from .encodings import from_rows, rows_of_bytes
from .turns import pause, taking_turns

# ---------------------------------------------------------------- linear maps

copied = LinearOp("copy_to", lambda t, comm: copy_to(t, comm), lambda c, comm: reduce_from(c, comm), fresh=True)
reduced = LinearOp("reduce_from", lambda t, comm: reduce_from(t, comm), lambda c, comm: copy_to(c, comm), fresh=False)
gathered = LinearOp("all_gather", lambda t, r: all_gather(t, *r), lambda c, r: reduce_scatter(c, *r))
parted = LinearOp("scatter_to", lambda t, r: scatter_to(t, r[0], r[1]), lambda c, r: gather_from(c, *r))
joined = LinearOp("gather_from", lambda t, r: gather_from(t, *r), lambda c, r: scatter_to(c, r[0], r[1]))
scattered = LinearOp("reduce_scatter", lambda t, r: reduce_scatter(t, *r), lambda c, r: all_gather(c, *r))
exchanged = LinearOp("all_to_all", lambda t, r: all_to_all(t, *r),
                     lambda c, r: all_to_all(c, r[0], send_counts=r[2], recv_counts=r[1], what=r[3], forth=r[5],
                                             back=r[4]))
spread = LinearOp("broadcast_from", lambda t, r: broadcast(t, *r), lambda c, r: reduce(c, *r))
collected = LinearOp("reduce", lambda t, r: reduce(t, *r), lambda c, r: broadcast(c, *r))


# ---------------------------------------------------------------- forward, on arrays; parts lie along the first axis

def _copy(x):
    return module_of(x).array(x, order="C")


def _empty(x, rows):
    return module_of(x).empty((rows, *x.shape[1:]), x.dtype)


def _contiguous(x):
    return module_of(x).ascontiguousarray(x)


def _summed(x, comm):
    if is_short(x.dtype):       # no engine adds up 16 bits
        return in_float32(_summed, x, comm)
    out = _copy(x)
    comm.all_reduce(out)
    return out


def _gather(x, comm):
    out = _empty(x, comm.size * x.shape[0])
    comm.all_gather(out, _contiguous(x))
    return out


def _part(x, comm, extent):     # no view, which would keep the whole as long as the part
    return _copy(x[slice(*share(extent, comm.rank, comm.size))])


def _join(x, comm, extent):
    """_gather of parts whose lengths may differ by one: all are sent at the greatest length."""
    longest = -(-extent // comm.size)
    sent = _empty(x, longest)
    sent[:len(x)], sent[len(x):] = x, 0
    parts = _gather(sent, comm)
    bounds = [share(extent, rank, comm.size) for rank in range(comm.size)]
    return xp.concatenate([parts[rank * longest:rank * longest + hi - lo] for rank, (lo, hi) in enumerate(bounds)])


def _reduce_scatter(x, comm):
    if is_short(x.dtype):
        return in_float32(_reduce_scatter, x, comm)
    out = _empty(x, x.shape[0] // comm.size)
    comm.reduce_scatter(out, _contiguous(x))
    return out


def _exchange(x, comm, send_counts, recv_counts, what, forth=None, back=None):
    sent = _contiguous(x) if forth is None else rows_of_bytes(x, forth)
    out = _empty(sent, len(x) if recv_counts is None else sum(recv_counts))
    work = comm.all_to_all(out, sent, send_counts, recv_counts, async_op=taking_turns(), what=what)
    if work is not None:
        pause()
        work.wait()
    return out if forth is None else from_rows(out, forth, x.shape[1:], x.dtype)


def _broadcast(x, comm, src):
    out = _copy(x)
    comm.broadcast(out, src)
    return out


def _reduce(x, comm, dst):
    if is_short(x.dtype):
        return in_float32(_reduce, x, comm, dst)
    out = _copy(x)
    comm.reduce(out, dst)
    return out if comm.rank == dst else xp.zeros_like(out)


_copy_to = Primitive("copy_to", lambda x, comm: x, params="comm", x=(copied, "comm"))
_reduce_from = Primitive("reduce_from", _summed, params="comm", x=(reduced, "comm"))
_scatter_to = Primitive("scatter_to", _part, params="comm extent", x=(parted, lambda comm, extent: (comm, 0, extent)))
_gather_from = Primitive("gather_from", _join, params="comm extent", x=(joined, lambda comm, extent: (comm, 0, extent)))
_all_gather = Primitive("all_gather", _gather, params="comm", x=(gathered, lambda comm: (comm, 0)))
_scatter = Primitive("reduce_scatter", _reduce_scatter, params="comm", x=(scattered, lambda comm: (comm, 0)))
_all_to_all = Primitive("all_to_all", _exchange, params="comm send_counts recv_counts what forth back",
                        x=(exchanged, "comm send_counts recv_counts what forth back"))
_spread = Primitive("broadcast", _broadcast, params="comm src", x=(spread, "comm src"))
_collect = Primitive("reduce", _reduce, params="comm dst", x=(collected, "comm dst"))


# ---------------------------------------------------------------- what users call

def copy_to(x, comm):
    """x, which is the same on all ranks, for each rank to go its own way with: backward sums the cotangents."""
    return bind(_copy_to, (x,), (comm,))


def reduce_from(x, comm):
    """The sum of all ranks' x, the same on all of them: backward hands each rank the one cotangent."""
    return bind(_reduce_from, (x,), (comm,))


def scatter_to(x, comm, axis=0):
    """This rank's `share` along `axis` of x, which is the same on all ranks: backward gathers the cotangents."""
    return _along(lambda z: bind(_scatter_to, (z,), (comm, z.shape[0])), x, axis, "scatter_to")


def gather_from(x, comm, axis=0, extent=None):
    """All ranks' x one after the other along `axis`, as one value: backward hands each rank its own part of it.

    extent: of all parts together, where they are of unequal lengths; ValueError unless x is this rank's `share` of it.
    """
    extent = comm.size * x.shape[axis] if extent is None else extent
    lo, hi = share(extent, comm.rank, comm.size)
    if x.shape[axis] != hi - lo:
        raise ValueError(f"gather_from: axis {axis} of shape {tuple(x.shape)} isn't rank {comm.rank}'s share of "
                         f"{extent} elements on {comm.size} ranks, {hi - lo}")
    return _along(lambda z: bind(_gather_from, (z,), (comm, extent)), x, axis, "gather_from")


def all_gather(x, comm, axis=0):
    """All ranks' x one after the other along `axis`; backward sums the cotangents of this rank's part."""
    return _along(lambda z: bind(_all_gather, (z,), (comm,)), x, axis, "all_gather")


def reduce_scatter(x, comm, axis=0):
    """This rank's N-th, along `axis`, of the sum of all ranks' x; ValueError where N doesn't divide it."""
    extent = x.shape[axis]
    if extent % comm.size:
        raise ValueError(f"reduce_scatter: axis {axis} of shape {x.shape} has {extent} elements, which {comm.size} "
                         f"ranks can't share equally")
    return _along(lambda z: bind(_scatter, (z,), (comm,)), x, axis, "reduce_scatter")


def all_to_all(x, comm, send_counts=None, recv_counts=None, what=None, forth=None, back=None):
    """Rank i's j-th part of x, along the first axis, becomes rank j's i-th part; `counts` are rows per rank.

    Both counts or neither (equal parts). what: a name for what x is, which must be the same on all ranks.
    forth, back: Blocks (encodings.py) in which x travels, and in which its cotangent does; None: as it is. Rounding has
    the derivative 1. ValueError for one of the counts alone, and unless the blocks' size divides the last axis.
    """
    if (send_counts is None) != (recv_counts is None):
        raise ValueError("all_to_all: pass both send_counts and recv_counts, or neither (equal parts): backward needs "
                         "the other one")
    if send_counts is not None:
        send_counts, recv_counts = tuple(map(int, send_counts)), tuple(map(int, recv_counts))
    return bind(_all_to_all, (x,), (comm, send_counts, recv_counts, what, forth, back))


def broadcast(x, comm, src=0):
    """Rank src's x, on all ranks; the others pass an x of the same shape and dtype, which gets no gradient."""
    return bind(_spread, (x,), (comm, src))


def reduce(x, comm, dst=0):
    """The sum of all ranks' x on rank dst, zeros on the others."""
    return bind(_collect, (x,), (comm, dst))


def _along(collective, x, axis, name):
    """Run a collective that works along the first axis along another one."""
    n = len(x.shape)
    if not -n <= axis < n:
        raise ValueError(f"{name}: axis {axis} is out of range for shape {x.shape}")
    if axis % n == 0:
        return collective(x)
    perm = (axis % n, *(i for i in range(n) if i != axis % n))
    back = tuple(perm.index(i) for i in range(n))
    return transpose(collective(transpose(x, perm)), back)
