"""Batch norm on several ranks: the statistics of the global batch against plain NumPy; exact mode to the bit."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, comm, nn, optim, training
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.data import Loader
from minitorch_dist.parallel import DistributedDataParallel, batch_norm, fully_shard
from tests.crews import crews, threads

from .test_exact import MPICH_RING

HERE = "tests.parallel.test_batch_norm:"
SAMPLES = 29


def dataset():
    random = np.random.default_rng(3)
    x = random.standard_normal((SAMPLES, 2, 4, 4)) * 2 + 3 + np.arange(SAMPLES)[:, None, None, None] / 5
    return x, random.integers(0, 3, SAMPLES)        # means drift with the sample: ranks differ


def network(dtype):
    mt.manual_seed(4)
    return nn.Sequential(nn.ResidualBlock(2, 4, 2, dtype=dtype), nn.Flatten(), nn.Linear(16, 6, dtype=dtype),
                         nn.BatchNorm(6, dtype=dtype), nn.Tanh(), nn.Linear(6, 3, dtype=dtype))


def curve(exact=False, dtype="f8", batch_size=13, steps=5, micro_shards=4, bucket_mb=25.0):
    """State after some steps, as bytes of each array and as arrays; the losses. The last batch is smaller."""
    world = comm.world()
    x, labels = dataset()
    model = DistributedDataParallel(network(np.dtype(dtype)), world, exact=exact, micro_shards=micro_shards,
                                    bucket_cap_mb=bucket_mb)
    loader = Loader(x.astype(dtype), labels, batch_size, rank=world.rank, size=world.size,
                    micro_shards=micro_shards if exact else 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, step = [], 0
    while step < steps:
        for batch in loader.epoch(step):
            losses.append(training.train_step(
                model, optimizer, batch, lambda m, s: nn.cross_entropy(m(s.inputs), s.labels, reduction="sum"), world,
                seed=0, step=step, micro_shards=micro_shards)[0])
            step += 1
    training.check_replicas(model, world)
    return losses, model.state_dict()


def test_one_curve_on_any_number_of_ranks():
    (alone_losses, alone), = crews.call(HERE + "curve", 1)
    assert np.abs(alone["0.norm1.running_mean"]).min() > 1e-3 and len(alone_losses) >= 5
    for n in (2, 3, 4):
        for losses, state in crews.call(HERE + "curve", n, (False, "f8", 13, 5, 4, 1e-4)):
            np.testing.assert_allclose(losses, alone_losses, rtol=0, atol=1e-10)
            assert set(state) == set(alone)
            for name, value in state.items():
                np.testing.assert_allclose(value, alone[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_16_bits_more_rows_than_these_can_count(dtype):
    """float16 ends at 65,504, and from 256 on bfloat16 counts in steps. Statistics within one rounding (2^-11, 2^-8) of
    float64's, of the rounded input; results within that of them, of x, and their own."""
    step = 2.0 ** (-11 if dtype == "float16" else -8)
    x, ends = many_rows().astype(backend.as_dtype(dtype)).astype("f8"), crews.call(HERE + "of_16_bits", 2, (dtype,))
    mean, var = x.mean(0), x.var(0) * len(x) / (len(x) - 1)
    for found_mean, found_var, _ in ends:       # running: 0.9 · (0, 1) + 0.1 · these
        np.testing.assert_allclose(found_mean, 0.1 * mean, rtol=3 * step)
        np.testing.assert_allclose(found_var, 0.9 + 0.1 * var, rtol=3 * step)
    y = (x - mean) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(np.concatenate([found for _, _, found in ends]), y[::499], rtol=2 * step, atol=2 * step)


def many_rows():
    return np.random.default_rng(6).standard_normal((2 * 499 * 140, 3)) * [1, 2, 5] + [0.5, -3, 1]


def of_16_bits(dtype):
    """(running mean, running variance, each 499th row of what comes out), in float64."""
    world, layer = comm.world(), nn.BatchNorm(3, dtype=dtype)
    batch_norm.synchronise(layer, world)        # as under a policy of 16 bits
    x = np.split(many_rows(), world.size)[world.rank]
    y = lower(layer(mt.tensor(x.astype(backend.as_dtype(dtype)))))
    assert y.dtype == dtype
    return [a.astype("f8") for a in (layer.running_mean, layer.running_var, y[::499])]


def test_a_rank_without_a_row():
    """29 = 14 · 2 + 1: the last batch is one image, on 4 ranks or on 2, and its statistics are over its pixels."""
    states = {n: crews.call(HERE + "no_rows", n) for n in (1, 2, 4)}
    for values in states.values():
        for value in values:
            np.testing.assert_allclose(value, states[1][0], rtol=0, atol=1e-12)


def no_rows():
    world = comm.world()
    x = dataset()[0][:1]
    layer = nn.BatchNorm(2, dtype=np.float64)
    model = DistributedDataParallel(layer, world)
    mine = mt.tensor(x[world.rank:world.rank + 1], requires_grad=True)
    (model(mine) ** 3).sum().backward()
    return np.concatenate([layer.running_mean, layer.running_var, layer.weight.grad.numpy(), layer.bias.grad.numpy()])


def statistics_and_gradient():
    """On each rank: its rows' input gradient under a fixed cotangent, and the running statistics after one step."""
    world = comm.world()
    x, _ = dataset()
    ct = np.random.default_rng(5).standard_normal(x.shape)
    mine = slice(SAMPLES * world.rank // world.size, SAMPLES * (world.rank + 1) // world.size)
    layer = nn.BatchNorm(2, dtype=np.float64)
    model = DistributedDataParallel(layer, world)
    rows = mt.tensor(x[mine], requires_grad=True)
    (model(rows) * ct[mine]).sum().backward()
    return rows.grad.numpy(), layer.running_mean, layer.running_var, layer.weight.grad.numpy()


@pytest.mark.parametrize("n", [2, 3])
def test_against_the_closed_form(n):
    x, _ = dataset()
    ct = np.random.default_rng(5).standard_normal(x.shape)
    axes = (0, 2, 3)
    r = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    normal = (x - x.mean(axes, keepdims=True)) * r
    wanted = r * (ct - ct.mean(axes, keepdims=True) - normal * (ct * normal).mean(axes, keepdims=True))
    values = crews.call(HERE + "statistics_and_gradient", n)
    np.testing.assert_allclose(np.concatenate([v[0] for v in values]), wanted, atol=1e-12)
    for _, mean, var, weight_gradient in values:
        np.testing.assert_allclose(mean, 0.1 * x.mean(axes))
        np.testing.assert_allclose(var, 0.9 + 0.1 * x.var(axes, ddof=1))
        np.testing.assert_allclose(weight_gradient, (ct * normal).sum(axes))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_exact_mode_has_one_set_of_bits(dtype):
    args = (True, dtype, 29, 7, 8)
    (alone_losses, alone), = crews.call(HERE + "curve", 1, args, env=threads(1))
    for n in (2, 4, 8):
        for losses, state in crews.call(HERE + "curve", n, args, env=MPICH_RING):
            assert losses == alone_losses
            different = [name for name in alone if state[name].tobytes() != alone[name].tobytes()]
            assert not different
    other = crews.call(HERE + "curve", 1, (True, dtype, 29, 7, 4))[0][1]       # other micro-shards, other statistics
    assert other["3.running_mean"].tobytes() != alone["3.running_mean"].tobytes()


def test_exact_mode_moves_by_the_mean_over_the_micro_shards():
    """One step of 8 samples in 4 micro-shards, then one where 3 samples leave a shard empty."""
    world = comm.world()
    x, _ = dataset()
    layer = nn.BatchNorm(2, dtype=np.float64)
    model = DistributedDataParallel(layer, world, exact=True, micro_shards=4)
    mean, var = np.zeros(2), np.ones(2)
    for shards in ([x[0:2], x[2:4], x[4:6], x[6:8]], [x[:0], x[8:9], x[9:10], x[10:11]]):
        for shard in shards:
            model(mt.tensor(shard)).sum().backward()
        full = [s for s in shards if len(s)]
        mean = 0.9 * mean + 0.1 * np.mean([s.mean(axis=(0, 2, 3)) for s in full], 0)
        var = 0.9 * var + 0.1 * np.mean([s.var(axis=(0, 2, 3), ddof=1) for s in full], 0)
        np.testing.assert_allclose(layer.running_mean, mean)
        np.testing.assert_allclose(layer.running_var, var)
        model.zero_grad()


class Twice(nn.Module):
    """A layer that is used twice, and one that isn't."""

    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.BatchNorm(2, dtype=np.float64), nn.BatchNorm(2, dtype=np.float64)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_exact_mode_moves_by_the_mean_over_all_uses_of_a_layer():
    x, _ = dataset()
    module = Twice()
    model = DistributedDataParallel(module, comm.world(), exact=True, micro_shards=2)
    means, variances = [], []
    for shard in (x[0:3], x[3:6]):
        model(mt.tensor(shard)).sum().backward()
        mean, var = (f(shard, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.var))
        for seen in (shard, (shard - mean) / np.sqrt(var + module.layer.eps)):
            means.append(seen.mean(axis=(0, 2, 3)))
            variances.append(seen.var(axis=(0, 2, 3), ddof=1))
    np.testing.assert_allclose(module.layer.running_mean, 0.1 * np.mean(means, 0))
    np.testing.assert_allclose(module.layer.running_var, 0.9 + 0.1 * np.mean(variances, 0))
    assert not module.spare.running_mean.any() and (module.spare.running_var == 1).all()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@pytest.mark.parametrize("told", [False, True])
def test_exact_mode_forgets_the_statistics_of_a_step_whose_backward_raised_and_of_no_other(wrap, told):
    x, _ = dataset()
    layer = nn.BatchNorm(2, dtype=np.float64)
    model = wrap(layer, comm.world(), exact=True, micro_shards=4)
    shards = x[:8].reshape(4, 2, *x.shape[1:])
    model(mt.tensor(shards[0])).sum().backward()
    far = mt.tensor(5 + shards[1], requires_grad=True) * 1
    far.register_hook(lambda ct: 1 / 0)     # when the gradients of the layer are there already
    with pytest.raises(ZeroDivisionError):
        model(far).sum().backward()
    model.forget_step() if told else model.zero_grad()
    for shard in shards:
        model(mt.tensor(shard)).sum().backward()
    np.testing.assert_allclose(layer.running_mean, 0.1 * shards.mean(axis=(1, 3, 4)).mean(axis=0))
    np.testing.assert_allclose(layer.running_var, 0.9 + 0.1 * shards.var(axis=(1, 3, 4), ddof=1).mean(axis=0))


def buffers_of_rank_0():
    layer = nn.BatchNorm(3)
    layer.running_mean += comm.world().rank + 1
    DistributedDataParallel(layer, comm.world())
    return layer.running_mean.tolist()


def test_buffers_start_as_rank_0_has_them():
    assert crews.call(HERE + "buffers_of_rank_0", 3) == [[1.0] * 3] * 3


def one_value():
    with pytest.raises(ValueError, match="2 or more values per channel, got 1"):
        DistributedDataParallel(nn.BatchNorm(3), comm.world())(mt.tensor(np.ones((comm.world().rank, 3), np.float32)))


def test_one_value_on_all_ranks_together_raises_on_all():
    crews.call(HERE + "one_value", 2)
