"""What the answers of chapter 20 are tried with; the mistakes that are known stand in the modules beside it."""

import numpy as np

from exercises.frame import Check, demand

from . import balances, drawing, misroutings, parallels, routing, training, travels

# ---------------------------------------------------------------- 20.1


class Router(Check):
    exercise = "20.1"
    signatures = misroutings.SIGNATURES
    demands = misroutings.DEMANDS

    def cases(self, rng, ranks):
        return routing.cases(rng)

    def truth(self, case):
        return routing.truth(case)


# ---------------------------------------------------------------- 20.2

class Balance(Check):
    exercise = "20.2"
    signatures = balances.SIGNATURES

    def cases(self, rng, ranks):
        return [*balances.cases(rng), balances.experiment(rng)]

    def truth(self, case):
        return {} if case["what"] == "experiment" else balances.truth(case)

    def picture(self, runs, path):
        return drawing.shares(*runs[1][-1], path)


# ---------------------------------------------------------------- 20.3

def trained(case):
    return case[0]["what"] == "training"


def apart(case, got):
    """How far the ranks' losses are from the library's, of one process."""
    return max(np.abs(np.subtract(rank["losses"], training.of_library(case[0]))).max() for rank in got)


class Parallel(Check):
    exercise = "20.3"
    signatures = travels.SIGNATURES
    demands = [
        *travels.DEMANDS,
        demand(lambda case, got: f"all right by itself, but not in a training run: {got[0]['failed']}",
               lambda case, got: not trained(case) or not any("failed" in rank for rank in got)),
        demand(lambda case, got: "all right by itself, but a GPT trained with it leaves the library's curve, by "
                                 f"{apart(case, got):.1g}",
               lambda case, got: not trained(case) or apart(case, got) < 1e-9)]

    def cases(self, rng, ranks):
        found = parallels.cases(rng, ranks)
        if ranks == training.RANKS:
            found.append([training.draw(rng)] * ranks)
        return found

    def truth(self, case):
        return parallels.truth(case)

    def picture(self, runs, path):
        case, got = runs[training.RANKS][-1]
        return drawing.curves(case, got[0]["losses"], training.of_library(case[0]), path)
