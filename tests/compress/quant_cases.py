"""What the ranks do in the tests of quantisation-aware training."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim
from minitorch_dist.compress import convert, freeze_ranges, prepare_qat
from minitorch_dist.parallel import DistributedDataParallel


def samples():
    """Inputs whose extremes lie on different ranks from batch to batch, and labels."""
    random = np.random.default_rng(11)
    return random.standard_normal((37, 6)) * (1 + np.arange(37)[:, None] / 9), random.integers(0, 4, 37)


def trained(shared=True, exact=False):
    """(state, whether the ranges moved while they were frozen, the integer model's logits) after 12 steps of batches of
    8 and an odd last one."""
    world = comm.world()
    x, labels = samples()
    mt.manual_seed(12)
    plain = nn.Sequential(nn.Linear(6, 9, dtype=np.float64), nn.ReLU(), nn.Linear(9, 4, dtype=np.float64))
    prepared = prepare_qat(plain, bits=3, comm=None if shared else world.split(world.rank))
    if exact:       # ranges from one batch, which all ranks see; then they stay
        prepared(x)
        freeze_ranges(prepared)
    model = DistributedDataParallel(prepared, world, broadcast_buffers=False, exact=exact, micro_shards=4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = data.Loader(x, labels, 8, rank=world.rank, size=world.size, micro_shards=4 if exact else 1)
    step = 0
    while step < 12:
        for batch in loader.epoch(step):
            for shard in batch.shards:
                (nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    state = prepared.state_dict()
    with mt.no_grad():
        return state, convert(prepared)(x).numpy()
