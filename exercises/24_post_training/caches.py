"""24.2 read by read, and what known mistakes would give."""

import functools

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from . import tiny

LINES = {"sizes": [50257, 1024, 12, 12, 768], "time": 24, "counts": [1, 3, 10, 30, 100, 300, 1000]}    # GPT-2


# ---------------------------------------------------------------- cases

def model(rng, vocabulary, length, layers, heads, dim):
    return {"sizes": [vocabulary, length, layers, heads, dim],
            "parameters": tiny.parameters(rng, vocabulary, length, layers, dim)}


def cases(rng):
    def tokens(vocabulary, batch, *times):
        return [rng.integers(vocabulary, size=(batch, time)) for time in times]

    def noise(count, batch, vocabulary):
        return 4 * rng.gumbel(size=(count, batch, vocabulary))
    found = [{"what": "read", **model(rng, 11, 9, 2, 2, 6), "jobs": [tokens(11, *job)]}
             for job in ((2, 5, 1, 1), (3, 2, 3, 4), (1, 9))]        # rows, and tokens of each read
    found.append({"what": "read", **model(rng, 7, 12, 3, 1, 4), "jobs": [tokens(7, 2, 1, 4, 1, 6), tokens(7, 2, 3, 2)]})
    for batch, time, count, sizes in ((2, 3, 4, (11, 9, 2, 2, 6)), (1, 1, 6, (13, 6, 1, 3, 6)),
                                      (3, 4, 1, (5, 4, 2, 1, 4)), (2, 4, 28, (17, 31, 2, 2, 8))):
        found.append({"what": "generate", **model(rng, *sizes), "tokens": tokens(sizes[0], batch, time)[0],
                      "noise": noise(count, batch, sizes[0]), "again": 0})
    found.insert(4, found[4] | model(rng, 11, 20, 2, 2, 6) | {"again": 1})

    def sizes(*layers):
        return [int(rng.integers(20, 90)), 64, int(rng.choice(layers or [2, 3, 5, 6])), 4, 4 * int(rng.integers(3, 12))]
    found += [{"what": "operations", "sizes": sizes(), "more": more} for more in ([0, 7], [12, 1], [9, 5])]
    found += [{"what": "to_write", "sizes": sizes(), "more": more} for more in (
        [5, 9, True], [5, 9, False], [1, 4, True], [6, 1, True], [6, 1, False])]
    found += [{"what": "nbytes", "sizes": sizes(3, 5, 6), "more": more} for more in ([7, 17, 4], [1, 61, 2])]
    return [*found, {"what": "lines", **LINES}]


# ---------------------------------------------------------------- rightly

def all_at_once(case, tokens):
    sizes = case["sizes"]
    return tiny.logits(case["parameters"], sizes[3], tokens)


def read(case):
    """Of each job the logits of all its tokens together, cut into its reads."""
    found = []
    for job in case["jobs"]:
        whole = all_at_once(case, np.concatenate(job, 1))
        found.append(np.split(whole, np.cumsum([part.shape[1] for part in job])[:-1], 1))
    return {"logits": found}


def generate(case, seen=lambda logits, time: logits[:, -1], pick=None):
    tokens, looked = case["tokens"], []
    for noise in case["noise"]:
        looked.append(seen(all_at_once(case, tokens), case["tokens"].shape[1]))
        new = (looked[-1] + noise).argmax(1)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    return {"tokens": tokens, "seen": looked, "changed": False, "before": [tokens] * case["again"]}


def products(case, past, new, squares=True, head=True, mean=False, twice=2, keys=None, matrices=12, all_layers=True,
             heads=False, scores=2, last_only=False):
    """Operations one product of matrices after the other; the keywords are the mistakes."""
    vocabulary, _, layers, number, dim = case["sizes"]
    seen = past + new if keys is None else keys(past, new)
    shapes = [(new, dim if squares else 1, dim)] * matrices + [(new, dim, seen)] * scores
    if heads:
        shapes += [(new, dim, seen)] * scores * (number - 1)
    found = (layers if all_layers else 1) * sum(n * k * m for n, k, m in shapes)
    return twice * (found + head * (1 if last_only else new) * dim * vocabulary)


def numbers(case, kept=None, **how):
    """operations, to_write or nbytes."""
    if case["what"] == "nbytes":
        return nbytes(case)
    ops = functools.partial(products, case, **how)
    if case["what"] == "operations":
        return int(ops(*case["more"]))
    time, count, with_cache = case["more"]
    if kept is not None:
        return int(kept(ops, time, count, with_cache))
    parts = [(0, time)] + [(t, 1) if with_cache else (0, t + 1) for t in range(time, time + count - 1)]
    return int(sum(ops(*part) for part in parts))


