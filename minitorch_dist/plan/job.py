"""Job: what is to be trained, and how it is divided. All that can't be is refused here, in one line."""

from dataclasses import dataclass
from functools import cached_property

from ..data.loader import share
from ..parallel.schedules import SCHEDULES
from ..parallel.sequence_parallel import check_choice

# Bytes per parameter as it is held, and per element as it is sent. Mixed: 16 bits, and Adam's float32 master copy and
# two states (Rajbhandari et al. 2020, "ZeRO"); float32: this library's.
PRECISIONS = {"mixed": {"parameter": 2, "gradient": 2, "optimizer": 12}, "float32":
              {"parameter": 4, "gradient": 4, "optimizer": 8}}


@dataclass(frozen=True)
class Job:
    """One way to train a model.

    model          a GPT, or Parameters
    dp, tp, pp     the mesh: ranks that divide the samples, the matrices, the layers; tp's are neighbours, then pp's
    stage          ZeRO's along dp, 0 to 3
    batch          samples per step, over all ranks; time: tokens of each
    micro_batches  pieces in which a rank's samples run, through the pipeline or one after another
    schedule       of parallel/schedules.py, with so many chunks of layers per rank
    sequence_parallel  False, True or "regather", as in parallel/tensor_parallel.py
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

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "batch", "time", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage {self.stage}: ZeRO has 0 (nothing is cut), 1 (the optimizer's state), 2 "
                             "(gradients as well), 3 (parameters as well)")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r}: take one of {', '.join(PRECISIONS)}")
        if self.batch % self.dp or self.batch // self.dp < self.micro_batches:
            raise ValueError(f"a batch of {self.batch} samples on dp={self.dp} ranks in {self.micro_batches} "
                             "micro-batches: dp must divide the batch and leave each rank a sample per micro-batch: "
                             f"--batch {self.dp * self.micro_batches} or a multiple, or fewer --micro-batches")
        self._check_cut()
        self._check_schedule()

    def _check_cut(self):
        model = self.model
        check_choice("--sequence-parallel", self.sequence_parallel)
        if model.layers is None:
            if self.tp * self.pp > 1 or self.sequence_parallel:
                raise ValueError(f"tp={self.tp}, pp={self.pp} of a model of which only the number of parameters is "
                                 "known: give --layers, --width and --heads instead of --parameters")
            return
        if model.heads % self.tp:
            raise ValueError(f"tp={self.tp} must divide the {model.heads} heads: take another --tp")
        if model.vocabulary < self.tp:
            raise ValueError(f"tp={self.tp} ranks can't share a vocabulary of {model.vocabulary}: lower --tp")
        if model.layers < self.pp * self.chunks:
            raise ValueError(f"{model.layers} layers can't be cut into pp·chunks = {self.pp * self.chunks} stages: "
                             "lower --pp or --chunks")
        if self.time > model.context:
            raise ValueError(f"sequences of {self.time} tokens for a context of {model.context}: raise --context")
        if self.pp > 1 and model.tied:
            raise ValueError(f"a tied output layer can't be cut into pp={self.pp} stages, of which the first and the "
                             "last would share a parameter: add --untied")
        if self.pp > 1 and self.stage > 1:
            raise ValueError(f"stage {self.stage} with pp={self.pp}: a stage's gradients add up over the micro-batches "
                             "before they are reduced, so they are whole: take --stage 0 or 1")
        if self.sequence_parallel and (self.tp == 1 or self.time % self.tp):
            raise ValueError(f"sequence parallelism is for --tp 2 or more, which must divide the {self.time} tokens of "
                             f"a sequence; tp={self.tp}")

    def _check_schedule(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: take one of {', '.join(SCHEDULES)}")
        if self.schedule == "zb-h1":
            raise ValueError("schedule zb-h1: plan's tables don't know what is kept for W: take 1f1b; python -m "
                             "minitorch_dist pipeline zb-h1 says what the bubble is")
        if self.chunks > 1 and (self.schedule != "interleaved" or self.pp == 1):
            raise ValueError(f"{self.chunks} chunks per rank are for --schedule interleaved and --pp 2 or more")
        if self.schedule != "1f1b" and self.pp == 1:
            raise ValueError(f"--schedule {self.schedule} is for --pp 2 or more")
        if self.schedule == "interleaved" and self.micro_batches % self.pp:
            raise ValueError(f"interleaved: pp={self.pp} must divide the {self.micro_batches} micro-batches: take "
                             f"--micro-batches {-(-self.micro_batches // self.pp) * self.pp}")

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp

    @property
    def sizes(self):
        """{"parameter", "gradient", "optimizer": bytes per element}."""
        return PRECISIONS[self.precision]

    @property
    def samples(self):
        """Of a rank, per step."""
        return self.batch // self.dp

    @property
    def micro_batch(self):
        """Samples of the largest."""
        return -(-self.samples // self.micro_batches)

    @cached_property
    def steps(self):
        """The schedule: for each of the pipeline's ranks a list of steps."""
        numbers = (self.pp, self.micro_batches) + ((self.chunks,) if self.schedule == "interleaved" else ())
        return SCHEDULES[self.schedule](*numbers)

    def stages_of(self, rank):
        """[(blocks, whether it is the first stage, whether the last)] of a pipeline rank's chunks."""
        count = self.pp * self.chunks
        found = []
        for stage in range(rank, count, self.pp):
            lo, hi = share(self.model.layers, stage, count)
            found.append((hi - lo, stage == 0, stage == count - 1))
        return found

    def mesh(self):
        """As text."""
        return f"dp={self.dp} tp={self.tp} pp={self.pp}"

    def shapes(self, stage):
        """[[shape]] of the parameters of one of stages_of, in the order of the model: before, in and behind its
        blocks."""
        blocks, first, last = stage
        lists = [self.model.embedding(self.tp) if first else [], *[self.model.block(self.tp)] * blocks,
                 self.model.output(self.tp) if last else []]
        return [[shape for _, shape in named] for named in lists]

    def arrivals(self, stage):
        """[shape] of the same parameters in the order in which their gradients come: the last layer's first, its
        weight before its bias, but where the bias is added to a sum over the ranks."""
        blocks, first, last = stage
        named = [*(self.model.embedding(self.tp) if first else []), *self.model.block(self.tp) * blocks,
                 *(self.model.output(self.tp) if last else [])]
        layers, found = [], []
        for name, shape in named:
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                layers.append((layer, []))
            layers[-1][1].append(shape)
        for layer, shapes in reversed(layers):
            found += reversed(shapes) if self.tp > 1 and layer in ("attention.out", "mlp.2") else shapes
        return found
