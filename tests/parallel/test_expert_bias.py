"""Experts balanced by biases: the rule in closed form, and the same routing on any ranks, cut in any way."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.parallel.experts import expert_bias
from tests.crews import crews, threads

CASES = "tests.parallel.expert_bias_cases:"
LAYERS, EXPERTS, K, BATCH, LENGTH, SPEED = 2, 8, 3, 8, 6, 0.03


@pytest.fixture(scope="module")
def one_process():
    """([(loss, loads)], state) of one process."""
    return crews.call(CASES + "train", 1, args=({},))[0]


def check_same(got, wanted):
    """Parameters within 1e-10, biases to the bit."""
    assert set(got) == set(wanted) and sum("expert_bias" in name for name in wanted) == LAYERS
    for name, value in wanted.items():
        assert abs(got[name] - value).max() <= (0 if "expert_bias" in name else 1e-10), name


# ---------------------------------------------------------------- the rule

def skewed(**arguments):
    """(a MoE whose router likes the first experts by far, tokens)."""
    mt.manual_seed(2)
    model = nn.MoE(4, 5, 8, capacity_factor=4, std=0.3, balance=0, score="sigmoid", **arguments)
    x = np.random.default_rng(1).standard_normal((3, 50, 4)).astype(np.float32) + 1
    model.router.weight.data[...] = np.linspace(0.45, -0.15, 8)[:, None] + model.router.weight.data
    return model, x


def test_a_bias_moves_by_the_sign_of_what_is_missing():
    """Three updates of uneven loads against the sum of signs, in plain Python."""
    model, x = skewed(expert_bias=True)
    bias = [0.0] * 8
    for step in range(3):
        load = [0] * 8
        for part in (x[:1], x[step:]):      # two calls: micro-batches
            for e in model.routing(part)[1].expert.reshape(-1).tolist():
                load[e] += 1
            model(part)
        loads = expert_bias.update(model, 0.0625)
        assert {path: found.tolist() for path, found in loads.items()} == {"": load} and not model.load.any()
        bias = [b + 0.0625 * ((sum(load) > 8 * n) - (sum(load) < 8 * n)) for b, n in zip(bias, load, strict=True)]
        assert model.expert_bias.tolist() == bias
    assert len(set(bias)) > 2
    assert expert_bias.update(model, 0.0625)[""].sum() == 0       # nothing was counted since
    assert model.expert_bias.tolist() == bias


def test_biases_make_the_loads_even_and_add_nothing_to_the_loss():
    """A router that never learns: its MaxVio falls from 1.8, of at most 8/2 - 1, below 0.2, and neither a loss nor a
    gradient has anything to do with it."""
    (model, x), (plain, _) = skewed(expert_bias=True), skewed()
    found = []
    for _ in range(150):
        y, aux = model(x)
        assert aux.item() == 0
        found.append(expert_bias.max_violation(expert_bias.update(model, 0.003)[""]))
    assert found[0] > 1.8 and max(found[-20:]) < 0.2
    assert expert_bias.max_violation(plain.routing(x)[1].load) == found[0]
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    aux.backward()
    assert not model.router.weight.grad.numpy().any()


def test_a_model_in_training_is_balanced_by_biases_alone():
    """Trained on a task with speed 0, which only counts, and with another; the auxiliary loss is 0 in both."""
    ends = {}
    for speed in (0.0, 0.02):
        mt.manual_seed(4)
        model = nn.GPT(11, 8, layers=1, heads=2, dim=16, hidden=16, moe={
            "experts": 8, "capacity_factor": 4, "balance": 0, "std": 0.5, "score": "sigmoid", "expert_bias": True})
        optimizer, random, seen = optim.AdamW(model.parameters(), lr=0.01), np.random.default_rng(1), []
        for _ in range(60):
            tokens = random.integers(0, 11, (16, 9))
            tokens[:, 1::2] = tokens[:, :-1:2]      # every second one is its neighbour
            optimizer.zero_grad()
            logits, aux = model(tokens[:, :-1])
            assert aux.item() == 0
            nn.cross_entropy(logits, tokens[:, 1:]).backward()
            optimizer.step()
            seen.append(expert_bias.max_violation(expert_bias.update(model, speed)["blocks.0.mlp"]))
        ends[speed] = np.mean(seen[-10:])
    assert ends[0.02] < 0.6 < 1.2 < ends[0.0], ends


def test_two_models_of_one_name_are_no_list_of_chunks():
    """The second's loads would stand for both. Nothing is moved then; a np.float64 as speed gives a float's bits."""
    (one, x), (other, _) = skewed(expert_bias=True), skewed(expert_bias=True)
    one(x), other(x)
    with pytest.raises(ValueError, match="several of the modules have a mixture called ''"):
        expert_bias.update([one, other])
    assert one.load.any() and not one.expert_bias.any() and not other.expert_bias.any()
    for _ in range(5):
        expert_bias.update(one, np.float64(0.001))
        expert_bias.update(other, 0.001)
        one(x), other(x)
    assert one.expert_bias.any() and one.expert_bias.tobytes() == other.expert_bias.tobytes()


def test_loads_print():
    loads = expert_bias.Loads({"blocks.0.mlp": np.array([30, 10, 20, 20]), "top": np.array([0, 0, 80, 0]),
                               "rests": np.zeros(4, int)})
    assert str(loads) == """\
