"""What the ranks do in the tests of multi-token prediction. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, training
from minitorch_dist.nn.multi_token import speculate
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context_parallel
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, TIME, BATCH = 13, 8, 8


def model_of():
    mt.manual_seed(5)
    return nn.MultiTokenPrediction(nn.GPT(VOCABULARY, TIME, 2, 4, 16, dtype=np.float64, dropout=0.1, tied=False,
                                          **FAMILIES["deepseek"]), 2)


def train(tp_size, stage):
    """The whole parameters after three steps. stage: of ZeRO, 0: DistributedDataParallel."""
    mesh, model = comm.DeviceMesh(dp=-1, tp=tp_size), model_of()
    if tp_size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    whole = fully_shard(model, mesh["dp"], stage) if stage else DistributedDataParallel(model, mesh["dp"])
    optimizer = optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (3 * BATCH, TIME + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=mesh.coords["dp"], size=mesh["dp"].size)

    def loss_sum(model, shard):
        return nn.multi_token_loss(model(shard.inputs), shard.labels)
    for step, batch in enumerate(loader.epoch(0)):
        training.train_step(whole, optimizer, batch, loss_sum, mesh["dp"], seed=3, step=step, units=TIME)
    return tp.full_state_dict(whole if stage else model)


def guessed_together():
    """Of divided experts, each rank with a row of its own: (what it writes, what the whole model does, the guesses that
    were right, and those that are of this row alone)."""
    def model():
        mt.manual_seed(4)
        moe = {"experts": 4, "k": 2, "capacity_factor": 2, "group": "sequence"}
        model = nn.MultiTokenPrediction(nn.GPT(5, 12, 2, 2, 8, dtype=np.float64, moe=moe, **FAMILIES["llama"]), 1)
        for i, p in enumerate(model.parameters()):
            p.data[...] = np.random.default_rng(60 + i).standard_normal(p.shape) * 0.6
        return model
    world, whole, cut = comm.world(), model(), model()
    tp.parallelize_module(cut, world, {"*.mlp": "experts"})
    tokens = np.random.default_rng(world.rank).integers(0, 5, (1, 3))
    return speculate(cut, tokens, 9), whole.generate(tokens, 9, 0), speculate(whole, tokens, 9)


def refused():
    """The errors of what would give a rank a part of the sequences."""
    found = []
    for cut in (lambda model: tp.parallelize_module(model, comm.world(), tp.plan_of(model), True),
                lambda model: context_parallel(model, comm.world()),
                lambda model: nn.MultiTokenPrediction(context_parallel(model.model, comm.world()))(
                    np.zeros((2, TIME // 2), int))):
        try:
            cut(model_of())
        except ValueError as error:
            found.append(str(error))
    return found
