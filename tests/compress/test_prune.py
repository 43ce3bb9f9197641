"""Masks against plain Python; what keeps them in force against NumPy, on one rank and on two."""

import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress import prune
from tests.crews import crews

from . import prune_cases as cases

CASES = "tests.compress.prune_cases:"


def model_of(*weights):
    """A Sequential of Linears with these weights."""
    net = nn.Sequential(*(nn.Linear(w.shape[1], w.shape[0], dtype=w.dtype) for w in weights))
    with mt.no_grad():
        for layer, w in zip(net, weights, strict=True):
            layer.weight[...] = w
    return net


def some_weights(seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((5, 8)), random.standard_normal((3, 5)) * 0.1


def smallest(values, count):
    """Indices of the `count` smallest in absolute value, the first among equals."""
    return sorted(sorted(range(len(values)), key=lambda i: (abs(values[i]), i))[:count])


# ---------------------------------------------------------------- which weights stay

@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.33, 0.5, 0.9, 1.0])
def test_magnitude_per_layer(sparsity):
    weights = some_weights()
    masks = prune.magnitude(model_of(*weights), sparsity)
    assert list(masks) == ["0.weight", "1.weight"]      # no biases
    for mask, w in zip(masks.values(), weights, strict=True):
        assert mask.shape == w.shape and mask.dtype == bool
        assert np.flatnonzero(~mask).tolist() == smallest(w.reshape(-1), round(sparsity * w.size))


def test_magnitude_over_all_layers_takes_what_is_smallest_anywhere():
    weights = some_weights()
    masks = prune.magnitude(model_of(*weights), 0.5, scope="global")
    together = np.concatenate([w.reshape(-1) for w in weights])
    gone = np.flatnonzero(~np.concatenate([m.reshape(-1) for m in masks.values()]))
    assert gone.tolist() == smallest(together, round(0.5 * 55))
    assert masks["1.weight"].mean() < 0.1 < 0.6 < masks["0.weight"].mean()     # the second is ten times smaller


def test_of_equal_weights_the_first_go():
    masks = prune.magnitude(model_of(np.array([[1.0, -1, 1, -1, 2, 1]])), 0.5)
    assert masks["0.weight"].tolist() == [[False, False, False, True, True, True]]


def test_each_layer_may_have_its_share_and_parameters_can_be_named():
    net = model_of(*some_weights())
    masks = prune.magnitude(net, {"0.weight": 0.25, "1.weight": 0.8})
    assert [int((~m).sum()) for m in masks.values()] == [10, 12]
    assert list(prune.magnitude(net, 0.5, names=["0.bias"])) == ["0.bias"]


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_masks_grow_within_earlier_ones(scope):
    weights = some_weights()
    net = model_of(*weights)
    first = prune.random(net, 0.4, seed=1)
    pruned = prune.magnitude(net, 0.6, scope, within=first)
    count = sum(int((~m).sum()) for m in pruned.values())
    assert count == sum(round(0.6 * w.size) for w in weights) and all((pruned[n] <= first[n]).all() for n in first)
    # a smaller share than is gone already changes nothing
    assert all((prune.magnitude(net, 0.1, scope, within=first)[n] == first[n]).all() for n in first)


def test_random_masks_depend_on_seed_and_name_alone():
    net, other = model_of(*some_weights()), model_of(*some_weights(1))
    masks, again = prune.random(net, 0.3, seed=4), prune.random(other, 0.3, seed=4)
    assert all((masks[n] == again[n]).all() for n in masks)
    assert (masks["0.weight"] != prune.random(net, 0.3, seed=5)["0.weight"]).any()
    assert [int((~m).sum()) for m in masks.values()] == [12, round(0.3 * 15)]
    square = model_of(np.ones((6, 6)), np.ones((6, 6)))
    two = prune.random(square, 0.5)
    assert (two["0.weight"] != two["1.weight"]).any()


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (1, 2), (5, 8)])
@pytest.mark.parametrize("kernel", [(), (3, 2)])
def test_n_of_m(n, m, kernel):
    random = np.random.default_rng(2)
    w = random.integers(-3, 4, (3, 2 * m, *kernel)).astype(np.float64)     # with equals
    net = nn.Sequential(nn.Conv2d(2 * m, 3, kernel, dtype=w.dtype)) if kernel else model_of(w)
    with mt.no_grad():
        net[0].weight[...] = w
    mask, = prune.n_of_m(net, n, m).values()
    for out in range(3):
        for place in np.ndindex(*kernel):
            for group in range(0, 2 * m, m):
                here = (out, slice(group, group + m), *place)
                order = sorted(range(m), key=lambda i: (-abs(w[here][i]), i))
                assert np.flatnonzero(mask[here]).tolist() == sorted(order[:n])


