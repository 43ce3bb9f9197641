"""What the ranks do in the tests of exact mode with divided experts."""

import copy
import weakref
from functools import partial

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim
from minitorch_dist.nn.absent import Absent
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .moe_cases import gpt, sequences


def said(action):
    """The error of an action, or None."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def wrapped(stage=0, setting="sequences", size=2):
    """A GPT whose experts are divided over `size` ranks, in exact mode with 2 micro-shards per rank."""
    world, mesh = comm.world(), comm.DeviceMesh(dp=-1, ep=size)
    model = gpt(setting)
    tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
    options = {"exact": True, "micro_shards": 2 * world.size}
    return fully_shard(model, world, stage, **options) if stage else DistributedDataParallel(model, world, **options)


def one_pass(model, number, also=lambda model: 0.0):
    logits, aux = model(sequences()[0][[2 * number + comm.world().rank]])
    (mt.sum(mt.square(logits)) + aux + also(model)).backward()


def matrix(model):
    return model.module.blocks[0].mlp.experts.up


def misuse():
    """{what: the error, or None}."""
    found = {}
    for stage in 0, 2:
        direct, hooked = wrapped(stage), wrapped(stage)
        found["in the loss", stage] = said(partial(one_pass, direct, 0, lambda m: mt.sum(mt.square(matrix(m)))))
        matrix(hooked).register_hook(lambda grad: grad * 2)
        found["a hook", stage] = said(partial(one_pass, hooked, 0))
    model = wrapped()
    one_pass(model, 0)
    model.zero_grad()
    found["zeroed half-way"] = said(lambda: one_pass(model, 1))
    model.forget_step()
    found["begun anew"] = said(lambda: (one_pass(model, 0), one_pass(model, 1)))
    found["not zeroed"] = said(lambda: one_pass(model, 0))
    return found


def forgotten():
    """Whether a step that was begun and given up leaves the next one's gradients as they are without it."""
    grads = []
    for begun in False, True:
        model = wrapped()
        if begun:
            one_pass(model, 3)
            model.forget_step()
        for number in range(2):
            one_pass(model, number)
        grads.append([p.grad.numpy().copy() for p in model.parameters()])
    return all(np.array_equal(a, b) for a, b in zip(*grads, strict=True))


def freed():
    """Stage 3: whether gathered experts are gone as soon as forward has left them, and after backward."""
    model, gone = wrapped(3), []
    experts = model.module.blocks[0].mlp.experts
    unit = next(unit for unit in model.trained if "blocks.0.mlp.experts.up" in unit.names)
    seen = []

    def look(module, inputs):
        seen.append(weakref.ref(unit.whole))
    experts.register_forward_pre_hook(look)
    for number in range(2):
        logits, aux = model(sequences()[0][[2 * number + comm.world().rank]])
        gone.append(all(ref() is None for ref in seen))
        (mt.sum(mt.square(logits)) + aux).backward()
        gone.append(all(ref() is None for ref in seen))
    return len(seen), gone, all(isinstance(leaf.data, Absent) for _, leaf in experts.sources.leaves.values())


def copied():
    """Whether a copy of the module inside has gradients of its own parameters."""
    model = wrapped()
    twin = copy.deepcopy(model.module)
    logits, aux = twin(sequences()[0][:2])
    (mt.sum(logits) + aux).backward()
    mlp = twin.blocks[0].mlp
    return all(p.grad is not None for p in mlp.parameters()) and mlp.experts.sources is None


SIZES = {"one block": (4, 12, 7), "several": (24, 64, 64), "not whole sixteens": (5, 7, 3)}


def norms(ranks):
    """{name of a size: the norm of experts' gradients, which are the same for any number of ranks}."""
    mesh, found = comm.DeviceMesh(dp=-1, ep=ranks), {}
    for name, (size, hidden, more) in SIZES.items():
        mt.manual_seed(1)
        model = nn.Sequential(nn.MoE(size, hidden, 4, dtype=np.float64), nn.Linear(size, more, dtype=np.float64))
        if ranks > 1:
            tp.parallelize_module(nn.Sequential(model), mesh["ep"], {"0.0": "experts"})
        wrapper = DistributedDataParallel(model, mesh["dp", "ep"])
        for key, p in wrapper.named_parameters():
            whole = p.shape if p.leaf.over is None else (4, *p.shape[1:])
            values = np.random.default_rng([len(key), size]).standard_normal(whole)
            mine = values if p.leaf.over is None else np.split(values, ranks)[mesh["ep"].rank]
            p.grad = mt.tensor(np.ascontiguousarray(mine))
        found[name] = optim.clip_grad_norm_(wrapper.parameters(), 1e9)
    return found
