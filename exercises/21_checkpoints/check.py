"""What the answers of chapter 21 are tried with; the mistakes that are known stand in the modules beside it."""

from exercises.frame import Check

from . import crashes, drawing, intervals, losses, runs, training, writers

# ---------------------------------------------------------------- 21.1


class Disk(Check):
    exercise = "21.1"
    demands = crashes.DEMANDS

    def cases(self, rng, ranks):
        return crashes.cases(rng)

    def truth(self, case):
        return {}       # many layouts are right

    def picture(self, runs, path):
        return drawing.crash_points(runs[1][-1], path)


# ---------------------------------------------------------------- 21.2

class State(Check):
    exercise = "21.2"
    signatures = runs.SIGNATURES
    demands = runs.DEMANDS

    def cases(self, rng, ranks):
        return runs.cases(rng)

    def truth(self, case):
        return runs.truth(case)

    def picture(self, made, path):
        return drawing.resumed(*made[1][-1], path)


# ---------------------------------------------------------------- 21.3

class Pieces(Check):
    exercise = "21.3"
    integers = ("cuts",)
    signatures = intervals.SIGNATURES
    demands = intervals.DEMANDS

    def cases(self, rng, ranks):
        return intervals.cases(rng, ranks)

    def truth(self, case):
        return intervals.truth(case)

    def picture(self, made, path):
        case, got = made[training.RANKS][-1]
        return drawing.curves(case[0], got[0]["losses"], training.of_library(case[0]), path)


# ---------------------------------------------------------------- 21.4

class Beside(Check):
    exercise = "21.4"
    demands = writers.DEMANDS
    may_change = ("state",)

    def cases(self, rng, ranks):
        return writers.cases(rng)

    def truth(self, case):
        return {}


# ---------------------------------------------------------------- 21.5

class Interval(Check):
    exercise = "21.5"
    signatures = losses.SIGNATURES

    def cases(self, rng, ranks):
        return [losses.formula(rng), *losses.cases(rng), *losses.experiments(rng)]

    def truth(self, case):
        return losses.truth(case)

    def picture(self, made, path):
        return drawing.intervals(made[1], path)