def nbytes(case):
    batch, time, itemsize = case["more"]
    _, _, layers, heads, dim = case["sizes"]
    return int(np.prod([2, layers, batch, heads, time, dim // heads, itemsize]))


def truth(case):
    if case["what"] == "read":
        return read(case)
    if case["what"] == "generate":
        return generate(case)
    return {"result": numbers(case)} if case["what"] != "lines" else {}


# ---------------------------------------------------------------- wrong attention, layer by layer

class Wrong:
    """A cache with a mistake: what it keeps after each read, where tokens are, who looks at whom."""

    def __init__(self, case, batch, positions=None, mask=None, keep=None, slot=None, order=None, stay=False):
        self.case, self.past, self.stay = case, 0, stay
        self.positions = positions or (lambda past, new: past + np.arange(new))
        self.mask = mask or (lambda past, new, all_: np.tri(new, all_, all_ - new, dtype=bool))
        self.keep = keep or (lambda old, new: np.concatenate([old, new], 2))
        self.kept = {}
        self.slot = slot or (lambda layer: layer)
        self.order = order or (lambda k, v: (k, v))

    def read(self, tokens):
        p, heads = self.case["parameters"], self.case["sizes"][3]
        batch, new = tokens.shape
        x = p["tokens"][tokens] + p["positions"][self.positions(self.past, new)]
        for layer in range(self.case["sizes"][2]):
            q, *two = (each.reshape(batch, new, heads, -1).transpose(0, 2, 1, 3)
                       for each in np.split(tiny.normed(x) @ p[f"{layer}.qkv"], 3, -1))
            old = self.kept.get(self.slot(layer), [each[:, :, :0] for each in two])
            kept = self.kept[self.slot(layer)] = [self.keep(a, b) for a, b in zip(old, two, strict=True)]
            if self.stay and self.past:
                self.kept[self.slot(layer)] = old
            k, v = self.order(*kept)
            scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
            scores = np.where(self.mask(self.past, new, k.shape[2]), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            found = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + found @ p[f"{layer}.out"]
            x = x + np.maximum(tiny.normed(x) @ p[f"{layer}.up"], 0) @ p[f"{layer}.down"]
        self.past += new
        return tiny.normed(x) @ p["tokens"].T


def with_cache(case, feed=None, take=lambda logits: logits[:, -1], result=None, **how):
    """The outputs of a whole case with a wrong cache, or wrongly used."""
    if case["what"] == "read":
        return {"logits": [[cache.read(part) for part in job] for job, cache in (
            (job, Wrong(case, len(job[0]), **how)) for job in case["jobs"])]}
    if case["what"] != "generate":
        return truth(case)
    tokens, seen = case["tokens"], []
    cache, new = Wrong(case, len(tokens), **how), tokens
    for noise in case["noise"]:
        seen.append(take(cache.read(new)))
        new = (seen[-1] + noise).argmax(1)[:, None]
        tokens = np.concatenate([tokens, new], 1)
        new = new if feed is None else feed(tokens)
    tokens = tokens if result is None else result(tokens, case["tokens"].shape[1])
    return {"tokens": tokens, "seen": seen, "changed": False, "before": [tokens] * case["again"]}


def c(text, **how):
    def found(case):
        try:
            with np.errstate(all="ignore"):
                return with_cache(case, **how)
        except (IndexError, ValueError):        # beyond the model's positions, or of other widths: another mistake
            return None
    return gives(text, found)


def n(what, text, **how):
    """A mistake of operations, and so of to_write, too; or of one of them."""
    def found(case):
        if case["what"] in what:
            return {"result": numbers(case, **how)}
        return truth(case) if case["what"] in ("operations", "to_write", "nbytes") else None
    return gives(lambda case: f"{case['what']}: {text}", found)


def b(text, formula):
    def found(case):
        if case["what"] != "nbytes":
            return None
        vocabulary, length, layers, heads, dim = case["sizes"]
        return {"result": int(formula(layers, heads, dim, length, *case["more"]))}
    return gives(f"nbytes: {text}", found)


BOTH, LATER = ("operations", "to_write"), ("to_write",)


def each(outputs):
    """The arrays of logits."""
    return [x for job in outputs.get("logits", [outputs.get("seen", [])]) for x in job]


def nan(case, got):
    return any(np.isnan(x).any() for x in each(got))


def first(case, got):
    """The first read of each cache is right."""
    return all(same(np.asarray(x[0]), y[0], 1e-9) for x, y in zip(got["logits"], read(case)["logits"], strict=True))


def near(case, got):
    return case["what"] in ("read", "generate") and all(
        same(np.asarray(x), y, 1e-4) for x, y in zip(each(got), each(truth(case)), strict=True))


SIGNATURES = [
    when("the tokens that were given aren't what they were before the call",
         lambda case, got: got.get("changed", False)),
    when("nan: attention gets positions in which nothing has been written yet, and 0 times nan is nan: only those that "
         "have been read", nan),
    c("every read begins at position 0: these tokens stand behind those that have been read",
      positions=lambda past, new: np.arange(new)),
    c("positions are one too low after the first read: the first new token stands at the place `past`",
      positions=lambda past, new: past + np.arange(new) - (past > 0)),
    c("all tokens of a read stand at the first one's position", positions=lambda past, new: np.full(new, past)),
    c("several tokens in one read: each may look at those before it in the same read, and not at those behind it. The "
      "mask lets all look at all", mask=lambda past, new, all_: np.ones((new, all_), bool)),
    c("the mask is that of a first read: np.tri(new, all) lets the first new token look at position 0 alone. It may "
      "look at `past` positions more", mask=lambda past, new, all_: np.tri(new, all_, dtype=bool)),
    c("a token doesn't look at itself: its own key is among those that it may see", mask=lambda past, new, all_:
      np.tri(new, all_, all_ - new - (all_ > new), dtype=bool)),
    c("new tokens see those of their own read, and not what is kept. Or is that thrown away?",
      mask=lambda past, new, all_: np.tri(new, all_, all_ - new, dtype=bool) & (np.arange(all_) >= all_ - new)),
    c("new tokens see what is kept, and not each other: of one token that is itself alone", mask=lambda past, new, all_:
      (np.arange(all_) < all_ - new) | (np.arange(all_) == np.arange(new)[:, None] + all_ - new)),
    c("only the first read is kept: later tokens' keys and values are needed as well",
      stay=True),
    c("all layers keep in one place: each layer has keys and values of its own", slot=lambda layer: 0),
    c("new keys and values stand before those that are kept: positions must stay in order", keep=lambda old, new:
      np.concatenate([new, old], 2)),
    c("keys are taken for values, and values for keys", order=lambda k, v: (v, k)),
    c("the values are the keys", order=lambda k, v: (k, k)),
    c("generate: the first of the logits is taken: the last position says what comes next", take=lambda logits:
      logits[:, 0]),
    c("generate: the logits before the last are taken: the last position says what comes next", take=lambda logits:
      logits[:, -2:][:, 0]),
    c("generate: asked for are the given tokens and the new ones; these are the new ones alone",
      result=lambda tokens, time: tokens[:, time:]),
    c("generate: the last token is missing: it isn't read any more, but it has been written",
      result=lambda tokens, time: tokens[:, :-1]),
    c("generate: all tokens so far are read again and again, behind what is kept of them: only the new one",
      feed=lambda tokens: tokens),
    c("generate: the last two tokens are read each time; the one before has been read already",
      feed=lambda tokens: tokens[:, -2:]),
    when("the first read is right, later ones aren't. Two caches may share what they keep (on the class, or in a "
         "default argument): this one is right alone", lambda case, got: len(case.get("jobs", [])) > 1 and first(
             case, got)),
    when("generate: right when it is called first, and wrong when it is called again with the same model, which has "
         "kept something: each call begins with nothing read", lambda case, got: case.get("again") and same(
             np.asarray(got["before"][0]), truth(case)["tokens"], 0)),
    when(lambda case, got: f"generate: pick chooses each of the new tokens; it was called {len(got['seen'])} times, "
         f"count is {len(case['noise'])}", lambda case, got: len(got.get("seen", [])) < len(case.get("noise", []))),
    n(BOTH, "a product of matrices has an addition for each multiplication: twice as many", twice=1),
    n(BOTH, "of one layer only: there are sizes.layers of them", all_layers=False),
    n(BOTH, "the logits are left out: dim · vocabulary for each position", head=False),
    n(BOTH, "only the last position's logits are counted; they are worked out for all that are read", last_only=True),
    n(BOTH, "the matrices of the net are dim · 4 dim and 4 dim · dim, four times as large as those of attention: 12 "
      "dim² in all, not 6, with a multiplication and an addition each", matrices=6),
    n(BOTH, "one of the two matrices of the net is missing, or all four of attention: 4 dim² for attention, 8 dim² for "
      "the net", matrices=8),
    n(BOTH, "that is attention's four matrices; the net's two are 8 dim²", matrices=4),
    n(BOTH, "what attention gives goes through a matrix, too: 4 dim², not 3", matrices=11),
    n(BOTH, "scores and sums of attention are left out: they are what grows", scores=0),
    n(BOTH, "queries meet the keys, and then the weights meet the values: one of the two is missing", scores=1),
    n(BOTH, "queries meet the keys of all positions so far, not of the new ones alone", keys=lambda past, new: new),
    n(BOTH, "queries meet the new ones' keys as well as those that are kept", keys=lambda past, new: past),
    n(BOTH, "the mask saves nothing: products are worked out for all past + new positions", keys=lambda past, new:
      past + (new + 1) / 2),
    n(BOTH, "each head has dim / heads of the numbers: all heads together are dim", heads=True),
    n(LATER, "the last token isn't read: nobody asks what comes behind it", kept=lambda ops, time, count, kept:
      ops(0, time) + sum(ops(time + i, 1) for i in range(count)) if kept else sum(
          ops(0, time + i) for i in range(count + 1))),
    n(LATER, "the last token isn't read: nobody asks what comes behind it", kept=lambda ops, time, count, kept:
      ops(0, time) + sum(ops(time + i, 1) for i in range(count)) if kept else sum(
          ops(0, time + i) for i in range(count))),
    n(LATER, "without a cache, the first forward is of the `time` given tokens, and the last of time + count - 1",
      kept=lambda ops, time, count, kept: ops(0, time) + sum(ops(time + i, 1) for i in range(count - 1)) if kept else
      sum(ops(0, time + i + 1) for i in range(count))),
    n(LATER, "the given tokens must be read as well", kept=lambda ops, time, count, kept: sum(
        ops(time + i, 1) for i in range(count - 1)) if kept else sum(ops(0, time + i) for i in range(count))),
    n(LATER, "the given tokens must be read as well", kept=lambda ops, time, count, kept: sum(
        ops(time + i, 1) for i in range(count)) if kept else sum(ops(0, time + i) for i in range(count))),
    n(LATER, "without a cache each token costs a forward of all that are there by then: they get longer",
      kept=lambda ops, time, count, kept: ops(0, time) + sum(ops(time + i, 1) for i in range(count - 1)) if kept else
      count * ops(0, time)),
    n(LATER, "with a cache each token looks at one position more than the one before", kept=lambda ops, time, count,
      kept: ops(0, time) + (count - 1) * ops(time, 1) if kept else sum(ops(0, time + i) for i in range(count))),
    n(LATER, "the same with a cache and without: with one, each position is worked on once", kept=lambda ops, time,
      count, kept: sum(ops(0, time + i) for i in range(count))),
    n(LATER, "with and without a cache have changed places", kept=lambda ops, time, count, kept: sum(
        ops(0, time + i) for i in range(count)) if kept else ops(0, time) + sum(
            ops(time + i, 1) for i in range(count - 1))),
    b("keys and values are kept: twice as many", lambda layers, heads, dim, length, batch, time, size: layers * batch *
      time * dim * size),
    b("each layer has its own: layers times as many", lambda layers, heads, dim, length, batch, time, size: 2 * batch *
      time * dim * size),
    b("that are numbers; a number has itemsize bytes", lambda layers, heads, dim, length, batch, time, size: 2 * layers
      * batch * time * dim),
    b("of each row of the batch", lambda layers, heads, dim, length, batch, time, size: 2 * layers * time * dim * size),
    b("the heads share dim among them: dim / heads each", lambda layers, heads, dim, length, batch, time, size: 2 *
      layers * batch * heads * time * dim * size),
    b("of one head only: dim numbers per position", lambda layers, heads, dim, length, batch, time, size: 2 * layers *
      batch * time * dim // heads * size),
    b("of `time` positions; these are all that the model has", lambda layers, heads, dim, length, batch, time, size:
      2 * layers * batch * length * dim * size),
    b("queries aren't kept: nobody asks them again", lambda layers, heads, dim, length, batch, time, size: 3 * layers *
      batch * time * dim * size),
    b("one new position has time · dim numbers here; nothing is kept of pairs of positions", lambda layers, heads, dim,
      length, batch, time, size: 2 * layers * batch * heads * time * time * size),
    when("nearly right: is something kept in float32?", near),
]


# ---------------------------------------------------------------- what it takes

def needed(case):
    """Positions of a row."""
    if case["what"] == "generate":
        return case["tokens"].shape[1] + len(case["noise"]) - 1
    return sum(part.shape[1] for job in case["jobs"] for part in job)


def worked(case, got):
    """Positions of a row that the first layer has worked on."""
    return sum(positions for layer, _, positions in got["worked"] if layer == 0)


DEMANDS = [
    demand(lambda case, got: f"{case['what']}: right, but {float(got['result'])} is a float; asked for is an int",
           lambda case, got: case["what"] != "operations" or isinstance(got["result"], int | np.integer)),
    demand(lambda case, got: f"the right numbers, but {worked(case, got)} positions of a row were worked on in a "
           f"layer, where {needed(case)} are needed: each token is read once, and the last one not at all",
           lambda case, got: "worked" not in got or worked(case, got) == needed(case)),
    demand(lambda case, got: f"generate: right, but tokens are of {np.asarray(got['tokens']).dtype}: integers, or they "
           "can't be read", lambda case, got: case["what"] != "generate" or np.asarray(
               got["tokens"]).dtype.kind in "iu"),
]
