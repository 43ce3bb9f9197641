"""Plans of adapters: the papers' numbers, and the ledger of small models with LoRA and QLoRA."""

from dataclasses import asdict, replace
from math import prod

import numpy as np
import pytest

from minitorch_dist.compress import nf4
from minitorch_dist.plan import GPT, Job, Parameters
from minitorch_dist.plan.activations import activations
from minitorch_dist.plan.adapters import NF4_BITS, Parameter, counts
from minitorch_dist.plan.adapters import nf4 as quantised
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_checks import job_of, rank_of, sent

CASES = "tests.plan_cases:"
FOUR = {"lora_rank": 3, "base_bits": 4}
QKV, OUT = ("*attention.qkv",), ("*out", "*mlp.0")


# ---------------------------------------------------------------- the papers

GPT_3 = GPT(96, 12288, 96, 50257, 2048)
LLAMA_65B = GPT(80, 8192, 64, 32000, 2048, tied=False, dropout=False, hidden=22016, family="llama")


def test_loras_gpt_3():
    """Hu et al. 2021: 4.7 M numbers for r = 1 beside queries and values, 37.7 M for r = 8 (table 4), 18 M for r = 4
    (table 5): two A's and two B's of r · width each. One matrix of queries, keys and values has as many: an A, and a
    B of three times the rows. Section 4.2: 350 GB of memory, which are the weights, and a checkpoint of 35 MB. (Of what
    the 1.2 TB without adapters consist it doesn't say; Adam beside 16 bits takes 2.8 TB here.)"""
    millions = {}
    for r in (1, 4, 8):
        job = Job(GPT_3, lora_rank=r, lora_targets=QKV)
        millions[r] = counts(GPT_3, job.adapters)[0] / 1e6
    assert {r: round(m, 1) for r, m in millions.items()} == {1: 4.7, 4: 18.9, 8: 37.7}
    rank = rank_of(replace(job, lora_rank=4))
    held = rank.parameters + rank.gradients + rank.optimizer
    assert round(held / 1e9) == 350 and 2 * millions[4] * 1e6 == 36 * 2 ** 20 < rank.gradients < 36.1 * 2 ** 20
    assert round(rank_of(Job(GPT_3)).memory / 1e12, 1) == 2.8


def test_qloras_65b():
    """Dettmers et al. 2023: 65 B parameters take more than 780 GB (16 bits of weights and gradients, Adam's 8 bytes)
    and less than 48 with 4 bits, adapters of rank 64 beside all matrices, and 512 tokens checkpointed (appendix B.2);
    double quantisation has 0.127 bits in the place of 0.5, which saves about 3 GB."""
    job = Job(LLAMA_65B, time=512, checkpointing=True, lora_rank=64, base_bits=4)
    full = replace(job, lora_rank=None, base_bits=None)
    rank, plain = rank_of(job), rank_of(full)
    assert plain.parameters + plain.gradients + plain.optimizer * 8 / 12 > 780e9 > 0.99 * 12 * LLAMA_65B.count
    assert 46e9 < rank.memory < 48e9 < rank_of(replace(job, base_bits=16)).parameters
    assert round(NF4_BITS - 4, 3) == 0.127 and round((4.5 - NF4_BITS) * 65e9 / 8 / 1e9) == 3
    assert rank.buffers == 2 * 2 * 22016 * 8192 and not plain.buffers       # gate and up, taken apart
    _, beside, nbytes = counts(LLAMA_65B, job.adapters)
    assert nbytes == pytest.approx(beside * NF4_BITS / 8, rel=1e-6) and beside > 0.99 * LLAMA_65B.count


