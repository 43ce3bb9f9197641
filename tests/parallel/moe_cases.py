"""What the ranks do in the tests of expert parallelism. What must hold is checked by the parent process."""

import contextlib
from functools import partial

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, ledger, nn, optim, training
from minitorch_dist.nn import moe
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines import full_state_dict as full_of_stages
from minitorch_dist.parallel.pipelines.schedules import placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS, EXPERTS = 13, 6, 8, 8, 4
SETTINGS = {        # MoE's arguments
    "sequences": {"group": "sequence", "capacity_factor": 1.0, "z": 0.1},
    "switch": {"group": "sequence", "k": 1, "balance": 0.1},
    "halves": {"group": BATCH * LENGTH // 2, "capacity_factor": 0.75},       # of the global batch
    "quarters": {"group": BATCH * LENGTH // 4, "capacity_factor": 0.75},
    "nothing dropped": {"group": "sequence", "capacity_factor": EXPERTS / 2},
    "no capacity": {"group": "sequence", "capacity_factor": None},
}
CLIPS = {"switch": 0.8, "sequences": 0.8}     # the greatest norm of the gradients; they are greater at first


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


class Dense(nn.Module):
    """All experts for all tokens, weighted by gates of which all but two are 0."""

    def __init__(self, whole):
        super().__init__()
        self.router, self.experts = whole.router, whole.experts

    def forward(self, x):
        e = self.experts
        logits = self.router(x)
        order = np.argsort(-np.asarray(logits.numpy()), -1, kind="stable")
        chosen = (order[..., :2, None] == np.arange(EXPERTS)).any(-2)
        p = mt.softmax(logits)
        gates = p * chosen / mt.sum(p * chosen, -1, keepdims=True)
        h = mt.gelu(mt.einsum("btd,edh->bteh", x, e.up), "tanh")
        y = mt.einsum("bteh,ehd->bted", h, e.down)
        first = (order[..., :1] == np.arange(EXPERTS)).mean(1)
        return mt.einsum("bted,bte->btd", y, gates), 0.01 * EXPERTS * mt.sum(mt.mean(p, 1) * first) / len(first)


def gpt(setting, dense=False):
    mt.manual_seed(5)
    arguments = {"experts": EXPERTS, "std": 0.3} | SETTINGS[setting]
    model = nn.GPT(VOCABULARY, LENGTH, layers=2, heads=2, dim=8, dropout=0.0, dtype=np.float64, moe=arguments)
    if dense:
        for block in model.blocks:
            block.mlp = Dense(block.mlp)
    return model


def sequences():
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_sum(model, shard):
    logits, aux = model(shard.inputs)
    return nn.cross_entropy(logits, shard.labels, reduction="sum") + shard.labels.size * aux


def train(setting, size=1, dense=False, accumulate=1, spoil=None, exact=False, tensor=1, stage=0, rows=BATCH):
    """(losses, whole parameters) after STEPS steps of AdamW, the experts divided over `size` ranks, attention and
    embedding over `tensor` ranks."""
    mesh = comm.DeviceMesh(dp=-1, ep=size, tp=tensor)
    world = mesh["dp", "ep"]        # who has samples
    model = gpt(setting, dense)
    if tensor > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    if size > 1:
        tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
    replica = fully_shard(model, world, stage=stage, exact=exact) if stage else DistributedDataParallel(
        model, world, exact=exact, bucket_cap_mb=0.002 * size, first_bucket_mb=0.001)
    if spoil is not None:
        spoil(replica, mesh)
    optimizer = optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    loader = data.Loader(*sequences(), rows, seed=2, rank=world.rank, size=world.size,
                         **{"micro_shards": 8} if exact else {})
    batches = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    losses = [training.train_step(replica, optimizer, batch, loss_sum, world, seed=3, step=step, units=LENGTH,
                                  accumulate=accumulate, clip=CLIPS.get(setting))[0]
              for step, batch in zip(range(STEPS), batches, strict=False)]
    return losses, full_state_dict(replica) if stage else tp.full_state_dict(model)


def train_whole():
    """{setting: what one process with all experts gives}; where nothing is dropped, by Dense."""
    return {setting: train(setting, dense=setting in ("nothing dropped", "no capacity")) for setting in SETTINGS}


# ---------------------------------------------------------------- what must not be

@contextlib.contextmanager
def instead(owner, name, value):
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def raw_gates(*arguments):
    r = ROUTE(*arguments)
    return r._replace(gates=mt.take_along_axis(mt.softmax(arguments[0]), r.expert))


def cut_gates(*arguments):
    r = ROUTE(*arguments)
    return r._replace(gates=r.gates.numpy())


def one_queue(*arguments):
    r = ROUTE(*arguments)
    queue = r.expert.reshape(len(r.expert), -1, 1)
    ahead = (queue == np.arange(r.experts)).cumsum(1)
    return r._replace(slot=(np.take_along_axis(ahead, queue, -1) - 1).reshape(r.expert.shape))


def unweighted(y, routing):
    return COMBINE(y, routing._replace(gates=np.ones(routing.expert.shape)))


def over_all(replica, mesh):
    """Experts' gradients summed over ranks that hold others."""
    replica.apart = {}
    for bucket in replica.buckets:
        bucket.comm = replica.comm


def over_dp(replica, mesh):
    """All gradients summed over the ranks that hold the same experts, and no others."""
    for bucket in replica.buckets:
        bucket.comm = mesh["dp"]
    replica.arrivals, replica.comm = None, mesh["dp"]


ROUTE, COMBINE, CAPACITY = moe.route, moe.combine, moe.capacity_of
WRONG = {
    "gates not renormalised": ("route", raw_gates), "gradient of gates cut": ("route", cut_gates),
    "second choices queue with the first": ("route", one_queue), "combined without weights": ("combine", unweighted),
    "capacity of the global batch": ("capacity_of", lambda tokens, *rest: CAPACITY(2 * tokens, *rest)),
    "no auxiliary loss": ("balance_loss", lambda logits, routing, mean: 0.0),
}


def train_wrong():
    """{what is wrong: parameters}, on two ranks."""
    found = {}
    for name, (function, value) in WRONG.items():
        with instead(moe, function, value):
            found[name] = train("halves", 2)[1]
    found["experts summed over all"] = train("halves", 2, spoil=over_all)[1]
    found["others summed over dp"] = train("halves", 2, spoil=over_dp)[1]
    return found


# ---------------------------------------------------------------- single layers

def layer(comm_of_experts, size=6, experts=4, **arguments):
    mt.manual_seed(1)
    model = nn.MoE(size, 10, experts, dtype=np.float64, std=0.5, **arguments)
    if comm_of_experts is not None:
        model.experts = ep.ExpertParallel(model.experts, comm_of_experts)
        model.experts.summed = True
    return model


def counted(factor, amp=None):
    """({pass: {op: (calls, bytes sent)}} along ep of one layer in float64, or in autocast's `amp`, what the formula
    says for each message)."""
    mesh = comm.DeviceMesh(ep=-1)
    n, size, tokens, groups = mesh["ep"].size, 6, 10, 3 + (0 if factor else mesh["ep"].rank)
    model = layer(mesh["ep"], size, 4, capacity_factor=factor, group=tokens)
    x, width = mt.tensor(values((groups, tokens, size), 7, mesh["ep"].rank), requires_grad=True), 8
    inside = contextlib.nullcontext
    if amp:
        x, width, inside = x.detach().to("float32").requires_grad_(), 2, partial(mt.autocast, amp)
        model.to("float32")
    with ledger.record() as forward, inside():
        y, aux = model(x)
    with ledger.record() as backward:
        (mt.sum(y * values(y.shape, 8).astype(y.dtype)) + aux).backward()
    sent = {name: {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls if axis == "ep"}
            for name, book in (("forward", forward), ("backward", backward))}
    if factor:
        return sent, (n - 1) * (4 * groups * moe.capacity_of(tokens, 4, 2, factor) * size * width) // n
    with inside():
        routing = model.routing(x)[1]
    chosen = routing.load.reshape(n, -1).sum(1) * size * width      # bytes for each rank's experts
    everyone = comm.world().all_gather_object(chosen)
    rank = mesh["ep"].rank
    return sent, sum(chosen) - chosen[rank], sum(each[rank] for each in everyone) - chosen[rank]


def gradients(order):
    """Of x of every rank, against finite differences across ranks; some choices are dropped."""
    world = comm.world()
    for k, arguments in ((2, {"capacity_factor": 0.75}), (1, {"balance": 2.0, "z": 0.3}),
                         (2, {"capacity_factor": None})):
        model = layer(world, 3, 2 * world.size, k=k, **arguments)
        for module in model.modules():
            for name, p in module._parameters.items():
                object.__setattr__(module, name, p if p is None else p.numpy())       # bare constants
        u = values((4, 3), 9, world.rank)

        def f(x, model=model, u=u):
            y, aux = model(x)
            return mt.sum(mt.sin(y) * u) + aux * (world.rank + 1)
        x = values((4, 3), 3, world.rank)
        routing = model.routing(x)[1]
        assert k == 1 or routing.capacity is None or not routing.kept.all()
        check_grads_across(f, x, world, order=order)
    return True


def in_steps(x):
    """Rows in steps of a 127th of each one's greatest."""
    x = x.numpy() if hasattr(x, "numpy") else np.asarray(x)
    step = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


forward_in_steps, gradients_in_steps = mt.custom_vjp(in_steps), mt.custom_vjp(lambda x: x)
forward_in_steps.defvjp(lambda x: (in_steps(x), None), lambda saved, ct: (ct,))
gradients_in_steps.defvjp(lambda x: (x, None), lambda saved, ct: (in_steps(ct),))


class Short(nn.Module):
    """Experts in one process, as if rows and their answers' gradients had travelled in 8 bits."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, counts=None):
        return gradients_in_steps(self.experts(forward_in_steps(x), *([] if counts is None else [counts])))


def short_dispatch(factor):
    """(the largest distance of y, of x's and of the experts' gradients from one process's, {pass: bytes sent})"""
    world, size, tokens = comm.world(), 8, 10
    n = world.size
    x, u = values((3 * n, tokens, size), 7), values((3 * n, tokens, size), 8)
    mine = slice(3 * world.rank, 3 * world.rank + 3)
    whole = layer(None, size, 4, capacity_factor=factor, group=tokens)
    whole.experts = Short(whole.experts)
    every = mt.tensor(x, requires_grad=True)
    mt.sum(whole(every)[0] * u).backward()
    model = layer(world, size, 4, capacity_factor=factor, group=tokens)
    ep.dispatch_in_few_bits(model)
    part = mt.tensor(x[mine], requires_grad=True)
    with ledger.record() as forward:
        y = model(part)[0]
    with ledger.record() as backward:
        mt.sum(y * u[mine]).backward()
    here = slice(4 // n * world.rank, 4 // n * (world.rank + 1))
    ours, theirs = model.experts, whole.experts.experts
    far = [abs(part.grad.numpy() - every.grad.numpy()[mine]).max()] + [
        abs(getattr(ours, name).grad.numpy() - getattr(theirs, name).grad.numpy()[here]).max()
        for name in ("up", "down")]
    return far, [book.total_bytes_sent() for book in (forward, backward)], moe.capacity_of(tokens, 4, 2, factor or 1)


def short_training():
    """{bits of rows on their way: the losses of a training}"""
    def in_bits(bits):
        return None if bits is None else lambda replica, mesh: ep.dispatch_in_few_bits(replica, bits)
    return {bits: train("no capacity", 2, spoil=in_bits(bits))[0] for bits in (None, 8, 4)}


def short_refusals():
    """The errors' texts, and the blocks of some widths."""
    said = []
    for make in (lambda: ep.dispatch_in_few_bits(nn.MoE(8, 16, 4)), lambda: ep.dispatched_in(192, 8)):
        try:
            make()
        except ValueError as error:
            said.append(str(error))
    return said, [ep.dispatched_in(width, 4).size for width in (64, 128, 256)]


def checkpointed():
    """Whether forgetting the layer, whose tokens then travel again in backward, leaves every gradient to the bit."""
    world = comm.world()
    found = []
    for wrap in (lambda f: f, mt.checkpoint):
        found.append([])
        for factor in (1.25, None):
            model = layer(world, capacity_factor=factor)
            x = mt.tensor(values((3, 5, 6), 4, world.rank), requires_grad=True)
            y, aux = wrap(lambda x, model=model: model(mt.tanh(x)))(x)
            (mt.sum(y * values(y.shape, 5)) + aux).backward()
            found[-1] += [y.numpy(), aux.numpy(), x.grad.numpy(), *(p.grad.numpy() for p in model.parameters())]
    return all(np.array_equal(a, b) for a, b in zip(*found, strict=True)) and all(np.any(a) for a in found[0])


class Start(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, np.float64, std=0.5)

    def forward(self, tokens):
        return self.embed(tokens), mt.tensor(0.0, dtype=np.float64)


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, VOCABULARY, dtype=np.float64)

    def forward(self, pair):
        return self.head(pair[0]), pair[1]


def pipelined(pp, size, name="1f1b", micro_batches=4, batch=BATCH, factor=1.25, prepare=None):
    """(the whole parameters after STEPS steps of a pipeline on pp ranks, the experts divided over `size` ranks; how
    many all-to-alls of a step were under way while another was)."""
    mesh = comm.DeviceMesh(pp=pp, ep=size)
    mt.manual_seed(6)
    arguments = {"experts": EXPERTS, "std": 0.3, "group": "sequence", "balance": 0.1, "capacity_factor": factor}
    model = nn.Sequential(Start(), *(nn.TransformerBlock(8, 2, causal=True, dtype=np.float64, moe=arguments)
                                     for _ in range(2)), End())
    if size > 1:
        tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
    if prepare is not None:
        prepare(model)
    schedule = schedule_of(name, pp, micro_batches)
    placement = placement_of(schedule)
    last = max(map(max, placement))
    parts = cut_sequential(model, last + 1, [1] * 4)
    stages = [DistributedDataParallel(ep.OneTensor(parts[i], i == 0, i == last), mesh["ep"])
              for i in placement[mesh.coords["pp"]]]
    pipeline = Pipeline(stages, mesh["pp"], schedule)
    optimizer = optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    loader = data.Loader(*sequences(), batch, seed=2, rank=mesh.coords["ep"], size=size)
    for step, part in enumerate(loader.epoch(0)):
        optimizer.zero_grad()
        with ledger.record(timeline=True) as book:
            pipeline.run(part, lambda y, labels: nn.cross_entropy(y[0], labels, reduction="sum") + labels.size * y[1],
                         seed=0, step=step, units=LENGTH, over=mesh["ep"])
        optimizer.step()
    messages = [s for s in book.spans if s.track == "communication" and s.name == "all_to_all"]
    together = sum(any(a is not b and a.begin <= b.begin <= a.end for a in messages) for b in messages)
    return full_of_stages(stages, mesh["pp"]), together


def saved(folder):
    """Whether a checkpoint of divided experts, with Adam's state, is what the whole model goes on from, and back."""
    world, mesh, found = comm.world(), comm.DeviceMesh(dp=1, ep=-1), []
    for i, parts in enumerate((2, 1, 2)):
        model = gpt("sequences")
        if parts > 1:
            tp.parallelize_module(model, mesh["ep"], ep.plan_of(model))
        replica = DistributedDataParallel(model)
        optimizer = optim.AdamW(replica.parameters(), lr=0.01)
        if i:
            checkpoints.load(f"{folder}/{i - 1}", replica, optimizer, world)
        batch = next(data.Loader(*sequences(), BATCH, seed=i, rank=world.rank, size=world.size).epoch(0))
        training.train_step(replica, optimizer, batch, loss_sum, world, seed=3, step=i, units=LENGTH)
        checkpoints.save(f"{folder}/{i}", replica, optimizer, {}, world)
        found.append(tp.full_state_dict(model))
    model = DistributedDataParallel(gpt("sequences"))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for i in range(3):
        batch = next(data.Loader(*sequences(), BATCH, seed=i, rank=world.rank, size=world.size).epoch(0))
        training.train_step(model, optimizer, batch, loss_sum, world, seed=3, step=i, units=LENGTH)
        difference = max(abs(found[i][name] - value).max() for name, value in model.state_dict().items())
        assert difference < 1e-10, (i, difference)
    return True


def exact_bits(setting, size=1, stage=0):
    """{name: bytes} after a training in exact mode."""
    return {name: value.tobytes() for name, value in train(setting, size, stage=stage, exact=True)[1].items()}


def errors():
    """{what is wrong: (type, message)} on two ranks."""
    world, mesh, found = comm.world(), comm.DeviceMesh(dp=1, ep=-1), {}

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def divided():
        return tp.parallelize_module(gpt("sequences"), mesh["ep"], {"blocks.*.mlp": "experts"})

    def roomy():
        return tp.parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.MoE(4, 4, 2, capacity_factor=None)), mesh["ep"],
                                     {"1": "experts"})
    tokens = sequences()[0][:2]
    attempt("three", lambda: ep.ExpertParallel(nn.MoE(4, 4, 3).experts, mesh["ep"]))
    attempt("dp alone", lambda: DistributedDataParallel(divided(), mesh["dp"]))
    attempt("nobody", lambda: divided()(tokens))
    attempt("first layer", lambda: tp.parallelize_module(nn.Sequential(nn.MoE(4, 4, 2)), mesh["ep"], {"0": "experts"})(
        np.zeros((3, 4), np.float32)))
    attempt("any number", lambda: roomy()(np.zeros((3, 4), np.float32)))
    attempt("fsdp", lambda: fully_shard(divided(), mesh["dp"]))
    attempt("join", lambda: DistributedDataParallel(divided(), world).join(None))
    attempt("cut twice", lambda: tp.parallelize_module(divided(), mesh["ep"], ep.plan_of(divided())))
    attempt("sequence", lambda: tp.parallelize_module(gpt("sequences"), mesh["ep"], {
        "blocks.*.mlp": "experts"}, sequence_parallel=True))
    attempt("on parts", lambda: tp.parallelize_module(nn.TransformerBlock(4, 2, moe={"experts": 2}), world,
                                                      {"attention": "heads", "mlp": "sequence"}, True))
    attempt("mlp", lambda: tp.parallelize_module(nn.TransformerBlock(4, 2), mesh["ep"], {"mlp": "experts"}))
    model = tp.parallelize_module(nn.TransformerBlock(4, 2), mesh["ep"], {"mlp.0": "column", "mlp.2": "row"})
    attempt("tensor parallel", lambda: DistributedDataParallel(model, world))
    with mt.no_grad():
        attempt("no gradients", lambda: divided()(tokens))
    attempt("evaluated", lambda: divided().eval()(tokens))
    attempt("no rows", lambda: ep.parted(ep.joined((mt.tensor(np.zeros((0, 3, 4))), mt.tensor(0.5)))))
    found["plans"] = ep.plan_of(nn.MoE(4, 4, 2)), ep.plan_of(nn.Sequential(nn.Linear(4, 4), nn.MoE(4, 4, 2)))
    return found


def uneven():
    """The message of ranks that bring different numbers of tokens."""
    model = layer(comm.world())
    try:
        model(values((2 + comm.world().rank, 3, 6), 1))
    except Exception as error:
        return type(error).__name__, str(error)
