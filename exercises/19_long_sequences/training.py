"""19.4's training run: a small GPT of the library's, and what it does in one process."""

import numpy as np

MODEL = {"vocabulary": 11, "layers": 2, "heads": 2, "dim": 8}
PART, BATCH, STEPS, RATE = 4, 4, 10, 0.5


def draw(rng, ranks):
    """The same on all ranks. Lengths are those of 3 ranks, or 4."""
    length = 24 if 24 % (2 * ranks) == 0 else 2 * ranks * PART
    tokens = rng.integers(MODEL["vocabulary"], size=(STEPS, BATCH, length + 1))
    next_one, follows = rng.permutation(MODEL["vocabulary"]), rng.random(tokens.shape) < 0.8
    for at in range(1, length + 1):
        tokens[..., at] = np.where(follows[..., at], next_one[tokens[..., at - 1]], tokens[..., at])
    case = {"what": "training", "tokens": tokens, "rate": RATE, "model": MODEL | {"length": length}}
    shapes = [p.shape for p in network(case["model"]).parameters()]
    return case | {"parameters": [0.3 * rng.standard_normal(shape) for shape in shapes]}


def network(model):
    """In float64, with a learned row for each position."""
    from minitorch_dist import nn
    return nn.GPT(**model, dtype=np.float64)


def of_library(case):
    """The loss of every step, of whole sequences, by the library's own attention."""
    from minitorch_dist import nn, optim
    model, losses = network(case["model"]), []
    for p, array in zip(model.parameters(), case["parameters"], strict=True):
        p.data[...] = array
    optimizer = optim.SGD(model.parameters(), lr=case["rate"])
    for tokens in case["tokens"]:
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses
