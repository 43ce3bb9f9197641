"""Plans of windows by block, and of norms of queries and keys: published sizes, and the ledger of small models."""

from dataclasses import asdict, replace
from math import prod

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.nn.windows import as_text, read_windows, windows_of
from minitorch_dist.parallel.context.ring_attention import steps
from minitorch_dist.plan import GPT, Generation, Job
from minitorch_dist.plan.activations import activations
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_cases import SIMPLE, SIZES
from .plan_checks import V100, job_of, rank_of, sent
from .test_plan_lora import multiplied

CASES = "tests.plan_cases:"
QK = {"model": {"qk_norm": True}}


def long(time, *window, **more):
    """A model of sequences so long that a window leaves some scores out."""
    return {"time": time, "model": {"context": time, "window": window, **more}}


# ---------------------------------------------------------------- what is known

@pytest.mark.parametrize("sizes, hidden, count, billions", [
    ((36, 4096, 32), 12288, 8_190_735_360, (8.2, 6.95)), ((40, 5120, 40), 17408, 14_768_307_200, (14.8, 13.2))],
    ids=["8B", "14B"])
def test_qwen3s_sizes(sizes, hidden, count, billions):
    """Qwen Team 2025: parameters, and those without the two tables; as its weights are published, to the parameter."""
    model = GPT(*sizes, 151936, 40960, tied=False, kv_heads=8, hidden=hidden, family="llama", qk_norm=True)
    assert model.count == count and round(count / 1e9, 1) == billions[0]
    assert count - 2 * model.vocabulary * model.width == pytest.approx(billions[1] * 1e9, rel=2e-3)
    plain = replace(model, qk_norm=False)
    assert model.count - plain.count == sizes[0] * 2 * 128


@pytest.mark.parametrize("text, windows", [("5", (5,)), ("all", (None,)), ("16,16,all", (16, 16, None))])
def test_windows_are_read_as_they_are_written(text, windows):
    assert read_windows(text) == windows and as_text(windows) == text
    assert windows_of(windows) == windows_of([*windows]) == windows and windows_of(7) == (7,)
    assert read_windows(None) is None and windows_of(None) == (None,)


@pytest.mark.parametrize("text, words", [("", "numbers of positions"), ("4,,all", "numbers of positions"),
                                         ("4,0", "1 position or more"), ("-2", "1 position or more"),
                                         ("2.5", "numbers of positions"), ("All", "numbers of positions")])
def test_windows_that_cannot_be_read(text, words):
    with pytest.raises(ValueError, match=f"--window '{text}': .*{words}"):
        read_windows(text)


def test_windows_that_cannot_be():
    for window, words in (((), "has none for any block"), ((3, 0), "window is 0"), (-1, "window is -1")):
        with pytest.raises(ValueError, match=words):
            replace(SIZES["gpt"], window=window)
    for more, words in (({"window": (3, None)}, "window=3,all of a deepseek: .* leave --window out"),
                        ({"qk_norm": True}, "qk_norm=True of a deepseek: .* leave --qk-norm out")):
        with pytest.raises(ValueError, match=words):
            replace(SIZES["deepseek"], **more)


def test_windows_go_round_the_blocks_as_the_models_do():
    for window in (None, 5, (5,), (5, None), (1, 2, 3, 4, 5)):
        sizes = replace(SIZES["gpt"], layers=4, window=window, predict=3)
        real = plan_cases.gpt(sizes)
        found = [sizes.window_of(i) for i in range(6)]
        assert [m.window for m in real.modules() if isinstance(m, nn.MultiHeadAttention)] == found
        job = Job(sizes, time=16)
        assert [job.ahead(k).model.window_of(0) for k in (1, 2)] == found[4:]


# ---------------------------------------------------------------- the library's own models

@pytest.mark.parametrize("more", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied": False, "experts": 4}], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_parameters_are_the_models(family, more):
    sizes = replace(SIZES[family], qk_norm=True, **more)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(1)]
    real = [(name, p.shape) for name, p in plan_cases.gpt(sizes).named_parameters()]
    assert sizes.embedding(1) + blocks + sizes.output(1) == real
    assert sizes.count == sum(prod(shape) for _, shape in real)