def test_what_cannot_be_pruned_raises():
    net = model_of(*some_weights())
    with pytest.raises(ValueError, match=r"1\.weight \(3, 5\) is no multiple of m=4.*names="):
        prune.n_of_m(net)
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"n={n} of m=4"):
            prune.n_of_m(net, n, 4)
    for share in (1.5, -0.5):
        with pytest.raises(ValueError, match=f"{share}}}: a share of weights must be in"):
            prune.magnitude(net, share)
    with pytest.raises(ValueError, match="'row'; use 'layer' or 'global'"):
        prune.magnitude(net, 0.5, scope="row")
    with pytest.raises(ValueError, match="no parameter 2.weight; it has 0.weight, 0.bias"):
        prune.magnitude(net, 0.5, names=["2.weight"])
    with pytest.raises(ValueError, match=r"given for \['0.weight'\]"):
        prune.magnitude(net, {"0.weight": 0.5})
    with pytest.raises(ValueError, match=r"which must be the pruned parameters .* with scope='layer'"):
        prune.magnitude(net, {"0.weight": 0.5, "1.weight": 0.5}, scope="global")
    shape = net[0].weight.shape
    for mask in (np.ones((5, 9), bool), np.ones(shape, int)):
        with pytest.raises(ValueError, match=f"mask of 0.weight is {mask.dtype} of shape .* must be bool of shape"):
            prune.Pruning(net, {"0.weight": mask})
    with pytest.raises(ValueError, match="mask of 0.weight is a list; it must be bool of shape"):
        prune.Pruning(net, {"0.weight": [[True]]})
    assert list(prune.magnitude(net, 0.5, names="0.weight")) == ["0.weight"]
    with pytest.raises(ValueError, match="masks for weight"):
        prune.Pruning(net, {"weight": np.ones((5, 9), bool)})
    with mt.no_grad():
        net[1].weight[0, 0] = np.inf
    with pytest.raises(ValueError, match="1.weight holds inf or NaN"):
        prune.magnitude(net, 0.5)
    with pytest.raises(ValueError, match="no parameter of two or more axes"):
        prune.magnitude(nn.LayerNorm(3), 0.5)


def test_masks_travel_as_json():
    import json
    masks = prune.random(model_of(*some_weights()), 0.4)
    again = prune.from_facts(json.loads(json.dumps(prune.to_facts(masks))))
    assert list(again) == list(masks) and all((again[n] == masks[n]).all() for n in masks)
    for bits in ("", "!!", "AAAA"):
        with pytest.raises(ValueError, match="the mask of w has|base64"):
            prune.from_facts({"w": [[3, 3], bits]})


# ---------------------------------------------------------------- in force, while training goes on

OPTIMIZERS = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9), "nesterov": lambda p: optim.SGD(p, 0.1, 0.9, 0.1, True),
    "adam": lambda p: optim.Adam(p, 0.1, weight_decay=0.1), "adamw": lambda p: optim.AdamW(p, 0.1, weight_decay=0.1),
    "amsgrad": lambda p: optim.Adam(p, 0.1, amsgrad=True)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_revives_a_weight(optimizer):
    """Pruned in the middle of training: momentum and moments of before would move the weights on, with no gradient."""
    net = cases.network()
    step_of = OPTIMIZERS[optimizer](net.parameters())
    for step in range(3):
        step_of.zero_grad()
        cases.backward(net, step)
        step_of.step()
    pruning = prune.Pruning(net, prune.magnitude(net, 0.7))
    gone = {name: ~mask for name, mask in pruning.masks.items()}
    values = dict(net.named_parameters())
    for step in range(3, 6):
        step_of.zero_grad()
        cases.backward(net, step)
        for name, where in gone.items():
            values[name].grad.data[where] = 0
        step_of.step()
        assert all((values[name].numpy()[where] != 0).all() for name, where in gone.items()), "nothing to keep down"
        pruning.apply()
        for name, where in gone.items():
            assert not values[name].numpy()[where].any() and (values[name].numpy()[~where] != 0).all()


