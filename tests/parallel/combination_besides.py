"""What is done besides in the tests of forms of parallelism together, as a table: see combination_cases.py."""

import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress import lora, low_precision, prune, soup
from minitorch_dist.parallel import MixedPrecisionPolicy
from minitorch_dist.parallel.encodings import Blocks
from minitorch_dist.parallel.fsdp.grouping import default_units
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.parallel.offload import offload_activations, offload_optimizer
from minitorch_dist.parallel.tensor import tensor_parallel as tp


def sgd(named):
    """Under Adam a wrongly scaled gradient is nearly invisible."""
    return optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adamw(named, state_bits=32):
    return optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1, state_bits=state_bits)


@dataclass(frozen=True)
class Beside:
    """How a job differs from the usual one.

    tolerance  greatest difference from one process; None: each bit is the same
    of_parts   the same where tensor parallelism or annotations cut parameters, if that is more
    samples    whether two ranks of each share the samples beside a form that doesn't: where it is about these
    scaler     comm -> GradScaler
    sharded    whether it is fully_shard's: forms that aren't are combined with ZeRO 3
    options    (job) -> what fully_shard gets
    unsummed   (module) -> whose gradients DistributedDataParallel leaves each rank's own
    prepare    before the forms; before: behind them, before the wrapper; begin: before the first step; all (job)
    led        (job, optimizer) -> what makes the steps
    around     (job) -> what a step's forward and backward stand in
    after      (job), behind each step
    end        (job) -> what the model is compared in
    """

    tolerance: float = 1e-10
    of_parts: float = 0.0
    samples: bool = False
    sharded: bool = False
    dtype: type = np.float64
    model: dict = field(default_factory=dict)
    optimizer: object = sgd
    exact: bool = False
    accumulate: int = 1
    clip: float = None
    amp: str = None
    scaler: object = None
    options: object = lambda job: {}
    unsummed: object = lambda module: ()
    prepare: object = lambda job: None
    before: object = lambda job: None
    begin: object = lambda job: None
    led: object = lambda job, optimizer: optimizer
    around: object = lambda job: nullcontext()
    after: object = lambda job: None
    end: object = lambda job: nullcontext()


def recompute(job):
    for layer in job.model[1], job.model[2]:
        layer.forward = mt.checkpoint(type(layer).forward.__get__(layer))


def hidden_of(named):
    """The blocks' matrices."""
    return [p for name, p in named if p.ndim > 1 and name[0] in "12"]


def of_matrices(kind, **settings):
    """An optimizer of the blocks' matrices; AdamW of the rest."""
    def made(named):
        hidden, others = hidden_of(named), [p for name, p in named if p.ndim < 2 or name[0] not in "12"]
        return optim.Combined(*([kind(hidden, 0.01, **settings)] if hidden else []),
                              *([optim.AdamW(others, 0.01)] if others else []))
    return made


def scaler(comm):
    """Beyond what the embedding's gradients bear in the first step, on whichever ranks they are."""
    return optim.GradScaler(2.0 ** 126, backoff_factor=2.0 ** -30, comm=comm)


@contextmanager
def activations_on_disk(job):
    with ExitStack() as stack:
        for chunk in job.chunks:
            stack.enter_context(offload_activations(chunk, tempfile.gettempdir(), min_bytes=64))
        yield


def compiled(job):
    job.chunks = [mt.compile(chunk, "numpy") for chunk in job.chunks]


def compiled_by_blocks(job):
    """As ZeRO 3 runs them, whose units are the outermost lists' modules."""
    for chunk in job.chunks:
        units = {id(unit) for unit in default_units(chunk)}
        for parent in list(chunk.modules()):
            for name, child in parent._modules.items():
                if id(child) in units:
                    parent._modules[name] = mt.compile(child, "numpy")


def in_few_bits(recipe):
    def before(job):
        kinds = nn.Linear, tp.ColumnParallelLinear, tp.RowParallelLinear
        job.chunks = [low_precision.convert_to_low_precision_training(chunk, recipe) if any(
            type(m) in kinds for m in chunk.modules()) or len(job.chunks) == 1 else chunk for chunk in job.chunks]
    return before


