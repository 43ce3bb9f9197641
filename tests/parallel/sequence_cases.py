"""What the ranks do in the tests of sequence parallelism. What must hold is checked by the parent process."""

from contextlib import contextmanager

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.collectives import gather_from, scatter_to
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.positions import PartDropout
from minitorch_dist.parallel.tensor import mixtures
from minitorch_dist.parallel.tensor import sequence_parallel as sp
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from tests.parallel import tensor_cases
from tests.parallel.tensor_cases import values

BATCH, TIME, DIM, HEADS = 2, 12, 16, 4


def train_whole():
    """{setting: what training a whole model gives}."""
    return tensor_cases.train_whole()


def train(setting, tp_size, kind=True):
    """As tensor_cases.train, sequence parallel."""
    return tensor_cases.train(setting, tp_size, kind)


# ---------------------------------------------------------------- wrong on purpose

def _broadcast_part(self, x):
    """Dropout by the first positions' mask on every rank."""
    draws = backend.random_rows((x.shape[0], self.comm.size * x.shape[1], x.shape[2]))
    return mt.dropout(x, self.p, mask=draws[:, :x.shape[1]] >= self.p)


def _own_cotangent(x, comm):
    """All ranks' parts, as if all went the same way with them."""
    return gather_from(x, comm, sp.TIME)


WRONG = {       # name: (where, attribute, what stands there instead)
    "gradients of norms are not summed": (sp, "copy_to", lambda p, comm: p),
    "gradients of biases are not summed": (tp, "copy_to", lambda p, comm: p),
    "each rank draws a mask of its part": (PartDropout, "forward", nn.Dropout.forward),
    "all ranks take the first part of the mask": (PartDropout, "forward", _broadcast_part),
    "positions are not cut": (sp, "scatter_to", lambda rows, comm, axis: rows[:rows.shape[0] // comm.size]),
    "the gather's cotangents are not summed": (sp, "gather_sequence", _own_cotangent),
    "scattered along the batch": (sp, "reduce_scatter", lambda x, comm, axis: sp_reduce_scatter(x, comm, 0)),
    "gathered along the batch": (sp, "all_gather", lambda x, comm, axis: sp_all_gather(x, comm, 0)),
}
sp_reduce_scatter, sp_all_gather = sp.reduce_scatter, sp.all_gather


@contextmanager
def instead(where, name, value):
    right = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, right)


def train_wrong(setting):
    """{what is wrong: the parameters after training, or the type of the error}."""
    found = {}
    for name, change in WRONG.items():
        with instead(*change):
            try:
                found[name] = train(setting, 2)[1]
            except (ValueError, RuntimeError) as error:
                found[name] = type(error).__name__
    return found


# ---------------------------------------------------------------- mixtures

MIXTURE = {"experts": 4, "group": "sequence", "capacity_factor": 1.0, "std": 0.3, "balance": 0.1, "z": 0.1}


def train_mixture(tp_size, ep_size=1, kind=True, stage=0):
    """The whole parameters of a GPT with experts, on two ranks alone where fully_shard cuts them, after 3 steps."""
    mesh = comm.DeviceMesh(dp=-1, ep=ep_size, tp=tp_size)
    mt.manual_seed(5)
    model, samples = nn.GPT(tensor_cases.VOCABULARY, tensor_cases.LENGTH, layers=2, heads=4, dim=16, dropout=0.2,
                            dtype=np.float64, moe=MIXTURE), mesh["dp", "ep"]
    if tp_size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), kind)
    if ep_size > 1:
        tp.parallelize_module(model, mesh["ep"], moe.plan_of(model))
    replica = fully_shard(model, samples, stage=stage) if stage else DistributedDataParallel(model, samples)
    optimizer = optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    loader = data.Loader(*tensor_cases.sequences(), tensor_cases.BATCH, seed=2, rank=samples.rank, size=samples.size)

    def loss_sum(model, shard):
        logits, aux = model(shard.inputs)
        return nn.cross_entropy(logits, shard.labels, reduction="sum") + shard.labels.size * aux
    for step, batch in zip(range(3), loader.epoch(0), strict=False):
        training.train_step(replica, optimizer, batch, loss_sum, samples, seed=3, step=step, units=tensor_cases.LENGTH,
                            clip=tensor_cases.CLIP)
    return tp.full_state_dict(replica if stage else model)


WRONG_MIXTURES = {
    "each rank routes its part": (mixtures.SequenceParallelMoE, "forward", lambda self, x: self._modules[""](x)),
    "the cotangents of equal work are summed": (mixtures, "gather_from", sp_all_gather),
    "the answers of equal work are summed": (mixtures.SequenceParallelMoE, "forward", lambda self, x: _summed(self, x)),
}


def _summed(self, x):
    y, aux = self._modules[""](gather_from(x, self.comm, 1))
    return sp_reduce_scatter(y, self.comm, 1), aux


def train_wrong_mixtures():
    """{what is wrong: the parameters after training}."""
    found = {}
    for name, change in WRONG_MIXTURES.items():
        with instead(*change):
            found[name] = train_mixture(2)
    return found


# ---------------------------------------------------------------- derivatives

