"""Averages of weights against closed forms; soups whose scores are known; on two ranks the same as on one."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, nn, optim, training
from minitorch_dist.compress import lora, soup
from minitorch_dist.parallel import fully_shard
from tests.crews import crews

from . import lora_cases
from . import prune_cases as cases

CASES = "tests.compress.prune_cases:"


def states(count, dtype=np.float32):
    random = np.random.default_rng(0)
    return [{"w": random.standard_normal((3, 4)).astype(dtype), "b": random.standard_normal(5)} for _ in range(count)]


def by_number(table):
    """score(state) of soups of the states {"w": [2**i]}: table {set of ingredients: score}."""
    def score(state):
        for ingredients, value in table.items():
            if state["w"][0] == sum(2.0 ** i for i in ingredients) / len(ingredients):
                return value
        raise AssertionError(f"nobody asked for the average {state['w']}")
    return score


def numbered(count):
    return [{"w": np.array([2.0 ** i])} for i in range(count)]


# ---------------------------------------------------------------- soups

@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_uniform_soup_is_the_mean(dtype):
    some = states(7, dtype)
    got = soup.uniform_soup(some)
    for name in ("w", "b"):
        wanted = sum(s[name].astype(np.longdouble) for s in some) / 7
        assert got[name].dtype == some[0][name].dtype
        np.testing.assert_allclose(got[name], wanted.astype(np.float64), rtol=0, atol=np.finfo(got[name].dtype).eps)
    alone = soup.uniform_soup(some[:1])
    assert all((alone[n] == some[0][n]).all() for n in alone) and alone["w"] is not some[0]["w"]


def test_in_half_precision_a_sum_does_not_overflow():
    assert soup.uniform_soup([{"w": np.full(2, 60000, np.float16)}] * 3)["w"].tolist() == [60000, 60000]


def test_whole_numbers_must_be_equal():
    equal = [{"w": np.zeros(2), "used": np.array(3)}] * 2
    assert soup.uniform_soup(equal)["used"] == 3
    with pytest.raises(ValueError, match=r"used \(int64\) differs between numbers 0 and 1"):
        soup.uniform_soup([equal[0], {"w": np.zeros(2), "used": np.array(4)}])


@pytest.mark.parametrize(("other", "words"), [
    ({"w": np.zeros((3, 5), np.float32), "b": np.zeros(5)},
     r"w is float32 of shape \(3, 4\) in number 0, float32 of shape \(3, 5\) in number 2"),
    ({"w": np.zeros((3, 4)), "b": np.zeros(5)}, r"w is float32 .* float64"),
    ({"w": np.zeros((3, 4), np.float32)}, "b is in number 0 and not in number 2"),
    ({"w": np.zeros((3, 4), np.float32), "b": np.zeros(5), "c": np.zeros(1)}, "c is in number 2 and not in number 0")],
    ids=["shape", "dtype", "missing", "more"])
def test_models_that_differ_raise(other, words):
    for make in (soup.uniform_soup, lambda s: soup.greedy_soup(s, lambda _: 0.0)):
        with pytest.raises(ValueError, match=words):
            make([*states(2), other])
        with pytest.raises(ValueError, match="at least one model"):
            make([])


def test_adapters_are_merged_first_or_have_one_matrix_in_common():
    """The mean of products is no product of means, but where one factor is the same in all."""
    def adapted(count, common="none"):
        models = [lora_cases.model() for _ in range(count)]
        for number, model in enumerate(models):
            with mt.no_grad():
                for name, p in model.named_parameters():
                    if p.requires_grad and not name.endswith(common):
                        p[...] = np.random.default_rng([number, p.size]).standard_normal(p.shape)
        return models
    models = adapted(3)
    for make in (soup.uniform_soup, lambda given: soup.greedy_soup(given, lambda state: 0.0)):
        with pytest.raises(ValueError, match=r"lora_A and lora_B of 0 both differ.*lora.merge\(model\)"):
            make(models)

    def product(model):
        return [m.adapter.scale * m.lora_B.numpy() @ m.lora_A.numpy() for m in model.modules() if hasattr(m, "lora_A")]
    plain = lora_cases.plain().state_dict()
    mean = [sum(each) / 3 for each in zip(*map(product, models), strict=True)]
    merged = soup.uniform_soup([lora.merge(model) for model in models])
    for path, added in zip(("0", "2", "4", "6"), mean, strict=True):
        np.testing.assert_allclose(merged[f"{path}.weight"], plain[f"{path}.weight"] + added, rtol=1e-12, atol=1e-12)
    for common in ("lora_A", "lora_B"):
        alike = adapted(3, common)
        wanted = [sum(each) / 3 for each in zip(*map(product, alike), strict=True)]
        kept = lora_cases.model()
        kept.load_state_dict(soup.uniform_soup(alike))
        for found, value in zip(product(kept), wanted, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-12)


def test_adapters_of_other_scales_have_no_mean():
    def model(alpha, **options):
        return lora.add(nn.Sequential(nn.Linear(5, 4)), 4, alpha, targets=["0"], **options)
    with pytest.raises(ValueError, match="0 has rank=4, alpha=8 in number 1, rank=4, alpha=2 in number 0.*lora.merge"):
        soup.uniform_soup(iter([model(2), model(8)]))


def test_the_greedy_soup_takes_what_does_not_hurt():
    """Best first: 2 alone 0.9; with 0 worse: left out; with 1 better; then 3 as good: it stays."""
    score = by_number({(0,): 0.8, (1,): 0.7, (2,): 0.9, (3,): 0.1, (0, 2): 0.85, (1, 2): 0.95, (1, 2, 3): 0.95})
    found = soup.greedy_soup(numbered(4), score)
    assert found.ingredients == [2, 1, 3] and found.score == 0.95 and found.scores == [0.8, 0.7, 0.9, 0.1]
    assert found.state["w"] == (4 + 2 + 8) / 3
    assert found.tried == [(2, 0.9, True), (0, 0.85, False), (1, 0.95, True), (3, 0.95, True)]
    assert [line.split()[-1] for line in str(found).splitlines()[1:]] == ["stays", "out", "stays", "stays"]
    assert "    2    0.9000       0.9000  stays" in str(found)      # as many digits in each row


def test_a_soup_has_arrays_of_its_own():
    states = [{"w": np.full(3, v)} for v in (1.0, 5.0)]
    found = soup.greedy_soup(states, lambda state: -abs(state["w"][0] - 5.0))
    assert found.ingredients == [1] and not np.shares_memory(found.state["w"], states[1]["w"])


def test_among_equals_the_earlier_comes_first():
    asked = []

    def score(state):
        asked.append(float(state["w"][0]))
        return 0.5 if state["w"][0] in (1, 2, 4) else 0.4
    found = soup.greedy_soup(numbered(3), score)
    assert found.ingredients == [0] and asked == [1, 2, 4, (1 + 2) / 2, (1 + 4) / 2]


def test_the_greedy_soup_is_never_worse_than_the_best():
    """Of random landscapes; and the score it names is that of what it gives."""
    random = np.random.default_rng(3)
    for _ in range(60):
        centre = random.standard_normal(4)
        some = [{"w": centre + random.standard_normal(4) * random.choice([0.1, 3])} for _ in range(5)]
        bumps = random.standard_normal((3, 4))

        def score(state, centre=centre, bumps=bumps):
            w = state["w"]
            return round(float(-((w - centre) ** 2).sum() + np.cos(4 * bumps @ w).sum()), 1)
        found = soup.greedy_soup(some, score)
        assert found.score >= max(found.scores) and score(found.state) == found.score
        np.testing.assert_allclose(found.state["w"], np.mean([some[i]["w"] for i in found.ingredients], 0), rtol=1e-12)


def test_a_score_that_is_nan_raises():
    with pytest.raises(ValueError, match="score of model 1 is NaN"):
        soup.greedy_soup(numbered(2), lambda s: float("nan") if s["w"][0] == 2 else 1.0)


def test_a_soup_of_files(tmp_path):
    """A module, a state dict, a file of parameters, a checkpoint; and one of two ranks that had parts."""
    nets = []
    for i in range(3):
        mt.manual_seed(i)
        nets.append(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3)))
    training.save_parameters(tmp_path / "parameters.npz", nets[1])
    checkpoints.save(tmp_path / "whole", nets[2], optim.Adam(nets[2].parameters()))
    sources = [nets[0], nets[0].state_dict(), tmp_path / "parameters.npz", tmp_path / "whole"]
    got = soup.uniform_soup(sources)
    for name in got:
        wanted = (2 * nets[0].state_dict()[name] + nets[1].state_dict()[name] + nets[2].state_dict()[name]) / 4
        np.testing.assert_allclose(got[name], wanted, rtol=0, atol=1e-7)
    crews.call(CASES + "gradual", 2, ("stage 3", 0, 2, tmp_path / "cut"))
    read, wanted = soup.read_states([tmp_path / "cut" / "step-00000002"])[0], cases.gradual(steps=2)[1]
    assert sorted(read) == sorted(wanted)
    for name in wanted:
        np.testing.assert_allclose(read[name], wanted[name], rtol=0, atol=1e-10)
    file = tmp_path / "whole" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(checkpoints.CheckpointError, match="CRC-32"):
        soup.uniform_soup(sources)


# ---------------------------------------------------------------- averages over a training

def moving(values):
    """A model of one weight (and a float buffer, which is ten times that) set to each value in turn."""
    model = nn.Module()
    model.weight = nn.Parameter(np.zeros(3))
    model.register_buffer("statistic", np.zeros(3))
    model.register_buffer("used", np.array(0))
    for value in values:
        with mt.no_grad():
            model.weight[...] = value
        model.statistic[...] = 10 * value
        yield model


VALUES = np.random.default_rng(5).standard_normal((8, 3))


def test_the_exponential_average_is_its_sum():
    """d^n v₀ + (1 - d) Σ d^(n-i) vᵢ."""
    steps = moving(VALUES)
    average = soup.ExponentialMovingAverage(next(steps), 0.8)
    for model in steps:     # noqa: B007
        average.update()
    n = len(VALUES) - 1
    wanted = 0.8 ** n * VALUES[0] + 0.2 * sum(0.8 ** (n - i) * VALUES[i] for i in range(1, n + 1))
    with average.applied() as inside:
        assert inside is model
        np.testing.assert_allclose(model.weight.numpy(), wanted, rtol=1e-13)
        np.testing.assert_allclose(model.statistic, 10 * wanted, rtol=1e-13)
    assert (model.weight.numpy() == VALUES[-1]).all() and (model.statistic == 10 * VALUES[-1]).all()


def test_the_stochastic_average_is_the_mean_of_what_was_taken_in():
    steps = moving(VALUES)
    average = soup.StochasticWeightAverage(next(steps))
    for model in steps:     # noqa: B007
        average.update()
    with average.applied():
        np.testing.assert_allclose(model.weight.numpy(), VALUES[1:].mean(0), rtol=1e-13)


def test_an_average_is_kept_in_float32_or_wider():
    net = nn.Linear(2, 2, dtype=np.float16)
    average = soup.ExponentialMovingAverage(net, 0.9999)
    before = net.weight.numpy().astype(np.float32)
    with mt.no_grad():
        net.weight[...] = net.weight + 1
    now = net.weight.numpy().astype(np.float64)
    for _ in range(100):        # each by less than float16 can tell
        average.update()
    np.testing.assert_allclose(average.averages["weight"], before + (now - before) * (1 - 0.9999 ** 100), rtol=1e-4)


def test_the_models_own_values_come_back_whatever_happens():
    *_, model = moving(VALUES[:2])
    average = soup.ExponentialMovingAverage(model)
    with pytest.raises(KeyError), average.applied():
        model.weight.data[...] = 77
        raise KeyError
    assert (model.weight.numpy() == VALUES[1]).all()
    with average.applied():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"update\(\) inside applied"):
                average.update()
            with average.applied():     # one inside of it ends alone
                pass
    average.update()
    loss = (model.weight * model.weight).sum()
    with average.applied():
        pass
    with pytest.raises(RuntimeError, match="ExponentialMovingAverage"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_is_not_cut_inside(stage):
    *_, model = moving(VALUES[:2])
    with pytest.raises(RuntimeError, match=r"was cut inside applied\(\).*parts of the average"), \
            soup.ExponentialMovingAverage(model).applied():
        fully_shard(model, stage=stage)


@pytest.mark.parametrize("kind", [lambda m: soup.ExponentialMovingAverage(m, 0.6), soup.StochasticWeightAverage])
def test_an_average_goes_on_from_its_state(kind):
    whole, pieces = [], []
    for model in moving(VALUES):
        whole = whole or [kind(model)]
        whole[0].update()
        if len(pieces) == 0 or pieces[-1].updates == 3:
            pieces.append(kind(model))
            if len(pieces) == 2:
                pieces[1].load_state_dict(pieces[0].state_dict())
        pieces[-1].update()
    assert (pieces[-1].averages["weight"] == whole[0].averages["weight"]).all() and len(pieces) == 2
    with pytest.raises(ValueError, match=r"weight of shape \(2,\), this model of shape \(3,\)"):
        whole[0].load_state_dict({"updates": 1, "averages": {"weight": np.zeros(2), "statistic": np.zeros(3)}})
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"decay={decay}"):
            soup.ExponentialMovingAverage(model, decay)


def test_a_model_that_has_become_another_has_no_average():
    """Of one row an average would have been taken for that of all."""
    for change, words in (
            (lambda m: m.add_module("1", nn.Linear(2, 5)), r"1.weight had shape \(1, 2\) .* has \(5, 2\) now"),
            (lambda m: m.add_module("2", nn.Linear(1, 2)), r"2.weight had shape None .* has \(2, 1\) now"),
            (lambda m: lora.add(m, 2, targets="0"), r"0.lora_A had shape None .* has \(2, 3\) now")):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        average = soup.ExponentialMovingAverage(model, 0.5)
        change(model)
        before = model.state_dict()
        with pytest.raises(ValueError, match=f"ExponentialMovingAverage: {words}"):
            average.update()
        with pytest.raises(ValueError, match=words), average.applied():
            pass
        assert all((value == before[name]).all() for name, value in model.state_dict().items())


def test_an_average_without_a_memory_is_the_model():
    *_, model = moving(VALUES[:2])
    average = soup.ExponentialMovingAverage(model, 0)
    with mt.no_grad():
        model.weight[...] = VALUES[2]
    average.update()
    np.testing.assert_allclose(average.averages["weight"], VALUES[2], rtol=1e-13)


def test_batch_norms_statistics_are_the_batches():
    net, batches = cases.network(), [cases.rows(step)[0] for step in range(3)]
    net.add_module("drop", nn.Dropout(0.5))
    net[1].running_mean[...] = 5
    modes = {name: m.training for name, m in net.named_modules()}
    soup.update_bn(net, map(mt.tensor, batches))
    hidden = [x @ net[0].weight.numpy().T for x in batches]
    np.testing.assert_allclose(net[1].running_mean, np.mean([h.mean(0) for h in hidden], 0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(net[1].running_var, np.mean([h.var(0, ddof=1) for h in hidden], 0), rtol=1e-12)
    assert modes == {name: m.training for name, m in net.named_modules()} and net[1].move is nn.BatchNorm.moved
    with pytest.raises(ValueError, match="at least one"):
        soup.update_bn(net, [])
    soup.update_bn(nn.Linear(2, 2), [])


def test_dropout_is_off_while_statistics_are_estimated():
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm(3, dtype=np.float64)).train()
    x = np.random.default_rng(0).standard_normal((9, 3))
    soup.update_bn(net, [mt.tensor(x)])
    np.testing.assert_allclose(net[1].running_mean, x.mean(0), atol=1e-14)


# ---------------------------------------------------------------- on two ranks

def test_two_ranks_average_as_one_process():
    wanted, everyone = cases.averages(), crews.call(CASES + "all_averages", 2)
    assert all((wanted["ema"][n] != wanted["after"][n]).any() for n in wanted["ema"])
    for way in everyone[0]:
        for kind, values in wanted.items():
            for of_rank in everyone if way == "data" else everyone[:1]:
                got = of_rank[way][kind]
                for name, value in values.items():
                    np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-10, err_msg=f"{way} {kind} {name}")
                    assert got[name].tobytes() == everyone[0][way][kind][name].tobytes()
            assert all((of_rank[way][kind]["output"] == everyone[0][way][kind]["output"]).all() for of_rank in everyone)


def test_two_ranks_estimate_the_same_statistics():
    """Of the global batches; in exact mode, of the micro-shards."""
    whole, everyone = cases.statistics(), crews.call(CASES + "all_statistics", 2)
    w = cases.network()[0].weight.numpy()
    shards = [half @ w.T for step in range(3) for half in np.split(cases.rows(step)[0], 2)]
    exact = {"1.running_mean": np.mean([h.mean(0) for h in shards], 0),
             "1.running_var": np.mean([h.var(0, ddof=1) for h in shards], 0)}
    for of_rank in everyone:
        for way, got in of_rank.items():
            for name, value in (exact if way == "exact" else whole).items():
                np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=f"{way} {name}")
