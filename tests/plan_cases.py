"""What the ranks do in the tests of plan: small GPTs really trained, with the ledger open."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel import tensor_parallel as tp
from minitorch_dist.parallel.pipeline import Pipeline
from minitorch_dist.parallel.schedules import SCHEDULES
from minitorch_dist.plan import GPT


def gpt(sizes):
    """The real model of a plan's sizes."""
    mt.manual_seed(4)
    return nn.GPT(sizes.vocabulary, sizes.context, sizes.layers, sizes.heads, sizes.width,
                  dropout=0.1 if sizes.dropout else 0.0, tied=sizes.tied)


def tokens(sizes, samples, time, seed=0):
    """Inputs and labels."""
    return np.random.default_rng(seed).integers(0, sizes.vocabulary, (2, samples, time))


def prepare(job, module, mesh):
    """The module cut as the job says."""
    if job["checkpointing"]:
        for block in module.blocks:
            block.forward = mt.checkpoint(block.forward)
    if mesh["tp"].size > 1:
        ways = tp.plan_of(module) | {"embed": "vocabulary, not gathered"}
        ways |= {} if module.head is None else {"head": "column"}
        tp.parallelize_module(module, mesh["tp"], ways, job["sequence_parallel"])
    if job["stage"] == 0:
        return DistributedDataParallel(module, mesh["dp"])
    return fully_shard(module, mesh["dp"], job["stage"])


def parts(sizes):
    """[(name, shape)] of the parameters that this rank has of a model whose matrices are cut."""
    sizes = GPT(**sizes)
    module = gpt(sizes)
    ways = tp.plan_of(module) | {"embed": "vocabulary, not gathered"}
    tp.parallelize_module(module, comm.world(), ways)
    return [(name, p.shape) for name, p in module.named_parameters()]


def arrivals(job):
    """[shape] of this rank's parameters as their gradients come."""
    sizes, found = GPT(**job["model"]), []
    module = gpt(sizes)
    ways = tp.plan_of(module) | {"embed": "vocabulary, not gathered"}
    if comm.world().size > 1:
        tp.parallelize_module(module, comm.world(), ways, job["sequence_parallel"])
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda tensor: found.append(tensor.shape))
    module(tokens(sizes, 2, job["time"])[0]).sum().backward()
    return found


def step(job):
    """What a training step sends and holds on this rank, after one that isn't counted."""
    sizes = GPT(**job["model"])
    mesh = comm.DeviceMesh(dp=job["dp"], tp=job["tp"])
    module, group = gpt(sizes), mesh["tp"]
    model = prepare(job, module, mesh)
    optimizer = optim.Adam(model.parameters())
    pairs = tokens(sizes, job["batch"] // job["dp"], job["time"], comm.world().rank)
    pieces = [(x.copy(), y.copy()) for x, y in zip(*(np.array_split(x, job["micro_batches"]) for x in pairs),
                                                   strict=True)]

    def loss_of(x, y):      # a function, so that nobody holds the logits afterwards
        if group.size == 1:
            return nn.cross_entropy(model(x), y, reduction="sum")
        return tp.vocab_parallel_cross_entropy(model(x), y, group, sizes.vocabulary, "sum")

    def train():
        for x, y in pieces[:-1]:
            with model.no_sync():
                loss_of(x, y).backward()
        loss_of(*pieces[-1]).backward()
        optimizer.step()
    train()
    model.zero_grad()
    with ledger.record(memory=True) as book:
        train()
    held = dict(book.live)
    model.zero_grad()
    return held, dict(book.peak), {axis: sum(n for (name, _), n in book.bytes_sent.items() if name == axis)
                                   for axis in ("dp", "tp")}


# ---------------------------------------------------------------- a pipeline

class Front(nn.Module):
    """What a GPT does before its blocks."""

    def __init__(self, whole):
        super().__init__()
        self.embed, self.position, self.dropout = whole.embed, whole.position, whole.dropout

    def forward(self, x):
        return self.dropout(self.embed(x) + self.position(slice(x.shape[1])))


def loss_sum(output, labels):
    return nn.cross_entropy(output, labels, reduction="sum")


def pipeline(job, bounds):
    """A step of a pipeline whose stages have the blocks between bounds: (held, peak, bytes of messages, micro-batches
    that were alive at once)."""
    sizes = GPT(**job["model"])
    mesh = comm.DeviceMesh(dp=job["dp"], pp=job["pp"])
    whole, place, count = gpt(sizes), mesh.coords["pp"], job["pp"] * job["chunks"]
    chunks = []
    for stage in range(place, count, job["pp"]):
        layers = list(whole.blocks)[bounds[stage]:bounds[stage + 1]]
        layers = [Front(whole)] * (stage == 0) + layers + [whole.norm, whole.head] * (stage == count - 1)
        chunks.append(DistributedDataParallel(nn.Sequential(*layers), mesh["dp"]))
    optimizer = optim.Adam([p for chunk in chunks for p in chunk.parameters()])
    numbers = (job["pp"], job["micro_batches"]) + ((job["chunks"],) if job["schedule"] == "interleaved" else ())
    run = Pipeline(chunks, mesh["pp"], SCHEDULES[job["schedule"]](*numbers))
    loader = data.Loader(*tokens(sizes, job["batch"], job["time"]), job["batch"], seed=2, rank=mesh.coords["dp"],
                         size=job["dp"])
    batch = next(iter(loader.epoch(0)))
    for i in range(2):
        for chunk in chunks:
            chunk.zero_grad()
        with ledger.record(memory=True) as book:
            run.run(batch, loss_sum, seed=0, step=i, units=job["time"], over=mesh["dp"])
            optimizer.step()
    return dict(book.live), dict(book.peak), book.bytes_sent["pp", "send"], run.live
