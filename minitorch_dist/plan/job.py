"""Job: what is to be trained, and how it is divided. All that can't be is refused, in one line (see refused.py)."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ..data.loader import share
from ..parallel.context.context import HOW
from ..parallel.fsdp.zero import BYTES, BYTES_MIXED
from ..parallel.pipelines.schedules import V_SHAPED, check_drawable, placement_of, schedule_of
from ..parallel.pipelines.slices import equal_lengths
from .adapters import BASE_BITS, NF4_BITS, Parameter, adapters_of, flow, linears, parameters_of
from .optimizers import NUMBER, per_element
from .refused import check

PRECISIONS = {"mixed": BYTES_MIXED, "float32": BYTES}     # bytes per parameter as it is held, per element as it is sent
MOST_LAYERS = 10_000    # that are gone through one by one: some seconds


class Part(NamedTuple):
    """Of a sequence: how many positions, and where they end, which is how many there are to look at."""

    length: int
    end: int


@dataclass(frozen=True)
class Job:
    """One way to train a model.

    model          a GPT, or Parameters
    dp, tp, pp     the mesh: ranks that divide the samples, the matrices, the layers
    cp, ep         ranks that divide each sequence; that divide the samples and the experts. tp's are neighbours, then
                   ep's, then cp's, then pp's
    cp_by          "ring" or "all_to_all", as in parallel/context/context.py
    stage          ZeRO's along dp, cp and ep, 0 to 3; of the experts along those of them that don't divide them
    shard_over     so many neighbours of these ranks share a copy (None: all), as in parallel/fsdp/hybrid.py
    batch          samples per step, over all ranks; time: tokens of each
    micro_batches  pieces in which a rank's samples run, through the pipeline or one after another
    schedule       of parallel/pipelines/schedules.py, with so many chunks of layers per rank
    slices         of equal lengths, in which a pipeline's sequences go through it (parallel/pipelines/slices.py)
    sequence_parallel  False, True or "regather", as in parallel/tensor/tensor_parallel.py
    offload_optimizer  its state lies on the host, which makes the update (parallel/offload/offload.py)
    optimizer      of optimizers.OPTIMIZERS; fraction: of lines, or directions, that a step of Dion2, or Dion, is made
                   of (None: 0.25)
    state_bits     32, or 8: of each of the optimizer's numbers per parameter (optim/packed.py)
    lora_rank      of adapters, which are all that is trained then (None: all is), beside lora_targets, as lora.add's;
                   without dropout of their own
    base_bits      of the matrices beside which they stand: the precision's, or 4 (None: the precision's)
    lora_parameters  of a model of which only the number of parameters is known: how many adapters have beside it
    tiled_loss     the loss is made by tiles of the vocabulary, without logits (nn.linear_cross_entropy)
    reshard_after_forward  so many neighbours keep stage 3's values from forward to backward (None: nobody)
    param_bits, reduce_bits  of values, and of gradients, on their way: 8 or 4, in blocks (parallel/fsdp/few_bits.py);
                   None: the precision's
    dispatch_bits  of rows on their way to experts, and of their answers' gradients: 8 or 4 (parallel/experts/moe.py)
    dispatch_once  a token goes to each rank of experts once, of experts without a capacity (parallel/experts/once.py);
                   activations count as without
    experts_over   "cp", "tp": beside ep axes whose ranks, which share sequences, divide experts without a capacity
                   and route their own positions (parallel/tensor/mixtures.py)
    ValueError where it can't be done.
    """

    model: object
    dp: int = 1
    tp: int = 1
    pp: int = 1
    stage: int = 0
    precision: str = "mixed"
    batch: int = 1
    time: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    checkpointing: bool = False
    sequence_parallel: object = False
    cp: int = 1
    cp_by: str = "ring"
    ep: int = 1
    offload_optimizer: bool = False
    shard_over: int | None = None
    state_bits: int = 32
    lora_rank: int | None = None
    lora_targets: tuple | None = None
    base_bits: int | None = None
    lora_parameters: float | None = None
    tiled_loss: bool = False
    reshard_after_forward: int | None = None
    param_bits: int | None = None
    reduce_bits: int | None = None
    dispatch_bits: int | None = None
    dispatch_once: bool = False
    experts_over: tuple = ()
    optimizer: str = "adam"
    fraction: float | None = None
    slices: int = 1

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batches", "batch", "time", "chunks", "slices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_drawable(self.schedule, self.pp, self.micro_batches, self.chunks, self.slices)
        if (self.model.layers or 0) > MOST_LAYERS:
            raise ValueError(f"{self.model.layers:,} layers: plan goes through them one by one, and takes at most "
                             f"{MOST_LAYERS:,}")
        if self.shard_over is not None and (self.shard_over < 1 or self.replicas % self.shard_over):
            raise ValueError(f"--shard-over {self.shard_over}: it must divide the {self.replicas} ranks along dp, cp "
                             "and ep, of which so many share a copy")
        if self.shard_over is not None and self.stage == 0:
            raise ValueError(f"--shard-over {self.shard_over} with stage 0, which cuts nothing: take --stage 1, 2 or 3")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage {self.stage}: ZeRO has 0 (nothing is cut), 1 (the optimizer's state), 2 "
                             "(gradients as well), 3 (parameters as well)")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r}: take one of {', '.join(PRECISIONS)}")
        if self.state_bits not in NUMBER:
            raise ValueError(f"--state-bits {self.state_bits}: take {' or '.join(map(str, NUMBER))}")
        if self.cp_by not in HOW:
            raise ValueError(f"--cp-by {self.cp_by}: take one of {', '.join(HOW)}")
        by, divided = self.dp * self.ep, " · ep" * (self.ep > 1)
        if self.batch % by or self.batch // by < self.micro_batches:
            raise ValueError(f"a batch of {self.batch} samples on dp{divided} = {by} ranks in {self.micro_batches} "
                             f"micro-batches: dp{divided} must divide the batch and leave each rank a sample per "
                             f"micro-batch: --batch {by * self.micro_batches} or a multiple, or fewer --micro-batches")
        check(self)

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp * self.ep

    @property
    def replicas(self):
        """Ranks that hold the same parameters, or would, but for experts: gradients are summed over them."""
        return self.dp * self.cp * self.ep

    @property
    def shards(self):
        """Of the replicas, those over which one copy is cut."""
        return self.replicas if self.shard_over is None else self.shard_over

    @property
    def expert_axes(self):
        """Axes whose ranks divide the experts, the slowest first."""
        return [axis for axis in ("cp", "ep", "tp") if axis == "ep" or axis in self.experts_over]

    @property
    def expert_ranks(self):
        """How many ranks that is."""
        return prod(getattr(self, axis) for axis in self.expert_axes)

    @property
    def expert_axis(self):
        """The one that what they send counts along."""
        several = [axis for axis in self.expert_axes if getattr(self, axis) > 1]
        return several[0] if len(several) == 1 else "ep"

    def sizes_of(self, axes):
        """As text."""
        return " · ".join(f"{axis}={getattr(self, axis)}" for axis in axes)

    def along(self, axis):
        """How many ranks something is sent among along an axis: of ep all that divide experts."""
        return self.expert_ranks if axis == "ep" else getattr(self, axis)

    @property
    def unlike_axes(self):
        """Those of them along which replicas lie."""
        return [axis for axis in self.expert_axes if axis != "tp"]

    @property
    def unlike(self):
        """How many of the replicas have other experts each."""
        return prod(getattr(self, axis) for axis in self.unlike_axes)

    @property
    def expert_replicas(self):
        """Those that hold the same experts."""
        return self.replicas // self.unlike

    @property
    def expert_shards(self):
        """Of these, those over which one copy of the experts is cut."""
        return max(1, self.shards // self.unlike)

    @property
    def copies(self):
        """How many there are then."""
        return self.replicas // self.shards

    @property
    def near(self):
        """Of a copy's ranks, how many keep values from forward to backward; None: all, each its own part."""
        return None if self.reshard_after_forward == self.shards else self.reshard_after_forward

    @property
    def stages_per_rank(self):
        """Of the pipeline."""
        return 2 if self.schedule in V_SHAPED else self.chunks

    @property
    def sizes(self):
        """{"parameter", "gradient", "optimizer": bytes per element}; the last but for the optimizer's matrices."""
        return PRECISIONS[self.precision] | {"optimizer": per_element(self)}

    @cached_property
    def adapters(self):
        """A GPT's Adapters, or None."""
        if self.lora_rank is None:
            return None
        return adapters_of(self.model, self.lora_rank, self.lora_targets, self.frozen_bits)

    @property
    def targets(self):
        """The lora_targets that mean the same matrices of a part of the model by itself."""
        return self.adapters and tuple(f"*{layer}" for layer in self.adapters.layers)

    @property
    def frozen(self):
        """Whether adapters alone are trained."""
        return self.lora_rank is not None or self.lora_parameters is not None

    @property
    def frozen_bits(self):
        """Of the frozen matrices beside adapters."""
        return self.base_bits or BASE_BITS[self.precision][0]

    @property
    def frozen_itemsize(self):
        """Bytes per element of a model of which only the number of parameters is known."""
        return (NF4_BITS if self.frozen_bits == 4 else self.frozen_bits) / 8

    @property
    def depth(self):
        """Tokens ahead of the next one that training predicts; at depth k a sequence has k positions less."""
        return 0 if self.model.layers is None else self.model.predict - 1

    def ahead(self, k):
        """The Job of depth k by itself, but for what puts its input together: a model of one layer, on shorter
        sequences."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        window = self.model.window_of(self.model.layers + k - 1)
        alone = replace(self.model, layers=1, predict=1, window=window)
        there = {f"*{layer}" for layer in ("head", *linears(alone.block(1, window=window)))}
        targets = self.adapters and tuple(target for target in self.targets if target in there)
        sizes |= {"time": self.time - k, "model": alone, "lora_targets": targets}
        return Ahead(**sizes | ({"stage": min(self.stage, 2)} if self.frozen else {}))      # of one layer there is no 3

    @property
    def samples(self):
        """Of a rank, per step."""
        return self.batch // (self.dp * self.ep)

    @cached_property
    def pieces(self):
        """[samples] of a rank's micro-batches, in order."""
        bounds = [share(self.samples, k, self.micro_batches) for k in range(self.micro_batches)]
        return [hi - lo for lo, hi in bounds]

    @cached_property
    def steps(self):
        """The schedule: for each of the pipeline's ranks a list of steps."""
        return schedule_of(self.schedule, self.pp, self.micro_batches, self.chunks, self.slices)

    @property
    def calls(self):
        """How often a rank's layers run in a step: once for each micro-batch, or each slice of one."""
        return self.micro_batches * self.slices

    @cached_property
    def parts(self):
        """[Part] of a sequence, its slices."""
        lengths = equal_lengths(self.time, self.slices)
        return [Part(length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    @cached_property
    def placement(self):
        """[[stage]] of the pipeline's ranks."""
        return placement_of(self.steps)

    def stages_of(self, rank):
        """[(the range of its blocks' numbers, whether it is the first stage, whether the last)] of a pipeline rank's
        chunks."""
        count = self.pp * self.stages_per_rank
        return [(range(*share(self.model.layers, stage, count)), stage == 0, stage == count - 1)
                for stage in self.placement[rank]]

    @property
    def copied(self):
        """Whether the embedding is in two stages, the first and the last, since the output layer is tied to it."""
        return self.pp > 1 and self.model.tied

    def mesh(self):
        """As text."""
        more = {"cp": self.cp, "ep": self.ep, "copies": self.copies, "near": self.near or 1}
        return f"dp={self.dp} tp={self.tp} pp={self.pp}{''.join(f' {axis}={n}' for axis, n in more.items() if n > 1)}"

    def parameters(self, stage):
        """[[Parameter]] of one of stages_of, in the order of the model: before, in and behind its blocks, and of each
        further depth."""
        itemsize, parts = self.sizes["parameter"], self._named(stage, self.tp)
        if self.adapters is not None:
            return [parameters_of(named, self.adapters, itemsize) for named in parts]
        both, start = zip(parts, self._named(stage, 1), strict=True), stage[0].start
        return [[Parameter(name, shape, itemsize, True, (start, i, j), whole) for j, ((name, shape), (_, whole))
                 in enumerate(zip(*each, strict=True))] for i, each in enumerate(both)]

    def _named(self, stage, tp):
        """[[(name, shape)]] of these."""
        numbers, first, last = stage
        blocks = [self.model.block(tp, self.expert_ranks, self.model.window_of(i)) for i in numbers]
        ahead = [self.model.further(k, tp, self.expert_ranks) for k in range(1, 1 + self.depth)]
        return [self.model.embedding(tp) if first else [], *blocks,
                self.model.output(tp, self.copied) if last else [], *ahead]

    def arrivals(self, stage):
        """[Parameter] of the same that are trained, in the order in which their gradients come: the last layer's first,
        its weight before its bias, but where the bias is added to a sum over the ranks; B before A."""
        layers, found = [], []
        parts = self.parameters(stage)
        for part in parts[len(parts) - self.depth:]:
            part.sort(key=lambda p: p.name.startswith("norm."))     # is used behind the block
        for p in (p for part in parts for p in part if p.trained):
            layer, _, kind = p.name.rpartition(".")
            if kind not in ("bias", "lora_B") or layers[-1][0] != layer:
                layers.append((layer, []))
            layers[-1][1].append(p)
        for layer, pair in reversed(layers):
            turned = self.adapters or self.tp > 1 and layer in ("attention.out", "mlp.2")
            found += reversed(pair) if turned else pair
        return found

    def adapter_matrices(self, stages):
        """[(layer, (shape of A, shape of B))] of a rank's stages, in the order of the model, without further depths."""
        parts = [part for stage in stages for part in self.parameters(stage)[:-self.depth or None]]
        trained = [p for part in parts for p in part if p.trained]
        pairs = zip(trained[::2], trained[1::2], strict=True)
        return [(a.name.rpartition(".")[0], (a.shape, b.shape)) for a, b in pairs]

    def flows(self, stages):
        """[(how many blocks, their window, {product: (how many of its inputs a gradient flows to, whether to its
        output)})] of a rank's stages; those that are alike together."""
        kinds = Counter((self.model.window_of(i), first and i == blocks[0]) for blocks, first, _ in stages
                        for i in blocks)
        return [(count, window, flow(self.adapters, self.model.takes(window), begins))
                for (window, begins), count in kinds.items()]


class Ahead(Job):
    """A further depth by itself: what it begins with are features of blocks in front of it, and has a gradient."""

    def flows(self, stages):
        window = self.model.window_of(0)
        return [(1, window, flow(self.adapters, self.model.takes(window), False))]
