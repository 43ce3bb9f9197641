"""Plans beside what the ledgers of plan_cases' runs have counted, to the byte."""

from dataclasses import replace

import pytest

from minitorch_dist.parallel.pipelines.schedules import play
from minitorch_dist.plan import DEVICES, Job, plan
from minitorch_dist.plan.paper import gathered, pieces_of, second, units

from .plan_cases import SIZES

V100 = DEVICES["V100"]


def rank_of(job, place=0):
    """The Rank at a place in the pipeline."""
    return plan(job, V100).ranks[place]


def sent(rank, axis):
    """Bytes that a Rank sends along an axis."""
    return sum(c.sent for c in rank.collectives if c.axis == axis)


def job_of(more, family="gpt"):
    """A small Job in float32, but for these."""
    more = {"precision": "float32", "batch": 12, "time": 11, **more}
    return Job(**more | {"model": replace(SIZES[family], **more.get("model", {}))})


def check_step(job, everyone):
    """everyone: what plan_cases.step gave, by rank."""
    rank = rank_of(job)
    # Without others, communicators' arrays are aligned by hand.
    aligned = 64 * sum(piece.ranks == 1 and piece.trained for piece in pieces_of(job, job.stages_of(0)))
    held, peak, *_ = everyone[-1]           # whose parts of the vocabulary are the largest
    assert held["parameter"] == rank.parameters + aligned * (job.stage in (1, 2))
    assert held["optimizer"] == rank.optimizer
    assert held["gradient"] == rank.gradients + aligned * (job.stage < 2)
    # Tokens and labels are the program's: those of micro-batches that are through are there as well, if the tape has
    # kept them. A frozen embedding's tokens it doesn't keep.
    even = job.samples % job.micro_batches == 0     # else the first is the largest, and nothing was before it
    whole = job.tp == 1
    nbytes = 8 * ((whole and job.adapters is None) + (whole or job.tiled_loss))
    others = nbytes * job.time // job.cp * (job.samples - job.pieces[0]) if even else 0
    assert peak["activation"] == rank.activations + others
    assert peak["buffer"] + peak["gradient"] - held["gradient"] <= rank.buffers
    if job.stage == 3 and not (job.param_bits or job.reduce_bits):
        modules = units(job, job.stages_of(0)[0])
        assert peak["buffer"] == gathered(job, modules) + second(job, modules)
    for axis in ("dp", "shard", "near", "tp", "cp", "ep"):      # the mean over its ranks: they may differ by some bytes
        counted = [out[axis] for _, _, out, _ in everyone]
        assert sum(counted) == pytest.approx(job.ranks * sent(rank, axis), rel=1e-12), axis
        assert max(counted) - min(counted) <= 64


def check_pipeline(job, everyone):
    """everyone: what plan_cases.pipeline gave, by rank."""
    inner = job.cp * job.ep * job.tp
    for number, (held, peak, out) in enumerate(everyone):
        place = number // inner % job.pp
        rank, whole = rank_of(job, place), job.tp == 1
        # Without others, communicators' arrays are aligned by hand.
        aligned = 64 * sum(piece.ranks == 1 and piece.trained for piece in pieces_of(job, job.stages_of(place)))
        assert held["parameter"] == rank.parameters + aligned * (job.stage in (1, 2))
        assert held["optimizer"] == rank.optimizer and held["gradient"] == rank.gradients + aligned * (job.stage < 2)
        tied = sum(c.sent for c in rank.collectives if c.axis == "pp" and c.op == "all_reduce")
        assert out["pp", "send"] == sent(rank, "pp") - tied
        if not job.stage:
            for one in ("tp", "cp", "ep"):
                assert sum(n for (axis, _), n in out.items() if axis == one) == sent(rank, one), one
        # Of a piece the mean over the ranks that share it, whose pieces are cut at blocks.
        others = [n for i, (_, _, n) in enumerate(everyone) if i // inner % job.pp == place]
        assert sum(n.get(("pp tied", "all_reduce"), 0) for n in others) == tied * len(others)
        if job.stage:
            counted = sum(n for (axis, _), n in out.items() if axis not in ("pp", "pp tied", "tp", "ep"))
            assert counted == sent(rank, "dp") + 8, (counted, sent(rank, "dp"), out)      # and the loss
            gathered = sum(c.nbytes for c in rank.collectives if c.op == "all_gather") * (job.stage == 3)
            assert held["buffer"] == 0 and peak["buffer"] == gathered
            message = job.pieces[0] * job.time * job.model.width * 4        # on its way
            assert peak["buffer"] + peak["gradient"] - held["gradient"] <= rank.buffers + job.micro_batches * message
        # What has been received counts as parameters; tokens and labels are there of the whole batch, where stages keep
        # them as they are: not with divided tables, frozen ones, and labels of a part of the sequences.
        found, most = peak["activation"] + peak["parameter"] - held["parameter"], play(job.steps).held[place]
        through = job.samples - max(sum(job.pieces[k:k + most]) for k in range(job.micro_batches))
        stay = (place == 0 and whole and job.adapters is None
                or place == job.pp - 1 and job.cp == 1 and (whole or job.tiled_loss))
        if job.stages_per_rank == 1:
            assert found == rank.activations + 8 * job.time // job.cp * through * stay
        else:       # then the peaks of both kinds come a message apart
            tokens = job.pieces[0] * job.time
            message = 4 * tokens * job.model.width // (job.tp if job.sequence_parallel else 1)
            least = 0 if whole else -4 * tokens     # a rank's share of the vocabulary may be a row smaller
            assert least <= found - rank.activations <= message + 2 * 8 * job.time * job.samples < 0.02 * found
