"""A Job worked out on paper: bytes held, bytes sent, FLOPs, seconds. Plain data; printing is apart (command.py).

Of a GPT, what parameters, gradients and the optimizer's state take and what is sent are exact counts, padding included:
the ledger of a real run says the same. So are the float32 activations. Seconds are a model: peak FLOP/s, a ring at full
bandwidth (comm/cost.py), and nothing overlaps. What is sent: sent.py; what is kept for backward: activations.py.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ..parallel.fsdp.zero import SENT, held
from ..parallel.pipelines.schedules import BACKWARD, FORWARD, INPUT, play
from .activations import activations
from .layout import buckets, stepped, unit
from .optimizers import OPTIMIZERS, held_by_rank, is_unsummed, products, sent_by_optimizer
from .sent import AXES, SENT_ALONG, data_parallel, travelling
from .states import DELTA_TAKES

ALONE = (range(1), True, True)      # a model of one layer, as a stage
OWN = DELTA_TAKES.keys() - {"attention.out"}     # products without a matrix: the delta rule has all there are


class Piece(NamedTuple):
    """Elements that are held, and sent, together.

    ranks, copies  how many hold the same (a bucket); or share them, and of such shares how many there are (a unit)
    sizes          {"parameter", "gradient", "optimizer": bytes per element}; frozen ones have the first alone
    gathers        in stage 3, how often in a micro-batch its values are collected
    members        the Parameters that these are, in order
    unsummed       whether their gradients stay each rank's own
    """

    elements: float
    ranks: int
    copies: int
    sizes: dict
    gathers: int = SENT[3] - 1
    members: tuple = ()
    unsummed: bool = False

    @property
    def trained(self):
        return "gradient" in self.sizes


@dataclass(frozen=True)
class Rank:
    """A place in the pipeline, and what each rank there has, in bytes; the tensor-parallel rank with the largest parts.

    parameters, gradients, optimizer   when a step is through; the latter of the rank that has most of it
    buffers       beside them, at most: gathered parameters (stage 3), and what neighbours keep of them; gradients that
                  aren't summed yet
    activations   None where the model's layers are unknown
    collectives   [Collective]; flops: of a step; products: of these the optimizer's, which are no part of `flops`
    host, crossing  of offload: what lies in the host's memory instead, and what goes down to it and up again per step
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float | None
    collectives: list
    flops: float
    host: float = 0
    crossing: float = 0
    products: float = 0

    @property
    def memory(self):
        """All of it that lies on the device, together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + (self.activations or 0)


@dataclass(frozen=True)
class Seconds:
    """Of a step, nothing overlapping: computing, the collectives of each axis, waiting in the pipeline, to the host and
    back, the optimizer's products of matrices."""

    compute: float
    dp: float
    shard: float
    near: float
    tp: float
    pp: float
    cp: float
    ep: float
    bubble: float
    host: float
    update: float

    @property
    def step(self):
        return sum(vars(self).values())

    @property
    def longest(self):
        """The name of what takes longest."""
        return max(vars(self), key=vars(self).get)


@dataclass(frozen=True)
class Plan:
    """ranks: a Rank per place in the pipeline. bubble: the share of their time in which they wait for each other."""

    job: object
    device: object
    ranks: list
    bubble: float
    seconds: Seconds

    @property
    def fullest(self):
        """The Rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.memory)

    @property
    def fits(self):
        """Whether it holds no more than the device."""
        return self.fullest.memory <= self.device.memory

    def sent(self, axis):
        """Bytes per step and rank on an axis; of the pipeline's rank that sends most."""
        return max(sum(c.sent for c in rank.collectives if c.axis == axis) for rank in self.ranks)


def plan(job, device):
    """A Plan."""
    ranks = [rank_of(job, place) for place in range(job.pp)]
    bubble = play(job.steps).bubble if job.pp > 1 else 0.0
    spans = {"tp": job.tp, "cp": job.tp * job.ep * job.cp, "ep": job.tp * job.unlike, "pp": job.ranks // job.dp,
             "dp": job.ranks if job.dp > 1 else job.tp * job.cp * job.ep, "shard": span_of_shards(job),
             "near": span_of(job, job.near or 1)}
    took = {axis: max(sum(c.seconds(device.costs(spans[axis])) for c in rank.collectives if c.axis == axis)
                      for rank in ranks) for axis in AXES}
    compute = max(rank.flops for rank in ranks) / device.flops[job.precision]
    within = compute + took["tp"] + took["cp"] + took["ep"]     # what others in the pipeline wait for
    return Plan(job, device, ranks, bubble, Seconds(
        compute, **took, bubble=within * bubble / (1 - bubble),
        host=max(rank.crossing for rank in ranks) / device.host,
        update=max(rank.products for rank in ranks) / device.flops["float32"]))


