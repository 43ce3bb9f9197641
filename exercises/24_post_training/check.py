"""What the answers of chapter 24 are tried with; the mistakes that are known stand in the modules beside it."""

from exercises.frame import Check

from . import caches, drawing, gains, packs, rolls, sums, training


class Pack(Check):
    exercise = "24.1"
    signatures = packs.SIGNATURES
    demands = packs.DEMANDS

    def cases(self, rng, ranks):
        return packs.cases(rng)

    def truth(self, case):
        return packs.run(case)

    def picture(self, runs, path):
        return drawing.packed(*runs[1][-1], path)


class Generate(Check):
    exercise = "24.2"
    signatures = caches.SIGNATURES
    demands = caches.DEMANDS

    def cases(self, rng, ranks):
        return caches.cases(rng)

    def truth(self, case):
        return caches.truth(case)

    def picture(self, runs, path):
        return drawing.written(runs[1], path)


class TokenLosses(Check):
    exercise = "24.3"
    signatures = gains.SIGNATURES
    demands = gains.DEMANDS

    def cases(self, rng, ranks):
        return gains.cases(rng)

    def truth(self, case):
        return gains.truth(case)

    def picture(self, runs, path):
        return drawing.gains(*runs[1][-1], path)


class Grpo(Check):
    exercise = "24.4"
    same_bits = ("loss",)
    signatures = sums.SIGNATURES
    demands = sums.DEMANDS

    def cases(self, rng, ranks):
        return sums.cases(rng, ranks)

    def truth(self, case):
        return sums.truth(case)


class RollOut(Check):
    exercise = "24.5"
    same_bits = ("mean",)
    signatures = rolls.SIGNATURES
    demands = [*rolls.DEMANDS, *training.DEMANDS]

    def cases(self, rng, ranks):
        return [*rolls.cases(rng, ranks), *([training.case(rng, ranks)] if ranks in training.RANKS else [])]

    def truth(self, case):
        return rolls.truth(case)

    def picture(self, runs, path):
        return training.picture(runs, path)
