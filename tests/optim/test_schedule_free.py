"""AdamWScheduleFree against its paper's three sequences in plain NumPy float64; its mean, in every form of training."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.optim.optimizer import TILE
from minitorch_dist.optim.schedule_free import share_of_mean
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from tests.crews import crews

CASES = "tests.optim.schedule_free_cases:"
SHAPES = [(7, 11), (13,), (TILE + 33,), (), (0, 3)]
SETTINGS = {"plain": {}, "warm": {"lr": 0.01, "warmup": 7}, "decay": {"lr": 0.02, "weight_decay": 0.1, "warmup": 2},
            "betas": {"lr": 5e-3, "betas": (0.6, 0.9), "eps": 1e-3}, "at the mean": {"betas": (1.0, 0.95)}}


class Sequences:
    """x, y and z of one parameter, each kept, as the paper's algorithm has them."""

    def __init__(self, start, lr=2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup=0):
        self.x = self.y = self.z = start
        self.lr, self.betas, self.eps, self.decay, self.warmup = lr, betas, eps, weight_decay, warmup
        self.v, self.t, self.total = np.zeros_like(start), 0, 0.0

    def step(self, g):
        self.t += 1
        rate = self.lr * min(1.0, self.t / self.warmup if self.warmup else 1.0)
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g ** 2
        direction = g / (np.sqrt(self.v / (1 - self.betas[1] ** self.t)) + self.eps) + self.decay * self.y
        self.z = self.z - rate * direction
        self.total += rate ** 2
        c = rate ** 2 / self.total
        self.x = (1 - c) * self.x + c * self.z
        self.y = (1 - self.betas[0]) * self.z + self.betas[0] * self.x


def start():
    rng = np.random.default_rng(0)
    return [0.1 * rng.standard_normal(shape) for shape in SHAPES]


def gradients(step):
    rng = np.random.default_rng([step, 5])
    return [rng.standard_normal(shape) for shape in SHAPES]


def give(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = mt.tensor(np.asarray(g, p.dtype))


@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-13), (np.float32, 2e-6)])
@pytest.mark.parametrize("name", SETTINGS)
def test_fifty_steps_are_the_papers(name, dtype, close):
    params = [mt.tensor(v.astype(dtype), requires_grad=True) for v in start()]
    wanted = [Sequences(v.astype(dtype).astype(float), **SETTINGS[name]) for v in start()]
    optimizer = optim.AdamWScheduleFree(params, **SETTINGS[name])
    for step in range(50):
        give(params, gradients(step))
        optimizer.step()
        for each, g in zip(wanted, gradients(step), strict=True):
            each.step(g.astype(dtype).astype(float))
    assert max(abs(w.x - w.z).max(initial=0) for w in wanted) > 1e-3       # they are three, and not one
    for p, w in zip(params, wanted, strict=True):
        np.testing.assert_allclose(p.numpy(), w.y, rtol=0, atol=close)
    with optimizer.averaged():
        for p, w in zip(params, wanted, strict=True):
            np.testing.assert_allclose(p.numpy(), w.x, rtol=0, atol=close / (1 if name == "at the mean" else 0.5))


@pytest.mark.parametrize("warmup", [0, 1, 2, 9])
def test_the_shares_are_of_squared_rates(warmup):
    rates = [min(1.0, t / max(warmup, 1)) ** 2 for t in range(1, 40)]
    assert [share_of_mean(t, warmup) for t in range(1, 40)] == pytest.approx(
        [rate / sum(rates[:t]) for t, rate in enumerate(rates, 1)], rel=1e-13)


