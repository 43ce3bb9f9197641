"""Plans of models with blocks of attention by states: the ledger of small ones, their products, what is kept while
they write."""

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.plan import GPT, Generation, Job
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_cases import SIZES
from .plan_checks import V100, job_of, rank_of, sent
from .test_plan_lora import multiplied
from .test_plan_windows import CASES, QK, ZB, long

L, D = "linear", "delta"
BOTH = {"model": {"window": (L, None)}}


def test_parameters():
    """Of MiniMax-01's width and layers, 7 such blocks and one with keys, what differs; and each family's real model."""
    sizes = GPT(80, 6144, 64, 200064, 1024, family="llama", hidden=9216, window=(L,) * 7 + (None,))
    own, usual = 4 * 6144 * 6144 + 64 * 6144 + 64 + 96 + 6144 ** 2, 4 * 6144 ** 2
    assert sizes.count == replace(sizes, window=None).count + 70 * (own - usual)
    for family in SIZES:
        sizes = replace(SIZES[family], window=(None, L, D), predict=3, qk_norm=family != "deepseek")
        assert sizes.count == sum(p.size for p in plan_cases.gpt(sizes).parameters())


@pytest.mark.parametrize("family, n", [("gpt", 4), ("llama", 2), ("deepseek", 2)])
def test_parts_are_the_cut_models(family, n):
    """What is kept is cut by heads; norms are whole on each rank."""
    sizes = replace(SIZES[family], vocabulary=53, qk_norm=family != "deepseek", window=(L, None, D))
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in
              sizes.block(n, window=sizes.window_of(i))]
    assert crews.call(CASES + "parts", n, (asdict(sizes),))[-1] == sizes.embedding(n) + blocks + sizes.output(n)


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True, "time": 10}, {"lora_rank": 3},
                                  {"lora_rank": 3, "tp": 2}], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_order_of_gradients(family, more):
    job = job_of(more | {"model": {"window": (L, None, D), "qk_norm": True}}, family)
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == \
        [p.shape for p in job.arrivals(job.stages_of(0)[0])]


@pytest.mark.parametrize("more", [{}, {"checkpointing": True}, {"lora_rank": 3},
                                  {"lora_rank": 3, "lora_targets": ("*mlp.0",), "checkpointing": True}], ids=str)
@pytest.mark.parametrize("kind", [L, D])
@pytest.mark.parametrize("time", [16, 17, 48, 150])
def test_flops_are_those_of_the_products(time, more, kind):
    """Of several stretches, the last of which may want some positions."""
    job = job_of(long(time, kind, None, predict=2) | more)
    assert rank_of(job).flops == multiplied(job)


@pytest.mark.parametrize("kind", [L, D])
@pytest.mark.parametrize("time, n", [(8, 2), (20, 2), (68, 2), (72, 4), (300, 2)])
def test_flops_of_pieces_are_those_of_the_products(kind, time, n):
    """Of one stretch each, of several, of which the last wants some positions; and of all pieces together."""
    job = job_of(long(time, kind, layers=2) | {"cp": n, "batch": 2})
    assert crews.call(CASES + "multiplied", n, (asdict(job),)) == [rank_of(job).flops] * n


# ---------------------------------------------------------------- the ledger

