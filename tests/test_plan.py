"""Plans against the papers' numbers, and against the ledger of small models that are really trained."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist import __main__, comm, nn
from minitorch_dist.flat import BLOCK
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.plan import DEVICES, GPT, Device, Job, Parameters, plan
from minitorch_dist.plan.activations import activations
from minitorch_dist.plan.devices import LATENCY
from minitorch_dist.plan.layout import buckets
from minitorch_dist.plan.meshes import every
from minitorch_dist.plan.paper import gpu_hours
from tests.crews import crews

from . import plan_cases

CASES = "tests.plan_cases:"
SMALL = GPT(layers=3, width=36, heads=4, vocabulary=50, context=16)
V100 = DEVICES["V100"]
SIMPLE = Device("simple", 1e9, {"mixed": 1e12, "float32": 1e11}, link=1e9, network=1e8, per_node=4)


def rank_of(job, place=0):
    return plan(job, V100).ranks[place]


def sent(rank, axis, size):
    return sum(c.sent(size) for c in rank.collectives if c.axis == axis)


# ---------------------------------------------------------------- the papers

def test_the_zero_papers_memory():
    """Rajbhandari et al. 2020, figure 1 and section 1: 7.5 B parameters on 64, 1 T on 1,024."""
    gb = [rank_of(Job(Parameters(7.5e9), dp=64, batch=64, stage=stage)).memory / 1e9 for stage in range(4)]
    assert [round(x, 1) for x in gb] == [120.0, 31.4, 16.6, 1.9]
    assert rank_of(Job(Parameters(1e12))).memory == 16e12
    assert rank_of(Job(Parameters(1e12), dp=1024, batch=1024, stage=3)).memory / 1e9 == 15.625
    assert [rank_of(Job(Parameters(1000), stage=s, dp=8, batch=8, precision="float32")).memory for s in range(4)] == \
        [16000, 9000, 5500, 2000]


@pytest.mark.parametrize("stage, times", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_zero_papers_traffic(stage, times):
    """2ψ, 2ψ, 3ψ elements of 2 bytes, but for the rank's own part."""
    got = sent(rank_of(Job(Parameters(6.4e9), dp=64, batch=64, stage=stage)), "dp", 64)
    assert got == pytest.approx(times * 6.4e9 * 2 * 63 / 64, rel=1e-12)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikantis_activations(t):
    """Table 2 of Korthikanti et al. 2022, per layer; and 2sbh with full recomputation."""
    a, h, s, b = 96, 12288, 2048, 3
    model = GPT(layers=1, width=h, heads=a, vocabulary=51200, context=s)

    def per_layer(**more):
        return activations(model, "mixed", (1, False, False), b, s, t, **more)[0]
    square = 5 * a * s / h
    assert per_layer() == pytest.approx(s * b * h * (10 + 24 / t + square / t), rel=1e-12)
    assert per_layer(sequence_parallel="regather") == pytest.approx(s * b * h / t * (34 + square), rel=1e-12)
    assert per_layer(checkpointing=True) == 2 * s * b * h
    assert per_layer(checkpointing=True, sequence_parallel="regather") == 2 * s * b * h / t
    kept, more = activations(model, "mixed", (3, False, False), b, s, t, checkpointing=True)
    assert kept + more == pytest.approx(2 * 2 * s * b * h + per_layer(), rel=1e-12)


def test_narayanans_flops():
    """Narayanan et al. 2021: 96·B·s·l·h²·(1 + s/6h + V/16lh), with the forward pass that recomputes."""
    s, h, layers, batch, v = 2048, 12288, 96, 1536, 51200
    model = GPT(layers, h, 96, v, s)
    wanted = 96 * batch * s * layers * h ** 2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.step_flops(batch * s, s, checkpointing=True) == pytest.approx(wanted, rel=1e-12)
    job = Job(replace(model, tied=False), dp=2, tp=8, pp=4, batch=batch, time=s, micro_batches=8, checkpointing=True)
    shares = [rank.flops for rank in plan(job, V100).ranks]
    assert 16 * sum(shares) == pytest.approx(wanted, rel=1e-12) and shares[3] > shares[2] == shares[0]


