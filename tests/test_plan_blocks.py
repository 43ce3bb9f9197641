"""Plans of blocks of keys that are chosen: the ledger of small models, and what a cache allocates."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.plan import GPT, Generation, Job
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_cases import SIMPLE, SIZES
from .plan_checks import V100, job_of, rank_of
from .test_plan_windows import ZB, long

CASES = "tests.plan_cases:"


@pytest.mark.parametrize("window, time", [("2x8", 40), ("3x5", 37), (("2x8", None, "9x8"), 64), (("1x4", 3), 30)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_flops_are_the_models(family, window, time):
    """Of scores, values and the choice; all scores, where there are no more blocks than one chooses."""
    sizes = replace(SIZES[family], window=window, context=200, kv_heads=2)
    flops = rank_of(Job(sizes, batch=3, time=time)).flops
    assert flops == nn.summary(plan_cases.gpt(sizes), np.zeros((3, time), int)).training_flops
    assert flops < rank_of(Job(replace(sizes, window=None), batch=3, time=time)).flops


RUNS = {
    "one": long(40, "2x8", None), "no more blocks": long(40, "5x8"), "the last shorter": long(37, "3x5", "1x6"),
    "checkpoints": long(40, "2x8") | {"checkpointing": True}, "keys of two heads": long(40, "2x8", kv_heads=2),
    "norms": long(40, "2x8", qk_norm=True), "tensors": long(40, "2x8", kv_heads=2) | {"tp": 2, "dp": 2, "stage": 1},
    "sequences": long(40, "2x8", "linear") | {"tp": 2, "sequence_parallel": True},
    "all-to-all": long(40, "3x5", None) | {"cp": 2, "cp_by": "all_to_all", "stage": 3},
    "all-to-all, tensors": long(40, "2x8", kv_heads=4) | {"cp": 2, "tp": 2, "cp_by": "all_to_all"},
    "adapters": long(40, "2x8") | {"lora_rank": 3}, "ahead": long(40, "2x8", predict=2) | {"dp": 2, "stage": 3},
    "experts": long(40, "2x8", experts=4) | {"ep": 2},
}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of(RUNS[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


@pytest.mark.parametrize("more", [{}, ZB, ZB | {"cp": 2, "cp_by": "all_to_all"}], ids=str)
def test_what_a_pipeline_holds_and_sends(more):
    job = job_of(long(40, "2x8", None, None, layers=5, tied=False) | {"pp": 2, "micro_batches": 4} | more)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), [0, 2, 5])))


def test_memory_grows_with_the_length_and_not_with_its_square():
    """Kept of twice as many positions, of blocks twice as much."""
    def kept(window, time):
        return rank_of(job_of(long(time, window))).activations
    assert kept("3x16", 960) / kept("3x16", 480) == pytest.approx(2, rel=1e-3)
    assert kept(None, 3840) / kept(None, 1920) > 3.5


@pytest.mark.parametrize("window, tokens, kept, seen", [
    (("2x3", None), 14, (5, 3, 14), (5, 4, 14)), (("1x4",), 9, (3, 4, 0), (1, 2, 0)),
    (("4x3",), 11, (4, 3, 0), (11, 0, 0)), (("2x5", 3), 15, (3, 5, 6), (10, 2, 3))])
def test_a_cache_has_room_for_whole_blocks(window, tokens, kept, seen):
    """kept: blocks, of how many positions, positions of other layers; seen: positions, mean keys, positions of
    others."""
    job = job_of({"model": {"window": window, "layers": len(window), "kv_heads": 2}})
    it, cache = Generation(job, V100, 6, tokens), KeyValueCache(plan_cases.gpt(job.model).eval(), tokens)
    for position in np.random.default_rng(1).integers(0, 50, (tokens, 6, 1)):
        cache.read(position)
    blocks, size, others = kept
    features = 2 * job.model.width // job.model.heads
    assert cache.nbytes == it.cache == 6 * 4 * features * (blocks * (2 * size + 1) + 2 * others)
    positions, means, others = seen
    assert it.read - it.weights_read == 6 * 4 * features * (2 * (positions + others) + means)
    found = Generation(job, replace(SIMPLE, memory=it.memory), 6, tokens)
    assert found.fits and found.most_sequences == 6
    assert not Generation(job, replace(SIMPLE, memory=it.memory - 1), 6, tokens).fits


def test_what_cannot_be():
    for family, more, words in (
            ("gpt", {"window": "2x8", "attention_dropout": True}, "of chosen blocks none are: leave --attention-drop"),
            ("gpt", {"window": "2x8", "sinks": True}, "not of latents, states or chosen blocks: leave --sinks out"),
            ("deepseek", {"window": "2x8"}, "window=2x8 of a deepseek: .* leave --window out")):
        with pytest.raises(ValueError, match=words):
            replace(SIZES[family], **more)
    with pytest.raises(ValueError, match="cp=2 ranks in a ring don't have all blocks to choose from: take --cp-by"):
        job_of(long(40, "2x8") | {"cp": 2})
    assert "windows of 2x8,all" in str(GPT(2, 16, 2, 50, 40, window=("2x8", None)))
