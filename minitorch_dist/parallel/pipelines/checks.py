"""What has to be so before a pipeline is made of ranks' chunks, and of what is measured at its end (pipeline.py)."""

import numpy as np

from ...autodiff.primitive import lower
from ...backend import is_array, is_floating, to
from ...comm.together import together
from ...nn.norm import BatchNorm
from .. import tied
from ..fsdp.fully_sharded import FullySharded
from ..wrapping import ReducingModule, check_not_annotated
from . import documents
from .schedule_steps import Step
from .schedules import play


def described(schedule):
    """What has to be the same on all ranks, as lines: the sizes, then step by step. TypeError for what is none."""
    rows = schedule if isinstance(schedule, (list, tuple)) else [None]
    if not all(isinstance(row, (list, tuple)) and all(isinstance(step, Step) for step in row) for row in rows):
        name = schedule if isinstance(schedule, str) else "1f1b"
        raise TypeError(f"Pipeline: schedule={schedule!r:.60}: a schedule is a list of Steps for each rank, as "
                        f"schedule_of({name!r}, comm.size, micro_batches) makes it")
    stages, micro_batches = (len({step[place] for row in schedule for step in row}) for place in (2, 1))
    return [f"{len(schedule)} ranks, {stages} stages, {micro_batches} micro-batches",
            *(f"row {rank}, step {i}: {step}" for rank, row in enumerate(schedule) for i, step in enumerate(row))]


def check_chunks(chunks, comm):
    """(whether each of every rank's chunks has something to train, whether one is in exact mode, whether one has
    layers that take documents). ValueError on all ranks if a pipeline can't have one of them. Collective."""
    def check():
        for chunk in chunks:
            if isinstance(chunk, FullySharded) and chunk.stage == 3 and chunk.reshard:
                raise ValueError(f"Pipeline: fully_shard with stage=3, reshard_after_forward={chunk.reshard} would be "
                                 "gathered twice for each micro-batch: leave the latter out, then it is gathered once "
                                 "a step, and kept until its last backward is through")
        for chunk in chunks:
            check_not_annotated(chunk, "Pipeline", "leave the annotations out, and cut the stages' matrices by "
                                "parallelize_module")
    together(comm, check)
    exact = any(isinstance(chunk, ReducingModule) and chunk.exact for chunk in chunks)
    reads = any(map(documents.readers, chunks))
    trained, exacts, reading = zip(*comm.all_gather_object(([*map(is_trained, chunks)], exact, reads)), strict=True)
    return trained, any(exacts), any(reading)


def is_trained(chunk):
    """Whether a stage has a parameter that wants a gradient."""
    return any(p.requires_grad for p in chunk.parameters())


def check_statistics(chunks, over, exact):
    """ValueError where a stage's BatchNorms, in training, wouldn't have one process's statistics: in no wrapper they
    know nothing of the samples that over's other ranks have, and in exact mode the running ones move behind the
    backwards of a wrapper with something to train."""
    for chunk in chunks:
        wrapped = isinstance(chunk, ReducingModule)
        norms = {path: m for path, m in chunk.named_modules() if isinstance(m, BatchNorm) and m.training}
        if norms and exact and not (wrapped and is_trained(chunk)):
            raise ValueError(f"Pipeline: {next(iter(norms))}, a BatchNorm in training, is in a stage with nothing to "
                             "train, and in exact mode running statistics move with gradients: let that stage be in "
                             "evaluation mode, stage.eval(), or leave exact mode")
        alone = [path for path, m in norms.items() if m.reduce is None and not wrapped]
        if alone and over is not None and over.size > 1:
            raise ValueError(f"Pipeline: {alone[0]}, a BatchNorm in training, is in a stage without a wrapper, and "
                             f"would take this rank's samples for those of all {over.size} ranks of {over.name!r}: "
                             "wrap that stage in DistributedDataParallel, or let it be in evaluation mode, "
                             "stage.eval()")


def check_links(ties, schedule):
    """ValueError, on all ranks, if stages that share a parameter would wait for each other in exact mode."""
    try:
        play(schedule, links=tied.links(ties))
    except ValueError as error:
        raise ValueError(f"Pipeline: in exact mode the gradients of {', '.join(ties.names)}, which several stages "
                         f"have, go from stage to stage, and {error}. Take another schedule, untie them, or leave "
                         "exact mode") from None


def measured(found):
    """Sums that were measured of a micro-batch, a number or several, as a float64 array."""
    if isinstance(found, (tuple, list)):
        found = [measured(part) for part in found]
        check_alike(found)
        return np.stack(found) if found else np.zeros(0)
    raw = lower(found)
    value = to(raw, "cpu") if is_array(raw) else np.asarray(raw)
    if value.dtype.kind not in "biu" and not is_floating(value.dtype):
        raise TypeError(f"Pipeline.evaluate: measure gives {found!r:.60}: give sums over the samples, a number, or "
                        "several in a tuple or an array")
    return value.astype(np.float64)


def check_alike(sums):
    """ValueError if these can't be put beside each other, or added up."""
    if len(shapes := dict.fromkeys(part.shape for part in sums)) > 1:
        raise ValueError(f"Pipeline.evaluate: measure gives arrays of shapes {', '.join(map(str, shapes))}: give SUMS "
                         "over the samples, of one shape whatever their number")
