"""What the ranks do in the tests of ZeRO inside of pipelines. What must hold is checked by the parent process."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, MixedPrecisionPolicy, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import NAMES, one_forward_one_backward, placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from . import plain
from .pipeline_cases import SEED, Sometimes, loader_for, loss_of, special
from .pipeline_cases import model as layers

STEPS, CLIP = 3, 0.05


class Again(nn.Module):
    """x W or x Wᵀ, of another layer's weight."""

    def __init__(self, layer, turned):
        super().__init__()
        self.weight, self.turned = layer.weight, turned

    def forward(self, x):
        return mt.linear(x, self.weight.T if self.turned else self.weight)


def tied(dtype):
    """Ten layers, of which the first, the sixth and the ninth have one matrix, and the fourth and the tenth another
    one."""
    mt.manual_seed(5)
    first, fourth = nn.Linear(plain.FEATURES, 9, dtype=dtype), nn.Linear(9, 9, dtype=dtype)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), fourth, nn.Tanh(), Again(first, True), nn.Tanh(),
                         nn.Dropout(0.2), Again(first, False), Again(fourth, False))


def frozen_bias(dtype):
    """Beside values of 16 bits it is float32, as what it is added to is then, and what goes to the next stage."""
    model = layers(dtype)
    model[0].bias.requires_grad_(False)
    return model


MODELS = {"layers": layers, "norms": lambda dtype: layers(dtype, norms=True), "special": lambda dtype: special(),
          "tied": tied, "frozen bias": frozen_bias}


def adamw(chunks):
    params = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    return optim.AdamW(params, 0.01, weight_decay=0.1) if params else None


def batches(dtype, size, comm, exact, steps=STEPS):
    """(step, this rank's part of its batch)."""
    loader = loader_for(dtype, size, comm.rank, comm.size, exact, exact)
    return zip(range(steps), (b for epoch in range(steps) for b in loader.epoch(epoch)), strict=False)


def one_process(jobs):
    """[(losses, state)] of whole models (name, dtype, batch, exact, clip), by train_step."""
    alone, found = comm.world_of_one(), []
    for name, dtype, size, exact, clip in jobs:
        module, losses = DistributedDataParallel(MODELS[name](dtype), alone, exact=exact), []
        optimizer = adamw([module])
        for step, batch in batches(dtype, size, alone, exact):
            losses.append(training.train_step(module, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels),
                                              alone, seed=SEED, step=step, clip=clip)[0])
        found.append((losses, module.state_dict()))
    return found


class Stages:
    """A pipeline of a model, ZeRO's stage along the mesh's other axis (0: DistributedDataParallel), and AdamW.

    mesh  has pp, and dp or (replicate, shard)
    """

    def __init__(self, mesh, name, m, stage, model="layers", dtype="f8", exact=False, **options):
        self.mesh = mesh
        self.dp = mesh["dp"] if "dp" in mesh.axes else mesh["replicate", "shard"]
        if "shard" in mesh.axes:
            options["shard_over"] = mesh["shard"]
        schedule = schedule_of(name, mesh["pp"].size, m, 2)
        placement = placement_of(schedule)
        parts = cut_sequential(MODELS[model](dtype), sum(map(len, placement)))

        def wrapped(part):
            if not stage:
                return DistributedDataParallel(part, self.dp, exact=exact)
            return fully_shard(part, self.dp, stage, exact=exact, **options) if list(part.parameters()) else part
        self.chunks = [wrapped(parts[s]) for s in placement[mesh["pp"].rank]]
        self.optimizer, self.pipeline = adamw(self.chunks), Pipeline(self.chunks, mesh["pp"], schedule)

    def zero_grad(self):
        for chunk in self.chunks:
            chunk.zero_grad()

    def run(self, batch, step, **options):
        self.zero_grad()
        return self.pipeline.run(batch, loss_of, seed=SEED, step=step, over=self.dp, **options)

    def train(self, some, clip=None):
        """The losses."""
        losses = []
        for step, batch in some:
            losses.append(self.run(batch, step))
            if clip is not None:
                self.pipeline.clip_grad_norm_(clip)
            if self.optimizer is not None:
                self.optimizer.step()
        return losses

    def state(self):
        """Of the whole model, on every rank."""
        return full_state_dict(self.chunks, self.mesh["pp"])


def curves(jobs, exact=False):
    """[(losses, the whole model's state)] of jobs (schedule, pp, m, stage, model, dtype, batch, clip)."""
    meshes, found = {}, []
    for name, pp, m, stage, model, dtype, size, clip in jobs:
        meshes[pp] = meshes.get(pp) or comm.DeviceMesh(dp=-1, pp=pp)
        it = Stages(meshes[pp], name, m, stage, model, dtype, exact)
        found.append((it.train(batches(dtype, size, it.dp, exact), clip), it.state()))
    return found


def copies():
    """(losses, state) of two stages on each rank, whose state is cut over two of four ranks, beside a copy of it."""
    it = Stages(comm.DeviceMesh(replicate=2, shard=2, pp=1), "interleaved", 3, 3)
    return it.train(batches("f8", 13, it.dp, False)), it.state()


# ---------------------------------------------------------------- counted

class Watch:
    """A hook that writes down what begins and what is through."""

    def __init__(self, events, axis):
        self.events, self.axis = events, axis

    def before(self, op, x, peer):
        self.events.append(("begins", self.axis, op))

    def after(self, op, x, peer):
        self.events.append(("through", self.axis, op))


def counted(name, m, stage):
    """Of a step: {"matrices": how many this rank has, "sent": {(axis, op): (calls, bytes)}, "live" and "peak" bytes,
    "events": what began and ended, "steps": the names of the schedule's, "products": by product of matrices, how many
    of these were through}."""
    mesh, events, products = comm.DeviceMesh(dp=2, pp=2), [], []
    it = Stages(mesh, name, m, stage, dtype="f4")
    some = list(batches("f4", 24, it.dp, False, 3))
    it.train(some[:1])
    it.zero_grad()
    with ledger.record(memory=True) as book:
        it.run(some[1][1], 1)
        it.optimizer.step()
    for axis in mesh.axes:
        mesh[axis].hooks.append(Watch(events, axis))
    product = np.matmul
    with ledger.record(timeline=True) as timeline:
        def done():
            return [span.name for span in timeline.spans if span.name in NAMES.values()]
        np.matmul = lambda *args, **options: products.append(len(done())) or product(*args, **options)
        try:
            it.run(some[2][1], 2)
        finally:
            np.matmul = product
    return {"matrices": sum(isinstance(m, nn.Linear) for chunk in it.chunks for m in chunk.modules()),
            "sent": {key: (book.calls[key], n) for key, n in book.bytes_sent.items() if n}, "live": dict(book.live),
            "peak": dict(book.peak), "events": events, "steps": done(), "products": products}


# ---------------------------------------------------------------- what goes with it

def scaled():
    """[(state after each of three steps, the scale)] of a training with a GradScaler, in whose first step one rank
    alone has an inf, and of one without, which has no first step."""
    found = []
    for enabled in (True, False):
        it = Stages(comm.DeviceMesh(dp=2, pp=2), "1f1b", 4, 3, dtype="f4")
        scaler = optim.GradScaler(2.0 ** 40, comm=comm.world(), enabled=enabled)
        for step, batch in batches("f4", 16, it.dp, False, 3):
            if step or enabled:
                it.run(batch, step, scaler=scaler)
                if step == comm.world().rank == 0:
                    next(p for p in it.chunks[0].parameters() if p.size).grad.data[...] = np.inf
                scaler.step(it.optimizer)
                scaler.update()
            found.append((it.state(), scaler.get_scale()))
    return found