def test_llamas_hours():
    """7 B parameters on 2 T tokens: about 200,000 hours at 117 TFLOP/s each."""
    flops = Parameters(7e9).step_flops(2e12)
    assert flops == 8.4e22 and round(flops / (200_000 * 3600) / 1e12) == 117
    assert gpu_hours(flops, 117e12) == pytest.approx(200_000, rel=0.01)


@pytest.mark.parametrize("schedule, p, m, v", [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 2, 6, 3)])
def test_bubbles(schedule, p, m, v):
    model = replace(SMALL, layers=p * v, tied=False)
    job = Job(model, pp=p, batch=m, time=4, micro_batches=m, schedule=schedule, chunks=v)
    found = plan(job, SIMPLE)
    assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)
    assert found.seconds.bubble == pytest.approx(found.seconds.compute * (p - 1) / (v * m), rel=1e-12)
    assert plan(replace(job, checkpointing=True), SIMPLE).bubble == pytest.approx(found.bubble, rel=1e-12)


# ---------------------------------------------------------------- the library's own models

@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_the_models(tied):
    sizes = replace(SMALL, tied=tied)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(1)]
    real = [(name, p.shape) for name, p in plan_cases.gpt(sizes).named_parameters()]
    assert sizes.embedding(1) + blocks + sizes.output(1) == real
    assert sizes.count == sum(math.prod(shape) for _, shape in real)


@pytest.mark.parametrize("tied, n", [(True, 2), (False, 4)])
def test_parts_are_the_cut_models(tied, n):
    """Of the last rank, which has most rows of the vocabulary; padding would hide a vector."""
    sizes = replace(SMALL, tied=tied, vocabulary=53)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(n)]
    assert crews.call(CASES + "parts", n, (asdict(sizes),))[-1] == sizes.embedding(n) + blocks + sizes.output(n)


def test_buckets_are_the_librarys():
    """4,032 + 63 elements fill a block, and the counts of users need another."""
    for width, out, blocks in ((64, 63, 2), (64, 62, 1), (400, 1000, 98)):
        ddp = DistributedDataParallel(nn.Linear(width, out), comm.world_of_one())
        sizes = buckets([(out,), (out, width)], 4)      # as they are cut before the first step
        assert sizes == [bucket.flat.size for bucket in ddp.buckets]
        assert sum(sizes) == blocks * BLOCK


def test_flops_are_the_models():
    model, tokens = plan_cases.gpt(SMALL), np.zeros((5, 11), int)
    assert SMALL.step_flops(55, 11) == nn.summary(model, tokens).training_flops


# ---------------------------------------------------------------- the ledger

RUNS = {    # what is different from float32, a batch of 12 times 11 tokens
    "alone": {}, "ddp": {"dp": 2}, "ddp, no dropout, untied": {"dp": 4, "model": {"dropout": False, "tied": False}},
    "1": {"dp": 3, "stage": 1}, "2": {"dp": 2, "stage": 2}, "3": {"dp": 2, "stage": 3}, "3 on 4": {"dp": 4, "stage": 3},
    "2, accumulated": {"dp": 2, "stage": 2, "micro_batches": 3},
    "3, accumulated": {"dp": 2, "stage": 3, "micro_batches": 2},
    "uneven": {"dp": 2, "batch": 14, "micro_batches": 2},
    "3, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True},
    "3, one layer": {"dp": 2, "stage": 3, "model": {"layers": 1}},
    "3, one layer, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True, "micro_batches": 2,
                                  "model": {"layers": 1, "width": 32, "vocabulary": 71, "dropout": False}},
    "tensors": {"tp": 2}, "tensors, untied": {"tp": 4, "dp": 1, "model": {"tied": False, "vocabulary": 51}},
    "tensors, checkpoints": {"tp": 2, "checkpointing": True, "model": {"vocabulary": 53}},
    "sequences": {"tp": 2, "time": 10, "sequence_parallel": True},
    "sequences, gathered again": {"tp": 4, "time": 12, "sequence_parallel": "regather", "model": {"tied": False}},
    "sequences, checkpoints": {"tp": 2, "dp": 2, "time": 12, "sequence_parallel": True, "checkpointing": True},
    "both": {"tp": 2, "dp": 2, "stage": 3}, "both, ddp": {"tp": 2, "dp": 2, "micro_batches": 2},
}


