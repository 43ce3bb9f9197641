"""The training runs of 22.2, 22.3 and 22.5: a small GPT of the library's, and what it does in one process."""

import math

import numpy as np

MODEL = {"vocabulary": 11, "length": 6, "layers": 1, "heads": 2, "dim": 8}
BATCH, RANK, RANKS = 12, 2, 3
STEPS, RATE = 6, 0.7                        # of 22.2
EVERY, LONGER, ADAM = [8], 24, 0.02         # of 22.3
SHORTER, DION = 16, {"rate": 0.05, "mu": 0.5, "eps": 1e-8, "plain_rate": 0.03}       # of 22.5


def draw(rng, steps):
    """The same on all ranks: tokens that mostly follow a rule, and parameters."""
    tokens = rng.integers(MODEL["vocabulary"], size=(steps, BATCH, MODEL["length"] + 1))
    next_one, follows = rng.permutation(MODEL["vocabulary"]), rng.random(tokens.shape) < 0.8
    for at in range(1, tokens.shape[-1]):
        tokens[..., at] = np.where(follows[..., at], next_one[tokens[..., at - 1]], tokens[..., at])
    return {"what": "training", "model": MODEL, "tokens": tokens,
            "parameters": [0.5 * rng.standard_normal(p.shape) for p in network().parameters()]}


def compressed(rng):
    """22.2's. q: for each parameter where its power iteration begins, or nothing where it's summed as it is."""
    case = draw(rng, STEPS)
    q = [rng.standard_normal((p[0].size, RANK)) if thin(p.shape) else np.zeros((0, 0)) for p in case["parameters"]]
    return case | {"q": q, "rate": RATE}


def thin(shape):
    return len(shape) == 2 and RANK * sum(shape) < shape[0] * shape[1]


def apart(rng):
    """22.3's."""
    return draw(rng, LONGER) | {"every": EVERY, "rate": ADAM}


def unsummed(rng):
    """22.5's. q: for each matrix of the blocks where Dion's begins; factors: what Dion multiplies lr by there."""
    case, model = draw(rng, SHORTER), network()
    case["parameters"] = [drawn if drawn.ndim > 1 else p.data.copy() for p, drawn in zip(
        model.parameters(), case["parameters"], strict=True)]
    hidden = {id(p) for p in matrices(model)}
    q = [rng.standard_normal((p.shape[1], RANK)) if id(p) in hidden else np.zeros((0, 0)) for p in model.parameters()]
    return case | DION | {"q": [each / np.linalg.norm(each, axis=0) if len(each) else each for each in q],
                          "factors": [math.sqrt(max(1.0, p.shape[0] / p.shape[-1])) if len(each) else 1.0
                                      for p, each in zip(model.parameters(), q, strict=True)]}


def matrices(model):
    """What Dion moves: the matrices of the blocks."""
    return [p for p in model.blocks.parameters() if p.ndim == 2]


def network(case=None):
    from minitorch_dist import nn
    model = nn.GPT(**MODEL, dtype=np.float64)
    for p, array in zip(model.parameters(), case["parameters"] if case else (), strict=bool(case)):
        p.data[...] = array
    return model


def of_library(case, compress):
    """The loss of every step in one process, by the library's own PowerSGD: all that it does is linear, so one process
    finds what three find. compress=False: the gradients as they are."""
    from minitorch_dist import nn, optim
    from minitorch_dist.comm.communicator import world_of_one
    from minitorch_dist.parallel import DistributedDataParallel
    from minitorch_dist.parallel.comm_hooks import PowerSGD
    model = network(case)
    wrapped, hook, losses = DistributedDataParallel(model, world_of_one()), PowerSGD(rank=RANK), []
    if compress:
        hook.q.update({p.leaf: q.copy() for p, q in zip(model.parameters(), case["q"], strict=True) if len(q)})
        wrapped.register_comm_hook(hook)
    optimizer = optim.SGD(model.parameters(), lr=case["rate"])
    for tokens in case["tokens"]:
        optimizer.zero_grad()
        loss = nn.cross_entropy(wrapped(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses


def of_dion(case, compress):
    """The loss of every step in one process, with the library's Dion, and AdamW for all else. compress: what Dion gets
    is what the library's PowerSGD, of the same r, makes of the gradients."""
    from minitorch_dist import nn, optim
    from minitorch_dist.comm.communicator import world_of_one
    from minitorch_dist.parallel import DistributedDataParallel
    from minitorch_dist.parallel.comm_hooks import PowerSGD
    model, losses = network(case), []
    begin = {id(p): q for p, q in zip(model.parameters(), case["q"], strict=True)}
    wrapped, hidden = DistributedDataParallel(model, world_of_one()), matrices(model)
    if compress:
        hook = PowerSGD(rank=RANK)
        hook.q.update({p.leaf: begin[id(p)].copy() for p in hidden})
        wrapped.register_comm_hook(hook)
    dion = optim.Dion(hidden, case["rate"], RANK / MODEL["dim"], case["mu"], weight_decay=0.0, eps=case["eps"])
    saved = dion.state_dict()
    for p, state in zip(hidden, saved["state"], strict=True):
        state["q"] = begin[id(p)]
    dion.load_state_dict(saved)
    others = [p for p in model.parameters() if all(p is not m for m in hidden)]
    optimizer = optim.Combined(dion, optim.AdamW(others, lr=case["plain_rate"]))
    for tokens in case["tokens"]:
        optimizer.zero_grad()
        loss = nn.cross_entropy(wrapped(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses


def of_one(case):
    """The loss of every step with AdamW and the whole batch: data parallelism, as 22.3's workers are made."""
    from minitorch_dist import nn, optim
    model, losses = network(case), []
    optimizer = optim.AdamW(model.parameters(), lr=case["rate"], betas=(0.9, 0.99), weight_decay=0.1)
    for tokens in case["tokens"]:
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses


def of_workers(case, ranks, every):
    """The mean loss of every step of so many workers, one after the other in one process, by the library's optimizers.
    """
    from minitorch_dist import nn, optim
    common = network(case)
    workers = [network(case) for _ in range(ranks)]
    inner = [optim.AdamW(w.parameters(), lr=case["rate"], betas=(0.9, 0.99), weight_decay=0.1) for w in workers]
    outer = optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for step, tokens in enumerate(case["tokens"], 1):
        parts, total = np.array_split(tokens, ranks), 0.0
        for worker, optimizer, part in zip(workers, inner, parts, strict=True):
            optimizer.zero_grad()
            loss = nn.cross_entropy(worker(part[:, :-1]), part[:, 1:])
            loss.backward()
            optimizer.step()
            total += float(loss.numpy()) / ranks
        losses.append(total)
        if step % every == 0:
            meet(common, workers, outer)
    return losses


def meet(common, workers, outer):
    """BATCH is divided evenly, so all workers weigh the same."""
    from minitorch_dist import Tensor
    for p, *theirs in zip(common.parameters(), *(w.parameters() for w in workers), strict=True):
        p.grad = Tensor(np.mean([p.data - own.data for own in theirs], axis=0))
    outer.step()
    for worker in workers:
        for p, own in zip(common.parameters(), worker.parameters(), strict=True):
            own.data[...] = p.data


def full(case, parameters=None):
    """Bytes that a rank sends in an all-reduce of all gradients, or of those of some parameters."""
    ranks = len(case)
    return 2 * (ranks - 1) / ranks * 8 * sum(p.size for p in parameters or case[0]["parameters"])


def moved(case):
    """The parameters that 22.5 moves."""
    return [p for p, q in zip(case["parameters"], case["q"], strict=True) if len(q)]
