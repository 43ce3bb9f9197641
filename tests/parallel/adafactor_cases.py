"""What the ranks do in the tests of Adafactor. What must hold is checked by the parent process."""

from minitorch_dist import comm, optim
from minitorch_dist.parallel import fully_shard
from minitorch_dist.parallel import tensor_parallel as tp

from . import eight_bit_cases, sharded_cases

EPS = 1e-8, 1e-3      # above rounding's noise, which is all that the gradient of attention's keys' biases is
OPTIMIZERS = {
    "adafactor": lambda params: optim.Adafactor(params, 0.05, eps=EPS),
    "decayed": lambda params: optim.Adafactor(params, 0.05, -0.6, (1e-5, 1e-2), 1.5, 0.1),
    "combined": lambda params: combined(list(params)),
}


def combined(params):
    return optim.Combined(optim.Adafactor([p for p in params if p.ndim > 1], 0.05, eps=EPS),
                          optim.AdamW([p for p in params if p.ndim < 2], 0.01, eps=1e-6))


sharded_cases.OPTIMIZERS |= {name: lambda m, make=make: make(sharded_cases.trained(m))
                             for name, make in OPTIMIZERS.items()}


def exact_curves(ways):
    """{(optimizer, way): digest of parameters and state}."""
    return {(name, way): eight_bit_cases.bits_of(eight_bit_cases.begin(way, name).run(3))
            for name in OPTIMIZERS for way in ways}


def of_parts(name, stage=None):
    """The whole of a model that all ranks cut among them, or pairs of ranks, pieces of whose parts fully_shard has."""
    model = eight_bit_cases.model(64)
    mesh = comm.DeviceMesh(dp=-1, tp=2)
    tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    if stage is not None:
        model = fully_shard(model, mesh["dp"], stage)
    return tp.full_state_dict(eight_bit_cases.steps(model, OPTIMIZERS[name], 1 / mesh["dp"].size))
