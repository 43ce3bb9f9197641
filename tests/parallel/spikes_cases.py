"""What the ranks do in the tests of steps that are left out. What must hold is checked by the parent process."""

import numpy as np

from minitorch_dist import comm, data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard

ROWS, BATCHES, BROKEN = 12, 14, 9       # one batch, counted from 0, is broken
WAYS = {
    "ddp": lambda model, world: DistributedDataParallel(model, world),
    "exact": lambda model, world: DistributedDataParallel(model, world, exact=True),
    **{f"stage {n}": lambda model, world, n=n: fully_shard(model, world, n) for n in (1, 2, 3)},
    "exact, 3": lambda model, world: fully_shard(model, world, 3, exact=True),
}


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def trained(way, broken="left out", amp=None, clip=None, dtype="float64"):
    """(all parameters, [step] that was left out, losses) after 14 batches; the broken one is "left out" by a
    SpikeGuard, "taken", or "not there"."""
    world, random = comm.world(), np.random.default_rng(0)
    x, labels = random.standard_normal((ROWS * BATCHES, 7)).astype(dtype), random.integers(0, 5, ROWS * BATCHES)
    rows = slice(BROKEN * ROWS, (BROKEN + 1) * ROWS)
    x[rows] *= 50
    if broken == "not there":
        x, labels = np.delete(x, rows, 0), np.delete(labels, rows)
    layers = nn.Linear(7, 9, dtype=dtype), nn.Tanh(), nn.Linear(9, 5, dtype=dtype)
    model = WAYS[way](nn.Sequential(*layers), world)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    loader = data.Loader(x, labels, batch_size=ROWS, shuffle=False, rank=world.rank, size=world.size,
                         micro_shards=8 if "exact" in way else 1)
    spikes = optim.SpikeGuard(window=8) if broken == "left out" else None
    scaler = optim.GradScaler(init_scale=2.0**10, comm=world) if amp == "float16" else None
    losses = [training.train_step(model, optimizer, batch, loss_sum, world, seed=0, step=step, clip=clip, amp=amp,
                                  scaler=scaler, spikes=spikes)[0] for step, batch in enumerate(loader.epoch(0))]
    state = full_state_dict(model) if way.startswith("stage") or way == "exact, 3" else model.module.state_dict()
    return ({name: np.array(value) for name, value in (state or {}).items()},
            [spike.step for spike in spikes.found] if spikes else [], losses)
