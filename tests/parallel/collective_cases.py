"""What the ranks do in the tests of the differentiable collectives."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger
from minitorch_dist.autodiff.check import GradientError
from minitorch_dist.autodiff.primitive import OPS, LinearOp, Primitive, bind
from minitorch_dist.parallel import collectives as c
from minitorch_dist.parallel.check import check_grads_across


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


def samples(world):
    """{name: (function, x, same input on all ranks, same output, the entries that it covers)}, none of them linear."""
    rank, n = world.rank, world.size
    w = values((3, 4), 1, rank)
    counts = [[1 + (i + 2 * j) % 3 for j in range(n)] for i in range(n)]     # rows from i to j
    sent, received = counts[rank], [counts[i][rank] for i in range(n)]
    square = values((2 * n, 3), 2, rank)
    return {
        "copy_to": (lambda x: mt.sin(c.copy_to(x, world) * w), values((3, 4), 3), True, False),
        "reduce_from": (lambda x: mt.sin(c.reduce_from(mt.tanh(x) * w, world)), values((3, 4), 4, rank), False, True),
        "scatter_to": (lambda x: mt.sin(c.scatter_to(mt.tanh(x), world)) * (rank + 1), values((3 * n + 1, 2), 14), True,
                       False),
        "scatter_to axis 1": (lambda x: mt.sin(c.scatter_to(x * x, world, axis=1)), values((2, 2 * n), 15), True,
                              False),
        "gather_from": (lambda x: mt.sin(c.gather_from(mt.tanh(x) * w[:, :2], world)) * values((3 * n, 2), 16),
                        values((3, 2), 17, rank), False, True),
        "gather_from axis -1": (
            lambda x: mt.sin(c.gather_from(x * x, world, axis=-1, extent=2 * n + 1)) * values((3, 2 * n + 1), 18),
            values((3, (2 * n + 1) * (rank + 1) // n - (2 * n + 1) * rank // n), 19, rank), False, True),
        "all_gather": (lambda x: mt.sin(c.all_gather(mt.tanh(x), world)) * (rank + 1), values((2, 3), 5, rank), False,
                       False),
        "all_gather axis 1": (lambda x: mt.sin(c.all_gather(x * x, world, axis=1)) * values((2, 3 * n), 6, rank),
                              values((2, 3), 7, rank), False, False),
        "reduce_scatter": (lambda x: mt.sin(c.reduce_scatter(mt.tanh(x), world)), square, False, False),
        "reduce_scatter axis -1": (lambda x: mt.sin(c.reduce_scatter(x * x, world, axis=-1)),
                                   values((3, 2 * n), 8, rank), False, False),
        "all_to_all": (lambda x: mt.sin(c.all_to_all(mt.tanh(x), world)) * (rank + 1), square, False, False),
        "all_to_all with counts": (lambda x: mt.sin(c.all_to_all(x * x, world, sent, received)),
                                   values((sum(sent), 2), 9, rank), False, False),
        "broadcast": (lambda x: mt.sin(c.broadcast(mt.tanh(x), world, n - 1)) * (rank + 1), values((3, 2), 10, rank),
                      False, False),
        "reduce": (lambda x: mt.sin(c.reduce(mt.tanh(x), world, n - 1)), values((3, 2), 11, rank), False, False),
    }


def gradients():
    """Names of the samples that passed, and the collective entries of the op table."""
    world = comm.world()
    for name, (f, x, one_input, one_output) in samples(world).items():
        try:
            check_grads_across(f, x, world, one_input, one_output)
        except GradientError as error:
            raise AssertionError(f"{name}: {error}") from error
    return list(samples(world)), [name for name in OPS if name in vars(c) and name != "transpose"]


def tape():
    """The same gradients from the eager tape as from the transform, in float32 too."""
    world = comm.world()
    for name, (f, x, _, _) in samples(world).items():
        leaf = mt.tensor(x, requires_grad=True)
        y = f(leaf)
        u = values(y.shape, 12)
        y.backward(mt.tensor(u))
        np.testing.assert_allclose(leaf.grad.numpy(), mt.vjp(f, x)[1](u)[0], rtol=1e-12, atol=1e-12, err_msg=name)
    for collective in (c.copy_to, c.reduce_from, c.scatter_to, c.gather_from, c.all_gather, c.all_to_all, c.broadcast,
                       c.reduce, c.reduce_scatter):
        leaf = mt.tensor(np.ones((2 * world.size, 3), np.float32), requires_grad=True)
        y = collective(leaf, world)
        y.backward(mt.tensor(np.ones(y.shape, np.float32)))
        assert y.dtype == leaf.grad.dtype == np.float32


def wrong_rules():
    """How many of these wrong derivatives check_grads_across finds."""
    world = comm.world()
    x = values((2 * world.size, 3), 13, world.rank)
    linear = {
        "identity for a sum": (lambda z: c._summed(z, world), lambda t: c.reduce_from(t, world), lambda ct: ct),
        "own cotangent only": (lambda z: c._gather(z, world), lambda t: c.all_gather(t, world),
                               lambda ct: ct[world.rank * len(x):(world.rank + 1) * len(x)]),
        "mean for sum": (lambda z: c._gather(z, world), lambda t: c.all_gather(t, world),
                         lambda ct: c.reduce_scatter(ct, world) / world.size),
        "wrong part": (lambda z: c._reduce_scatter(z, world), lambda t: c.reduce_scatter(t, world),
                       lambda ct: c.all_gather(ct, world)[::-1]),
        "wrong tangent": (lambda z: c._summed(z, world), lambda t: t, lambda ct: c.reduce_from(ct, world)),
    }
    found = []
    for name, (forward, apply, pull) in linear.items():
        op = LinearOp(name, lambda t, r, apply=apply: apply(t), lambda ct, r, pull=pull: pull(ct), listed=False)
        primitive = Primitive(name, forward, x=(op, None), listed=False)
        try:
            check_grads_across(lambda z, primitive=primitive: bind(primitive, (z,)), x, world, order=1)
        except GradientError as error:
            found.append((name, "rank 0" in str(error)))
    return found


def megatron():
    """A two-layer network cut between the ranks, and its calls: (y, dx, dW1 part, dW2 part, all-reduces, sizes)."""
    world = comm.world()
    rank, n = world.rank, world.size
    x = mt.tensor(values((5, 6), 20), requires_grad=True)
    w1 = mt.tensor(values((6, 4 * n), 21)[:, 4 * rank:4 * rank + 4], requires_grad=True)
    w2 = mt.tensor(values((4 * n, 3), 22)[4 * rank:4 * rank + 4], requires_grad=True)
    with ledger.record() as book:
        y = c.reduce_from(mt.tanh(c.copy_to(x, world) @ w1) @ w2, world)
        forward = book.calls["world", "all_reduce"]
        (y * mt.tensor(values((5, 3), 23))).sum().backward()
    return (y.numpy(), x.grad.numpy(), w1.grad.numpy(), w2.grad.numpy(),
            forward, book.calls["world", "all_reduce"] - forward)


def errors():
    world = comm.world()
    messages = []
    for call in (lambda: c.reduce_scatter(np.zeros((world.size + 1, 2)), world),
                 lambda: c.all_gather(np.zeros(3), world, 1),
                 lambda: c.all_to_all(np.zeros(4), world, [2, 2]),
                 lambda: c.gather_from(np.zeros(3), world, extent=4)):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages
