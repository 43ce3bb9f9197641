"""Plans of optimizers against the ledger of small models that they really train: what is held and sent, to the byte."""

import inspect
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from minitorch_dist import __main__, optim
from minitorch_dist.plan import DEVICES, Job, Parameters, plan
from minitorch_dist.plan.optimizers import OPTIMIZERS, ROUNDS, held_by_rank
from minitorch_dist.plan.paper import pieces_of
from tests.crews import crews

from .plan_cases import SIZES, SMALL
from .plan_checks import job_of, rank_of, sent

CASES = "tests.plan_cases:"
AXES = "dp", "shard", "near", "tp", "cp", "ep"
BY_ELEMENT = [name for name, kind in OPTIMIZERS.items() if kind.matrices is None and not kind.norms]
HIDDEN = [name for name, kind in OPTIMIZERS.items() if kind.matrices is not None and kind.matrices.hidden]
RUNS = {    # what is different from float32, a batch of 12 times 11 tokens
    "alone": {}, "ddp": {"dp": 2}, "1": {"dp": 2, "stage": 1}, "2": {"dp": 3, "stage": 2},
    "3": {"dp": 4, "stage": 3, "model": {"tied": False}},
    "3, one layer": {"dp": 2, "stage": 3, "micro_batches": 2, "model": {"layers": 1, "width": 44}},
    "2, two copies": {"dp": 4, "stage": 2, "shard_over": 2, "model": {"width": 44}},
    "tensors": {"tp": 2}, "tensors, untied": {"tp": 4, "model": {"tied": False, "vocabulary": 51}},
    "both": {"dp": 2, "tp": 2, "stage": 3, "model": {"width": 52}},
    "two tokens, 3": {"dp": 3, "stage": 3, "model": {"predict": 2}},
    "ring, 1": {"dp": 2, "cp": 2, "time": 12, "stage": 1},
}
MIXTURE = {"experts": 4, "tied": False}
OF_SOME = [     # what only some optimizers are run with
    *((name, {"dp": 2, "stage": 1} | more) for name in BY_ELEMENT for more in (
        {}, *[{"state_bits": 8}] * OPTIMIZERS[name].eight_bits)),
    ("lamb", {"dp": 2, "stage": 3, "state_bits": 8}),
    *((name, {"ep": 2, "dp": 2, "stage": 2, "model": MIXTURE}) for name in ("muon", "normuon")),
    ("muon", {"ep": 2, "tp": 2, "stage": 3, "model": MIXTURE | {"shared_experts": 1}}),
    ("dion", {"ep": 2, "model": MIXTURE}), ("dion", {"dp": 2, "model": {"width": 44}, "fraction": 0.6}),
    *((name, {"dp": 2, "stage": 3, "model": MIXTURE}) for name in ("adafactor", "lamb")),
    ("adafactor", {"tp": 2, "dp": 2, "stage": 1, "model": MIXTURE}),
    ("muon", {"dp": 4, "stage": 3, "reshard_after_forward": 2, "param_bits": 8}),
]


def job_for(name, more, family="gpt"):
    """A small Job with this optimizer, as near to these as it takes them. Dion2 takes all lines: which they are makes
    no difference."""
    if name == "dion":
        more = more | {"stage": 0, "shard_over": None, "dp": more.get("dp", 1) * more.get("tp", 1), "tp": 1}
    return job_of({"fraction": 1.0 if name == "dion2" else None, **more, "optimizer": name}, family)


def check(job, everyone):
    """everyone: what plan_cases.step gave, by rank."""
    rank, by_rank = rank_of(job), held_by_rank(job, pieces_of(job, job.stages_of(0)))
    found = [held["optimizer"] for held, *_ in everyone][job.tp - 1::job.tp]     # those of the largest parts
    assert found == [by_rank[k % len(by_rank)] for k in range(len(found))] and rank.optimizer == max(found)
    for axis in AXES:
        counted = [out[axis] for _, _, out, _ in everyone]
        assert sum(counted) == pytest.approx(job.ranks * sent(rank, axis), rel=1e-12), axis


@pytest.mark.parametrize("name, more", [
    *((name, more) for name in OPTIMIZERS if name not in BY_ELEMENT for more in RUNS.values()), *OF_SOME], ids=str)
