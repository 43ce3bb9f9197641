"""A Job worked out on paper: bytes held, bytes sent, FLOPs, seconds. Plain data; printing is apart (command.py).

Of a GPT, what parameters, gradients and the optimizer's state take and what is sent are exact counts, padding included:
the ledger of a real run says the same. So are the float32 activations. Seconds are a model: peak FLOP/s, a ring at full
bandwidth (comm/cost.py), and nothing overlaps.
"""

from dataclasses import dataclass
from math import prod

from ..comm.cost import predict
from ..comm.reduction import WIRE_BYTES
from ..parallel.fully_sharded import SENT, held
from ..parallel.schedules import FORWARD, play
from .activations import activations
from .layout import buckets, unit

AXES = ("dp", "tp", "pp")


@dataclass(frozen=True)
class Collective:
    """`count` times per step on an axis; nbytes is of the whole array, or of the message (op "send")."""

    axis: str
    op: str
    nbytes: float
    count: float = 1

    def sent(self, ranks):
        """Bytes that a rank sends: the mean over the ranks, which differ by some bytes where they don't divide it."""
        return self.count * WIRE_BYTES[self.op](self.nbytes, self.nbytes / ranks, ranks)

    def seconds(self, ranks, costs):
        """By rings, of which an all-gather or a reduce-scatter is one half."""
        if self.op == "send":
            return self.count * (costs.alpha + costs.beta * self.nbytes)
        return self.count * predict("ring", ranks, self.nbytes, costs) / (1 if self.op == "all_reduce" else 2)


@dataclass(frozen=True)
class Rank:
    """A place in the pipeline, and what each rank there has, in bytes; the tensor-parallel rank with the largest parts.

    parameters, gradients, optimizer   when a step is through
    buffers       beside them, at most: gathered parameters (stage 3), gradients that aren't summed yet
    activations   None where the model's layers are unknown
    collectives   [Collective]; flops: of a step
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float | None
    collectives: list
    flops: float

    @property
    def memory(self):
        """All of it together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + (self.activations or 0)


@dataclass(frozen=True)
class Seconds:
    """Of a step, nothing overlapping: computing, the collectives of each axis, waiting in the pipeline."""

    compute: float
    dp: float
    tp: float
    pp: float
    bubble: float

    @property
    def step(self):
        return self.compute + self.dp + self.tp + self.pp + self.bubble

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
        size = getattr(self.job, axis)
        return max(sum(c.sent(size) for c in rank.collectives if c.axis == axis) for rank in self.ranks)


def plan(job, device):
    """A Plan."""
    ranks = [rank_of(job, place) for place in range(job.pp)]
    bubble = play(job.steps).bubble if job.pp > 1 else 0.0
    strides = {"tp": 1, "pp": job.tp, "dp": job.tp * job.pp}

    def seconds(axis):
        size = getattr(job, axis)
        costs = device.costs(size, strides[axis])
        return max(sum(c.seconds(size, costs) for c in rank.collectives if c.axis == axis) for rank in ranks)
    compute, tp = max(rank.flops for rank in ranks) / device.flops[job.precision], seconds("tp")
    return Plan(job, device, ranks, bubble,
                Seconds(compute, seconds("dp"), tp, seconds("pp"), (compute + tp) * bubble / (1 - bubble)))


def rank_of(job, place):
    """The Rank at a place in the pipeline."""
    if job.model.layers is None:
        size = job.model.count
        flops = job.model.step_flops(job.samples * job.time, job.time, job.checkpointing)
        return Rank(*state(job, size), 0, None, data_parallel(job, [size], 0), flops)
    stages = job.stages_of(place)
    count = sum(len(part) for stage in stages for part in job.shapes(stage))
    if job.stage == 0:
        pieces = [size for stage in stages for size in buckets(job.arrivals(stage), job.sizes["gradient"])]
    else:
        pieces = [size for stage in stages for size in units(job, stage)]
    collectives = data_parallel(job, pieces, count) + tensor_parallel(job, stages) + \
        pipeline_parallel(job, place)
    return Rank(*state(job, sum(pieces)), buffers(job, stages), kept(job, place, stages), collectives,
                flops_of(job, stages))


# ---------------------------------------------------------------- held

def state(job, size):
    """Bytes of parameters, gradients and the optimizer's state, of so many elements."""
    memory = held(job.stage, size, job.dp, job.sizes)
    return memory["parameter"], memory["gradient"], memory["optimizer"]


def units(job, stage):
    """Elements of fully_shard's units: of what stands around the blocks, and of each block."""
    before, *blocks, behind = job.shapes(stage)
    if job.model.layers == 1:       # a Sequential of one: then the feed-forward's two matrices are units
        block, = blocks
        before, blocks = before + block[:-4], [block[-4:-2], block[-2:]]
    return [unit(shapes, job.dp) for shapes in (before + behind, *blocks) if shapes]