@pytest.mark.parametrize("family, n", [("gpt", 4), ("llama", 2)])
def test_parts_are_the_cut_models(family, n):
    """Norms are whole on each rank."""
    sizes = replace(SIZES[family], vocabulary=53, qk_norm=True)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(n)]
    assert crews.call(CASES + "parts", n, (asdict(sizes),))[-1] == sizes.embedding(n) + blocks + sizes.output(n)


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True, "time": 10}, {"lora_rank": 3},
                                  {"lora_rank": 3, "tp": 2}], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_order_of_gradients(family, more):
    job = job_of(more | QK, family)
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == \
        [p.shape for p in job.arrivals(job.stages_of(0)[0])]


@pytest.mark.parametrize("window, time", [((10, None), 150), ((70, None, 10), 157), ((100, 3), 190), ((3, 5), 16)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_flops_are_the_models(family, window, time):
    sizes = replace(SIZES[family], window=window, context=200, qk_norm=True)
    flops = rank_of(Job(sizes, batch=3, time=time)).flops
    assert flops == nn.summary(plan_cases.gpt(sizes), np.zeros((3, time), int)).training_flops
    whole = replace(sizes, window=None)
    assert (flops < rank_of(Job(whole, batch=3, time=time)).flops) == (time > 16)


@pytest.mark.parametrize("more", [{}, {"checkpointing": True}, {"lora_rank": 3},
                                  {"lora_rank": 3, "lora_targets": ("*mlp.0",), "checkpointing": True}], ids=str)
@pytest.mark.parametrize("predict", [1, 3])
def test_flops_are_those_of_the_products(predict, more):
    job = job_of(long(150, 10, None, 7, 70, None, predict=predict) | more)
    assert rank_of(job).flops == multiplied(job)


def test_a_stage_computes_its_own_windows():
    """Two blocks that see all, two that see 10 of 150 positions; together they are the whole model's."""
    job = job_of(long(150, None, None, 10, 10, layers=4, tied=False) | {"pp": 2, "micro_batches": 4})
    first, last = (rank_of(job, place).flops - place * 3 * job.model.output_flops(12 * 150) for place in range(2))
    scores = [12 * 3 * 2 * 2 * 36 * (job.model.scores(150, window)[0]) * 2 for window in (None, 10)]
    assert first - last == scores[0] - scores[1] > 0
    assert rank_of(job).flops + rank_of(job, 1).flops == rank_of(replace(job, pp=1)).flops


def test_messages_of_a_ring_go_as_far_as_each_blocks_window():
    """Of 4 ranks with 2 pieces each, of 5 positions: next to a piece is the neighbour's, or one's own."""
    job = job_of(long(40, 1, 5, None, layers=5) | {"cp": 4})
    hops = {window: steps(10, 4, (window - 1, 0) if window else (None, 0), "zigzag") - 1 for window in (1, 5, None)}
    assert hops[1] == 0 < hops[5] <= hops[None] == 3
    each = 3 * 2 * 12 * 10 * 36 * 4     # keys and values, forward and twice backward
    assert sent(rank_of(job), "cp") == each * (2 * hops[1] + 2 * hops[5] + hops[None])


@pytest.mark.parametrize("t", [1, 2])
def test_in_16_bits_norms_keep_their_inputs(t):
    """2 bytes of each query and key, as Megatron-LM's norms do, beside what Korthikanti et al. 2022 count."""
    job = Job(GPT(1, 512, 8, 64, 32, kv_heads=2, qk_norm=True), tp=t, batch=3, time=32)
    plain = replace(job, model=replace(job.model, qk_norm=False))
    normed, without = (activations(it, (range(1), False, False), 3).until_backward for it in (job, plain))
    assert normed - without == 2 * 3 * 32 * (512 + 128) / t


# ---------------------------------------------------------------- the ledger

RUNS = {    # as test_plan_ledger.py's
    "windows": long(150, 10, None) | {"micro_batches": 2},
    "windows, uneven": long(157, 70, 3, None, layers=4) | {"batch": 14, "dp": 2, "micro_batches": 2},
    "windows, checkpoints": long(150, None, 10, 7) | {"checkpointing": True},
    "windows, checkpoints, the last most": long(150, 10, 7, None) | {"checkpointing": True, "dp": 2, "stage": 3},
    "windows, tensors, 3": long(100, 33, None) | {"tp": 2, "dp": 2, "stage": 3},
    "windows, ring": long(40, 1, 13, None) | {"cp": 4},
    "windows, ring, checkpoints": long(40, 1, 13, None, layers=4) | {"cp": 4, "checkpointing": True},
    "windows, all-to-all": long(140, 20, None, 40) | {"cp": 2, "cp_by": "all_to_all", "micro_batches": 2},
    "windows, adapters": long(150, 10, None) | {"lora_rank": 3, "lora_targets": ("*mlp.0",)},
    "windows, adapters, checkpoints": long(150, None, 10, 7) | {"lora_rank": 3, "checkpointing": True},
    "windows, ahead": long(150, 10, 10, 7, 70, None, predict=3),
    "windows, ahead, checkpoints": long(150, 10, 10, 7, 70, None, predict=3) | {"checkpointing": True},
    "norms": QK, "norms, uneven, 8 bits": QK | {"dp": 2, "batch": 14, "micro_batches": 2, "state_bits": 8},
    "norms, 3": QK | {"dp": 2, "stage": 3, "micro_batches": 2},
    "norms, 3, one layer": {"dp": 2, "stage": 3, "model": {"qk_norm": True, "layers": 1}},
    "norms, keys of one head": {"micro_batches": 3, "model": {"qk_norm": True, "kv_heads": 1, "dropout": False}},
    "norms, tensors": {"tp": 2, "micro_batches": 2, "model": {"qk_norm": True, "vocabulary": 51}},
    "norms, tensors, checkpoints": QK | {"tp": 2, "checkpointing": True, "micro_batches": 2},
    "norms, sequences": QK | {"tp": 2, "time": 10, "sequence_parallel": True, "micro_batches": 3},
    "norms, gathered again, by tiles": QK | {"tp": 2, "time": 12, "sequence_parallel": "regather", "tiled_loss": True},
    "norms, ring": QK | {"cp": 2, "time": 12}, "norms, ring, tensors": QK | {"cp": 2, "tp": 2, "time": 12},
    "norms, ring, sequences, checkpoints": QK | {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": True,
                                                 "checkpointing": True},
    "norms, ring, one head": {"cp": 2, "tp": 2, "time": 12, "model": {"qk_norm": True, "heads": 2}},
    "norms, all-to-all": QK | {"cp": 2, "cp_by": "all_to_all", "time": 12, "stage": 1},
    "norms, experts": {"ep": 2, "tp": 2, "micro_batches": 2, "model": {"qk_norm": True, "experts": 4}},
    "norms, adapters": QK | {"lora_rank": 3, "base_bits": 4},
    "norms, adapters, tensors": QK | {"lora_rank": 3, "tp": 2},
    "norms, adapters, out": QK | {"lora_rank": 3, "lora_targets": ("*attention.out",), "dp": 2, "stage": 3},
    "norms, ahead": {"tp": 2, "dp": 2, "stage": 3, "model": {"qk_norm": True, "predict": 3, "window": (5, 3)}},
    "both": long(150, 70, 10, None, qk_norm=True, tied=False) | {"tp": 2, "dp": 2, "stage": 3, "tiled_loss": True},
}
LLAMAS = ("windows", "windows, checkpoints", "windows, ring", "norms", "norms, 3", "norms, keys of one head",
          "norms, tensors", "norms, sequences", "norms, ring, tensors", "norms, ring, one head", "norms, all-to-all",
          "norms, experts", "norms, adapters", "norms, adapters, tensors", "norms, adapters, out", "norms, ahead",
          "both")


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in RUNS), *(("llama", name) for name in LLAMAS)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of(RUNS[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


ZB = {"schedule": "zb-h1"}
PIPELINES = {   # stages whose windows differ
    "windows": (long(150, 3, None, None) | {"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "windows, zb-h1": (long(150, None, 10, 70, 10, None) | ZB | {"pp": 2, "batch": 14, "micro_batches": 4}, [0, 2, 5]),
    "windows, interleaved": (long(150, 3, None) | {"pp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2},
                             [0, 1, 2, 3, 5]),
    "windows, ring": (long(40, 3, None, 1) | ZB | {"pp": 2, "cp": 2, "micro_batches": 3}, [0, 2, 5]),
    "norms, zb-h1": (QK | ZB | {"pp": 3, "micro_batches": 6}, [0, 1, 3, 5]),
    "norms, zb-v, by tiles": (QK | {"pp": 2, "micro_batches": 4, "schedule": "zb-v", "tiled_loss": True},
                              [0, 1, 2, 3, 5]),
    "norms, tensors, sequences, zb-h1": (QK | ZB | {"pp": 2, "tp": 2, "time": 10, "micro_batches": 4,
                                                    "sequence_parallel": True}, [0, 2, 5]),
    "norms, ring, zb-h1": (QK | ZB | {"pp": 2, "cp": 2, "time": 12, "micro_batches": 3}, [0, 2, 5]),
    "norms, ring, tensors, zb-h1": (QK | ZB | {"pp": 2, "cp": 2, "tp": 2, "time": 12, "micro_batches": 3}, [0, 2, 5]),
    "norms, all-to-all, zb-h1": (QK | ZB | {"pp": 2, "cp": 2, "cp_by": "all_to_all", "time": 12, "micro_batches": 3},
                                 [0, 2, 5]),
    "norms, adapters, zb-h1": (QK | ZB | {"pp": 2, "micro_batches": 4, "lora_rank": 3}, [0, 2, 5]),
    "both, 3, dualpipev": (long(70, 5, None, qk_norm=True) | {"pp": 2, "dp": 2, "batch": 16, "micro_batches": 4,
                                                             "schedule": "dualpipev", "stage": 3}, [0, 1, 2, 3, 5]),
}


@pytest.mark.parametrize("family, name", [(family, name) for family in ("gpt", "llama") for name in PIPELINES])
def test_what_a_pipeline_holds_and_sends(family, name):
    more, bounds = PIPELINES[name]
    job = job_of(more | {"model": {"layers": 5, "tied": False} | more["model"]}, family)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds)))


def test_stages_with_other_windows_keep_other_amounts():
    """Of 2 blocks each the first stage's see 3 positions, the second's all."""
    narrow, wide = (job_of(long(150, *windows, layers=4, tied=False) | {"pp": 2, "micro_batches": 2})
                    for windows in ((3, 3, None, None), (None, None, 3, 3)))
    (a, b), (c, d) = ([rank_of(job, place).activations for place in range(2)] for job in (narrow, wide))
    width = narrow.model.scores(150, 3)[1]
    assert width < 150 and d - b == -2 * 4 * 6 * 4 * 150 * (150 - width)
    assert c - a == 2 * (b - d)     # of two micro-batches


# ---------------------------------------------------------------- writing

@pytest.mark.parametrize("window, tokens, kept, seen", [
    ((3, None), 16, (6, 16, 6), (3, 16, 3)), ((3, None), 5, (5, 5, 5), (3, 5, 3)),
    ((7, 2, None), 13, (13, 4, 13), (7, 2, 13)), ((5, 3), 11, (10, 6, 10), (5, 3, 5)), ((1,), 4, (2, 2, 2), (1, 1, 1))])
@pytest.mark.parametrize("family, qk_norm", [("gpt", False), ("llama", True)])
def test_of_each_blocks_window_twice_as_much_is_kept(family, qk_norm, window, tokens, kept, seen):
    job = job_of({"model": {"window": window, "qk_norm": qk_norm}}, family)
    it, cache = Generation(job, V100, 6, tokens), KeyValueCache(plan_cases.gpt(job.model).eval(), tokens)
    for position in np.random.default_rng(1).integers(0, 50, (tokens, 6, 1)):
        cache.read(position)
    each = 6 * it.per_token // 3        # of a layer
    assert cache.nbytes == it.cache == each * sum(kept)
    assert it.read - it.weights_read == each * sum(seen)
    # Room for so much: as many sequences, and as many tokens as need no more.
    found = Generation(job, replace(SIMPLE, memory=it.memory), 6, tokens)
    assert found.fits and found.most_sequences == 6
    windows = [job.model.window_of(i) for i in range(3)]
    fits = [n for n in range(1, 17) if sum(min(n, 2 * (window or n)) for window in windows) <= sum(kept)]
    assert found.most_tokens == max(fits) >= tokens
    assert not Generation(job, replace(SIMPLE, memory=it.memory - 1), 6, tokens).fits


@pytest.mark.parametrize("family, more", [
    ("gpt", {"window": (2, None)}), ("gpt", {"window": (2, 3), "qk_norm": True}), ("llama", {"qk_norm": True}),
    ("llama", {"window": (None, 3), "qk_norm": True, "kv_heads": 1, "tied": False})], ids=str)
def test_what_a_token_reads_is_what_it_needs(family, more):
    job = job_of({"model": {"layers": 2, "vocabulary": 7, "context": 11, "hidden": 6} | more}, family)
    it = Generation(job, V100, 1, 5)
    weights, kept = plan_cases.needed(asdict(job), 5)
    assert weights == it.weights_read
    assert kept + it.per_token == it.read - weights     # and its own


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_is_held_is_what_the_cache_allocates(family, tp):
    job = job_of({"tp": tp} | QK, family)
    it = Generation(job, V100, 6, 9)
    parameters, kept, used = crews.call(CASES + "written", job.ranks, (asdict(job), 6, 9))[-1]
    assert (parameters, kept) == (it.parameters, it.cache) and used
