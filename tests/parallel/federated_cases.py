"""What the ranks do in the tests of federated learning. What must hold is checked by the parent process."""

import hashlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim
from minitorch_dist.divergence import Diverged
from minitorch_dist.parallel.encodings import LowRank, RandomMask, Sketch, Whole
from minitorch_dist.parallel.local_sgd import FederatedAveraging, split_by_dirichlet

SETTINGS = {
    "whole": {"encoding": Whole()},
    "sketch": {"encoding": Sketch(levels=4, rotate=True, keep=0.5), "epochs": 2},
    "mask": {"encoding": RandomMask(0.3), "fraction": 1.0},
    "low rank": {"encoding": LowRank(2), "fraction": 0.2},
    "server": {"server": lambda model: optim.Adam(model.parameters(), 0.01)},
}


def samples(count=150, features=9, classes=4):
    random = np.random.default_rng(0)
    inputs = random.standard_normal((count, features)).astype(np.float32)
    return inputs, (inputs @ random.standard_normal((features, classes))).argmax(1)


def run(name, rounds=3, device="cpu"):
    """(sha256 of the parameters, the rounds) of a small network with dropout in a setting."""
    inputs, labels = samples()
    mt.manual_seed(comm.world().rank)      # rank 0's values are everybody's
    model = nn.Sequential(nn.Linear(9, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 4))
    if name == "whole":     # where the order of additions shows
        model, inputs = model.to(np.float64), inputs.astype(np.float64)
    model = model.to(device)
    settings = {"lr": 0.1, "fraction": 0.6, "batch_size": 7, "seed": 3} | SETTINGS[name]
    if "server" in settings:
        settings["server"] = settings["server"](model)
    clients = split_by_dirichlet(labels, 11, 0.5, seed=1)
    learning = FederatedAveraging(model, inputs, labels, clients, **settings)
    done = [learning.round() for _ in range(rounds)]
    values = b"".join(np.ascontiguousarray(p.cpu().numpy()).tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest(), done


def trained(clients):
    """How many of a round's clients this rank has trained."""
    inputs, labels = samples()
    calls = []

    def loss_sum(model, shard):
        calls.append(shard)
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
    FederatedAveraging(nn.Linear(9, 4), inputs, labels, np.array_split(np.arange(150), clients), lr=0.1, fraction=1.0,
                       batch_size=None, loss_sum=loss_sum).round()
    return len(calls)


def one_client_diverges():
    """What each rank is told, where the second of two clients has an update that can't be rounded; the rounds done."""
    inputs, labels = samples()
    inputs[75:] = np.nan
    learning = FederatedAveraging(nn.Linear(9, 4), inputs, labels, np.array_split(np.arange(150), 2), lr=0.1,
                                  fraction=1.0, encoding=Sketch(levels=4))
    try:
        learning.round()
    except Diverged as error:
        return str(error), learning.rounds


def refused_on_three():
    inputs, labels = samples()
    try:
        FederatedAveraging(nn.Linear(9, 4), inputs, labels, np.array_split(np.arange(150), 5), lr=0.1)
    except ValueError as error:
        return str(error)


def refused_where_ranks_disagree():
    inputs, labels = samples()
    rank, model = comm.world().rank, nn.Linear(9, 4)
    alike = {"lr": 0.1, "clients": np.array_split(np.arange(150), 5)}
    said = []
    for unlike in ({"lr": 0.1 + rank}, {"clients": np.array_split(np.arange(150)[::1 - 2 * rank], 5)},
                   {"clients": np.split(np.arange(150), [70 + rank])},
                   {"server": optim.SGD(model.parameters(), 0.01 * (1 + rank))}):
        try:
            FederatedAveraging(model, inputs, labels, **(alike | unlike))
        except ValueError as error:
            said.append(str(error))
    return said
