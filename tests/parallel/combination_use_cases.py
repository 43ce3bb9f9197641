"""What the ranks do with forms of parallelism together, beyond training by each pair. See combination_cases.py."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, nn
from minitorch_dist.compress import prune, soup
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.local_sgd import FederatedAveraging, split_evenly
from minitorch_dist.parallel.servers import ParameterServer
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .combination_besides import BESIDES, EVERY, USUAL, adamw, scaler, sgd
from .combination_cases import (
    DIM,
    FORMS,
    VOCABULARY,
    Job,
    attempt,
    batches,
    build,
    language_model,
    pieces,
    sequences,
    steps,
)


def one_after_another(names, mixture, folder, beside):
    """[pieces] of a training in which each step is done by another form, going on from the checkpoint before."""
    found, world = [], comm.world()
    for number, name in enumerate(names):
        axis = FORMS[name].axis
        job = build((name,), {"dp": world.size} if axis == "dp" else {"dp": 2, axis: 2}, EVERY.get(beside, USUAL),
                    mixture)
        optimizer = adamw([pair for chunk in job.chunks for pair in chunk.named_parameters()])
        model = job.chunks if job.schedule is not None else job.chunks[0]
        if number:
            checkpoints.load(Path(folder) / str(number - 1), model, optimizer, world)
        steps(job, optimizer, [pair for pair in batches(job, number + 1) if pair[0] == number])
        checkpoints.save(Path(folder) / str(number), model, optimizer, {}, world)
        found.append(pieces(job))
    return found


def cut_too_late():
    """{(wrapper, form): what cutting a model that is wrapped, and then using it, says}."""
    def late(wrapper, form):
        mesh = comm.DeviceMesh(**{"dp": 2, FORMS[form].axis: 2})
        job = Job(mesh, USUAL, language_model(np.float64, form == "experts"), form == "experts")
        FORMS[wrapper].apply(job)
        wrapped = job.wrap(job.model)
        FORMS[form].apply(job)
        wrapped(sequences()[0][:2])
    return {(wrapper, form): attempt(late, wrapper, form) for wrapper in ("DDP", "ZeRO 3")
            for form in ("tensor", "sequence", "ring", "all-to-all", "experts", "annotations")}


def twice():
    """{what is done to a model twice: what it says}."""
    mesh, found = comm.DeviceMesh(a=2, b=2), {}

    def model():
        return language_model(np.float64)
    ways = {"heads": lambda m, comm: tp.parallelize_module(m, comm, {"1.attention": "heads"}),
            "context": cp.context_parallel, "DDP": DistributedDataParallel, "fully_shard": fully_shard,
            "annotations": lambda m, comm: annotate.shard_parameters(m, mesh, {})}
    for first, second in (("heads", "heads"), ("context", "context"), ("annotations", "annotations"), ("DDP", "DDP"),
                          ("DDP", "fully_shard"), ("fully_shard", "DDP"), ("fully_shard", "fully_shard")):
        found[first, second] = str(attempt(lambda a, b: ways[b](ways[a](model(), mesh["a"]), mesh["b"]), first, second))
    return found


def whole_models_wanted():
    """{(who wants one, form): what it says}."""
    found = {}

    def server(model):
        return ParameterServer(model, sgd, comm.world())

    def federated(model):
        inputs, labels = sequences()
        return FederatedAveraging(model, inputs, labels, split_evenly(len(inputs), 4), lr=0.1)

    def soups(model):
        return soup.uniform_soup([model])
    for form in ("tensor", "ring", "experts", "annotations", "DDP", "ZeRO 3"):
        for wants in server, federated, soups:
            sizes = {"dp": 4} if FORMS[form].axis == "dp" else {"dp": 2, FORMS[form].axis: 2}
            job = Job(comm.DeviceMesh(**sizes), USUAL, language_model(np.float64, form == "experts"), form == "experts")
            FORMS[form].apply(job)
            model = job.model if job.wrap is None else job.wrap(job.model)
            found[wants.__name__, form] = str(attempt(wants, model))
    return found


def sparsities():
    """{form: whether a model's share of zeros is that of the whole one}."""
    found, whole = {}, language_model(np.float64)
    prune.Pruning(whole, masks := prune.magnitude(whole, 0.6))
    for form in ("tensor", "annotations", "DDP", "ZeRO 3"):
        axis = FORMS[form].axis
        (model,) = build((form,), {"dp": 4} if axis == "dp" else {"dp": 2, axis: 2}, USUAL, False).chunks
        found[form, "masks"] = all((mask == masks[name]).all() for name, mask in prune.magnitude(model, 0.6).items())
        prune.Pruning(model, masks)
        found[form, "share"] = prune.sparsity(model).rows == prune.sparsity(whole).rows
    return found


def scalers_without_ranks():
    """{form: what a step with a GradScaler that doesn't know them says}."""
    found, unaware = {}, replace(BESIDES["GradScaler"], scaler=lambda comm: scaler(None))
    for form in ("1F1B", "interleaved"):
        job = build((form,), {"pp": 2, "dp": 2}, unaware, False)
        optimizer = sgd([pair for chunk in job.chunks for pair in chunk.named_parameters()])
        found[form] = attempt(steps, job, optimizer, batches(job, 1))
    return found


def written():
    """{form: the text that a GPT writes}, and that of one process as None."""
    found, start = {}, sequences()[0][:3, :3]
    sizes = {"tensor": "tp", "ring": "cp", "experts": "ep", "annotations": "op", "DDP": "dp", "ZeRO 3": "dp"}

    def gpt(form):
        mt.manual_seed(5)
        mixture = {"moe": {"experts": 4, "group": "sequence"}} if form == "experts" else {}
        return nn.GPT(VOCABULARY, 8, layers=1, heads=4, dim=DIM, dtype=np.float64, **mixture)

    def text(form):
        model, mesh = gpt(form), comm.DeviceMesh(**{sizes[form]: 4})
        job = Job(mesh, USUAL, model, False)
        if form == "tensor":
            tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
        elif form == "annotations":
            annotate.shard_parameters(model, mesh, annotate.megatron(model, "op"))
        else:
            FORMS[form].apply(job)
        if job.wrap is None:
            return model.generate(start, 4, temperature=0)
        wrapped = job.wrap(model)
        with wrapped.gathered() if hasattr(wrapped, "gathered") else nullcontext():
            return wrapped.module.generate(start, 4, temperature=0)
    for form in sizes:
        found[form] = attempt(text, form), gpt(form).generate(start, 4, temperature=0)
    return found
