"""19.6: its cases, whole sequences, and slices with the mistakes that are known: functions that stand in for one
another. And what a pipeline does with slices, in which order and when.
"""

import numpy as np

from . import softmaxes
from .softmaxes import INF

NAMES = ("out", "dq", "dk", "dv")
RANKS, BATCHES, SLICES = 4, 4, 4        # of the pipeline that is drawn
EQUAL = "equal slices"      # of one micro-batch: who fails with other cases isn't stopped (drive.py)
HEADS, SIZE, LENGTH, LONG = 4, 4, 32, 16        # of what memory is measured with; LONG: slices of a long sequence


# ---------------------------------------------------------------- a pipeline, in order and in time

def row(rank, slices, ranks=RANKS, batches=BATCHES):
    """[["F" or "B", micro-batch, slice]], what a rank does, by 1F1B: backwards of a micro-batch from its last slice on.
    """
    numbers = range(batches)
    forward = [["F", k, j] for k in numbers for j in range(slices)]
    backward = [["B", k, j] for k in numbers for j in reversed(range(slices))]
    ahead = min(len(forward), ranks - rank + slices - 2)
    pairs = zip(forward[ahead:], backward, strict=False)
    return forward[:ahead] + [step for pair in pairs for step in pair] + backward[len(forward) - ahead:]


def play(slices, ranks=RANKS, batches=BATCHES):
    """[[(begin, end, kind, micro-batch, slice)] of each rank], in forwards of a sequence; backwards take two."""
    rows = [row(rank, slices, ranks, batches) for rank in range(ranks)]
    ends, spans = {}, [[] for _ in rows]
    while any(len(done) < len(steps) for done, steps in zip(spans, rows, strict=True)):
        for rank, (done, steps) in enumerate(zip(spans, rows, strict=True)):
            for kind, k, j in steps[len(done):]:
                sender = rank + (-1 if kind == "F" else 1)
                comes = ends.get((kind, sender, k, j)) if 0 <= sender < ranks else 0
                if comes is None:
                    break
                begin = max(comes, done[-1][1] if done else 0)
                ends[kind, rank, k, j] = begin + (1 if kind == "F" else 2) / slices
                done.append((begin, ends[kind, rank, k, j], kind, k, j))
    return spans


# ---------------------------------------------------------------- the truth: of whole sequences, row by row

def truth(case):
    """Of memory nothing: it is measured."""
    if case["what"] == "memory":
        return {}
    found = {name: [] for name in NAMES}
    for batch in case["batches"]:
        q, k, v, dout = (np.concatenate([one[name] for one in batch["slices"]], 1) for name in ("q", "k", "v", "dout"))
        at, ends = np.arange(q.shape[1]), np.cumsum(lengths(batch))[:-1]
        whole = softmaxes.exact(q, k, v, at, at)[0], *softmaxes.exact_gradients(q, k, v, at, at, dout)
        for name, array in zip(NAMES, whole, strict=True):
            comes = name == "out" or any(step[0] == "B" for step in case["steps"])
            found[name].append(np.split(array, ends, 1) if comes else [None] * len(batch["slices"]))
    return found | {"failed": False}


def lengths(batch):
    return [one["q"].shape[1] for one in batch["slices"]]


# ---------------------------------------------------------------- rightly, and with mistakes: one slice

def up_to_own(first, own, seen, number, lengths):
    """bool [own, seen]: which of the keys that are there each query of a slice sees.

    first, own, seen  how many keys stand before the slice, are its own, and are there
    number, lengths   which slice it is; how long the slices so far are
    """
    return np.arange(seen) <= first + np.arange(own)[:, None]


def all_that_are_there(first, own, seen, number, lengths):
    return np.ones((own, seen), bool)


def later_than_own(first, own, seen, number, lengths):
    return np.arange(seen) >= first + np.arange(own)[:, None]


def by_place_in_slice(first, own, seen, number, lengths):
    """The queries' positions in their slice, the keys' in the sequence."""
    return np.arange(seen) <= np.arange(own)[:, None]


def by_places_in_slices(first, own, seen, number, lengths):
    """A triangle in each slice."""
    at = np.concatenate([np.arange(length) for length in lengths])
    return at[:seen] <= np.arange(own)[:, None]


def moved(by):
    """The queries stand at other positions: by(number, own, lengths)."""
    return lambda first, own, seen, number, lengths: (
        np.arange(seen) <= by(first, own, number, lengths) + np.arange(own)[:, None])


def root_of_features(q, k, v):
    return q.shape[2] ** -0.5


def softmax(scores, mask, first, hidden=-INF):
    return raised(np.where(mask, scores, hidden))