def buffers(job, stages):
    """Bytes at most: of stage 3's gathered parameters two units (parallel/gathering.py); of whole gradients those of a
    layer on their way into their unit, in stages 2 and 3 also the rest's and two blocks', or, while micro-batches add
    up, everybody's."""
    if job.stage == 0:
        return 0
    largest = max(prod(shape) for stage in stages for part in job.shapes(stage) for shape in part)
    gathered, gradients = 0, largest + 4 * job.model.width
    if job.stage > 1:       # without a pipeline: one stage
        sizes = units(job, stages[0])
        alive = 3 if job.model.layers == 1 else 2       # of nested units all those that run
        gathered = sum(sorted(sizes)[-alive:]) if job.stage == 3 else 0
        gradients += sum(sizes if job.micro_batches > 1 else sizes[:1] + sorted(sizes[1:])[-2:])
    return gathered * job.sizes["parameter"] + gradients * job.sizes["gradient"]


def kept(job, place, stages):
    """The most bytes of activations at once, as the schedule goes."""
    costs = [activations(job.model, job.precision, stage, job.micro_batch, job.time, job.tp, job.sequence_parallel,
                         job.checkpointing) for stage in stages]
    now = most = 0
    for step in job.steps[place]:
        bytes_kept, more = costs[step.chunk]
        if step.kind == FORWARD:
            now += bytes_kept
            most = max(most, now)
        else:
            most = max(most, now + more)
            now -= bytes_kept
    return most


# ---------------------------------------------------------------- sent, by axis

def data_parallel(job, pieces, parameters):
    """Of gradients and parameters, in pieces of so many elements (buckets or units); with them travels which of the
    parameters somebody has used: in the buckets, or as an int32 each."""
    sizes, found = job.sizes, []
    if job.dp == 1:
        return found
    for i, size in enumerate(pieces):
        if job.stage == 0:
            found.append(Collective("dp", "all_reduce", size * sizes["gradient"]))
            continue
        # A single block's attention is in the first unit, which two others have displaced when backward comes to it.
        again = job.stage == 3 and job.model.layers == 1 and i == 0
        gathers = (SENT[job.stage] - 1 + again) * (job.micro_batches if job.stage == 3 else 1)
        found += [Collective("dp", "all_gather", size * sizes["parameter"], gathers),
                  Collective("dp", "reduce_scatter", size * sizes["gradient"])]
    if job.stage and parameters:
        found.append(Collective("dp", "all_reduce", 4 * parameters))
    return found


def tensor_parallel(job, stages):
    """Two all-reduces of a block's output forward, two backward; one forward behind the embedding, one backward before
    the output layer; three numbers per label, which is vocab_parallel_cross_entropy.

    With sequence parallelism each becomes an all-gather and a reduce-scatter; with "regather" backward gathers the
    inputs of column-parallel matrices once more. Gradients of norms and of row-parallel biases are summed, those of
    positions gathered (parallel/sequence_parallel.py).
    """
    if job.tp == 1:
        return []
    blocks, first, last = sum(s[0] for s in stages), any(s[1] for s in stages), any(s[2] for s in stages)
    m, tokens = job.micro_batches, job.samples / job.micro_batches * job.time
    nbytes = tokens * job.model.width * job.sizes["parameter"]
    each = (6 if job.checkpointing else 4) * blocks
    if job.sequence_parallel:
        again = 2 * blocks + last if job.sequence_parallel == "regather" else 0
        vector = job.model.width * job.sizes["gradient"]
        found = [Collective("tp", "all_gather", nbytes, m * (each + first + last + again)),
                 Collective("tp", "reduce_scatter", nbytes, m * (each + first + last)),
                 Collective("tp", "all_reduce", vector, m * (6 * blocks + 2 * last)),
                 Collective("tp", "all_gather", job.time * vector, m * first)]
    else:
        found = [Collective("tp", "all_reduce", nbytes, m * (each + first + last))]
    return found + [Collective("tp", "all_reduce", 4 * tokens, 3 * m)] * last


def pipeline_parallel(job, place):
    """A micro-batch's activations to the next stage, and the gradients of them back."""
    last = job.pp * job.chunks - 1
    nbytes = job.samples / job.micro_batches * job.time * job.model.width * job.sizes["parameter"]
    stages = range(place, last + 1, job.pp)
    messages = sum(stage < last for stage in stages) + sum(stage > 0 for stage in stages)
    return [Collective("pp", "send", nbytes, messages * job.micro_batches)] if job.pp > 1 else []


def flops_of(job, stages):
    """Of a rank's step: its layers', divided by tensor parallelism."""
    tokens = job.samples * job.time
    passes = 4 if job.checkpointing else 3
    return sum(passes * blocks * job.model.block_flops(tokens, job.time) + 3 * last * job.model.output_flops(tokens)
               for blocks, _, last in stages) / job.tp


# ---------------------------------------------------------------- a whole run

def gpu_hours(flops, flops_per_second):
    """Of so many FLOPs on devices that do so many of them per second, each."""
    return flops / flops_per_second / 3600
