"""Gradient clipping by global norm: the same bits whatever flat buffers the gradients lie in, and on whichever ranks.

Squares are added up per 16 elements of a parameter, these sums per 4,096 elements of it, and those along one tree over
all parameters. No flat buffer and no cut over the ranks divides 16 elements. Of a parameter that is cut each rank adds
up its blocks; where two ranks have parts of one block, they exchange its sums per 16 elements. (Shares of experts are
stretches of 16 elements, too, but for very small ones: their norm is then right, and has other last bits than that of
whole ones. Parts by tensor parallelism are added up by themselves.)
"""

import weakref
from dataclasses import dataclass

import numpy as np

from ..autodiff.writes import wrote
from ..backend import TILE, device_of, module_of, on_host, to, xp
from ..divergence import Diverged, quiet
from ..flat import ALIGN, BLOCK, flat_buffers, round_up
from .groups import tensors

SUMS = BLOCK // ALIGN       # of 16 elements each, in a block


@dataclass(frozen=True)
class Table:
    """Where the sums per 16 elements of some of a flat buffer's parameters belong: rows of SUMS, one per block of 4,096
    elements, each parameter's from a row of its own on. Arrays live where the buffer does.

    source  which of the buffer's sums
    places  where each goes, in the flattened table
    rows    per parameter: its first row, and the one behind its last
    shared  rows of which other ranks have a part
    """

    source: object
    places: object
    rows: list
    shared: object

    @classmethod
    def of(cls, flat, segments):
        """For these segments of the buffer."""
        source, places, rows, shared, end = [], [], [], [], 0
        for s in segments:
            start, size, cuts = (0, s.stop - s.start, []) if flat.unit is None else flat.unit.piece(s.tensor)
            if flat.over is not None:
                share = round_up(size, ALIGN)       # the next one begins there
                cuts = [rank * share + cut for rank in range(flat.over.size) for cut in (0, *cuts)]
                start, size = start + flat.over.rank * share, flat.over.size * share
            here = np.arange(s.start // ALIGN, s.end // ALIGN)
            source.append(here)
            places.append(here - s.start // ALIGN + start // ALIGN + end * SUMS)
            shared.append(np.unique([cut // BLOCK for cut in cuts if cut % BLOCK]).astype(np.int64) + end)
            rows.append((end, end := end + -(-size // BLOCK)))
        source, places, shared = (to(np.concatenate([np.zeros(0, np.int64), *parts]), device_of(flat.grads))
                                  for parts in (source, places, shared))
        return cls(slice(len(source)) if len(segments) == len(flat.segments) else source, places, rows, shared)

    def filled(self, sums):
        """The table of a flat array's squares_by_16: float64 (rows, SUMS)."""
        table = module_of(sums).zeros((self.rows[-1][1] if self.rows else 0, SUMS))
        table.reshape(-1)[self.places] = sums[self.source]
        return table


def tables(flats, chosen):
    """[(flat buffer, its segments of `chosen` tensors' ids, their Table)]; kept with the buffer for the next time."""
    found = []
    for flat in flats:
        segments = [s for s in flat.live if id(s.tensor) in chosen]
        key = tuple(id(s.tensor) for s in segments)     # no start: one without elements begins where the next one does
        if flat.norm_table is None or flat.norm_table[0] != key:
            flat.norm_table = key, Table.of(flat, segments)
        found.append((flat, segments, flat.norm_table[1]))
    return found


def squares_by_16(x):
    """Σ x² of every 16 elements of a flat array, float64; zeros in the padding."""
    if not on_host(x):
        return xp.multiply(x, x, dtype=np.float64).reshape(-1, ALIGN).sum(axis=1)
    sums = np.empty(len(x) // ALIGN)        # tile by tile, and without the squares: in a third of the time
    for start in range(0, len(x), TILE):
        rows = x[start:start + TILE].astype(np.float64).reshape(-1, ALIGN)
        np.einsum("ij,ij->i", rows, rows, out=sums[start // ALIGN:(start + TILE) // ALIGN])
    return sums


def block_sums(tabled, by_16=None):
    """{id of a tensor: Σ g² per block of 4,096 elements of its whole parameter, float64 on the host}. by_16: {id of a
    flat buffer: squares_by_16 of what lies as its gradients do, and is meant instead of them}."""
    found, by_comm = {}, {}     # by_comm: {who has the rest: [(segments, table, its sums, its shared rows)]}
    for flat, segments, table in tabled:
        filled = table.filled(squares_by_16(flat.grads) if by_16 is None else by_16[id(flat)])
        sums = filled.sum(axis=1)
        comms = tuple(comm for comm in (flat.unit and flat.unit.comm, flat.over) if comm is not None)
        if not comms:
            found |= per_tensor(segments, table, sums)
        else:
            by_comm.setdefault(comms, []).append((segments, table, sums, filled[table.shared]))
    for comms, units in by_comm.items():
        # Each number is one rank's, and 0 on all others: these sums round nothing.
        vector = xp.concatenate([*(sums for _, _, sums, _ in units), *(parts.reshape(-1) for *_, parts in units)])
        for comm in comms:
            comm.all_reduce(vector)
        at, rest = 0, sum(sums.size for _, _, sums, _ in units)
        for segments, table, sums, parts in units:
            whole = vector[at:at + sums.size]
            whole[table.shared] = vector[rest:rest + parts.size].reshape(parts.shape).sum(axis=1)
            found |= per_tensor(segments, table, whole)
            at, rest = at + sums.size, rest + parts.size
    return found


def per_tensor(segments, table, sums):
    """{id of a tensor: its rows' sums, on the host}."""
    sums = to(sums, "cpu")
    return {id(s.tensor): sums[first:end] for s, (first, end) in zip(segments, table.rows, strict=True)}


def tree_sum(values):
    """Sum along a balanced binary tree in index order: the same bits, whoever holds which part."""
    values = list(values)
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) & ~1:]
    return values[0] if values else 0.0


def whole_squares(flats, params, *by_16):
    """{id of a tensor: Σ x² of its whole parameter, float64 (len(by_16),)}, of each x whose squares are given as
    block_sums takes them; of parts by tensor parallelism what other ranks have is added. Collective where parameters
    are cut."""
    tabled = tables(list({id(flat): flat for flat in flats}.values()), {id(p) for p in params})
    by_block = [block_sums(tabled, each) for each in by_16]
    sums = {id(p): np.array([tree_sum(each[id(p)]) for each in by_block], np.float64) for p in params}
    shares = {}         # id of a Communicator -> (it, the parameters of which its other ranks have parts)
    for p in params:
        shares.setdefault(id(summing(p)), (summing(p), []))[1].append(p)
    for comm, theirs in shares.values():
        if comm is not None:
            together = np.stack([sums[id(p)] for p in theirs])
            comm.all_reduce(together)
            sums |= {id(p): row for p, row in zip(theirs, together, strict=True)}
    return sums


def squares(params, sums):
    """(Σ g² per block of 4,096 elements of all parameters but parts by tensor parallelism, Σ g² of these, what other
    ranks have of them included). sums: as from block_sums. Collective for parts."""
    shares = {}         # {id(comm): (who has the other parts, [Σ g² of this rank's, per block])}
    for p in params:
        comm = summing(p)
        shares.setdefault(id(comm), (comm, []))[1].extend(sums[id(p)])
    _, whole = shares.pop(id(None), (None, []))
    total = 0.0
    for comm, own in shares.values():
        part = np.array([tree_sum(own)], np.float64)
        comm.all_reduce(part)
        total += float(part[0])
    return whole, total


def others(p):
    """The Communicator of those that have the other parts of a parameter; None: it is whole, or fully_shard's piece."""
    leaf = p.leaf
    return leaf.over if leaf.over is not None or leaf.part is None else leaf.part.comm


def summing(p):
    """The Communicator of those whose norms of their parts are added to that of this one; None: block_sums has the
    whole parameter's blocks."""
    return others(p) if p.leaf.over is None else None


def check_pieces(params, what):
    """ValueError for copies of fully_shard's pieces, as copy.deepcopy makes them: they lie in no unit's buffer."""
    if copies := [p.leaf.piece_of for p in params if p.leaf.piece_of is not None
                  and (p.leaf.flat is None or p.leaf.flat.unit is None)]:
        raise ValueError(f"{what}: {len(copies)} of these parameters are copies of this rank's pieces of "
                         f"{', '.join(copies[:3])} …, which fully_shard has cut, and don't say which ranks have the "
                         "others: take the parameters() of the fully_shard model")


def check_known(params, what):
    """ValueError for parts of parameters whose leaves don't say which ranks have the others."""
    check_pieces(params, what)
    if parts := [f"{p.shape} of {p.leaf.part_of}" for p in params if p.leaf.part_of is not None and others(p) is None]:
        raise ValueError(f"{what}: {len(parts)} of these parameters are this rank's parts of larger ones "
                         f"({', '.join(parts[:3])} …) and don't say which ranks have the others, as copies don't: take "
                         "the parameters of the model that was cut")


_stages = weakref.WeakKeyDictionary()       # {leaf of a parameter: the leaves of all of this rank's stages, weakly}


def is_part_of_pipeline(params):
    """These are all that this rank trains of a model whose other stages other ranks have."""
    leaves = weakref.WeakSet(p.leaf for p in params if p.requires_grad)
    _stages.update(dict.fromkeys(leaves, leaves))


def check_no_stages(params):
    """ValueError for all parameters of this rank's stages of a pipeline: their norm is not the model's."""
    given = {p.leaf for p in params} - {None}
    stages = {id(leaves): leaves for leaf in given if (leaves := _stages.get(leaf)) is not None}
    if any(set(leaves) <= given for leaves in stages.values()):
        raise ValueError("clip_grad_norm_: these are all parameters of this rank's stages of a Pipeline, whose norm is "
                         "another one on each rank: take pipeline.clip_grad_norm_(max_norm), of the model's norm")


def clip_grad_norm_(params, max_norm, error_if_nonfinite=True):
    """Scale all gradients so that their common 2-norm is at most max_norm. Returns the norm before, a float.

    params: tensors, or one, or (name, tensor) pairs, as an optimizer's.
    Gradients must be complete (after backward, all-reduced); parameters without one, and frozen ones, count as zero.
    Where ranks have parts of parameters (by fully_shard, tensor parallelism, annotations, experts that are divided) the
    norm is that of the whole gradient, the same on all ranks; then collective. A norm that is not finite is a
    ValueError (Diverged; in torch this has to be asked for), or, with error_if_nonfinite=False, returned, and changes
    nothing: beside a GradScaler, which leaves such a step out. ValueError for parts that don't say which ranks have the
    others; and for all parameters of this rank's stages of a pipeline, whose norm Pipeline.clip_grad_norm_ knows.
    """
    params = tensors(params)
    if _stages:
        check_no_stages(params)
    return clip_stages({0: params}, max_norm, error_if_nonfinite=error_if_nonfinite)


def clip_stages(stages, max_norm, comm=None, error_if_nonfinite=True):
    """clip_grad_norm_ of {number of a stage: its parameters}, those of this rank; the other ranks of comm have other
    stages of the same model. Collective over comm."""
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}; it must be at least 0")
    with quiet():       # it is told here
        norm, tabled = measured(stages, comm)
    if not xp.isfinite(norm):
        if error_if_nonfinite:
            raise Diverged(f"clip_grad_norm_: the norm of the gradients is {norm}: some gradient is inf or NaN (where "
                           "that is a GradScaler's to see to, which leaves the step out: error_if_nonfinite=False)")
    elif norm > max_norm:
        for flat, segments, _ in tabled:
            whole = len(segments) == len(flat.segments)
            for start, stop in [(0, segments[-1].end)] if whole else [(s.start, s.stop) for s in segments]:
                part = flat.grads[start:stop]
                part *= max_norm / (norm + 1e-6)      # torch's epsilon
                wrote(part, "clip_grad_norm_")
    return norm


def measured(stages, comm=None):
    """(the common 2-norm, inf or NaN where some gradient is; the tables that it is from), as clip_stages."""
    seen, chosen = set(), {}
    for stage, params in sorted(stages.items()):
        chosen[stage] = [p for p in tensors(params) if p.requires_grad and not (id(p) in seen or seen.add(id(p)))]
    params = [p for stage in chosen.values() for p in stage]
    if made := [p.shape for p in params if p.leaf is None]:
        raise ValueError(f"clip_grad_norm_: a tensor of shape {made[0]} is no leaf but what an op has made: give it "
                         "parameters")
    check_known(params, "clip_grad_norm_")
    if own := [p.shape for p in params if p.leaf.unsummed is not None]:
        raise ValueError(f"clip_grad_norm_: {len(own)} of these parameters, of shape {own[0]} say, are `unsummed`: "
                         "each rank has its own part of their gradients, and nobody knows the norm of the sum. Dion's "
                         "steps don't grow with it: clip the other parameters")
    flats = flat_buffers(params)
    for flat in flats:
        flat.collect(fill_missing=False)
    tabled = tables(flats, seen)
    sums = block_sums(tabled)
    found = {stage: squares([p for p in params if p.leaf.tied is None or not p.leaf.tied.copied], sums)
             for stage, params in chosen.items()}       # of tied ones the first stage's
    if comm is not None:
        found = {stage: both for each in comm.all_gather_object(found) for stage, both in each.items()}
    in_order = [found[stage] for stage in sorted(found)]
    total = tree_sum(s for whole, _ in in_order for s in whole) + sum(rest for _, rest in in_order)
    return float(xp.sqrt(total)), tabled