def test_what_is_held_and_sent_is_what_the_ledger_counts(name, more):
    job = job_for(name, more)
    check(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("name, more", [
    ("muon", {"tp": 2}), ("normuon", {"dp": 2, "tp": 2, "stage": 3}), ("adafactor", {"dp": 2, "tp": 2, "stage": 1}),
    ("dion", {"dp": 2}), ("lamb", {"tp": 2, "dp": 2, "stage": 3})], ids=str)
def test_the_same_of_other_families(family, name, more):
    """Some of whose matrices are whole where tensor parallelism cuts others."""
    job = job_for(name, more, family)
    check(job, crews.call(CASES + "step", job.ranks, (asdict(job),)))


@pytest.mark.parametrize("name, more, bounds", [
    *((name, {"pp": 2, "dp": 2, "stage": 2}, [0, 2, 5]) for name in ("muon", "normuon", "adafactor", "lamb")),
    ("muon", {"pp": 2, "tp": 2}, [0, 2, 5]), ("dion", {"pp": 2, "dp": 2}, [0, 2, 5]),
    ("dion2", {"pp": 2, "dp": 2, "stage": 1, "schedule": "zb-v", "model": {"tied": True}}, [0, 1, 2, 3, 5])], ids=str)
def test_what_a_pipeline_holds_and_sends(name, more, bounds):
    job = job_for(name, more | {"micro_batches": 4, "model": {"layers": 5, "tied": False} | more.get("model", {})})
    everyone = crews.call(CASES + "pipeline", job.ranks, (asdict(job), bounds))
    for place in range(job.pp):
        rank, mine = rank_of(job, place), [it for k, it in enumerate(everyone) if k // job.tp % job.pp == place]
        assert max(held["optimizer"] for held, *_ in mine) == rank.optimizer
        for axis in ("dp", "tp"):
            counted = sum(n for *_, out in mine for (each, _), n in out.items() if each.partition(",")[0] == axis)
            more = 8 * (axis == "dp" and job.dp > 1)        # the loss
            assert counted == pytest.approx(len(mine) * (sent(rank, axis) + more), rel=1e-12), axis


def test_lines_of_dion2_are_sent_as_if_all_ranks_had_as_many():
    """What comes to the owners and goes back is nearly that; the means of whole lines are exact."""
    found = {}
    for fraction in (0.15, 0.3):
        job = job_for("dion2", {"dp": 3, "stage": 2, "fraction": fraction})
        rank, everyone = rank_of(job), crews.call(CASES + "step", job.ranks, (asdict(job),))
        found[fraction] = job.ranks * sum(c.sent for c in rank.collectives if c.op == "all_to_all")
        counted = sum(out["dp"] for _, _, out, _ in everyone)
        assert abs(counted - job.ranks * sent(rank, "dp")) < 0.01 * found[fraction]
    assert found[0.15] < 0.6 * found[0.3]


@pytest.mark.parametrize("name, more", [
    *((name, more) for name in ("muon", "dion2") for more in (
        {}, {"dp": 2}, {"dp": 3, "stage": 1}, {"tp": 2}, {"dp": 2, "tp": 2, "stage": 3, "model": {"width": 52}})),
    ("dion2", {"dp": 2, "stage": 2, "fraction": 0.3}), ("normuon", {"dp": 4, "stage": 3}), ("dion", {}),
    ("dion", {"fraction": 0.6})], ids=str)
@pytest.mark.parametrize("family", ["gpt", "deepseek"])
def test_the_optimizers_products_are_those_of_the_busiest_rank(family, name, more):
    job = job_for(name, more, family)
    counted = max(crews.call(CASES + "products", job.ranks, (asdict(job),)))
    if name == "dion":      # P is made orthonormal by LAPACK, by reflections: 2 m r² - 2/3 r³ for R, as many for Q
        fraction = job.fraction or 0.25
        shapes = [shape for name, shape in job.model.whole if len(shape) == 2 and name.startswith(("attention", "mlp"))]
        for rows, columns in shapes:
            r = min(min(rows, columns), max(1, -(-round(1000 * fraction) * min(rows, columns) // 1000)))
            counted += 2 * (2 * rows * r ** 2 - 2 / 3 * r ** 3)
    assert rank_of(job).products == pytest.approx(counted, rel=1e-12) and counted > 0


def test_the_rounds_are_those_that_muon_makes():
    for kind in (optim.Muon, optim.NorMuon, optim.Dion2):
        assert inspect.signature(kind).parameters["ns_steps"].default == ROUNDS
    for kind, name, fraction in ((optim.Dion2, "dion2", "fraction"), (optim.Dion, "dion", "rank_fraction")):
        assert inspect.signature(kind).parameters[fraction].default == OPTIMIZERS[name].matrices.fraction


def test_seconds_of_the_update():
    """Of products in float32, whatever the model's are made in."""
    device = DEVICES["H100"]
    for precision in ("mixed", "float32"):
        found = plan(Job(SMALL, optimizer="muon", precision=precision), device)
        assert found.seconds.update == found.ranks[0].products / 67e12 > 0
        assert found.seconds.step == pytest.approx(found.seconds.compute + found.seconds.update)
    assert plan(Job(SMALL), device).seconds.update == 0


@pytest.mark.parametrize("name, hidden, others", [
    ("adam", 12, 12), ("sgd", 8, 8), ("lion", 8, 8), ("schedule-free", 12, 12), ("lamb", 12, 12), ("adafactor", 4, 8),
    ("muon", 8, 12), ("normuon", 8, 12), ("dion2", 8, 12)])
def test_bytes_of_a_large_model_beside_a_copy_in_float32(name, hidden, others):
    """A float32 copy, and 4 bytes for each number: nearly, for padding and vectors are small there."""
    model = replace(SIZES["gpt"], layers=8, width=512, heads=8, vocabulary=4096)
    matrices = 8 * 12 * 512 ** 2
    if name == "adafactor":
        matrices += (4096 + 16) * 512
    found = plan(Job(model, dp=8, batch=8, stage=1, optimizer=name), DEVICES["H100"]).ranks[0]
    wanted = (hidden * matrices + others * (model.count - matrices)) / 8
    assert wanted < found.optimizer < 1.1 * wanted


# ---------------------------------------------------------------- the command

SIZES_OF_ONE = "--layers 3 --width 36 --heads 6 --vocabulary 50 --context 16"


def said(capsys, line):
    status = __main__.main(["plan", *line.split()])
    return status, *capsys.readouterr()


def test_the_command(capsys):
    status, out, err = said(capsys, "--devices 4 --optimizer muon --precision float32 " + SIZES_OF_ONE)
    hidden, others = 3 * 12 * 36 ** 2, 50 * 36 + 16 * 36 + 3 * (13 * 36) + 2 * 36
    assert (status, err) == (0, "")
    assert f"optimizer: Muon of the blocks' matrices, {hidden:,} parameters; AdamW of the others, {others:,}\n" in out
    assert "float32: 4 + 4 + 8 bytes per parameter, 4 of the last in Muon's matrices\n" in out
    assert "s update" in out and "Update: the optimizer's products" in out and "ZeRO 3" in out
    out = said(capsys, "--devices 4 --optimizer dion --fraction 0.5 " + SIZES_OF_ONE)[1]
    assert "0, DDP" in out and "ZeRO" not in out and "Dion of the blocks' matrices" in out
    out = said(capsys, "--devices 4 --optimizer lion --parameters 1e9")[1]
    assert "optimizer: Lion\n" in out and "2 + 2 + 8 bytes per parameter\n" in out and "update" not in out
    assert "optimizer: " not in said(capsys, "--devices 4 --parameters 1e9")[1]
    assert "if each rank had as many" in said(capsys, "--devices 4 --optimizer dion2 " + SIZES_OF_ONE)[1]
    out = said(capsys, "--devices 4 --meshes --batch 8 --optimizer dion " + SIZES_OF_ONE)[1]
    assert "Dion of" in out and "0, DDP" in out and "ZeRO " not in out.partition("ways, of which")[0]


def test_what_the_page_shows(capsys):
    page = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    _, _, shown = page.partition("all, `plan --optimizer` says:\n\n```\n$ python -m minitorch_dist ")
    command, _, lines = shown.partition("```")[0].replace("\\\n", " ").partition("\n")
    lines = [line for line in lines.splitlines() if line != "…"]
    status, out, _ = said(capsys, command.removeprefix("plan "))
    assert status == 0 and len(lines) == 7 and [line for line in out.splitlines() if line in lines] == lines


MISTAKES = {
    "--optimizer adagrad --parameters 1e9": "--optimizer adagrad: take one of adam, adamw, sgd",
    "--optimizer muon --parameters 1e9": "of a model of which only the number of parameters is known, and not its matr",
    "--optimizer lamb --parameters 1e9": "--optimizer lamb of a model of which",
    "--optimizer muon --state-bits 8 " + SIZES_OF_ONE: "--state-bits 8 with --optimizer muon, which has none of so few",
    "--optimizer schedule-free --state-bits 8 --parameters 1e9": "take --optimizer adam, adamw, sgd, lion, lamb",
    "--optimizer muon --lora-rank 2 " + SIZES_OF_ONE: "--lora-rank 2 with --optimizer muon, whose steps aren't",
    "--optimizer lamb --offload-optimizer " + SIZES_OF_ONE: "--offload-optimizer with --optimizer lamb, whose steps",
    "--optimizer dion --stage 1 " + SIZES_OF_ONE: "dion with stage=1, tp=1: its steps are of whole matrices",
    "--optimizer dion --tp 2 " + SIZES_OF_ONE: "dion with stage=0, tp=2: its steps are of whole matrices",
    "--optimizer muon --fraction 0.5 " + SIZES_OF_ONE: "--fraction 0.5 with --optimizer muon, whose steps are made of",
    "--optimizer dion --fraction 1.5 " + SIZES_OF_ONE: "--fraction 1.5: must be more than 0, at most 1",
    "--optimizer dion2 --fraction nan " + SIZES_OF_ONE: "--fraction nan: must be more than 0, at most 1",
    "--optimizer adafactor --experts 4 --ep 2 " + SIZES_OF_ONE: "ep=2 ranks that divide experts with --optimizer adaf",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told_in_one_line(capsys, line):
    status, out, err = said(capsys, "--devices 2 " + line)
    assert (status, out) == (2, "") and MISTAKES[line] in err, err
    assert err.startswith("minitorch-dist plan: ") and err.count("\n") == 1


def test_offload_of_other_optimizers_is_counted():
    """The elements that cross are as many as Adam's."""
    for stage in (0, 2):
        adam, lion = (plan(Job(Parameters(6e9), dp=4, batch=4, stage=stage, offload_optimizer=True, optimizer=name),
                           DEVICES["V100"]).ranks[0] for name in ("adam", "lion"))
        assert lion.crossing == adam.crossing and lion.host == adam.host * 8 / 12