def test_training_under_a_mask_is_that_of_numpy():
    """Least squares, SGD with momentum and weight decay, pruned after three steps: w ← mask · (w - lr · b)."""
    random = np.random.default_rng(4)
    x, y, w = random.standard_normal((20, 6)), random.standard_normal((20, 3)), random.standard_normal((3, 6))
    net = nn.Linear(6, 3, bias=False, dtype=np.float64)
    with mt.no_grad():
        net.weight[...] = w
    optimizer, pruning, mask = optim.SGD(net.parameters(), 0.01, 0.9, 0.1), None, np.ones(w.shape, bool)
    b = np.zeros_like(w)
    for step in range(8):
        if step == 3:
            mask = prune.magnitude(net, 0.5)["weight"]
            w[~mask] = 0
            pruning = prune.Pruning(net, {"weight": mask})
        optimizer.zero_grad()
        ((net(mt.tensor(x)) - y) ** 2).sum().backward()
        optimizer.step()
        if pruning:
            pruning.apply()
        b = 0.9 * b + 2 * (x @ w.T - y).T @ x + 0.1 * w
        w = np.where(mask, w - 0.01 * b, 0)
        np.testing.assert_allclose(net.weight.numpy(), w, rtol=0, atol=1e-12)


def test_a_half_precision_models_master_copy_does_not_revive_weights():
    net = nn.Linear(5, 4, bias=False, dtype=np.float16)
    optimizer = optim.Adam(net.parameters(), 0.05)
    pruning = prune.Pruning(net, prune.magnitude(net, 0.5))
    net.weight.grad = mt.tensor(np.full((4, 5), 0.3, np.float16))
    for _ in range(3):
        optimizer.step()
        pruning.apply()
    moved = net.weight.numpy()[~pruning.masks["weight"]]
    assert not moved.any()


def test_backward_through_what_pruning_wrote_raises():
    net = cases.network()
    masks = prune.magnitude(net, 0.5)
    loss = net(mt.tensor(cases.rows(0)[0])).sum()
    prune.Pruning(net, masks)
    with pytest.raises(RuntimeError, match="pruning"):
        loss.backward()


# ---------------------------------------------------------------- the gradual schedule

def test_cubic_is_the_papers():
    schedule = prune.cubic(0.9, begin=10, end=30, initial=0.1)
    wanted = [0.9 - 0.8 * (1 - (t - 10) / 20) ** 3 for t in range(10, 31)]
    np.testing.assert_allclose([schedule(t) for t in range(10, 31)], wanted, rtol=1e-15)
    assert schedule(0) == schedule(9) == pytest.approx(0.1) and schedule(31) == schedule(500) == 0.9
    assert prune.cubic(1.0, 0, 2)(1) == 1 - 0.5 ** 3
    assert prune.cubic(0.4, 0, 2, 0.4)(1) == 0.4
    for bad in ((0.9, 5, 5), (1.1, 0, 5), (0.2, 0, 5, 0.5), (0.2, 0, 5, -0.1), (0.2, -1, 5), (0.9, 0, np.inf)):
        with pytest.raises(ValueError, match="cubic"):
            prune.cubic(*bad)


def test_gradual_pruning_follows_its_schedule():
    masks, values, rows, history = cases.gradual()
    schedule, sizes = prune.cubic(0.8, 1, 5), {"0.weight": 630, "3.weight": 9090, "5.weight": 303}
    for step, facts in enumerate(history, 1):
        now = prune.from_facts(facts)
        reached = schedule(step - step % 2)
        assert {n: int((~m).sum()) for n, m in now.items()} == {n: round(reached * s) for n, s in sizes.items()}
    for older, newer in zip(history, history[1:], strict=False):
        assert all((prune.from_facts(newer)[n] <= m).all() for n, m in prune.from_facts(older).items())
    assert all(not values[n][~m].any() for n, m in masks.items())
    assert {n: kept for n, _, kept, _ in rows if n in sizes} == {n: s - round(0.8 * s) for n, s in sizes.items()}