def span_of_shards(job):
    """Among how many devices, numbered as the mesh goes, those that share a copy are."""
    return span_of(job, job.shards)


def span_of(job, ranks):
    """Among how many devices so many neighbours of those that hold the same are."""
    inner = job.cp * job.ep     # of them that are beside each other
    return job.tp * ranks if ranks <= inner else job.ranks // job.dp * -(-ranks // inner)


def rank_of(job, place):
    """The Rank at a place in the pipeline."""
    if job.model.layers is None:
        size = job.model.count if job.lora_parameters is None else job.lora_parameters
        pieces, buffered, activations_kept = [Piece(size, job.shards, job.copies, job.sizes)], 0, None
        if job.lora_parameters is not None:
            ranks, copies = (job.shards, job.copies) if job.stage == 3 else (1, 1)
            pieces.append(Piece(job.model.count, ranks, copies, {"parameter": job.frozen_itemsize}))
        collectives = data_parallel(job, pieces, 0)
        flops = job.model.step_flops(job.samples * job.time, job.checkpointing, job.lora_parameters)
    else:
        stages = job.stages_of(place)
        pieces, buffered, activations_kept = pieces_of(job, stages), buffers(job, stages), kept(job, place, stages)
        trained = [p.shape for stage in stages for part in job.parameters(stage) for p in part if p.trained]
        collectives, flops, size = data_parallel(job, pieces, len(trained)), flops_of(job, stages), stepped(trained)
        for each, where in ((job, stages), *((job.ahead(k), [ALONE]) for k in range(1, 1 + job.depth))):
            collectives += [c for axis, sent in SENT_ALONG.items() if job.along(axis) > 1
                            for c in sent(each, place, where)]
    collectives += sent_by_optimizer(job, pieces)
    parameters, gradients, optimizer = state(job, pieces)
    if not job.offload_optimizer:
        return Rank(parameters, gradients, optimizer, buffered, activations_kept, collectives, flops,
                    products=products(job, pieces))
    # Of each element whose state the rank has: its parameter and gradient come down, and its parameter goes up again.
    # Of a unit that is cut the first ranks have no padding.
    here = optimizer / job.sizes["optimizer"] if job.stage else size
    crossing = here * (2 * job.sizes["parameter"] + job.sizes["gradient"])
    return Rank(parameters, gradients, 0, buffered, activations_kept, collectives, flops, optimizer, crossing)


# ---------------------------------------------------------------- held

def pieces_of(job, stages):
    """[Piece] of a rank's buckets, or of its units; what is frozen, and not cut, is a piece by itself."""
    if job.stage:
        found = [it for stage in stages for module in units(job, stage) for it in module]
    else:
        found = []
        for stage in stages:
            groups, itemsize = {}, job.sizes["gradient"]
            for p in job.arrivals(stage):
                groups.setdefault((divided(job, p), is_unsummed(job, p)), []).append(p)
            for (experts, unsummed), members in groups.items():
                for size, count in buckets([p.shape for p in members], itemsize):
                    mine, members = members[:count], members[count:]
                    ranks = job.expert_replicas if experts else job.replicas
                    found.append(Piece(size, ranks, 1, job.sizes, members=tuple(mine), unsummed=unsummed))
    if job.stage < 3:
        found += [Piece(prod(p.shape), 1, 1, {"parameter": p.itemsize}) for stage in stages
                  for part in job.parameters(stage) for p in part if not p.trained]
    return found


def state(job, pieces):
    """Bytes of parameters, gradients and the optimizer's state, of so many elements."""
    memory = [held(job.stage, piece.elements, piece.ranks, piece.sizes) for piece in pieces]
    parameters, gradients, optimizer = (sum(part.get(kind, 0) for part in memory)
                                        for kind in ("parameter", "gradient", "optimizer"))
    if OPTIMIZERS[job.optimizer].matrices is not None:
        optimizer = float(max(held_by_rank(job, pieces)))
    return parameters, gradients, optimizer


