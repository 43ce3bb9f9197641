"""What the ranks do in test_lora_ranks. What must hold is checked by the parent process."""

import warnings
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, checkpoints, comm, data, ledger, nn, optim, training
from minitorch_dist.compress import lora
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.context import context_parallel, cut_sequence, join_sequence
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines import full_state_dict as whole_of_stages
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward, zb_h1
from minitorch_dist.parallel.tensor import tensor_parallel as tp

WIDTHS, RANK, STEPS, SEED = (7, 70, 13, 90, 5), 3, 3, 4


def plain(dtype=np.float64):
    """Four Linears, 0, 2, 4 and 6."""
    mt.manual_seed(5)
    layers = []
    for inside, out in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(inside, out, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def model(targets=("0", "2", "4", "6"), dtype=np.float64, **options):
    """The same; the targets have adapters, whose B isn't 0."""
    return moved(lora.add(plain(dtype), RANK, 5, targets=targets, **options))


def moved(model):
    """The model with other adapters than zeros."""
    with mt.no_grad():
        for number, p in enumerate(lora.parameters(model)):
            p[...] = np.random.default_rng(number).standard_normal(p.shape) / 3
    return model


def batches(rank, size, exact=False, dtype=np.float64):
    random = np.random.default_rng(8)
    x, labels = random.standard_normal((96, WIDTHS[0])).astype(dtype), random.integers(0, WIDTHS[-1], 96)
    loader = data.Loader(x, labels, 24 if exact else 23, seed=2, rank=rank, size=size, micro_shards=8 if exact else 1)
    return zip(range(STEPS), loader.epoch(0), strict=False)


def loss_of(output, labels):
    return nn.cross_entropy(output, labels, reduction="sum")


def sgd(params):
    return optim.SGD(params, 0.5, momentum=0.9) if params else None


def train(wrap, comm, exact=False, dtype=np.float64, **options):
    """(the wrapped model, its optimizer, what the last step has sent) after some steps."""
    wrapped = wrap(model(dtype=dtype, dropout=0.1, **options))
    optimizer = sgd(lora.parameters(wrapped))
    for step, batch in batches(comm.rank, comm.size, exact, dtype):
        with ledger.record() as book:
            training.train_step(wrapped, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels), comm,
                                seed=SEED, step=step, clip=0.3)
    return wrapped, optimizer, {op: sent for (_, op), sent in book.bytes_sent.items()}


WRAPPERS = {"DDP": DistributedDataParallel} | {
    f"ZeRO {stage}": lambda module, comm, stage=stage, **options: fully_shard(
        module, comm, stage, units=[module[0], module[2], module[4]], **options) for stage in (1, 2, 3)}


def wrapped():
    """{(wrapper, quantize): (state, bytes sent in a step, elements of the optimizer's state)}; state on rank 0."""
    world, found = comm.world(), {}
    for name, wrapper in WRAPPERS.items():
        for quantize in (None, "nf4") if name in ("DDP", "ZeRO 3") else (None,):
            m, optimizer, sent = train(lambda module, w=wrapper: w(module, world), world, quantize=quantize)
            state = m.state_dict() if name == "DDP" else full_state_dict(m)
            held = sum(array.size for state in optimizer.state for array in state.values())
            found[name, quantize] = state, sent, held
    return found


def exactly(names):
    """{wrapper: state} in exact mode, float32."""
    world, found = comm.world(), {}
    for name in names:
        wrapper = WRAPPERS[name]
        m, *_ = train(lambda module, w=wrapper: w(module, world, exact=True), world, True, np.float32)
        found[name] = m.state_dict() if name == "DDP" else full_state_dict(m)
    return found


# ---------------------------------------------------------------- pipelines

def staged(targets, schedule, wrapper, exact=False, scaled=False, device="cpu"):
    """The state after some steps of a pipeline over all ranks, of which the targets are trained."""
    world = comm.world()
    mesh = comm.DeviceMesh(pp=world.size)
    part = cut_sequential(model(targets, np.float32 if exact else np.float64), world.size, [1] * 7)[world.rank]
    part, mine = part.to(device), any(p.requires_grad for p in part.parameters())
    if wrapper == "DDP" or wrapper and mine:
        alone = comm.world_of_one()
        part = DistributedDataParallel(part, alone, exact=exact) if wrapper == "DDP" else \
            fully_shard(part, alone, int(wrapper[-1]), exact=exact)
    optimizer, scaler = sgd(lora.parameters(part)), optim.GradScaler(2.0 ** 10, enabled=scaled, comm=world)
    pipeline = Pipeline([part], mesh["pp"], schedule(world.size, 8 if exact else 4))
    for step, batch in batches(0, 1, exact, np.float32 if exact else np.float64):
        part.zero_grad()
        pipeline.run(batch, loss_of, seed=SEED, step=step, scaler=scaler)
        scaler.unscale_(optimizer)
        pipeline.clip_grad_norm_(0.3)
        scaler.step(optimizer)
        scaler.update()
    return whole_of_stages([part], mesh["pp"])


