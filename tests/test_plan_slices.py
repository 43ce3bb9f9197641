"""Plans of pipelines whose sequences come in slices, against the ledger of small models, to the byte."""

from dataclasses import asdict

import pytest

from minitorch_dist.__main__ import main
from minitorch_dist.parallel.pipelines.schedules import play
from minitorch_dist.plan import GPT, Job, plan
from tests.crews import crews

from .plan_checks import V100, job_of, rank_of, sent

CASES = "tests.plan_cases:"
CHECKPOINTS = {"checkpointing": True}
RUNS = {    # what is different from 3 micro-batches of 4 samples on 2 stages, in 3 slices of 12 positions; the family
    "plain": ({}, "gpt"), "by tiles": ({"tiled_loss": True}, "gpt"),
    "no dropout": ({"model": {"dropout": False}}, "gpt"), "of 4, uneven": ({"slices": 4, "time": 11}, "llama"),
    "gpipe": ({"schedule": "gpipe"}, "llama"), "of 12": ({"slices": 12}, "llama"),
    "tensors": ({"tp": 2}, "gpt"), "tensors, sequences": ({"tp": 2, "sequence_parallel": True}, "llama"),
    "gathered again": ({"tp": 2, "sequence_parallel": "regather"}, "gpt"),
    "grouped": ({"tp": 2, "model": {"kv_heads": 2}}, "llama"), "norms": ({"model": {"qk_norm": True}}, "gpt"),
    "norms, turned": ({"model": {"qk_norm": True}}, "llama"), "latents": ({}, "deepseek"),
    "latents, tensors": ({"tp": 2}, "deepseek"), "2": ({"dp": 2, "stage": 2}, "gpt"), "3 stages": ({"pp": 3}, "gpt"),
    "window": ({"model": {"window": 3}}, "gpt"), "windows": ({"model": {"window": (5, None)}}, "llama"),
    "long window": ({"time": 150, "model": {"window": 20, "context": 150}}, "gpt"),
    "blocks": ({"model": {"window": "2x3"}}, "llama"), "sinks": ({"model": {"sinks": True}}, "gpt"),
    "gated": ({"model": {"gated": True}}, "gpt"), "gated, turned": ({"model": {"gated": True}}, "llama"),
    "gated, norms": ({"model": {"gated": True, "qk_norm": True}}, "gpt"),
    "gated, norms, turned": ({"model": {"gated": True, "qk_norm": True}}, "llama"),
    "gated, checkpoints": ({"model": {"gated": True}} | CHECKPOINTS, "gpt"),
    "checkpoints": (CHECKPOINTS, "gpt"), "checkpoints, of 12": ({"slices": 12} | CHECKPOINTS, "llama"),
    "checkpoints, gpipe": ({"schedule": "gpipe"} | CHECKPOINTS, "deepseek"),
    "checkpoints, tensors": ({"tp": 2} | CHECKPOINTS, "gpt"),
}


# Of a stage fewer pieces than it has at most, where it holds most.
FEWER = {("checkpoints, gpipe", 0): 1, ("checkpoints, of 12", 1): 1}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_held_and_sent(name):
    more, family = RUNS[name]
    more = {"pp": 2, "slices": 3, "time": 12, "micro_batches": 3, "batch": 12} | more
    more["model"] = {"layers": 5, "tied": False} | more.get("model", {})
    job = job_of(more, family)
    bounds = [0, 2, 5] if job.pp == 2 else [0, 1, 3, 5]
    for number, (held, peak, out) in enumerate(crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds))):
        place = number // job.tp % job.pp
        rank = rank_of(job, place)
        assert out["pp", "send"] == sent(rank, "pp")
        if job.tp > 1:
            assert sum(n for (axis, _), n in out.items() if axis == "tp") == sent(rank, "tp")
        # The first stage keeps tokens as they are, of which the whole batch is there. The last one's labels are copies,
        # but for those of slices of one position.
        pieces = play(job.steps).live[place] - FEWER.get((name, place), 0)
        through = job.samples * job.time - pieces * job.pieces[0] * job.parts[0].length
        stay = job.tp == 1 and (place == 0 or place == job.pp - 1 and job.parts[0].length == 1)
        assert peak["activation"] + peak["parameter"] - held["parameter"] == rank.activations + 8 * through * stay


