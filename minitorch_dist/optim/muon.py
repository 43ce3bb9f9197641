"""Muon: steps along the momentum, with the same length in all of its directions.

    b = momentum · b + g          u = g + momentum · b          p -= lr · orthogonalized(u)

    u = U S Vᵀ     S: 9.1  2.0  0.3  0.04            a few directions have nearly all of a gradient's length
      → U Vᵀ          1    1    1    1               and get, under Adam and SGD, nearly all of the step's

U Vᵀ comes without a singular value decomposition, by products alone: X → a·X + b·(X Xᵀ)X + c·(X Xᵀ)²X leaves U and V as
they are and maps each singular value s to a·s + b·s³ + c·s⁵, which five times over brings [0.003, 1] into [0.68, 1.21].

Of a matrix that is cut over ranks (fully_shard) no rank can do that with its piece. It comes together on one of them,
its owner, which sends the pieces of the result back. Each rank owns its share of the work, and sends each element of
other ranks' matrices once, and gets it once:

    rank 0   |A A A A|B B|            owns A   |A A A A|A A|            |A A A A|B B|
    rank 1   |A A|B B B B|     →      owns B   |B B|B B B B|     →      |A A|B B B B|

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
scalable for LLM training" (adjust_lr_fn="match_rms_adamw", sharded state).
"""

import math
import zlib
from itertools import pairwise
from typing import NamedTuple

from ..autodiff.writes import wrote
from ..backend import module_of, on_host
from .optimizer import Optimizer, check_settings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUST = {      # name -> what lr is multiplied by, for a matrix of so many rows and columns
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(Optimizer):
    """The optimizer above, of matrices; torch's settings and defaults.

    params        of shape (out, in), or stacks of n matrices as nn.Experts has them, (n, in, out): ValueError for
                  others. Meant for hidden layers: give embeddings, the output layer, biases and norms to AdamW
    weight_decay  decoupled: p shrinks by lr · weight_decay before the step
    nesterov      False: u = b
    ns_coefficients, ns_steps, eps   of orthogonalized
    adjust_lr_fn  what lr is multiplied by: None or "original", √max(1, out/in); "match_rms_adamw", 0.2·√max(out, in),
                  with which steps are as long as AdamW's usually are, and its lr and weight decay fit

    Products are made in the parameters' dtype, at least float32 (torch's: in bfloat16). Pieces of a fully_shard model
    take the steps that the whole matrices would, by two all-to-alls: step() is collective then, and all ranks give the
    same parameters in the same order, with gradients for the same ones (else MismatchError on all of them). ValueError
    for parts of matrices that tensor parallelism or annotations have cut, which would need the others as well.
    """

    state_names = ("momentum_buffer",)

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=COEFFICIENTS,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None):
        check_settings(lr=(lr, lr >= 0, "at least 0"), weight_decay=(weight_decay, weight_decay >= 0, "at least 0"),
                       momentum=(momentum, momentum >= 0, "at least 0"), eps=(eps, eps > 0, "more than 0"),
                       ns_coefficients=(ns_coefficients, len(ns_coefficients) == 3, "three numbers"),
                       ns_steps=(ns_steps, 1 <= ns_steps < 100 and ns_steps % 1 == 0, "a whole number from 1 to 99"))
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                                  "ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": int(ns_steps),
                                  "adjust_lr_fn": adjust_lr_fn})
        for group in self.groups:
            name = group["adjust_lr_fn"]
            check_settings(adjust_lr_fn=(name, name in (None, *ADJUST), f"None, {' or '.join(ADJUST)}"))
        for flat, slots in zip(self.flats, self.slots, strict=True):
            for tensor in (slot.segment.tensor for slot in slots):
                shape = tensor.shape if flat.unit is None else flat.unit.cut_of(tensor)[1]
                if len(shape) not in (2, 3):
                    raise ValueError(f"Muon: a parameter of shape {shape} is neither a matrix nor a stack of them: "
                                     "give it to another optimizer, say AdamW")
                part_of = tensor.leaf.part_of
                if part_of is not None and part_of[-2:] != shape[-2:]:
                    raise ValueError(f"Muon: a parameter of shape {shape} is a part of one of shape {part_of}, which "
                                     "is cut over ranks; the step is one of the whole matrix: give it to another "
                                     "optimizer, say AdamW, or cut the model by fully_shard instead")

    def settle_in(self, home):
        if not all(on_host(flat.params) for flat in self.flats):
            raise ValueError("Muon's state can't lie on the host while its parameters are on a GPU: the update needs "
                             "whole matrices beside it")
        super().settle_in(home)

    def update_all(self):
        cut = {}        # (id of a Communicator, dtype) -> (it, an array like the parts, [Cut])
        for flat, state, slots in zip(self.flats, self.state, self.slots, strict=True):
            momentum, pieces = state["momentum_buffer"], None
            if flat.unit is not None:       # ranks without a gradient take part, too
                _, _, pieces = cut.setdefault((id(flat.unit.comm), momentum.dtype), (flat.unit.comm, momentum, []))
            for slot in slots:
                if slot.segment.tensor.grad is None:
                    continue
                slot.steps += 1
                part, mine = slice(slot.segment.start, slot.segment.stop), slot.state(state)
                p, exact = flat.params[part], self.exact(flat.params[part], mine)
                u = self.direction(self.divided(flat.grads[part], exact), mine["momentum_buffer"], slot.group)
                if pieces is None:
                    shape = slot.segment.tensor.shape
                    _step(p, exact, _orthogonalized(u, shape, slot.group), shape, slot.group)
                else:
                    pieces.append(Cut(p, exact, u, slot.group, *flat.unit.cut_of(slot.segment.tensor)))
        for comm, like, pieces in cut.values():
            def make(k, u, pieces=pieces):
                return _orthogonalized(u, pieces[k].shape, pieces[k].group)
            cuts, parts = [(c.name, c.shape, c.counts) for c in pieces], [c.u for c in pieces]
            steps = brought_together(comm, cuts, parts, make, like)
            for c, o in zip(pieces, steps, strict=True):
                _step(c.p, c.exact, o, c.shape, c.group)

    def direction(self, g, b, group):
        """u, 1-d, a new array; b is written."""
        b *= group["momentum"]
        b += g
        return g + group["momentum"] * b if group["nesterov"] else b.copy()


