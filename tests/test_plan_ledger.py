"""Plans against the ledger of small models that are really trained: what is held and sent, to the byte."""

from dataclasses import asdict, replace

import pytest

from minitorch_dist.plan import Job, Parameters
from tests.crews import crews

from . import plan_cases, plan_checks
from .plan_cases import SIZES, SMALL
from .plan_checks import job_of, rank_of, sent

CASES = "tests.plan_cases:"
TILED = {"tiled_loss": True}
UNBOUND = {"experts": 4, "capacity_factor": None}
OWN = {"tp": 2, "time": 10, "sequence_parallel": True, "experts_over": ("tp",)}
RING = {"cp": 2, "time": 12, "experts_over": ("cp",)}
CHOSEN = UNBOUND | {"top_k": 4}         # so that all are used alike
NEAR = {"dp": 4, "stage": 3, "reshard_after_forward": 2}
FEW, ONE = {"param_bits": 8, "reduce_bits": 4}, {"model": {"layers": 1}}
RUNS = {    # what is different from float32, a batch of 12 times 11 tokens
    "alone": {}, "ddp": {"dp": 2}, "ddp, no dropout, untied": {"dp": 4, "model": {"dropout": False, "tied": False}},
    "1": {"dp": 3, "stage": 1}, "2": {"dp": 2, "stage": 2}, "3": {"dp": 2, "stage": 3}, "3 on 4": {"dp": 4, "stage": 3},
    "2, accumulated": {"dp": 2, "stage": 2, "micro_batches": 3},
    "3, accumulated": {"dp": 2, "stage": 3, "micro_batches": 2},
    "uneven": {"dp": 2, "batch": 14, "micro_batches": 2},
    "3, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True},
    "8 bits": {"state_bits": 8}, "3, 8 bits": {"dp": 2, "stage": 3, "state_bits": 8},
    "3, one layer": {"dp": 2, "stage": 3, "model": {"layers": 1}},
    "3, one layer, checkpoints": {"dp": 2, "stage": 3, "checkpointing": True, "micro_batches": 2,
                                  "model": {"layers": 1, "width": 44, "tied": False, "dropout": False}},
    "tensors": {"tp": 2}, "tensors, untied": {"tp": 4, "dp": 1, "model": {"tied": False, "vocabulary": 51}},
    "tensors, checkpoints": {"tp": 2, "checkpointing": True, "model": {"vocabulary": 53}},
    "sequences": {"tp": 2, "time": 10, "sequence_parallel": True},
    "sequences, gathered again": {"tp": 4, "time": 12, "sequence_parallel": "regather", "model": {"tied": False}},
    "sequences, checkpoints": {"tp": 2, "dp": 2, "time": 12, "sequence_parallel": True, "checkpointing": True},
    "2, two copies": {"dp": 4, "stage": 2, "shard_over": 2},
    "3, two copies": {"dp": 4, "stage": 3, "shard_over": 2, "micro_batches": 2},
    "3, neighbours": NEAR, "3, neighbours, accumulated": NEAR | {"micro_batches": 2, "model": {"tied": False}},
    "3, neighbours, checkpoints": NEAR | {"checkpointing": True}, "3, neighbours, one layer": NEAR | ONE,
    "3, neighbours that are a copy": NEAR | {"shard_over": 2}, "3, neighbours of 6": NEAR | {"dp": 6},
    "ZeRO++": NEAR | FEW, "ZeRO++, one layer, accumulated": NEAR | FEW | ONE | {"micro_batches": 2},
    "3, few bits": {"dp": 3, "stage": 3} | FEW, "3, few bits, two copies": {"dp": 4, "stage": 3, "shard_over": 2} | FEW,
    "1, 4 bits": {"dp": 3, "stage": 1, "reduce_bits": 4}, "2, 8 bits": {"dp": 2, "stage": 2, "reduce_bits": 8},
    "ring, neighbours": {"cp": 2, "dp": 2, "time": 12, "stage": 3, "reshard_after_forward": 2, "param_bits": 4},
    "ring, 1, two copies": {"dp": 2, "cp": 2, "time": 12, "stage": 1, "shard_over": 2},
    "window": {"time": 150, "micro_batches": 2, "model": {"context": 150, "window": 10}},
    "window, tensors, 3": {"tp": 2, "dp": 2, "stage": 3, "time": 100, "model": {"context": 150, "window": 33}},
    "window, one layer": {"time": 200, "dp": 2, "model": {"context": 200, "window": 100, "layers": 1}},
    "window, ring": {"cp": 4, "time": 40, "model": {"context": 40, "window": 3}},
    "window of one, ring": {"cp": 2, "time": 40, "checkpointing": True, "model": {"context": 40, "window": 1}},
    "window, all-to-all": {"cp": 2, "cp_by": "all_to_all", "time": 140, "model": {"context": 140, "window": 20}},
    "grouped": {"tp": 2, "model": {"kv_heads": 2, "hidden": 50}},
    "both": {"tp": 2, "dp": 2, "stage": 3}, "both, ddp": {"tp": 2, "dp": 2, "micro_batches": 2},
    "ring of 4": {"cp": 4, "time": 16, "micro_batches": 2, "model": {"dropout": False}},
    "ring, 3": {"cp": 2, "dp": 2, "time": 12, "stage": 3}, "ring, tensors": {"cp": 2, "tp": 2, "time": 12},
    "ring, checkpoints": {"cp": 2, "time": 12, "checkpointing": True},
    "all-to-all": {"cp": 2, "cp_by": "all_to_all", "time": 12, "stage": 1, "model": {"tied": False}},
    "all-to-all, checkpoints": {"cp": 2, "cp_by": "all_to_all", "time": 12, "checkpointing": True, "micro_batches": 3},
    "experts, 3": {"dp": 2, "stage": 3, "model": {"experts": 4, "top_k": 3}},
    "experts, one each": {"micro_batches": 2, "model": {"experts": 3, "top_k": 1, "dropout": False}},
    "experts, checkpoints": {"ep": 2, "checkpointing": True, "micro_batches": 2, "model": {"experts": 4}},
    "experts, one layer": {"dp": 2, "stage": 3, "model": {"experts": 4, "layers": 1}},
    "experts, uneven": {"ep": 2, "batch": 14, "micro_batches": 3, "model": {"experts": 4}},
    "experts, divided twice": {"dp": 2, "ep": 2, "model": {"experts": 6, "capacity_factor": 3.0}},
    "experts, 8 bits there": {"ep": 2, "micro_batches": 2, "dispatch_bits": 8, "model": {"experts": 4}},
    "experts, 4 bits there, checkpoints": {"dp": 2, "ep": 2, "stage": 3, "checkpointing": True, "dispatch_bits": 4,
                                           "model": {"experts": 4}},
    "experts, 1, divided": {"ep": 2, "stage": 1, "model": {"experts": 4}},
    "experts, 2, divided, two copies": {"dp": 2, "ep": 2, "stage": 2, "shard_over": 2, "model": {"experts": 4}},
    "experts, 3, divided twice": {"dp": 2, "ep": 2, "stage": 3, "micro_batches": 2, "model": {"experts": 6}},
    "experts, shared": {"micro_batches": 2, "model": {"experts": 3, "top_k": 1, "shared_experts": 1}},
    "experts, shared, 3, divided": {"dp": 2, "ep": 2, "stage": 3, "checkpointing": True,
                                    "model": {"experts": 4, "shared_experts": 2, "dropout": False}},
    "experts, by sequence": {"micro_batches": 2, "model": {"experts": 4, "top_k": 1, "group": "sequence"}},
    "experts, by sequence, divided": {"ep": 2, "micro_batches": 2,
                                      "model": {"experts": 4, "shared_experts": 1, "group": "sequence"}},
    "experts, tensors": {"tp": 2, "ep": 2, "micro_batches": 2,
                         "model": {"experts": 4, "shared_experts": 1, "tied": False}},
    "experts, both": {"tp": 2, "dp": 2, "stage": 3, "model": {"experts": 3, "top_k": 1}},
    "experts, tensors, checkpoints": {"tp": 2, "checkpointing": True, "model": {"experts": 4, "dropout": False}},
    "experts, sequences": {"tp": 2, "time": 10, "sequence_parallel": True, "model": {"experts": 4,
                                                                                    "shared_experts": 1}},
    "experts, sequences, checkpoints": {"tp": 2, "time": 10, "sequence_parallel": True, "checkpointing": True,
                                        "model": {"experts": 4, "shared_experts": 1}},
    "experts, gathered again": {"tp": 2, "ep": 2, "time": 10, "sequence_parallel": "regather",
                                "model": {"experts": 4, "group": "sequence"}} | TILED,
    "experts, no capacity": {"model": UNBOUND | {"group": "sequence"}},
    "experts, no capacity, 3, one each": {"dp": 2, "stage": 3, "micro_batches": 2,
                                          "model": UNBOUND | {"top_k": 1, "dropout": False}},
    "experts, no capacity, ring": {"cp": 2, "time": 12, "model": UNBOUND | {"shared_experts": 1}},
    "experts, no capacity, sequences, checkpoints": {"tp": 2, "time": 10, "sequence_parallel": True,
                                                     "checkpointing": True, "model": UNBOUND} | TILED,
    "experts over tensors": OWN | {"model": CHOSEN | {"shared_experts": 1, "group": "sequence"}},
    "experts over tensors, 3, checkpoints": OWN | {"dp": 2, "stage": 3, "checkpointing": True, "micro_batches": 2,
                                                   "model": CHOSEN},
    "experts over tensors, divided twice": OWN | {"ep": 2, "micro_batches": 2, "model": CHOSEN | {"tied": False}},
    "experts over tensors, 2, divided, gathered again": OWN | TILED | {
        "ep": 2, "dp": 2, "stage": 2, "sequence_parallel": "regather", "model": CHOSEN | {"group": "sequence"}},
    "experts over tensors, ring": OWN | TILED | {"cp": 2, "time": 12, "model": CHOSEN | {"group": "sequence"}},
    "experts over a ring": RING | {"model": CHOSEN | {"group": "sequence"}},
    "experts over a ring, 3, checkpoints": RING | {"dp": 2, "stage": 3, "checkpointing": True, "micro_batches": 2,
                                                   "model": CHOSEN | {"shared_experts": 1}},
    "experts over a ring, 2, divided twice": RING | {"ep": 2, "stage": 2, "model": CHOSEN | {"tied": False}},
    "experts over a ring, 3, divided, two copies": RING | {"dp": 2, "ep": 2, "stage": 3, "shard_over": 4,
                                                           "model": CHOSEN},
    "experts over a ring, and tensors": RING | OWN | TILED | {
        "time": 12, "experts_over": ("cp", "tp"), "model": CHOSEN | {"group": "sequence"}},
    "experts over all-to-all, tensors, divided, 3": RING | OWN | TILED | {
        "time": 12, "cp_by": "all_to_all", "ep": 2, "stage": 3, "experts_over": ("cp", "tp"),
        "model": CHOSEN | {"experts": 8, "top_k": 8}},
    "experts, no capacity, ring, divided": {"cp": 2, "ep": 2, "time": 12, "model": CHOSEN},
    "experts, no capacity, ring, 3, divided": {"cp": 2, "ep": 2, "stage": 3, "time": 12, "model": CHOSEN},
    "ring, sequences": {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": True, "micro_batches": 2},
    "ring, sequences, checkpoints": {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": True, "checkpointing": True},
    "ring, one head": {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": True, "model": {"heads": 2}},
    "ring, gathered again": {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": "regather",
                             "model": UNBOUND | {"shared_experts": 1}} | TILED,
    "all-to-all, sequences": {"cp": 2, "tp": 2, "time": 12, "sequence_parallel": True, "cp_by": "all_to_all",
                              "stage": 3, "model": {"tied": False}},
    "by tiles": TILED,
    "by tiles, 3, untied": {"dp": 2, "stage": 3, "micro_batches": 2, "model": {"tied": False}} | TILED,
    "by tiles, ring": {"cp": 2, "time": 12, "model": {"dropout": False}} | TILED,
    "by tiles, checkpoints": {"dp": 2, "checkpointing": True} | TILED,
    "by tiles, experts": {"ep": 2, "model": {"experts": 4, "tied": False}} | TILED,
    "by tiles, tensors": {"tp": 2, "model": {"vocabulary": 301}} | TILED,
    "by tiles, tensors, checkpoints": {"tp": 2, "dp": 2, "checkpointing": True, "model": {"tied": False}} | TILED,
    "by tiles, sequences": {"tp": 2, "time": 10, "sequence_parallel": True, "micro_batches": 2} | TILED,
    "by tiles, sequences, gathered again": {"tp": 4, "time": 12, "sequence_parallel": "regather",
                                            "model": {"tied": False}} | TILED,
    "by tiles, both": {"tp": 2, "dp": 2, "stage": 3} | TILED,
}


LLAMAS = ("3, accumulated", "3, one layer", "tensors, checkpoints", "sequences", "both", "ring, tensors",
          "experts, one each", "experts, 3, divided twice", "experts, shared", "experts, shared, 3, divided",
          "experts, tensors", "experts, sequences, checkpoints",
          "experts over tensors", "experts over tensors, divided twice",
          "experts, no capacity, ring", "by tiles", "by tiles, sequences", "ring, sequences", "ring, one head",
          "ring, gathered again",
          "by tiles, tensors, checkpoints")


OF_X = {"q_rank": None}     # whose queries have no latents of their own
RUNS_OF_LATENTS = {
    "queries of x": {"model": OF_X}, "queries of x, tensors": {"tp": 2, "model": OF_X},
    "queries of x, sequences": {"tp": 4, "time": 12, "sequence_parallel": True, "model": OF_X},
    "queries of x, gathered again": {"tp": 2, "time": 12, "sequence_parallel": "regather", "model": OF_X}}
LATENTS = (*RUNS_OF_LATENTS, "3, accumulated", "3, one layer, checkpoints", "tensors", "tensors, checkpoints",
           "sequences", "sequences, gathered again", "sequences, checkpoints", "ring, tensors",
           "all-to-all, checkpoints", "experts, shared", "experts, gathered again", "ring, sequences",
           "ring, gathered again")


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in RUNS), *(("llama", name) for name in LLAMAS),
                                          *(("deepseek", name) for name in LATENTS)])
