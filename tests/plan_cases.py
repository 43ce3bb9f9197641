"""What the ranks do in the tests of plan: small GPTs really trained, with the ledger open."""

from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.compress import lora
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.multi_token import targets_at
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.optim import muon
from minitorch_dist.parallel import DistributedDataParallel, MixedPrecisionPolicy, fully_shard, tied
from minitorch_dist.parallel.context import context_parallel, cut_sequence
from minitorch_dist.parallel.encodings import Blocks
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.offload import offload_optimizer
from minitorch_dist.parallel.pipelines import Pipeline
from minitorch_dist.parallel.pipelines.gpt_stages import GPTStage
from minitorch_dist.parallel.pipelines.schedules import placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from minitorch_dist.plan import GPT, Device
from tests.device import fake_cupy

SMALL = GPT(layers=3, width=36, heads=4, vocabulary=50, context=16)
SIZES = {"gpt": SMALL, "llama": GPT(layers=3, width=40, heads=4, vocabulary=50, context=16, family="llama", kv_heads=2,
                                    hidden=28),
         "deepseek": GPT(layers=3, width=40, heads=4, vocabulary=50, context=16, family="deepseek", hidden=28,
                         nope_size=6, rope_size=4, value_size=5, kv_rank=12, q_rank=14)}
SIMPLE = Device("simple", 1e9, {"mixed": 1e12, "float32": 1e11}, link=1e9, network=1e8, per_node=4, host=2e7,
                memory_bandwidth=1e10)


OPTIMIZERS = {"adam": optim.Adam, "adamw": optim.AdamW, "sgd": optim.SGD, "lion": optim.Lion, "lamb": optim.LAMB,
              "schedule-free": optim.AdamWScheduleFree, "adafactor": optim.Adafactor}
OF_MATRICES = {"muon": optim.Muon, "normuon": optim.NorMuon, "dion2": optim.Dion2, "dion": optim.Dion}


def gpt(sizes):
    """The real model of a plan's sizes."""
    mt.manual_seed(4)
    family = FAMILIES[sizes.family] | ({} if sizes.latent is None else {"latent": sizes.latent._asdict()})
    model = nn.GPT(sizes.vocabulary, sizes.context, sizes.layers, sizes.heads, sizes.width, sizes.kv_heads,
                  dropout=0.1 if sizes.dropout else 0.0, tied=sizes.tied, hidden=sizes.hidden,
                  window=sizes.window, qk_norm=sizes.qk_norm, sinks=sizes.sinks, gated=sizes.gated,
                  attention_dropout=0.1 if sizes.attention_dropout else 0.0, **family,
                  moe={"experts": sizes.experts, "k": sizes.top_k, "capacity_factor": sizes.capacity_factor,
                       "shared": sizes.shared_experts, "group": sizes.group}
                  if sizes.experts else None)
    return model if sizes.predict == 1 else nn.MultiTokenPrediction(model, sizes.predict - 1)


def tokens(sizes, samples, time, seed=0):
    """Inputs and labels."""
    return np.random.default_rng(seed).integers(0, sizes.vocabulary, (2, samples, time))


def adapt(job, module):
    """The module with the adapters that the job says, if any."""
    if job["lora_rank"] is not None:
        quantize = "nf4" if job["base_bits"] == 4 else None
        lora.add(module, job["lora_rank"], targets=job["lora_targets"], quantize=quantize)
    return module


def trained(job, modules):
    """What an optimizer gets."""
    return [p for module in modules for p in (module.parameters() if job["lora_rank"] is None else
                                              lora.parameters(module))]


def hidden_of(named):
    """Of [(name, parameter)] the blocks' matrices, as examples/gpt.py has them; and all others."""
    hidden = [p for name, p in named if p.ndim == 2 and "block" in name]
    return hidden, [p for _, p in named if not any(p is each for each in hidden)]


def optimizer_of(job, modules):
    """The job's optimizer, with optim's defaults."""
    name, bits = job["optimizer"], {"state_bits": job["state_bits"]} if job["state_bits"] != 32 else {}
    if name not in OF_MATRICES:
        return OPTIMIZERS[name](trained(job, modules), **bits)
    hidden, others = hidden_of([pair for module in modules for pair in module.named_parameters()])
    fraction = {} if job["fraction"] is None else {"rank_fraction" if name == "dion" else "fraction": job["fraction"]}
    return optim.Combined(OF_MATRICES[name](hidden, **fraction), optim.AdamW(others))


def ways_of(module):
    """How tensor parallelism cuts it, each rank keeping its scores."""
    scores = {"vocabulary": "vocabulary, not gathered", "column, gathered": "column"}
    return {path: scores.get(way, way) for path, way in tp.plan_of(module).items()}