class Cut(NamedTuple):
    """This rank's part of a matrix that is cut: of the parameter, of what is updated of it, and of its direction; name
    and shape of the whole, and how many of its elements each rank has."""

    p: object
    exact: object
    u: object
    group: dict
    name: str
    shape: tuple
    counts: list


def _orthogonalized(u, shape, group):
    return orthogonalized(u.reshape(shape), group["ns_coefficients"], group["ns_steps"], group["eps"]).reshape(-1)


def _step(p, exact, o, shape, group):
    """Move p, all or a part of a parameter of this shape, along o: its master copy, if `exact` is that."""
    rows, columns = shape if len(shape) == 2 else shape[:0:-1]
    exact *= 1 - group["lr"] * group["weight_decay"]
    exact -= group["lr"] * ADJUST[group["adjust_lr_fn"] or "original"](rows, max(columns, 1)) * o
    if exact is not p:
        p[...] = exact
    wrote(p, "Muon.step")


def orthogonalized(u, coefficients=COEFFICIENTS, steps=5, eps=1e-7):
    """About U Vᵀ of u = U S Vᵀ: (…, rows, columns), floating, at least 32 bits -> the same. With the defaults singular
    values from 0.003 of u's norm come out between 0.68 and 1.21, smaller ones as at most 485 times their share of it.

    eps  the least norm that u is divided by: zeros stay zeros
    """
    a, b, c = coefficients
    arrays, wide = module_of(u), u.shape[-2] <= u.shape[-1]     # of X Xᵀ and XᵀX the smaller
    x = u if wide else u.swapaxes(-1, -2)
    x = x / arrays.maximum(arrays.sqrt((x * x).sum(axis=(-1, -2), keepdims=True)), eps)
    for _ in range(steps):
        square = x @ x.swapaxes(-1, -2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return arrays.ascontiguousarray(x if wide else x.swapaxes(-1, -2))


# ---------------------------------------------------------------- matrices that are cut over ranks

def work(shape):
    """Multiplications of one round of orthogonalized, for (…, rows, columns)."""
    small, large = sorted(shape[-2:])
    return math.prod(shape[:-2]) * small * small * (2 * large + small)


def owners(shapes, ranks):
    """[rank] by matrix: the largest pieces of work first, each to the rank that has least to do as yet."""
    load, owner = [0] * ranks, [0] * len(shapes)
    for k in sorted(range(len(shapes)), key=lambda k: -work(shapes[k])):
        owner[k] = load.index(min(load))
        load[owner[k]] += work(shapes[k])
    return owner


def brought_together(comm, cuts, parts, make, like):
    """This rank's parts of make(k, matrix k), 1-d arrays: each matrix is made whole on its owner. Collective.

    cuts   by matrix: (name, shape, [how many of its elements each rank has, in the order in which they stand]); the
           same on all ranks: MismatchError otherwise
    parts  by matrix, this rank's elements: 1-d, of like's dtype and device
    make   make(k, u) -> a 1-d array of the same size, for the 1-d u of all elements
    """
    shapes, counts = [shape for _, shape, _ in cuts], [each for *_, each in cuts]
    ranks, owner = range(comm.size), owners(shapes, comm.size)
    mine = [k for k, rank in enumerate(owner) if rank == comm.rank]
    order = sorted(range(len(shapes)), key=owner.__getitem__)
    there = [sum(counts[k][comm.rank] for k in order if owner[k] == rank) for rank in ranks]
    here = [sum(counts[k][rank] for k in mine) for rank in ranks]
    arrays, which = module_of(like), f"{len(cuts)} matrices, {zlib.crc32(repr(cuts).encode()):08x}"
    x, got = arrays.concatenate([like[:0], *(parts[k] for k in order)]), arrays.empty(sum(here), like.dtype)
    comm.all_to_all(got, x, there, here, what=f"Muon's {which}")
    # What has come lies by ranks, and each rank's by matrices.
    starts = dict(zip(((rank, k) for rank in ranks for k in mine), _starts(
        counts[k][rank] for rank in ranks for k in mine), strict=False))
    stretches = {k: [slice(starts[rank, k], starts[rank, k] + counts[k][rank]) for rank in ranks] for k in mine}
    for k in mine:
        made = make(k, arrays.concatenate([got[stretch] for stretch in stretches[k]]))
        for stretch, (begin, end) in zip(stretches[k], pairwise(_starts(counts[k])), strict=True):
            got[stretch] = made[begin:end]
    comm.all_to_all(x, got, here, there, what="Muon's steps")
    ends = dict(zip(order, pairwise(_starts(counts[k][comm.rank] for k in order)), strict=True))
    return [x[slice(*ends[k])] for k in range(len(shapes))]


def _starts(sizes):
    """[0, the first, the first two together, …]"""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts
