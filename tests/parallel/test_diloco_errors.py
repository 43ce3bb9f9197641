"""DiLoCo where something is wrong: workers that diverge or disagree, and what is refused."""

import pytest

from minitorch_dist import comm, nn, optim
from minitorch_dist.parallel import fully_shard
from minitorch_dist.parallel.encodings import LowRank, RandomMask, Whole
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import diloco_cases as cases

CASES = "tests.parallel.diloco_cases:"


@pytest.mark.parametrize(("encoding", "overlap"), [(None, 0), (None, 1), ("4 bits", 0)])
def test_a_worker_that_diverges_is_named_on_all(encoding, overlap):
    for told, steps, unchanged in crews.call(CASES + "diverged", 3, (encoding, overlap)):
        assert "after step 6 worker 1 sent fragment 0 with values that aren't finite" in told
        assert steps == 6 + overlap and unchanged


@pytest.mark.parametrize(("inside", "workers"), [(1, 2), (3, 2), ("tp", 2), ("tp in ddp", 1)])
def test_what_diverges_on_one_rank_of_a_worker_is_told_to_all(inside, workers):
    """Each of its ranks meets other ranks of the other workers."""
    encoding = "4 bits" if inside == 3 else None
    for told, unchanged in crews.call(CASES + "told_inside", 4, (inside, workers, "inf", encoding)):
        assert f"worker {workers - 1} sent fragment 0 with values that aren't finite" in told and unchanged


@pytest.mark.parametrize(("inside", "workers"), [("ddp", 2), ("tp in ddp", 1)])
def test_ranks_of_a_worker_that_count_otherwise_are_told_so_on_all(inside, workers):
    for told, unchanged in crews.call(CASES + "told_inside", 4, (inside, workers, "count")):
        assert f"the ranks of worker {workers - 1} have given step() other counts" in told and unchanged


def test_workers_that_disagree_are_told_so_on_all_ranks():
    for n in (2, 4):
        for said in crews.call(CASES + "disagreeing", n):
            assert len(said) == (8 if n == 2 else 7)
            assert all(name in text and "DiLoCo" in text for name, text in said.items()), said
    assert all("every=2" in text and "every=3" in text for text in crews.call(CASES + "disagreeing_inside", 4))


def test_workers_out_of_step_are_told_so():
    for said in ranks.call(CASES + "out_of_step", 2):
        assert "the ranks of 'world' don't agree" in said


def test_what_was_wrapped_wrongly():
    for said in crews.call(CASES + "wrapped_wrongly", 2):
        assert "ranks [0, 1], which are workers of their own" in said["over workers"] and said["alone"] is None
        assert "4 tensors that are no parameters of this model, the first of shape (11, 7)" in said["another's"]
        assert "doesn't update 0.bias, 2.weight, 2.bias" in said["too few"]
        assert "1 BatchNorm" in said["BatchNorm"] and "float32, float64" in said["dtypes"]


@pytest.mark.parametrize(("settings", "words"), [
    ({"outer": optim.LARS}, "DiLoCo: LARS makes an element's step of all"),
    ({"every": 0}, "every=0"), ({"every": 2.5}, "every=2.5"),
    ({"every": float("inf")}, "every=inf"), ({"every": float("nan")}, "every=nan"), ({"fragments": 0}, "fragments=0"),
    ({"every": 2, "fragments": 3}, "fragments=3.*every=2"), ({"fragments": 3}, "fragments=3 of a model of 2 units"),
    ({"fragments": 1.5}, "fragments=1.5"), ({"overlap": float("inf")}, "overlap=inf"),
    ({"overlap": float("nan")}, "overlap=nan"), ({"overlap": 4}, "overlap=4.*every=4"),
    ({"overlap": -1}, "overlap=-1"), ({"mix": 0.0}, "mix=0.0"),
    ({"mix": 1.1}, "mix=1.1"), ({"pattern": "random"}, "pattern='random'"),
    ({"encoding": LowRank(2)}, "LowRank"), ({"encoding": RandomMask(0.5)}, "RandomMask"),
    ({"encoding": type("Mine", (Whole,), {"project": LowRank.project})()}, "Mine|Whole")], ids=str)
def test_settings_that_mean_nothing_are_refused(settings, words):
    model = cases.build()
    with pytest.raises(ValueError, match=words):
        DiLoCo(model, cases.adamw(model), **{"every": 4} | settings)


def test_modules_that_only_hold_others_may_be_fragments():
    """Nothing is gathered when they are called: they need not be."""
    heads = nn.ModuleList(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 1)]) for _ in range(3))
    diloco = DiLoCo(heads, optim.SGD(heads.parameters(), lr=0.1), every=2, fragments=2)
    found = [[name.partition(".")[0] for name in f.names] for f in diloco.fragments]
    assert found == [["0"] * 4 + ["2"] * 4, ["1"] * 4]


def test_a_count_that_means_nothing_is_refused():
    model = cases.build()
    diloco = DiLoCo(model, optim.SGD(model.parameters()), every=4)
    for count in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"count={count}"):
            diloco.step(count)
    assert diloco.steps == 0


def test_a_parameter_frozen_after_the_optimizer_was_made_is_named():
    model = cases.build()
    inner = cases.adamw(model)
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="updates 0.bias, frozen since it was made"):
        DiLoCo(model, inner, every=4)


def test_values_that_are_gathered_already_cant_become_the_common_ones():
    model = fully_shard(cases.build(), comm.world(), stage=3)
    diloco = DiLoCo(model, cases.adamw(model), comm.world(), every=4)
    with model.gathered(), pytest.raises(RuntimeError, match="DiLoCo.common inside gathered"), diloco.common():
        pass
    before = model.piece_of[id(next(model.module.parameters()))].numpy().copy()
    cases.fit(diloco, range(1, 3), 0)
    with diloco.common(), model.gathered() as whole:
        assert (next(whole.parameters()).numpy().reshape(-1) == before.reshape(-1)[:77]).all()


def test_the_end_isnt_inside_common():
    model = cases.build()
    diloco = DiLoCo(model, cases.adamw(model), every=4)
    with diloco.common(), pytest.raises(RuntimeError, match="DiLoCo.finish inside common"):
        diloco.finish()
