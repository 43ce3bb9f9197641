"""What the ranks do in the tests of forms of parallelism together. What must hold is checked by the parent process.

A job is some forms on a mesh, and something that is done besides: a model is made, each form does its part to it, and
it is trained for two steps. Forms stand in FORMS, what is done besides in BESIDES (combination_besides.py): a new one
is a line there, and meets all others in test_combinations.py.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, divergence, nn, optim, training
from minitorch_dist.checkpoints.layout import layouts, named_arrays, piece_of
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import interleaved, one_forward_one_backward, placement_of, zb_h1
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .combination_besides import EVERY, USUAL

VOCABULARY, TIME, BATCH, DIM, STEPS, SEED = 13, 4, 8, 48, 2, 3      # a unit of fully_shard is cut every 4,096 elements
MICRO_SHARDS = 4
AXES = ("wk", "pp", "rp", "dp", "ep", "cp", "tp", "op")     # of a mesh, the slowest first: DiLoCo's workers, …
# … rp: hybrid sharding's copies. Those whose ranks have samples of their own; those over which gradients are summed:
SAMPLES, TOKENS = ("wk", "rp", "dp", "ep"), ("rp", "dp", "ep", "cp")


# ---------------------------------------------------------------- the model

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm}


class Between(nn.Module):
    """A layer that costs little; x, or (x, auxiliary loss), -> the same."""

    def __init__(self, dtype, norm):
        super().__init__()
        self.norm = norm(DIM, dtype=dtype)

    def forward(self, x):
        x, *aux = x if isinstance(x, tuple) else (x,)
        x = x + mt.tanh(self.norm(x))
        return (x, *aux) if aux else x


class Head(nn.Module):
    """What ends a language model: x, or (x, auxiliary loss), -> the same of logits."""

    def __init__(self, dtype, norm):
        super().__init__()
        self.norm = norm(DIM, dtype=dtype)
        self.scores = nn.Linear(DIM, VOCABULARY, dtype=dtype)

    def forward(self, x):
        x, aux = x if isinstance(x, tuple) else (x, None)
        y = self.norm(x) if not isinstance(self.norm, nn.BatchNorm) else \
            mt.reshape(self.norm(mt.reshape(x, (-1, DIM))), x.shape)
        y = self.scores(y)
        return y if aux is None else (y, aux)


def language_model(dtype, mixture=False, norm="layer", std=1.0, head_norm=None, **block):
    """A GPT as a Sequential, which a pipeline can cut; mixture: True, "no capacity" or False; std: of the embedding;
    block: options of the block."""
    mt.manual_seed(5)
    options = {"kv_heads": 4, "causal": True, "rotary": True, "dropout": 0.1, "dtype": dtype, "std": 0.2, "norm": norm,
               **block}
    if mixture:
        bound = {"capacity_factor": None} if mixture == "no capacity" else {}
        options |= {"moe": {"experts": 4, "group": "sequence", "std": 0.2} | bound}
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM, dtype, std), nn.TransformerBlock(DIM, 8, **options),
                         Between(dtype, NORMS[norm]), Head(dtype, NORMS[head_norm or norm]))


def sequences():
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (4 * BATCH, TIME + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_sum(output, labels):
    logits, aux = output if isinstance(output, tuple) else (output, None)
    loss = nn.cross_entropy(logits, labels, reduction="sum")
    return loss if aux is None else loss + labels.size * aux


# ---------------------------------------------------------------- forms

@dataclass
class Job:
    """What forms work on, one after another.

    wrap     module -> one whose gradients are reduced; None: as it is
    schedule (ranks, micro-batches) -> that of a pipeline, or None
    place    annotates a batch
    chunks   the model, or the pipeline's stages, of this rank
    """

    mesh: object
    beside: object
    model: object
    mixture: object
    wrap: object = None
    schedule: object = None
    place: object = lambda inputs: inputs
    chunks: list = field(default_factory=list)

    def comm(self, axes):
        """The Communicator of those of the axes that the mesh has, or None."""
        there = tuple(axis for axis in self.mesh.axes if axis in axes) if self.mesh else ()
        return self.mesh[there] if there else None

    def copy(self):
        """The Communicator of the ranks that share one copy of the state in hybrid sharding."""
        return self.comm(TOKENS[1:])

    @property
    def units(self):
        """Losses per sample that a worker's mean is over, for the count of all workers' samples."""
        return TIME / self.ranks("wk")

    def ranks(self, *axes):
        """How many there are along some axes."""
        comm = self.comm(axes)
        return comm.size if comm else 1


def data_parallel(job):
    job.wrap = lambda module: DistributedDataParallel(
        module, job.comm(TOKENS) or comm.world(), exact=job.beside.exact, micro_shards=MICRO_SHARDS,
        bucket_cap_mb=0.004, first_bucket_mb=0.002, unsummed=job.beside.unsummed(module))


def zero(stage):
    def form(job):
        job.wrap = lambda module: fully_shard(module, job.comm(TOKENS), stage, exact=job.beside.exact,
                                              micro_shards=MICRO_SHARDS, **job.beside.options(job))
    return form


def tensor(sequence_parallel):
    def form(job):
        plan = tp.plan_of(job.model) | {"0": "vocabulary", "3.scores": "column, gathered"}
        plan |= {"2.norm": "sequence", "3.norm": "sequence"} if sequence_parallel else {}
        tp.parallelize_module(job.model, job.mesh["tp"], plan, sequence_parallel)
    return form


def context(how):
    return lambda job: cp.context_parallel(job.model, job.mesh["cp"], how)


def experts(job):
    tp.parallelize_module(job.model, job.mesh["ep"], moe.plan_of(job.model))


def pipeline(schedule):
    def form(job):
        job.schedule = schedule
    return form


def annotations(job):
    there = dict(job.model.named_parameters())
    cuts = annotate.megatron(job.model, "op") | {"0.weight": ["op", -1], "3.scores.weight": [-1, "op"]}
    annotate.shard_parameters(job.model, job.mesh, {name: cut for name, cut in cuts.items() if name in there})
    if "dp" in job.mesh.axes:
        job.place = lambda inputs: annotate.split(inputs, 0, job.mesh["dp"])


@dataclass(frozen=True)
class Form:
    """axis: of the mesh, which it has for itself; apply(job): its part."""

    axis: str
    apply: object


FORMS = {       # in the order in which they are applied
    "tensor": Form("tp", tensor(False)),
    "sequence": Form("tp", tensor(True)),
    "ring": Form("cp", context("ring")),
    "all-to-all": Form("cp", context("all_to_all")),
    "experts": Form("ep", experts),
    "annotations": Form("op", annotations),
    "1F1B": Form("pp", pipeline(one_forward_one_backward)),
    "interleaved": Form("pp", pipeline(lambda ranks, m: interleaved(ranks, m, 2))),
    "ZB-H1": Form("pp", pipeline(zb_h1)),
    "1F1B, slices": Form("pp", pipeline(lambda ranks, m: one_forward_one_backward(ranks, m, slices=2))),
    "DDP": Form("dp", data_parallel),
    "ZeRO 1": Form("dp", zero(1)),
    "ZeRO 2": Form("dp", zero(2)),
    "ZeRO 3": Form("dp", zero(3)),
}


# ---------------------------------------------------------------- training

def build(forms, sizes, beside, mixture):
    """The Job, when all forms have done their parts. forms: names, in their order; sizes: {axis: ranks}."""
    mesh = comm.DeviceMesh(**{axis: sizes[axis] for axis in AXES if axis in sizes}) if sizes else None
    job = Job(mesh, beside, language_model(beside.dtype, mixture, **beside.model), mixture)
    beside.prepare(job)
    for name in forms:
        FORMS[name].apply(job)
    if job.wrap is None and "annotations" not in forms and (job.comm(TOKENS) or beside.exact):
        data_parallel(job)      # who has tokens of its own must sum gradients
    job.chunks = [job.model] if job.schedule is None else stages(job)
    beside.before(job)
    if job.wrap is not None:
        job.chunks = [job.wrap(chunk) for chunk in job.chunks]
    return job


def stages(job):
    """This rank's stages, one layer each or two; job.schedule becomes a schedule."""
    rows = (MICRO_SHARDS if job.beside.exact else BATCH) // job.ranks(*SAMPLES)
    job.schedule = job.schedule(job.ranks("pp"), min(4, rows))
    placement = placement_of(job.schedule)
    count = sum(map(len, placement))
    found = cut_sequential(job.model, count, [1] * 4)
    if job.mixture:
        found = [moe.OneTensor(stage, i == 0, i == count - 1) for i, stage in enumerate(found)]
    return [found[i] for i in placement[job.mesh["pp"].rank]]