def test_of_a_model_that_is_not_known():
    """4·N·D + 6·n·D FLOPs; adapters alone are reduced, the weights gathered twice in stage 3."""
    job = Job(Parameters(65e9), dp=4, batch=4, time=10, lora_parameters=2e8, base_bits=4)
    for stage, cut in ((0, 1), (2, 1), (3, 4)):
        rank = rank_of(replace(job, stage=stage))
        frozen = 65e9 * NF4_BITS / 8
        assert rank.parameters == pytest.approx((frozen + 2 * 2e8) / cut, rel=1e-12)
        assert rank.optimizer == 12 * 2e8 / (4 if stage else 1)
        twice = 3 / 4 * 2 * (2e8 * 2 + frozen * (stage == 3))
        assert sent(rank, "dp") == pytest.approx(twice + 3 / 4 * 2e8 * 2 * (stage == 3), rel=1e-12)
    assert rank.flops == (4 * 65e9 + 6 * 2e8) * 10
    assert rank_of(replace(job, checkpointing=True)).flops == (6 * 65e9 + 8 * 2e8) * 10


@pytest.mark.parametrize("checkpointing", [False, True])
def test_stage_3_gathers_what_is_frozen_twice_a_micro_batch(checkpointing):
    """Of L blocks of width d = 64: 12·d² + 13·d numbers each, around them (17 + 32 + 2)·d, an A and a B of rank 32
    beside each matrix. All are multiples of 16 per rank; what is trained is filled up to 2 · 4,096."""
    width, rank, layers, micro_batches = 64, 32, 5, 3
    job = Job(GPT(layers, width, 4, 17, 32), dp=2, batch=12, time=8, micro_batches=micro_batches, stage=3,
              precision="float32", lora_rank=rank, checkpointing=checkpointing)
    adapters = rank * width * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)
    frozen = layers * (12 * width ** 2 + 13 * width) + 51 * width
    gathered = [c for c in rank_of(job).collectives if c.op == "all_gather"]
    assert adapters == 4 * 2 * 4096 and len(gathered) == 2 * layers + 1
    assert sum(c.sent for c in gathered) == 4 * (layers * adapters + frozen) / 2 * 2 * micro_batches


@pytest.mark.parametrize("count", [0, -5, float("nan"), float("inf")])
def test_so_many_adapters_there_cannot_be(count):
    with pytest.raises(ValueError, match="--lora-parameters .* must be a positive number"):
        Job(Parameters(65e9), lora_parameters=count)


def test_what_frozen_matrices_keep_of_korthikantis_activations():
    """34·s·b·h + 5·a·s²·b without the inputs of frozen matrices, 2 + 2 + 2 + 8 bytes, but of those that have adapters;
    these keep 2·r of each. A first block has nothing to train before its first adapter."""
    a, h, s, b, r = 96, 12288, 2048, 3, 7
    job = Job(replace(GPT_3, layers=2), batch=b, time=s, lora_rank=r)
    inputs = {"qkv": 2, "out": 2, "mlp.0": 2, "mlp.2": 8}
    for taken in (["qkv"], ["out", "mlp.2"], list(inputs)):
        some = replace(job, lora_targets=tuple(f"*{name}" for name in taken))
        kept = sum(inputs[name] for name in taken) + 34 - 14
        wanted = s * b * h * (kept + 5 * a * s / h) + len(taken) * 2 * r * s * b
        assert activations(some, (range(1), False, False), b).until_backward == pytest.approx(wanted, rel=1e-12)
        before = 2 * s * b * h if "qkv" in taken else (2 + 6) * s * b * h + 5 * a * s * s * b      # a norm; attention
        two = activations(some, (range(2), True, False), b).until_backward
        assert two == pytest.approx(2 * wanted - before, rel=1e-12)


# ---------------------------------------------------------------- the ledger