RUNS = {    # as test_plan_ledger.py's
    "one stretch": long(16, L), "two": long(32, L) | {"micro_batches": 2}, "not full": long(30, L, None),
    "many": long(150, L, 10, None, qk_norm=True) | {"dp": 2, "batch": 14, "micro_batches": 2},
    "checkpoints": long(48, L, None) | {"checkpointing": True, "dp": 2, "stage": 3},
    "tensors": long(40, L, None, qk_norm=True) | {"tp": 2, "micro_batches": 2},
    "sequences": long(40, L, None, qk_norm=True) | {"tp": 2, "sequence_parallel": True, "micro_batches": 3},
    "gathered again, by tiles": long(40, L, None) | {"tp": 2, "sequence_parallel": "regather", "tiled_loss": True,
                                                    "checkpointing": True},
    "pieces": long(20, L) | {"cp": 2}, "pieces of stretches": long(64, L, None) | {"cp": 2, "micro_batches": 2},
    "pieces, not full": long(72, L, None, qk_norm=True) | {"cp": 4}, "pieces, checkpoints": long(68, L, None) | {
        "cp": 2, "checkpointing": True},
    "pieces, all-to-all": long(68, L, None) | {"cp": 2, "cp_by": "all_to_all", "stage": 3, "micro_batches": 2},
    "pieces, tensors": long(72, L, None, qk_norm=True) | {"cp": 2, "tp": 2},
    "pieces, sequences": long(72, L, None) | {"cp": 2, "tp": 2, "sequence_parallel": True},
    "experts": long(40, L, None, experts=4) | {"ep": 2, "tp": 2, "micro_batches": 2},
    "adapters": long(40, L) | {"lora_rank": 3, "lora_targets": ("*attention.*",)},
    "adapters of both": long(40, None, L) | {"lora_rank": 3, "tp": 2},
    "adapters behind": long(40, L, None) | {"lora_rank": 3, "lora_targets": ("*mlp.2",), "checkpointing": True},
    "adapters, pieces": long(68, L, None) | {"cp": 2, "lora_rank": 3},
    "ahead": long(40, None, L, L, predict=3) | {"tp": 2, "dp": 2, "stage": 3},
    "without dropout": long(40, L, dropout=False, tied=False) | {"micro_batches": 4},
}
RUNS |= {f"delta, {name}": run | {"model": run["model"] | {
    "window": tuple(D if window == L else window for window in run["model"]["window"])}} for name, run in RUNS.items()}
RUNS |= {"short stretches": long(8, D) | {"cp": 2}, "an odd stretch": long(51, D), "both": long(40, L, D, None)}
LLAMAS = ("two", "not full", "tensors", "sequences", "gathered again, by tiles", "pieces, not full", "pieces, tensors",
          "adapters of both", "ahead", "delta, not full", "delta, sequences", "delta, pieces, tensors",
          "delta, adapters of both")
DEEPSEEKS = ("not full", "sequences", "pieces of stretches", "adapters of both", "ahead",
             "delta, not full", "delta, pieces of stretches")


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in RUNS), *(("llama", name) for name in LLAMAS),
                                          *(("deepseek", name) for name in DEEPSEEKS)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    more = RUNS[name]
    if family == "deepseek":
        more = more | {"model": {key: value for key, value in more["model"].items() if key != "qk_norm"}}
    job = job_of(more, family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


PIPELINES = {
    "1f1b": (long(40, L, None) | {"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "zb-h1": (long(40, L, None) | ZB | {"pp": 2, "batch": 14, "micro_batches": 4}, [0, 2, 5]),
    "norms, zb-h1": (long(48, None, L, qk_norm=True) | ZB | {"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "tensors, zb-h1": (long(40, L, None) | ZB | {"pp": 2, "tp": 2, "micro_batches": 4, "sequence_parallel": True},
                       [0, 2, 5]),
    "pieces, zb-h1": (long(72, None, L) | ZB | {"pp": 2, "cp": 2, "micro_batches": 3}, [0, 2, 5]),
    "adapters, zb-h1": (long(40, L) | ZB | {"pp": 2, "micro_batches": 4, "lora_rank": 3,
                                            "lora_targets": ("*project", "*mlp.2")}, [0, 2, 5]),
    "interleaved": (long(40, L, None) | {"pp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2},
                    [0, 1, 2, 3, 5]),
    "delta, zb-h1": (long(40, D, None) | ZB | {"pp": 2, "batch": 14, "micro_batches": 4}, [0, 2, 5]),
    "delta, norms, zb-h1": (long(50, None, D, qk_norm=True) | ZB | {"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "delta, pieces, zb-h1": (long(72, None, D) | ZB | {"pp": 2, "cp": 2, "micro_batches": 3}, [0, 2, 5]),
    "delta, adapters, zb-h1": (long(40, D) | ZB | {"pp": 2, "micro_batches": 4, "lora_rank": 3,
                                                   "lora_targets": ("*project", "*mlp.2")}, [0, 2, 5]),
}


@pytest.mark.parametrize("family, name", [(family, name) for family in ("gpt", "llama") for name in PIPELINES])
def test_what_a_pipeline_holds_and_sends(family, name):
    more, bounds = PIPELINES[name]
    job = job_of(more | {"model": {"layers": 5, "tied": False} | more["model"]}, family)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds)))


def test_what_is_sent_does_not_depend_on_the_length():
    """Of sequences as long as one likes: 2 pieces' states to 3 others, and back, in float32."""
    for time, (kind, left) in product((64, 6400), ((L, 1), (D, 9 * 9))):
        job = job_of(long(time, kind, layers=2, heads=4) | {"cp": 4, "precision": "mixed"})
        assert sent(rank_of(job), "cp") == 2 * 2 * 3 * 2 * 12 * 4 * (9 * 9 + left) * 4


# ---------------------------------------------------------------- writing

@pytest.mark.parametrize("family, window", [("gpt", L), ("llama", (D, None)), ("gpt", (L, 2)),
                                            ("deepseek", (L, D, None))])
@pytest.mark.parametrize("tokens", [5, 16])
def test_states_are_kept_beside_keys(family, window, tokens):
    job = job_of({"model": {"window": window}}, family)
    it, cache = Generation(job, V100, 6, tokens), KeyValueCache(plan_cases.gpt(job.model).eval(), tokens)
    for position in np.random.default_rng(1).integers(0, 50, (tokens, 6, 1)):
        cache.read(position)
    assert cache.nbytes == it.cache
    blocks = sum(job.model.window_of(i) in (L, D) for i in range(3))
    assert it.states == blocks * job.model.width ** 2 // 4 * 4
    if window == L:
        assert it.per_token == 0 and it.cache == 6 * it.states


@pytest.mark.parametrize("window", [L, (D, None)])
def test_each_rank_of_tensor_parallelism_keeps_its_heads_states(window):
    job = job_of({"tp": 2, "model": {"window": window}})
    it, alone = Generation(job, V100, 6, 5), Generation(replace(job, tp=1), V100, 6, 5)
    assert crews.call(CASES + "remembered", 2, (asdict(job), 6, 5)) == [it.cache] * 2 and 2 * it.states == alone.states


def test_a_longer_text_costs_a_hybrid_little():
    """Qwen3 8B's sizes: with three such blocks for each with keys a quarter of the keys, and states of 18.9 MB."""
    sizes = GPT(36, 4096, 32, 151936, 32768, tied=False, kv_heads=8, hidden=12288, family="llama", dropout=False)
    whole, hybrid = (Generation(Job(replace(sizes, window=window)), V100, 16, 32768)
                     for window in (None, (L, L, L, None)))
    assert round(whole.cache / 1e9, 2) == 77.31 and hybrid.states == 27 * 32 * 128 ** 2 * 2
    assert hybrid.cache == whole.cache / 4 + 16 * hybrid.states


def test_windows_that_can_not_be():
    with pytest.raises(ValueError, match="window=linear,3 of a deepseek: .* leave --window out"):
        replace(SIZES["deepseek"], window=(L, 3))
    with pytest.raises(ValueError, match="lora-targets .*project meets no matrix|plan knows adapters beside the same"):
        job_of(long(16, L, None) | {"lora_rank": 2, "lora_targets": ("*project",)})
    assert isinstance(plan_cases.gpt(replace(SIZES["gpt"], window=L)).blocks[0].attention, nn.LinearAttention)
    assert job_of(BOTH | QK | {"model": BOTH["model"] | QK["model"]}).model.qk_norm
