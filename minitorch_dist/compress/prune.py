"""Pruning: masks that say which weights stay, and what keeps the others at zero while the model is trained.

    masks = prune.magnitude(model, 0.9)             # {"0.weight": array of bool, …}: True stays
    pruning = prune.Pruning(model, masks)           # the others are 0 from now on
    for batch in loader.epoch(e):
        …
        optimizer.step()
        pruning.apply()                             # and again
    print(prune.sparsity(model, masks))

A mask is put in force in one place, after the optimizer's step. Only there has everything come together that may write
to a weight: its gradient, momentum and moments of before it was pruned, weight decay, loaded values. A masked gradient
would leave all but the first. (So clip_grad_norm_ sees gradients of pruned weights, too.)

Masks are of whole parameters, under the names of named_parameters(), and the same on all ranks, however the model is
cut (checkpoints/layout.py says how). They travel in a checkpoint's facts:

    checkpoints.save(step, model, optimizer, masks=prune.to_facts(masks))
    step, facts = checkpoints.load(model, optimizer)
    pruning = prune.Pruning(model, prune.from_facts(facts["masks"]))

Sources: Han et al. 2015, "Learning both weights and connections" (magnitude); Zhu & Gupta 2017, "To prune, or not to
prune" (the gradual schedule); Mishra et al. 2021, "Accelerating sparse deep neural networks" (2:4).
"""

import base64
import zlib
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from ..autodiff.writes import wrote
from ..backend import is_floating, stream, to, to_device_of, whole
from ..checkpoints.layout import layouts, piece_of
from ..parallel.fsdp.fully_sharded import FullySharded
from ..parallel.wrapping import annotated
from ..tables import ruled

# ---------------------------------------------------------------- which weights stay


def magnitude(model, sparsity, scope="layer", names=None, within=None):
    """{name: mask}: the weights that are smallest in absolute value go.

    sparsity  the share that goes, in [0, 1]; of `size` weights round(sparsity · size). With scope "layer" also
              {name: share}
    scope     "layer": that share of each parameter; "global": of all together, whichever they are in
    names     of the parameters that are pruned; default: all of two or more axes (no biases, no norms)
    within    masks: what they have pruned stays so, and counts

    Of equal weights the first go. Collective for a fully_shard model; where tensor parallelism cuts it, too.
    ValueError for a weight that isn't finite, and for settings that don't fit.
    """
    return decided(model, names, lambda values: _smallest(
        {name: np.abs(finite(name, value)) for name, value in values.items()}, sparsity, scope, within))


def random(model, sparsity, seed=0, names=None, within=None):
    """{name: mask}: of each parameter a random share goes; the numbers depend on seed and name alone. Otherwise as
    magnitude."""
    return decided(model, names, lambda values: _smallest(
        {name: stream("prune", seed, name).random(value.shape) for name, value in values.items()}, sparsity, "layer",
        within))


def n_of_m(model, n=2, m=4, names=None):
    """{name: mask}: of every m neighbours along axis 1 (the inputs of Linear and Conv2d) the n largest in absolute
    value stay; of equal ones the first. 2 of 4 is what sparse tensor cores multiply at twice the rate. ValueError
    where m doesn't divide the inputs."""
    if not 0 < n < m:
        raise ValueError(f"n_of_m: n={n} of m={m}; n must be at least 1 and less than m")

    def decide(values):
        if odd := [f"{name} {value.shape}" for name, value in values.items() if value.ndim < 2 or value.shape[1] % m]:
            raise ValueError(f"n_of_m: axis 1 of {', '.join(odd)} is no multiple of m={m}: leave it out by names=…")
        return {name: _largest_in_groups(np.abs(finite(name, value)), n, m) for name, value in values.items()}
    return decided(model, names, decide)


def grouped(array, m):
    """(out, in, …) as (out, …, in/m, m): the groups of n_of_m as the last axis. A copy where there are more axes."""
    moved = np.moveaxis(array, 1, -1)
    return moved.reshape(*moved.shape[:-1], -1, m)


def ungrouped(groups):
    """What grouped has made of an array, as the array."""
    return np.moveaxis(groups.reshape(*groups.shape[:-2], -1), -1, 1)


