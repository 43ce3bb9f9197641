"""What the answers of chapter 22 are tried with; the mistakes that are known stand in the modules beside it."""

import numpy as np

from exercises.frame import Check, demand

from . import drawing, mispricings, missteps, prices, signs, thins, training, unsummed, workers


def trained(case):
    return case[0]["what"] == "training"


def in_training(predicate):
    """A demand on the case of a training run."""
    return lambda case, got: not trained(case) or predicate(case, got)


def ran(case, got):
    return not any("failed" in rank for rank in got)


FAILED = demand(lambda case, got: "all right by itself, but not in a training run: "
                + next(rank["failed"] for rank in got if "failed" in rank), in_training(ran))


# ---------------------------------------------------------------- 22.1

class OneBit(Check):
    exercise = "22.1"
    same_bits = ("sums",)
    signatures = signs.SIGNATURES
    demands = signs.DEMANDS

    def cases(self, rng, ranks):
        return signs.cases(rng, ranks)

    def truth(self, case):
        return signs.truth(case)

    def picture(self, runs, path):
        case, got = runs[signs.RANKS][-1]
        return drawing.valley(case[0], got[0], path)


# ---------------------------------------------------------------- 22.2

def from_library(case, got):
    """How far the ranks' losses are from the library's, of one process."""
    library = training.of_library(case[0], compress=True)
    return max(np.abs(np.subtract(rank["losses"], library)).max() for rank in got)


class Power(Check):
    exercise = "22.2"
    same_bits = ("sums",)
    signatures = thins.SIGNATURES
    demands = [
        *thins.DEMANDS, FAILED,
        demand(lambda case, got: "all right by itself, but a GPT trained with it leaves the curve of the library's "
               f"PowerSGD, by {from_library(case, got):.1g}",
               in_training(lambda case, got: from_library(case, got) < 1e-9))]

    def cases(self, rng, ranks):
        return [*thins.cases(rng, ranks), *([training.compressed(rng)] * n for n in [ranks] if n == training.RANKS)]

    def truth(self, case):
        return thins.truth(case)

    def picture(self, runs, path):
        case, got = runs[training.RANKS][-1]
        return drawing.compressed(case[0], got[0], training.of_library(case[0], compress=True),
                                  training.of_library(case[0], compress=False), training.full(case), path)


# ---------------------------------------------------------------- 22.3

def from_workers(case, got):
    """How far the ranks' losses are from those of the same workers, one after the other."""
    return max(np.abs(np.subtract(rank["losses"][str(every)], training.of_workers(case[0], len(case), every))).max()
               for every in case[0]["every"] for rank in got)


class DiLoCo(Check):
    exercise = "22.3"
    signatures = workers.SIGNATURES
    demands = [
        *workers.DEMANDS, FAILED,
        demand(lambda case, got: "all right by itself, but a GPT trained with it leaves the curve of workers with the "
               f"library's optimizers, by {from_workers(case, got):.1g}",
               in_training(lambda case, got: from_workers(case, got) < 1e-9))]

    def cases(self, rng, ranks):
        return [*workers.cases(rng, ranks), *([training.apart(rng)] * n for n in [ranks] if n == training.RANKS)]

    def truth(self, case):
        return workers.truth(case)

    def picture(self, runs, path):
        case, got = runs[training.RANKS][-1]
        library = {str(every): training.of_workers(case[0], len(case), every) for every in case[0]["every"]}
        return drawing.apart(case[0], got[0], library, training.of_one(case[0]), training.full(case), path)


# ---------------------------------------------------------------- 22.4

class Worth(Check):
    exercise = "22.4"
    signatures = mispricings.SIGNATURES
    demands = mispricings.DEMANDS

    def cases(self, rng, ranks):
        return prices.cases(rng)

    def truth(self, case):
        return prices.truth(case)

    def picture(self, runs, path):
        return drawing.prices(*runs[1][-1], path)


# ---------------------------------------------------------------- 22.5

def from_dion(case, got):
    """How far the ranks' losses are from the library's, of one process."""
    library = training.of_dion(case[0], compress=False)
    return max(np.abs(np.subtract(rank["losses"], library)).max() for rank in got)


class Dion(Check):
    exercise = "22.5"
    same_bits = ("p", "q")
    signatures = missteps.SIGNATURES
    demands = [
        *missteps.DEMANDS, FAILED,
        demand(lambda case, got: "all right by itself, but a GPT trained with it leaves the curve of the library's "
               f"Dion, by {from_dion(case, got):.1g}",
               in_training(lambda case, got: from_dion(case, got) < 1e-9))]

    def cases(self, rng, ranks):
        return [*unsummed.cases(rng, ranks), *([training.unsummed(rng)] * n for n in [ranks] if n == training.RANKS)]

    def truth(self, case):
        return unsummed.truth(case)

    def picture(self, runs, path):
        case, got = runs[training.RANKS][-1]
        return drawing.without_sums(case[0], got[0], training.of_dion(case[0], compress=False),
                                    training.of_dion(case[0], compress=True),
                                    training.full(case, training.moved(case[0])), path)
