"""A Job worked out on paper: bytes held, bytes sent, FLOPs, seconds. Plain data; printing is apart (command.py).

Of a GPT, what parameters, gradients and the optimizer's state take and what is sent are exact counts, padding included:
the ledger of a real run says the same. So are the float32 activations. Seconds are a model: peak FLOP/s, a ring at full
bandwidth (comm/cost.py), and nothing overlaps. What is sent along each axis: the functions of the table SENT_ALONG.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from ..comm.cost import predict
from ..comm.reduction import WIRE_BYTES
from ..parallel.schedules import BACKWARD, FORWARD, INPUT, play
from ..parallel.zero import SENT, held
from .activations import activations
from .layout import buckets, stepped, unit

AXES = ("dp", "shard", "tp", "pp", "cp", "ep")     # shard: of dp, where only some share a copy (Job.shard_over)


@dataclass(frozen=True)
class Collective:
    """`count` times per step among so many ranks of an axis; nbytes is of the whole array (all_to_all: of a rank's), or
    of the message (op "send")."""

    axis: str
    ranks: int
    op: str
    nbytes: float
    count: float = 1

    @property
    def sent(self):
        """Bytes that a rank sends: the mean over the ranks, which differ by some bytes where they don't divide it."""
        return self.count * WIRE_BYTES[self.op](self.nbytes, self.nbytes / self.ranks, self.ranks)

    def seconds(self, costs):
        """By rings, of which an all-gather or a reduce-scatter is one half; all_to_all: a message to each other."""
        n = self.ranks
        if self.op == "send":
            return self.count * (costs.alpha + costs.beta * self.nbytes)
        if self.op == "all_to_all":
            return self.count * (n - 1) * (costs.alpha + costs.beta * self.nbytes / n)
        return self.count * predict("ring", n, self.nbytes, costs) / (1 if self.op == "all_reduce" else 2)


@dataclass(frozen=True)
class Rank:
    """A place in the pipeline, and what each rank there has, in bytes; the tensor-parallel rank with the largest parts.

    parameters, gradients, optimizer   when a step is through
    buffers       beside them, at most: gathered parameters (stage 3), gradients that aren't summed yet
    activations   None where the model's layers are unknown
    collectives   [Collective]; flops: of a step
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

    @property
    def memory(self):
        """All of it that lies on the device, together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + (self.activations or 0)


@dataclass(frozen=True)
class Seconds:
    """Of a step, nothing overlapping: computing, the collectives of each axis, waiting in the pipeline, to the host and
    back."""

    compute: float
    dp: float
    shard: float
    tp: float
    pp: float
    cp: float
    ep: float
    bubble: float
    host: float

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
    spans = {"tp": job.tp, "cp": job.tp * job.cp, "ep": job.tp * job.ep, "pp": job.ranks // job.dp,
             "dp": job.ranks if job.dp > 1 else job.tp * job.cp * job.ep, "shard": span_of_shards(job)}
    took = {axis: max(sum(c.seconds(device.costs(spans[axis])) for c in rank.collectives if c.axis == axis)
                      for rank in ranks) for axis in AXES}
    compute = max(rank.flops for rank in ranks) / device.flops[job.precision]
    within = compute + took["tp"] + took["cp"] + took["ep"]     # what others in the pipeline wait for
    return Plan(job, device, ranks, bubble, Seconds(
        compute, **took, bubble=within * bubble / (1 - bubble),
        host=max(rank.crossing for rank in ranks) / device.host))


def span_of_shards(job):
    """Among how many devices, numbered as the mesh goes, those that share a copy are."""
    return job.tp * job.shards if job.shards <= job.cp else job.ranks // job.dp * -(-job.shards // job.cp)


def rank_of(job, place):
    """The Rank at a place in the pipeline."""
    if job.model.layers is None:
        size = job.model.count
        pieces, buffered, activations_kept = [(size, job.shards, job.copies)], 0, None
        collectives = data_parallel(job, pieces, 0)
        flops = job.model.step_flops(job.samples * job.time, job.checkpointing)
    else:
        stages = job.stages_of(place)
        pieces, buffered, activations_kept = pieces_of(job, stages), buffers(job, stages), kept(job, place, stages)
        count = sum(len(part) for stage in stages for part in job.shapes(stage))
        collectives = data_parallel(job, pieces, count) + \
            [c for axis, sent in SENT_ALONG.items() if getattr(job, axis) > 1 for c in sent(job, place, stages)]
        flops = flops_of(job, stages)
        size = stepped(shape for stage in stages for part in job.shapes(stage) for shape in part)
    parameters, gradients, optimizer = state(job, pieces)
    if not job.offload_optimizer:
        return Rank(parameters, gradients, optimizer, buffered, activations_kept, collectives, flops)
    # Of each element whose state the rank has: its parameter and gradient come down, and its parameter goes up again.
    # Of a unit that is cut the first ranks have no padding.
    here = optimizer / job.sizes["optimizer"] if job.stage else size
    crossing = here * (2 * job.sizes["parameter"] + job.sizes["gradient"])
    return Rank(parameters, gradients, 0, buffered, activations_kept, collectives, flops, optimizer, crossing)


# ---------------------------------------------------------------- held

def pieces_of(job, stages):
    """[(elements, ranks that hold the same, 1)] of a rank's buckets, or [(elements, ranks that share them, copies)] of
    its units."""
    if job.stage:
        return [it for stage in stages for module in units(job, stage) for it in module]
    found = []
    for stage in stages:
        for expert, ranks in ((False, job.replicas), (True, job.dp)):       # its own, where experts are divided
            shapes = [shape for name, shape in job.arrivals(stage) if (job.ep > 1 and "experts" in name) == expert]
            found += [(size, ranks, 1) for size in (buckets(shapes, job.sizes["gradient"]) if shapes else [])]
    return found


def state(job, pieces):
    """Bytes of parameters, gradients and the optimizer's state, of so many elements."""
    memory = [held(job.stage, size, ranks, job.sizes) for size, ranks, _ in pieces]
    return tuple(sum(part[kind] for part in memory) for kind in ("parameter", "gradient", "optimizer"))


def units(job, stage):
    """[[(elements, ranks that share them, copies)]] of fully_shard's units, by module: what stands around the blocks,
    and each block; of divided experts they are apart."""
    before, *blocks, behind = job.shapes(stage)
    if job.model.layers == 1:       # of a Sequential of one not the block is a unit, but what is in Sequentials in it
        before, blocks = before + blocks[0], []
        if nested(job):
            before, blocks = before[:-4], [before[-4:-2], before[-2:]]
    return [units_of(job, shapes) for shapes in (before + behind, *blocks) if shapes]


def units_of(job, shapes):
    """[(elements, ranks that share them, copies)] of a module's units."""
    experts = [shape for shape in shapes if job.ep > 1 and len(shape) == 3]     # stacks of matrices
    others = [shape for shape in shapes if shape not in experts]
    kinds = (others, job.shards, job.replicas), (experts, job.expert_shards, job.dp)
    return [(unit(some, ranks), ranks, alike // ranks) for some, ranks, alike in kinds if some]


def nested(job):
    """Whether the feed-forward's two matrices are units of their own."""
    return job.model.layers == 1 and job.model.family == "gpt" and not job.model.experts


def buffers(job, stages):
    """Bytes at most: of stage 3's gathered parameters two modules' (parallel/gathering.py), in a pipeline all of them;
    of whole gradients those of a layer on their way into their unit, in stages 2 and 3 also the rest's and two blocks',
    or, while micro-batches add up, everybody's."""
    if job.stage == 0:
        return 0
    largest = max(prod(shape) for stage in stages for part in job.shapes(stage) for shape in part)
    gathered, gradients = 0, largest + 4 * job.model.width
    if job.stage > 1:
        sizes = [sum(size for size, *_ in module) for stage in stages for module in units(job, stage)]
        alive = len(sizes) if job.pp > 1 else 3 if nested(job) else 2       # of nested units all those that run
        gathered = sum(sorted(sizes)[-alive:]) if job.stage == 3 else 0
        gradients += sum(sizes if job.micro_batches > 1 else sizes[:1] + sorted(sizes[1:])[-2:])
    return gathered * job.sizes["parameter"] + gradients * job.sizes["gradient"]


def kept(job, place, stages):
    """The most bytes of activations at once, as the schedule goes."""
    costs = {(number, samples): activations(job, stage, samples)
             for number, stage in zip(job.placement[place], stages, strict=True) for samples in set(job.pieces)}
    now = most = 0
    for step in job.steps[place]:
        cost = costs[step.stage, job.pieces[step.micro_batch]]
        if step.kind == FORWARD:
            now += cost.until_backward
        elif step.kind == BACKWARD:
            most = max(most, now + cost.in_backward)
            now -= cost.until_backward
        elif step.kind == INPUT:
            most = max(most, now + cost.in_input)
            now += cost.late - cost.until_backward
        else:
            now -= cost.late
        most = max(most, now)
    return most


# ---------------------------------------------------------------- sent, by axis

def data_parallel(job, pieces, parameters):
    """Of gradients and parameters, in pieces as pieces_of gives: buckets or units; with them travels which of the
    parameters somebody has used: in the buckets, or as an int32 each. A unit's part is summed over the copies."""
    sizes, found, axis = job.sizes, [], "shard" if job.copies > 1 else "dp"
    for i, (size, ranks, copies) in enumerate(pieces):
        if job.stage == 0:
            found.append(Collective("dp", ranks, "all_reduce", size * sizes["gradient"]))
            continue
        # A single block's attention is in the first unit, which two others have displaced when backward comes to it.
        again = job.stage == 3 and i == 0 and nested(job)
        gathers = (SENT[job.stage] - 1 + again) * job.micro_batches if job.stage == 3 and job.pp == 1 else 1
        found += [Collective(axis, ranks, "all_gather", size * sizes["parameter"], gathers),
                  Collective(axis, ranks, "reduce_scatter", size * sizes["gradient"]),
                  Collective("dp", copies, "all_reduce", size / ranks * sizes["gradient"])]
    if job.stage and parameters:
        found.append(Collective("dp", job.replicas, "all_reduce", 4 * parameters))
    return [it for it in found if it.ranks > 1]


def _tokens(job):
    """Of a micro-batch, on a rank: the mean."""
    return job.samples / job.micro_batches * job.time / job.cp


def tensor_parallel(job, place, stages):
    """Two all-reduces of a block's output forward, two backward; one forward behind the embedding, one backward before
    the output layer; three numbers per label, which is vocab_parallel_cross_entropy.

    With sequence parallelism each becomes an all-gather and a reduce-scatter; with "regather" backward gathers the
    inputs of column-parallel matrices once more. Gradients of norms and of row-parallel biases are summed, those of
    positions gathered (parallel/sequence_parallel.py).
    """
    blocks, first, last = sum(s[0] for s in stages), any(s[1] for s in stages), any(s[2] for s in stages)
    m, tokens = job.micro_batches, _tokens(job)
    nbytes = tokens * job.model.width * job.sizes["parameter"]
    each = (6 if job.checkpointing else 4) * blocks
    if job.sequence_parallel:
        again = 2 * blocks + last if job.sequence_parallel == "regather" else 0
        vector, gpt = job.model.width * job.sizes["gradient"], job.model.family == "gpt"
        vectors = 6 * blocks + 2 * last if gpt else 2 * blocks + last
        found = [("all_gather", nbytes, m * (each + first + last + again)),
                 ("reduce_scatter", nbytes, m * (each + first + last)),
                 ("all_reduce", vector, m * vectors),
                 ("all_gather", job.time * vector, m * first * gpt)]
    else:
        found = [("all_reduce", nbytes, m * (each + first + last))]
    return [Collective("tp", job.tp, *what) for what in [*found, *[("all_reduce", 4 * tokens, 3 * m)] * last]]


def pipeline_parallel(job, place, stages):
    """A micro-batch's activations to the next stage, and the gradients of them back, where it is another rank's."""
    last = max(map(max, job.placement))
    owners = {stage: rank for rank, own in enumerate(job.placement) for stage in own}
    messages = sum(owners[other] != place for stage in job.placement[place]
                   for other in (stage - 1, stage + 1) if 0 <= other <= last)
    nbytes = _tokens(job) * job.model.width * job.sizes["parameter"]
    return [Collective("pp", job.pp, "send", nbytes, messages * job.micro_batches)]


def context_parallel(job, place, stages):
    """By a ring, keys and values to the next rank, ranks - 1 times forward, and backward too, with as many times their
    gradients behind them; or all-to-alls of queries, keys, values and the result, forward and backward. Checkpointing
    goes forward once more."""
    blocks, tokens, size = sum(s[0] for s in stages), _tokens(job), job.sizes["parameter"]
    calls, again = blocks * job.micro_batches, job.checkpointing
    wide, keys = (tokens * features / job.tp * size for features in (job.model.width, job.model.keys))
    if job.cp_by == "ring":
        return [Collective("cp", job.cp, "send", 2 * keys, (3 + again) * (job.cp - 1) * calls)]
    return [Collective("cp", job.cp, "all_to_all", nbytes, (4 + 2 * again) * calls) for nbytes in (wide, keys)]


def expert_parallel(job, place, stages):
    """All rows of the experts there and back, forward and backward: four all-to-alls per block (six where checkpointing
    goes forward again), of the same size whatever the tokens choose. An expert's places are a whole number in each
    micro-batch."""
    row, each = job.model.width * job.sizes["parameter"], (4 + 2 * job.checkpointing) * sum(s[0] for s in stages)
    return [Collective("ep", job.ep, "all_to_all", job.model.rows(samples * job.time) * row, each * times)
            for samples, times in Counter(job.pieces).items()]


SENT_ALONG = {"tp": tensor_parallel, "pp": pipeline_parallel, "cp": context_parallel, "ep": expert_parallel}


def flops_of(job, stages):
    """Of a rank's step: its layers', divided by tensor parallelism."""
    time, passes = job.time // job.cp, 4 if job.checkpointing else 3
    block = sum(times * job.model.block_flops(samples * time, job.time) for samples, times in
                Counter(job.pieces).items())
    output = job.model.output_flops(job.samples * time)
    return sum(passes * blocks * block + 3 * last * output for blocks, _, last in stages) / job.tp


# ---------------------------------------------------------------- a whole run

def gpu_hours(flops, flops_per_second):
    """Of so many FLOPs on devices that do so many of them per second, each."""
    return flops / flops_per_second / 3600