RUNS = {    # as test_plan_ledger.py's
    "alone": {"lora_rank": 3}, "4 bits": FOUR | {"state_bits": 8},
    "ddp, qkv": {"lora_rank": 5, "lora_targets": QKV, "dp": 2},
    "ddp, out": {"lora_rank": 5, "lora_targets": ("*attention.out",), "dp": 2, "micro_batches": 2},
    "mlp, checkpoints": {"lora_rank": 2, "lora_targets": ("*mlp.?",), "checkpointing": True, "micro_batches": 3},
    "all, checkpoints": {"lora_rank": 2, "lora_targets": ("*",), "checkpointing": True, "model": {"tied": False}},
    "one layer, checkpoints": {"lora_rank": 3, "checkpointing": True, "model": {"layers": 1, "dropout": False}},
    "1, one layer": {"lora_rank": 3, "dp": 2, "stage": 1, "lora_targets": ("*mlp.0",), "model": {"layers": 1}},
    "2, 4 bits": FOUR | {"stage": 2, "dp": 2},
    "3": {"lora_rank": 3, "stage": 3, "dp": 2}, "3, 4 bits": FOUR | {"stage": 3, "dp": 2, "micro_batches": 2},
    "3, last matrices": {"lora_rank": 3, "lora_targets": ("*mlp.2",), "stage": 3, "dp": 2},
    "3, 4 bits, two blocks' last matrices": FOUR | {"lora_targets": ("*mlp.2",), "stage": 3, "dp": 2,
                                                    "model": {"layers": 2}},
    "3, neighbours, last matrices": {"lora_rank": 3, "lora_targets": ("*mlp.2",), "stage": 3, "dp": 4,
                                     "reshard_after_forward": 2},
    "3, checkpoints": FOUR | {"dp": 2, "stage": 3, "checkpointing": True, "micro_batches": 2},
    "3, head, checkpoints": {"lora_rank": 3, "lora_targets": ("*",), "dp": 2, "stage": 3, "checkpointing": True,
                             "model": {"tied": False, "layers": 2}},
    "3, copies": FOUR | {"dp": 2, "stage": 3, "shard_over": 1},
    "tensors": {"lora_rank": 3, "tp": 2, "lora_targets": ("*",), "model": {"tied": False}},
    "tensors, two": {"lora_rank": 3, "tp": 2, "lora_targets": OUT, "checkpointing": True},
    "sequences": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": True},
    "sequences, one by one": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": True, "batch": 2,
                              "micro_batches": 2},
    "sequences, again": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": "regather"},
    "sequences, again, two": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": "regather",
                              "lora_targets": ("*mlp.?",), "checkpointing": True},
    "ring": {"lora_rank": 3, "cp": 2, "time": 12},
    "by tiles": {"lora_rank": 3, "tiled_loss": True},
    "by tiles, tensors": {"lora_rank": 3, "tp": 2, "tiled_loss": True},
    "by tiles, sequences": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": True, "tiled_loss": True},
    "by tiles, sequences, again": {"lora_rank": 3, "tp": 2, "time": 10, "sequence_parallel": "regather",
                                   "tiled_loss": True, "model": {"tied": False}},
    "by tiles, 3, untied": {"lora_rank": 3, "dp": 2, "stage": 3, "tiled_loss": True, "model": {"tied": False}},
    "ring, one head": {"lora_rank": 3, "cp": 2, "tp": 2, "time": 12, "model": {"heads": 2}},
    "ring, mlp, one head": {"lora_rank": 3, "cp": 2, "tp": 2, "time": 12, "lora_targets": ("*mlp.2",),
                            "model": {"heads": 2}},
    "ring, mlp": {"lora_rank": 3, "cp": 2, "time": 12, "lora_targets": ("*mlp.2",), "checkpointing": True},
    "all-to-all, 3": FOUR | {"cp": 2, "cp_by": "all_to_all", "time": 12, "stage": 3},
    "experts": {"lora_rank": 3, "ep": 2, "model": {"experts": 4}},
    "experts, 3": FOUR | {"dp": 2, "stage": 3, "model": {"experts": 4}},
    "experts, 3, one layer": FOUR | {"dp": 2, "stage": 3, "micro_batches": 2, "model": {"experts": 4, "layers": 1}},
    "experts, shared": FOUR | {"ep": 2, "model": {"experts": 4, "shared_experts": 2}},
}


LLAMAS = ("alone", "one layer, checkpoints", "3, 4 bits", "sequences", "sequences, again", "sequences, again, two",
          "experts, shared", "ring, one head", "ring, mlp, one head")


