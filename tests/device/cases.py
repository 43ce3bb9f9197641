"""What two ranks do with arrays on GPUs (the stand-in); each function runs on every rank. Every call is made with
arrays of the host too, and the results are compared by the parent."""

from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn, optim, training
from minitorch_dist.data import Loader
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.servers import ParameterServer

from .fake_cuda import events
from .fake_cupy import installed, transfers


def stand_in(path, rank):
    """The stand-in, with NCCL where it is asked for; nothing where CuPy itself shall run."""
    if path.startswith("real"):
        return nullcontext()
    if path != "nccl":
        return installed()
    from . import fake_nccl
    return installed(nccl=fake_nccl.module())


def gpu_of(path, rank):
    """NCCL wants a GPU for each rank; otherwise all share the first."""
    return f"cuda:{rank if path.endswith('nccl') else 0}"


def values(rank, size, dtype, salt=0):
    rng = np.random.default_rng([rank, size, salt])
    return (rng.standard_normal(size) * 10).astype(dtype)


def calls(world, place, async_op):
    """{name of a call: the arrays after it}, with all arrays made by `place`."""
    rank, n, results = world.rank, world.size, {}

    def run(name, call, *arrays):
        work = call(*arrays)
        assert (work is not None) == async_op
        if async_op:
            work.wait()
            assert work.is_completed()
        results[name] = [a for a in arrays if a is not None]

    for dtype in ("f4", "f8", "i4", "i8", "i2", "u1"):
        for op in ("sum", "max", "min") + (("mean",) if dtype[0] == "f" else ()):
            run(f"all_reduce {op} {dtype}", lambda x, op=op: world.all_reduce(x, op, async_op=async_op),
                place(values(rank, 37, dtype)))
            run(f"reduce {op} {dtype}", lambda x, op=op: world.reduce(x, 1, op, async_op=async_op),
                place(values(rank, 5, dtype)))
            run(f"reduce_scatter {op} {dtype}",
                lambda out, x, op=op: world.reduce_scatter(out, x, op, async_op=async_op),
                place(np.zeros(9, dtype)), place(values(rank, 9 * n, dtype)))
    run("exact", lambda x: world.all_reduce(x, exact=True, async_op=async_op), place(values(rank, 37, "f4")))
    whole = place(values(rank, 6 * n, "f4"))
    run("reduce_scatter in place", lambda out, x: world.reduce_scatter(out, x, async_op=async_op),
        whole.reshape(n, 6)[rank], whole)
    run("all_gather", lambda out, x: world.all_gather(out, x, async_op=async_op),
        place(np.zeros((n, 3, 2), bool)), place(values(rank, 6, "f8").reshape(3, 2) > 0))
    whole = place(values(rank, 6 * n, "f4"))
    run("all_gather in place", lambda out, x: world.all_gather(out, x, async_op=async_op),
        whole, whole.reshape(n, 6)[rank])
    run("gather", lambda out, x: world.gather(out, x, 1, async_op=async_op),
        place(np.zeros(4 * n, "f8")) if rank == 1 else None, place(values(rank, 4, "f8")))
    run("scatter", lambda out, x: world.scatter(out, x, 1, async_op=async_op),
        place(np.zeros(4, "f8")), place(values(rank, 4 * n, "f8")) if rank == 1 else None)
    counts = [[0, 3], [2, 1]]       # rows from rank to rank; rank 0 keeps none for itself
    run("all_to_all", lambda out, x: world.all_to_all(out, x, counts[rank], [c[rank] for c in counts],
                                                      async_op=async_op),
        place(np.zeros((sum(c[rank] for c in counts), 2), "f4")), place(values(rank, 6, "f4").reshape(3, 2)))
    run("broadcast", lambda x: world.broadcast(x, 1, async_op=async_op), place(values(rank, 7, "f2")))
    run("empty", lambda x: world.all_reduce(x, async_op=async_op), place(np.zeros((0, 3), "f4")))
    run("0-d", lambda x: world.all_reduce(x, async_op=async_op), place(np.array(2.0 + rank)))
    if not async_op:
        run("by hand", lambda x: world.all_reduce(x, "mean", algorithm="ring"), place(values(rank, 37, "f4")))
        run("message", lambda x: world.send(x, 1, 4) if rank == 0 else world.recv(x, 0, 4),
            place(values(rank, 5, "f4")))
    else:
        run("message", lambda x: world.isend(x, 1) if rank == 0 else world.irecv(x, 0), place(values(rank, 5, "f4")))
    return results


def every_call(path):
    """(results on the host, those on a GPU, counts on the host, those on a GPU, the path, the events of one call)."""
    world = comm.world()
    with stand_in(path, world.rank):
        backend.use(gpu_of(path, world.rank))
        found = []
        for place in (np.array, lambda x: backend.to(x, "cuda")):
            with ledger.record() as book:
                results = {}
                for async_op in (False, True):
                    results |= {(name, async_op): arrays for name, arrays in calls(world, place, async_op).items()}
            kinds = {type(a) for arrays in results.values() for a in arrays}
            assert (kinds == {np.ndarray}) == (place is np.array) and len(kinds) == 1
            results = {name: [backend.to(a, "cpu") for a in arrays] for name, arrays in results.items()}
            found.append((results, dict(book.calls), dict(book.bytes_sent)))
        return found, world.gpu_path, [of_a_reduction(world, how) for how in ("wait", "drop")]


def of_a_reduction(world, how):
    """The events of an all-reduce that is waited for, or dropped."""
    events.clear()
    work = world.all_reduce(backend.to(values(world.rank, 8, "f4"), "cuda"), async_op=True)
    if how == "wait":
        work.wait(timeout=10)
    del work
    return list(events)


def trained(path, exact):
    """Three steps of DistributedDataParallel: (parameters and losses on the host, those on the GPU)."""
    world = comm.world()
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((21, 784)), rng.integers(0, 10, 21)
    results = []
    with stand_in(path, world.rank):
        mine = backend.use(gpu_of(path, world.rank))
        for device in ("cpu", mine):
            mt.manual_seed(world.rank)      # rank 0's values are sent to all
            net = nn.Sequential(nn.mlp((6,), dropout=0.2, dtype=np.float64), nn.BatchNorm(10, dtype=np.float64))
            model = DistributedDataParallel(net.to(device), world, exact=exact, bucket_cap_mb=0.01,
                                            first_bucket_mb=0.01)
            optimizer = optim.AdamW(model.parameters(), lr=0.01)
            loader = Loader(x, labels, 21, rank=world.rank, size=world.size, micro_shards=8 if exact else 1)
            losses = [training.train_step(model, optimizer, batch, lambda m, s: nn.cross_entropy(
                m(s.inputs), s.labels, reduction="sum"), world, seed=1, step=step)[0]
                for step in range(3) for batch in loader.epoch(step)]
            results.append((losses, model.state_dict()))
        training.check_replicas(model, world)
    return results


class Scores(nn.Linear):
    """Of blocks' pairs."""

    def forward(self, pair):
        return super().forward(pair[0])


def in_turns(path):
    """A step by DualPipeV of packed rows, on ranks that share the experts: loss and gradients on the host, and on the
    GPU."""
    from minitorch_dist.data.packing import pack
    from minitorch_dist.parallel.experts import moe
    from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
    from minitorch_dist.parallel.pipelines.schedule_dual import dual_pipe_v
    from minitorch_dist.parallel.tensor import parallelize_module
    world, rng, results = comm.world(), np.random.default_rng(3), []
    rows = pack([rng.integers(0, 11, n) for n in (7, 3, 5, 9, 4, 6, 8, 2, 5, 7, 6)], 8)
    with stand_in(path, world.rank):
        for device in ("cpu", backend.use(gpu_of(path, world.rank))):
            mt.manual_seed(0)
            blocks = [nn.TransformerBlock(8, 2, causal=True, rotary=True, dropout=0.2, dtype=np.float64,
                                          moe={"experts": 4, "group": "sequence"}) for _ in range(2)]
            model = nn.Sequential(nn.Embedding(11, 8, np.float64), *blocks, Scores(8, 11, dtype=np.float64)).to(device)
            parallelize_module(model, world, moe.plan_of(model))
            stages = [moe.OneTensor(stage, i == 0, i == 1) for i, stage in enumerate(cut_sequential(model, 2, [1] * 4))]
            stages = [DistributedDataParallel(stage, world) for stage in stages]
            loader = Loader(rows.rows[:6], rows.targets[:6], 6, rank=world.rank, size=world.size)
            loss = Pipeline(stages, world.split(world.rank), dual_pipe_v(1, 3)).run(
                next(iter(loader.epoch(0))), lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=1,
                step=0, over=world, packed=True)
            results.append([loss, *(p.grad.cpu().numpy() for stage in stages for p in stage.parameters())])
    return results


def mismatch():
    """The text of the error where one rank's array lives on a GPU and the other's doesn't."""
    world = comm.world()
    with stand_in("staged", world.rank):
        x = backend.to(np.ones(3), "cpu" if world.rank else "cuda")
        try:
            world.all_reduce(x)
        except comm.MismatchError as error:
            return str(error)


def of_another_gpu():
    """What is said of an array of a GPU that isn't the communicator's, and a sum by another current GPU."""
    world = comm.world()
    with stand_in("nccl", world.rank) as cupy:
        mine = backend.use(gpu_of("nccl", world.rank))
        x = backend.to(np.ones(3), mine)
        world.all_reduce(x)
        with cupy.cuda.Device(1 - world.rank):
            work = world.all_reduce(x, async_op=True)
            work.wait()
            y = cupy.ones(3)
            try:
                world.all_gather(cupy.empty(6), y)
            except ValueError as error:
                return backend.to(x, "cpu"), str(error)


def groups_of_one():
    """What every collective leaves in a group of this rank alone: on the host, and on the GPU."""
    world, results = comm.world(), []
    alone = world.split(world.rank)
    with stand_in("staged", world.rank):
        for device in ("cpu", "cuda"):
            outs = [backend.zeros(6, "f4", device) for _ in range(6)]
            for k, out in enumerate(outs):
                x = backend.to(values(world.rank, 6, "f4", k), device)
                if k < 4:
                    (alone.all_gather, alone.reduce_scatter, alone.all_to_all, alone.scatter)[k](out, x)
                else:
                    out += x
                    (alone.all_reduce, alone.broadcast)[k - 4](out)
            results.append([backend.to(out, "cpu") for out in outs])
    return results


def copies_of_sums():
    """[[copies between host and GPU for float32, for int16] of each call], by CUDA-aware MPI."""
    world, found = comm.world(), []
    calls = (world.all_reduce, lambda x: world.reduce(x, 1), lambda x: world.reduce_scatter(x[:3].copy(), x),
             lambda x: world.all_reduce(x, exact=True))
    with stand_in("cuda-aware", world.rank):
        for call in calls:
            found.append([])
            for dtype in ("f4", "i2"):
                x = backend.to(values(world.rank, 6, dtype), "cuda")
                transfers.clear()
                call(x)
                found[-1].append(transfers.total())
    return found


def compressed(path, name):
    """Two steps by a comm hook: the parameters on the host, and those on the GPU."""
    from minitorch_dist.parallel import comm_hooks
    hook = {"fp16": lambda: comm_hooks.fp16_compress, "PowerSGD": lambda: comm_hooks.PowerSGD(2),
            "OneBit": comm_hooks.OneBit, "TopK": lambda: comm_hooks.TopK(0.2)}[name]
    world = comm.world()
    x = values(world.rank, 20, "f4").reshape(4, 5)
    results = []
    with stand_in(path, world.rank):
        for device in ("cpu", backend.use(gpu_of(path, world.rank))):
            mt.manual_seed(0)
            net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 6)).to(device)
            model = DistributedDataParallel(net, world, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
            model.register_comm_hook(hook())
            optimizer = optim.SGD(model.parameters(), lr=0.01)
            for _ in range(2):
                optimizer.zero_grad()
                (model(backend.to(x, device)) ** 2).sum().backward()
                optimizer.step()
            results.append(model.state_dict())
    return results


def differentiable():
    """Collectives of the op table on GPU arrays: gradients on the host, and on the GPU."""
    from minitorch_dist.parallel import collectives as c
    world = comm.world()
    results = []
    with stand_in("staged", world.rank):
        for device in ("cpu", "cuda"):
            x = mt.tensor(values(world.rank, 8, "f8").reshape(4, 2), device=device, requires_grad=True)
            y = [c.reduce_from(x * x, world), c.all_gather(x, world, 1), c.reduce_scatter(x, world),
                 c.all_to_all(x, world), c.broadcast(x, world, 1), c.reduce(x, world, 1)]
            sum((part * part).sum() for part in y).backward()
            results.append([x.grad.cpu().numpy(), *(part.detach().cpu().numpy() for part in y)])
    return results


def served(optimizer, servers):
    """(parameters after three steps of DistributedDataParallel on the workers' GPUs, by servers, where the servers'
    optimizer has them), in sync mode; the servers are ranks, too. Each rank: its own model's."""
    world, found, places = comm.world(), [], set()
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((24, 784)), rng.integers(0, 10, 24)
    group = world.split(0 if world.rank >= servers else None)

    def make(parameters):
        parameters = list(parameters)
        places.update(p.device for _, p in parameters)
        return optimizer(parameters, lr=0.01)

    def steps(model, update, rank, size):
        loader = Loader(x, labels, 8, seed=1, rank=rank, size=size)
        for batch in loader.epoch(0):
            update.zero_grad()
            inputs, right = (backend.to(a, "cuda") for a in (batch.inputs, batch.labels))
            (nn.cross_entropy(model(inputs), right, reduction="sum") / batch.count).backward()
            update.step()
    with installed():
        mt.manual_seed(3)
        model = nn.mlp((5,), dtype=np.float64).to("cuda")
        if group:
            ddp = DistributedDataParallel(model, group)
            steps(ddp, optimizer(list(ddp.module.named_parameters()), lr=0.01), group.rank, group.size)
            found.append(model.state_dict())
        mt.manual_seed(3)
        model = nn.mlp((5,), dtype=np.float64).to("cuda")
        with ParameterServer(model, make, world, servers) as ps:
            if ps.is_worker:
                steps(model, ps, ps.index, len(ps.workers))
        assert all(p.device == "cuda:0" for p in model.parameters())
        found.append(model.state_dict())
    return found, places