def test_without_warmup_it_is_the_plain_mean():
    """Of gradients that don't depend on where they are taken, the mean of all z is known."""
    p = mt.tensor(np.array([1.0, -2.0]), requires_grad=True)
    optimizer = optim.AdamWScheduleFree([p], lr=0.1, betas=(0.7, 0.0))
    for _ in range(9):
        p.grad = mt.tensor(np.array([3.0, -0.5]))       # over its own size: a step of ±0.1
        optimizer.step()
    with optimizer.averaged():
        np.testing.assert_allclose(p.numpy(), [1 - 0.5, -2 + 0.5], rtol=1e-7)
    z = p.numpy() + optimizer.state_dict()["state"][0]["z_minus_y"]
    np.testing.assert_allclose(z, [1 - 0.9, -2 + 0.9], rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_behind_it_all_is_as_it_was(dtype):
    """To the bit, and a training that has looked at the mean goes on as one that hasn't; one parameter is unused."""
    found = []
    for looks in (False, True):
        params = [mt.tensor(v.astype(dtype), requires_grad=True) for v in start()]
        idle = mt.tensor(np.ones(3, dtype), requires_grad=True)
        optimizer = optim.AdamWScheduleFree([*params, idle], lr=0.01)
        for step in range(6):
            give(params, gradients(step))
            optimizer.step()
            if looks:
                with optimizer.averaged():
                    seen = params[0].numpy().copy()
                    assert idle.numpy().tolist() == [1, 1, 1]
                assert np.any(seen != params[0].numpy()) == (step > 0)      # after one step there is one z
        found.append([p.numpy().tobytes() for p in (*params, idle)]
                     + [a.tobytes() for each in optimizer.state_dict()["state"] for a in each.values()])
    assert found[0] == found[1]


def test_in_sixteen_bits_the_mean_is_of_the_master_copy():
    wide = [mt.tensor(v.astype("f2").astype("f4"), requires_grad=True) for v in start()]
    params = [mt.tensor(v.astype("f2"), requires_grad=True) for v in start()]
    optimizers = [optim.AdamWScheduleFree(each, lr=1e-5) for each in (wide, params)]
    for step in range(5):
        for each, optimizer in zip((wide, params), optimizers, strict=True):
            give(each, [g.astype("f2") for g in gradients(step)])
            optimizer.step()
    for optimizer in optimizers:
        optimizer.block = optimizer.averaged()
        optimizer.block.__enter__()
    for w, p in zip(wide, params, strict=True):
        assert np.array_equal(w.numpy().astype("f2"), p.numpy())
    for optimizer in optimizers:
        optimizer.block.__exit__(None, None, None)


def test_an_exception_inside_leaves_what_was_trained():
    p = mt.tensor(np.ones(3), requires_grad=True)
    optimizer = optim.AdamWScheduleFree([p], lr=0.1)
    for _ in range(3):
        p.grad = mt.tensor(np.ones(3))
        optimizer.step()
    y = p.numpy().copy()
    with pytest.raises(KeyError), optimizer.averaged():
        assert np.any(p.numpy() != y)
        raise KeyError
    assert np.array_equal(p.numpy(), y)
    p.grad = mt.tensor(np.ones(3))
    optimizer.step()


def test_the_mean_is_where_parameters_have_moved_since_the_last_step():
    model = nn.Sequential(nn.Linear(5, 4, dtype=np.float64), nn.Linear(4, 3, dtype=np.float64))
    optimizer = optim.AdamWScheduleFree(model.parameters())
    for step in range(3):
        rng = np.random.default_rng(step)
        give(model.parameters(), [rng.standard_normal(p.shape) for p in model.parameters()])
        optimizer.step()
    y = [p.numpy().copy() for p in model.parameters()]
    with optimizer.averaged():
        mean = [p.numpy().copy() for p in model.parameters()]
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)      # a bucket per layer
    with optimizer.averaged():
        for p, before, wanted in zip(wrapped.parameters(), y, mean, strict=True):
            assert not np.array_equal(before, wanted)
            np.testing.assert_array_equal(p.numpy(), wanted)
    for p, before in zip(wrapped.parameters(), y, strict=True):
        np.testing.assert_array_equal(p.numpy(), before)


def test_what_is_refused():
    p = mt.tensor(np.ones(3), requires_grad=True)
    optimizer = optim.AdamWScheduleFree([p])
    saved = optimizer.state_dict()
    with optimizer.averaged():
        for what, call in {"step": optimizer.step, "state_dict": optimizer.state_dict,
                           "load_state_dict": lambda: optimizer.load_state_dict(saved),
                           "averaged": lambda: optimizer.averaged().__enter__()}.items():
            with pytest.raises(RuntimeError, match=rf"AdamWScheduleFree\.{what} inside averaged\(\)"):
                call()
    for settings, said in (({"betas": (0.0, 0.9)}, "betas is .* the first in"), ({"betas": 0.9}, "betas is 0.9"),
                           ({"warmup": -1}, "warmup is -1"), ({"warmup": 1.5}, "warmup is 1.5"),
                           ({"warmup": float("inf")}, "warmup is inf"),
                           ({"eps": 0.0}, "eps is 0.0"), ({"lr": -1.0}, "lr is -1.0")):
        with pytest.raises(ValueError, match=said):
            optim.AdamWScheduleFree([p], **settings)
    with pytest.raises(ValueError, match="state_bits is 8"):
        optim.AdamWScheduleFree([{"params": [p], "state_bits": 8}])


def test_a_model_is_not_wrapped_inside():
    model = nn.Linear(2, 3)
    optimizer = optim.AdamWScheduleFree(model.parameters())
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel was made inside averaged\(\), or had its first"):
        with optimizer.averaged():
            DistributedDataParallel(model)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_model_whose_other_pieces_nobody_would_gather_says_so(stage):
    model = fully_shard(nn.Linear(5, 4), stage=stage)
    optimizer = optim.AdamWScheduleFree(model.parameters())
    x = np.ones((2, 5), np.float32)
    mt.sum(model(x)).backward()
    optimizer.step()
    model(x)
    with (optimizer.averaged(), pytest.raises(RuntimeError, match=r"^AdamWScheduleFree\.averaged has written to this "
                                              r"rank's part of .* as optimizer\.averaged\(model\)$")):
        model(x)
    with optimizer.averaged(model):
        model(x)
    model(x)


def test_what_backward_needs_is_known_to_be_overwritten():
    p = mt.tensor(np.ones(3), requires_grad=True)
    optimizer = optim.AdamWScheduleFree([p])
    loss = mt.sum(p * p)
    with optimizer.averaged():
        pass
    with pytest.raises(RuntimeError, match="AdamWScheduleFree"):
        loss.backward()


@pytest.mark.parametrize("n", [1, 2])
def test_all_forms_of_data_parallelism_have_the_mean_of_one_process(n):
    """Float64: what is trained, the mean, and the loss that the mean has; and of one that goes on from saved state."""
    (wanted, mean, losses), = crews.call(CASES + "trained", 1, args=("plain",))
    assert losses[-1] < losses[0]
    for way in ("ddp", 1, 2, 3, "resumed"):
        for got, got_mean, got_losses in crews.call(CASES + "trained", n, args=(way,)):
            np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
            for found, one in ((got, wanted), (got_mean, mean)):
                for name, value in found.items():       # fully_shard's are rank 0's
                    np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-10)
    assert max(abs(mean[name] - wanted[name]).max() for name in mean) > 1e-3


def test_exact_mode_has_the_bits_of_one_process():
    wanted = crews.call(CASES + "exact", 1)
    assert crews.call(CASES + "exact", 2) == wanted * 2