def raised(scores, top=lambda s: s.max(2, keepdims=True), axis=2):
    p = np.exp(scores - top(scores))
    return p / p.sum(axis, keepdims=True)


def hidden_afterwards(scores, mask, first):
    """What isn't seen is left out when the weights have been divided by their sum."""
    return raised(scores) * mask


def hidden_too_late(scores, mask, first):
    """Behind the search for the greatest score."""
    p = np.exp(np.where(mask, scores - scores.max(2, keepdims=True), -INF))
    return p / p.sum(2, keepdims=True)


def in_two(scores, mask, first):
    """A softmax over earlier slices, and another over the own one."""
    if not first:
        return softmax(scores, mask, first)
    return np.concatenate([softmax(scores[:, :, :first], mask[:, :first], first),
                           softmax(scores[:, :, first:], mask[:, first:], first)], 2)


def halved(scores, mask, first):
    return in_two(scores, mask, first) * (0.5 if first else 1)


def own_sum(p, by_p, first, out, dout):
    """Σ p p̄ of each query, of its own slice's keys."""
    return (p * by_p)[:, :, first:].sum(2, keepdims=True)


def sum_of_all(p, by_p, first, out, dout):
    return (p * by_p).sum(2, keepdims=True)


def mean_of_all(p, by_p, first, out, dout):
    return (p * by_p).mean(2, keepdims=True)


# ---------------------------------------------------------------- what is said of a slice's keys, or values

def summed(arrays):
    """The sum; of arrays that aren't as long as that of the last slice's queries the rest is 0."""
    found = np.zeros((len(arrays[0]), max(x.shape[1] for x in arrays), arrays[0].shape[2]))
    for x in arrays:
        found[:, :x.shape[1]] += x
    return found


def of_those(which, at=lambda first, own, number, lengths, seen: (first, first + own)):
    """A gather (Layer): of what those say that `which` picks, and from `at` to `at`."""
    def gather(spoken, first, own, number, lengths):
        found = summed(which(spoken))
        return found[:, slice(*at(first, own, number, lengths, found.shape[1]))]
    return gather


def everybody(spoken):
    return spoken


def at_its_end(spoken, first, own, number, lengths):
    """Sums whose parts end together, not begin together."""
    longest = max(x.shape[1] for x in spoken)
    padded = [np.concatenate([np.zeros((len(x), longest - x.shape[1], x.shape[2])), x], 1) for x in spoken]
    return sum(padded)[:, first:first + own]


def mean(spoken, first, own, number, lengths):
    return of_those(everybody)(spoken, first, own, number, lengths) / len(spoken)


of_everybody = of_those(everybody)


# ---------------------------------------------------------------- slice after slice

class Layer:
    """What is asked for; the keywords are the mistakes.

    number    micro-batch -> under which its place is; sums: that -> under which is what slices have said
    back      (micro-batch, [those that came]) -> that of which backward looks at the place
    alone     who comes drives the others out
    looks_at  number of a slice -> [those whose keys it sees]; joined, values_joined: they, as keys and values are put
              together
    mask, scale, weights  as above; again: None, or (mask, weights) of those that are made again in backward
    D, powers, signs      as above; powers of features, and signs, of dq, dk and dv
    to_dq     (what comes by the scores, first) -> what of it goes into dq; dk, dv: (s, p, q, dout) -> what is said
    taken     which slice has its backward: -1, the last
    gather    ([what slices say of all keys up to their own], first, own, number, lengths) -> dk; of dv: gather_dv
    keys_stay, said_stays  whether they do when all backwards are over; shorter: what is said, too, ends where the slice
              begins whose backward is over
    end       (dq, dk, dv) -> what is returned
    """

    def __init__(self, number=lambda k: k, sums=lambda place: place, back=lambda k, came: k, alone=False,
                 looks_at=lambda j: range(j + 1), joined=list, values_joined=list, mask=up_to_own,
                 scale=root_of_features, weights=softmax, again=None, D=sum_of_all, powers=(-0.5, -0.5, 0.0),
                 signs=(1, 1, 1), to_dq=lambda s, first: s, dk=lambda s, p, q, dout: s.swapaxes(1, 2) @ q,
                 dv=lambda s, p, q, dout: p.swapaxes(1, 2) @ dout, taken=-1, gather=of_everybody, gather_dv=None,
                 keys_stay=False, said_stays=False, shorter=False, end=lambda *gradients: gradients):
        self.__dict__.update({name: value for name, value in locals().items() if name != "self"})
        self.places, self.came, self.said = {}, [], {}

    def forward(self, micro_batch, q, k, v):
        place = self.number(micro_batch)
        if self.alone and place not in self.places:
            self.places.clear()
        here = self.places.setdefault(place, {"k": [], "v": [], "slices": []})
        number = len(here["k"])
        here["k"].append(k)
        here["v"].append(v)
        self.came.append(micro_batch)
        which = list(self.looks_at(number))
        keys, values = (np.concatenate([here[name][j] for j in put(which)], 1)
                        for name, put in (("k", self.joined), ("v", self.values_joined)))
        first, lengths = keys.shape[1] - k.shape[1], [x.shape[1] for x in here["k"]]
        scores = q @ keys.swapaxes(1, 2) * self.scale(q, keys, v)
        made = [weights(scores, mask(first, k.shape[1], keys.shape[1], number, lengths), first)
                for mask, weights in [(self.mask, self.weights), *[self.again] * (self.again is not None)]]
        here["slices"].append((q, made[-1], keys, values, first, number, which))
        return made[0] @ values

    def backward(self, micro_batch, dout):
        place = self.number(self.back(micro_batch, self.came))
        here = self.places[place]
        q, p, keys, values, first, number, which = here["slices"].pop(self.taken)
        lengths = [x.shape[1] for x in here["k"]]
        ends = np.cumsum(lengths)
        at = np.concatenate([np.arange(ends[j] - lengths[j], ends[j]) for j in which])
        by_p = dout @ values.swapaxes(1, 2)
        s = p * (by_p - self.D(p, by_p, first, p @ values, dout))
        said = self.said.setdefault(self.sums(place), ([], []))
        found = [self.to_dq(s, first) @ keys]
        for spoken, mine, gather in zip(said, (self.dk(s, p, q, dout), self.dv(s, p, q, dout)),
                                        (self.gather, self.gather_dv or self.gather), strict=True):
            spoken.append(np.zeros((len(mine), ends[number], mine.shape[2])))
            spoken[-1][:, at] = mine
            found.append(gather(spoken, ends[number] - lengths[number], lengths[number], number, lengths))
            if self.shorter:
                spoken[:] = [x[:, :ends[number] - lengths[number]] for x in spoken]
        if not self.keys_stay and self.taken:
            here["k"].pop()
            here["v"].pop()
        if not here["slices"]:
            if not self.keys_stay:
                del self.places[place]
            if not self.said_stays:
                del self.said[self.sums(place)]
        return self.end(*[x * sign * q.shape[2] ** power
                          for x, sign, power in zip(found, self.signs, self.powers, strict=True)])


def run(case, shared=False, **how):
    """The outputs of a case, with mistakes. shared: all layers are one."""
    if case["what"] == "memory":
        return {}
    layers = [Layer(**how) for _ in range(2)]
    layers = layers[:1] * 2 if shared else layers
    found = {name: [[None] * len(batch["slices"]) for batch in case["batches"]] for name in NAMES}
    try:
        with np.errstate(all="ignore"):
            for kind, which, j in case["steps"]:
                batch = case["batches"][which]
                layer, number, one = layers[batch["layer"]], batch["number"], batch["slices"][j]
                if kind == "F":
                    found["out"][which][j] = layer.forward(number, one["q"], one["k"], one["v"])
                else:
                    for name, x in zip(NAMES[1:], layer.backward(number, one["dout"]), strict=True):
                        found[name][which][j] = x
    except (ValueError, IndexError, KeyError):      # as an answer's would, in NumPy or where nothing is kept
        return found | {"failed": True}
    return found | {"failed": False}


# ---------------------------------------------------------------- cases

def draw(rng, sizes, number=0, layer=0, heads=2, features=3, width=4):
    """A micro-batch in slices of these sizes."""
    return {"number": number, "layer": layer, "slices": [
        {"q": rng.standard_normal((heads, size, features)), "k": rng.standard_normal((heads, size, features)) + 0.3,
         "v": rng.standard_normal((heads, size, width)) + 1, "dout": rng.standard_normal((heads, size, width))}
        for size in sizes]}


def there(slices):
    """The steps of a micro-batch's forwards; and_back: those, and its backwards."""
    return [["F", 0, j] for j in range(slices)]


def and_back(slices):
    return there(slices) + [["B", 0, j] for j in reversed(range(slices))]


def alone(what, batch, steps=and_back):
    """A case of one micro-batch."""
    return {"what": what, "batches": [batch], "steps": steps(len(batch["slices"]))}


def pipelined(batches, rank=0, ranks=3):
    """A case of micro-batches of as many slices, in the order of 1F1B."""
    order = row(rank, len(batches[0]["slices"]), ranks, len(batches))
    return {"what": "micro-batches in 1F1B", "batches": batches, "steps": order}


