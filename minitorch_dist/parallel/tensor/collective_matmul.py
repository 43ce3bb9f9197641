"""Products that hide their messages: tensor parallelism's collectives, decomposed.

Sequence parallelism gathers activations before a column-parallel product, and reduces and scatters those behind a
row-parallel one; meanwhile nothing is multiplied. Cut into N products, of 1/N of the positions each, all but one of
them have a message to hide. On three ranks:

    all_gather_matmul: y_r = (x₀, x₁, x₂) W_rᵀ                matmul_reduce_scatter: z_r = part r of Σ x_s W_sᵀ

    step      0         1         2                           step      0        1        2
    rank 0    x₀W₀ᵀ     x₂W₀ᵀ     x₁W₀ᵀ                       rank 0    part 2   part 1   part 0
    rank 1    x₁W₁ᵀ     x₀W₁ᵀ     x₂W₁ᵀ                       rank 1    part 0   part 2   part 1
    rank 2    x₂W₂ᵀ     x₁W₂ᵀ     x₀W₂ᵀ                       rank 2    part 1   part 0   part 2

Left, rank r multiplies what it has while that is on its way to rank r + 1. Right, rank r makes its product for a part
while the sum for the part before is on its way to rank r + 1, which adds its own. Each is the other's transpose: the
cotangent of x in one is made by the other, from the cotangent of y or z, with W in the place of Wᵀ. The cotangent of W
is a sum of N products with the parts that come by.

The sum for part r begins with rank r + 1's product, goes on with r + 2's, and ends with r's own; the sum for W begins
with r's own part and goes on with r - 1's: orders that no timing changes. What is sent are the collectives' bytes, in
N - 1 messages. Floats of 16 bits are rounded after each product; sums are made, and travel, in float32.

Where a product takes p seconds and a message h, N p + (N - 1) h become p + (N - 1) max(p, h), if messages move by
themselves: by hardware, or a thread. An MPI that has neither moves long ones only while somebody waits.
Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning
models".
"""

import math

from ... import backend, ledger
from ...autodiff import ops
from ...autodiff.ops.linalg import sum_of_rows
from ...autodiff.primitive import Primitive, bind, place
from ...backend import is_short, module_of, result_type, to_float32
from ..collectives import all_gather, reduce_scatter
from ..positions import TIME, check_axes, check_length
from ..ring import as_was, came_by, come_by, pass_on

# ---------------------------------------------------------------- products of one part, on arrays


