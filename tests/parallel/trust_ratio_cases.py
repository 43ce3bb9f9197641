"""What the ranks do in the tests of LAMB and LARS. What must hold is checked by the parent process."""

from minitorch_dist import comm, optim
from minitorch_dist.parallel import fully_shard
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from . import eight_bit_cases, sharded_cases

OPTIMIZERS = {
    "lamb": lambda params: optim.LAMB(params, 0.02),
    "lamb of 8 bits": lambda params: optim.LAMB(params, 0.02, state_bits=8),
    "lars": lambda params: optim.LARS(params, 2.0, trust_coefficient=0.02),
    "lamb and lars": lambda params: optim.Combined(optim.LAMB(params[::2], 0.02), optim.LARS(params[1::2], 0.1)),
}
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
