"""Plans against the papers' numbers, and the library's own models."""

import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from minitorch_dist import comm, nn
from minitorch_dist.comm.cost import Costs
from minitorch_dist.flat import BLOCK
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.pipelines.schedules import play, zb_h1
from minitorch_dist.plan import GPT, Job, Parameters, plan
from minitorch_dist.plan.activations import activations
from minitorch_dist.plan.devices import LATENCY
from minitorch_dist.plan.layout import buckets
from minitorch_dist.plan.paper import gpu_hours, pieces_of, span_of_shards
from tests.crews import crews

from . import plan_cases
from .plan_cases import SIMPLE, SIZES, SMALL
from .plan_checks import V100, job_of, rank_of, sent

CASES = "tests.plan_cases:"


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
    got = sent(rank_of(Job(Parameters(6.4e9), dp=64, batch=64, stage=stage)), "dp")
    assert got == pytest.approx(times * 6.4e9 * 2 * 63 / 64, rel=1e-12)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikantis_activations(t):
    """Table 2 of Korthikanti et al. 2022, per layer; and 2sbh with full recomputation."""
    a, h, s, b = 96, 12288, 2048, 3
    job = Job(GPT(layers=1, width=h, heads=a, vocabulary=51200, context=s), tp=t, batch=b, time=s)

    def per_layer(sequence_parallel=False, **more):
        more |= {"sequence_parallel": t > 1 and sequence_parallel}
        return activations(replace(job, **more), (range(1), False, False), b).until_backward
    square = 5 * a * s / h
    assert per_layer() == pytest.approx(s * b * h * (10 + 24 / t + square / t), rel=1e-12)
    assert per_layer(sequence_parallel="regather") == pytest.approx(s * b * h / t * (34 + square), rel=1e-12)
    assert per_layer(checkpointing=True) == 2 * s * b * h
    assert per_layer(checkpointing=True, sequence_parallel="regather") == 2 * s * b * h / t
    kept, more, *_ = activations(replace(job, checkpointing=True), (range(3), False, False), b)
    assert kept + more == pytest.approx(2 * 2 * s * b * h + per_layer(), rel=1e-12)


def test_what_w_needs_is_the_zero_bubble_papers():
    """Qi et al. 2023, section 2: 32·s·b·h bytes of a block in 16 bits, of (34 + 5·a·s/h)·s·b·h before."""
    a, h, s, b = 24, 3072, 1024, 2
    job = Job(GPT(layers=9, width=h, heads=a, vocabulary=51200, context=s, tied=False), pp=3, batch=9 * b, time=s,
              micro_batches=9, schedule="zb-h1")
    first, middle, _ = (activations(job, (range(3), place == 0, False), b) for place in range(3))
    assert middle.until_backward == pytest.approx(3 * (34 + 5 * a * s / h) * s * b * h, rel=1e-12)
    assert middle.late == 3 * 32 * s * b * h and first.late == first.until_backward
    assert plan(job, V100).bubble == play(zb_h1(3, 9)).bubble


@pytest.mark.parametrize("schedule, held", [("1f1b", 4), ("zb-h1", 4), ("zb-h2", 7)])
def test_zero_bubbles_memory(schedule, held):
    """Of a first stage, all of whose backward is W: p of its micro-batches as in 1F1B, or 2p - 1."""
    job = Job(replace(SMALL, layers=4, tied=False), pp=4, batch=8, time=4, micro_batches=8, schedule=schedule)
    assert rank_of(job).activations == held * activations(job, (range(1), True, False), 1).until_backward


