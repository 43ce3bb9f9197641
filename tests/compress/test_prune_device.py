"""Pruning, distillation and averages on a GPU (the stand-in): the numbers of the host."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim
from minitorch_dist.compress import prune, shrink, soup, sparse
from minitorch_dist.compress.distill import distillation_loss
from minitorch_dist.parallel import full_state_dict, fully_shard
from tests.device.fake_cupy import installed


def trained(device, stage):
    """(masks, the average's values, rows of the table, the network) of a student that is pruned."""
    mt.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 12, False), nn.BatchNorm(12), nn.ReLU(), nn.Linear(12, 4)).to(device)
    net = fully_shard(inner, comm.world(), stage=stage) if stage else inner
    optimizer = optim.SGD(net.parameters(), 0.05, momentum=0.9)
    pruning = prune.GradualPruning(net, prune.cubic(0.7, 0, 3))
    average = soup.ExponentialMovingAverage(net, 0.5)
    for step in range(4):
        random = np.random.default_rng(step)
        x, targets = (mt.tensor(random.standard_normal((6, n)).astype("f4"), device=device) for n in (8, 4))
        labels = mt.tensor(random.integers(0, 4, 6), device=device)
        optimizer.zero_grad()
        distillation_loss(net(x), targets, 2.0, labels, 0.5).backward()
        optimizer.step()
        pruning.step()
        average.update()
    rows = prune.sparsity(net).rows
    average.load_state_dict(average.state_dict())
    with average.applied():
        soup.update_bn(net, [x])
        values = full_state_dict(net) if stage else net.state_dict()
    return pruning.masks, values, rows, inner


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_numbers_of_the_host(stage):
    with installed():
        masks, wanted, rows, _ = trained("cpu", stage)
        got_masks, got, got_rows, net = trained("cuda", stage)
        assert got_rows == rows and all((got_masks[n] == masks[n]).all() for n in masks)
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-6, err_msg=name)
        if stage == 0:
            assert (sparse.pack(net.state_dict()["3.weight"], masks["3.weight"]).mask() == masks["3.weight"]).all()
            half = shrink.neurons(net, 0.5)
            prune.Pruning(net, half)
            small = shrink.shrink(net, half).eval()
            x = mt.tensor(np.ones((2, 8), np.float32), device="cuda")
            assert small[0].weight.device.startswith("cuda") and small[0].weight.shape == (6, 8)
            np.testing.assert_allclose(small(x).cpu().numpy(), net.eval()(x).cpu().numpy(), rtol=0, atol=1e-6)
