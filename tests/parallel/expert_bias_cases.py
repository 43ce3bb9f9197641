"""What the ranks do in test_expert_bias. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.experts import expert_bias
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .moe_cases import BATCH, LENGTH, VOCABULARY, End, Start, loss_sum, sequences

STEPS, SPEED, EXPERTS, K, LAYERS = 4, 0.03, 8, 3, 2
MIXTURE = {"experts": EXPERTS, "k": K, "capacity_factor": EXPERTS / K, "group": "sequence", "balance": 0, "std": 0.5,
           "mlp": "swiglu", "shared": 1, "score": "sigmoid", "route_scale": 1.5, "nodes": (4, 2), "expert_bias": True,
           "sequence_balance": 0.05}


def gpt():
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=LAYERS, heads=2, dim=8, hidden=6, dtype=np.float64, moe=MIXTURE)


def history(loads):
    return {path: load.tolist() for path, load in loads.items()}


class Training:
    """A model in training. size: ranks that divide the experts; tensor: those that divide the matrices; stage: of
    fully_shard, 0 for DistributedDataParallel."""

    def __init__(self, size=1, tensor=1, stage=0, sequence=False, exact=False):
        mesh = comm.DeviceMesh(dp=-1, ep=size, tp=tensor)
        self.on, model = mesh["dp", "ep"], gpt()
        if tensor > 1:
            tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), sequence_parallel=sequence)
        if size > 1:
            tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
        self.replica = fully_shard(model, self.on, stage=stage, exact=exact) if stage else \
            DistributedDataParallel(model, self.on, exact=exact)
        self.optimizer = optim.AdamW(self.replica.parameters(), lr=0.01, weight_decay=0.1)
        self.loader = data.Loader(*sequences(), BATCH, seed=2, rank=self.on.rank, size=self.on.size,
                                  **{"micro_shards": 8} if exact else {})

    def steps(self, first, last, accumulate=1):
        """[(loss, {path: load})] of these steps."""
        found = []
        for step in range(first, last):
            batch = next(self.loader.epoch(step))
            loss, _ = training.train_step(self.replica, self.optimizer, batch, loss_sum, self.on, seed=3, step=step,
                                          units=LENGTH, accumulate=accumulate)
            found.append((loss, history(expert_bias.update(self.replica, SPEED))))
        return found

    def state(self):
        """Whole parameters and biases; {} where another rank has them."""
        return tp.full_state_dict(self.replica)


def train(how, accumulate=1):
    """([(loss, loads)], the whole state after STEPS steps). how: Training's arguments."""
    run = Training(**how)
    return run.steps(0, STEPS, accumulate), run.state()


def exact_bits(stage):
    """{name: bytes} after STEPS steps in exact mode."""
    return {name: value.tobytes() for name, value in train({"stage": stage, "exact": True})[1].items()}


def pipelined(pp, size):
    """(loads of each step, the whole state) of a pipeline of pp stages, the experts divided over `size` ranks."""
    mesh = comm.DeviceMesh(pp=pp, ep=size)
    mt.manual_seed(6)
    model = nn.Sequential(Start(), *(nn.TransformerBlock(8, 2, causal=True, dtype=np.float64, hidden=6, moe=MIXTURE)
                                     for _ in range(2)), End())
    if size > 1:
        tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
    here, last = mesh.coords["pp"], pp - 1
    stage = DistributedDataParallel(ep.OneTensor(cut_sequential(model, pp, [1] * 4)[here], here == 0, here == last),
                                    mesh["ep"])
    pipeline = Pipeline([stage], mesh["pp"], one_forward_one_backward(pp, 4))
    optimizer = optim.AdamW(stage.parameters(), lr=0.01)
    loader = data.Loader(*sequences(), BATCH, seed=2, rank=mesh.coords["ep"], size=size)
    loads = []
    for step, batch in enumerate(loader.epoch(0)):
        optimizer.zero_grad()
        pipeline.run(batch, lambda y, labels: nn.cross_entropy(y[0], labels, reduction="sum") + labels.size * y[1],
                     seed=0, step=step, units=LENGTH, over=mesh["ep"])
        optimizer.step()
        loads.append(expert_bias.update(pipeline.chunks, SPEED))
    parts = mesh["pp"].all_gather_object(([history(each) for each in loads], tp.full_state_dict(stage)))
    return ([{path: load for part, _ in parts for path, load in part[i].items()} for i in range(len(loads))],
            {name: value for _, part in parts for name, value in part.items()})