def job_of(more):
    more = {"precision": "float32", "batch": 12, "time": 11, **more}
    return Job(**more | {"model": replace(SMALL, **more.get("model", {}))})


@pytest.mark.parametrize("name", RUNS)
def test_what_is_held_and_sent_is_what_the_ledger_counts(name):
    job = job_of(RUNS[name])
    rank = rank_of(job)
    everyone = crews.call(CASES + "step", job.ranks, (asdict(job),))
    aligned = 64 if job.dp == 1 else 0      # without others, communicators' arrays are aligned by hand
    held, peak, _ = everyone[-1]            # whose parts of the vocabulary are the largest
    assert held["parameter"] == rank.parameters and held["optimizer"] == rank.optimizer
    assert held["gradient"] == rank.gradients + aligned
    # Tokens and labels are the program's: those of micro-batches that are through are there as well.
    even = job.samples % job.micro_batches == 0     # else the first is the largest, and nothing was before it
    others = 16 * job.time * (job.samples - job.micro_batch) if job.tp == 1 and even else 0
    assert peak["activation"] == rank.activations + others
    assert peak["buffer"] + peak["gradient"] - held["gradient"] <= rank.buffers
    if job.stage == 3 and not job.checkpointing:
        units = sorted(c.nbytes for c in rank.collectives if c.op == "all_gather")
        assert peak["buffer"] == sum(units[-2:])
    for axis in ("dp", "tp"):       # the mean over the ranks of the axis, which may differ by some bytes
        counted = [out[axis] for *_, out in everyone]
        assert sum(counted) == pytest.approx(job.ranks * sent(rank, axis, getattr(job, axis)), rel=1e-12)
        assert max(counted) - min(counted) <= 64


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True, "time": 10}], ids=str)
def test_the_order_of_gradients(more):
    """By which buckets are cut: of a norm's weight and bias it doesn't matter which comes first."""
    job = job_of(more)
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == job.arrivals(job.stages_of(0)[0])


@pytest.mark.parametrize("width, vocabulary, tp", [(78, 82, 1), (96, 300, 1), (104, 411, 2)])
def test_several_buckets(width, vocabulary, tp):
    job = job_of({"dp": 2, "tp": tp, "batch": 4, "model": {"layers": 8, "width": width, "heads": 2, "tied": False,
                                                           "vocabulary": vocabulary}})
    rank = rank_of(job)
    assert sum(c.axis == "dp" for c in rank.collectives) == 2
    for held, _, out in crews.call(CASES + "step", 2 * tp, (asdict(job),))[tp - 1::tp]:
        assert held["parameter"] == rank.parameters and out["dp"] == sent(rank, "dp", 2)


