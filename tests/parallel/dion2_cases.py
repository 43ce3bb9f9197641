"""What the ranks do in the tests of Dion2: those of Muon and of Adafactor, of it."""

from functools import partial

from minitorch_dist import optim

from . import adafactor_cases, eight_bit_cases, moe_zero_cases, muon_cases, sharded_cases

SHARE = 0.3
DION2 = partial(optim.Dion2, fraction=SHARE)


def of_matrices(params):
    """Dion2 of all matrices and stacks, AdamW of the rest."""
    params = list(params)
    return optim.Combined(DION2([p for p in params if p.ndim > 1], lr=0.02),
                          optim.AdamW([p for p in params if p.ndim < 2], lr=0.01))


sharded_cases.OPTIMIZERS["dion2"] = lambda model: of_matrices(sharded_cases.trained(model))
moe_zero_cases.OPTIMIZERS["dion2"] = of_matrices


def exact_curves(ways):
    """{way: digest of parameters and state}."""
    return {way: eight_bit_cases.bits_of(eight_bit_cases.begin(way, "dion2").run(3)) for way in ways}


def of_given_gradients(ways):
    return adafactor_cases.of_given_gradients(ways, DION2, (2, 3))


def of_parts(sizes, stage):
    return muon_cases.of_parts(sizes, stage, kind=DION2)


def counted(stage):
    return muon_cases.counted(stage, DION2)


def of_experts(ways, steps):
    return moe_zero_cases.curves(ways, steps)


def disagreeing(how):
    return muon_cases.disagreeing(how, DION2)
