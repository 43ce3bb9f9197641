"""Plans of several tokens ahead: the papers' sizes, and the ledger of small models that are trained so."""

from dataclasses import asdict, replace
from math import prod

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.plan import GPT, Generation, Job, plan
from minitorch_dist.plan.adapters import counts
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_checks import V100, job_of, rank_of, sent
from .test_plan_lora import multiplied

CASES = "tests.plan_cases:"


def ahead(more, family="gpt"):
    """A small Job of three tokens ahead, but for these."""
    return job_of(more | {"model": {"predict": 3} | more.get("model", {})}, family)


# ---------------------------------------------------------------- the papers

V3 = GPT(58, 7168, 128, 129280, 131072, tied=False, hidden=2048, experts=256, top_k=8, shared_experts=1,
         family="deepseek", nope_size=128, rope_size=64, kv_rank=512, q_rank=1536, predict=2)


def test_deepseek_v3s_module():
    """The weights' documentation: 11.5 B parameters beside the model's, 2.4 B of them and of the model's embedding and
    output layer active; both without the matrix that joins embeddings and features (2 · 7,168²)."""
    join, tables = 2 * 7168 ** 2, 2 * 129280 * 7168
    further = sum(prod(shape) for _, shape in V3.further(1, 1))
    plain = replace(V3, predict=1)
    assert V3.count - plain.count == further and round((further - join) / 1e9, 1) == 11.5
    assert round((V3.active - plain.active - join + tables) / 1e9, 1) == 2.4
    # Section 2.2: a module is a block of the model's, and shares the rest.
    block = sum(prod(shape) for _, shape in V3.block(1))
    assert further == block + join + 3 * 7168


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 3, "lora_targets": ("model.*.qkv", "further.*.qkv")}], ids=str)
def test_it_writes_as_the_plain_model(adapters):
    job = ahead(adapters)
    plain = replace(job, model=replace(job.model, predict=1), lora_targets=job.targets)
    it, other = (Generation(each, V100, 2, 10) for each in (job, plain))
    assert (it.parameters, it.read, it.cache) == (other.parameters, other.read, other.cache)


# ---------------------------------------------------------------- the ledger

RUNS = {    # as test_plan_ledger.py's, of three tokens
    "alone": {}, "one more": {"dp": 2, "model": {"predict": 2, "tied": False}}, "8 bits": {"state_bits": 8},
    "uneven": {"batch": 14, "dp": 2, "micro_batches": 2}, "checkpoints": {"checkpointing": True, "micro_batches": 3},
    "2": {"dp": 2, "stage": 2, "micro_batches": 2}, "3": {"dp": 2, "stage": 3, "model": {"vocabulary": 300}},
    "3, one more": {"dp": 2, "stage": 3, "micro_batches": 2, "model": {"predict": 2, "hidden": 300}},
    "3, one more, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True, "model": {"predict": 2}},
    "3, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True, "model": {"dropout": False, "hidden": 80}},
    "tensors": {"tp": 2, "model": {"vocabulary": 53}}, "tensors, four": {"tp": 4, "model": {"tied": False}},
    "tensors, checkpoints": {"tp": 2, "checkpointing": True, "micro_batches": 2, "model": {"predict": 2}},
    "both": {"tp": 2, "dp": 2, "stage": 3},
    "experts": {"ep": 2, "micro_batches": 2, "model": {"experts": 4, "shared_experts": 1}},
    "experts, 3, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True, "model": {"experts": 3, "top_k": 1}},
    "experts, 3": {"ep": 2, "stage": 3, "model": {"experts": 4, "predict": 2}},
    "by tiles": {"dp": 2, "stage": 3, "micro_batches": 2, "tiled_loss": True},
    "by tiles, checkpoints": {"checkpointing": True, "tiled_loss": True, "model": {"predict": 2, "tied": False}},
    "single sequences": {"micro_batches": 12}, "single, checkpoints": {"batch": 1, "checkpointing": True},
    "by tiles, tensors": {"tp": 2, "tiled_loss": True, "model": {"vocabulary": 53}}}