def gradients():
    """Names of what check_grads_across has accepted: the collectives' uses here, to second order."""
    world = comm.world()
    rank, n = world.rank, world.size
    weight, whole = values((3, 4), 1, rank), values((2, 2 * n, 4), 2, rank)
    part = values((2, 3, 4), 3, rank)

    def through_norm(w):
        module = sp.SequenceParallel(with_weight(nn.RMSNorm(4, dtype=np.float64), w), world)
        return mt.sin(module(part))

    def positions(w):
        module = sp.SequenceParallelPositions(with_weight(nn.Embedding(2 * n + 1, 3, dtype=np.float64), w), world)
        return mt.sin(module(slice(2 * n))) * (rank + 1)
    samples = {
        "gather_sequence": (lambda x: mt.sin(sp.gather_sequence(mt.tanh(x), world)) * (rank + 1), part, False),
        "reduce_scatter_sequence": (lambda x: mt.sin(sp.reduce_scatter_sequence(x * x, world)), whole, False),
        "linear": (lambda x: mt.sin(sp.linear(x, weight, None, world, False)), part, False),
        "linear, gathered again": (lambda x: mt.sin(sp.linear(x, weight, values(3, 4), world, True)), part, False),
        "a parameter between": (through_norm, values(4, 5), True),
        "positions": (positions, values((2 * n + 1, 3), 6), True),
    }
    for f, x, one_input in samples.values():
        check_grads_across(f, x, world, one_input)
    return list(samples)


def with_weight(module, w):
    """The module with w, a value of any kind, as its weight."""
    module._register(module._parameters, "weight", w)
    return module


def block(dropout=0.0, kind=True):
    """A transformer block, cut over all ranks (kind None: whole)."""
    mt.manual_seed(3)
    model = nn.TransformerBlock(DIM, HEADS, causal=True, dropout=dropout, dtype=np.float64)
    for name, p in model.named_parameters():        # norms and biases at their initial values would hide mistakes
        p.data[...] += 0.3 * values(p.shape, 4, len(name), p.size)
    mesh = comm.DeviceMesh(tp=-1)
    if kind is not None:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), kind)
    return model, mesh["tp"]


def through_block(kind):
    """(y, dx, gradients), all of them whole, of a block whose x lies in parts; kind None: of the whole block."""
    model, axis = block(kind=kind)
    x = mt.tensor(values((BATCH, TIME, DIM), 7), requires_grad=True)
    y = model(x) if not kind else gather_from(model(scatter_to(x, axis, 1)), axis, 1)
    y.backward(mt.tensor(values(y.shape, 8)))
    return y.numpy(), x.grad.numpy(), whole_gradients(model)


def whole_gradients(model):
    """{name: gradient of the whole parameter}: the state of a model whose values are its gradients."""
    with mt.no_grad():
        for p in model.parameters():
            p[...] = p.grad
    return tp.full_state_dict(model)


class Own(nn.Module):
    """A transformer block, and something of one's own behind it, with dropout."""

    def __init__(self, dtype=np.float64):
        super().__init__()
        self.block = nn.TransformerBlock(DIM, HEADS, dtype=dtype)
        self.extra = nn.Sequential(nn.Linear(DIM, DIM, dtype=dtype), nn.GELU(), nn.Dropout(0.5),
                                   nn.RMSNorm(DIM, dtype=dtype))

    def forward(self, x):
        x = self.block(x)
        return x + self.extra(x)


def through_own(kind):
    """As through_block, of modules that only the plan knows."""
    mt.manual_seed(3)
    model, axis = Own(), comm.DeviceMesh(tp=-1)["tp"]
    if kind is not None:
        tp.parallelize_module(model, axis, tp.plan_of(model) | {"extra": "sequence"}, kind)
    x = mt.tensor(values((BATCH, TIME, DIM), 7), requires_grad=True)
    y = model(x) if kind is None else gather_from(model(scatter_to(x, axis, 1)), axis, 1)
    y.backward(mt.tensor(values(y.shape, 8)))
    return y.numpy(), x.grad.numpy(), whole_gradients(model)


def through_mixture(kind):
    """As through_block, of a block with experts."""
    mt.manual_seed(3)
    model, axis = nn.TransformerBlock(DIM, HEADS, dtype=np.float64, moe=MIXTURE), comm.DeviceMesh(tp=-1)["tp"]
    if kind is not None:
        tp.parallelize_module(model, axis, tp.plan_of(model), kind)
    x = mt.tensor(values((BATCH, TIME, DIM), 7), requires_grad=True)
    y, aux = model(x if kind is None else scatter_to(x, axis, 1))
    y = y if kind is None else gather_from(y, axis, 1)
    (mt.sum(y * values(y.shape, 8)) + 3 * aux).backward()
    return np.append(y.numpy(), aux.numpy()), x.grad.numpy(), whole_gradients(model)


# ---------------------------------------------------------------- counts

def counted(kind):
    """{pass: {op: (calls, bytes sent)}} along tp of one block."""
    model, axis = block(0.1, kind)
    x = mt.tensor(values((BATCH, TIME // (axis.size if kind else 1), DIM), 9), requires_grad=True)
    with ledger.record() as forward:
        y = model(x)
    with ledger.record() as backward:
        y.backward(mt.tensor(values(y.shape, 10)))
    return {name: {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls if axis == "tp"}
            for name, book in (("forward", forward), ("backward", backward))}


def kept(kind):
    """Bytes of activations that one block keeps for backward, with dropout."""
    model, axis = block(0.1, kind)
    x = mt.tensor(values((BATCH, TIME // (axis.size if kind else 1), DIM), 9), requires_grad=True)
    with ledger.record(memory=True) as book:
        y = model(x)
        live = book.live["activation"]
    del y
    return live


def kept_between(kind):
    """{module between the parts: bytes of activations that it keeps}."""
    model, axis = block(0.1, kind)
    x = mt.tensor(values((BATCH, TIME // (axis.size if kind else 1), DIM), 9), requires_grad=True)
    found = {}
    for name in ("norm1", "norm2", "dropout"):
        with ledger.record(memory=True) as book:
            y = getattr(model, name)(x)
            found[name] = book.live["activation"]
        del y
    return found