def in_16_bits():
    """({kind: bytes of a step's gathers and reductions}, the state) of a MixedPrecisionPolicy, and the latter of a rank
    alone."""
    policy = MixedPrecisionPolicy("bfloat16", "bfloat16", output_dtype="float32")
    it = Stages(comm.DeviceMesh(dp=2, pp=2), "zb-h1", 2, 2, dtype="f4", mp_policy=policy)
    some = list(batches("f4", 16, it.dp, False, 3))
    it.train(some[:2])
    with ledger.record() as book:
        it.train(some[2:])
    module = fully_shard(layers("f4"), comm.world_of_one(), 2, mp_policy=policy)
    optimizer = adamw([module])
    for step, batch in batches("f4", 16, comm.world_of_one(), False, 3):
        training.train_step(module, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels),
                            comm.world_of_one(), seed=SEED, step=step)
    with module.gathered() as inside:
        alone = inside.state_dict()
    return {op: n for (axis, op), n in book.bytes_sent.items() if axis == "dp"}, it.state(), alone


def values_of_16_bits(pp):
    """The state of a model in exact mode, a stage on each rank, whose values have 16 bits."""
    policy = MixedPrecisionPolicy("bfloat16", output_dtype="float32")
    it = Stages(comm.DeviceMesh(dp=1, pp=pp), "1f1b", 8, 2, "frozen bias", "f4", True, mp_policy=policy)
    it.train(batches("f4", 16, it.dp, True))
    return it.state()


def half(folder, model, pipeline):
    """Two steps of a pipeline, or of one process, and a checkpoint."""
    world = comm.world()
    if pipeline:
        it = Stages(comm.DeviceMesh(dp=2, pp=2), "1f1b", 3, 3, model)
        it.train([pair for pair in batches("f8", 13, it.dp, False) if pair[0] < 2])
        checkpoints.save(Path(folder) / "half", it.chunks, it.optimizer, {}, world)
        return
    module = DistributedDataParallel(MODELS[model]("f8"), world)
    optimizer = adamw([module])
    make_steps(module, optimizer, range(2))
    checkpoints.save(Path(folder) / "half", module, optimizer, {}, world)


def make_steps(module, optimizer, which):
    """Of one process."""
    for step, batch in batches("f8", 13, comm.world(), False):
        if step in which:
            training.train_step(module, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels), comm.world(),
                                seed=SEED, step=step)


def one_goes_on(folder, model):
    """The state after STEPS steps of one process that goes on from a checkpoint."""
    module = DistributedDataParallel(MODELS[model]("f8"), comm.world())
    optimizer = adamw([module])
    checkpoints.load(Path(folder) / "half", module, optimizer, comm.world())
    make_steps(module, optimizer, range(2, STEPS))
    return module.state_dict()


def pipelines_go_on(folder, model):
    """[the state after STEPS steps] of two pipelines that go on from a checkpoint."""
    world = comm.world()
    other = Stages(comm.DeviceMesh(dp=1, pp=4), "zb-h1", 4, 2, model)
    again = Stages(comm.DeviceMesh(dp=2, pp=2), "interleaved", 4, 3, model)
    found = []
    for it in other, again:
        with mt.no_grad():
            for chunk in it.chunks if model == "layers" else ():    # what has been gathered is to be forgotten
                chunk(np.zeros((2, next(chunk.module.parameters()).shape[1])))
        checkpoints.load(Path(folder) / "half", it.chunks, it.optimizer, world)
        it.train([pair for pair in batches("f8", 13, it.dp, False) if pair[0] >= 2])
        found.append(it.state())
    return found


def sometimes(name, calls, place, stage):
    """This rank's gradients, whole, by stage of the pipeline, where the one at this place uses its parameter for the
    first `calls` micro-batches of four."""
    mesh = comm.DeviceMesh(dp=2, pp=2)
    mt.manual_seed(1)
    modules = [Sometimes(calls), nn.Linear(plain.FEATURES, plain.FEATURES, dtype="f8")][::1 - 2 * place]
    module = modules[mesh.coords["pp"]]
    module = fully_shard(module, mesh["dp"], stage) if stage else DistributedDataParallel(module, mesh["dp"])
    batch = next(iter(loader_for(np.float64, 16, mesh.coords["dp"], 2, False).epoch(0)))
    pipeline, optimizer = Pipeline([module], mesh["pp"], schedule_of(name, 2, 4)), optim.SGD(module.parameters(), 0.0)
    for step in range(2):       # the second one's first forward gathers what the optimizer has written
        optimizer.zero_grad()
        for part in module.modules():
            part.calls = calls
        pipeline.run(batch, loss_of, seed=1, step=step, over=mesh["dp"])
        optimizer.step()
    return mesh.coords["pp"], {key: None if p.grad is None else [
        part.reshape(-1) for part in mesh["dp"].all_gather_object(p.grad.numpy())] for key, p in
        module.named_parameters()}