def test_published_sizes():
    """Mixtral 8x7B (Jiang et al. 2024): 46.7 B parameters, 12.9 B of them active; Llama 3 405B (Dubey et al. 2024) and
    the first Llamas (Touvron et al. 2023): as their weights are published, to the parameter."""
    mixtral = GPT(32, 4096, 32, 32000, 32768, tied=False, kv_heads=8, hidden=14336, family="llama", experts=8, top_k=2)
    assert mixtral.count == 46_702_792_704 and round(mixtral.active / 1e9, 1) == 12.9
    assert replace(mixtral, top_k=8).active == mixtral.count
    more = replace(mixtral, shared_experts=2)       # two more of three matrices each
    assert more.count - mixtral.count == more.active - mixtral.active == 32 * 2 * 3 * 4096 * 14336
    llama = GPT(126, 16384, 128, 128256, 131072, tied=False, kv_heads=8, hidden=53248, family="llama")
    assert llama.count == llama.active == 405_853_388_800
    for sizes, hidden, count in (((32, 4096, 32), 11008, 6_738_415_616), ((40, 5120, 40), 13824, 13_015_864_320),
                                 ((60, 6656, 52), 17920, 32_528_943_616), ((80, 8192, 64), 22016, 65_285_660_672)):
        assert GPT(*sizes, 32000, 2048, tied=False, hidden=hidden, family="llama").count == count


def test_published_sizes_of_latents():
    """DeepSeek-V2: 236 B parameters, 21 B of them active; V3: 671 B and 37 B. The first layers have no experts."""
    sizes = {"nope_size": 128, "rope_size": 64, "kv_rank": 512, "q_rank": 1536, "family": "deepseek", "tied": False}
    for shape, dense, hidden, count, active in (
            ((59, 5120, 128, 102400, 131072, 1536, 160, 6, 2), 1, 12288, 235.7e9, 21.4e9),
            ((58, 7168, 128, 129280, 131072, 2048, 256, 8, 1), 3, 18432, 671.0e9, 37.6e9)):
        names = "layers width heads vocabulary context hidden experts top_k shared_experts".split()
        model = GPT(**dict(zip(names, shape, strict=True)), **sizes)
        first = replace(model, experts=0, shared_experts=0, hidden=hidden)
        before = dense * sum(math.prod(part) for _, part in first.block(1))
        assert round(model.count + before, -8) == count and round(model.active + before, -8) == active


@pytest.mark.parametrize("more, words", [
    ({"kv_heads": 2}, "kv_heads=2 of a deepseek"),
    ({"family": "llama"}, "--kv-rank, --q-rank of a llama, which has no multi-head latent attention"),
    ({"rope_size": 3}, "rope_size=3.* even")])
def test_latents_that_cannot_be(more, words):
    with pytest.raises(ValueError, match=words):
        GPT(**{"layers": 1, "width": 8, "heads": 2, "vocabulary": 9, "context": 4, "family": "deepseek", "kv_rank": 5,
               "q_rank": 6} | more)


def test_llama_3s_long_context():
    """Dubey et al. 2024, table 4: 131,072 tokens on cp=16 ranks, as many of them on each as without cp before: a rank
    keeps as much, however long the sequence. Of 128 heads it sends the keys of 8."""
    llama = GPT(126, 16384, 128, 128256, 131072, tied=False, dropout=False, kv_heads=8, hidden=53248, family="llama")
    job = Job(llama, dp=8, tp=8, pp=16, cp=16, batch=128, time=131072, micro_batches=16, stage=1)
    rank = rank_of(job, 1)
    assert rank.activations == rank_of(replace(job, cp=2, time=16384), 1).activations
    assert rank_of(replace(job, cp=1, time=8192), 1).activations > rank.activations      # scores
    everybodys = rank_of(replace(job, model=replace(llama, kv_heads=None)), 1)
    assert sent(everybodys, "cp") == 16 * sent(rank, "cp")
    assert sent(rank, "cp") == 8 * 16 * 3 * 15 * 2 * 8192 * 128 * 2