def test_gradual_pruning_passes_its_masks_on():
    """By a way of finding masks in which nothing else makes one lie within the other."""
    net, found = cases.network(), []

    def find(model, sparsity, within=None):
        found.append(prune.random(model, sparsity, seed=len(found), within=within))
        return found[-1]
    pruning = prune.GradualPruning(net, prune.cubic(0.6, 0, 3, 0.1), find=find)
    for _ in range(6):
        pruning.step()
    assert len(found) == 4 and pruning.masks is found[-1]       # none when the schedule has come to its end
    for older, newer in zip(found, found[1:], strict=False):
        assert all((newer[n] <= older[n]).all() and (newer[n] < older[n]).any() for n in older)
    for bad in ({"every": 0}, {"steps": -1}):
        with pytest.raises(ValueError, match="every=0" if "every" in bad else "steps=-1"):
            prune.GradualPruning(net, prune.cubic(0.6, 0, 3), **bad)
    with pytest.raises(TypeError, match="every=2.5: must be a whole number"):   # of which few are multiples
        prune.GradualPruning(net, prune.cubic(0.6, 0, 3), every=2.5)


# ---------------------------------------------------------------- on two ranks

@pytest.fixture(scope="module")
def alone():
    return cases.gradual()


def same(got, wanted, tolerance=1e-10):
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=name)


def test_two_ranks_prune_and_train_as_one_process(alone):
    masks, values, rows, history = alone
    everyone = crews.call(CASES + "all_ways", 2)
    for way in everyone[0]:
        for rank, of_rank in enumerate(everyone):
            got = of_rank[way]
            assert got[3] == history, f"{way}: masks on rank {rank}"
            assert got[2] == rows, way
            if got[1]:      # what is cut comes together on rank 0
                same(got[1], values)
                assert all(not got[1][n][~m].any() for n, m in got[0].items())
        assert everyone[0][way][1]


@pytest.mark.parametrize(("way", "back"), [("data", "stage 3"), ("stage 3", None), ("stage 1", "data")])
def test_a_checkpoint_carries_masks_on(alone, tmp_path, way, back):
    crews.call(CASES + "gradual", 2, (way, 0, 3, tmp_path))
    got = cases.gradual(None, 3, cases.STEPS, tmp_path) if back is None else \
        crews.call(CASES + "gradual", 2, (back, 3, cases.STEPS, tmp_path))[0]
    same(got[1], alone[1])
    assert got[3] == alone[3][3:]


@pytest.mark.parametrize(("way", "n"), [("data", 2), ("mesh", 4)])
def test_masks_must_be_the_same_on_all_ranks(way, n):
    for said in crews.call(CASES + "other_masks", n, (way,)):
        assert re.search(r"masks of 0\.weight, 3\.weight, 5\.weight are others on rank \d", said)


def test_an_error_where_masks_are_made_is_everybodys():
    assert crews.call(CASES + "bad_weights", 2) == ["3.weight holds inf or NaN, whose magnitude says nothing: was the "
                                                    "training stable?"] * 2


def test_tensor_parallelism_prunes_the_whole_matrices():
    mt.manual_seed(5)
    gpt = nn.GPT(11, 5, layers=1, heads=4, dim=12, dtype=np.float64)
    wanted = prune.magnitude(gpt, 0.6)
    prune.Pruning(gpt, wanted)
    for masks, values, rows in crews.call(CASES + "heads", 2):
        assert {n: m.tolist() for n, m in masks.items()} == {n: m.tolist() for n, m in wanted.items()}
        same(dict(sorted(values.items())), dict(sorted(gpt.state_dict().items())), 0)
        assert sorted(rows) == sorted(prune.sparsity(gpt).rows)


# ---------------------------------------------------------------- the table

def test_the_table_says_what_is_kept():
    net = model_of(*some_weights())
    masks = prune.magnitude(net, {"0.weight": 0.75, "1.weight": 0.2})
    table = prune.sparsity(net, masks)
    assert table.rows == [("0.weight", (5, 8), 10, 40), ("0.bias", (5,), 5, 5), ("1.weight", (3, 5), 12, 15),
                          ("1.bias", (3,), 3, 3)] and (table.kept, table.size) == (30, 63)
    lines = str(table).splitlines()
    assert re.fullmatch(r"0.weight +5 × 8 +10 +40 +25\.0 %", lines[2])
    assert re.search(r"total +30 +63 +47\.6 %", lines[-1])
    prune.Pruning(net, masks)
    assert prune.sparsity(net).rows == table.rows       # by what is zero
