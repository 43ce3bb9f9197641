"""What the ranks do in the tests of Dion2 and NorMuon: those of Muon and of Adafactor, of them."""

from functools import partial

from minitorch_dist import optim

from . import adafactor_cases, eight_bit_cases, moe_zero_cases, muon_cases, sharded_cases

SHARE = 0.3
KINDS = {"dion2": partial(optim.Dion2, fraction=SHARE), "normuon": optim.NorMuon}


def of_matrices(name, params):
    """It of all matrices and stacks, AdamW of the rest."""
    params = list(params)
    return optim.Combined(KINDS[name]([p for p in params if p.ndim > 1], lr=0.02),
                          optim.AdamW([p for p in params if p.ndim < 2], lr=0.01))


for kind in KINDS:
    sharded_cases.OPTIMIZERS[kind] = lambda model, kind=kind: of_matrices(kind, sharded_cases.trained(model))
    moe_zero_cases.OPTIMIZERS[kind] = partial(of_matrices, kind)


def exact_curves(name, ways):
    """{way: digest of parameters and state}."""
    return {way: eight_bit_cases.bits_of(eight_bit_cases.begin(way, name).run(3)) for way in ways}


saved, resumed = adafactor_cases.saved, adafactor_cases.resumed


def of_given_gradients(name, ways):
    return adafactor_cases.of_given_gradients(ways, KINDS[name], (2, 3))


def of_parts(name, sizes, stage):
    return muon_cases.of_parts(sizes, stage, kind=KINDS[name])


def counted(name, stage):
    return muon_cases.counted(stage, KINDS[name])


def of_experts(ways, steps):
    return moe_zero_cases.curves(ways, steps)


def disagreeing(name, how):
    return muon_cases.disagreeing(how, KINDS[name])
