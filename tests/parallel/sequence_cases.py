"""What the ranks do in the tests of sequence parallelism. What must hold is checked by the parent process."""

from contextlib import contextmanager

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, ledger, nn, optim, training
from minitorch_dist.autodiff.modes import saved_tensors_hooks
from minitorch_dist.autodiff.writes import wrote
from minitorch_dist.parallel import DistributedDataParallel, fully_shard, moe
from minitorch_dist.parallel import sequence_parallel as sp
from minitorch_dist.parallel import tensor_parallel as tp
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.collectives import gather_from, scatter_to
from tests.device.fake_cupy import installed
from tests.parallel import tensor_cases
from tests.parallel.tensor_cases import gpt, values

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
    "each rank draws a mask of its part": (sp.SequenceParallelDropout, "forward", nn.Dropout.forward),
    "all ranks take the first part of the mask": (sp.SequenceParallelDropout, "forward", _broadcast_part),
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
    "each rank routes its part": (sp.WholeSequences, "forward", lambda self, x: self._modules[""](x)),
    "the cotangents of equal work are summed": (sp, "gather_from", sp_all_gather),
    "the answers of equal work are summed": (sp.WholeSequences, "forward", lambda self, x: _summed(self, x)),
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


# ---------------------------------------------------------------- use

def composed():
    """What other parts of the library make of such a model: {name: whether it is right}."""
    mesh = comm.DeviceMesh(tp=-1)
    tokens = np.random.default_rng(8).integers(0, tensor_cases.VOCABULARY, (3, 6))

    def gradient(model, run=lambda model: model(tokens)):
        y = run(model)
        y.backward(mt.tensor(values(y.shape, 11)))
        got = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        return y.numpy(), got

    def cut(kind=True):
        model = gpt("tied")
        return tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), kind)

    def same(a, b):
        return np.allclose(a[0], b[0], rtol=0, atol=1e-12) and a[1].keys() == b[1].keys() and all(
            np.allclose(a[1][name], b[1][name], rtol=0, atol=1e-11) for name in a[1])
    found = {}
    mt.manual_seed(9)
    plain, counts = gradient(cut(False)), []        # the same parts of the parameters, without sequence parallelism
    for kind in (True, "regather"):
        mt.manual_seed(9)
        found[f"{kind}"] = same(gradient(cut(kind)), plain)

        def again(model):
            model.blocks.forward = mt.checkpoint(type(model.blocks).forward.__get__(model.blocks))
            return model(tokens)
        mt.manual_seed(9)
        found[f"{kind}, checkpointed"] = same(gradient(cut(kind), again), plain)
        packed = []

        def offloaded(model, packed=packed):
            with saved_tensors_hooks(lambda a: packed.append(a.nbytes) or [a.copy()], lambda boxed: boxed[0]):
                return model(tokens)
        mt.manual_seed(9)
        found[f"{kind}, hooks of the user's"] = same(gradient(cut(kind), offloaded), plain)
        counts.append((len(packed), sum(packed)))
    found["hooks see all that is kept"] = counts[0][0] == counts[1][0] > 20 and counts[0][1] > counts[1][1]
    model = cut().eval()
    found["evaluated"] = np.allclose(model(tokens).numpy(), gpt("tied").eval()(tokens).numpy(), rtol=0, atol=1e-12)
    found["parameters stand where they stood"] = all(
        getattr(module, name) is p for module in model.modules() for name, p in module._parameters.items())
    found["names"] = list(model.state_dict()) == list(gpt("tied").state_dict())
    changed = {name: value + 1 for name, value in gpt("tied").state_dict().items()}
    tp.load_full_state_dict(model, changed)
    again = tp.full_state_dict(model)
    found["state"] = all((again[name] == value).all() for name, value in changed.items())
    return found


