"""Dion: steps of one length in a few directions of each matrix; several ranks train without summing their gradients.

    B = M + G                       the momentum and the gradient, rows × columns
    P = orthonormal(B Q)            rows × r: one round of power iteration, from where the last step's ended
    R = Bᵀ P                        columns × r: B is P Rᵀ, nearly
    M = B - (1 - momentum) P Rᵀ     what a step doesn't take stays (error feedback)
    Q = R, its columns of length 1  p -= lr · P Qᵀ

P and R are linear in B. So where rank w has a gradient G_w of its own, and G is their sum, it keeps M_w, and

    B Q = Σ_w B_w Q      all-reduced, rows · r numbers           Bᵀ P = Σ_w B_wᵀ P       columns · r

are all that travels, instead of rows · columns. The steps are those of G all the same, but for rounding, for the M_w
add up to M. (PowerSGD sends as little, but its sum is not G: comm_hooks.py.)

    model = DistributedDataParallel(net, unsummed=hidden)
    optimizer = optim.Combined(optim.Dion(hidden), optim.AdamW(others))

Source: Ahn et al. 2025, "Dion: distributed orthonormalized updates", algorithm 1 and its data parallelism without sums;
Nakamori et al. 2026, "Orth-Dion" (right="orthonormal").
"""

import math
import zlib
from typing import NamedTuple

import numpy as np

from ..backend import device_of, is_whole, module_of, on_host, to, xp
from ..flat import joined
from .matrices import move
from .muon import ADJUST, adjusted
from .optimizer import Optimizer
from .settings import AT_LEAST_0, FRACTION, MORE_THAN_0, share

RIGHT = "columns", "orthonormal"
LOST = 1e-3     # of the longest of Q's columns: those that aren't longer have found nothing


class Dion(Optimizer):
    """The optimizer above, of matrices, with its authors' settings.

    params         of shape (rows, columns), or stacks of n matrices, (n, rows, columns): ValueError for others. For
                   hidden layers; give embeddings, the output layer, biases and norms to AdamW or Lion
    rank_fraction  r, as a share of the lesser of rows and columns: more than 0, at most 1
    momentum       what is left in M of what a step has taken
    weight_decay   decoupled: p shrinks by lr · weight_decay before the step
    eps            what is added to the length of R's columns
    right          how R becomes Q: "columns", each of length 1, or "orthonormal", together: then all of a step's
                   directions have the same length (Orth-Dion)
    adjust_lr_fn   as in Muon
    seed           of the directions that Q begins with, and that take the place of those in which B has nothing; the
                   same on all ranks

    Its state is momentum_buffer, of the parameter's shape, and q, (…, columns, r), float32 or float64.

    Of parameters that DistributedDataParallel leaves `unsummed` step() adds up what it needs: it is collective, and all
    ranks give the same ones in the same order (else MismatchError on all of them). Their momentum is each rank's own;
    state_dict() is of the sum, and collective then, and leaves all of it with rank 0: a run that goes on from there is
    on the same bits. Each rank makes P orthonormal by itself: with the same bits on one type of processor, and with one
    number of BLAS threads. Where gradients have fewer than r directions, the rest are rounding, and steps in them as
    long as in the others. Pieces of fully_shard, and parts, are refused (ValueError): Muon and Dion2 take them.
    """

    state_names = ("momentum_buffer",)
    state_bits = (32,)
    elementwise = False
    adds_up = True
    rules = {"lr": AT_LEAST_0, "weight_decay": AT_LEAST_0, "momentum": AT_LEAST_0, "eps": MORE_THAN_0,
             "rank_fraction": FRACTION, "right": (lambda name, group: name in RIGHT, " or ".join(RIGHT)),
             "adjust_lr_fn": (lambda name, group: name in (None, *ADJUST), f"None, {' or '.join(ADJUST)}"),
             "seed": (lambda n, group: is_whole(n) and n >= 0, "a whole number, at least 0")}

    def __init__(self, params, lr=1e-2, rank_fraction=0.25, momentum=0.95, weight_decay=0.01, eps=1e-8, right="columns",
                 adjust_lr_fn=None, seed=0):
        super().__init__(params, {"lr": lr, "rank_fraction": rank_fraction, "momentum": momentum,
                                  "weight_decay": weight_decay, "eps": eps, "right": right,
                                  "adjust_lr_fn": adjust_lr_fn, "seed": seed})

    def kinds_of_state(self, tensor):
        group = next(g for g in self.param_groups if any(p is tensor for p in g["params"]))
        if tensor.ndim not in (2, 3):
            raise ValueError(f"Dion: a parameter of shape {tensor.shape} is neither a matrix nor a stack of them: give "
                             "it to another optimizer, say AdamW")
        leaf = tensor.leaf
        if leaf.flat.unit is not None or leaf.piece_of is not None or leaf.part_of is not None:
            raise ValueError(f"Dion: a parameter of shape {tensor.shape} is a piece, or a part, of a larger one, and "
                             "the step is one of the whole matrix: take Muon or Dion2")
        *stack, rows, columns = tensor.shape
        return self.state_names, {"q": (*stack, columns, share(group["rank_fraction"], min(rows, columns)))}

    def settle_in(self, home):
        if not all(on_host(flat.params) for flat in self.flats):
            raise ValueError("Dion's state can't lie on the host while its parameters are on a GPU: the update needs "
                             "all of it beside them")
        super().settle_in(home)

    def update_all(self):
        matrices = []
        for flat, state, slot in self._places():
            if slot.segment.tensor.grad is not None:
                slot.steps += 1
                matrices += [self.begun(flat, state, slot)] if slot.segment.stop > slot.segment.start else []
        redraw(matrices)
        comms, ps = [m.comm for m in matrices], [m.b @ m.q for m in matrices]
        add_up(comms, ps, "P")
        ps = [module_of(p).linalg.qr(p)[0] for p in ps]
        rs = [m.b.swapaxes(-1, -2) @ p for m, p in zip(matrices, ps, strict=True)]
        for m, p, r in zip(matrices, ps, rs, strict=True):      # each rank's own R: so that the sum is B - (1-μ) P Rᵀ
            m.b[...] -= (1 - m.group["momentum"]) * (p @ r.swapaxes(-1, -2))
        add_up(comms, rs, "R")
        for m, p, r in zip(matrices, ps, rs, strict=True):
            m.step(p, r)

    def begun(self, flat, state, slot):
        """The Update of a parameter, whose momentum is B."""
        segment, mine = slot.segment, slot.state(state)
        part, shape = slice(segment.start, segment.stop), slot.segment.tensor.shape
        p, b, q = flat.params[part], mine["momentum_buffer"], mine["q"]
        exact = self.exact(p, mine)
        b += self.divided(flat.grads[part], b)
        return Update(segment.tensor.leaf.unsummed, p, exact, b.reshape(shape), q, slot.group, slot.steps)

    # ------------------------------------------------------------ momenta that are each rank's own

    def _follow(self):
        """A rank's own part goes along, as it is."""
        saved = super().state_dict()
        self._settle()
        super().load_state_dict(saved)

    def state_dict(self, copy=True):
        whole = self._gather()
        saved = super().state_dict(copy)
        for k, b in whole.items():
            saved["state"][k]["momentum_buffer"] = xp.array(to(b, "cpu")) if copy else b
        return saved

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        for _, comm, b in self._unsummed():
            if comm.rank:
                b[...] = 0

    def _gather(self):
        """{number of a parameter that is `unsummed`: the sum of the ranks' momenta}; all of it is rank 0's now."""
        mine = self._unsummed()
        sums = [b.copy() for *_, b in mine]
        add_up([comm for _, comm, _ in mine], sums, "momenta")
        for (_, comm, b), whole in zip(mine, sums, strict=True):
            b[...] = 0 if comm.rank else whole
        return {k: whole for (k, *_), whole in zip(mine, sums, strict=True)}

    def _unsummed(self):
        """[(its number, the Communicator of the others, this rank's momentum)]"""
        return [(k, slot.segment.tensor.leaf.unsummed, slot.state(state)["momentum_buffer"].reshape(
            slot.segment.tensor.shape)) for k, (_, state, slot) in enumerate(self._places())
                if slot.segment.tensor.leaf.unsummed is not None]


