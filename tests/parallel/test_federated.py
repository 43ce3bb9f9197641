"""Federated averaging against the same arithmetic on plain arrays, and its bits on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import nn, optim
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.encodings import LowRank, RandomMask, Sketch
from minitorch_dist.parallel.local_sgd import (
    FederatedAveraging,
    split_by_dirichlet,
    split_by_label,
    split_evenly,
)
from minitorch_dist.testing import ranks
from tests.crews import crews
from tests.device.fake_cupy import installed
from tests.parallel.federated_cases import SETTINGS, run, samples

CASES = "tests.parallel.federated_cases:"


def gradient(weight, bias, x, y):
    """Of the mean cross-entropy of softmax(x Wᵀ + b), by hand."""
    z = x @ weight.T + bias
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


def model_of(dtype=np.float64):
    model = nn.Linear(9, 4)
    return model.to(dtype)


def values(model):
    return model.weight.numpy().copy(), model.bias.numpy().copy()


@pytest.fixture
def data():
    inputs, labels = samples()
    return inputs.astype(np.float64), labels


def test_all_clients_and_all_their_samples_are_one_step_on_all_data(data):
    """However unequal they are."""
    x, y = data
    model = model_of()
    weight, bias = values(model)
    learning = FederatedAveraging(model, x, y, split_by_dirichlet(y, 8, 0.3), lr=0.3, fraction=1.0, batch_size=None)
    for _ in range(3):
        done = learning.round()
        dw, db = gradient(weight, bias, x, y)
        weight, bias = weight - 0.3 * dw, bias - 0.3 * db
        np.testing.assert_allclose(model.weight.numpy(), weight, atol=1e-14)
        np.testing.assert_allclose(model.bias.numpy(), bias, atol=1e-14)
        assert done.samples == len(y)


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_mean_is_weighted_by_samples_and_each_client_begins_from_the_servers_values(data, epochs):
    x, y = data
    clients = [np.arange(0, 10), np.arange(10, 97), np.arange(97, 101)]
    model = model_of()
    weight, bias = values(model)
    learning = FederatedAveraging(model, x, y, clients, lr=0.5, fraction=1.0, epochs=epochs, batch_size=None)
    for _ in range(2):
        learning.round()
        ends = []
        for client in clients:
            w, b = weight, bias
            for _ in range(epochs):
                dw, db = gradient(w, b, x[client], y[client])
                w, b = w - 0.5 * dw, b - 0.5 * db
            ends.append((len(client) / 101, w, b))
        weight, bias = sum(s * w for s, w, _ in ends), sum(s * b for s, _, b in ends)
        np.testing.assert_allclose(model.weight.numpy(), weight, atol=1e-13)
        np.testing.assert_allclose(model.bias.numpy(), bias, atol=1e-13)


def test_clients_are_drawn_anew_each_round_and_only_they_count(data):
    x, y = data
    clients = np.array_split(np.arange(150), 10)
    model = model_of()
    learning = FederatedAveraging(model, x, y, clients, lr=0.2, fraction=0.3, batch_size=None, seed=5)
    seen = []
    for number in range(4):
        weight, bias = values(model)
        done = learning.round()
        assert done.number == number and len(set(done.clients)) == 3 and done.samples == 45
        chosen = np.concatenate([clients[k] for k in done.clients])
        dw, _ = gradient(weight, bias, x[chosen], y[chosen])
        np.testing.assert_allclose(model.weight.numpy(), weight - 0.2 * dw, atol=1e-14)
        seen.append(done.clients)
    assert len(set(seen)) > 1
    other = FederatedAveraging(model, x, y, clients, lr=0.2, fraction=0.3, batch_size=None, seed=6)
    assert [other.round().clients for _ in range(4)] != seen


def test_local_batches_are_all_samples_in_an_order_of_their_own(data):
    """One epoch, batches of 4, a loss whose gradient is the same at all weights: each sample counts once."""
    x, y = data
    seen = []

    def loss_sum(model, shard):
        seen.append(shard.inputs)
        return (model(shard.inputs) * 1.0).sum()        # its gradient doesn't depend on the weights
    model = model_of()
    weight, _ = values(model)
    clients = [np.arange(11), np.arange(11, 22)]
    learning = FederatedAveraging(model, x, y, clients, lr=0.1, fraction=1.0, batch_size=4, loss_sum=loss_sum)
    learning.round()
    assert [len(batch) for batch in seen] == [4, 4, 3, 4, 4, 3]
    for client, batches in zip(clients, (seen[:3], seen[3:]), strict=True):
        rows = np.concatenate(batches)
        assert not np.array_equal(rows, x[client])
        np.testing.assert_array_equal(np.sort(rows, 0), np.sort(x[client], 0))
    steps = [0.1 * sum(batch.mean(0) for batch in batches) for batches in (seen[:3], seen[3:])]
    np.testing.assert_allclose(model.weight.numpy(), weight - sum(steps) / 2, atol=1e-14)
    learning.round()
    assert not np.array_equal(np.concatenate(seen[:3]), np.concatenate(seen[6:9]))


def test_each_local_step_drops_places_of_its_own(data):
    x, y = data
    model, seen = nn.Sequential(nn.Dropout(0.5), nn.Linear(9, 4, dtype=np.float64)), []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output == 0))
    learning = FederatedAveraging(model, x, y, [np.arange(8)], lr=0.1, epochs=2, batch_size=4)
    for _ in range(2):
        learning.round()
    assert len(seen) == 8 and len({places.tobytes() for places in seen}) == 8


def test_structured_training_moves_in_the_subspace_alone(data):
    x, y = data
    for encoding, most in ((RandomMask(0.25), 9), (LowRank(1), None)):
        model = model_of()
        weight, _ = values(model)
        learning, moves = FederatedAveraging(model, x, y, [np.arange(150)], lr=0.5, epochs=3, encoding=encoding), []
        for _ in range(2):      # each in a subspace of its own
            learning.round()
            moves.append(model.weight.numpy() - weight)
            weight = weight + moves[-1]
        for moved in moves:
            assert np.linalg.matrix_rank(moved, tol=1e-9) == 1 if most is None else np.count_nonzero(moved) == most
        both = np.hstack(moves)
        assert np.linalg.matrix_rank(both, tol=1e-9) == 2 if most is None else both.any() and not np.array_equal(
            moves[0] != 0, moves[1] != 0)


def test_a_server_that_steps_by_one_is_plain_averaging_and_momentum_remembers(data):
    x, y = data
    clients = split_by_label(y, 6)

    def run(make, rounds=3):
        model = model_of()
        model.load_state_dict({"weight": np.zeros((4, 9)), "bias": np.zeros(4)})
        learning = FederatedAveraging(model, x, y, clients, lr=0.2, fraction=0.5, server=make and make(model))
        path = [model.weight.numpy().copy()]
        for _ in range(rounds):
            learning.round()
            path.append(model.weight.numpy().copy())
        return path
    plain = run(None)
    np.testing.assert_array_equal(run(lambda m: optim.SGD(m.parameters(), lr=1.0))[-1], plain[-1])
    momentum = run(lambda m: optim.SGD(m.parameters(), lr=1.0, momentum=0.5), 1)
    np.testing.assert_array_equal(momentum[-1], plain[1])
    two = run(lambda m: optim.SGD(m.parameters(), lr=1.0, momentum=0.5), 2)
    np.testing.assert_allclose(two[2] - two[1], plain[2] - plain[1] + 0.5 * plain[1], atol=1e-13)


def test_the_loss_is_the_clients_mean_before_they_train(data):
    x, y = data
    model = model_of()
    z = x @ model.weight.numpy().T + model.bias.numpy()
    expected = np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y])
    done = FederatedAveraging(model, x, y, split_by_label(y, 5), lr=0.1, fraction=1.0, epochs=2,
                              batch_size=None).round()
    assert done.loss == pytest.approx(expected, rel=1e-12)


def test_bytes_are_those_of_the_messages(data):
    x, y = data
    for encoding, each in ((None, 8 * (36 + 4)), (RandomMask(0.25), 8 * (9 + 4)), (LowRank(2), 8 * (18 + 4)),
                           (Sketch(levels=4), 16 + 9 + 8 * 4)):
        learning = FederatedAveraging(model_of(), x, y, split_evenly(150, 10), lr=0.1, fraction=0.5, encoding=encoding)
        done = learning.round()
        assert (done.down, done.up) == (5 * 8 * (36 + 4), 5 * each)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bits_are_the_same_on_any_number_of_ranks(setting):
    (wanted, rounds), = crews.call(CASES + "run", 1, args=(setting,))
    for n in (2, 4):
        for got, done in crews.call(CASES + "run", n, args=(setting,)):
            assert got == wanted and done == rounds
    assert rounds[0].up > 0 and len(rounds) == 3


@pytest.mark.parametrize("setting", SETTINGS)
def test_on_a_gpu_the_bits_are_the_hosts(setting):
    """On the stand-in, which refuses what CuPy refuses."""
    wanted = run(setting, rounds=2)
    with installed():
        assert run(setting, rounds=2, device="cuda") == wanted


@pytest.mark.parametrize(("clients", "n"), [(10, 4), (9, 2), (3, 4)])
def test_the_ranks_have_about_equally_many_clients(clients, n):
    counts = crews.call(CASES + "trained", n, args=(clients,))
    assert sum(counts) == clients and max(counts) - min(counts) <= 1


def test_every_setting_has_bits_of_its_own():
    assert len({crews.call(CASES + "run", 1, args=(setting,))[0][0] for setting in SETTINGS}) == len(SETTINGS)


def test_ranks_that_cant_share_a_tree_or_disagree_are_told():
    assert all("power of two" in said for said in crews.call(CASES + "refused_on_three", 3))
    for lr, clients, ends, server in crews.call(CASES + "refused_where_ranks_disagree", 2):
        assert "FederatedAveraging" in lr and "lr=0.1" in lr and "lr=1.1" in lr
        assert "clients=" in clients and "clients=" in ends and "'lr': 0.01" in server and "'lr': 0.02" in server


def test_where_one_client_diverges_all_ranks_are_told():
    """The other rank, whose client hasn't, would wait for the sum for ever."""
    first, second = crews.call(CASES + "one_client_diverges", 2)
    assert first == second
    assert first[0].startswith("Sketch: an update of shape (4, 9) has a value of nan") and first[1] == 0