OF_X, Q, KV, DOWN = {"q_rank": None}, ("*attention.q",), ("*attention.kv",), ("*attention.down",)
RUNS_OF_LATENTS = {     # where gradients come to some of queries, keys and values alone
    "q": {"lora_rank": 3, "lora_targets": Q}, "kv": {"lora_rank": 2, "lora_targets": KV, "model": OF_X},
    "down, queries of x": {"lora_rank": 3, "lora_targets": DOWN, "dp": 2, "stage": 3, "model": OF_X},
    "tensors, q of x": {"lora_rank": 3, "lora_targets": Q, "tp": 2, "model": OF_X},
    "sequences, kv": {"lora_rank": 3, "lora_targets": KV, "tp": 2, "time": 10, "sequence_parallel": True},
    "sequences, q of x": {"lora_rank": 3, "lora_targets": Q, "tp": 2, "time": 10, "sequence_parallel": True,
                          "model": OF_X},
    "sequences, again, q of x": {"lora_rank": 3, "lora_targets": Q, "tp": 2, "time": 10, "model": OF_X,
                                 "sequence_parallel": "regather", "checkpointing": True}}
LATENTS = (*RUNS_OF_LATENTS, "alone", "3, 4 bits", "tensors, two", "sequences", "sequences, again", "ring",
           "all-to-all, 3", "experts, shared")


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in RUNS), *(("llama", name) for name in LLAMAS),
                                          *(("deepseek", name) for name in LATENTS)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of((RUNS | RUNS_OF_LATENTS)[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


PIPELINES = {
    "1f1b": ({"pp": 2, "micro_batches": 4, "lora_rank": 3}, [0, 2, 5]),
    "zb-h1": ({"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "lora_rank": 3}, [0, 2, 5]),
    "zb-h1, some": ({"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "lora_rank": 3, "lora_targets": OUT}, [0, 2, 5]),
    "zb-h2, 4 bits": (FOUR | {"pp": 2, "micro_batches": 4, "schedule": "zb-h2", "model": {"dropout": False},
                              "lora_targets": ("*",)}, [0, 2, 5]),
    "3, 4 bits": (FOUR | {"pp": 2, "dp": 2, "micro_batches": 3, "stage": 3}, [0, 2, 5]),
    "by tiles": ({"pp": 2, "micro_batches": 4, "lora_rank": 3, "tiled_loss": True}, [0, 2, 5]),
    "by tiles, zb-h1": ({"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "lora_rank": 3, "tiled_loss": True},
                        [0, 2, 5]),
    "tensors, sequences, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "sequence_parallel": True, "micro_batches": 4,
                                   "schedule": "zb-h1", "lora_rank": 3}, [0, 2, 5]),
    "tensors, gathered again, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "sequence_parallel": "regather",
                                        "micro_batches": 4, "schedule": "zb-h1", "lora_rank": 3}, [0, 2, 5]),
    "experts": ({"pp": 2, "micro_batches": 4, "lora_rank": 3, "model": {"experts": 4}}, [0, 2, 5]),
    "experts, zb-h1": ({"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "lora_rank": 3,
                        "model": {"experts": 3, "top_k": 1}}, [0, 2, 5]),
    "tied": ({"pp": 2, "micro_batches": 4, "lora_rank": 3, "model": {"tied": True}}, [0, 2, 5]),
    "tied, 3": ({"pp": 2, "dp": 2, "micro_batches": 4, "lora_rank": 3, "stage": 3, "model": {"tied": True}}, [0, 2, 5]),
}


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in PIPELINES), ("deepseek", "zb-h1")])
def test_what_a_pipeline_holds_and_sends(family, name):
    more, bounds = PIPELINES[name]
    job = job_of(more | {"model": {"layers": 5, "tied": False} | more.get("model", {})}, family)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds)))


# ---------------------------------------------------------------- the library's own models

