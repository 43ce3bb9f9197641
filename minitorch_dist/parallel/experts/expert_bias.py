"""Experts kept equally busy without a loss: whoever had more tokens than the mean gets a lower bias after each step.

    model = DistributedDataParallel(nn.GPT(…, moe={"experts": 8, "balance": 0, "expert_bias": True}))
    for batch in loader.epoch(0):
        …                                       # forward and backward
        optimizer.step()
        loads = expert_bias.update(model)       # print it: who had how many tokens

A bias counts where tokens choose experts, and nowhere else (nn/moe.py): no gradient goes through it. Each MoE counts in
its `load` what tokens choose in training, in all calls since the last update: accumulated pieces, micro-shards, a
pipeline's micro-batches; not in evaluation, and not again what a checkpoint runs again. update() adds that up over the
ranks, one all-reduce of layers · experts integers, and moves each bias by speed · sign(mean - load). All ranks move
them alike, to the last bit, and nobody broadcasts them. They are buffers, saved and loaded with the model; counts
aren't, so save after update(). A step that is given up half-way has been counted all the same: before going back to a
checkpoint, update(model, speed=0) forgets it.

Workers that train apart (local_sgd/diloco.py) have to share their biases as well: let all of them call update(model,
comm=all_ranks) whenever they have met, instead of each after its own steps. A parameter server's workers can't: they
make steps at their own pace.
Source: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", algorithm 1.
"""

import math

from ...backend import to, to_device_of, xp
from ...nn.module import Module
from ...nn.moe import MoE
from ..wrapping import sharing_a_batch


class Loads(dict):
    """{path of a MoE: integers (experts,), on the host: how many tokens chose each}. Its text is a table."""

    def __str__(self):
        width = max(map(len, ("layer", *self)))
        lines = [f"{'layer':{width}}  MaxVio  loads, in % of the layer's mean"]
        for path, load in self.items():
            shares = 100 * load / (load.mean() or 1)
            lines.append(f"{path:{width}}  {max_violation(load):6.3f} " + "".join(f"{share:5.0f}" for share in shares))
        return "\n".join(lines)


def max_violation(load):
    """By how much the busiest expert exceeds the mean, as a part of the mean (MaxVio): 0 where all are equally busy,
    experts/k - 1 where all tokens choose the same ones; 0 before any token. load: integers (experts,)."""
    mean = float(load.mean())
    return float(load.max()) / mean - 1 if mean else 0.0


def update(model, speed=0.001, comm=None):
    """Move the biases of all experts below a model by what was chosen since the last call; returns the Loads, of all
    ranks. To be called after each optimizer step, also one that a GradScaler has left out. Collective: one
    all-reduce, and one more where ranks that share sequences have counted each their own positions
    (tensor/mixtures.py).

    model  a Module, or a list of a pipeline's chunks. A MoE without expert_bias is passed over
    speed  u, how far a bias moves; 0 leaves it where it is. Scores are between 0 and 1
    comm   the Communicator of the ranks whose samples make one batch (default: a DistributedDataParallel's or
           fully_shard model's own, over which it sums gradients)

    ValueError for a model in neither, where there are several ranks and none are given, and for a list whose modules
    have mixtures of one name. MismatchError on all ranks if they have different layers, or speeds.
    """
    if not 0 <= speed < math.inf:
        raise ValueError(f"expert_bias.update: speed={speed} must be a number, at least 0")
    speed = float(speed)        # a np.float64 would round otherwise
    if not isinstance(model, Module):
        chunks = list(model)
        paths = [path for chunk in chunks for path in _counting(chunk).values()]
        if len(set(paths)) < len(paths):
            raise ValueError(f"expert_bias.update: several of the modules have a mixture called "
                             f"{max(paths, key=paths.count)!r}: call update() for each module")
        return Loads({path: load for chunk in chunks for path, load in update(chunk, speed, comm).items()})
    layers = _counting(model)
    if not layers:
        return Loads()
    comm = sharing_a_batch(model, "expert_bias.update") if comm is None else comm
    groups, loads = {}, {}      # who has other positions of the same samples (tensor/mixtures.py), or None: its layers
    for m in layers:
        groups.setdefault(m.positions and m.positions.alike, []).append(m)
    for positions, group in groups.items():
        counted, end = xp.concatenate([to_device_of(m.load, m.expert_bias) for m in group]), 0
        what = f"loads of {len(group)} mixtures, {layers[group[0]]} to {layers[group[-1]]}, and speed {speed}"
        for over in (comm, positions):
            if over is not None:
                over.all_reduce(counted, what=what)
        host = to(counted, "cpu")
        for m in group:
            part = slice(end, end := end + len(m.load))
            load, loads[m] = counted[part], host[part]
            m.expert_bias += speed * xp.sign(load.sum() - len(load) * load).astype(xp.float32)
            m.load[...] = 0
    return Loads({path: loads[m] for m, path in layers.items()})


def _counting(model):
    """{MoE with biases: its path} of those below a model."""
    layers = {}
    for path, m in model.named_modules():
        if isinstance(m, MoE) and m.load is not None:
            layers.setdefault(m, path)
    return layers
