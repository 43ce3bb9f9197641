"""What the ranks do in the tests of a GPT as stages of a pipeline."""

from unittest.mock import patch

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.data.packing import apart
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, cut_sequential, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .packing_cases import LENGTH, VOCABULARY, packed

BATCH, STEPS, CLIP = 8, 4, 0.5
GPTS = {"tied": {"dropout": 0.2}, "untied": {"tied": False, "kv_heads": 2, "sinks": True, "gated": True},
        "llama": FAMILIES["llama"] | {"tied": False},
        "experts": {"tied": False, "dropout": 0.1, "attention_dropout": 0.2,
                    "moe": {"experts": 4, "group": "sequence", "std": 0.2}},
        "experts, tied": {"moe": {"experts": 4, "group": "sequence", "std": 0.2, "balance": 0.3}},
        "deepseek": FAMILIES["deepseek"] | {"dropout": 0.1, "window": (None, "linear", "delta")},
        "blocks": {"window": ("2x3", None), "kv_heads": 2}, "windows": {"window": (5, None), "dropout": 0.2},
        "biased": {"moe": {"experts": 4, "capacity_factor": None, "balance": 0.0, "std": 0.2}},
        "rotary, tied": {"positions": "rotary", "norm": "rms"}}


def gpt(name):
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=4, heads=4, dim=16, dtype=np.float64, **GPTS[name])


def batches(packs, rank=0, size=1):
    """(step, batch); packs: of packed rows."""
    if packs:
        rows = packed()
        inputs, targets = rows.rows, rows.targets
    else:
        tokens = np.random.default_rng(8).integers(0, VOCABULARY, (24, LENGTH + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loader = data.Loader(inputs, targets, BATCH, seed=2, rank=rank, size=size)
    return zip(range(STEPS), (b for epoch in range(STEPS) for b in loader.epoch(epoch)), strict=False)


def loss_sum(output, labels):
    logits, aux = output if isinstance(output, tuple) else (output, None)
    loss = nn.cross_entropy(logits, labels, reduction="sum")
    return loss if aux is None else loss + labels.size * aux


def adamw(params):
    return optim.AdamW(params, 0.01, weight_decay=0.1)


def one_process(name, packs):
    """(losses, parameters)."""
    world, losses = comm.world(), []
    model = DistributedDataParallel(gpt(name), world)
    optimizer = adamw(model.parameters())
    for step, batch in batches(packs):
        losses.append(training.train_step(
            model, optimizer, batch, lambda m, s: loss_sum(m(*(apart(s.inputs) if packs else [s.inputs])), s.labels),
            world, seed=3, step=step, units=LENGTH, clip=CLIP)[0])
    return losses, model.state_dict()


def staged(name, packs, schedule, micro_batches, stage, sizes, tiled=False, slices=1, lengths=None):
    """(losses, whole parameters, {axis: bytes of all-reduces}) of a mesh of these sizes besides dp."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "ep": 1, "pp": 2, "tp": 1} | sizes)
    model, ranks, samples = gpt(name), mesh["dp", "cp", "ep"], mesh["dp", "ep"]
    if mesh["ep"].size > 1:
        tp.parallelize_module(model, mesh["ep"], moe.plan_of(model))
    if mesh["tp"].size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    if mesh["cp"].size > 1:
        cp.context_parallel(model, mesh["cp"])
    plan = schedule_of(schedule, mesh["pp"].size, micro_batches, 2, slices)
    placement = placement_of(plan)
    parts = cut_gpt(model, sum(map(len, placement)))
    chunks = [fully_shard(parts[i], ranks, stage) if stage else DistributedDataParallel(parts[i], ranks)
              for i in placement[mesh["pp"].rank]]
    pipeline, losses = Pipeline(chunks, mesh["pp"], plan, lengths), []
    optimizer = adamw([p for chunk in chunks for p in chunk.parameters()])
    with ledger.record() as book, patch.object(tiled_cross_entropy, "HOST", 1):
        for step, batch in batches(packs, samples.rank, samples.size):
            batch = cp.cut_sequence(batch, mesh["cp"]) if mesh["cp"].size > 1 else batch
            optimizer.zero_grad()
            losses.append(pipeline.run(batch, None if tiled else loss_sum, seed=3, step=step, units=LENGTH, over=ranks,
                                       packed=packs))
            pipeline.clip_grad_norm_(CLIP)
            optimizer.step()
    return losses, full_state_dict(chunks, mesh["pp"]), {
        axis: n for (axis, op), n in book.bytes_sent.items() if op == "all_reduce"}


def no_losses():
    """What is said where loss_sum is None, and the last stage is a Linear."""
    world = comm.world()
    stage = cut_sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 2)[world.rank]
    batch = next(data.Loader(np.zeros((4, 3), np.float32), np.zeros(4, int), 4).epoch(0))
    try:
        Pipeline([stage], world, schedule_of("gpipe", 2, 2)).run(batch, None, seed=0, step=0)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None