def big(**more):
    """Narayanan's GPT of 530 billion parameters, but for the length of its sequences."""
    return Job(GPT(105, 20480, 128, 51200, 32768), **{"tp": 8, "pp": 35, "sequence_parallel": "regather",
                                                      "time": 32768, "batch": 8, "micro_batches": 8} | more)


def test_long_sequences_in_few_micro_batches():
    """Of 8 micro-batches 35 ranks wait for 34/42 of the time; in 16 slices each for 34/162. What a rank keeps of one is
    34·s·b·h + 5·a·s²·b bytes a block in Korthikanti's count, of which s² is what there is to look at in each slice."""
    whole, sliced = plan(big(), V100), plan(big(slices=16), V100)
    assert whole.bubble == pytest.approx(34 / 42) and sliced.bubble == pytest.approx(34 / 162)
    assert sliced.fullest.activations < 0.5 * whole.fullest.activations
    time, each = 32768, 2048
    for slices, pairs in ((1, time ** 2), (16, each * sum(range(each, time + 1, each)))):
        rank = rank_of(big(slices=slices, batch=1, micro_batches=1), place=9)
        assert rank.activations == 3 * (34 * time * 20480 + 5 * 128 * pairs) / 8


def test_flops_are_those_of_whole_sequences_but_for_scores_that_nobody_looks_at():
    """A whole sequence's scores are made with all keys, a slice's with those up to its end."""
    whole, sliced = (job_of({"pp": 2, "slices": n, "time": 12, "micro_batches": 3, "model": {"layers": 4}})
                     for n in (1, 4))
    per_pair = 3 * 2 * 2 * whole.model.width
    unseen = 12 ** 2 - 3 * (3 + 6 + 9 + 12)
    for place in range(2):
        assert rank_of(whole, place).flops - rank_of(sliced, place).flops == 12 * 2 * per_pair * unseen


def test_more_messages_of_fewer_bytes():
    whole, sliced = (rank_of(job_of({"pp": 2, "tp": 2, "slices": n, "time": 12, "micro_batches": 3,
                                     "model": {"layers": 4}})) for n in (1, 4))
    for one, other in zip(whole.collectives, sliced.collectives, strict=True):
        assert other.sent == one.sent
        if one.axis == "tp" or one.op == "send":
            assert other.count == 4 * one.count and other.nbytes == one.nbytes / 4


@pytest.mark.parametrize("more, words", [
    ({"pp": 1}, "--slices 3 with --pp 1 --schedule 1f1b: plan has tables"),
    ({"schedule": "zb-h1"}, "whose backward is uncut: take --pp 2 or more, and --schedule gpipe or 1f1b or"),
    ({"slices": 0}, "slices is 0"), ({"time": 2}, "--slices 3 of 2 positions"),
    ({"tp": 2, "time": 10, "sequence_parallel": True}, "--sequence-length must be a multiple of 6"),
    ({"cp": 2, "time": 12}, "--slices 3 with --cp"), ({"model": {"experts": 4}}, "--experts, whose loss is of all"),
    ({"model": {"attention_dropout": True}}, "--attention-dropout"), ({"model": {"predict": 2}}, "--predict"),
    ({"lora_rank": 2}, "--lora-rank"), ({"model": {"window": ("linear", None)}}, "--window linear,all"),
    ({"schedule": "interleaved", "chunks": 2, "micro_batches": 1, "model": {"layers": 4}}, "pp=2 must divide")],
    ids=str)
def test_what_cannot_be(more, words):
    with pytest.raises(ValueError, match=words):
        job_of({"pp": 2, "slices": 3, "micro_batches": 3} | more)


def test_the_command(capsys):
    shape = ["plan", "--layers", "32", "--width", "4096", "--heads", "32", "--vocabulary", "32000", "--context",
             "131072", "--family", "llama", "--devices", "64", "--pp", "8", "--tp", "8", "--micro-batches", "4"]
    assert main([*shape, "--slices", "16"]) == 0
    assert "4 micro-batches in 16 slices, bubble 9.9 %" in capsys.readouterr().out
    assert main(["plan", "--parameters", "7e9", "--devices", "8", "--slices", "2"]) == 2
    assert "--slices 2 with --pp 1" in capsys.readouterr().err
    assert main([*shape[:13], "--devices", "8", "--meshes", "--batch", "8", "--slices", "2"]) == 2
    assert "leave --slices out" in capsys.readouterr().err