@pytest.mark.parametrize(("split", "sizes"), [
    (lambda y: split_evenly(len(y), 7, seed=2), {21, 22}), (lambda y: split_by_label(y, 6, 2, seed=2), {24, 25, 26}),
    (lambda y: split_by_dirichlet(y, 7, 0.2, seed=2), None)])
def test_splits_are_disjoint_and_complete(split, sizes):
    _, y = samples()
    parts = split(y)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert sizes is None or {len(part) for part in parts} <= sizes
    assert not np.array_equal(np.concatenate(parts), np.arange(len(y)))
    for a, b in zip(parts, split(y), strict=True):
        np.testing.assert_array_equal(a, b)


def test_few_classes_by_label_and_by_a_small_alpha():
    y = np.repeat(np.arange(10), 40)
    assert max(len(np.unique(y[part])) for part in split_by_label(y, 20)) <= 2
    largest = [np.mean([np.bincount(y[part]).max() / part.size for part in split_by_dirichlet(y, 8, alpha)
                        if part.size]) for alpha in (0.05, 1000.0)]
    assert largest[0] > 0.5 and largest[1] < 0.15


@pytest.mark.parametrize(("changes", "words"), [
    ({"fraction": 0.0}, "fraction=0.0"), ({"epochs": 0}, "epochs=0"), ({"batch_size": 0}, "batch_size=0"),
    ({"clients": [np.arange(0)]}, "no client"), ({"clients": [np.arange(150) < 4]}, "client 0 is bool"),
    ({"clients": [np.arange(5), np.arange(148, 151)]}, "client 1 is int64 .* from 0 to 149"),
    ({"labels": np.zeros(3, int)}, "equally many"),
    ({"model": nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 4, dtype=np.float64))}, "parameters of several dtypes"),
    ({"model": nn.Sequential(nn.Linear(9, 4), nn.BatchNorm(4))}, "is a buffer")])