class Nothing:
    """The optimizer of a rank that trains nothing."""

    def zero_grad(self):
        """There is none."""

    def step(self):
        """Nothing changes."""


def of_the_trained(named):
    trained = [(name, p) for name, p in named if p.requires_grad]
    return sgd(trained) if trained else Nothing()


def adapted(quantize=None):
    """Adapters beside the block's matrices and the head's; a stage without any is frozen."""
    def before(job):
        kinds = nn.Linear, tp.ColumnParallelLinear, tp.RowParallelLinear
        for chunk in job.chunks:
            if targets := [path for path, m in chunk.named_modules() if type(m) in kinds and path[0] in "13"]:
                lora.add(chunk, 3, 5, 0.1, targets, quantize=quantize)
            for p in () if targets else chunk.parameters():
                p.requires_grad_(False)
    return before


def averaged(job):
    job.averages = [soup.ExponentialMovingAverage(chunk, 0.9) for chunk in job.chunks]


def average(job):
    for each in job.averages:
        each.update()


@contextmanager
def of_averages(job):
    """Inside the averages stand in the place of the values."""
    with ExitStack() as stack:
        for each in job.averages:
            stack.enter_context(each.applied())
        yield


def pruned(job):
    job.prunings = [prune.Pruning(chunk, prune.random(chunk, 0.5)) for chunk in job.chunks
                    if any(p.ndim > 1 for p in chunk.parameters())]


def prune_again(job):
    for each in job.prunings:
        each.apply()


def own_hook(job):
    """A communication hook that sums as no other does: all gradients to all ranks."""
    def hook(comm, bucket):
        everyone = np.empty((comm.size, bucket.grads.size), bucket.grads.dtype)
        work = comm.all_gather(everyone, bucket.grads, async_op=True)

        def finish():
            work.wait()
            bucket.grads[...] = everyone.sum(axis=0)
        return finish
    for chunk in job.chunks if job.wrap is not None else ():
        chunk.register_comm_hook(hook)


class Meeting:
    """DiLoCo in the place of a worker's optimizer. With SGD inside, a rate of 1 outside and a meeting at each step it
    is data parallelism."""

    def __init__(self, job, optimizer):
        model, = job.chunks
        self.diloco = DiLoCo(model, optimizer, job.mesh["wk"], every=1,
                             outer=lambda named: optim.SGD([p for _, p in named], lr=1.0))
        self.zero_grad = self.diloco.zero_grad

    def step(self):
        """Of a worker that has as many samples as each other."""
        self.diloco.step(1)


LLAMA = {"norm": "rms", "mlp": "swiglu", "hidden": 80, "bias": False}      # rotary is the block anyway
STATES, DELTA = (LLAMA | {"window": window} for window in ("linear", "delta"))
BLOCKS = LLAMA | {"window": "2x1"}
QWEN = LLAMA | {"window": 2, "qk_norm": True}
DEEPSEEK = LLAMA | {"kv_heads": None, "latent": {"nope_size": 6, "rope_size": 2, "value_size": 5, "kv_rank": 12,
                                                 "q_rank": 10}}
