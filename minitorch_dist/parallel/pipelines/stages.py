"""A Sequential as stages of a pipeline, and what the stages hold together."""

import numpy as np

from ...nn.containers import Sequential
from .. import tied
from ..context.context import Context
from ..fsdp.fully_sharded import FullySharded
from .documents import Stage


def balanced(costs, parts):
    """Bounds [0, …, len(costs)] that cut the costs into so many stretches, none empty, with the least greatest sum."""
    n = len(costs)
    if not 1 <= parts <= n:
        raise ValueError(f"{n} layers can't be cut into {parts} stages")
    sums = np.concatenate([[0], np.cumsum(costs)])
    # best[k][j]: the least greatest sum of the first j costs in k + 1 stretches, and where the last of these begins
    best = [[(sums[j], 0) for j in range(n + 1)]]
    for k in range(1, parts):
        before = best[-1]
        best.append([min(((max(before[i][0], sums[j] - sums[i]), i) for i in range(k, j)), default=(np.inf, 0))
                     for j in range(n + 1)])
    bounds = [n]
    for row in reversed(best):
        bounds.append(row[bounds[-1]][1])
    return bounds[::-1]


def cut_sequential(model, stages, costs=None):
    """A Sequential as a list of so many Stages, one after another. Their layers keep their names, so that all
    parameters are called as they were, and random numbers, which are keyed by names, are the same. A stage that shares
    a parameter with an earlier one is a copy (parallel/tied.py).

    costs   what each layer costs (default: its number of parameters, at least 1)
    """
    if not isinstance(model, Sequential):
        raise TypeError(f"cut_sequential cuts an nn.Sequential between its layers; got a {type(model).__name__}")
    layers = list(model._modules.items())
    costs = [max(1, sum(p.size for p in layer.parameters())) for _, layer in layers] if costs is None else costs
    if len(costs) != len(layers):
        raise ValueError(f"cut_sequential: {len(costs)} costs for {len(layers)} layers")
    bounds, found = balanced(costs, stages), []
    context = next((m for m in model.modules() if isinstance(m, Context)), None)
    for lo, hi in zip(bounds, bounds[1:], strict=False):
        stage = Stage(context=context)
        for name, layer in layers[lo:hi]:
            stage.add_module(name, layer)
        found.append(stage)
    return tied.apart(found)


def full_state_dict(chunks, comm):
    """{name: NumPy array} of all ranks' chunks together, the state of the whole model, on every rank. Collective, over
    those that share a chunk, or have parts of its matrices, too."""
    from ..tensor.tensor_parallel import full_state_dict as whole  # it brings further ops
    mine = {}
    for chunk in chunks:
        state, copies = whole(chunk), [name for name, p in chunk.named_parameters() if tied.is_copy(p)]
        state = chunk.comm.broadcast_object(state) if isinstance(chunk, FullySharded) else state
        mine |= {name: value for name, value in state.items() if name not in copies}
    return {name: value for part in comm.all_gather_object(mine) for name, value in part.items()}
