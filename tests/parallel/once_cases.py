"""What the ranks do in the tests of rows that go to a rank once. What must hold is checked by the parent process."""

import contextlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, plan
from minitorch_dist.nn import moe
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.experts.once import trips
from tests.parallel.moe_cases import EXPERTS, forward_in_steps, gradients_in_steps, layer, pipelined, train, values


def once(replica, mesh):
    ep.dispatch_once(replica)


def trained(*arguments):
    """moe_cases.train's, with a row to each rank."""
    size, dense, accumulate, exact, tensor, stage, rows = arguments
    return train("no capacity", size, dense, accumulate, once, exact, tensor, stage, rows)


def in_a_pipeline(pp, size):
    """moe_cases.pipelined's parameters, with a row to each rank."""
    return pipelined(pp, size, factor=None, prepare=ep.dispatch_once)[0]


def sent(dtype, size):
    """({pass: (calls, bytes)} along ep of a layer of 6 experts, of which a token chooses 3; rows and choices for each
    rank, of every rank). The ranks bring unequal numbers of tokens."""
    mesh = comm.DeviceMesh(ep=-1)
    n, rank = mesh["ep"].size, mesh["ep"].rank
    model = layer(mesh["ep"], size, 6, k=3, capacity_factor=None)
    ep.dispatch_once(model)
    x = mt.tensor(values((5 + rank, 3, size), 7, rank), requires_grad=True)
    if dtype:
        model.to("float32")
        x = mt.tensor(x.numpy(), dtype=np.float32, requires_grad=True)
    with mt.autocast(dtype) if dtype else contextlib.nullcontext(), ledger.record() as forward:
        y, aux = model(x)
    with ledger.record() as backward:
        (mt.sum(y * values(y.shape, 8).astype(y.dtype)) + aux).backward()
    routing = model.routing(x)[1]
    found = {name: (book.calls["ep", "all_to_all"], book.bytes_sent["ep", "all_to_all"])
             for name, book in (("forward", forward), ("backward", backward))}
    mine = trips(routing.expert.reshape(-1, 3), 6, n)
    np.testing.assert_array_equal(mine.rows, routing.visits(n))
    return found, comm.world().all_gather_object((mine.rows.tolist(), mine.counts.sum(1).tolist()))


def beside_paper():
    """(bytes sent along ep by all ranks, forward and backward, of a layer in which each pair of experts is chosen
    equally often; what plan says that a rank sends on the mean)."""
    mesh, experts, width = comm.DeviceMesh(ep=-1), 4, 8
    n = mesh["ep"].size
    model = layer(mesh["ep"], width, experts, capacity_factor=None, balance=0).to("float32")
    ep.dispatch_once(model)
    model.router.weight.data[:] = np.eye(experts, width)
    pairs = np.array([np.eye(width)[a] + np.eye(width)[b] for a in range(experts) for b in range(a)], np.float32)
    x = mt.tensor(np.stack([pairs, pairs[::-1]]), requires_grad=True)
    with ledger.record() as book:
        mt.sum(model(x)[0] * values(x.shape, 8).astype(np.float32)).backward()
    job = plan.Job(plan.GPT(1, width, 2, 10, 6, experts=experts, capacity_factor=None), ep=n, batch=2 * n, time=6,
                   precision="float32", dispatch_once=True)
    paper = plan.plan(job, plan.DEVICES["H100"]).ranks[0].collectives
    everyone = comm.world().all_gather_object(book.bytes_sent["ep", "all_to_all"])
    return sum(everyone), n * sum(c.sent for c in paper if c.axis == "ep")


class ByRank(nn.Module):
    """A mixture in one process, in which the answers of each rank's experts are added up by themselves, and rows and
    gradients of those sums are rounded as on their way."""

    def __init__(self, whole, ranks):
        super().__init__()
        self.whole, self.ranks = whole, ranks

    def forward(self, x):
        rows = mt.reshape(x, (-1, x.shape[-1]))
        logits, routing = self.whole._routing(rows, x.shape)
        short = forward_in_steps(rows)
        parts = []
        for rank in range(self.ranks):
            here = routing.expert // (EXPERTS // self.ranks) == rank
            part = routing._replace(gates=routing.gates * here)
            parts.append(gradients_in_steps(moe.combine(
                self.whole.experts(moe.dispatch(short, part), part.counts), part)))
        return sum(parts), logits


def short():
    """The largest distances of y, of x's and of the experts' gradients from one process's, with rows of 8 bits."""
    world, size, tokens = comm.world(), 8, 10
    n = world.size
    x, u = values((3 * n, tokens, size), 7), values((3 * n * tokens, size), 8)
    whole = layer(None, size, EXPERTS, capacity_factor=None)
    every = mt.tensor(x, requires_grad=True)
    wanted = ByRank(whole, n)(every)[0]
    mt.sum(wanted * u).backward()
    model = layer(world, size, EXPERTS, capacity_factor=None)
    ep.dispatch_in_few_bits(model)
    ep.dispatch_once(model)
    mine, rows = slice(3 * world.rank, 3 * world.rank + 3), slice(30 * world.rank, 30 * world.rank + 30)
    part = mt.tensor(x[mine], requires_grad=True)
    y = mt.reshape(model(part)[0], (-1, size))
    mt.sum(y * u[rows]).backward()
    here = slice(EXPERTS // n * world.rank, EXPERTS // n * (world.rank + 1))
    return [abs(y.numpy() - wanted.numpy()[rows]).max(), abs(part.grad.numpy() - every.grad.numpy()[mine]).max()] + [
        abs(getattr(model.experts, name).grad.numpy() - getattr(whole.experts, name).grad.numpy()[here]).max()
        for name in ("up", "down")]


def gradients(order):
    """Of x of every rank, against finite differences across ranks."""
    world = comm.world()
    model = layer(world, 3, 2 * world.size, k=3, capacity_factor=None)
    ep.dispatch_once(model)
    for module in model.modules():
        for name, p in module._parameters.items():
            object.__setattr__(module, name, p if p is None else p.numpy())       # bare constants
    u = values((4, 3), 9, world.rank)

    def f(x):
        y, aux = model(x)
        return mt.sum(mt.sin(y) * u) + aux * (world.rank + 1)
    check_grads_across(f, values((4, 3), 3, world.rank), world, order=order)
    return True


def forgotten():
    """Whether mt.checkpoint, which sends all again in backward, leaves every bit; the calls without it, and with it."""
    world, found, calls = comm.world(), [], []
    for wrap in (lambda f: f, mt.checkpoint):
        model = layer(world, capacity_factor=None)
        ep.dispatch_once(model)
        x = mt.tensor(values((3, 5, 6), 4, world.rank), requires_grad=True)
        with ledger.record() as book:
            y, aux = wrap(lambda x, model=model: model(mt.tanh(x)))(x)
            (mt.sum(y * values(y.shape, 5)) + aux).backward()
        found.append([y.numpy(), aux.numpy(), x.grad.numpy(), *(p.grad.numpy() for p in model.parameters())])
        calls.append(sum(n for (_, op), n in book.calls.items() if op == "all_to_all"))
    return all(np.array_equal(a, b) for a, b in zip(*found, strict=True)) and all(np.any(a) for a in found[0]), calls


def refusals():
    """The errors' texts."""
    world, said = comm.world(), []
    for make in (lambda: ep.dispatch_once(nn.MoE(8, 16, 4, capacity_factor=None)),
                 lambda: ep.dispatch_once(layer(world)),
                 lambda: trained(world.size, False, 1, True, 1, 0, 8)):
        try:
            make()
        except ValueError as error:
            said.append(str(error))
    return said
