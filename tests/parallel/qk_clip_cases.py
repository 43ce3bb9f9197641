"""What the ranks do in test_qk_clip. What must hold is checked by the parent process."""

import contextlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.data.packing import apart
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context.context import context_parallel, cut_sequence
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt
from minitorch_dist.parallel.pipelines import full_state_dict as full_of_stages
from minitorch_dist.parallel.pipelines.schedules import placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from minitorch_dist.qk_clip import QKClip

from .gpt_stages_cases import batches, loss_sum
from .packing_cases import LENGTH, VOCABULARY

STEPS, THRESHOLD = 4, 2.0
GPTS = {"gpt": {"window": (None, 5)}, "llama": FAMILIES["llama"] | {"tied": False, "kv_heads": 2},
        "deepseek": FAMILIES["deepseek"] | {"window": (None, "delta")},
        "blocks": {"window": ("2x3", None, "1x4")}}


def gpt(name, dtype=np.float64):
    """With weights of queries and keys that are much too large, and biases that aren't 0."""
    mt.manual_seed(5)
    model, random = nn.GPT(VOCABULARY, LENGTH, layers=4, heads=4, dim=16, dtype=dtype, **GPTS[name]), \
        np.random.default_rng(3)
    for path, p in model.named_parameters():
        if "attention." in path and "out" not in path and "norm" not in path and "decay" not in path:
            p.data[...] = random.standard_normal(p.shape) / (1.5 if p.ndim > 1 else 5)
    return model


def told(scores):
    return {path: found.tolist() for path, found in scores.items()}, scores.clipped


def train(name, sizes=(), options=()):
    """([(loss, scores, which were clipped)], whole parameters) after STEPS steps on a mesh of these sizes. options:
    _train's."""
    return _train(name, sizes, **dict(options))


def _train(name, sizes, stage=0, packs=False, accumulate=1, exact=False, how="ring", sequence=False, looks=False):
    """looks: the model is evaluated between a step and its clip."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "tp": 1} | dict(sizes))
    world, model = mesh["dp", "cp"], gpt(name, np.float32 if exact else np.float64)
    if mesh["tp"].size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), sequence_parallel=sequence)
    if mesh["cp"].size > 1:
        context_parallel(model, mesh["cp"], how)
    replica = fully_shard(model, world, stage=stage, exact=exact) if stage else DistributedDataParallel(
        model, world, exact=exact, bucket_cap_mb=0.002)
    optimizer = optim.AdamW(replica.parameters(), 0.03, weight_decay=0.1)
    clip, found = QKClip(replica, THRESHOLD), []
    for step, batch in batches(packs, mesh["dp"].rank, mesh["dp"].size) if not exact else _exact(world):
        batch = cut_sequence(batch, mesh["cp"]) if mesh["cp"].size > 1 else batch
        loss, _ = training.train_step(
            replica, optimizer, batch, lambda m, s: loss_sum(m(*(apart(s.inputs) if packs else [s.inputs])), s.labels),
            world, seed=3, step=step, units=LENGTH, accumulate=accumulate)
        if looks:
            replica.eval()
            with mt.no_grad():
                replica(batch.inputs)
            replica.train()
        found.append((loss, *told(clip.step())))
    return found, tp.full_state_dict(replica)


def _exact(world):
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (24, LENGTH + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], 8, seed=2, rank=world.rank, size=world.size, micro_shards=8)
    return zip(range(STEPS), (b for epoch in range(STEPS) for b in loader.epoch(epoch)), strict=False)


def exact_bits(name, stage):
    """({name: bytes}, the scores) after STEPS steps in exact mode."""
    found, state = _train(name, (), stage, exact=True)
    return {key: value.tobytes() for key, value in state.items()}, found


def staged(name, schedule, micro_batches, stage, sizes):
    """The same of a pipeline: (losses, [{path: scores} of each step], whole parameters)."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "pp": 2, "tp": 1} | dict(sizes))
    model, ranks = gpt(name), mesh["dp", "cp"]
    if mesh["tp"].size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    if mesh["cp"].size > 1:
        context_parallel(model, mesh["cp"])
    plan = schedule_of(schedule, mesh["pp"].size, micro_batches, 2)
    placement = placement_of(plan)
    parts = cut_gpt(model, sum(map(len, placement)))
    chunks = [fully_shard(parts[i], ranks, stage) if stage else DistributedDataParallel(parts[i], ranks)
              for i in placement[mesh["pp"].rank]]
    pipeline, losses, scores = Pipeline(chunks, mesh["pp"], plan), [], []
    optimizer = optim.AdamW([p for chunk in chunks for p in chunk.parameters()], 0.03, weight_decay=0.1)
    clip = QKClip(pipeline.chunks, THRESHOLD)
    for step, batch in batches(False, mesh["dp"].rank, mesh["dp"].size):
        batch = cut_sequence(batch, mesh["cp"]) if mesh["cp"].size > 1 else batch
        optimizer.zero_grad()
        losses.append(pipeline.run(batch, loss_sum, seed=3, step=step, units=LENGTH, over=ranks))
        optimizer.step()
        scores.append(told(clip.step())[0])
    everyones = mesh["pp"].all_gather_object(scores)
    return losses, [{path: found for part in everyones for path, found in part[i].items()}
                    for i in range(len(scores))], full_of_stages(chunks, mesh["pp"])


def counted(how=None):
    """{op: (calls, bytes sent)} of a forward whose scores are noted, less those of one whose aren't; and of step()."""
    world = comm.world()
    model = gpt("llama")
    if how:
        context_parallel(model, world, how)
    replica, books = DistributedDataParallel(model, world), []
    inputs = np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH // world.size))
    for noted in (False, True):
        clip = QKClip(replica, THRESHOLD) if noted else None
        with ledger.record() as book:
            replica(inputs)
        books.append(book)
    with ledger.record() as book:
        clip.step()
    before, after = ({op: (each.calls[axis, op], each.bytes_sent[axis, op]) for axis, op in each.calls}
                     for each in books)
    more = {op: tuple(a - b for a, b in zip(after[op], before.get(op, (0, 0)), strict=True)) for op in after}
    return ({op: both for op, both in more.items() if any(both)},
            {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls})


def different(what):
    """The message where ranks clip differently."""
    world = comm.world()
    model = DistributedDataParallel(gpt("gpt"), world)
    clip = QKClip(model, THRESHOLD + (what == "threshold") * world.rank)
    if what == "layers" and world.rank:
        clip.layers = dict(list(clip.layers.items())[:-1])
    try:
        clip.step()
    except RuntimeError as error:
        return str(error)
    return None


def unwrapped():
    """The message of a model whose ranks aren't known, and what comes of one that is given them."""
    world = comm.world()
    message = None
    with contextlib.suppress(AssertionError):
        try:
            QKClip(gpt("gpt"))
        except ValueError as error:
            message = str(error)
    model = gpt("gpt")
    clip = QKClip(model, THRESHOLD, comm=world)
    model(np.full((1, LENGTH), world.rank))
    return message, told(clip.step())[0], model.state_dict()