BESIDES = {
    "recompute": Beside(prepare=recompute, optimizer=adamw),
    "accumulate": Beside(samples=True, accumulate=2),
    "exact": Beside(None, samples=True, exact=True),
    "bfloat16": Beside(5e-4, dtype=np.float32, amp="bfloat16"),
    "GradScaler": Beside(2e-5, dtype=np.float32, model={"std": 0.002}, scaler=scaler),
    "clip_grad_norm": Beside(clip=0.5),
    "Muon": Beside(optimizer=of_matrices(optim.Muon)), "NorMuon": Beside(optimizer=of_matrices(optim.NorMuon)),
    "Dion2": Beside(optimizer=of_matrices(optim.Dion2)),
    # In fewer directions than gradients have, of 13 tokens: the rest would be rounding.
    "Dion, unsummed": Beside(samples=True, optimizer=of_matrices(optim.Dion, rank_fraction=0.1),
                             unsummed=lambda module: hidden_of(module.named_parameters())),
    "LAMB": Beside(optimizer=lambda named: optim.LAMB([p for _, p in named], lr=0.02)),
    "LARS": Beside(optimizer=lambda named: optim.LARS([p for _, p in named], lr=2.0, trust_coefficient=0.02)),
    "Adafactor": Beside(optimizer=lambda named: optim.Adafactor([p for _, p in named], lr=0.02, eps=(1e-6, 1e-3))),
    "8-bit states": Beside(of_parts=5e-3, optimizer=lambda named: adamw(named, state_bits=8)),
    "offload_activations": Beside(around=activations_on_disk),
    "offload_optimizer": Beside(optimizer=lambda named: offload_optimizer(adamw(named), tempfile.gettempdir())),
    "compile": Beside(before=compiled),
    "compile, by blocks": Beside(before=compiled_by_blocks),
    "mp_policy": Beside(5e-4, dtype=np.float32, sharded=True, options=lambda job: {"mp_policy": MixedPrecisionPolicy(
        "bfloat16", "bfloat16", output_dtype="float32")}),
    "DiLoCo": Beside(optimizer=lambda named: optim.SGD([p for _, p in named], lr=0.1),
                     led=lambda job, optimizer: Meeting(job, optimizer) if job.mesh else optimizer),
    "hybrid": Beside(sharded=True, options=lambda job: {"shard_over": job.copy()}),
    "float8": Beside(5e-4, dtype=np.float32, before=in_few_bits("rowwise")),
    "mxfp8": Beside(5e-4, dtype=np.float32, before=in_few_bits("mxfp8")),
    "nvfp4, exact": Beside(None, samples=True, exact=True, before=in_few_bits("nvfp4")),
    "LoRA": Beside(before=adapted(), optimizer=of_the_trained),
    "QLoRA": Beside(before=adapted("nf4"), optimizer=of_the_trained),
    "comm hook": Beside(samples=True, begin=own_hook),
    "BatchNorm": Beside(samples=True, model={"head_norm": "batch"}),
    "BatchNorm, exact": Beside(None, samples=True, model={"head_norm": "batch"}, exact=True),
    "average (EMA)": Beside(begin=averaged, after=average, end=of_averages, optimizer=adamw),
    "prune": Beside(begin=pruned, after=prune_again),
    "Qwen3": Beside(model=QWEN),
    "latents": Beside(model=DEEPSEEK),
    "states": Beside(model=STATES),
    "delta rule": Beside(model=DELTA),
    "chosen blocks": Beside(model=BLOCKS),
}
# What is done besides to a Qwen3, with latents, states, blocks, and …: no rows of the table, for test_three_together.
EVERY = BESIDES | {f"Qwen3, {name}": replace(BESIDES[name], model=QWEN) for name in (
    "recompute", "exact", "Muon", "compile", "float8", "LoRA", "QLoRA")}
EVERY |= {f"latents, {name}": replace(BESIDES[name], model=DEEPSEEK) for name in (
    "exact", "compile", "LoRA")}
EVERY |= {f"states, {name}": replace(BESIDES[name], model=STATES) for name in (
    "recompute", "exact", "compile", "float8", "LoRA")}
EVERY |= {f"delta rule, {name}": replace(BESIDES[name], model=DELTA) for name in ("recompute", "exact", "compile")}
EVERY |= {f"chosen blocks, {name}": replace(BESIDES[name], model=BLOCKS) for name in ("recompute", "exact", "compile")}
# … where four ranks share a copy.
EVERY["neighbours"] = Beside(sharded=True, options=lambda job: {"reshard_after_forward": 2} if job.mesh else {})
EVERY["neighbours, 8 bits, exact"] = replace(
    EVERY["neighbours"], tolerance=None, dtype=np.float32, exact=True, options=lambda job: {
        "mp_policy": MixedPrecisionPolicy(param_encoding=Blocks(8)), **EVERY["neighbours"].options(job)})
USUAL = Beside()