def test_what_doesnt_fit_is_refused(changes, words):
    inputs, labels = samples()
    settings = {"model": nn.Linear(9, 4), "inputs": inputs, "labels": labels, "clients": [np.arange(5)], "lr": 0.1}
    with pytest.raises(ValueError, match=words):
        FederatedAveraging(**(settings | changes))


@pytest.mark.parametrize("changes", [{"epochs": 1.5}, {"batch_size": 2.5}], ids=str)
def test_parts_of_an_epoch_or_a_sample_are_refused_before_a_round(changes):
    inputs, labels = samples()
    with pytest.raises(TypeError, match="=[12].5: must be a whole number"):
        FederatedAveraging(nn.Linear(9, 4), inputs, labels, [np.arange(5)], lr=0.1, **changes)


@pytest.mark.parametrize("call", [lambda: split_evenly(3, 4), lambda: split_by_label(np.zeros(3, int), 2, 2),
                                  lambda: split_by_dirichlet(np.zeros(3, int), 4, 1.0)])
def test_more_clients_than_samples_are_refused(call):
    with pytest.raises(ValueError, match="3 samples can't be split into 4"):
        call()
    for alpha in (0, np.inf):
        with pytest.raises(ValueError, match=f"alpha is {alpha}"):
            split_by_dirichlet(np.zeros(3, int), 2, alpha)