def units(job, stage):
    """[[Piece]] of fully_shard's units, by module: what stands around the blocks, and each block; of divided experts
    they are apart, and so is, in stage 3, what is frozen, by its dtype."""
    parts = job.parameters(stage)
    before, *blocks, behind = parts[:len(parts) - job.depth]
    rest, found = [before, behind], []
    for count, several in ((job.model.layers, blocks), (job.depth, parts[len(parts) - job.depth:])):
        if count != 1:      # a pipeline's stage of one block names its units
            found += several
            continue
        # Of a Sequential or ModuleList of one not the block is a unit, but what is in Sequentials in it.
        inner = [] if job.model.experts else ["mlp.0.", "mlp.2."]
        found += [[p for p in several[0] if p.name.startswith(layer)] for layer in inner]
        rest.append([p for p in several[0] if not p.name.startswith(tuple(inner))])
    rest, *blocks = [units_of(job, module) for module in (sum(rest, []), *found)]
    if not job.checkpointing and begins_behind(job, stage):
        blocks[0] = [piece if piece.trained else piece._replace(gathers=piece.gathers - 1) for piece in blocks[0]]
    # A single block's attention is in the first unit, which two others have displaced when backward comes to it; where
    # the block runs again, it is open around them.
    displaced = nested(job) and not job.checkpointing
    return [[piece._replace(gathers=piece.gathers + displaced) for piece in rest], *blocks]


def begins_behind(job, stage):
    """Whether backward ends behind the frozen matrices of the first block: they all come before its adapters, or are
    beside the last of them."""
    numbers, first, _ = stage
    if not first or job.adapters is None or job.model.layers == 1:
        return False
    (_, _, comes), = job.flows([(numbers[:1], True, False)])
    return not any(count for count, _ in comes.values())


def units_of(job, module):
    """[Piece] of a module's parameters."""
    found = {}
    for p in sorted(module, key=lambda p: p.place):
        if p.trained or job.stage == 3:
            tied = job.copied and p.name in ("embed.weight", "head.weight")     # by itself (parallel/fsdp/grouping.py)
            found.setdefault((divided(job, p), p.trained, p.itemsize, tied), []).append(p)
    kinds = {False: (job.shards, job.replicas), True: (job.expert_shards, job.expert_replicas)}
    return [Piece(unit([p.shape for p in members], ranks, trained), ranks, alike // ranks,
                  job.sizes if trained else {"parameter": itemsize}, members=tuple(members))
            for (experts, trained, itemsize, _), members in found.items() for ranks, alike in (kinds[experts],)]


def divided(job, p):
    """Whether a parameter is of experts of which each rank has some."""
    return job.unlike > 1 and p.name.startswith("mlp.experts.")


def nested(job):
    """Whether there is a block by itself, whose feed-forward's two matrices are units of their own."""
    return 1 in (job.model.layers, job.depth) and not job.model.experts


def buffers(job, stages):
    """Bytes at most: of stage 3's gathered parameters; of whole gradients those of a layer on their way into their
    unit, in stages 2 and 3 also the rest's and two blocks', or, while micro-batches add up, everybody's; of messages in
    few bits; of matrices of 4 bits the largest, taken apart."""
    everything = [p for stage in stages for part in job.parameters(stage) for p in part]
    codes = [prod(p.shape) for p in everything if p.name.endswith("weight.codes")]
    apart = 2 * max(codes, default=0) * job.sizes["parameter"]
    if job.stage == 0:
        return apart
    largest = max(prod(p.shape) for p in everything if p.trained)
    vector = max(len(p.shape) == 1 and p.shape[0] for p in everything if p.trained)
    values, gradients = 0, largest + max(4 * job.model.width, vector)
    modules = [module for stage in stages for module in units(job, stage)]
    if job.depth:       # which all depths add to
        gradients += sum(prod(p.shape) for p in everything if p.trained and p.name in ("embed.weight", "head.weight"))
    if job.stage > 1:
        values = gathered(job, modules) + second(job, modules) if job.stage == 3 else 0
        sizes = [sum(piece.elements for piece in module if piece.trained) for module in modules]
        gradients += sum(sizes if job.micro_batches > 1 else sizes[:1] + sorted(sizes[1:])[-2:])
    return apart + values + messages(job, modules) + gradients * job.sizes["gradient"]


def gathered(job, modules):
    """Bytes of stage 3's parameters at once: of two modules, one behind the other (parallel/fsdp/gathering.py), as
    backward needs them: between further depths the rest runs; where a block runs again, of what is open around it and
    of the block, or of both units in it; in a pipeline of all."""
    rest, *sizes = [whole(module) for module in modules]
    if job.pp > 1:
        return rest + sum(sizes)
    apart = 2 if nested(job) else job.depth * (job.depth > 1)
    blocks, others = sizes[:len(sizes) - apart], sizes[len(sizes) - apart:]      # further depths, or what is in a block
    if job.checkpointing:
        return rest + max([*blocks, sum(others) if nested(job) else max(others, default=0)])
    again = [whole(piece for piece in module if piece.gathers > 1) for module in modules[1:]]
    neighbours = max([rest + max([0, *blocks[:1], *blocks[-1:]]), *(map(sum, zip(again, blocks[1:], strict=False)))])
    return max(neighbours, rest + max(others, default=0), sum(others) * nested(job))


