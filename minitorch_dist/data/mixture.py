"""Several sources of samples in fixed shares, which may change in the course of the training.

    mixture = Mixture({"web": web, "code": code, "books": books},
                      [(900_000, {"web": 8, "code": 3, "books": 1}),            # samples, and of 12 so many each
                       (100_000, {"web": 1, "code": 1, "books": 2})], seed=0)   # at last the best ("annealing")
    loader = Loader(mixture, None, batch_size=512, shuffle=False, rank=…, size=…)
    print(mixture)                              # from what, how many samples, and how often each is gone through

Which source a sample is of is no draw: sources take turns in a pattern that repeats, here of 12 samples, in which each
is spread as evenly as can be. So in every batch, and in every rank's part of it, the shares are right but for a sample
or two, and loss curves don't show which source the dice have preferred.

    web 8, code 3, books 1      w w c w w c w w c w w b

Within a source the samples come in a random order, a new one each time that it has been gone through; that goes on from
phase to phase. All of it is computed from a sample's number alone: nothing is kept, a run can be taken up at any step,
and the number of ranks has no say.

Sources: Tijdeman 1980, "The chairman assignment problem" (that there is such a pattern); Baruah et al. 1996,
"Proportionate progress" (who takes the next turn: the same problem, of processors); Dubey et al. 2024, "The Llama 3
herd of models", 3.1 (mixes of sources, annealing on the best).
"""

from functools import cached_property
from math import gcd

import numpy as np

from ..backend import whole
from ..tables import aligned
from .permutation import Permutation

MOST_TURNS = 100_000


