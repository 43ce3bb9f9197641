"""What the ranks do in test_two_ways: a model whose parts are cut again, written and read."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, POSITIONS = 13, 430
# name -> (ranks along dp, along tp, the stage of fully_shard, or None). "parts, stage 3" has sequence_parallel, too.
WAYS = {"one": (1, 1, None), "data": (4, 1, None), "parts of 4": (1, 4, None), "stage 3": (4, 1, 3),
        "parts, stage 1": (2, 2, 1), "parts, stage 3": (2, 2, 3)}


def gpt():
    """With unequal parts of the embedding; the boundary of a unit of all is in the positions, which are not cut."""
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, POSITIONS, layers=1, heads=4, dim=48, dtype=np.float64)


class Run:
    """A model, cut in one of the WAYS, and its optimizer."""

    def __init__(self, way):
        dp, t, stage = WAYS[way]
        self.model, self.mesh = gpt(), comm.DeviceMesh(dp=dp, tp=t)
        self.data = self.mesh["dp"]
        if t > 1:
            tp.parallelize_module(self.model, self.mesh["tp"], tp.plan_of(self.model), way == "parts, stage 3")
        self.model = (DistributedDataParallel(self.model, self.data) if stage is None else
                      fully_shard(self.model, self.data, stage, units=[]))
        named = list(self.model.named_parameters())
        hidden = [p for name, p in named if p.ndim == 2 and "blocks" in name]
        self.optimizer = optim.Combined(optim.Muon(hidden, 0.02),
                                        optim.AdamW([p for _, p in named if all(p is not q for q in hidden)], 0.01))

    def train(self, steps):
        for step in steps:
            tokens = np.random.default_rng([3, step]).integers(0, VOCABULARY, (4, 7))
            mine = tokens[self.data.rank::self.data.size]
            self.optimizer.zero_grad()
            logits = mt.reshape(self.model(mine[:, :-1]), (-1, VOCABULARY))
            (nn.cross_entropy(logits, mine[:, 1:].ravel(), reduction="sum") * (1 / 24)).backward()
            self.optimizer.step()
        return self


def write(way, path):
    """Two steps, saved; (what full_state_dict gives, how many pieces this rank has of how many arrays)."""
    run = Run(way).train(range(2))
    checkpoints.save(path, run.model, run.optimizer, {"steps": 2}, comm.world())
    kinds = checkpoints.layout.layouts(run.model)
    return tp.full_state_dict(run.model), {name: [box for box, _ in kind.pieces] for name, kind in kinds.items()}


def read(way, path, target):
    """Load, and save again at once; then two more steps: what full_state_dict gives."""
    run = Run(way)
    for p in run.model.parameters():
        p.data[...] = np.nan
    checkpoints.load(path, run.model, run.optimizer, comm.world())
    checkpoints.save(target, run.model, run.optimizer, {}, comm.world())
    run.train(range(2, 4))
    return tp.full_state_dict(run.model) if hasattr(run.model, "units") or WAYS[way][1] > 1 else run.model.state_dict()


def loaded_state(way):
    """Whether full_state_dict gives what load_full_state_dict was given."""
    run = Run(way)
    state = {name: np.random.default_rng(k).standard_normal(value.shape)
             for k, (name, value) in enumerate(gpt().state_dict().items())}
    tp.load_full_state_dict(run.model, state)
    found = tp.full_state_dict(run.model)
    return None if not found else all(np.array_equal(found[name], state[name]) for name in state)


def other_values(path):
    """What saving says where a part that all have has changed on one rank alone."""
    run = Run("parts, stage 3")
    if comm.world().rank == 3:
        dict(run.model.named_parameters())["norm.weight"].data[...] += 1
    try:
        checkpoints.save(path, run.model, None, None, comm.world())
    except ValueError as error:
        return str(error)
    return "saved"
