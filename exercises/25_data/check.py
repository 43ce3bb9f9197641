"""What the answers of chapter 25 are tried with; the mistakes that are known stand in the modules beside it."""

from exercises.frame import Check

from . import disk, drawing, events, places, shares, shuffles


class Read(Check):
    exercise = "25.1"
    signatures = disk.SIGNATURES
    demands = disk.DEMANDS
    integers = ("result", "files", "firsts")

    def cases(self, rng, ranks):
        return disk.cases(rng)

    def truth(self, case):
        return disk.run(case)

    def picture(self, runs, path):
        return drawing.rows(*runs[1][-1], path)


class Order(Check):
    exercise = "25.2"
    signatures = shuffles.SIGNATURES
    demands = shuffles.DEMANDS

    def cases(self, rng, ranks):
        return shuffles.cases(rng)

    def truth(self, case):
        return shuffles.run(case)

    def picture(self, runs, path):
        return drawing.orders(runs[1][-4:], path)


class Turns(Check):
    exercise = "25.3"
    demands = shares.DEMANDS

    def cases(self, rng, ranks):
        return shares.cases(rng)

    def truth(self, case):
        return {}       # many orders are right: the demands judge

    def picture(self, runs, path):
        return drawing.turns(*runs[1][-1], path)


class Where(Check):
    exercise = "25.4"
    signatures = places.SIGNATURES
    demands = places.DEMANDS
    integers = ("result",)

    def cases(self, rng, ranks):
        return places.cases(rng)

    def truth(self, case):
        return places.run(case)

    def picture(self, runs, path):
        return drawing.run(*runs[1][-1], path)


class Ahead(Check):
    exercise = "25.5"
    demands = events.DEMANDS

    def cases(self, rng, ranks):
        return events.cases(rng)

    def truth(self, case):
        return {}       # what happens in which order: the demands judge

    def picture(self, runs, path):
        return drawing.ahead(*runs[1][-1], path)
