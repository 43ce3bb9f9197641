"""What the ranks do in the tests of checkpoints: train in one way of cutting a model, go on in another."""

from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, TIME, BATCH, FEATURES, CLASSES = 11, 5, 12, 7, 3
# way of cutting -> the numbers of ranks it is tried with
WAYS = {"one": (1,), "data": (2, 3), "stage 1": (3,), "stage 2": (2,), "stage 3": (2, 3), "heads": (2,),
        "heads and data": (4,), "layers": (2,), "layers and data": (4,)}
OF = {"gpt": list(WAYS), "mlp": [way for way in WAYS if "heads" not in way]}


def gpt(dtype="f8", layers=2):
    """Tied, with dropout; its matrices are cut by ZeRO in the middle of rows."""
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, TIME, layers=layers, heads=4, kv_heads=2, dim=12, dropout=0.1, dtype=np.dtype(dtype))


def mlp(dtype="f8"):
    """Layers for a pipeline; a parameter without axes; a frozen one; large enough for several ranks' shards."""
    mt.manual_seed(6)
    dtype = np.dtype(dtype)
    net = nn.Sequential(nn.Linear(FEATURES, 90, dtype=dtype), nn.Tanh(), Scale(dtype), nn.Linear(90, 101, dtype=dtype),
                        nn.ReLU(), nn.Linear(101, CLASSES, dtype=dtype))
    net[0].bias.requires_grad_(False)
    return net


class Scale(nn.Module):
    """One number."""

    def __init__(self, dtype):
        super().__init__()
        self.factor = nn.Parameter(np.full((), 1.25, dtype))
        self.register_buffer("used", np.zeros((), np.int64))

    def forward(self, x):
        return x * self.factor


MODELS = {"gpt": gpt, "mlp": mlp}


def samples(name):
    rng = np.random.default_rng(8)
    if name == "gpt":
        tokens = rng.integers(0, VOCABULARY, (40, TIME + 1))
        return tokens[:, :-1], tokens[:, 1:]
    return rng.standard_normal((40, FEATURES)), rng.integers(0, CLASSES, 40)


class Training:
    """A model cut in some way, and its optimizer; train(first, end) makes those steps."""

    def __init__(self, name, way, exact=False, dtype="f8", lr=0.01):
        self.name, self.world, self.exact = name, comm.world(), exact
        model = MODELS[name](dtype)
        axes = {"heads": "tp", "layers": "pp"}.get(way.split()[0])
        mesh = comm.DeviceMesh(dp=-1, **({axes: 2} if axes else {}))
        self.axis = mesh["dp"]
        if axes == "tp":
            tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
        if axes == "pp":
            stages = cut_gpt(model, 2) if name == "gpt" else cut_sequential(model, 2, costs=[1] * len(model))
            chunk = stages[mesh.coords["pp"]]
            self.model = DistributedDataParallel(chunk, self.axis)
            self.pipeline = Pipeline([self.model], mesh["pp"], one_forward_one_backward(2, 3))
        elif way.startswith("stage"):
            self.model = fully_shard(model, self.world, stage=int(way[-1]), exact=exact, micro_shards=4)
        else:
            self.model = DistributedDataParallel(model, self.axis, exact=exact, micro_shards=4)
        groups = training.decay_groups(self.model, 0.1)
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        self.optimizer = optim.AdamW(groups, lr)
        self.units = TIME if name == "gpt" else 1

    def batches(self):
        loader = data.Loader(*samples(self.name), BATCH, seed=2, rank=self.axis.rank, size=self.axis.size,
                             micro_shards=4 if self.exact else 1)
        return [batch for epoch in range(4) for batch in loader.epoch(epoch)]

    def train(self, first, end):
        batches = self.batches()
        for step in range(first, end):
            if hasattr(self, "pipeline"):
                self.optimizer.zero_grad()
                self.pipeline.run(batches[step], lambda y, t: nn.cross_entropy(y, t, reduction="sum"), seed=3,
                                  step=step, over=self.axis, units=self.units, micro_shards=4)
                self.optimizer.step()
            else:
                training.train_step(self.model, self.optimizer, batches[step], loss_sum, self.world, seed=3, step=step,
                                    units=self.units, micro_shards=4)
        return self


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def begin(name, way, end, path, exact=False):
    """Train for so many steps, and save."""
    run = Training(name, way, exact).train(0, end)
    checkpoints.save(path, run.model, run.optimizer, {"step": end, "way": way}, run.world)


