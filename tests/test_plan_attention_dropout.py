"""Plans of GPTs that drop attention's weights, or have sinks, against the ledger of small ones."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.plan import GPT, Job
from minitorch_dist.plan.activations import activations
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_checks import job_of, rank_of

CASES = "tests.plan_cases:"


def dropping(**more):
    return {"model": {"attention_dropout": True} | more}


RUNS = {    # as test_plan_ledger.py's
    "alone": dropping(), "nothing else is dropped": dropping(dropout=False) | {"micro_batches": 2},
    "windows": dropping(context=150, window=(10, None)) | {"time": 150, "micro_batches": 2},
    "3, checkpoints": dropping() | {"dp": 2, "stage": 3, "checkpointing": True}, "tensors": dropping() | {"tp": 2},
    "sequences": dropping() | {"tp": 2, "time": 10, "sequence_parallel": True},
    "sequences by heads": dropping() | {"cp": 2, "time": 12, "cp_by": "all_to_all"},
    "by heads, tensors": dropping(qk_norm=True) | {"cp": 2, "tp": 2, "time": 12, "cp_by": "all_to_all"},
    "norms, uneven": dropping(qk_norm=True) | {"dp": 2, "batch": 14, "micro_batches": 2},
    "adapters": dropping() | {"lora_rank": 3, "lora_targets": ("*mlp.0",)}, "ahead": dropping(predict=3),
    "experts, by tiles": dropping(experts=4) | {"tp": 2, "tiled_loss": True},
}
RUNS |= {"sinks": {"model": {"sinks": True}}, "sinks, nothing is dropped": {"model": {"sinks": True, "dropout": False}},
         "sinks, windows": {"model": {"sinks": True, "window": (10, None)}, "dp": 2, "micro_batches": 2},
         "sinks, 3, checkpoints": {"model": {"sinks": True}, "dp": 2, "stage": 3, "checkpointing": True},
         "sinks, tensors": dropping(sinks=True) | {"tp": 2},
         "sinks, sequences": {"model": {"sinks": True}, "tp": 2, "time": 10, "sequence_parallel": True},
         "sinks by heads": dropping(sinks=True) | {"cp": 2, "tp": 2, "time": 12, "cp_by": "all_to_all"},
         "sinks, adapters": {"model": {"sinks": True}, "lora_rank": 3, "lora_targets": ("*qkv",)}}
LLAMAS = "alone", "windows", "tensors", "norms, uneven", "sequences by heads", "sinks", "sinks, tensors"
DEEPSEEKS = "alone", "3, checkpoints", "sequences by heads"


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in RUNS), *(("llama", name) for name in LLAMAS),
                                          *(("deepseek", name) for name in DEEPSEEKS)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of(RUNS[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


ZB = {"schedule": "zb-h1", "pp": 2, "micro_batches": 4}
FIVE = {"layers": 5, "tied": False}
PIPELINES = {"zb-h1": dropping(**FIVE) | ZB, "norms, tensors, zb-h1": dropping(qk_norm=True, **FIVE) | ZB | {"tp": 2},
             "sinks, zb-h1": {"model": {"sinks": True, **FIVE}} | ZB}


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_keep_what_the_ledger_counts(name):
    job = job_of(PIPELINES[name])
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), [0, 2, 5])))


@pytest.mark.parametrize("more", [{"attention_dropout": True}, {"sinks": True, "window": 4}], ids=str)
def test_flops_are_the_models(more):
    sizes = replace(plan_cases.SMALL, **more)
    flops = rank_of(Job(sizes, batch=3, time=11)).flops
    assert flops == nn.summary(plan_cases.gpt(sizes), np.zeros((3, 11), int)).training_flops


@pytest.mark.parametrize("dropout, more", [(True, 0), (False, 3)])
def test_in_16_bits_it_is_the_papers(dropout, more):
    """A mask and what it leaves, 3 bytes for each score (Korthikanti et al. 2022, 4.1), wherever there is dropout."""
    job = Job(GPT(1, 512, 8, 64, 32, dropout=dropout, attention_dropout=True), batch=3, time=32)
    plain = replace(job, model=replace(job.model, attention_dropout=False))
    here, without = (activations(it, (range(1), False, False), 3).until_backward for it in (job, plain))
    assert here - without == more * 3 * 8 * 32 ** 2
