"""Plans of writing: the papers' caches, and what the library's own cache allocates and reads."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist.nn.decoding import KeyValueCache, uncacheable
from minitorch_dist.plan import GPT, Generation, Job
from tests.crews import crews

from . import plan_cases
from .plan_cases import SIMPLE
from .plan_checks import V100, job_of

CASES = "tests.plan_cases:"
LLAMA_2 = GPT(80, 8192, 64, 32000, 4096, tied=False, dropout=False, kv_heads=8, hidden=28672, family="llama")
ROOMY = {"experts": 6, "top_k": 2, "capacity_factor": 3.0}


def written(job, sequences=1, tokens=1, device=V100):
    return Generation(job, device, sequences, tokens)


# ---------------------------------------------------------------- the papers

def latents(layers, width):
    return GPT(layers, width, 128, 102400, 131072, tied=False, family="deepseek", nope_size=128, rope_size=64,
               kv_rank=512, q_rank=1536)


@pytest.mark.parametrize("model, kb", [
    (latents(61, 7168), 70.272),
    (GPT(80, 8192, 64, 152064, 32768, kv_heads=8, hidden=29568, family="llama"), 327.680),
    (GPT(126, 16384, 128, 128256, 131072, kv_heads=8, hidden=53248, family="llama"), 516.096)],
    ids=["DeepSeek-V3", "Qwen-2.5 72B", "Llama 3.1 405B"])
def test_published_caches(model, kb):
    """Zhao et al. 2025, "Insights into DeepSeek-V3", table 1: kB per token, in BF16."""
    assert written(Job(model)).per_token == kb * 1000


def test_deepseek_v2s_cache():
    """DeepSeek-AI 2024: 93.3 % less than DeepSeek 67B's (95 layers, 8 groups of 128), with 6 bits per number instead of
    16; of 128 heads' keys and values, 2.25 groups' (table 1)."""
    v2, llm = written(Job(latents(60, 5120))), GPT(95, 8192, 64, 102400, 4096, kv_heads=8, family="llama")
    assert round(100 * (1 - v2.per_token * 6 / 16 / written(Job(llm)).per_token), 1) == 93.3
    group = written(Job(replace(llm, layers=60, kv_heads=1))).per_token
    assert v2.per_token == 2.25 * group


def test_llama_2s():
    """70 B with 8 heads of keys of 64: an eighth of what it would keep, 1.34 GB per 4,096 tokens; on 8 ranks a head
    each, on which 80 GB have room for 374 sequences beside an eighth of the weights."""
    job = Job(LLAMA_2, tp=8)
    one = written(job, 16, 4096, replace(V100, memory=80e9))
    assert 8 * one.per_token == 327_680 and 8 * one.cache == 16 * 1.25 * 2 ** 30
    assert written(replace(job, model=replace(LLAMA_2, kv_heads=None))).per_token == 8 * one.per_token
    assert one.most_sequences == 374 and one.fits and one.most_tokens == 4096
    for count, fits in ((374, True), (375, False)):
        assert written(job, count, 4096, one.device).fits == fits
    # A token of one sequence reads 137 GB of weights: Llama 2 70B in 16 bits, without its table of tokens.
    alone = written(Job(LLAMA_2), 1, 1, replace(V100, memory_bandwidth=2e12))
    assert alone.read == 2 * (68_976_648_192 - 31_999 * 8192) + 327_680
    assert alone.tokens_per_second == pytest.approx(2e12 / 137.4e9, rel=1e-3) and not alone.fits


def test_what_fits():
    """Memory to the byte; sequences over dp; tokens up to the context."""
    job = job_of({"dp": 2})
    it = written(job, 6, 10, SIMPLE)
    for tokens, spare, most in ((10, 0, 10), (10, -1, 9), (11, 0, 11), (10, 10 ** 6, 16)):
        memory = it.parameters + 3 * tokens * it.per_token + spare
        found = written(job, 6, 10, replace(SIMPLE, memory=memory))
        assert found.most_tokens == most and found.fits == (most >= 10)
        assert found.most_sequences == 2 * ((memory - it.parameters) // (10 * it.per_token))
    assert it.tokens_per_second == pytest.approx(6 / it.seconds) and it.seconds == it.read / 1e10    # of both ranks
    none = written(job, 2, 10, replace(SIMPLE, memory=it.parameters - 1))
    assert (none.most_tokens, none.most_sequences) == (0, 0)


# ---------------------------------------------------------------- the library

RUNS = {    # of a model in float32
    "alone": {}, "16 bits": {"precision": "mixed"}, "replicas": {"dp": 2}, "tensors": {"tp": 2},
    "tensors, 16 bits": {"tp": 2, "precision": "mixed", "model": {"tied": False, "vocabulary": 51}},
    "experts": {"ep": 2, "model": ROOMY}, "experts, tensors": {"tp": 2, "model": ROOMY},
    "adapters": {"lora_rank": 3, "base_bits": 4},
}
SINKS = {"sinks": {"tp": 2, "model": {"sinks": True, "gated": True}}}


@pytest.mark.parametrize("family, name", [
    *((family, name) for family in plan_cases.SIZES for name in RUNS), ("gpt", "sinks"), ("llama", "sinks")])
def test_what_is_held_is_what_the_cache_allocates(family, name):
    job = job_of((RUNS | SINKS)[name], family)
    it = written(job, 6, 9)
    for rank, (parameters, kept, used) in enumerate(crews.call(CASES + "written", job.ranks, (asdict(job), 6, 9))):
        assert kept == it.cache and used
        assert parameters == it.parameters or rank < job.tp - 1     # the last has most of the vocabulary


@pytest.mark.parametrize("window, tokens, kept", [(3, 16, 6), (3, 5, 5), (8, 16, 16), (20, 16, 16)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_of_a_window_twice_as_much_is_kept(family, window, tokens, kept):
    """Read one after another; a token looks at a window of it. More sequences find room, of any length."""
    job = job_of({"model": {"window": window}}, family)
    it, cache = written(job, 6, tokens), KeyValueCache(plan_cases.gpt(job.model).eval(), tokens)
    for position in np.random.default_rng(1).integers(0, 50, (tokens, 6, 1)):
        cache.read(position)
    assert cache.nbytes == it.cache == 6 * kept * it.per_token
    assert it.read - it.weights_read == 6 * min(window, tokens) * it.per_token
    memory = it.parameters + 6 * kept * it.per_token
    found = written(job, 6, tokens, replace(SIMPLE, memory=memory))
    assert found.fits and found.most_sequences == 6 and found.most_tokens == (16 if kept == 2 * window else kept)


@pytest.mark.parametrize("family, more", [
    ("gpt", {}), ("gpt", {"model": {"tied": False}}), ("gpt", {"model": ROOMY}),
    ("llama", {"model": ROOMY | {"shared_experts": 1}}), ("llama", {"lora_rank": 2, "model": {"tied": False}}),
    ("deepseek", {"model": {"tied": False}})], ids=str)
def test_what_a_token_reads_is_what_it_needs(family, more):
    small = {"layers": 1, "vocabulary": 7, "context": 11, "hidden": 6}
    job = job_of(more | {"model": small | more.get("model", {})}, family)
    it = written(job, 1, 5)
    weights, kept = plan_cases.needed(asdict(job), 5)
    assert weights == it.weights_read
    assert kept + it.per_token == it.cache == it.read - weights     # and its own


def test_experts_that_are_read():
    """Those that tokens have chosen, at most all that the rank has."""
    job = job_of({"model": ROOMY, "ep": 2})
    each = 3 * 2 * 4 * 36 * 144
    assert len({written(job, 2 * own, 5).weights_read for own in (1, 2, 9)}) == 1       # 3 experts, 4 choices or more
    one = replace(job, ep=1, batch=6)
    assert [(written(one, own, 5).weights_read - written(one, 1, 5).weights_read) // each for own in (2, 3, 4)] == \
        [2, 4, 4]


@pytest.mark.parametrize("more, words", [
    ({"pp": 2, "model": {"tied": False}}, "with pp=2: .* take --pp 1"),
    ({"cp": 2, "time": 12}, "with cp=2: each rank has a part of the sequences"),
    ({"tp": 2, "time": 12, "sequence_parallel": True}, "which divides the sequences over ranks"),
    ({"dp": 4}, "dp = 4 ranks must share the sequences equally: take 8$"),
    ({"dp": 2, "ep": 2, "model": ROOMY}, "dp · ep = 4 ranks must share the sequences equally: take 8$")])
def test_what_cannot_be_written(more, words):
    with pytest.raises(ValueError, match=words):
        written(job_of(more), 6, 9)


def test_mixtures_that_drop_tokens_keep_nothing():
    """As the library says."""
    job = job_of({"model": {"experts": 5, "top_k": 2}})
    reason = uncacheable(plan_cases.gpt(job.model)).partition("MoE, ")[2]
    with pytest.raises(ValueError, match="2.5, drops none: --no-capacity, or --capacity-factor 2.5") as found:
        written(job)
    assert reason in str(found.value)
    assert written(job_of({"model": {"experts": 5, "top_k": 2, "capacity_factor": 2.5}})).cache