PIPELINES = {
    "1f1b": ({"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "with ddp": ({"pp": 2, "dp": 2, "micro_batches": 3}, [0, 2, 5]),
    "gpipe": ({"pp": 3, "micro_batches": 4, "schedule": "gpipe"}, [0, 1, 3, 5]),
    "interleaved": ({"pp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2}, [0, 1, 2, 3, 5]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_pipeline_holds_and_sends(name):
    more, bounds = PIPELINES[name]
    job = job_of(more | {"model": {"layers": 5, "tied": False}})
    for number, (held, peak, out, live) in enumerate(crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds))):
        place = number % job.pp
        rank, ends = rank_of(job, place), place == 0 or place == job.pp - 1
        aligned = 64 * job.chunks if job.dp == 1 else 0
        assert held["parameter"] == rank.parameters and held["optimizer"] == rank.optimizer
        assert held["gradient"] == rank.gradients + aligned
        assert out == sent(rank, "pp", job.pp)
        # What has been received counts as parameters; tokens and labels are there of the whole batch.
        if job.chunks == 1:
            whole = 8 * job.time * (job.samples - live * job.micro_batch) * ends
            assert peak["activation"] + peak["parameter"] - held["parameter"] == rank.activations + whole
        else:
            assert 0.97 * rank.activations <= peak["activation"] + 8 * job.time * job.samples <= 1.01 * rank.activations


# ---------------------------------------------------------------- seconds

def test_seconds_of_data_parallelism():
    """A ring on the slowest link, and FLOPs at the peak."""
    for dp, speed in ((4, 1e9), (8, 1e8)):
        for stage, times in ((0, 2), (3, 3)):
            found = plan(Job(Parameters(1e9), dp=dp, batch=dp, time=100, stage=stage), SIMPLE).seconds
            assert found.dp == pytest.approx(times * 2e9 * (dp - 1) / dp / speed, rel=1e-3)
            assert found.compute == pytest.approx(6 * 1e9 * 100 / 1e12)
            assert found.step == found.dp + found.compute and found.longest == "dp"


def test_seconds_of_a_mesh():
    """tp within a machine of four, pp between two of them."""
    model = GPT(layers=4, width=1024, heads=8, vocabulary=1024, context=512, tied=False)
    job = Job(model, tp=4, pp=2, batch=8, time=512, micro_batches=8)
    found, tokens = plan(job, SIMPLE).seconds, 8 * 512
    ring, waits = 2 * 3 / 4 * tokens / 1e9, 6 * 8 * LATENCY        # in 8 micro-batches
    assert found.tp == pytest.approx((2 * 4 + 1) * (2048 * ring + waits) + 3 * (4 * ring + waits), rel=1e-12)
    assert found.pp == pytest.approx(tokens * 2048 / 1e8, rel=1e-3)
    assert found.dp == 0 and found.bubble == pytest.approx((found.compute + found.tp) / 8, rel=1e-12)


def test_a_plan_speaks_of_its_worst_rank():
    """Of three pipeline stages the first keeps most, the middle one sends most, the last computes most."""
    model = GPT(layers=3, width=64, heads=8, vocabulary=64, context=32, tied=False)
    found = plan(Job(model, pp=3, batch=8, time=32, micro_batches=8), SIMPLE)
    first, middle, last = found.ranks
    assert found.fullest is first and first.memory > max(middle.memory, last.memory)
    assert found.sent("pp") == sent(middle, "pp", 3) == 2 * sent(first, "pp", 3) == 2 * 8 * 32 * 64 * 2
    assert found.seconds.compute == last.flops / 1e12 and last.flops > middle.flops
    assert found.fits and not plan(found.job, replace(SIMPLE, memory=first.memory - 1)).fits
    assert plan(found.job, replace(SIMPLE, memory=first.memory)).fits


def test_sequence_parallelism_sends_as_much_and_gathers_again():
    """Korthikanti et al. 2022, section 4.2.2: all-gather and reduce-scatter for each all-reduce."""
    model = GPT(layers=4, width=64, heads=8, vocabulary=64, context=32)
    ranks = [rank_of(Job(model, tp=4, batch=2, time=32, sequence_parallel=it)) for it in (False, True, "regather")]
    plain, parted, again = (sent(rank, "tp", 4) for rank in ranks)
    one = 2 * 32 * 64 * 2 * 3 / 4       # all-gather of a block's output
    labels, vectors = 3 * 2 * 3 / 4 * 2 * 32 * 4, (2 * (6 * 4 + 2) + 32) * 64 * 2 * 3 / 4
    assert plain == (4 * 4 + 2) * 2 * one + labels
    assert parted == plain + vectors and again == parted + (2 * 4 + 1) * one
    assert ranks[2].activations < ranks[1].activations < ranks[0].activations


# ---------------------------------------------------------------- the command

GPT3 = ("--layers 96 --width 12288 --heads 96 --vocabulary 51200 --context 2048 --untied --device A100 "
        "--devices 1024 --tp 8 --pp 16 --batch 1536 --micro-batches 192 --checkpointing")


def said(capsys, line):
    status = __main__.main(["plan", *line.split()])
    return status, *capsys.readouterr()


def test_the_command(capsys):
    status, out, err = said(capsys, "--devices 64 --parameters 7.5e9 --device V100 --tokens 2e12")
    assert (status, err) == (0, "")
    for words in ("ZeRO 1 15.00 15.00 1.41 31.41 fits", "120.00 too much", "16.64", "1.88", "of 32", "ZeRO paper",
                  "2e+12 tokens: 9e+22 FLOPs, 200,000 device hours of computing alone"):
        assert words in " ".join(out.split())
    assert "in stage 0" not in out      # as fast as ZeRO 1, but it doesn't fit
    # 6 · 7e9 · 2,048 FLOPs of each; sent are 3 · 15/16 of 1.4e10 bytes
    out = said(capsys, "--devices 16 --parameters 7e9 --flops 1e13 --bandwidth 2.1e10 --memory 6e9 --stage 3 "
                       "--tokens 32768e3")[1].split("\n")
    assert "of 6" in out[4] and "too much" in out[5] and out[8].split()[:5] == ["ZeRO", "3", "39.38", "8.6", "1.88"]
    assert "1,000 steps" in out[10] and "2.9 h, 47 device hours" in out[10]
    out = said(capsys, "--devices 2 --pp 2 --untied --layers 2 --width 8 --heads 2 --vocabulary 9 --context 4")[1]
    assert "a step: 8 samples of 4 tokens" in out and "8 micro-batches, bubble 11.1 %" in out
    status, out, _ = said(capsys, GPT3)
    assert status == 0 and "175,244,992,512 parameters" in out and "bubble 7.2 %" in out and "ZeRO 2" not in out
    assert "Korthikanti" in out and "Exact counts" in out and "compute" in out
    assert "exact, what this library's tape keeps" in said(
        capsys, "--devices 2 --precision float32 --layers 2 --width 8 --heads 2 --vocabulary 9 --context 4")[1]


def test_all_meshes(capsys):
    """Each of them once; what fits comes first, the fastest first."""
    model = GPT(layers=3, width=60, heads=6, vocabulary=64, context=32, tied=False)
    plans, impossible = every(Job(model, batch=16, time=32), SIMPLE, 8)
    seen = {(p.job.dp, p.job.tp, p.job.pp, p.job.stage) for p in plans}
    wanted = {(dp, tp, pp, stage) for tp in (1, 2) for pp in (1, 2) for dp in (8 // tp // pp,)
              for stage in range(4 if pp == 1 else 2)}      # 4 doesn't divide the heads, 3 layers aren't 4 stages
    assert seen == wanted and len(plans) == len(seen)
    all_of_them = sum(4 if 8 // tp // pp > 1 else 1 for tp in (1, 2, 4) for pp in (1, 2, 4, 8) if tp * pp <= 8)
    assert impossible == all_of_them - len(plans)       # tensors across machines of 4 aren't tried
    assert [p.job.micro_batches for p in plans if p.job.pp == 2] == [min(8, 16 // p.job.dp) for p in plans
                                                                     if p.job.pp == 2]
    times = [p.seconds.step for p in plans]
    assert times == sorted(times) and all(p.fits for p in plans)
    memory = sorted(p.fullest.memory for p in plans)[len(plans) // 2]
    plans, _ = every(Job(model, batch=16, time=32), replace(SIMPLE, memory=memory), 8)
    fits = [p.fits for p in plans]
    assert fits == sorted(fits, reverse=True) and 1 < sum(fits) < len(fits)
    for some in ([p for p in plans if p.fits], [p for p in plans if not p.fits]):
        assert [p.seconds.step for p in some] == sorted(p.seconds.step for p in some)
    out = said(capsys, "--devices 16 --batch 64 --meshes --parameters 7e9 --device A100")[1]
    assert "4 ways, of which 3 fit" in out and "40 more can't be" in out and "dp=16 tp=1 pp=1  ZeRO 3" in out


MODEL = "--layers 3 --width 36 --heads 6 --vocabulary 50 --context 16"
MISTAKES = {
    "--devices 8 --dp 3 --tp 2 " + MODEL: "dp=3 × tp=2 × pp=1 doesn't make up 8 devices",
    "--devices 9 --tp 2 " + MODEL: "dp=? × tp=2",
    "--devices 4 --pp 4 --untied " + MODEL: "3 layers can't be cut into pp·chunks = 4 stages: lower --pp",
    "--devices 4 --tp 4 " + MODEL: "tp=4 must divide the 6 heads: take another --tp",
    "--devices 4 --device B9 " + MODEL: "device 'B9' is unknown: take one of V100, A100, H100, H200",
    "--devices 4 --heads 5 --layers 3 --width 36 --vocabulary 50 --context 16": "5 heads must divide the width 36",
    "--devices 2 --pp 2 " + MODEL: "add --untied",
    "--devices 2 --pp 2 --untied --stage 3 " + MODEL: "take --stage 0 or 1",
    "--devices 2 --stage 4 " + MODEL: "stage 4",
    "--devices 2 --batch 3 " + MODEL: "dp must divide the batch",
    "--devices 2 --batch 0 " + MODEL: "batch is 0",
    "--devices 0 " + MODEL: "--devices 0",
    "--devices 2 --layers 3": "missing --width --heads --vocabulary --context",
    "--devices 2": "give --parameters, or all of a GPT's",
    "--devices 2 --parameters 1e9 --layers 3": "--parameters and --layers",
    "--devices 2 --parameters nan": "--parameters nan: must be a positive number",
    "--devices 2 --parameters 1e9 --tp 2": "give --layers, --width and --heads",
    "--devices 2 --flops -1 " + MODEL: "--flops -1.0",
    "--devices 2 --precision float8 " + MODEL: "take one of mixed, float32",
    "--devices 2 --sequence-length 17 " + MODEL: "raise --context",
    "--devices 2 --sequence-length 0 " + MODEL: "time is 0",
    "--devices 2 --sequence-parallel " + MODEL: "tp=1",
    "--devices 2 --pp 2 --untied --schedule zigzag " + MODEL: "take one of gpipe, 1f1b, interleaved",
    "--devices 2 --meshes " + MODEL: "give --batch",
    "--devices 2 --sequence-parallel both " + MODEL: "sequence_parallel='both' must be one of",
    "--devices 2 --meshes --batch 4 --sequence-parallel both " + MODEL: "sequence_parallel='both' must be one of",
    "--devices 2 --meshes --batch 4 --tokens 9 " + MODEL: "leave --tokens out",
    "--devices 2 --meshes --batch 4 --dp 2 --tp 2 " + MODEL: "leave --dp --tp out",
    "--devices 2 --meshes --batch 4 --micro-batches 0 " + MODEL: "micro_batches is 0",
    "--devices 64 --meshes --batch 1 " + MODEL: "no mesh of 64 devices can train this with a batch of 1",
    "--devices 2 --schedule gpipe " + MODEL: "is for --pp 2 or more",
    "--devices 2 --pp 2 --untied --schedule zb-h1 " + MODEL: "take 1f1b",
    "--devices 2 --pp 2 --untied --chunks 1 --schedule interleaved --micro-batches 3 " + MODEL: "--micro-batches 4",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told_in_one_line(capsys, line):
    status, out, err = said(capsys, line)
    assert (status, out) == (2, "") and MISTAKES[line] in err, err
    assert err.startswith("minitorch-dist plan: ") and err.count("\n") == 1