def second(job, modules):
    """Bytes of what this rank keeps for its neighbours from forward to backward, as it travels."""
    if job.near is None:
        return 0
    return sum(piece.elements * travelling(job.param_bits if piece.trained else None, piece.sizes["parameter"])
               for module in modules for piece in module) / job.near


def messages(job, modules):
    """At most, bytes of messages in few bits, which are taken apart when they are there: two modules' values, and those
    that leave and come of two modules' gradients."""
    sizes = [sum(piece.elements for piece in module if piece.trained) for module in modules]
    two = sum(sorted(sizes)[-2:])
    return sum(times * two * travelling(bits, 0) for times, bits in ((1, job.param_bits), (4, job.reduce_bits)) if bits)


def whole(module):
    """Bytes of a module's units, gathered."""
    return sum(piece.elements * piece.sizes["parameter"] for piece in module)


def kept(job, place, stages):
    """The most bytes of activations at once, as the schedule goes."""
    costs = {(number, samples, j): activations(job, stage, samples, j)
             for number, stage in zip(job.placement[place], stages, strict=True) for samples in set(job.pieces)
             for j in range(job.slices)}
    now = most = 0
    for step in job.steps[place]:
        cost = costs[step.stage, job.pieces[step.micro_batch], step.slice]
        if step.kind == FORWARD:
            most = max(most, now + cost.in_forward)
            now += cost.until_backward + cost.left
        elif step.kind == BACKWARD:
            most = max(most, now + cost.in_backward)
            now += cost.grown - cost.until_backward
        elif step.kind == INPUT:
            most = max(most, now + cost.in_input)
            now += cost.late - cost.until_backward
        else:
            now -= cost.late
        most = max(most, now)
    return most


# ---------------------------------------------------------------- computed

def flops_of(job, stages):
    """Of a rank's step: its layers', divided by tensor parallelism; forward, once more where a block is checkpointed or
    the loss made by tiles (twice more where I and W are apart, and W has something to make), and backward for each
    gradient: of a matrix that isn't frozen, of an input that something trained is before."""
    time, forward, trained = job.time // job.cp, 2 if job.checkpointing else 1, job.adapters is None
    last = any(last for *_, last in stages)
    ahead = sum(flops_of(job.ahead(k), [ALONE]) + (2 + trained) * job.samples * (job.time - k) * job.model.join_flops
                for k in range(1, 1 + job.depth))
    parted = any(step.kind == INPUT for row in job.steps for step in row)
    # What each rank of tp does, the same.
    whole = (*["mlp.router", "mlp.experts", "mlp.shared"] * ("tp" not in job.experts_over),
             *["attention.down"] * (not job.sequence_parallel))
    tiles = job.tiled_loss * (1 + (parted and trained))
    found = last * (2 + trained + tiles) * job.model.output_flops(job.samples * time)
    for (samples, part), times in Counter(product(job.pieces, job.parts)).items():
        for count, window, flow in job.flows(stages):
            for name, flops in job.model.block_flops(samples * part.length // job.cp, part.length, window, job.cp,
                                                     part.end).items():
                back = flow[name][0] + (trained and name not in OWN)
                alike = job.tp if name.startswith(whole) else 1
                found += alike * times * count * (forward + back) * flops
    return ahead + found / job.tp + (0 if trained else 2 * job.samples * time * adapters_flops(job, stages, forward))


def adapters_flops(job, stages, forward):
    """Multiply-adds of a rank's adapters, per token. Before the model's first A nothing wants a gradient."""
    found = 3 * sum(map(prod, dict(job.adapter_matrices(stages)).get("head", ())))
    for count, window, flow in job.flows(stages):
        for name, shape in job.model.block(job.tp, job.expert_ranks, window):
            if (layer := name.removesuffix(".weight")) in job.adapters.layers and len(shape) == 2:
                a, b = map(prod, job.adapters.matrices(shape))
                parts = job.tp if layer == "attention.down" and job.sequence_parallel else 1
                found += count * ((forward + 1 + flow[layer][0]) * a + (forward + 2) * b) / parts
    return found


# ---------------------------------------------------------------- a whole run

def gpu_hours(flops, flops_per_second):
    """Of so many FLOPs on devices that do so many of them per second, each."""
    return flops / flops_per_second / 3600