def test_what_is_held_and_sent_is_what_the_ledger_counts(family, name):
    job = job_of((RUNS | RUNS_OF_LATENTS)[name], family)
    plan_checks.check_step(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


@pytest.mark.parametrize("more", [{"ep": 2}, {"ep": 2, "tp": 2, "model": {"shared_experts": 1}},
                                  {"ep": 4, "checkpointing": True, "model": {"top_k": 1, "layers": 1}}], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_divided_experts_without_a_capacity_are_on_the_mean_what_is_planned(family, more):
    """Which rank has more of the rows, their choices say. Sent are 8 bytes for each expert of others, and the rows."""
    job = job_of(more | {"model": UNBOUND | more.get("model", {})}, family)
    rank, everyone = rank_of(job), crews.call(CASES + "step", job.ranks, (asdict(job),))
    assert sum(peak["activation"] for _, peak, *_ in everyone) == job.ranks * rank.activations
    counts = [c for c in rank.collectives if c.axis == "ep"][0]
    assert counts.sent == job.model.layers * (1 + job.checkpointing) * 8 * job.model.experts * (1 - 1 / job.ep)
    rows = (sent(rank, "ep") - counts.sent) / (1 - 1 / job.ep)     # if all were sent
    for *_, out, _ in everyone:
        assert 0 < out["ep"] - counts.sent < rows and (out["ep"] - counts.sent) % (4 * job.model.width) == 0


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True, "time": 10}], ids=str)
@pytest.mark.parametrize("family", SIZES)
def test_the_order_of_gradients(family, more):
    """By which buckets are cut: of a norm's weight and bias it doesn't matter which comes first."""
    job = job_of(more, family)
    assert crews.call(CASES + "arrivals", job.ranks, (asdict(job),))[-1] == \
        [p.shape for p in job.arrivals(job.stages_of(0)[0])]