MODELS = {"alone": {}, "4 bits": {"base_bits": 4}, "all": {"lora_targets": ("*",), "model": {"tied": False}},
          "some": {"lora_targets": OUT, "base_bits": 4}, "experts": {"base_bits": 4, "model": {"experts": 5}}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", plan_cases.SIZES)
def test_parameters_are_the_models(family, name):
    job = job_of({"lora_rank": 3} | MODELS[name], family)
    real = plan_cases.adapt(asdict(job), plan_cases.gpt(job.model)).named_parameters()
    before, *blocks, behind = job.parameters((range(3), True, True))
    blocks = [p._replace(name=f"blocks.{i}.{p.name}") for i, block in enumerate(blocks) for p in block]
    found = [*before, *blocks, *behind]
    assert sorted(found) == sorted(Parameter(name, p.shape, p.dtype.itemsize, p.requires_grad) for name, p in real)
    trained, beside, nbytes = counts(job.model, replace(job.adapters, bits=4))
    assert trained == sum(prod(p.shape) for p in found if p.trained)
    assert 4 * 8 < 33 < 8 * nbytes / beside * 8 < 34 + 80 / 36     # small matrices have much of mean and second


@pytest.mark.parametrize("shape", [(7, 45), (64, 256), (129, 1024)], ids=str)
def test_4_bits_are_the_librarys(shape):
    real = nf4.NF4Weight(np.ones(shape, np.float32))
    assert quantised(Parameter("w", shape, 4)) == [Parameter(f"w.{name}", p.shape, p.dtype.itemsize, False)
                                                   for name, p in real.named_parameters()]
    held = {id(p.data if p.data.base is None else p.data.base): p.data for p in real.parameters()}
    assert all(a.base is None or a.base.nbytes == a.nbytes for a in held.values())      # and no more behind them


@pytest.mark.parametrize("family, more", [("gpt", {}), ("gpt", {"tp": 2}), ("deepseek", {}), ("deepseek", {"tp": 2}),
                                          ("gpt", {"lora_targets": ("*",), "model": {"tied": False}})], ids=str)
def test_the_order_of_gradients(family, more):
    """By which buckets are cut."""
    job = job_of({"lora_rank": 3} | more, family)
    wanted = [p.shape for p in job.arrivals(job.stages_of(0)[0])]
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == wanted and len(wanted) > 24 - 1


def test_several_buckets():
    job = job_of({"dp": 2, "batch": 4, "lora_rank": 107, "model": {"width": 88, "heads": 2}})
    rank = rank_of(job)
    assert sum(c.axis == "dp" for c in rank.collectives) == 2
    for held, _, out, _ in crews.call(CASES + "step", 2, (asdict(job),)):
        assert held["parameter"] == rank.parameters and out["dp"] == sent(rank, "dp")


def test_what_offload_leaves(tmp_path):
    job = job_of({"lora_rank": 3, "offload_optimizer": True})
    rank = rank_of(job)
    (held, *_, away), = crews.call(CASES + "step", 1, (asdict(job), str(tmp_path)))
    assert held["optimizer"] == rank.optimizer == 0 and held["parameter"] == rank.parameters
    assert away == rank.host == rank_of(replace(job, offload_optimizer=False)).optimizer
    # Of a layer, each padded to 16: A of 108 or 432 elements, B of 324, 108, 432, 108.
    assert rank.crossing == 12 * 3 * (3 * 112 + 432 + 336 + 112 + 432 + 112)


def multiplied(job):
    """FLOPs of the matrix products of a step of the real model."""
    return plan_cases.multiplied(asdict(job))


FLOPS = {"all is trained": {}, "4 bits": FOUR, "out": {"lora_rank": 3, "lora_targets": OUT},
         "out, checkpoints": {"lora_rank": 3, "lora_targets": OUT, "checkpointing": True},
         "last, head": FOUR | {"lora_targets": ("*mlp.2", "head"), "checkpointing": True, "model": {"tied": False}}}


@pytest.mark.parametrize("targets, more", [(Q, {}), (KV, {}), (Q, OF_X), (DOWN, OF_X), (("*down", "*kv"), OF_X)],
                         ids=str)
def test_flops_of_latents_are_those_of_the_products(targets, more):
    job = job_of({"lora_rank": 3, "lora_targets": targets, "model": more}, "deepseek")
    assert rank_of(job).flops == multiplied(job)


@pytest.mark.parametrize("name", FLOPS)
@pytest.mark.parametrize("family", plan_cases.SIZES)
def test_flops_are_those_of_the_products(family, name):
    """Not three times forward's: a frozen matrix has no gradient, and what is below all adapters has none of its
    input."""
    job = job_of(FLOPS[name], family)
    assert rank_of(job).flops == multiplied(job)