def batches(job, steps):
    """(step, this rank's part of its batch)."""
    by_rank = job.comm(SAMPLES if job.wrap is not None else ("wk",))
    loader = data.Loader(*sequences(), BATCH, seed=2, rank=by_rank.rank if by_rank else 0,
                         size=by_rank.size if by_rank else 1, micro_shards=MICRO_SHARDS if job.beside.exact else 1)
    for step, batch in zip(range(steps), loader.epoch(0), strict=False):
        yield step, cp.cut_sequence(batch, job.mesh["cp"]) if job.ranks("cp") > 1 else batch


def train(forms, sizes, name=None, mixture=False, count=STEPS):
    """The pieces of this rank's parameters after so many steps."""
    beside = EVERY.get(name, USUAL)
    job = build(forms, sizes, beside, mixture)
    optimizer = beside.optimizer([pair for chunk in job.chunks for pair in chunk.named_parameters()])
    beside.begin(job)
    steps(job, beside.led(job, optimizer), batches(job, count))
    with beside.end(job):
        return pieces(job)


def steps(job, optimizer, batches):
    beside, scaler = job.beside, optim.GradScaler(enabled=False)
    if beside.scaler is not None:
        scaler = beside.scaler(comm.world() if job.mesh else None)
    pipeline = Pipeline(job.chunks, job.mesh["pp"], job.schedule) if job.schedule is not None else None
    for step, batch in batches:
        with beside.around(job), divergence.quiet():
            if pipeline is not None:
                step_of_stages(job, pipeline, optimizer, scaler, batch, step)
            elif job.wrap is not None:
                training.train_step(job.chunks[0], optimizer, batch, lambda m, s: loss_sum(m(s.inputs), s.labels),
                                    job.comm(TOKENS) or comm.world(), seed=SEED, step=step, units=job.units,
                                    clip=beside.clip, accumulate=beside.accumulate, amp=beside.amp, scaler=scaler,
                                    micro_shards=MICRO_SHARDS if beside.exact else 8)
            else:
                plain_step(job, optimizer, scaler, batch, step)
        beside.after(job)