@pytest.mark.parametrize("width, vocabulary, tp", [(78, 82, 1), (96, 300, 1), (104, 411, 2)])
def test_several_buckets(width, vocabulary, tp):
    job = job_of({"dp": 2, "tp": tp, "batch": 4, "model": {"layers": 8, "width": width, "heads": 2, "tied": False,
                                                           "vocabulary": vocabulary}})
    rank = rank_of(job)
    assert sum(c.axis == "dp" for c in rank.collectives) == 2
    for held, _, out, _ in crews.call(CASES + "step", 2 * tp, (asdict(job),))[tp - 1::tp]:
        assert held["parameter"] == rank.parameters and out["dp"] == sent(rank, "dp")


@pytest.mark.parametrize("more", [{}, {"dp": 2, "stage": 3}], ids=str)
def test_what_offload_leaves(more, tmp_path):
    """The optimizer's state in a folder: none of it is held, and the files have what plan says of the host."""
    job = job_of(more | {"offload_optimizer": True})
    rank = rank_of(job)
    for held, *_, away in crews.call(CASES + "step", job.ranks, (asdict(job), str(tmp_path))):
        assert held["optimizer"] == rank.optimizer == 0 and away == rank.host
        assert held["parameter"] == rank.parameters
    assert rank.host == rank_of(replace(job, offload_optimizer=False)).optimizer
    assert rank.memory == rank_of(replace(job, offload_optimizer=False)).memory - rank.host