layer         MaxVio  loads, in % of the layer's mean
blocks.0.mlp   0.500   150   50  100  100
top            3.000     0    0  400    0
rests          0.000     0    0    0    0"""
    assert expert_bias.max_violation(np.zeros(3, int)) == 0


# ---------------------------------------------------------------- on ranks

@pytest.mark.parametrize(("n", "how", "accumulate"), [
    (2, {}, 2), (4, {"size": 2}, 2), (2, {"tensor": 2}, 1), (4, {"tensor": 2, "size": 2, "sequence": True}, 1),
    (2, {"stage": 1}, 2), (4, {"stage": 3, "size": 2}, 1)], ids=str)
def test_one_curve_on_any_mesh(one_process, n, how, accumulate):
    """Loads and biases of one process to the last token, however the batch, the experts, the matrices and the state are
    cut; the parameters within 1e-10."""
    wanted, state = one_process
    for found, got in crews.call(CASES + "train", n, args=(how, accumulate)):
        np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in wanted], rtol=1e-10)
        assert [loads for _, loads in found] == [loads for _, loads in wanted]
        if got:
            check_same(got, state)
    for _, loads in wanted:
        assert all(sum(load) == BATCH * LENGTH * K for load in loads.values()) and len(loads) == LAYERS
    assert all(abs(state[name]).max() > SPEED for name in state if "expert_bias" in name)


def test_exact_mode_has_one_set_of_bits():
    alone, = crews.call(CASES + "exact_bits", 1, args=(0,), env=threads(1))
    assert crews.call(CASES + "exact_bits", 2, args=(2,))[0] == alone


def test_a_pipelines_stages_have_the_biases_of_one_process():
    """Each stage's layers are summed over the ranks that share it; micro-batches add up."""
    loads, wanted = crews.call(CASES + "pipelined", 1, args=(1, 1))[0]
    for found, got in crews.call(CASES + "pipelined", 4, args=(2, 2)):
        assert found == loads and len(loads) > 3
        check_same(got, wanted)


@pytest.mark.parametrize("n", [2, 4])
def test_an_update_is_one_small_all_reduce_and_nobody_broadcasts(n):
    for update, step in crews.call(CASES + "counted", n):
        assert update == {"all_reduce": (1, 2 * (n - 1) * LAYERS * EXPERTS * 8 // n)}
        assert set(step) == {"all_reduce"}


def test_a_resumed_run_continues_to_the_bit(tmp_path, one_process):
    for whole, again in crews.call(CASES + "resumed", 2, args=(str(tmp_path / "saved"), 2)):
        assert {name: value.tobytes() for name, value in whole.items()} == \
            {name: value.tobytes() for name, value in again.items()}
        check_same(again, one_process[1])
    for got in crews.call(CASES + "continued", 2, args=(str(tmp_path / "saved"), {"stage": 3})):
        if got:
            check_same(got, one_process[1])


def test_workers_of_diloco_share_biases_when_they_meet():
    """The loads are those of all workers' tokens since they met last: 3 and 4 sequences a step, for 2 steps."""
    found = crews.call(CASES + "workers", 2)
    assert found[0] == found[1]
    loads, biases = found[0]
    assert [[sum(load) for load in each.values()] for each in loads] == [[2 * 7 * LENGTH * K] * LAYERS] * 2
    assert all(any(bias) for bias in biases.values()) and len(biases) == LAYERS


def test_a_rank_without_data_takes_part():
    found = crews.call(CASES + "joined", 2)
    assert found[0] == found[1]
    loads, biases = found[0]
    assert [[sum(load) for load in each.values()] for each in loads] == [[n * 2 * LENGTH * K] * LAYERS for n in (2, 1)]
    assert all(any(bias) for bias in biases.values())


def test_ranks_that_disagree_get_an_error():
    expected = {"unwrapped": ("ValueError", "which of the 2 ranks have samples of one batch"),
                "speed": ("ValueError", "speed=-0.1"), "no end": ("ValueError", "speed=inf"),
                "speeds": ("MismatchError", "speed 0.25"),
                "layers": ("MismatchError", "layer1"), "experts": ("MismatchError", "all_reduce"), "no biases": None}
    for found in crews.call(CASES + "errors", 2):
        assert set(found) == set(expected)
        for name, said in expected.items():
            assert (found[name] is None) if said is None else \
                found[name] is not None and found[name][0] == said[0] and said[1] in found[name][1], (name, found[name])