def _largest_in_groups(scores, n, m):
    order = np.argsort(-grouped(scores, m), axis=-1, kind="stable")
    keep = np.zeros(order.shape, bool)
    np.put_along_axis(keep, order[..., :n], True, axis=-1)
    return np.ascontiguousarray(ungrouped(keep))


def finite(name, value):
    if not np.isfinite(value).all():
        raise ValueError(f"{name} holds inf or NaN, whose magnitude says nothing: was the training stable?")
    return value


def _smallest(scores, sparsity, scope, within):
    """Masks that drop the smallest scores."""
    if scope not in ("layer", "global"):
        raise ValueError(f"prune: scope={scope!r}; use 'layer' or 'global'")
    per_name = sparsity if isinstance(sparsity, dict) else dict.fromkeys(scores, sparsity)
    if isinstance(sparsity, dict) and (scope == "global" or set(sparsity) != set(scores)):
        raise ValueError(f"prune: sparsity is given for {sorted(sparsity)}, which must be the pruned parameters "
                         f"{sorted(scores)}, with scope='layer'")
    if odd := {name: share for name, share in per_name.items() if not 0 <= share <= 1}:
        raise ValueError(f"prune: sparsity {odd}: a share of weights must be in [0, 1]")
    if within is not None:      # below all others: a score is at least 0
        check_masks({name: score.shape for name, score in scores.items()}, within)
        scores = {name: np.where(within[name], score, -1) if name in within else score
                  for name, score in scores.items()}
    if scope == "layer":
        parts = [drop_smallest(score.reshape(-1), per_name[name]) for name, score in scores.items()]
    else:
        keep = drop_smallest(np.concatenate([score.reshape(-1) for score in scores.values()]), sparsity)
        parts = np.split(keep, np.cumsum([score.size for score in scores.values()])[:-1])
    return {name: part.reshape(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


def drop_smallest(scores, share):
    """False at the round(share · size) smallest, or at all that are gone already, if they are more."""
    keep = np.ones(scores.size, bool)
    count = max(round(share * scores.size), int((scores < 0).sum()))
    keep[np.argsort(scores, kind="stable")[:count]] = False
    return keep


def decided(model, names, decide):
    """decide({name: whole values on the host}) as masks for all ranks. Where no rank has whole values, rank 0 gets them
    and decides."""
    known = [name for name, _ in model.named_parameters()]
    names = [names] if isinstance(names, str) else names
    names = [name for name, p in model.named_parameters() if p.ndim > 1] if names is None else list(names)
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"prune: the model has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    if not names:
        raise ValueError("prune: the model has no parameter of two or more axes: say which by names=…")
    # They bring further ops into the table.
    if annotated(model):
        from ..parallel.sharding.annotate import full_state_dict as whole
    else:
        from ..parallel.tensor.tensor_parallel import full_state_dict as whole
    state, found = whole(model), None
    if not isinstance(model, FullySharded):
        return decide({name: state[name] for name in names})
    if model.comm.rank == 0:
        try:
            found = to_facts(decide({name: state[name] for name in names}))
        except ValueError as error:
            found = error
    found = model.comm.broadcast_object(found)
    if isinstance(found, ValueError):
        raise found
    return from_facts(found)


def check_whole(model, what):
    """ValueError where ranks hold parts of the model, of which `what` can't make anything."""
    if cut := [name for name, m in model.named_modules() if getattr(type(m), "is_part", False)]:
        raise ValueError(f"{what}: of {', '.join(cut[:4])} this rank has a part only: take a whole model, with "
                         "model.load_state_dict(parallel.tensor.full_state_dict(cut_model))")
    if cut := list(annotated(model)):
        raise ValueError(f"{what}: of {', '.join(cut[:4])}, which lies on a mesh, this rank has a part only: take a "
                         "whole model, with model.load_state_dict(annotate.full_state_dict(cut_model))")


def check_masks(shapes, masks):
    """ValueError unless each mask is a bool array of its parameter's shape. shapes: {name: shape}."""
    if unknown := sorted(set(masks) - set(shapes)):
        raise ValueError(f"masks for {', '.join(unknown)}, which the model doesn't have; it has {', '.join(shapes)}")
    for name, mask in masks.items():
        kind = f"{mask.dtype} of shape {mask.shape}" if hasattr(mask, "dtype") else f"a {type(mask).__name__}"
        if not hasattr(mask, "dtype") or mask.dtype != bool or mask.shape != tuple(shapes[name]):
            raise ValueError(f"the mask of {name} is {kind}; it must be bool of shape {tuple(shapes[name])}")


def to_facts(masks):
    """Masks as what JSON can hold, for a checkpoint's facts: {name: [shape, its bits in base64]}."""
    return {name: [list(mask.shape), base64.b64encode(np.packbits(mask).tobytes()).decode()]
            for name, mask in masks.items()}


def from_facts(facts):
    """The masks of which to_facts has made this. ValueError for too few bits, which would prune the rest."""
    masks = {}
    for name, (shape, bits) in facts.items():
        found = np.frombuffer(base64.b64decode(bits, validate=True), np.uint8)
        if found.size != -(-prod(shape) // 8):
            raise ValueError(f"from_facts: the mask of {name} has {8 * found.size} bits, and its shape {shape} wants "
                             f"{prod(shape)}, to the next byte: it is damaged")
        masks[name] = np.unpackbits(found, count=prod(shape)).astype(bool).reshape(shape)
    return masks


# ---------------------------------------------------------------- what keeps them in force

class Pruning:
    """Keeps the weights that masks leave out at zero: now, and at each apply(), to be called after optimizer.step().

    model   a Module, or one in DistributedDataParallel or fully_shard, or cut by parallelize_module or by annotations.
            Its parameters may move into flat buffers later
    masks   {name: bool array of the whole parameter's shape}, the same on all ranks: ValueError on all where not
    """

    def __init__(self, model, masks):
        self.model = model
        self.set(masks)

    def set(self, masks):
        """Take other masks from now on. What they let free stands at zero, and may grow. Collective."""
        kinds, tensors = layouts(self.model), dict(self.model.named_parameters())
        check_masks({name: kinds[name].shape for name in tensors}, masks)
        if codes := [f"{name} ({tensors[name].dtype})" for name in masks if not is_floating(tensors[name].dtype)]:
            raise ValueError(f"Pruning: {', '.join(codes[:4])}: a code of 0 is no weight of 0: leave it out, or prune "
                             "the model before it is quantised")
        self._check_alike(masks)
        self.masks = masks
        self.kept = []      # (parameter, Place, which elements there stay)
        for name, mask in masks.items():
            for box, place in kinds[name].pieces:
                index = tuple(slice(*side) for side in box)
                part = (mask if len(box) == mask.ndim else mask.reshape(-1))[index]
                self.kept.append((tensors[name], place, to_device_of(part, tensors[name].data)))
        self.apply()

    def _check_alike(self, masks):
        cut = [m.comm for m in self.model.modules() if getattr(type(m), "is_part", False)]
        cut += [axis for p in annotated(self.model).values() for axis in p.comms.values()]
        comms = [c for c in dict.fromkeys([getattr(self.model, "comm", None), *cut]) if c is not None and c.size > 1]
        mine = {name: zlib.crc32(np.packbits(mask).tobytes()) for name, mask in sorted(masks.items())}
        problem = None
        for comm in comms:
            for rank, theirs in zip(comm.world_ranks, comm.all_gather_object(mine), strict=True):
                if other := sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)):
                    problem = problem or (f"Pruning: the masks of {', '.join(other[:4])} are others on rank {rank} "
                                          f"than on rank {comm.world_ranks[comm.rank]}: they must be the same on all")
        for comm in comms:      # on a grid a rank shares no axis with most of the others
            problem = next(filter(None, comm.all_gather_object(problem)), None)
        if problem:
            raise ValueError(problem)

    def apply(self):
        """Set the pruned weights to zero again (NaN and inf stay, for you to see)."""
        for tensor, place, kept in self.kept:
            part = piece_of(tensor.data, place)
            part *= kept.reshape(part.shape)        # nine times as fast as copyto(part, 0, where=…)
            wrote(part, "pruning")
        if isinstance(self.model, FullySharded):
            self.model.stale = True     # stages 1 and 2: the other ranks haven't seen it


def cubic(final, begin, end, initial=0.0):
    """step -> sparsity: `initial` until step `begin`, `final` from `end` on; between, fast at first:
    final + (initial - final) (1 - (step - begin) / (end - begin))³. Source: Zhu & Gupta 2017, eq. 1."""
    if not (0 <= begin < end < inf and 0 <= initial <= final <= 1):
        raise ValueError(f"cubic: from sparsity {initial} at step {begin} to {final} at step {end}: both must grow, "
                         "sparsity within [0, 1]")
    return lambda step: final + (initial - final) * (1 - min(max(step - begin, 0) / (end - begin), 1)) ** 3


class GradualPruning(Pruning):
    """Pruning that grows while the model is trained; call step() after each optimizer.step().

    schedule  step -> sparsity after so many steps, such as cubic(0.9, begin=100, end=800)
    every     new masks are made each so many steps (in the paper 100; it takes as long as many steps of a small model),
              within the old ones; in between these are applied
    find      find(model, sparsity, within=masks) -> masks; default magnitude

    To go on from a checkpoint: GradualPruning(…, steps=step, masks=from_facts(facts["masks"])).
    """

    def __init__(self, model, schedule, every=1, find=magnitude, steps=0, masks=None):
        every, steps = whole("every", every), whole("steps", steps)
        if every < 1 or steps < 0:
            raise ValueError(f"GradualPruning: every={every}, steps={steps}; the one must be at least 1, the other 0")
        self.schedule, self.every, self.find, self.steps = schedule, every, find, steps
        self.reached = schedule(steps - steps % every)
        super().__init__(model, masks if masks is not None else find(model, self.reached))

    def step(self):
        """A step is done. Collective where new masks are due."""
        self.steps += 1
        if self.steps % self.every == 0 and (wanted := self.schedule(self.steps)) > self.reached:
            self.reached = wanted
            self.set(self.find(self.model, wanted, within=self.masks))
        else:
            self.apply()


# ---------------------------------------------------------------- how sparse a model is

@dataclass(frozen=True)
class Sparsity:
    """How many weights are left: rows (name, shape, kept, of how many) per parameter; print it."""

    rows: list

    @property
    def kept(self):
        """Of all parameters."""
        return sum(row[2] for row in self.rows)

    @property
    def size(self):
        """Elements of all parameters."""
        return sum(row[3] for row in self.rows)

    def __str__(self):
        lines = [("parameter", "shape", "kept", "of", "share")]
        for name, shape, kept, size in (*self.rows, ("total", (), self.kept, self.size)):
            lines.append((name, " × ".join(map(str, shape)), f"{kept:,}", f"{size:,}",
                          f"{100 * kept / size if size else 100:.1f} %"))
        return ruled(lines, left=2)


def sparsity(model, masks=None):
    """The Sparsity of a model's parameters: what masks let stand (all, where there is none); without masks, what isn't
    zero as the values are, whoever has made them so. Collective then where ranks hold parts of them."""
    kinds, kept = layouts(model), {}
    if masks is not None:
        check_masks({name: kind.shape for name, kind in kinds.items()}, masks)
        kept = {name: prod(kinds[name].shape) for name, _ in model.named_parameters()}
        kept |= {name: int(mask.sum()) for name, mask in masks.items()}
    else:
        cut = _cutting(model)
        for name, p in model.named_parameters():
            count = np.array([np.count_nonzero(to(p.data, "cpu"))], np.float64)     # exact up to 2**53
            for comm in cut.get(name, ()):
                comm.all_reduce(count)
            kept[name] = int(count[0])
    return Sparsity([(name, kinds[name].shape, count, prod(kinds[name].shape)) for name, count in kept.items()])


def _cutting(model):
    """{name: [Communicator]} of the parameters of which each of its ranks has a part, or a part of its part."""
    from ..parallel.tensor.tensor_parallel import parts_of
    cut = {name: [comm] for name, (comm, *_) in parts_of(model).items()}
    cut |= {name: [p.local.leaf.over] for name, p in annotated(model).items() if p.local.leaf.over is not None}
    if isinstance(model, FullySharded):
        cut |= {name: [unit.comm, *cut.get(name, [])] for unit in model.units for name in unit.names}
    return cut
