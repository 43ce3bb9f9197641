"""Plans of GPTs whose attention is gated, against the ledger of small ones."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.plan import Job
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_checks import job_of, rank_of

CASES = "tests.plan_cases:"


def gated(**more):
    return {"model": {"gated": True} | more}


RING, HEADS = {"cp": 2, "time": 12}, {"cp": 2, "time": 12, "cp_by": "all_to_all"}
RUNS = {    # as test_plan_ledger.py's
    "alone": gated(), "nothing is dropped": gated(dropout=False) | {"micro_batches": 2},
    "windows": gated(context=150, window=(10, None)) | {"time": 150, "micro_batches": 2},
    "states": gated(window=("linear", "delta", None)), "blocks": gated(window="2x3"),
    "norms, uneven": gated(qk_norm=True) | {"dp": 2, "batch": 14, "micro_batches": 2},
    "3, checkpoints": gated() | {"dp": 2, "stage": 3, "checkpointing": True},
    "tensors": gated() | {"tp": 2}, "sequences": gated() | {"tp": 2, "time": 10, "sequence_parallel": True},
    "gathered again": gated() | {"tp": 2, "time": 10, "sequence_parallel": "regather"},
    "ring": gated() | RING, "ring, norms": gated(qk_norm=True) | RING, "by heads": gated() | HEADS,
    "by heads, norms": gated(qk_norm=True) | HEADS,
    "weights dropped, sinks": gated(attention_dropout=True, sinks=True) | {"tp": 2},
    "adapters": gated() | {"lora_rank": 3, "lora_targets": ("*qkv",)},
    "adapters behind": gated() | {"lora_rank": 3, "lora_targets": ("*out",)}, "ahead": gated(predict=3),
    "experts, by tiles": gated(experts=4) | {"tp": 2, "tiled_loss": True},
}
OF_ONE_HEAD = {"of one head": gated() | {"tp": 4}, "ring of one head": gated() | RING | {"tp": 4}}


@pytest.mark.parametrize("family, name", [*((family, name) for family in ("gpt", "llama") for name in RUNS),
                                          *(("gpt", name) for name in OF_ONE_HEAD)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of((RUNS | OF_ONE_HEAD)[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


ZB, FIVE = {"schedule": "zb-h1", "pp": 2, "micro_batches": 4}, {"layers": 5, "tied": False}
PIPELINES = {"zb-h1": gated(**FIVE) | ZB, "norms, tensors": gated(qk_norm=True, **FIVE) | ZB | {"tp": 2},
             "sinks": gated(sinks=True, **FIVE) | ZB, "ring": gated(**FIVE) | ZB | RING,
             "blocks": gated(window="2x3", **FIVE) | ZB}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("name", PIPELINES)
def test_stages_keep_what_the_ledger_counts(name, family):
    job = job_of(PIPELINES[name], family)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), [0, 2, 5])))


@pytest.mark.parametrize("more", [{}, {"window": (4, "delta")}], ids=str)
def test_flops_are_the_models(more):
    sizes = replace(plan_cases.SMALL, gated=True, **more)
    flops = rank_of(Job(sizes, batch=3, time=11)).flops
    assert flops == nn.summary(plan_cases.gpt(sizes), np.zeros((3, 11), int)).training_flops