def go_on(name, way, sources, end, exact=False):
    """Load each of the sources in turn, train until `end`, and save beside it. Returns the facts found."""
    found = []
    for source, target in sources:
        run = Training(name, way, exact, lr=0.5)        # the rate is the checkpoint's
        facts = checkpoints.load(source, run.model, run.optimizer, run.world)
        run.train(facts["step"], end)
        checkpoints.save(target, run.model, run.optimizer, {"step": end}, run.world)
        found.append(facts)
    return found


def failing(path, rank):
    """save() where one rank can't write: (the error's text, what is in the folder)."""
    from minitorch_dist.checkpoints import writing
    run = Training("mlp", "data")
    write = writing.write

    def full(path, content):
        if run.world.rank == rank:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)
    writing.write = full
    try:
        checkpoints.save(path, run.model, run.optimizer, None, run.world)
    except OSError as error:
        return str(error), type(error).__name__
    finally:
        writing.write = write
        run.world.barrier()
    return "saved", ""


def elsewhere(path):
    """save() where rank 1 sees another folder by the same name."""
    from minitorch_dist.checkpoints import writing
    run, write = Training("mlp", "data"), writing.write
    writing.write = lambda file, content: write(Path(path).parent / file.name if run.world.rank else file, content)
    try:
        checkpoints.save(path, run.model, run.optimizer, None, run.world)
    except OSError as error:
        return str(error), type(error).__name__
    finally:
        writing.write = write
    return "saved", ""


def on_other_disks(path, async_op):
    """A save in a folder of which each rank has its own, as machines do that share no disk: what is said. (Nothing is
    left behind.)"""
    run = Training("mlp", "data")
    there = checkpoints.Checkpoints(Path(path) / str(run.world.rank) / "run", run.world, async_op=async_op)
    try:
        there.save(1, run.model, run.optimizer)
        there.wait()
    except OSError as error:
        return error.strerror, error.filename


def load_again(way, path, end):
    """Train, load, and train to the end: (the whole model on rank 0, what a tape says that is older)."""
    run = Training("mlp", way).train(0, 5)
    p = next(p for p in run.model.parameters() if p.requires_grad and p.size > 1)
    y = (p * p).sum()
    facts = checkpoints.load(path, run.model, run.optimizer, run.world)
    try:
        y.backward()
        stale = "not stale"
    except RuntimeError as error:
        stale = str(error)
    run.train(facts["step"], end)
    if way == "data":
        return run.model.state_dict(), stale
    return full_state_dict(run.model), stale


def failing_to_load(path, rank):
    """load() where one rank's model has another shape; whether anything was written."""
    world, model = comm.world(), mlp()
    if world.rank == rank:
        model[3].weight = nn.Parameter(np.zeros((4, 4)))
    before = [p.numpy().copy() for p in model.parameters()]
    try:
        checkpoints.load(path, model, None, world)
    except checkpoints.CheckpointError as error:
        return str(error), all((p.numpy() == b).all() for p, b in zip(model.parameters(), before, strict=True))
    return "loaded", None


def disagreeing(path):
    """Rates that differ between ranks: no run could go on from that."""
    run = Training("mlp", "data")
    run.optimizer.param_groups[1]["lr"] = 0.01 * (1 + run.world.rank)
    try:
        checkpoints.save(path, run.model, run.optimizer, None, run.world)
    except ValueError as error:
        return str(error)
    return "saved"