def test_clients_keep_their_numbers_and_frozen_parameters_their_values(data):
    x, y = data
    model = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4)).to(np.float64)
    for p in model[0].parameters():
        p.requires_grad_(False)
    before = model[0].weight.numpy().copy(), model[2].weight.numpy().copy()
    clients = [np.arange(0), np.arange(20), np.arange(0), np.arange(20, 40)]
    done = FederatedAveraging(model, x, y, clients, lr=0.1, fraction=1.0).round()
    assert done.clients == (1, 3) and done.down == 2 * 8 * 24
    assert (model[0].weight.numpy() == before[0]).all() and (model[2].weight.numpy() != before[1]).any()


def test_a_round_that_raises_has_not_been(data):
    x, y = data
    calls = []

    def loss_sum(model, shard):
        calls.append(shard)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
    model, clean = model_of(), model_of()
    clean.load_state_dict(model.state_dict())
    settings = {"clients": split_evenly(150, 5), "lr": 0.1, "fraction": 1.0}
    learning = FederatedAveraging(model, x, y, loss_sum=loss_sum, **settings)
    with pytest.raises(KeyboardInterrupt):
        learning.round()
    assert model.weight.grad is None
    np.testing.assert_array_equal(model.weight.numpy(), clean.weight.numpy())
    assert learning.round() == FederatedAveraging(clean, x, y, **settings).round()
    np.testing.assert_array_equal(model.weight.numpy(), clean.weight.numpy())


def test_a_wrapped_model_is_refused(data):
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        FederatedAveraging(DistributedDataParallel(model_of()), *data, [np.arange(9)], lr=0.1)


def test_the_example_prints_the_same_tables_on_one_rank_and_on_two():
    program = str(Path(__file__).parents[2] / "examples/federated.py")
    settings = ["--rounds", "2", "--samples", "200", "--clients", "10", "--target", "20", "--fraction", "0.4",
                "--lr", "0.05"]
    said = []
    for n in (1, 2):
        run = ranks.launch([program, *settings], n=n, limit=60)
        run.check()
        *tables, last = run.stdout[0].strip().splitlines()
        assert f"on {n} rank" in last
        said.append(tables)
    assert said[0] == said[1]
    assert sum(line.startswith(("Fed", "whole", "random", "low", "2 bits")) for line in said[0]) == 3 + 1 + 7