class Update(NamedTuple):
    """One parameter in a step: who has other parts of its gradient, None: nobody; p, 1-d, and what is updated of it;
    B and Q; how many steps it has made, with this one."""

    comm: object
    p: object
    exact: object
    b: object
    q: object
    group: dict
    count: int

    def step(self, p, r):
        """Move the parameter by P and R of all ranks, and keep Q."""
        if self.group["right"] == "columns":
            self.q[...] = r / (xp.sqrt((r * r).sum(axis=-2, keepdims=True)) + self.group["eps"])
        else:
            q, t = module_of(r).linalg.qr(r)
            self.q[...] = q * xp.where(t.diagonal(axis1=-2, axis2=-1) < 0, -1, 1)[..., None, :]     # along R, not back
        move(self.p, self.exact, (p @ self.q.swapaxes(-1, -2)).reshape(-1),
             adjusted(self.b.shape, self.group["adjust_lr_fn"]), self.group, "Dion")


def redraw(matrices):
    """Draw columns of Q that have come to nothing, at the first step all: from there B finds more. By the parameter's
    values, which are the same on all ranks that have it, and in any stage of a pipeline. A GPU is waited for, once."""
    if not matrices:
        return
    lengths = [xp.sqrt((m.q * m.q).sum(axis=-2, keepdims=True)) for m in matrices]
    lost = [each <= LOST * each.max(axis=-1, keepdims=True) for each in lengths]
    known = to(module_of(lost[0]).concatenate([each.any().reshape(1) for each in lost]), "cpu")
    for m, columns in (both for both, some in zip(zip(matrices, lost, strict=True), known, strict=True) if some):
        values = zlib.crc32(to(m.p, "cpu").astype(np.float32).view(np.uint8))     # of any dtype
        drawn = np.random.default_rng([m.group["seed"], values, m.count]).standard_normal(m.q.shape).astype(m.q.dtype)
        m.q[...] = xp.where(columns, to(drawn / math.sqrt(m.q.shape[-2]), device_of(m.q)), m.q)


def add_up(comms, arrays, what):
    """Each array becomes the sum over the ranks of its Communicator (None: it is one): an all-reduce for all of one."""
    groups = {}         # id of a Communicator -> (it, the numbers of its arrays)
    for k, comm in enumerate(comms):
        if comm is not None:
            groups.setdefault((id(comm), arrays[k].dtype), (comm, []))[1].append(k)
    for comm, mine in groups.values():
        flat, parts = joined([arrays[k] for k in mine])
        known = zlib.crc32(repr([arrays[k].shape for k in mine]).encode())
        comm.all_reduce(flat, what=f"Dion's {what} of {len(mine)} matrices, {known:08x}")
        for k, part in zip(mine, parts, strict=True):
            arrays[k] = part