def staged_on_gpu():
    """staged's state of a scaled pipeline of which one stage is trained, on the stand-in for a GPU."""
    from tests.device.fake_cupy import installed
    with warnings.catch_warnings(), installed():
        return staged(("0",), one_forward_one_backward, None, scaled=True, device="cuda")


def pipelines(jobs):
    """[state] of staged's arguments."""
    schedules = {"1f1b": one_forward_one_backward, "zb_h1": zb_h1}
    return [staged(targets, schedules[name], wrapper, **options) for targets, name, wrapper, options in jobs]


def one_process(targets, exact=False):
    """What staged gives, without a pipeline."""
    alone = comm.world_of_one()
    dtype = np.float32 if exact else np.float64
    m = DistributedDataParallel(model(targets, dtype), alone, exact=exact)
    optimizer = sgd(lora.parameters(m))
    for step, batch in batches(0, 1, exact, dtype):
        training.train_step(m, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels), alone, seed=SEED,
                            step=step, clip=0.3)
    return m.state_dict()


# ---------------------------------------------------------------- tensor parallelism

PLAN = {"0": "column", "2": "row", "4": "column", "6": "row"}


def cut(dropout=0.0):
    """model, of which each rank has parts."""
    made = lora.add(tp.parallelize_module(plain(), comm.world(), PLAN), RANK, 5, dropout, targets="*")
    tp.load_full_state_dict(made, model().state_dict())
    return made


def parts():
    """[(gradients of the whole, bytes sent forward, backward)] of a batch, with dropout: of a model with adapters, and
    of one without them; and what is refused."""
    world, (_, batch), found = comm.world(), next(batches(0, 1)), []
    x = mt.tensor(batch.inputs, requires_grad=True)
    for m in cut(0.2), tp.parallelize_module(plain(), world, PLAN):
        with ledger.record() as forward:
            loss = loss_of(m(x), batch.labels)
        with ledger.record() as backward:
            loss.backward()
        with mt.no_grad():
            for p in m.parameters():
                p[...] = 0 if p.grad is None else p.grad
        found.append((tp.full_state_dict(m), forward.total_bytes_sent(), backward.total_bytes_sent()))
    said = []
    block = nn.TransformerBlock(12, 6)
    for attempt in (lambda: lora.merge(cut()), lambda: lora.state_dict(cut()), lambda: lora.add(
            tp.parallelize_module(plain(), world, PLAN), targets="*", quantize="nf4"), lambda: tp.parallelize_module(
            model(), world, PLAN), lambda: tp.parallelize_module(lora.add(block), world, {"attention": "heads"}),
            lambda: lora.add(DistributedDataParallel(plain(), world), targets="*"),
            lambda: lora.add(fully_shard(plain(), world).module, targets="*")):
        try:
            attempt()
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return found, said


def of_sequences(kind, how):
    """Gradients of the whole of a batch, with dropout, by all-to-alls of weights of attention as well: of a GPT that is
    cut with this sequence_parallel and has parts of the sequences, and of one that isn't."""
    mesh, found, tokens = comm.DeviceMesh(cp=2, tp=-1), [], np.random.default_rng(6).integers(0, 9, (3, 8))
    for divided in (True, False):
        mt.manual_seed(2)
        gpt, whole = (nn.GPT(9, 8, layers=1, heads=8, dim=16, dtype=np.float64,
                             attention_dropout=0.3 * (how == "all_to_all")) for _ in range(2))
        if divided:
            tp.parallelize_module(context_parallel(gpt, mesh["cp"], how), mesh["tp"], tp.plan_of(gpt), kind)
        lora.add(gpt, RANK, 5, 0.4)
        tp.load_full_state_dict(gpt, moved(lora.add(whole, RANK, 5)).state_dict())
        gpt = DistributedDataParallel(gpt, mesh["cp"] if divided else comm.world_of_one())
        inputs, targets = (cut_sequence(x, mesh["cp"]) if divided else x for x in (tokens, tokens[:, ::-1]))
        with backend.random_scope(SEED, 1, 5, (1, 4)):
            gpt(inputs, targets=targets).sum().backward()
        with mt.no_grad():
            for p in lora.parameters(gpt):
                p[...] = p.grad
        found.append(tp.full_state_dict(gpt))
    return found


def of_routers(sizes, first):
    """Gradients of adapters beside the routers of two mixtures, with dropout, of a batch's sequences: of a GPT that a
    mesh of these sizes divides (tp: experts, too), and of one that isn't divided. first: adapters come before the
    cuts."""
    mesh, found, tokens = comm.DeviceMesh(**{"cp": 1, "tp": 1} | sizes), [], \
        np.random.default_rng(6).integers(0, 9, (3, 8))
    for divided in (True, False):
        mt.manual_seed(2)
        gpt = nn.GPT(9, 8, layers=2, heads=2, dim=16, dtype=np.float64, moe={
            "experts": 4, "capacity_factor": None, "balance": 0, "z": 0.1, "std": 0.3})
        for step in ("adapters", "cuts") if first else ("cuts", "adapters"):
            if step == "adapters":
                lora.add(gpt, RANK, 5, 0.4, "*router")
            elif divided and mesh.axes["cp"] > 1:
                context_parallel(gpt, mesh["cp"])
            elif divided:
                tp.parallelize_module(gpt, mesh["tp"], tp.plan_of(gpt), True)
                tp.parallelize_module(gpt, mesh["tp"], moe.plan_of(gpt))
        for number, p in enumerate(lora.parameters(gpt)):
            p.data[...] = 0.1 * np.random.default_rng(number).standard_normal(p.shape)
        gpt = DistributedDataParallel(gpt, mesh["cp"] if divided else comm.world_of_one())
        inputs, targets = (cut_sequence(x, mesh["cp"]) if divided else x for x in (tokens, tokens[:, ::-1]))
        with backend.random_scope(SEED, 1, 5, (1, 4)):
            losses, aux = gpt(inputs, targets=targets)
            (losses.sum() + inputs.size * aux).backward()
        found.append({name: p.grad.numpy() for name, p in gpt.named_parameters() if p.requires_grad})
    return found


# ---------------------------------------------------------------- checkpoints

def one_step(m, optimizer, number):
    """Of the whole batch, on each rank alike."""
    batch = list(batches(0, 1))[number][1]
    optimizer.zero_grad()
    (loss_of(m(batch.inputs), batch.labels) / batch.count).backward()
    optimizer.step()


def saved(folder):
    """A step of tensor parallelism, saved; then one of ZeRO 3, which goes on from there. The state, on rank 0; and the
    adapters, saved and loaded by themselves."""
    world, folder = comm.world(), Path(folder)
    m = cut()
    optimizer = sgd(lora.parameters(m))
    one_step(m, optimizer, 0)
    checkpoints.save(folder / "all", m, optimizer, {}, world)
    m = WRAPPERS["ZeRO 3"](lora.add(plain(), RANK, 5, targets="*"), world)
    optimizer = sgd(lora.parameters(m))
    checkpoints.load(folder / "all", m, optimizer, world)
    _, batch = list(batches(world.rank, world.size))[1]
    training.train_step(m, optimizer, batch, lambda m, s: loss_of(m(s.inputs), s.labels), world, seed=SEED, step=1)
    state = full_state_dict(m)
    with m.gathered():
        merged = lora.merge(m.module)(batch.inputs).numpy()
        lora.unmerge(m.module)
    kept, optimizer, _ = train(DistributedDataParallel, world)
    checkpoints.save(folder / "adapters", lora.Adapters(kept), optimizer, {}, world)
    return state, merged, batch.inputs, kept.state_dict()


def stage_without_attention():
    """What the last of two stages, an output layer with an adapter, makes of whole sequences, and of the ranks' parts
    where the model it was cut from is of these, put together."""
    world, found = comm.world(), []
    x = np.random.default_rng(3).standard_normal((2, 4 * world.size, 8))
    for divided in (False, True):
        mt.manual_seed(1)
        whole = nn.Sequential(nn.TransformerBlock(8, 2, causal=True, dtype="f8"), nn.Linear(8, 5, dtype="f8"))
        stage = cut_sequential(context_parallel(whole, world) if divided else whole, 2, [1, 1])[1]
        moved(lora.add(stage, RANK, 5, 0.5, targets="1"))
        with backend.random_scope(SEED, 1, len(x), (0, len(x))):
            y = stage(cut_sequence(x, world) if divided else x).numpy()
        found.append(join_sequence(y, world) if divided else y)
    return found