def test_what_crosses_to_the_host():
    """Beside a GPU, which is a stand-in here, the bytes of a step's copies."""
    rank = rank_of(job_of({"offload_optimizer": True}))
    crossed = plan_cases.crossing(SMALL)
    assert crossed == {"down": 2 * rank.crossing / 3, "up": rank.crossing / 3} and rank.crossing > 12 * SMALL.count
    mixed = rank_of(Job(SMALL, offload_optimizer=True))
    assert mixed.crossing == rank.crossing / 2 and 12 * mixed.crossing / 6 < mixed.host == 12 * rank.parameters / 4
    cut = rank_of(Job(Parameters(6e9), dp=4, batch=4, stage=2, offload_optimizer=True))
    assert (cut.host, cut.crossing) == (12 * 1.5e9, 6 * 1.5e9)


TIED = {"tied": True, "vocabulary": 301}
SHARES, AGAIN = {"sequence_parallel": True}, {"sequence_parallel": "regather"}
PIPELINES = {
    "1f1b": ({"pp": 2, "micro_batches": 4}, [0, 2, 5]),
    "with ddp": ({"pp": 2, "dp": 2, "micro_batches": 3}, [0, 2, 5]),
    "gpipe": ({"pp": 3, "micro_batches": 4, "schedule": "gpipe"}, [0, 1, 3, 5]),
    "interleaved": ({"pp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2}, [0, 1, 2, 3, 5]),
    "zb-h1": ({"pp": 3, "micro_batches": 6, "schedule": "zb-h1"}, [0, 1, 3, 5]),
    "zb-h2, no dropout": ({"pp": 2, "micro_batches": 4, "schedule": "zb-h2", "model": {"dropout": False}}, [0, 2, 5]),
    "zb-h1, uneven": ({"pp": 2, "batch": 14, "micro_batches": 4, "schedule": "zb-h1"}, [0, 2, 5]),
    "zb-h1, sequences": ({"pp": 2, "cp": 2, "time": 12, "micro_batches": 4, "schedule": "zb-h1"}, [0, 2, 5]),
    "zb-v": ({"pp": 2, "micro_batches": 4, "schedule": "zb-v"}, [0, 1, 2, 3, 5]),
    "v-min": ({"pp": 3, "micro_batches": 6, "schedule": "v-min", "model": {"layers": 6}}, [0, 1, 2, 3, 4, 5, 6]),
    "dualpipev": ({"pp": 2, "micro_batches": 5, "schedule": "dualpipev"}, [0, 1, 2, 3, 5]),
    "sequences": ({"pp": 2, "cp": 2, "time": 12, "micro_batches": 3}, [0, 2, 5]),
    "1": ({"pp": 2, "dp": 2, "micro_batches": 3, "stage": 1}, [0, 2, 5]),
    "2, interleaved": ({"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2, "stage": 2},
                       [0, 1, 2, 3, 5]),
    "3, zb-h1": ({"pp": 2, "dp": 2, "micro_batches": 3, "schedule": "zb-h1", "stage": 3}, [0, 2, 5]),
    "by tiles": ({"pp": 2, "micro_batches": 4, "model": TIED} | TILED, [0, 2, 5]),
    "by tiles, zb-h1": ({"pp": 3, "micro_batches": 6, "schedule": "zb-h1"} | TILED, [0, 1, 3, 5]),
    "by tiles, zb-v": ({"pp": 2, "micro_batches": 4, "schedule": "zb-v"} | TILED, [0, 1, 2, 3, 5]),
    "by tiles, sequences": ({"pp": 2, "cp": 2, "time": 12, "micro_batches": 3, "model": TIED} | TILED, [0, 2, 5]),
    "by tiles, 3": ({"pp": 2, "dp": 2, "micro_batches": 3, "stage": 3} | TILED, [0, 2, 5]),
    "tied": ({"pp": 2, "micro_batches": 4, "model": TIED}, [0, 2, 5]),
    "tied, with ddp": ({"pp": 3, "dp": 2, "micro_batches": 3, "model": TIED}, [0, 1, 3, 5]),
    "tied, interleaved": ({"pp": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2, "model": TIED},
                          [0, 1, 2, 3, 5]),
    "tied, zb-v": ({"pp": 2, "micro_batches": 4, "schedule": "zb-v", "model": TIED}, [0, 1, 2, 3, 5]),
    "tied, 1": ({"pp": 2, "dp": 2, "micro_batches": 3, "stage": 1, "model": TIED}, [0, 2, 5]),
    "tied, 3, zb-h1": ({"pp": 2, "dp": 2, "micro_batches": 3, "schedule": "zb-h1", "stage": 3, "model": TIED},
                       [0, 2, 5]),
    "experts": ({"pp": 2, "micro_batches": 3, "model": {"experts": 4}}, [0, 2, 5]),
    "experts, divided, zb-h1": ({"pp": 2, "ep": 2, "micro_batches": 3, "schedule": "zb-h1",
                                 "model": {"experts": 4, "shared_experts": 2, "dropout": False}}, [0, 2, 5]),
    "experts, one each, by tiles, zb-h1": ({"pp": 2, "micro_batches": 3, "schedule": "zb-h1",
                                            "model": {"experts": 3, "top_k": 1, **TIED}} | TILED, [0, 2, 5]),
    "experts, divided, 1": ({"pp": 2, "ep": 2, "stage": 1, "micro_batches": 3, "model": {"experts": 4}}, [0, 2, 5]),
    "experts, a block each, zb-h1": ({"pp": 2, "micro_batches": 3, "schedule": "zb-h1", "model": {
        "layers": 2, "experts": 4, "shared_experts": 2, "dropout": False}}, [0, 1, 2]),
    "experts, by sequence, zb-h1": ({"pp": 2, "tp": 2, "ep": 2, "micro_batches": 3, "schedule": "zb-h1", "model": {
        "experts": 4, "group": "sequence", "dropout": False}}, [0, 2, 5]),
    "experts, sequences, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 3, "schedule": "zb-h1",
                                   "model": {"experts": 4, "shared_experts": 1}} | SHARES, [0, 2, 5]),
    "experts, gathered again, by tiles, zb-h1": (
        {"pp": 2, "tp": 2, "time": 10, "micro_batches": 3, "schedule": "zb-h1",
         "model": {"experts": 4, "shared_experts": 1}} | AGAIN | TILED, [0, 2, 5]),
    "experts, sequences": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 3, "model": {"experts": 4}} | SHARES,
                           [0, 2, 5]),
    "experts, no capacity, zb-h1": ({"pp": 2, "cp": 2, "time": 12, "micro_batches": 3, "schedule": "zb-h1",
                                     "model": UNBOUND | {"shared_experts": 1}}, [0, 2, 5]),
    "tensors": ({"pp": 2, "tp": 2, "micro_batches": 4}, [0, 2, 5]),
    "tensors, zb-h1": ({"pp": 2, "tp": 2, "micro_batches": 4, "schedule": "zb-h1"}, [0, 2, 5]),
    "tensors, zb-v, no dropout": ({"pp": 2, "tp": 2, "micro_batches": 4, "schedule": "zb-v",
                                   "model": {"layers": 8, "dropout": False, **TIED}}, [0, 2, 4, 6, 8]),
    "tensors, by tiles, zb-h2": ({"pp": 2, "tp": 2, "micro_batches": 4, "schedule": "zb-h2"} | TILED, [0, 2, 5]),
    "tensors, 3, zb-h1": ({"pp": 2, "tp": 2, "dp": 2, "stage": 3, "micro_batches": 3, "schedule": "zb-h1"}, [0, 2, 5]),
    "tensors, sequences": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 4} | SHARES, [0, 2, 5]),
    "tensors, sequences, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 4, "schedule": "zb-h1"} | SHARES,
                                  [0, 2, 5]),
    "tensors, gathered again, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 4, "schedule": "zb-h1"} | AGAIN,
                                       [0, 2, 5]),
    "tensors, sequences, by tiles, zb-v": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 4, "schedule": "zb-v",
                                            "model": {"layers": 8}} | SHARES | TILED, [0, 2, 4, 6, 8]),
    "ring, sequences, zb-h1": ({"pp": 2, "cp": 2, "tp": 2, "time": 12, "micro_batches": 3,
                                "schedule": "zb-h1"} | SHARES, [0, 2, 5]),
    "tensors, gathered again, by tiles, zb-h1": ({"pp": 2, "tp": 2, "time": 10, "micro_batches": 4,
                                                  "schedule": "zb-h1"} | AGAIN | TILED, [0, 2, 5]),
}


@pytest.mark.parametrize("family, name", [*(("gpt", name) for name in PIPELINES), ("llama", "zb-h1, uneven"),
                                          ("llama", "sequences"), ("deepseek", "zb-h1, uneven"),
                                          *((family, name) for family in ("llama", "deepseek") for name in (
                                              "tensors, zb-h1", "tensors, gathered again, zb-h1",
                                              "experts, divided, zb-h1", "experts, sequences, zb-h1"))])
def test_what_a_pipeline_holds_and_sends(family, name):
    more, bounds = PIPELINES[name]
    job = job_of(more | {"model": {"layers": 5, "tied": False} | more.get("model", {})}, family)
    plan_checks.check_pipeline(job, crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds)))