def turns(weights):
    """The order in which sources take turns, as a list of their numbers in which each stands as often as its weight, a
    whole number, says. For all k: of the first k are of each k · weight / sum, but for less than 1."""
    total, had, order = sum(weights), [0] * len(weights), []
    for k in range(1, total + 1):
        # Of those whom a turn wouldn't put a whole sample ahead the one that would be a whole sample behind first.
        ready = [i for i, weight in enumerate(weights) if had[i] * total < k * weight]
        i = min(ready, key=lambda i: -(-(had[i] + 1) * total // weights[i]))
        had[i] += 1
        order.append(i)
    return order


class Phase:
    """A stretch of a Mixture with the same shares: the pattern, and how often each source has been asked before."""

    def __init__(self, samples, weights, before):
        self.samples, self.before = samples, np.array(before)
        self.pattern = np.array(turns(weights))
        # What number a sample of the pattern is among those of its source, in the pattern.
        self.of_pattern = np.array(weights)
        self.number = np.empty(len(self.pattern), np.int64)
        for i, weight in enumerate(weights):
            self.number[self.pattern == i] = np.arange(weight)

    def where(self, samples):
        """(the sources of these samples of the phase, what number each is among all of its source)."""
        repeats, places = np.divmod(samples, len(self.pattern))
        sources = self.pattern[places]
        return sources, self.before[sources] + repeats * self.of_pattern[sources] + self.number[places]

    def after(self):
        """How often each source has been asked when it is over."""
        repeats, rest = divmod(self.samples, len(self.pattern))
        return self.before + repeats * self.of_pattern + np.bincount(self.pattern[:rest], minlength=len(self.before))


class Mixture:
    """Samples of several sources, in shares: a data set for a Loader, which has an order of its own: shuffle=False.

    sources   {name: a data set}, which has a length and read(indices) -> (inputs, labels); all samples have one form
    phases    [(how many samples, {name: weight})], one after another; weights are whole numbers, and who isn't named
              has none
    seed      of the order within each source, and its name is of it, too: one more source changes no other's
    ValueError for names, weights or sources that don't fit together.
    """

    def __init__(self, sources, phases, seed=0):
        self.sources, self.seed, self.phases = dict(sources), whole("seed", seed), []
        before = [0] * len(self.sources)
        for samples, weights in phases:
            self.phases.append(Phase(_samples(samples), _weights(self.sources, weights), before))
            before = self.phases[-1].after()
        self.bounds = np.cumsum([0, *(phase.samples for phase in self.phases)])
        if not self.phases:
            raise ValueError("Mixture: no phases; one is (samples, {name: weight})")
        for name, source in self.sources.items():
            if not len(source):
                raise ValueError(f"Mixture: {name} has no samples")

    def __len__(self):
        """Samples of all phases."""
        return int(self.bounds[-1])

    def where(self, indices):
        """(sources, rows), int64 of the indices' shape: of which source each sample is, by number, and which row of
        it."""
        indices = np.asarray(indices)
        indices = indices if indices.size else indices.astype(np.int64)     # of an empty list it is floats
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"Mixture: there are samples 0 to {len(self) - 1}, got {indices}")
        sources, rows = (np.empty(indices.shape, np.int64) for _ in range(2))
        for phase, lo, hi in zip(self.phases, self.bounds, self.bounds[1:], strict=False):
            here = (lo <= indices) & (indices < hi)
            sources[here], rows[here] = phase.where(indices[here] - lo)
        for i, (name, source) in enumerate(self.sources.items()):
            here = sources == i
            rows[here] = self._shuffled(name, len(source), rows[here])
        return sources, rows

    def _shuffled(self, name, n, numbers):
        """Which rows of a source are asked for at the first, second … time."""
        epochs, places = np.divmod(numbers, n)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = Permutation(n, "mixture", self.seed, name, epoch)(places[here])
        return places

    def read(self, indices):
        """(inputs, labels) of these samples, as their sources give them. ValueError where sources differ in form, those
        too that aren't asked here."""
        numbers, rows = self.where(indices)
        both = [np.empty((len(rows), *shape), dtype) for dtype, shape in self._form]
        for i in np.unique(numbers):
            here, name = numbers == i, list(self.sources)[i]
            found = self.sources[name].read(rows[here])
            _check_form(name, found, self._form)
            for into, part in zip(both, found, strict=True):
                into[here] = part
        return tuple(both)

    @cached_property
    def _form(self):
        """[(dtype, shape)] of a sample's input, and of its label: what all sources say that they are like."""
        found = {name: source.read(np.zeros(0, np.int64)) for name, source in self.sources.items()}
        form = [(part.dtype, part.shape[1:]) for part in next(iter(found.values()))]
        for name, parts in found.items():
            _check_form(name, parts, form)
        return form

    def __str__(self):
        rows = [["source", "rows", *(f"phase {i + 1}" for i in range(len(self.phases))), "samples", "times through"]]
        ends = self.phases[-1].after()
        for i, (name, source) in enumerate(self.sources.items()):
            shares = [f"{100 * phase.of_pattern[i] / len(phase.pattern):.1f} %" for phase in self.phases]
            rows.append([name, f"{len(source):,}", *shares, f"{ends[i]:,}", f"{ends[i] / len(source):.2f}"])
        rows.append(["", "", *(f"{phase.samples:,}" for phase in self.phases), f"{len(self):,}", ""])
        return "\n".join(aligned(rows))


def _samples(value):
    if whole("samples of a phase", value) < 1:
        raise ValueError(f"Mixture: a phase of {value} samples; it has 1 or more")
    return whole("samples of a phase", value)


def _weights(sources, weights):
    """The weights in the order of the sources, in lowest terms."""
    if unknown := [name for name in weights if name not in sources]:
        raise ValueError(f"Mixture: a weight for {unknown[0]!r}; the sources are {', '.join(map(repr, sources))}")
    found = [whole(f"weight of {name!r}", weights.get(name, 0)) for name in sources]
    if min(found, default=0) < 0 or not sum(found):
        raise ValueError(f"Mixture: weights {dict(zip(sources, found, strict=True))}; they are whole numbers, 0 or "
                         "more, and one is above 0")
    found = [weight // gcd(*found) for weight in found]
    if sum(found) > MOST_TURNS:
        raise ValueError(f"Mixture: weights {found} sum up to {sum(found):,}, and that many turns are listed before "
                         f"they repeat: {MOST_TURNS:,} at most. Round them")
    return found


def _check_form(name, parts, form):
    """ValueError where a source gives samples of another form than the first one's."""
    for part, (dtype, shape) in zip(parts, form, strict=True):
        if (part.dtype, part.shape[1:]) != (dtype, shape):
            raise ValueError(f"Mixture: samples of {name} are {part.dtype} {part.shape[1:]}, others are {dtype} "
                             f"{shape}: sources must have one form")