@pytest.mark.parametrize("family, name", [
    *(("gpt", name) for name in RUNS), *(("llama", name) for name in ("alone", "3, checkpoints", "tensors")),
    *(("deepseek", name) for name in ("one more", "3", "tensors, checkpoints", "experts"))])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = ahead(RUNS[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


ADAPTED = {     # depths' blocks have adapters, too, and what comes to them from the model's own has a gradient
    "alone": {}, "4 bits": {"base_bits": 4, "state_bits": 8},
    "one more": {"dp": 2, "model": {"predict": 2, "tied": False}}, "mlp": {"lora_targets": ("*mlp.2",), "batch": 14},
    "head": {"lora_targets": ("*attention.*", "*head"), "model": {"tied": False}},
    "checkpoints": {"checkpointing": True, "micro_batches": 3}, "2": {"dp": 2, "stage": 2, "micro_batches": 2},
    "3, 4 bits": {"base_bits": 4, "dp": 2, "stage": 3, "micro_batches": 2},
    "3, mlp": {"lora_targets": ("*mlp.0",), "dp": 2, "stage": 3},
    "3, out, checkpoints": {"lora_targets": ("*attention.out",), "dp": 2, "stage": 3, "checkpointing": True},
    "tensors, head": {"tp": 2, "lora_targets": ("*attention.*", "*head"), "model": {"tied": False}},
    "tensors, checkpoints": {"tp": 2, "checkpointing": True, "micro_batches": 2, "model": {"predict": 2}},
    "both": {"tp": 2, "dp": 2, "stage": 3},
    "experts": {"ep": 2, "micro_batches": 2, "model": {"experts": 4, "shared_experts": 1}},
    "experts, 3": {"dp": 2, "stage": 3, "model": {"experts": 4, "predict": 2}},
    "by tiles, tensors": {"tp": 2, "tiled_loss": True, "model": {"predict": 2, "tied": False}}}


@pytest.mark.parametrize("family, name", [
    *(("gpt", name) for name in ADAPTED), *(("llama", name) for name in ("alone", "3, 4 bits", "tensors, head")),
    *(("deepseek", name) for name in ("one more", "3, mlp", "tensors, checkpoints", "experts"))])
def test_of_adapters_too(family, name):
    job = ahead({"lora_rank": 3} | ADAPTED[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


@pytest.mark.parametrize("family, name", [("gpt", "alone"), ("gpt", "mlp"), ("gpt", "head"), ("llama", "checkpoints"),
                                          ("deepseek", "4 bits")])
def test_flops_of_adapters(family, name):
    job = ahead({"lora_rank": 3} | ADAPTED[name] | {"micro_batches": 1}, family)
    assert rank_of(job).flops == multiplied(job)


@pytest.mark.parametrize("family", plan_cases.SIZES)
def test_adapters_are_the_models(family):
    job = ahead({"lora_rank": 3, "base_bits": 4}, family)
    real = plan_cases.adapt(asdict(job), plan_cases.gpt(job.model)).named_parameters()
    found = [(p.shape, p.dtype.itemsize, p.requires_grad) for _, p in real]
    parts = [p for part in job.parameters((range(3), True, True)) for p in part]
    assert sorted(found) == sorted((p.shape, p.itemsize, p.trained) for p in parts)
    assert counts(job.model, job.adapters)[0] == sum(prod(shape) for shape, _, trained in found if trained)


@pytest.mark.parametrize("family, more", [
    ("gpt", {}), ("gpt", {"checkpointing": True}), ("llama", {"model": {"predict": 2, "tied": False}}),
    ("deepseek", {"model": {"experts": 4, "shared_experts": 1}})], ids=str)
def test_flops_are_those_of_the_products(family, more):
    job = ahead(more, family)
    assert rank_of(job).flops == multiplied(job)
    assert rank_of(job).flops > nn.summary(plan_cases.gpt(replace(job.model, predict=1)), np.zeros((12, 11), int)
                                           ).training_flops


@pytest.mark.parametrize("family, tp, rank", [("gpt", 1, None), ("gpt", 2, None), ("deepseek", 1, None), ("gpt", 1, 3),
                                              ("gpt", 2, 3), ("deepseek", 1, 2)])
def test_the_order_of_gradients(family, tp, rank):
    job = ahead({"tp": tp, "lora_rank": rank}, family)
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == \
        [p.shape for p in job.arrivals(job.stages_of(0)[0])]


def test_several_buckets():
    job = ahead({"dp": 2, "batch": 4, "model": {"layers": 5, "width": 80, "heads": 2}})
    rank = rank_of(job)
    assert sum(c.axis == "dp" for c in rank.collectives) == 2
    for held, _, out, _ in crews.call(CASES + "step", 2, (asdict(job),)):
        assert held["parameter"] == rank.parameters and out["dp"] == sent(rank, "dp")


def test_seconds_count_further_depths():
    """A depth's messages along tp are as many as a model of one layer's, on one position less."""
    job = Job(GPT(2, 64, 4, 50, 16, predict=2), tp=2, batch=3, time=16)
    alone = replace(job, time=15, model=replace(job.model, layers=1, predict=1))
    plain = replace(job, model=replace(job.model, predict=1))
    assert plan(job, V100).seconds.tp == pytest.approx(sum(plan(it, V100).seconds.tp for it in (plain, alone)))


# ---------------------------------------------------------------- what can't be

def library(act):
    """The words of the library's refusal."""
    with pytest.raises(ValueError) as found:
        act()
    return str(found.value)


def test_what_the_library_refuses():
    """In its words."""
    found = library(lambda: plan_cases.gpt(ahead({}).model)(np.zeros((2, 2), int)))
    assert "2 tokens for depth=2: give 3 or more" in found
    with pytest.raises(ValueError, match="2 tokens for depth=2: give 3 or more"):
        ahead({"time": 2})
    parts = crews.call("tests.parallel.multi_token_cases:refused", 2)[0]
    for more, said in (({"tp": 2, "time": 12, "sequence_parallel": True}, parts[0]), ({"cp": 2, "time": 12}, parts[1])):
        with pytest.raises(ValueError) as error:
            ahead(more)
        words = {"sequence_parallel": "the model puts positions together with later tokens, which other ranks have",
                 "cp": "looks at several positions"}["cp" if "cp" in more else "sequence_parallel"]
        assert words in said and words in str(error.value)


@pytest.mark.parametrize("more, words", [
    ({"pp": 2, "model": {"tied": False}}, "--predict 3 with pp=2: all depths use the embedding"),
    ({"lora_rank": 2, "dp": 2, "stage": 3, "model": {"predict": 2}}, "stage 3 of a single further depth with adapters"),
    ({"lora_rank": 2, "lora_targets": ("*",)}, "meets further.0.join"),
    ({"lora_rank": 2, "lora_targets": ("blocks.*",)}, "each below model.blocks.0 to model.blocks.2, further.0"),
    ({"lora_rank": 2, "lora_targets": ("model.*",)}, "beside the same matrices of every block"),
    ({"model": {"predict": 0}}, "predict is 0; it must be at least 1"),
    ({"dp": 2, "stage": 3, "model": {"layers": 1}}, "stage 3 of a single layer")])
def test_what_plan_refuses(more, words):
    with pytest.raises(ValueError, match=words):
        ahead(more)