def step_of_stages(job, pipeline, optimizer, scaler, batch, step):
    beside = job.beside
    optimizer.zero_grad()
    pieces = data.loader.cut(batch.shards[0], beside.accumulate) if beside.accumulate > 1 else [None]
    for i, piece in enumerate(pieces):
        part = batch if piece is None else replace(batch, inputs=piece.inputs, labels=piece.labels, shards=[piece])
        with ExitStack() as stack:
            stack.enter_context(mt.autocast(beside.amp) if beside.amp else nullcontext())
            for chunk in job.chunks if i + 1 < len(pieces) and job.wrap is not None else ():
                stack.enter_context(chunk.no_sync())
            pipeline.run(part, loss_sum, seed=SEED, step=step, units=job.units, over=job.comm(TOKENS), scaler=scaler,
                         micro_shards=MICRO_SHARDS if beside.exact else 8)
    if beside.clip is not None:
        pipeline.clip_grad_norm_(beside.clip)
    scaler.step(optimizer)
    scaler.update()


def plain_step(job, optimizer, scaler, batch, step):
    """What a program of one process does."""
    beside, (model,) = job.beside, job.chunks
    optimizer.zero_grad()
    for piece in data.loader.cut(batch.shards[0], beside.accumulate):
        with backend.random_scope(SEED, step, batch.count, piece.rows, 8), \
                mt.autocast(beside.amp) if beside.amp else nullcontext():
            loss = loss_sum(model(job.place(piece.inputs)), piece.labels)
            scaler.scale(loss * (1 / (batch.count * job.units))).backward()
    if beside.clip is not None:
        optim.clip_grad_norm_(model.parameters(), beside.clip)
    scaler.step(optimizer)
    scaler.update()


def pieces(job):
    """[(name, shape of the whole, box, values)] of what this rank has of parameters and buffers; of fully_shard's the
    whole values, or, where it is about how these are cut, the pieces."""
    with ExitStack() as stack:
        modules = job.chunks
        if not job.beside.sharded:
            for chunk in job.chunks:
                if hasattr(chunk, "gathered"):
                    stack.enter_context(chunk.gathered())
            modules = [chunk.module if job.wrap is not None else chunk for chunk in job.chunks]
        kinds = layouts(modules)
        return [(name, kinds[name].shape, box, np.array(piece_of(array, place)))
                for name, array in named_arrays(modules) for box, place in kinds[name].pieces]


def attempt(action, *args):
    """What an action gives, or the text of what it raises."""
    try:
        return action(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(jobs):
    """What train gives of each of some jobs, its arguments."""
    return [attempt(train, *job) for job in jobs]