def counted():
    """({op: (calls, bytes sent)} of update() alone, {op: calls} of a step before it)."""
    run = Training()
    run.steps(0, 2)         # the first backward cuts the buckets anew
    batch = next(run.loader.epoch(2))
    with ledger.record() as step:
        training.train_step(run.replica, run.optimizer, batch, loss_sum, run.on, seed=3, step=2, units=LENGTH)
    with ledger.record() as book:
        expert_bias.update(run.replica)
    return ({op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls},
            {op: count for (axis, op), count in step.calls.items()})


def resumed(folder, size):
    """(the state after STEPS steps with a checkpoint half-way, that of a run that goes on from it)."""
    run = Training(size)
    run.steps(0, STEPS // 2)
    checkpoints.save(folder, run.replica, run.optimizer, {}, comm.world())
    run.steps(STEPS // 2, STEPS)
    again = Training(size)
    again.steps(5, 7)       # other values, and biases
    checkpoints.load(folder, again.replica, again.optimizer, comm.world())
    again.steps(STEPS // 2, STEPS)
    return run.state(), again.state()


def continued(folder, how):
    """The state of a run that goes on from there, cut in another way."""
    run = Training(**how)
    checkpoints.load(folder, run.replica, run.optimizer, comm.world())
    run.steps(STEPS // 2, STEPS)
    return run.state()


def workers():
    """Of DiLoCo's workers, who share biases when they meet: (each time's loads, the biases, tokens told of)."""
    world, model = comm.world(), gpt()
    diloco = DiLoCo(model, optim.AdamW(model.parameters(), lr=0.01), world, every=2)
    tokens, labels = sequences()
    loads = []
    for step in range(4):
        rows = np.random.default_rng([step, world.rank]).integers(0, len(tokens), 3 + world.rank)
        diloco.zero_grad()
        loss = loss_sum(model, data.loader.Shard(0, tokens[rows], labels[rows], ())) / labels[rows].size
        loss.backward()
        diloco.step(len(rows))
        if diloco.steps % diloco.settings["every"] == 0:
            loads.append(history(expert_bias.update(model, SPEED, comm=world)))
    return loads, {name: b.tolist() for name, b in model.named_buffers()}


def joined():
    """(the loads of each step, the biases) of ranks of which one has fewer batches."""
    model = DistributedDataParallel(gpt())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = sequences()
    loads = []

    def update():
        optimizer.step()
        loads.append(history(expert_bias.update(model, SPEED)))
    with model.join(update) as count:
        for _ in range(1 + model.comm.rank):
            optimizer.zero_grad()
            (loss_sum(model, data.loader.Shard(0, tokens[:2], labels[:2], ())) / (LENGTH * count(2))).backward()
            update()
    return loads, {name: b.tolist() for name, b in model.named_buffers()}


def errors():
    """{what is wrong: (type, message)}."""
    found, rank = {}, comm.world().rank
    own = [comm.world().split(0, name=f"own {i}") for i in range(3)]      # each is spoilt by its mismatch

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def named(**layers):
        model = nn.Sequential()
        for name, experts in layers.items():
            model.add_module(name, nn.MoE(4, 4, experts, expert_bias=True))
        return model
    attempt("unwrapped", lambda: expert_bias.update(gpt()))
    attempt("speed", lambda: expert_bias.update(DistributedDataParallel(gpt()), -0.1))
    attempt("no end", lambda: expert_bias.update(DistributedDataParallel(gpt()), np.inf))
    attempt("speeds", lambda: expert_bias.update(gpt(), (1 + rank) / 8, own[0]))
    attempt("layers", lambda: expert_bias.update(named(**{f"layer{rank}": 4}), comm=own[1]))
    attempt("experts", lambda: expert_bias.update(named(layer=2 + 2 * rank), comm=own[2]))
    attempt("no biases", lambda: expert_bias.update(nn.MoE(4, 4, 2)))
    return found
