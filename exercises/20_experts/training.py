"""20.3's training run: a small GPT of the library's with experts, and what it does in one process."""

import numpy as np

MODEL = {"vocabulary": 11, "length": 6, "layers": 1, "heads": 2, "dim": 8}
EXPERTS, K, FACTOR, WEIGHT = 4, 2, 1.25, 0.05
RANKS, EP, BATCH, STEPS, RATE = 4, 2, 8, 12, 1.0


def draw(rng):
    """The same on all ranks: tokens that mostly follow a rule, and parameters."""
    tokens = rng.integers(MODEL["vocabulary"], size=(STEPS, BATCH, MODEL["length"] + 1))
    next_one, follows = rng.permutation(MODEL["vocabulary"]), rng.random(tokens.shape) < 0.8
    for at in range(1, tokens.shape[-1]):
        tokens[..., at] = np.where(follows[..., at], next_one[tokens[..., at - 1]], tokens[..., at])
    case = {"what": "training", "ep": EP, "tokens": tokens, "rate": RATE, "model": MODEL, "weight": WEIGHT,
            "moe": {"experts": EXPERTS, "k": K, "capacity_factor": FACTOR, "balance": WEIGHT,
                    "group": BATCH * MODEL["length"] // RANKS}}
    return case | {"parameters": [0.2 * rng.standard_normal(p.shape) for p in network(case).parameters()]}


def network(case):
    from minitorch_dist import nn
    return nn.GPT(**case["model"], dtype=np.float64, moe=case["moe"])


def of_library(case):
    """The loss of every step, in one process with all experts, where each rank's tokens are a group by themselves."""
    from minitorch_dist import nn, optim
    model, losses = network(case), []
    for p, array in zip(model.parameters(), case["parameters"], strict=True):
        p.data[...] = array
    optimizer = optim.SGD(model.parameters(), lr=case["rate"])
    for tokens in case["tokens"]:
        optimizer.zero_grad()
        logits, aux = model(tokens[:, :-1])
        loss = nn.cross_entropy(logits, tokens[:, 1:]) + aux
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses
