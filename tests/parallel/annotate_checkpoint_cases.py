"""What the ranks do in the tests of checkpoints of annotated models: train, save; load, go on."""

import numpy as np

from minitorch_dist import backend, checkpoints, comm, nn, optim
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.autodiff.tensor import Tensor
from minitorch_dist.parallel.sharding import annotate as a
from tests.checkpoints.cases import CLASSES, FEATURES, TIME, VOCABULARY, gpt, mlp

MODELS = {"gpt": lambda: gpt(layers=1), "mlp": mlp}


def rows(model, *axes):
    """Annotations that cut the first dimension of each parameter which has enough, over all of these axes."""
    return {name: [axes, *[-1] * (p.ndim - 1)] for name, p in model.named_parameters() if p.ndim and p.shape[0] > 3}


def inside(annotations, axis):
    """These, and each first dimension cut over one more axis, inside of the others."""
    return {name: [axis if dims[0] == -1 else (dims[0], axis), *dims[1:]] for name, dims in annotations.items()}


# {way: (the mesh's axes, annotations of a model, dims_mapping of its inputs)}; uneven where 11 and 101 rows are cut
WAYS = {
    "one": ({"dp": 1}, lambda model: {}, [-1, -1]),
    "megatron": ({"tp": 2}, a.megatron, [-1, -1]),
    "rows": ({"dp": 3}, lambda model: rows(model, "dp"), ["dp", -1]),
    "parts of parts": ({"dp": 2, "tp": 2}, lambda model: inside(a.megatron(model), "dp"), ["dp", -1]),
    "rows twice": ({"dp": 2, "tp": 2}, lambda model: rows(model, "dp", "tp"), [("dp", "tp"), -1]),
}


def batch(name, step):
    rng = np.random.default_rng(step)
    if name == "mlp":
        return rng.standard_normal((7, FEATURES)), rng.integers(0, CLASSES, 7)
    return rng.integers(0, VOCABULARY, (2, 6, TIME))


class Training:
    """An annotated model and its optimizer; whole(): its state, as the names of a checkpoint have it."""

    def __init__(self, name, way, lr=0.01):
        axes, annotations, self.dims = WAYS[way]
        self.name, self.mesh, self.model = name, comm.DeviceMesh(**axes), MODELS[name]()
        a.shard_parameters(self.model, self.mesh, annotations(self.model))
        self.optimizer = optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr, weight_decay=0.1)

    def train(self, first, end):
        for step in range(first, end):
            inputs, labels = batch(self.name, step)
            with backend.random_scope(3, step, len(inputs), (0, len(inputs))):
                logits = self.model(a.mesh_split(inputs, self.mesh, self.dims))
                (nn.cross_entropy(logits, labels, "sum") / labels.size).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def whole(self):
        parts = a.sharded_parameters(self.model)
        at = {id(p): name for name, p in self.model.named_parameters()}
        found = {f"model.{name}": array for name, array in a.full_state_dict(self.model).items()}
        saved = self.optimizer.state_dict()
        for p, state in zip(self.optimizer.param_groups[0]["params"], saved["state"], strict=True):
            part = parts[at[id(p)]]
            for kind, array in state.items():
                moment = a.Sharded(Tensor(array), part.shape, part.layout, part.comms)
                found[f"optimizer.{kind}.{at[id(p)]}"] = np.array(lower(moment.full()))
        return found


def begin(name, way, end, path):
    """Train for so many steps, save; the whole state, gathered."""
    run = Training(name, way).train(0, end)
    checkpoints.save(path, run.model, run.optimizer, {"step": end}, run.mesh.world)
    return run.whole()


def go_on(name, way, paths, end):
    """Of each checkpoint: (the whole state as it was loaded, and at the end)."""
    found = []
    for path in paths:
        run = Training(name, way, lr=0.5)       # the rate is the checkpoint's
        facts = checkpoints.load(path, run.model, run.optimizer, run.mesh.world)
        found.append((run.whole(), run.train(facts["step"], end).whole()))
    return found