def test_narayanans_flops():
    """Narayanan et al. 2021: 96·B·s·l·h²·(1 + s/6h + V/16lh), with the forward pass that recomputes."""
    s, h, layers, batch, v = 2048, 12288, 96, 1536, 51200
    model = GPT(layers, h, 96, v, s)
    wanted = 96 * batch * s * layers * h ** 2 * (1 + s / (6 * h) + v / (16 * layers * h))
    alone = rank_of(Job(model, batch=batch, time=s, checkpointing=True), 0)
    assert alone.flops == pytest.approx(wanted, rel=1e-12)
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
@pytest.mark.parametrize("experts, shared", [(0, 0), (5, 0), (5, 2)])
@pytest.mark.parametrize("family", SIZES)
def test_parameters_are_the_models(family, tied, experts, shared):
    sizes = replace(SIZES[family], tied=tied, experts=experts, shared_experts=shared)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(1)]
    real = [(name, p.shape) for name, p in plan_cases.gpt(sizes).named_parameters()]
    assert sizes.embedding(1) + blocks + sizes.output(1) == real
    assert sizes.count == sum(math.prod(shape) for _, shape in real)


@pytest.mark.parametrize("family, tied, n", [("gpt", True, 2), ("gpt", False, 4), ("llama", False, 2)])
def test_parts_are_the_cut_models(family, tied, n):
    """Of the last rank, which has most rows of the vocabulary; padding would hide a vector."""
    sizes = replace(SIZES[family], tied=tied, vocabulary=53)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(n)]
    assert crews.call(CASES + "parts", n, (asdict(sizes),))[-1] == sizes.embedding(n) + blocks + sizes.output(n)


@pytest.mark.parametrize("family", SIZES)
def test_experts_are_the_divided_models(family):
    sizes = replace(SIZES[family], experts=6, shared_experts=1)
    blocks = [(f"blocks.{i}.{name}", shape) for i in range(3) for name, shape in sizes.block(1, 2)]
    assert crews.call(CASES + "parts", 2, (asdict(sizes),))[-1] == sizes.embedding(1) + blocks + sizes.output(1)


def test_buckets_are_the_librarys():
    """4,032 + 63 elements fill a block, and the counts of users need another."""
    for width, out, blocks in ((64, 63, 2), (64, 62, 1), (400, 1000, 98)):
        ddp = DistributedDataParallel(nn.Linear(width, out), comm.world_of_one())
        sizes = buckets([(out,), (out, width)], 4)      # as they are cut before the first step
        assert sizes == [(bucket.flat.size, len(bucket.segments)) for bucket in ddp.buckets]
        assert sum(size for size, _ in sizes) == blocks * BLOCK


