"""What the ranks do in the tests of sequence parallelism with what one does besides, and of what is refused."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, nn
from minitorch_dist.autodiff.modes import saved_tensors_hooks
from minitorch_dist.autodiff.writes import wrote
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.tensor import mixtures
from minitorch_dist.parallel.tensor import sequence_parallel as sp
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from tests.device.fake_cupy import installed
from tests.parallel import tensor_cases
from tests.parallel.sequence_cases import BATCH, DIM, TIME, Own, block
from tests.parallel.tensor_cases import gpt, values


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
    attempt("dropout's axes", lambda: sp.on_part(nn.Dropout(0.5), world)(np.zeros((4, 16))))
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
    attempt("mixture's axes",
            lambda: mixtures.SequenceParallelMoE(nn.MoE(4, 4, 2), world)(np.zeros((3, 4), np.float32)))
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
