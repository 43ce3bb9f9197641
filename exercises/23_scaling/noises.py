"""23.2 as an analysis of variance."""

import math

import numpy as np

from exercises.frame import demand

SIZE = 9
KNOWN = {"mean": 0.1, "deviations": (0.3, 0.6), "size": 60, "shards": (4, 1, 6, 2, 5, 3), "steps": 220,
         "decay": 0.99}      # B_simple is 21 there, as N is


# ---------------------------------------------------------------- cases

def step(rng, counts, away=0.4, dtype=float, size=SIZE):
    """[(gradient, samples)] of one step's shards, around one mean."""
    mean = away * rng.standard_normal(size)
    return [((mean + rng.standard_normal(size) / math.sqrt(n) if n else np.zeros(size)).astype(dtype), n)
            for n in counts]


def opposite(rng):
    """Two shards whose gradients cancel each other: |G|² is estimated below 0."""
    gradient = rng.standard_normal(SIZE)
    return [(gradient, 5), (-gradient, 5)]


def orthogonal():
    """Two whose |G|² is estimated as 0: exactly, also by who squares norms, which are 6, 8 and 5."""
    return [(size * np.eye(SIZE)[i], 1) for i, size in enumerate((6.0, 8.0))]


def flat(rng, count):
    """Some, one of which has samples and a gradient of 0."""
    return [*step(rng, rng.integers(1, 12, count).tolist()), (np.zeros(SIZE), 6)]


def owned(rng, count, ranks, idle=False):
    """Whose shard each is, one after the other. idle: one of several ranks has none."""
    cuts = np.sort(rng.integers(0, count + 1, ranks - 1)) if not idle else np.zeros(ranks - 1, int) + min(2, count)
    return np.searchsorted(cuts, np.arange(count), side="right").tolist()


def jobs(rng):
    """[(decay, [shards of a step])], of all ranks."""
    def counts(k):
        return rng.integers(1, 12, k).tolist()
    uneven = [step(rng, counts(6)), step(rng, [4, 0, 9, 2, 0, 3, 0]), step(rng, [0, 7, 0, 0]), step(rng, counts(5)),
              step(rng, counts(4))]
    return [(0.9, uneven),
            (0.5, [opposite(rng), step(rng, counts(3)), step(rng, [6, 1]), step(rng, counts(5), 2.0)]),
            (0.8, [step(rng, counts(4), 30.0, np.float32, 60), step(rng, counts(5), 3.0, np.float32, 60)]),
            (0.7, [orthogonal(), step(rng, [5] * 6), step(rng, [3] * 6)]),
            (0.6, [flat(rng, 4), flat(rng, 2)])]


def cases(rng, ranks):
    drawn = jobs(rng)
    seed = int(rng.integers(1 << 31))
    found = []
    for decay, steps in drawn:
        each = [{"decay": decay, "steps": []} for _ in range(ranks)]
        for number, shards in enumerate(steps):
            owners = owned(rng, len(shards), ranks, idle=number % 2 == 0)
            samples = sum(n for _, n in shards)
            whole = sum(n * g.astype(float) for g, n in shards) / samples
            for rank, mine in enumerate(each):
                own = [shard for shard, owner in zip(shards, owners, strict=True) if owner == rank]
                mine["steps"].append({"gradients": [g for g, _ in own], "samples": [n for _, n in own],
                                      "whole": whole})
        found.append(each)
    known = {"what": "known", "seed": seed} | {name: list(value) if isinstance(value, tuple) else value
                                               for name, value in KNOWN.items()}
    by_turns = [[{"what": "steps", "jobs": [of[rank] for of in some]} for rank in range(ranks)]
                for some in (found[:1], found[2:], found[:2])]
    return [*by_turns, [known] * ranks]


# ---------------------------------------------------------------- another way to the same

def shards_of(case, job, number):
    """[(rank, gradient, samples)] of a step, in float64."""
    return [(rank, g.astype(float), n) for rank, mine in enumerate(case)
            for g, n in zip(mine["jobs"][job]["steps"][number]["gradients"],
                            mine["jobs"][job]["steps"][number]["samples"], strict=True)]


def square(x):
    return float(np.sum(np.square(x)))


class Step:
    """One step's shards: m, n (arrays), rank of each; those without samples are left out, and counted in `empty`."""

    def __init__(self, shards, ranks, rank):
        self.all, self.ranks, self.rank = shards, ranks, rank
        some = [shard for shard in shards if shard[2]]
        self.owner = [owner for owner, _, _ in some]
        self.m, self.n = [m for _, m, _ in some], np.array([n for _, _, n in some], float)
        self.k, self.N, self.empty = len(some), self.n.sum(), len(shards) - len(some)
        self.whole = sum(n * m for m, n in zip(self.m, self.n, strict=True)) / self.N if self.N else None
        self.sizes = np.array([square(m) for m in self.m])

    def only(self, keep):
        return Step([shard for shard in self.all if keep(shard[0])], self.ranks, self.rank)


def variance(step):
    """tr(Σ): the shards' variance around their mean, by samples."""
    return sum(n * square(m - step.whole) for m, n in zip(step.m, step.n, strict=True)) / (step.k - 1)


def estimate(step, trace=variance, less=lambda step, trace: trace / step.N):
    """(tr(Σ), |G|²), or None."""
    if step.k < 2:
        return None
    found = trace(step)
    return float(found), float(square(step.whole) - less(step, found))


def of_averages(trace, square):
    return math.nan if trace == square == 0 else trace / square if square > 0 else math.inf


class Averages:
    """tr(Σ) and |G|² over steps."""

    def __init__(self, decay):
        self.decay, self.trace, self.square = decay, 0.0, 0.0

    def take(self, trace, square):
        self.trace, self.square = self.mixed(self.trace, trace), self.mixed(self.square, square)

    def mixed(self, old, new):
        return self.decay * old + (1 - self.decay) * new

    def scale(self):
        return of_averages(self.trace, self.square)


def run(case, find=estimate, averages=Averages):
    """The outputs of all ranks; find(Step) gives what a rank makes of a step."""
    if case[0]["what"] == "known":
        return [{} for _ in case]
    found = []
    for rank in range(len(case)):
        outputs = {"estimates": [], "scales": [], "changed": False}
        for job, mine in enumerate(case[rank]["jobs"]):
            kept, estimates, scales = averages(mine["decay"]), [], []
            scales.append(float(kept.scale()))
            for number in range(len(mine["steps"])):
                one = find(Step(shards_of(case, job, number), len(case), rank))
                if one is not None:
                    kept.take(*one)
                estimates.append(None if one is None else np.array(one, float))
                scales.append(float(kept.scale()))
            outputs["estimates"].append(estimates)
            outputs["scales"].append(scales)
        found.append(outputs)
    return found


def closed(case):
    """tr(Σ)/|G|² of what the drive draws."""
    low, high = case["deviations"]
    return float(np.sum(np.square(np.linspace(low, high, case["size"]))) / (case["size"] * case["mean"] ** 2))


def known(predicate):
    return lambda case, got: case[0]["what"] != "known" or predicate(case, got)


def updates(case):
    return sum(len(job["steps"]) for job in case[0]["jobs"])


def most_calls(got):
    return max(len(rank.calls) for rank in got)


def handed(got):
    return max(sum(call["bytes"] for call in rank.calls) for rank in got) // 8


def unknown(predicate):
    return lambda case, got: case[0]["what"] == "known" or predicate(case, got)


DEMANDS = [
    demand(lambda case, got: f"the right numbers, but with {most_calls(got)} all-reduces in {updates(case)} steps: one "
           "for all three sums", unknown(lambda case, got: most_calls(got) <= updates(case))),
    demand(lambda case, got: f"the right numbers, but {handed(got)} of them were handed to all-reduces in "
           f"{updates(case)} steps: three in each", unknown(lambda case, got: handed(got) <= 3 * updates(case))),
    demand(lambda case, got: "each step's estimates are right, but after many steps B_simple is "
           f"{got[0]['scales'][-1]:.1f}, where it is {closed(case[0]):.1f} by the distribution they are drawn from",
           known(lambda case, got: all(abs(rank["scales"][-1] / closed(case[0]) - 1) < 0.15 for rank in got))),
]