def refused():
    """What is said where one rank's chunk is to be gathered for each micro-batch."""
    world = comm.world()
    stage = fully_shard(cut_sequential(layers("f8"), 2)[world.rank], world.split(world.rank), 3,
                        reshard_after_forward=world.rank == 0)
    try:
        Pipeline([stage], world, one_forward_one_backward(2, 4))
    except ValueError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- without a pipeline

def kept():
    """By way of stage 3: (gathers of a step of three micro-batches, gathered bytes after it, gradients); then outputs
    after an optimizer's step, inside and behind gathered(), after load_state_dict, and again the usual way; what NumPy
    makes of the first; gathered bytes behind gathered(), behind forwards that no backward has followed, at the end."""
    world, found = comm.world(), []
    rows = np.random.default_rng(world.rank).standard_normal((3, 4, plain.FEATURES))
    for keep in (False, True):
        mt.manual_seed(5)
        model = fully_shard(nn.Sequential(nn.Linear(plain.FEATURES, 9, dtype="f8"), nn.Linear(9, 5, dtype="f8")), world)
        model.set_reshard_after_backward(not keep)
        with ledger.record(memory=True) as book:
            for i, x in enumerate(rows):
                with model.no_sync() if i < 2 else nullcontext():
                    mt.sum(model(x) ** 2).backward()
        found.append((book.calls["world", "all_gather"], book.live["buffer"],
                      {name: p.grad.numpy().copy() for name, p in model.named_parameters()}))
    adamw([model]).step()
    with mt.no_grad(), ledger.record(memory=True) as book:
        with model.gathered() as module:
            state = module.state_dict()
            outputs = [model(rows[0])]
        live = [book.live["buffer"]]
        outputs.append(model(rows[0]))
        model.load_state_dict({name: 2 * value for name, value in state.items()})
        outputs.append(model(rows[0]))
        live.append(book.live["buffer"])
        model.set_reshard_after_backward(True)
        outputs.append(model(rows[0]))
        live.append(book.live["buffer"])
    wanted = rows[0] @ state["0.weight"].T + state["0.bias"]
    return found, [y.numpy() for y in outputs], wanted @ state["1.weight"].T + state["1.bias"], live


def whole_state():
    """Whether full_state_dict gives the whole model on every rank: of stages whose matrices are cut, plain, wrapped,
    and cut further."""
    mesh, found = comm.DeviceMesh(dp=1, pp=2, tp=2), {}
    mt.manual_seed(4)
    blocks = nn.Sequential(nn.TransformerBlock(8, 2), nn.TransformerBlock(8, 2))
    wanted = {name: value.copy() for name, value in blocks.state_dict().items()}
    for way, wrap in (("plain", lambda m: m), ("ddp", lambda m: DistributedDataParallel(m, mesh["dp"])),
                      ("zero", lambda m: fully_shard(m, mesh["dp"], 3))):
        mt.manual_seed(4)
        stage = cut_sequential(nn.Sequential(nn.TransformerBlock(8, 2), nn.TransformerBlock(8, 2)), 2)
        stage = stage[mesh["pp"].rank]
        tp.parallelize_module(stage, mesh["tp"], tp.plan_of(stage))
        state = full_state_dict([wrap(stage)], mesh["pp"])
        found[way] = set(state) == set(wanted) and all(np.array_equal(state[name], wanted[name]) for name in wanted)
    return found
