"""What the ranks do in the tests of offload. What must hold is checked by the parent process."""

from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.parallel import fully_shard
from minitorch_dist.parallel.offload import offload, offload_activations, offload_optimizer, stream_from_disk, streaming


def sharded_activations(folder):
    """Stage 3, whose views of gathered values are kept as places: (whether gradients have the same bits, bytes)."""
    world, found, written = comm.world(), [], []

    def put(self, owner, first, last, before=offload.Activations.put):
        written.append(last - first)
        return before(self, owner, first, last)
    for context in (lambda m: nullcontext(), lambda m: offload_activations(m, folder, 1)):
        mt.manual_seed(3)
        model = fully_shard(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 70), nn.Tanh(),
                                          nn.Linear(70, 5)), world)
        x = np.random.default_rng(world.rank).standard_normal((6, 30)).astype("f4")
        before, offload.Activations.put = offload.Activations.put, put
        try:
            with context(model):
                loss = mt.sum(mt.sin(model(mt.tensor(x))))
        finally:
            offload.Activations.put = before
        loss.backward()
        found.append([p.grad.data.tobytes() for p in model.parameters()])
    return found[0] == found[1], sum(written)


class Sharded:
    """A net in stage 2 or 3, with AdamW."""

    def __init__(self, stage, folder=None):
        mt.manual_seed(3)
        self.world = comm.world()
        self.model = fully_shard(nn.Sequential(nn.Linear(30, 90), nn.Tanh(), nn.Linear(90, 71), nn.Tanh(),
                                               nn.Linear(71, 5)), self.world, stage)
        self.optimizer = optim.AdamW(self.model.parameters(), 0.01)
        if folder:
            offload_optimizer(self.optimizer, folder)

    def steps(self, numbers):
        for step in numbers:
            x = np.random.default_rng([step, self.world.rank]).standard_normal((4, 30)).astype("f4")
            mt.sum(mt.sin(self.model(mt.tensor(x)))).backward()
            optim.clip_grad_norm_(self.model.parameters(), 1.0)
            with ledger.record(memory=True) as book:
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.counted = book.peak["optimizer"]
        return self

    def digest(self):
        state = self.optimizer.state_dict()
        return b"".join(p.data.tobytes() for p in self.model.parameters()) + \
            b"".join(a.tobytes() for arrays in state["state"] for a in arrays.values())


def sharded_state(folder):
    """The curve of six steps, with and without offload; halfway a checkpoint is loaded into the other kind."""
    world = comm.world()
    curves, counted = [], []
    for stage in (2, 3):
        plain, away = Sharded(stage).steps(range(3)), Sharded(stage, folder).steps(range(3))
        counted += [plain.counted, away.counted]
        for number, (first, into) in enumerate([(plain, folder), (away, None)]):
            path = f"{folder}/checkpoint-{stage}-{number}-{world.size}"
            checkpoints.save(path, first.model, first.optimizer, comm=world)
            resumed = Sharded(stage, into)
            checkpoints.load(path, resumed.model, resumed.optimizer, comm=world)
            curves.append(resumed.steps(range(3, 6)).digest())
        curves.append(plain.steps(range(3, 6)).digest())
        curves.append(away.steps(range(3, 6)).digest())
    return {"curves": curves, "counted": (min(counted[::2]), max(counted[1::2]))}


def save_sharded_gpt(path):
    """A checkpoint of a GPT that is cut over the ranks, after a step."""
    mt.manual_seed(2)
    model = fully_shard(nn.GPT(17, 12, layers=3, heads=4, dim=20), comm.world())
    optimizer = optim.SGD(model.parameters(), 0.1)
    mt.sum(mt.sin(model(np.arange(24).reshape(2, 12) % 17))).backward()
    optimizer.step()
    checkpoints.save(path, model, comm=comm.world())


def streamed(folder):
    """Outputs, bytes read and sent, and a refusal, of models that all ranks stream together."""
    from .test_offload_streaming import MODELS, inputs, net, outputs
    world, found = comm.world(), {}
    for name, (make, units) in MODELS.items():
        for prefetch in (0, 2):
            model = make()
            if world.rank:      # rank 0's values count
                for p in model.parameters():
                    p.data = np.array(p.data * 3)
            stream_from_disk(model, f"{folder}/{world.size}-{name}", prefetch, units and units(model), comm=world)
            found[name, prefetch] = outputs(model)
            if name == "gpt":
                found["text"] = model.generate(np.array([[1, 2, 3]]), 14, 0).tolist()
    read, found["read"] = streaming.read_into, []

    def counted(file, offset, memory, what):
        found["read"].append(memory.nbytes)
        read(file, offset, memory, what)
    model = stream_from_disk(net(), f"{folder}/{world.size}-net", comm=world)
    streaming.read_into = counted
    try:
        with ledger.record() as book, mt.no_grad():
            model(inputs(model))
    finally:
        streaming.read_into = read
    found["sent"] = book.total_bytes_sent()
    try:
        stream_from_disk(MODELS["gpt"][0](), f"{folder}/no", values={} if world.rank == 0 else None,
                         comm=world)
    except ValueError as error:
        found["refused"] = str(error)
    return found