def together(what, *cases):
    """(a case of all their micro-batches, [the steps of each])."""
    before = np.cumsum([0, *[len(case["batches"]) for case in cases]]).tolist()
    steps = [[[kind, which + n, j] for kind, which, j in case["steps"]]
             for n, case in zip(before, cases, strict=False)]
    return {"what": what, "batches": [batch for case in cases for batch in case["batches"]]}, steps


def by_turns(*cases):
    """Cases whose steps alternate: of layers that are on one rank, and know nothing of each other."""
    found, steps = together("two layers", *cases)
    return found | {"steps": [step for of_all in zip(*steps, strict=True) for step in of_all]}


def one_behind_the_other(*cases):
    """Cases of one layer."""
    found, steps = together("two batches", *cases)
    return found | {"steps": sum(steps, [])}


def woven(batches):
    """A case of micro-batches that take turns, in forward, and the other way round in backward."""
    numbers, slices = range(len(batches)), range(len(batches[0]["slices"]))
    steps = [["F", k, j] for j in slices for k in numbers]
    return {"what": "micro-batches by turns", "batches": batches,
            "steps": steps + [["B", k, j] for j in reversed(slices) for k in reversed(numbers)]}


def lifted(rng, by, sizes, **how):
    """A micro-batch whose scores have `by` more, of each query another, in a feature of its own."""
    batch, at = draw(rng, sizes, **how), 0
    for one in batch["slices"]:
        heads, size, features = one["q"].shape
        lift = np.broadcast_to(by[at:at + size, None], (heads, size, 1)) * (features + 1) ** 0.5
        one["q"] = np.concatenate([one["q"], lift], 2)
        one["k"] = np.concatenate([one["k"], np.ones((heads, size, 1))], 2)
        at += size
    return batch


def towering(rng, sizes, by=800.0):
    """A micro-batch in which each slice's last key has greater scores by far than all others, unseen by most."""
    batch = lifted(rng, np.ones(sum(sizes)), sizes)
    for one in batch["slices"]:
        one["k"][:, :, -1] = by * (np.arange(one["k"].shape[1]) == one["k"].shape[1] - 1)
    return batch


def of_whole_numbers(rng, sizes, below):
    """Scores that are whole numbers, or halves, far below 0: exact in float64."""
    batch = draw(rng, sizes, heads=4, features=4)
    for one in batch["slices"]:
        one["q"], one["k"] = (rng.integers(-1, 2, one["q"].shape).astype(float) for _ in range(2))
        one["q"][:, :, 3], one["k"][:, :, 3] = -2.0 * below, 1.0
    return batch


def memory(slices, length, rows):
    """What memory is measured with: of each row of steps a layer of its own."""
    return {"what": "memory", "slices": slices, "length": length, "heads": HEADS, "size": SIZE, "rows": rows}


def cases(rng):
    levels = np.concatenate([np.linspace(-3000, 3000, 9), np.linspace(3000, -3000, 9)])
    rounds = [pipelined([draw(rng, sizes, number) for number, sizes in zip((4, 0, 9), lengths, strict=True)], rank)
              for rank, lengths in ((0, ((2, 4, 1), (3, 1, 3), (1, 1, 5))), (1, ((4, 1, 2), (1, 5, 1), (3, 2, 2))))]
    layers = [pipelined([draw(rng, sizes, number, layer) for number, sizes in enumerate(lengths)], 1)
              for layer, lengths in enumerate((((3, 2), (2, 3), (1, 4)), ((2, 3), (4, 1), (3, 3))))]
    return [alone(EQUAL, draw(rng, (4, 4, 4))), alone(EQUAL, draw(rng, (5,), 3, heads=1)),
            alone("slices of several lengths", draw(rng, (1, 5, 2, 1), 7, heads=3)),
            alone("slices of several lengths", draw(rng, (6, 1, 1, 3, 2), heads=1, features=2, width=2)),
            pipelined([draw(rng, (3, 3, 3), number) for number in range(3)]),
            one_behind_the_other(*rounds), by_turns(*layers),
            woven([draw(rng, (3, 2, 2), number) for number in (1, 0)]),
            alone("scores in the thousands", lifted(rng, levels, (7, 4, 7))),
            alone("keys far above others", towering(rng, (4, 3, 3))),
            alone("scores far below 0", of_whole_numbers(rng, (4, 12), 2.0 ** 31), there),
            *measured()]


def measured():
    """A long sequence, and the pipeline that is drawn, with whole sequences and in slices."""
    return [memory(LONG, LENGTH, [and_back(LONG)]),
            *[memory(slices, SLICES * LENGTH // slices, [row(rank, slices) for rank in range(RANKS)])
              for slices in (1, SLICES)]]
