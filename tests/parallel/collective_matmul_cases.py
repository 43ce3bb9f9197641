"""What the ranks do in the tests of products that hide messages. What must hold is checked by the parent process."""

import warnings

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.autodiff import ops
from minitorch_dist.autodiff.input_first import InputFirst
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.compress import lora
from minitorch_dist.compress.low_precision import convert_to_low_precision_training
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.tensor import collective_matmul as cm
from minitorch_dist.parallel.tensor import sequence_parallel as sp
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from tests.device.fake_cupy import installed
from tests.parallel import combination_cases as combinations
from tests.parallel.tensor_cases import values

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
BATCH, PART, IN, OUT = 2, 3, 5, 4       # of one rank: positions, features before and behind


def among(n, target, args=()):
    """target(the first n ranks' Communicator, *args) on these, None on the others: of one crew, whose start costs more
    than what is done here."""
    world = comm.world()
    axis = world.split(0 if world.rank < n else None, name="tp")
    return None if axis is None else globals()[target](axis, *args)


# ---------------------------------------------------------------- the two products

def inputs(op, n, rank):
    """x, weight, bias of a rank, and its cotangent: gathered are unequal outputs, scattered unequal inputs."""
    gathers = op == GATHER
    x = values((BATCH, PART if gathers else PART * n, IN + rank * (not gathers)), 1, rank)
    weight = values((OUT + rank * gathers, x.shape[-1]), 2, rank)
    u = values((BATCH, PART * n if gathers else PART, len(weight)), 3, rank)
    return x, weight, values(len(weight), 4, rank), u


def function(op, axis, regather=False):
    """f(x, weight, bias) of the op; a row-parallel product has no bias of its own."""
    if op == GATHER:
        return lambda x, weight, bias=None: cm.all_gather_matmul(x, weight, axis, bias, regather)
    return lambda x, weight, bias=None: cm.matmul_reduce_scatter(x, weight, axis)


def product(axis, op, regather=False, dtype="float64"):
    """([y, dx, dW, db] of this rank, bytes of activations kept beside x)."""
    x, weight, bias, u = [a.astype(mt.backend.as_dtype(dtype)) for a in inputs(op, axis.size, axis.rank)]
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight, bias)][:3 if op == GATHER else 2]
    with ledger.record(memory=True) as book:
        y = function(op, axis, regather)(*leaves)
        kept = book.live["activation"]
    y.backward(mt.tensor(u))
    results = [y.numpy(), *(leaf.grad.numpy() for leaf in leaves)]
    assert all(a.dtype == x.dtype for a in results)
    return [a.astype(np.float64) for a in results], kept


def small_beside_large(axis):
    """Sums of 256 from rank 0 and 1 from each other rank, in bfloat16: scattered, and of a weight's gradient."""
    kind = mt.backend.as_dtype("bfloat16")
    value, one = np.full((1, 1, 1), 256 if axis.rank == 0 else 1, kind), np.ones((1, 1), kind)
    z = cm.matmul_reduce_scatter(np.repeat(value, axis.size, 1), one, axis)
    weight = mt.tensor(one, requires_grad=True)
    cm.all_gather_matmul(value, weight, axis, None, True).sum().backward()
    return z.item(), weight.grad.item()


def too_large(axis):
    """{op: (whether y, or dx, and dW of float16 are all inf, warnings)}, where products fit and their sums don't."""
    found = {}
    for op, x_value, u_value in ((GATHER, 200, 50), (SCATTER, 100, 100)):
        shapes = [a.shape for a in inputs(op, axis.size, 0)]
        x, weight, u = (np.full(shapes[i], value, np.float16) for i, value in ((0, x_value), (1, 90), (3, u_value)))
        leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = function(op, axis)(*leaves)
            y.backward(mt.tensor(u))
        sums = (leaves[0].grad if op == GATHER else y.detach()), leaves[1].grad
        found[op] = all(np.isinf(a.numpy()).all() for a in sums), [str(warning.message) for warning in said]
    return found


def gradients(axis, op, regather):
    """Whether check_grads_across accepts it, by x and by the weight, to second order: of few numbers, each of which is
    moved in turn."""
    gathers = op == GATHER
    x = values((2, 1 if gathers else axis.size, 2), 1, axis.rank)
    weight, bias = values((1 + axis.rank * gathers, 2), 2, axis.rank), values(1 + axis.rank * gathers, 4, axis.rank)
    f = function(op, axis, regather)
    check_grads_across(lambda z: mt.sin(f(mt.tanh(z), weight, bias)) * (axis.rank + 1), x, axis)
    check_grads_across(lambda z: mt.sin(f(x, mt.tanh(z), bias)), weight, axis)
    return True


def alone(axis):
    """{(op, regather, which of x and weight have a gradient): (their gradients, products, messages)}."""
    found = {}
    for op, regather in ((GATHER, False), (GATHER, True), (SCATTER, False)):
        x, weight, _, u = inputs(op, axis.size, axis.rank)
        for which in ("x", "weight", "both"):
            leaves = [mt.tensor(x, requires_grad=which != "weight"), mt.tensor(weight, requires_grad=which != "x")]
            y = function(op, axis, regather)(*leaves)
            with ledger.record(timeline=True) as book:
                y.backward(mt.tensor(u))
            products = sum(span.name == "product" for span in book.spans)
            gradients = [None if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]
            found[op, regather, which] = gradients, products, book.calls["tp", "send"]
    return found