def prepare(job, module, mesh):
    """The module cut as the job says."""
    checkpointed(job, module)
    if mesh["tp"].size > 1:
        tp.parallelize_module(module, mesh["tp"], ways_of(module), job["sequence_parallel"])
    if job["cp"] > 1:
        context_parallel(module, mesh["cp"], job["cp_by"])
    over = [axis for axis in ("cp", "ep", "tp") if axis in job["experts_over"] or axis == "ep" and job["ep"] > 1]
    if over:
        tp.parallelize_module(module, mesh[over], moe.plan_of(module))
    if job["dispatch_bits"]:
        moe.dispatch_in_few_bits(module, job["dispatch_bits"])
    adapt(job, module)
    replicas = mesh["dp", "cp", "ep"]
    if job["stage"] == 0:
        return wrapped(job, module, replicas)
    shards = job["shard_over"] and replicas.split(replicas.rank // job["shard_over"], name="shard")
    near, owners = job["reshard_after_forward"], shards or replicas
    encodings = {f"{name}_encoding": bits and Blocks(bits) for name, bits in (("param", job["param_bits"]),
                                                                             ("reduce", job["reduce_bits"]))}
    return fully_shard(module, replicas, job["stage"], shard_over=shards, mp_policy=MixedPrecisionPolicy(**encodings),
                       reshard_after_forward=near and owners.split(owners.rank // near, name="near"))


def checkpointed(job, module):
    """Its blocks run again, where the job says so."""
    for block in [m for m in module.modules() if isinstance(m, nn.TransformerBlock)] if job["checkpointing"] else ():
        block.forward = mt.checkpoint(block.forward)


def wrapped(job, module, replicas):
    """In DistributedDataParallel."""
    unsummed = hidden_of(list(module.named_parameters()))[0] if job["optimizer"] == "dion" else ()
    return DistributedDataParallel(module, replicas, unsummed=unsummed)


def parts(sizes):
    """[(name, shape)] of the parameters that this rank has of a model whose matrices, or experts, are cut."""
    sizes = GPT(**sizes)
    module = gpt(sizes)
    tp.parallelize_module(module, comm.world(), moe.plan_of(module) or ways_of(module))
    return [(name, p.shape) for name, p in module.named_parameters()]


def arrivals(job):
    """[shape] of this rank's parameters as their gradients come."""
    sizes, found = GPT(**job["model"]), []
    module = gpt(sizes)
    if comm.world().size > 1:
        tp.parallelize_module(module, comm.world(), ways_of(module), job["sequence_parallel"])
    for p in trained(job, [adapt(job, module)]):
        p.register_post_accumulate_grad_hook(lambda tensor: found.append(tensor.shape))
    logits = module(tokens(sizes, 2, job["time"])[0])
    sum(scores.sum() for scores in (logits if sizes.predict > 1 else [logits])).backward()
    return found


def loss(sizes, model, x, y, group=None, tiled=False):
    """The sum of the losses, of all tokens that are predicted. group: of tensor-parallel ranks, each of which has some
    of the scores. tiled: without logits. A function, so that nobody holds the logits afterwards."""
    more = {"targets": y} if tiled else {}
    logits, aux = model(x, **more) if sizes.experts else (model(x, **more), None)
    if tiled:
        losses = nn.multi_token_loss(logits) if sizes.predict > 1 else logits.sum()
        return losses if aux is None else losses + y.size * aux
    if group is not None and group.size > 1:
        return sum(tp.vocab_parallel_cross_entropy(scores, targets_at(k, y), group, sizes.vocabulary, "sum")
                   for k, scores in enumerate(logits if sizes.predict > 1 else [logits]))
    found = nn.multi_token_loss(logits, y) if sizes.predict > 1 else nn.cross_entropy(logits, y, reduction="sum")
    return found if aux is None else found + y.size * aux


def multiplied(job):
    """FLOPs of the matrix products of a step of the real model, as NumPy does them, on this rank, which may have a part
    of the sequences."""
    flops, matmul = [], np.matmul

    def counting(x, y, out=None):
        z = matmul(x, y, out=out)
        flops.append(2 * z.size * x.shape[-1])
        return z
    sizes = GPT(**job["model"])
    module = adapt(job, gpt(sizes))
    for block in [m for m in module.modules() if isinstance(m, nn.TransformerBlock)] if job["checkpointing"] else ():
        block.forward = mt.checkpoint(block.forward)
    pairs = tokens(sizes, job["batch"], job["time"])
    if job["cp"] > 1:
        ranks = comm.world()
        context_parallel(module, ranks, job["cp_by"]).context.summed = True     # nobody steps
        pairs = [cut_sequence(x, ranks) for x in pairs]
    with patch.object(np, "matmul", counting):
        loss(sizes, module, *pairs).backward()
    return sum(flops)


def step(job, folder=None):
    """What a training step holds, at its end and most, and sends on this rank, after one that isn't counted; and the
    bytes of the optimizer's state that lie in files, if it is to be in a folder."""
    sizes = GPT(**job["model"])
    mesh = comm.DeviceMesh(dp=job["dp"], cp=job["cp"], ep=job["ep"], tp=job["tp"])
    module, group = gpt(sizes), mesh["tp"]
    model = prepare(job, module, mesh)
    optimizer = optimizer_of(job, [model])
    if job["offload_optimizer"]:
        offload_optimizer(optimizer, folder)
    pairs = tokens(sizes, job["batch"] // job["dp"] // job["ep"], job["time"], comm.world().rank)
    pairs = [cut_sequence(x, mesh["cp"]) for x in pairs] if job["cp"] > 1 else pairs
    pieces = [(x.copy(), y.copy()) for x, y in zip(*(np.array_split(x, job["micro_batches"]) for x in pairs),
                                                   strict=True)]

    def train():
        for x, y in pieces[:-1]:
            with model.no_sync():
                loss(sizes, model, x, y, group, job["tiled_loss"]).backward()
        loss(sizes, model, *pieces[-1], group, job["tiled_loss"]).backward()
        optimizer.step()
    train()
    model.zero_grad()
    with ledger.record(memory=True) as book:
        train()
    held = dict(book.live)
    model.zero_grad()
    out = dict.fromkeys(("dp", "shard", "near", "tp", "cp", "ep"), 0)
    for (name, _), count in book.bytes_sent.items():     # gradients are summed over the product of several axes
        first = name.partition(" but ")[0]      # an axis's ranks with the same experts
        first = "ep" if first in ("cp,ep", "cp,ep,tp", "cp,tp", "ep,tp") else first     # that divide experts
        out[first if first in out else "dp"] += count
    return held, dict(book.peak), out, sum(a.nbytes for run in optimizer.state for a in run.values())


class Counted(np.ndarray):
    """An array of whose products FLOPs are counted, and of those of what they give."""

    flops = 0

    def __matmul__(self, other):
        z = np.ndarray.__matmul__(self, other)
        Counted.flops += 2 * z.size * self.shape[-1]
        return z


def products(job):
    """FLOPs of the matrix products of this rank's optimizer, in a step."""
    rounds, begun = muon.orthogonalized, optim.Dion.begun

    def counted(u, *settings):
        return np.asarray(rounds(u.view(Counted), *settings))

    def counted_of_dion(*args):
        found = begun(*args)
        return found._replace(b=found.b.view(Counted))
    with patch.object(muon, "orthogonalized", counted), patch.object(optim.Dion, "begun", counted_of_dion):
        Counted.flops = 0
        step(job)
    return Counted.flops / 2        # of two steps


def written(job, sequences, count):
    """(bytes of parameters, bytes of what is kept, whether it is all used), of this rank, of a model that has read so
    many tokens, as parts of a cache with room for these."""
    sizes = GPT(**job["model"])
    mesh, module = comm.DeviceMesh(dp=job["dp"], ep=job["ep"], tp=job["tp"]), gpt(sizes)
    if job["precision"] == "mixed":
        module.to("float16")
    for axis, ways in (("tp", tp.plan_of), ("ep", moe.plan_of)):
        if mesh[axis].size > 1:
            tp.parallelize_module(module, mesh[axis], ways(module))
    adapt(job, module).eval()
    cache, read = KeyValueCache(module, count), tokens(sizes, sequences // job["dp"] // job["ep"], count)[0]
    for piece in (read[:, :-1], read[:, -1:]):
        cache.read(piece)
    kept = {id(a): a for _, layer in cache.layers.values() for a in (layer.keys, layer.values) if a is not None}
    return (sum(p.data.nbytes for p in module.parameters()), sum(a.nbytes for a in kept.values()),
            all(np.count_nonzero(a, (0, 1, 3)).all() for a in kept.values()))


def remembered(job, sequences, count):
    """Bytes that this rank of a tensor-parallel model keeps of so many tokens that were read one after another."""
    sizes = GPT(**job["model"])
    module = gpt(sizes).eval()
    tp.parallelize_module(module, comm.world(), tp.plan_of(module))
    cache, read = KeyValueCache(module, count), tokens(sizes, sequences, count)[0]
    for i in range(count):
        cache.read(read[:, i:i + 1])
    return cache.nbytes


def needed(job, count):
    """Bytes that one process's model needs to tell what comes behind so many tokens: (of weights, of what has been kept
    before the last token), of rows of parameters and places of the cache that make a difference. (NaN; of a router it
    takes a large number to choose its expert.)"""
    sizes = GPT(**job["model"])
    module = adapt(job, gpt(sizes)).eval()
    read = tokens(sizes, 1, count)[0]
    kept = KeyValueCache(module, count + 1)

    def logits():
        kept.past = count - 1
        return lower(kept.read(read[:, -1:]))

    def of(array, index, others=(np.nan,)):
        """Of this part of an array."""
        before, found = array[index].copy(), False
        for other in others:
            array[index] = other
            found = found or bool((logits() != wanted).any())
        array[index] = before
        return before.nbytes * found
    kept.read(read[:, :-1])
    ramp = np.arange(sizes.width)
    wanted = logits()
    arrays = {id(a): a for _, layer in kept.layers.values() for a in (layer.keys, layer.values) if a is not None}
    return (sum(of(p.data, i, (ramp, -ramp) if "router" in name else (np.nan,))
                for name, p in module.named_parameters() for i in range(len(p.data))),
            sum(of(a, np.s_[:, :, i]) for a in arrays.values() for i in range(a.shape[2])))


def crossing(sizes):
    """Bytes that a step of an optimizer on the host copies from a stand-in for a GPU and to it, by direction."""
    moved = dict.fromkeys(("down", "up"), 0)

    def counted(kind, copy):
        def counting(self, *args, **options):
            moved[kind] += self.nbytes
            return copy(self, *args, **options)
        return counting
    with fake_cupy.installed():
        model = DistributedDataParallel(gpt(sizes).to("cuda"), comm.world_of_one())
        optimizer = offload_optimizer(optim.Adam(model.parameters()))
        x, y = (mt.tensor(array, device="cuda") for array in tokens(sizes, 2, 5))
        nn.cross_entropy(model(x), y, reduction="sum").backward()
        array = fake_cupy.ndarray
        with patch.multiple(array, get=counted("down", array.get), set=counted("up", array.set)):
            optimizer.step()
    return moved


# ---------------------------------------------------------------- a pipeline

def loss_sum(output, labels, group, vocabulary):
    """group: of tensor-parallel ranks, each of which has some of the scores."""
    logits, aux = output if isinstance(output, tuple) else (output, None)
    found = nn.cross_entropy(logits, labels, reduction="sum") if group.size == 1 else \
        tp.vocab_parallel_cross_entropy(logits, labels, group, vocabulary, "sum")
    return found if aux is None else found + labels.size * aux


def pipeline(job, bounds):
    """A step of a pipeline whose stages have the blocks between bounds: (held, peak, {(axis, op): bytes sent})."""
    sizes = GPT(**job["model"])
    mesh = comm.DeviceMesh(dp=job["dp"], pp=job["pp"], cp=job["cp"], ep=job["ep"], tp=job["tp"])
    whole, replicas, samples = gpt(sizes), mesh["dp", "cp", "ep"], mesh["dp", "ep"]
    checkpointed(job, whole)
    if job["tp"] > 1:
        tp.parallelize_module(whole, mesh["tp"], ways_of(whole), job["sequence_parallel"])
    if job["ep"] > 1:
        tp.parallelize_module(whole, mesh["ep"], moe.plan_of(whole))
    adapt(job, whole)
    if job["cp"] > 1:
        context_parallel(whole, mesh["cp"], job["cp_by"])
    schedule = schedule_of(job["schedule"], job["pp"], job["micro_batches"], job["chunks"], job["slices"])
    chunks, last = [], len(bounds) - 2
    stages = tied.apart([GPTStage(whole, range(*pair), i == 0, i == last) for i, pair in enumerate(pairwise(bounds))])
    for module in (stages[stage] for stage in placement_of(schedule)[mesh.coords["pp"]]):
        chunks.append(fully_shard(module, replicas, job["stage"], units=list(module.blocks)) if job["stage"]
                      else wrapped(job, module, replicas))
    optimizer = optimizer_of(job, chunks)
    run = Pipeline(chunks, mesh["pp"], schedule)
    losses = None if job["tiled_loss"] else partial(loss_sum, group=mesh["tp"], vocabulary=sizes.vocabulary)
    loader = data.Loader(*tokens(sizes, job["batch"], job["time"]), job["batch"], seed=2, rank=samples.rank,
                         size=samples.size)
    batch = next(iter(loader.epoch(0)))
    batch = cut_sequence(batch, mesh["cp"]) if job["cp"] > 1 else batch
    for i in range(2):
        for chunk in chunks:
            chunk.zero_grad()
        with ledger.record(memory=True) as book:
            run.run(batch, losses, seed=0, step=i, units=job["time"],
                    over=replicas)
            optimizer.step()
    return dict(book.live), dict(book.peak), dict(book.bytes_sent)