def _parts(x, n):
    """(batch, time, features) -> (batch, n, time/n, features)."""
    return x.reshape(x.shape[0], n, x.shape[TIME] // n, x.shape[2])


def _rows(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _matmul(a, b, rank, out=None):
    with ledger.spanning("compute", "product", f"positions of rank {rank}"):
        return backend.matmul(a, b, out=out)


def _product(x, w, rank):
    """x w of a rank's positions: (batch, time/n, in), (in, out) -> (batch, time/n, out)."""
    return _matmul(_rows(x), w, rank).reshape(*x.shape[:-1], w.shape[1])


def _wide(x):
    """For sums."""
    return to_float32(x) if is_short(x.dtype) else x


class _Outer:
    """aᵀ b, the sum over the positions of one rank after the other: (batch, time/n, out), (batch, time/n, in) ->
    (out, in). wanted: a pullback's; where it is False there is nothing to do."""

    def __init__(self, wanted, dtype):
        self.wanted, self.dtype, self.total = bool(wanted), dtype, None
        self.out = None if is_short(dtype) else place(wanted, dtype)

    def add(self, a, b, rank):
        """The positions of one rank."""
        if not self.wanted:
            return
        product = _matmul(_rows(a).T, _rows(b), rank, self.out if self.total is None else None)
        if self.total is None:
            self.total = _wide(product)
        else:
            self.total += product

    def result(self):
        """The sum; None where it isn't wanted."""
        return as_was(self.total, self.dtype) if self.wanted else None


# ---------------------------------------------------------------- the two rounds, each the other's transpose

def _gathered_product(x, w, comm, into=None, also=None):
    """(x_0, x_1, …) w: (batch, time/n, in), (in, out) -> (batch, time, out).

    into  as come_by's
    also  also(x_s, s): what else each rank's part is for
    w     None where it is for nothing else
    """
    (batch, time, _), n, y = x.shape, comm.size, None
    if w is not None:
        y = module_of(x).empty((batch, n, time, w.shape[1]), result_type(x.dtype, w.dtype))
    for rank, theirs in come_by(x, comm, into):
        if w is not None:
            y[:, rank] = _product(theirs, w, rank)
        if also is not None:
            also(theirs, rank)
    return None if w is None else y.reshape(batch, n * time, w.shape[1])


def _scattered_product(x, w, comm, meanwhile):
    """This rank's part of the sum of all ranks' x w: (batch, time, in), (in, out) -> (batch, time/n, out).

    meanwhile  an iterator, of which a step is made behind each message
    """
    n, parts, wait = comm.size, _parts(x, comm.size), None
    for rank in [(comm.rank - 1 - step) % n for step in range(n)]:
        product = _product(parts[:, rank], w, rank)
        total = _wide(product)
        if wait is not None:
            total += wait()
        if rank != comm.rank:
            wait = pass_on(total, comm)
        next(meanwhile, None)
    return as_was(total, product.dtype)


# ---------------------------------------------------------------- the op table's entries

def _gather_forward(x, weight, bias, comm, regather):
    comm.agree("all_gather_matmul", x.dtype, x.shape, f"regather={regather}")
    arrays = module_of(x)
    others = None if regather else arrays.empty((comm.size - 1, *x.shape), x.dtype)
    y = _gathered_product(arrays.ascontiguousarray(x), weight.T, comm, others)
    if bias is not None:
        y += bias
    return y, others


def _gather_pullback(ct, wanted, x, weight, comm, regather, aux):
    dx, outer = None, _Outer(wanted[1], result_type(ct.dtype, x.dtype))
    # Even if nothing is to be sent: another rank may think otherwise, and would wait for ever.
    comm.agree("all_gather_matmul, backward", result_type(ct.dtype, weight.dtype), x.shape,
               f"dx {bool(wanted[0])}, dW {outer.wanted}")

    def outer_products():
        x_here, parts = module_of(x).ascontiguousarray(x), _parts(ct, comm.size)
        for rank, theirs in come_by(x_here, comm) if regather else came_by(x_here, aux, comm):
            outer.add(parts[:, rank], theirs, rank)
            yield
    dw = outer_products() if outer.wanted else iter(())
    if wanted[0]:
        dx = _scattered_product(ct, weight, comm, dw)
    for _ in dw:        # what is left
        pass
    db = sum_of_rows(_rows(ct), wanted[2]) if wanted[2] else None
    return dx, outer.result(), db


def _scatter_forward(x, weight, comm):
    comm.agree("matmul_reduce_scatter", result_type(x.dtype, weight.dtype), (*x.shape[:-1], len(weight)))
    return _scattered_product(x, weight.T, comm, iter(()))


def _scatter_pullback(ct, wanted, x, weight, comm):
    outer, parts = _Outer(wanted[1], result_type(ct.dtype, x.dtype)), _parts(x, comm.size)
    comm.agree("matmul_reduce_scatter, backward", ct.dtype, ct.shape)
    dx = _gathered_product(module_of(ct).ascontiguousarray(ct), weight if wanted[0] else None, comm,
                           also=lambda theirs, rank: outer.add(theirs, parts[:, rank], rank))
    return dx, outer.result()


_all_gather_matmul = Primitive(
    "all_gather_matmul", _gather_forward, "x weight bias", "comm regather", aux=True, own_sums=True,
    definition=lambda x, weight, bias, comm, regather: ops.linear(all_gather(x, comm, TIME), weight, bias),
    pullback=_gather_pullback)
_matmul_reduce_scatter = Primitive(
    "matmul_reduce_scatter", _scatter_forward, "x weight", "comm", own_sums=True,
    definition=lambda x, weight, comm: reduce_scatter(ops.linear(x, weight), comm, TIME), pullback=_scatter_pullback)


# ---------------------------------------------------------------- what users call

def _check(name, x, weight, bias=None):
    check_axes(name, x)
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} (out, in) don't fit: the last "
                         "axes of both must be equally long, and weight have two")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias {tuple(bias.shape)} must be {tuple(weight.shape[:1])}, as long as weight "
                         f"{tuple(weight.shape)} (out, in) has rows")


def all_gather_matmul(x, weight, comm, bias=None, regather=False):
    """ops.linear of all ranks' parts of a sequence, which come by one after the other. Collective.

    x         (batch, time/N, in), this rank's positions; the same shape and dtype on all ranks
    weight    (out, in), bias (out) or None; this rank's own -> (batch, time, out)
    regather  keep this rank's x alone for backward, which lets all of them come by once more

    N - 1 messages of x's size; backward as many, of its cotangent (float32 at least), with "regather" those of x again.
    Forward mode and second derivatives gather first and multiply then. MismatchError on all ranks unless they agree.
    """
    _check("all_gather_matmul", x, weight, bias)
    return bind(_all_gather_matmul, (x, weight, bias), (comm, bool(regather)))


def matmul_reduce_scatter(x, weight, comm):
    """This rank's positions of the sum of all ranks' x Wᵀ, which is added up on its way. Collective.

    x       (batch, time, in), this rank's own; N divides time, which is the same on all ranks
    weight  (out, in), this rank's own; out is the same on all ranks -> (batch, time/N, out)

    N - 1 messages of the result's size (float32 at least); backward as many, of its cotangent. As all_gather_matmul.
    """
    _check("matmul_reduce_scatter", x, weight)
    check_length(x.shape[TIME], comm)
    return bind(_matmul_reduce_scatter, (x, weight), (comm,))