def weights():
    """Where each position looks, (batch, heads, time, time), of this rank's heads."""
    model, axis = block()
    part = values((BATCH, TIME, DIM), 7)[:, axis.rank * TIME // axis.size:(axis.rank + 1) * TIME // axis.size]
    return model.attention.weights(part)


def whole_weights():
    """The same of all heads."""
    return block(kind=None)[0].attention.weights(values((BATCH, TIME, DIM), 7))


def memory_used_again():
    """Backward gathers into memory that was written to since forward, for something else: no alarm is due."""
    world = comm.world()
    x = mt.tensor(values((2, 30, 4), 14), requires_grad=True)
    y = sp.linear(x * 1.0, mt.tensor(values((5, 4), 15), requires_grad=True), None, world, True)
    for _ in range(3):
        arrays = [np.empty((2 * 30 * world.size, 4)) for _ in range(40)]
        for array in arrays:
            wrote(array, "somebody")
        del array, arrays
    y.sum().backward()
    return x.grad.numpy()


def on_a_gpu():
    """(logits and gradients on the host, those on a GPU, the stand-in) of GPTs in training."""
    world, results = comm.world(), []
    tokens = np.random.default_rng(8).integers(0, tensor_cases.VOCABULARY, (3, 6))
    with installed():
        for kind in (True, "regather"):
            for device in ("cpu", "cuda"):
                model = gpt("tied").to(device)
                tp.parallelize_module(model, world, tp.plan_of(model), kind)
                mt.manual_seed(9)
                y = model(backend.to(tokens, device))
                y.backward(mt.tensor(values(y.shape, 11), device=device))
                results.append([y.detach().cpu().numpy(), *(p.grad.cpu().numpy() for p in model.parameters())])
    return results


def accumulated():
    """Gradients of two backward passes of one model, under DistributedDataParallel's no_sync, minus those of both."""
    mesh = comm.DeviceMesh(tp=-1)
    tokens = np.random.default_rng(8).integers(0, tensor_cases.VOCABULARY, (4, 6))
    model = tp.parallelize_module(gpt("tied").eval(), mesh["tp"], tp.plan_of(gpt("tied")), True)
    replica = DistributedDataParallel(model, mesh["tp"].split(mesh["tp"].rank, name="dp"))
    u = values((4, 6, tensor_cases.VOCABULARY), 12)
    with replica.no_sync():
        replica(tokens[:2]).backward(mt.tensor(u[:2]))
    replica(tokens[2:]).backward(mt.tensor(u[2:]))
    twice = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    replica.zero_grad()
    replica(tokens).backward(mt.tensor(u))
    return max(abs(twice[name] - p.grad.numpy()).max() for name, p in model.named_parameters())


def sharded():
    """(gradients without sequence parallelism, with it, with "regather") of fully_shard over dp, stage 3."""
    mesh = comm.DeviceMesh(dp=2, tp=2)
    tokens, found = np.random.default_rng(8).integers(0, tensor_cases.VOCABULARY, (3, 6)), []
    for kind in (False, True, "regather"):
        model = gpt("tied").eval()
        replica = fully_shard(tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), kind), mesh["dp"], stage=3)
        y = replica(tokens)
        y.backward(mt.tensor(values(y.shape, 11)))
        found.append([p.grad.numpy().copy() for p in replica.parameters()])
    return found


# ---------------------------------------------------------------- errors

class Shift(nn.Module):
    """A module with a parameter of its own beside others."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerBlock(8, 2)
        self.by = nn.module.Parameter(np.zeros(8, np.float32))


def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def cut(model, plan=None, kind=True):
        return tp.parallelize_module(model, world, (tp.plan_of(model) if plan is None else plan), kind)
    tokens = np.zeros((2, 5), int)
    model = cut(gpt("tied"))
    attempt("length", lambda: model(tokens))
    attempt("generate", lambda: model.generate(tokens, 1))
    attempt("positions", lambda: model.position(slice(3)))
    attempt("positions of documents", lambda: model.position(tokens))
    attempt("axes", lambda: model.blocks[0].attention.qkv(np.zeros((4, 16))))
    attempt("dropout's axes", lambda: sp.SequenceParallelDropout(nn.Dropout(0.5), world)(np.zeros((4, 16))))
    attempt("sum's axes", lambda: sp.reduce_scatter_sequence(np.zeros((4, 16)), world))
    without = tp.plan_of(gpt("tied"))
    del without["blocks.1.mlp.0"]
    del without["blocks.1.mlp.2"]
    attempt("left out", lambda: cut(gpt("tied"), without))
    attempt("own modules", lambda: cut(Own()))
    attempt("own parameter", lambda: cut(Shift()))
    attempt("short", lambda: model(tokens[:, :1]))
    attempt("mixing", lambda: cut(Own(), {"block": "sequence", "extra": "sequence"}))
    noisy = gpt("tied")
    noisy.blocks[0].dropout = type("Noisy", (nn.Dropout,), {})(0.5)
    attempt("own dropout", lambda: cut(noisy))
    attempt("nested", lambda: cut(Own(), tp.plan_of(Own()) | {"block.mlp": "sequence", "extra": "sequence"}))
    attempt("a mixture alone", lambda: cut(nn.MoE(4, 4, 2), {"router": "sequence", "experts": "sequence"}))
    attempt("no mixture", lambda: cut(Own(), tp.plan_of(Own()) | {"extra": "whole sequences"}))
    attempt("whole without", lambda: cut(nn.Sequential(nn.MoE(4, 4, 2)), {"0": "whole sequences"}, False))
    attempt("mixture's axes", lambda: sp.WholeSequences(nn.MoE(4, 4, 2), world)(np.zeros((3, 4), np.float32)))
    attempt("way", lambda: cut(gpt("tied"), {"norm": "sequence"}, False))
    attempt("kind", lambda: cut(gpt("tied"), None, "twice"))
    attempt("row", lambda: tp.RowParallelLinear(nn.Linear(4, 4), world, input_is_parallel=False,
                                                sequence_parallel=True))
    attempt("overwritten", overwritten)
    return found


def overwritten():
    """Backward, after what it is to gather again was written over."""
    world = comm.world()
    x = mt.tensor(values((2, 3, 4), 14), requires_grad=True)
    z = x * 1.0
    y = sp.linear(z, mt.tensor(values((5, 4), 15), requires_grad=True), None, world, True)
    with mt.no_grad():
        z[0] = 0.0
    y.sum().backward()