def halves(axis, regather):
    """(products, messages) of the two parts of a backward pass, and whether the gradients are those of one."""
    x, weight, bias, u = inputs(GATHER, axis.size, axis.rank)
    counts, gradients = [], []
    for in_parts in (False, True):
        leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight, bias)]
        y = function(GATHER, axis, regather)(*leaves)
        if in_parts:
            both = InputFirst(y, leaves[0])
            for part in (lambda: gradients.append(both.input(u)), both.weights):    # noqa: B023
                with ledger.record(timeline=True) as book:
                    part()
                counts.append((sum(s.name == "product" for s in book.spans), book.calls["tp", "send"]))
        else:
            y.backward(mt.tensor(u))
            gradients.append(leaves[0].grad.numpy())
        gradients += [leaf.grad.numpy() for leaf in leaves[1:]]
    alone, (dw, db, dx, *rest) = gradients[:1], gradients[1:]
    return counts, all(map(np.array_equal, (*alone, dw, db), (dx, *rest)))


def timed(axis, op, overlap, p, h, regather=False):
    """{pass: (seconds, the share of the time with messages under way that no one waits in)} on a virtual clock, where
    a product of one rank's positions takes p seconds, and h to send them."""
    x, weight, bias, u = inputs(op, axis.size, axis.rank)
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, weight)]
    clock, matmul, piece = VirtualClock(), mt.backend.matmul, BATCH * PART * weight.size

    def slow(a, b, out=None):
        clock.sleep(p * a.shape[0] * a.shape[1] * b.shape[1] / piece)
        return matmul(a, b, out)
    if overlap:
        f = function(op, axis, regather)
    elif op == GATHER:
        f = lambda x, w: sp.linear(x, w, np.zeros(len(weight)), axis, regather)     # noqa: E731
    else:
        f = lambda x, w: sp.reduce_scatter_sequence(ops.linear(x, w, np.zeros(OUT)), axis)     # noqa: E731
    axis.hooks.append(SimulatedLink(0.0, (x.nbytes if op == GATHER else u.nbytes) / h, clock))
    mt.backend.matmul, found = slow, {}
    try:
        with clock.running():
            for name in ("forward", "backward"):
                begin = clock.time
                with mt.trace(axis) as timeline:
                    if name == "forward":
                        y = f(*leaves)
                    else:
                        y.backward(mt.tensor(u))
                    taken = clock.time - begin
                seconds = timeline.seconds(axis.rank)
                found[name] = taken, seconds["hidden"] / seconds["communication"]
    finally:
        mt.backend.matmul = matmul
    return found


# ---------------------------------------------------------------- models

VOCABULARY, LENGTH, SEQUENCES = 13, 12, 5
MODELS = {      # GPT's arguments; the LLaMA's MLP is odd on 2 ranks, and not to be shared equally by 3
    "gpt": {"dropout": 0.2},
    "llama": {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False, "tied": False, "hidden": 31},
}


def model_of(name):
    mt.manual_seed(5)
    model = nn.GPT(VOCABULARY, LENGTH, layers=2, heads=6, dim=24, dtype=np.float64, **MODELS[name])
    for path, p in model.named_parameters():        # norms and biases at their initial values would hide mistakes
        p.data[...] += 0.1 * values(p.shape, 6, len(path), p.size)
    return model


def train(axis, name, kind=True, overlap=True):
    """Whole parameters after 3 steps of AdamW on axis; kind None: of a model that isn't cut."""
    model = model_of(name)
    if kind is not None:
        tp.parallelize_module(model, axis, tp.plan_of(model), kind, overlap)
    alone = axis.split(axis.rank, name="dp")
    replica = DistributedDataParallel(model, alone)
    optimizer = optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (3 * SEQUENCES, LENGTH + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], SEQUENCES, seed=2)

    def loss_sum(model, shard):
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
    for step, batch in enumerate(loader.epoch(0)):
        training.train_step(replica, optimizer, batch, loss_sum, alone, seed=3, step=step, units=LENGTH, clip=0.5)
    return tp.full_state_dict(model)


def block_of(axis, kind, overlap, options=None):
    """A block in parts, and this rank's part of an x."""
    mt.manual_seed(3)
    model = nn.TransformerBlock(18, 6, causal=True, dtype=np.float64, **options or {})
    tp.parallelize_module(model, axis, tp.plan_of(model), kind, overlap)
    return model, mt.tensor(values((BATCH, PART, 18), 9, axis.rank), requires_grad=True)


def counted(axis, kind, overlap):
    """({pass: {op: (calls, bytes sent)}} along tp, bytes of activations kept) of a block."""
    model, x = block_of(axis, kind, overlap)
    with ledger.record(memory=True) as forward:
        y = model(x)
        kept = forward.live["activation"]
    with ledger.record() as backward:
        y.backward(mt.tensor(values(y.shape, 10)))
    return {name: {op: (book.calls[a, op], book.bytes_sent[a, op]) for a, op in book.calls if book.calls[a, op]}
            for name, book in (("forward", forward), ("backward", backward))}, kept


def flops(axis, overlap):
    """What summary counts of a block."""
    model, x = block_of(axis, True, overlap)
    return nn.summary(model, x).flops


def combined(jobs):
    """combination_cases.outcomes, where "sequence" is one with overlap."""
    def overlapped(module, axis, plan, sequence_parallel=False):
        return parallelize(module, axis, plan, sequence_parallel, bool(sequence_parallel))
    parallelize, tp.parallelize_module = tp.parallelize_module, overlapped
    try:
        return combinations.outcomes(jobs)
    finally:
        tp.parallelize_module = parallelize


def on_a_gpu():
    """([logits and gradients] on the host, on the stand-in for a GPU), with each kind."""
    axis = comm.world()
    results, tokens = [], np.random.default_rng(8).integers(0, VOCABULARY, (2, 6))
    with installed():
        for kind in (True, "regather"):
            for device in ("cpu", "cuda"):
                model = model_of("gpt").eval().to(device)
                tp.parallelize_module(model, axis, tp.plan_of(model), kind, True)
                y = model(mt.backend.to(tokens, device))
                y.backward(mt.tensor(values(y.shape, 11), device=device))
                results.append([y.detach().cpu().numpy(), *(p.grad.cpu().numpy() for p in model.parameters())])
    return results


# ---------------------------------------------------------------- errors

def errors(axis):
    """{what is wrong: (type, message)}."""
    found, rank = {}, axis.rank
    x, weight, *_ = inputs(GATHER, axis.size, rank)

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def cut(kind=True, overlap=True):
        return block_of(axis, kind, overlap)[0]
    attempt("alone", lambda: cut(False))
    attempt("kind", lambda: cut(True, "always"))
    attempt("a layer alone", lambda: tp.ColumnParallelLinear(nn.Linear(6, 6), axis, tp_comm_overlap=True))
    attempt("adapters", lambda: lora.add(cut()))
    attempt("few bits", lambda: convert_to_low_precision_training(cut()))
    model, there = block_of(axis, True, True)
    model.mlp[0].product = model.mlp[2].product = np.matmul
    attempt("column's product", lambda: model.mlp[0](there))
    attempt("row's product", lambda: model.mlp[2](values((2, 6, 36), 1)))
    attempt("axes", lambda: cm.all_gather_matmul(x[0], weight, axis))
    attempt("features", lambda: cm.matmul_reduce_scatter(x, weight[:, :-1], axis))
    attempt("a row of weights", lambda: cm.all_gather_matmul(x, weight[0], axis))
    attempt("bias", lambda: cm.all_gather_matmul(x, weight, axis, np.ones(1)))
    attempt("length", lambda: cm.matmul_reduce_scatter(values((2, 5, IN), 1), weight[:OUT], axis))

    def frozen_on_one(axis):
        leaves = mt.tensor(x, requires_grad=rank == 0), mt.tensor(weight, requires_grad=True)
        cm.all_gather_matmul(*leaves, axis).sum().backward()

    def wider_on_one(op, axis):
        x, weight, *_ = inputs(op, axis.size, rank)
        leaf = mt.tensor(x.astype(np.float32), requires_grad=True)
        function(op, axis)(leaf, weight.astype((np.float32, np.float64)[rank])).sum().backward()

    def changed_on_one(axis, **options):        # parallelize_module refuses to make such a one
        block, _ = block_of(axis, True, True)
        for part in block.modules() if rank else ():
            vars(part).update(options if isinstance(part, tp._Part) else {})
        block(there)
    disagreements = {
        "one rank without": lambda axis: changed_on_one(axis, tp_comm_overlap=False),
        "one rank gathers again": lambda axis: changed_on_one(axis, sequence_parallel="regather"),
        "other parts": lambda axis: cm.all_gather_matmul(x[:, rank:], weight, axis),
        "other results": lambda axis: cm.matmul_reduce_scatter(np.ones((2, 6, 5)), np.ones((4 + rank, 5)), axis),
        "one rank's weight is wider": lambda axis: wider_on_one(GATHER, axis),
        "one rank's sum is wider": lambda axis: wider_on_one(SCATTER, axis),
        "one rank's x is frozen": frozen_on_one}
    for name, action in disagreements.items():      # each on a communicator of its own
        own = axis.split(0, name="tp")
        attempt(name, lambda own=own, action=action: action(own))
    return found


def overwritten(axis):
    """The error of a backward whose input was written over."""
    x = mt.tensor(values((2, 3, IN), 14), requires_grad=True)
    z = x * 1.0
    y = cm.all_gather_matmul(z, mt.tensor(values((4, IN), 15), requires_grad=True), axis, None, True)
    with mt.no_grad():
        z[0] = 0.0
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return None
