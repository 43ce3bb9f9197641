"""What the answers of chapter 23 are tried with; the mistakes that are known stand in the modules beside it."""

from exercises.frame import Check

from . import batches, drawing, growing, laws, misestimates, misfits, noises, scores


class Multipliers(Check):
    exercise = "23.1"
    tolerance = 1e-7
    signatures = growing.SIGNATURES
    demands = growing.DEMANDS

    def cases(self, rng, ranks):
        return growing.cases(rng)

    def truth(self, case):
        return growing.run(case)

    def picture(self, runs, path):
        return drawing.coordinates(*runs[1][-1], path)


class Noise(Check):
    exercise = "23.2"
    signatures = misestimates.SIGNATURES
    demands = noises.DEMANDS

    def cases(self, rng, ranks):
        return noises.cases(rng, ranks)

    def truth(self, case):
        return noises.run(case)

    def picture(self, runs, path):
        case, got = runs[3][-1]
        return drawing.noise(got[0], noises.closed(case[0]), case[0]["decay"], path)


class Batch(Check):
    exercise = "23.3"
    integers = ("result",)
    signatures = batches.SIGNATURES
    demands = batches.DEMANDS

    def cases(self, rng, ranks):
        return batches.cases(rng)

    def truth(self, case):
        return batches.truth(case)

    def picture(self, runs, path):
        return drawing.frontier(*runs[1][-1], batches.measured(), path)


class Fit(Check):
    exercise = "23.4"
    signatures = misfits.SIGNATURES
    demands = misfits.DEMANDS

    def cases(self, rng, ranks):
        return laws.cases(rng)

    def truth(self, case):
        return laws.truth(case)

    def picture(self, runs, path):
        return drawing.scaling(*next((case, got) for case, got in runs[1] if case.get("noise")), path)


class Scores(Check):
    exercise = "23.5"
    tolerance = 1e-6
    signatures = scores.SIGNATURES
    demands = scores.DEMANDS

    def cases(self, rng, ranks):
        return scores.cases(rng, ranks)

    def truth(self, case):
        return scores.run(case)

    def picture(self, runs, path):
        return drawing.clipped([(whole[0], got[0]) for whole, got in runs[1][:2]], scores.greatest, path)