@pytest.mark.parametrize("window, time", [(10, 150), (70, 150), (3, 16), (100, 190)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_flops_of_windows_are_the_models(family, window, time):
    sizes = replace(SIZES[family], window=window, context=200)
    whole, tokens = replace(sizes, window=None), np.zeros((3, time), int)
    flops = rank_of(Job(sizes, batch=3, time=time), 0).flops
    assert flops == nn.summary(plan_cases.gpt(sizes), tokens).training_flops
    assert flops == rank_of(Job(whole, batch=3, time=time), 0).flops or time == 150


@pytest.mark.parametrize("experts, k, shared, group", [(0, 1, 0, None), (4, 1, 0, None), (6, 3, 2, None),
                                                       (6, 3, 2, "sequence"), (6, 3, 2, "no capacity")])
@pytest.mark.parametrize("family", SIZES)
def test_flops_are_the_models(family, experts, k, shared, group):
    sizes = replace(SIZES[family], experts=experts, top_k=k, shared_experts=shared)
    sizes = replace(sizes, capacity_factor=None) if group == "no capacity" else replace(sizes, group=group)
    tokens = np.zeros((5, 11), int)
    assert rank_of(Job(sizes, batch=5, time=11), 0).flops == nn.summary(plan_cases.gpt(sizes), tokens).training_flops


def test_every_rank_of_tensor_parallelism_does_the_work_of_all_experts():
    """Forward and backward, 3 layers: a router of 36 · 4, and experts with ⌈1.25 · 2 · 55/4⌉ = 35 rows each."""
    jobs = [Job(replace(SMALL, experts=4), tp=tp, batch=5, time=11) for tp in (1, 2)]
    whole, half = (rank_of(job).flops for job in jobs)
    mixtures = 3 * 3 * (55 * 2 * 36 * 4 + 4 * 35 * 2 * 2 * 36 * 144)
    assert half == (whole - mixtures) / 2 + mixtures


def test_ranks_that_route_their_own_positions_share_all_work():
    """Of 3 layers with two shared experts too; and each of 2 · 2 ranks holds a quarter of the experts."""
    sizes = replace(SMALL, experts=4, shared_experts=2, capacity_factor=None)
    jobs = [Job(sizes, tp=tp, ep=ep, batch=6, time=12, sequence_parallel=tp > 1, experts_over=("tp",) * (tp > 1))
            for tp, ep in ((1, 1), (2, 1), (2, 2))]
    whole, *others = (rank_of(job).flops for job in jobs)
    assert others == [whole / 2, whole / 4]
    each = 2 * 36 * 144
    assert [sum(math.prod(p.shape) for part in job.parameters(job.stages_of(0)[0]) for p in part
                if p.name.startswith("mlp.experts.")) for job in jobs] == [3 * n * each for n in (4, 2, 1)]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_tiled_loss_costs_the_output_layer_s_products_once_more(depth):
    job = Job(replace(SMALL, predict=1 + depth), batch=5, time=11)
    rows = 5 * sum(11 - k for k in range(1 + depth))
    assert rank_of(replace(job, tiled_loss=True), 0).flops == \
        rank_of(job, 0).flops + 2 * rows * SMALL.width * SMALL.vocabulary
    if not depth:       # once more where W makes its gradient by itself
        job = Job(SMALL, batch=4, time=11, pp=2, micro_batches=4, schedule="zb-h1")
        assert rank_of(replace(job, tiled_loss=True), 1).flops == \
            rank_of(job, 1).flops + 2 * 2 * 44 * SMALL.width * SMALL.vocabulary
    model, tokens = plan_cases.gpt(SMALL), np.zeros((5, 11), int)       # a model's count is without them
    assert nn.summary(model, tokens, None, tokens).training_flops == nn.summary(model, tokens).training_flops


@pytest.mark.parametrize("more, words", [
    ({"model": Parameters(7e9)}, "only the number of parameters"),
    ({"model": replace(SMALL, tied=False), "lora_rank": 2, "lora_targets": ("*",)},
     "an adapter beside the output layer")])
def test_where_logits_are_wanted_a_tiled_loss_is_refused(more, words):
    with pytest.raises(ValueError, match=f"--tiled-loss .*{words}"):
        Job(**{"model": replace(SMALL, tied=False), "batch": 2, "time": 4, "tiled_loss": True} | more)


def test_flops_of_micro_batches_are_the_models():
    """2, 2 and 3 samples, each routed alone."""
    job = job_of({"ep": 2, "batch": 14, "micro_batches": 3, "model": {"experts": 4}})
    model = plan_cases.gpt(job.model)
    assert rank_of(job).flops == sum(nn.summary(model, np.zeros((n, 11), int)).training_flops for n in (2, 2, 3))


# ---------------------------------------------------------------- seconds

def test_seconds_of_data_parallelism():
    """A ring on the slowest link, and FLOPs at the peak."""
    for dp, speed in ((4, 1e9), (8, 1e8)):
        for stage, times in ((0, 2), (3, 3)):
            found = plan(Job(Parameters(1e9), dp=dp, batch=dp, time=100, stage=stage), SIMPLE).seconds
            assert found.dp == pytest.approx(times * 2e9 * (dp - 1) / dp / speed, rel=1e-3)
            assert found.compute == pytest.approx(6 * 1e9 * 100 / 1e12)
            assert found.step == found.dp + found.compute and found.longest == "dp"


def test_seconds_of_copies():
    """Machines of four share a copy: all but 1/4 of the gradients stays on fast links. With pp=2 neighbours along dp
    are two devices apart, or four with cp=2."""
    for stage, times in ((1, 2), (3, 3)):
        rank = plan(Job(Parameters(1e9), dp=8, batch=8, stage=stage, shard_over=4), SIMPLE)
        assert rank.sent("shard") == times * 2e9 * 3 / 4 and rank.sent("dp") == 2 * 2e9 / 4 / 2
        assert rank.seconds.shard == pytest.approx(times * 2e9 * 3 / 4 / 1e9, rel=1e-3)
        assert rank.seconds.dp == pytest.approx(2 * 2e9 / 4 / 2 / 1e8, rel=1e-3)
        assert rank.seconds.step == rank.seconds.dp + rank.seconds.shard + rank.seconds.compute
    alone = plan(Job(Parameters(1e9), dp=8, batch=8, stage=2, shard_over=1), SIMPLE)
    assert alone.sent("shard") == 0 and alone.sent("dp") == rank_of(replace(alone.job, stage=0, shard_over=None)
                                                                   ).collectives[0].sent
    spans = {(4, 1, 1, 2): 4, (4, 2, 1, 2): 2, (4, 2, 1, 4): 8, (1, 8, 1, 4): 4, (3, 2, 1, 3): 8,   # dp, cp, ep, shards
             (2, 1, 4, 4): 4, (2, 2, 2, 4): 4, (2, 2, 2, 8): 16}                                    # pp=2 if cp < 8
    for (dp, cp, ep, shards), wanted in spans.items():
        job = Job(replace(SMALL, tied=False, experts=4, capacity_factor=None), dp=dp, cp=cp, ep=ep, stage=1, time=16,
                  pp=2 if cp < 8 else 1, batch=dp * ep, shard_over=shards)
        assert span_of_shards(job) == wanted, (dp, cp, ep, shards)


def test_seconds_of_neighbours_and_few_bits():
    """Machines of four keep values until backward: the paper's 3ψ of 16 bits between machines become ψ/2 + ψ/4."""
    scales, usual = 4 / 256, Job(Parameters(1e9), dp=8, batch=8, stage=3)
    found = plan(replace(usual, reshard_after_forward=4), SIMPLE)
    assert found.sent("dp") == 2 * 2e9 * 7 / 8 and found.sent("near") == 2e9 * 3 / 4
    assert found.seconds.near == pytest.approx(2e9 * 3 / 4 / 1e9, rel=1e-3)
    assert found.seconds.dp == pytest.approx(2 * 2e9 * 7 / 8 / 1e8, rel=1e-3)
    assert found.seconds.step == found.seconds.dp + found.seconds.near + found.seconds.compute
    few = plan(replace(usual, reshard_after_forward=4, param_bits=8, reduce_bits=4), SIMPLE)
    assert few.sent("dp") == ((1 + scales) * 7 / 8 + (1 / 2 + scales) / 4 / 2) * 1e9
    assert few.sent("near") == (3 / 2 + 2 * scales) * 1e9 * 3 / 4
    assert plan(replace(usual, reshard_after_forward=8), SIMPLE).ranks == plan(usual, SIMPLE).ranks
    small = replace(usual, model=SMALL, time=16, reshard_after_forward=4)
    kept = rank_of(small).buffers - rank_of(replace(small, reshard_after_forward=None)).buffers
    assert kept == 2 * sum(piece.elements for piece in pieces_of(small, small.stages_of(0))) / 4


@pytest.mark.parametrize("more, words", [
    ({"reshard_after_forward": 3}, "--reshard-after-forward 3: it must be a divisor above 1 of the 8 ranks"),
    ({"reshard_after_forward": 1}, "a divisor above 1"), ({"param_bits": 5}, "--param-bits 5: take 8 or 4"),
    ({"reshard_after_forward": 4, "shard_over": 2}, "a divisor above 1 of the 2 ranks that share a copy"),
    ({"reshard_after_forward": 2, "stage": 2}, "with stage=2, pp=1, ep=1"),
    ({"param_bits": 8, "stage": 2}, "with stage 2: the least stage with such messages is 3"),
    ({"reduce_bits": 4, "stage": 0}, "the least stage with such messages is 1"),
    ({"reshard_after_forward": 2, "pp": 2, "model": replace(SMALL, tied=False)}, "with stage=3, pp=2, ep=1: values"),
    ({"reshard_after_forward": 2, "dp": 4, "ep": 2, "model": replace(SMALL, experts=4)},
     "with stage=3, pp=1, ep=2: values are cut in stage 3 only, a pipeline keeps them, and neighbours along ep have"),
    ({"dispatch_bits": 8, "dp": 4, "ep": 2, "model": replace(SMALL, width=132, experts=4)},
     "rows of 132 features aren't made of blocks of 128")], ids=str)
def test_neighbours_and_bits_that_cannot_be(more, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Job(**{"model": Parameters(1e9), "dp": 8, "batch": 8, "stage": 3} | more)


def test_seconds_of_a_mesh():
    """tp within a machine of four, pp between two of them."""
    model = GPT(layers=4, width=1024, heads=8, vocabulary=1024, context=512, tied=False)
    job = Job(model, tp=4, pp=2, batch=8, time=512, micro_batches=8)
    found, tokens = plan(job, SIMPLE).seconds, 8 * 512
    ring, waits = 2 * 3 / 4 * tokens / 1e9, 6 * 8 * LATENCY        # in 8 micro-batches
    assert found.tp == pytest.approx((2 * 4 + 1) * (2048 * ring + waits) + 3 * (4 * ring + waits), rel=1e-12)
    assert found.pp == pytest.approx(tokens * 2048 / 1e8, rel=1e-3)
    assert found.dp == 0 and found.bubble == pytest.approx((found.compute + found.tp) / 8, rel=1e-12)


def test_seconds_of_sequences_experts_and_the_host():
    """Two ranks of a machine of four; two machines; the slow way to the host."""
    model = GPT(layers=2, width=1024, heads=8, vocabulary=64, context=512, experts=8, capacity_factor=1.0)
    tokens = 4 * 512
    for ep, dp, speed in ((2, 2, 1e9), (4, 2, 1e9), (8, 1, 1e8)):
        found = plan(Job(model, dp=dp, ep=ep, batch=4 * dp * ep, time=512), SIMPLE).seconds
        each = 2 * tokens * 1024 * 2 / ep / speed + LATENCY      # two experts per token, to one of the others
        assert found.ep == pytest.approx(2 * 4 * (ep - 1) * each, rel=1e-12)
    job = Job(replace(model, experts=0), cp=4, batch=4, time=512)
    for by, sent_each in (("ring", 3 * 3 * (2 * tokens / 4 * 1024 * 2 / 1e9 + LATENCY)),
                          ("all_to_all", 8 * 3 * (tokens / 16 * 1024 * 2 / 1e9 + LATENCY))):
        assert plan(replace(job, cp_by=by), SIMPLE).seconds.cp == pytest.approx(2 * sent_each, rel=1e-12)
    found = plan(Job(Parameters(1e9), offload_optimizer=True), SIMPLE).seconds
    assert found.host == 6e9 / 2e7 and found.longest == "host" and found.step == found.host + found.compute


def test_each_axis_has_the_slowest_link_between_its_ranks():
    """In machines of four: neighbours are the ranks of tp, then of ep, cp, pp and dp."""
    model = replace(SMALL, layers=4, tied=False, experts=8, capacity_factor=None)
    fast, slow = (Costs(LATENCY, 1 / speed, 0.0) for speed in (1e9, 1e8))
    for mesh, links in (({"tp": 2, "ep": 2}, {"tp": fast, "ep": fast, "dp": fast}),
                        ({"tp": 2, "ep": 4}, {"tp": fast, "ep": slow, "dp": slow}),
                        ({"ep": 2, "cp": 2}, {"ep": fast, "cp": fast, "dp": fast}),
                        ({"tp": 2, "ep": 2, "cp": 2}, {"tp": fast, "ep": fast, "cp": slow, "dp": slow}),
                        ({"cp": 2, "pp": 4}, {"cp": fast, "dp": fast, "pp": slow}),
                        ({"tp": 2, "dp": 2}, {"tp": fast, "dp": fast}), ({"pp": 4, "dp": 2}, {"pp": fast, "dp": slow})):
        found = plan(Job(model, **mesh, batch=16, time=16, micro_batches=mesh.get("pp", 1)), SIMPLE)
        for axis, link in links.items():
            taken = [sum(c.seconds(link) for c in rank.collectives if c.axis == axis) for rank in found.ranks]
            assert getattr(found.seconds, axis) == max(taken) > 0, (mesh, axis)


def test_ranks_of_a_pipeline_wait_for_all_that_the_others_do():
    """Of two ranks and four micro-batches a fourth; and each copies what it has to its own host."""
    model = replace(SMALL, tied=False, experts=4, capacity_factor=None)
    job = Job(model, pp=2, tp=2, ep=2, cp=2, batch=8, time=16, micro_batches=4, offload_optimizer=True)
    found, ranks = plan(job, SIMPLE).seconds, plan(job, SIMPLE).ranks
    assert min(found.tp, found.cp, found.ep) > 0
    assert found.bubble == pytest.approx((found.compute + found.tp + found.cp + found.ep) / 4, rel=1e-12)
    assert found.host == max(rank.crossing for rank in ranks) / 2e7


def test_a_plan_speaks_of_its_worst_rank():
    """Of three pipeline stages the first keeps most, the middle one sends most, the last computes most."""
    model = GPT(layers=3, width=64, heads=8, vocabulary=64, context=32, tied=False)
    found = plan(Job(model, pp=3, batch=8, time=32, micro_batches=8), SIMPLE)
    first, middle, last = found.ranks
    assert found.fullest is first and first.memory > max(middle.memory, last.memory)
    assert found.sent("pp") == sent(middle, "pp") == 2 * sent(first, "pp") == 2 * 8 * 32 * 64 * 2
    assert found.seconds.compute == last.flops / 1e12 and last.flops > middle.flops
    assert found.fits and not plan(found.job, replace(SIMPLE, memory=first.memory - 1)).fits
    assert plan(found.job, replace(SIMPLE, memory=first.memory)).fits


def test_sequence_parallelism_sends_as_much_and_gathers_again():
    """Korthikanti et al. 2022, section 4.2.2: all-gather and reduce-scatter for each all-reduce."""
    model = GPT(layers=4, width=64, heads=8, vocabulary=64, context=32)
    ranks = [rank_of(Job(model, tp=4, batch=2, time=32, sequence_parallel=it)) for it in (False, True, "regather")]
    plain, parted, again = (sent(rank, "tp") for rank in ranks)
    one = 2 * 32 * 64 * 2 * 3 / 4       # all-gather of a block's output
    labels, vectors = 3 * 2 * 3 / 4 * 2 * 32 * 4, (2 * (6 * 4 + 2) + 32) * 64 * 2 * 3 / 4
    assert plain == (4 * 4 + 2) * 2 * one + labels
    assert parted == plain + vectors and again == parted + (2 * 4 + 1) * one
    assert ranks[2].activations < ranks[1].activations < ranks[0].activations
