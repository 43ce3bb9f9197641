"""21.2: the run of the exercise once more, as a function of a dict, and what known mistakes give."""

import copy

import numpy as np

from exercises.frame import demand, gives, when

STEPS, KILLS = 60, (7, 13, 20, 28, 41)      # 5 steps are an epoch; two make an update
SIZES, MANY = ((20, 3), (20, 6)), 280
BATCH, PATIENCE, LARGEST = 4, 1, 60.0
RARE = ("good", "bad", "rate", "best", "scale", "updates")      # the rarest first: then most draws are told soon


def cases(rng):
    """Two runs in which whatever is forgotten shows, and one of more samples than 8 bits can count."""
    found = []
    for samples, features in SIZES:
        while not telling(case := draw(rng, samples, features)):
            pass
        found.append(case)
    return [found[0], draw(rng, MANY, 2), found[1]]


def draw(rng, samples, features):
    x = rng.normal(0, 1, (samples, features))
    y = x @ rng.normal(0, 0.5, features) + rng.normal(0, 1.5, samples)
    return {"x": x, "y": y, "seed": int(rng.integers(10 ** 6)), "steps": STEPS, "kills": list(KILLS)}


def telling(case):
    """Whether the rare events happen, epochs that are no better and updates that are left out; and whether bad and
    good, forgotten, show at a kill at which best and scale, forgotten, would look different."""
    right = run(case)["ends"]
    shown = {}
    for name in RARE:
        ends = run(case, without(name))["ends"]
        shown[name] = {kill: end for kill, end in ends.items() if not np.array_equal(end, right[kill])}
        if not shown[name]:
            return False
    return all(any(kill not in shown[other] or not np.array_equal(end, shown[other][kill])
                   for kill, end in shown[one].items()) for one, other in (("bad", "best"), ("good", "scale")))


# ---------------------------------------------------------------- the run

def begin(case):
    shuffler, dropout = np.random.default_rng(case["seed"]), np.random.default_rng(case["seed"] + 1)
    n, d = case["x"].shape
    order = shuffler.permutation(n)
    w = dropout.normal(0, 1, d)
    return {"shuffler": shuffler, "dropout": dropout, "order": order, "at": 0, "total": 0.0, "weights": w, "mean": w,
            "grad": np.zeros(d), "batches": 0, "m": np.zeros(d), "v": np.zeros(d), "updates": 0, "rate": 0.1,
            "best": np.inf, "bad": 0, "scale": 8.0, "good": 0}


def go(case, s, steps):
    """The losses of so many steps; s is changed, but none of its arrays."""
    losses = []
    for _ in range(steps):
        rows = s["order"][s["at"]:s["at"] + BATCH]
        x = case["x"][rows] * (s["dropout"].random((len(rows), case["x"].shape[1])) < 0.8) / 0.8
        error = x @ s["weights"] - case["y"][rows]
        losses.append(float(np.mean(error ** 2)))
        s["grad"] = s["grad"] + s["scale"] * (2 * x.T @ error / len(rows)) / 2
        s["batches"] += 1
        if s["batches"] == 2:
            update(s)
        s["at"] += len(rows)
        s["total"] += losses[-1]
        if s["at"] == len(case["x"]):
            end_epoch(s)
    return losses


def update(s):
    if np.abs(s["grad"]).max() > LARGEST:
        s |= {"scale": s["scale"] / 2, "good": 0}
    else:
        g = s["grad"] / s["scale"]
        s["updates"] += 1
        s |= {"m": 0.9 * s["m"] + 0.1 * g, "v": 0.95 * s["v"] + 0.05 * g ** 2, "good": s["good"] + 1}
        m, v = s["m"] / (1 - 0.9 ** s["updates"]), s["v"] / (1 - 0.95 ** s["updates"])
        s["weights"] = s["weights"] - s["rate"] * m / (np.sqrt(v) + 1e-8)
        s["mean"] = 0.9 * s["mean"] + 0.1 * s["weights"]
        if s["good"] == 3:
            s |= {"scale": 2 * s["scale"], "good": 0}
    s |= {"grad": np.zeros_like(s["grad"]), "batches": 0}


def end_epoch(s):
    if s["total"] < s["best"]:
        s |= {"best": s["total"], "bad": 0}
    else:
        s["bad"] += 1
        if s["bad"] > PATIENCE:
            s |= {"rate": s["rate"] / 2, "bad": 0}
    s |= {"order": s["shuffler"].permutation(len(s["order"])), "at": 0, "total": 0.0}


def states(case):
    """(the losses of the run, {kill: its state there})."""
    key = case["x"].tobytes() + case["y"].tobytes(), case["seed"], case["steps"], *case["kills"]
    if key not in KNOWN:
        s, losses, found = begin(case), [], {}
        for kill in [*case["kills"], case["steps"]]:
            losses += go(case, s, kill - len(losses))
            found[kill] = copy.deepcopy(s)
        if len(KNOWN) > 200:
            KNOWN.clear()
        KNOWN[key] = losses, found
    return KNOWN[key]


KNOWN = {}      # a case is asked for once per signature


def run(case, resume=None, disturb=None):
    """All outputs. resume(case, kill, state): the state that a resumed run has, of that of the captured one.
    disturb(case, state): what capture makes of the run, before it looks at it."""
    whole, there = states(case)
    found = {"whole": whole, "went on": {}, "resumed": {}, "ends": {}, "changed": []}
    for kill in case["kills"]:
        tail, end = whole[kill:], there[case["steps"]]
        if resume or disturb:
            end = copy.deepcopy(there[kill])
            end = resume(case, kill, end) if resume else disturb(case, end)
            tail = go(case, end, case["steps"] - kill)
        found["went on"][str(kill)] = tail if disturb else whole[kill:]
        found["resumed"][str(kill)] = tail
        found["ends"][str(kill)] = [end["weights"], end["mean"]]
    return found


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def without(*names):
    return lambda case, kill, s: s | {name: begin(case)[name] for name in names}


def only(*names):
    return lambda case, kill, s: begin(case) | {name: s[name] for name in names}


def seeded(*more):
    """The streams begin anew from their seeds."""
    def resume(case, kill, s):
        new = {"shuffler": np.random.default_rng(case["seed"]), "dropout": np.random.default_rng(case["seed"] + 1)}
        return s | {name: new[name] for name in more}
    return resume


def drawn_again(case, kill, s):
    s["order"] = s["shuffler"].permutation(len(s["order"]))
    return s


def next_epoch(case, kill, s):
    return drawn_again(case, kill, s) | {"at": 0, "total": 0.0}


def by_steps(divisor):
    return lambda case, kill, s: s | {"updates": kill // divisor}


def in_bits(dtype):
    return lambda case, kill, s: s | {"order": s["order"].astype(dtype)}


def flushed(case, kill, s):
    if s["batches"]:
        update(s)
    return s


def one_stream(case, kill, s):
    return s | {"dropout": copy.deepcopy(s["shuffler"])}


def parts(case, got):
    """Where the curves part: words."""
    for kill, curve in sorted(got["resumed"].items(), key=lambda pair: int(pair[0])):
        right, curve = np.array(got["whole"][int(kill):]), np.array(curve, dtype=float)
        if len(right) == len(curve) and (apart := np.abs(curve - right) > 1e-9 * np.abs(right)).any():
            at = int(np.argmax(apart))
            later = "at once" if at == 0 else f"{at} step{'s' * (at > 1)} later"
            return (f"killed after step {kill}, the resumed curve parts from the other {later}, at step "
                    f"{int(kill) + at + 1}: {curve[at]:.6g} instead of {right[at]:.6g}")
    return "the losses are those that they should be, and the weights or their mean at the end aren't"


def g(sentence, resume):
    return gives(lambda case, got: f"{sentence}: {parts(case, got)}", lambda case: run(case, resume))


def disturbed(sentence, disturb):
    return gives(sentence, lambda case: run(case, disturb=disturb))


def draw_one(name):
    def disturb(case, s):
        s[name].random()
        return s
    return disturb


FORGOTTEN = {
    ("weights",): "the weights aren't in it",
    ("m",): "Adam's m isn't in it, and begins at 0 again",
    ("v",): "Adam's v isn't in it, and begins at 0 again: the first updates are far too large",
    ("m", "v"): "Adam's m and v aren't in it, and begin at 0 again",
    ("updates",): "the number of Adam's updates isn't in it: the correction of the bias is that of the first update, "
                  "and makes m and v several times too large",
    ("m", "v", "updates"): "nothing of Adam is in it: it begins anew, as at the first step",
    ("mean",): "the mean of the weights isn't in it",
    ("rate",): "the rate isn't in it: it is the first one again",
    ("best",): "the best epoch's loss isn't in it: the next epoch is the best one by definition, and the rate falls "
               "later",
    ("bad",): "the number of bad epochs isn't in it: the rate falls later",
    ("rate", "best", "bad"): "nothing of the schedule is in it: rate, best and bad",
    ("best", "bad"): "what the schedule remembers isn't in it: best and bad",
    ("total",): "the epoch's total isn't in it: at its end a part of the epoch is compared with a whole one",
    ("at",): "the place in the epoch isn't in it: the epoch begins again, and some samples are seen twice",
    ("at", "total"): "the epoch begins again: at and total aren't in it, and some samples are seen twice",
    ("order",): "the epoch's order isn't in it: what comes is the rest of another order, so that some samples are seen "
                "twice, others not at all",
    ("order", "at", "total"): "nothing of the epoch is in it: order, at and total",
    ("shuffler",): "the stream of the orders isn't in it: from the next epoch on the orders of the first epochs come "
                   "again",
    ("dropout",): "the stream of dropout isn't in it: the masks of the first steps come again",
    ("shuffler", "dropout"): "no random stream is in it: the numbers of the first steps come again",
    ("grad",): "the gradient accumulated until now isn't in it: the next update has half of its batches",
    ("batches",): "how many batches are accumulated isn't in it: the next update has one too many",
    ("grad", "batches"): "nothing of what is accumulated is in it: a batch is lost, and updates come a batch later",
    ("scale",): "the scale isn't in it: it is 8 again, and later updates are left out, or not, at other steps",
    ("good",): "how many updates were good since the scale changed isn't in it: it grows later",
    ("scale", "good"): "nothing of the scaler is in it: scale and good",
}
SIGNATURES = [
    when(lambda case, got: f"what was captured changes when the run goes on: {', '.join(got['changed'])}. An array "
         "must be copied: the run writes into its own",
         lambda case, got: any("captured" in one for one in got["changed"])),
    when(lambda case, got: f"restored, and then the run writes into the state: {', '.join(got['changed'])}. An array "
         "must be copied here as well: a state may be wanted twice", lambda case, got: bool(got["changed"])),
    when("Run itself was changed: nobody was captured or restored, and the losses are others. It is given, to be left "
         "as it is", lambda case, got: not np.allclose(got["whole"], truth(case)["whole"], rtol=1e-9)),
    g("an update is made of what is accumulated, before that is all of it", flushed),
    disturbed("capture disturbs the run: it draws a number from dropout's stream", draw_one("dropout")),
    disturbed("capture disturbs the run: it draws from the stream of the orders", draw_one("shuffler")),
    disturbed("capture disturbs the run: it updates with what is accumulated, before that is all of it",
              lambda case, s: flushed(case, 0, s)),
    when("capture disturbs the run: the one that was captured, and not killed, has other losses then than without",
         lambda case, got: differs(case, got, "went on")),
    g("nothing is restored: the run begins again from its first step", lambda case, kill, s: begin(case)),
    g("the weights are in it, and nothing else", only("weights")),
    g("the weights and Adam's state are in it, as in many programs, and nothing else",
      only("weights", "m", "v", "updates")),
    *(g(sentence, without(*names)) for names, sentence in FORGOTTEN.items()),
    g("the order is drawn again, from a stream that has drawn it already", drawn_again),
    g("the rest of the epoch is left out: the run goes on with the next one", next_epoch),
    g("the number of updates is taken from the steps: two of them make an update, and some updates are left out",
      by_steps(2)),
    g("the number of updates is taken from the steps: two of them make an update", by_steps(1)),
    g("dropout goes on with the other stream's state: the two are in the wrong places", one_stream),
    g("dropout's stream is made anew from its seed: its state is wanted, not where it began", seeded("dropout")),
    g("the stream of the orders is made anew from its seed: its state is wanted, not where it began",
      seeded("shuffler")),
    g("the streams are made anew from their seeds: their states are wanted, not where they began",
      seeded("dropout", "shuffler")),
    *(g("the order is kept in 8 bits, and there may be more samples than these can count", in_bits(bits))
      for bits in ("u1", "i1")),
    when(lambda case, got: f"nearly: {parts(case, got)}. To the last bit is asked for: is an array kept in float32, or "
         "a number as text with too few digits?", lambda case, got: all(
             np.isclose(curve[0], truth(case)["whole"][int(kill)], rtol=1e-4)
             for kill, curve in got["resumed"].items())),
    when(lambda case, got: f"something is missing in it, or comes back as another: {parts(case, got)}",
         lambda case, got: differs(case, got, "resumed")),
]


def differs(case, got, name):
    return any(len(curve) == case["steps"] - int(kill)
               and not np.allclose(curve, truth(case)["whole"][int(kill):], rtol=1e-9, atol=0)
               for kill, curve in got[name].items())


def exact(case, got):
    return all(list(curve) == list(got["whole"][int(kill):]) for kill, curve in got["resumed"].items())


def unequal(case, got):
    """The first kill after which bits differ, and by how much the losses do."""
    kill, far = next((int(kill), np.abs(np.subtract(curve, got["whole"][int(kill):])).max())
                     for kill, curve in got["resumed"].items() if list(curve) != list(got["whole"][int(kill):]))
    return (f"nearly: killed after step {kill}, the losses differ by up to {far:.1g}. To the last bit is asked for: is "
            "a number kept as text with too few digits?")


DEMANDS = [
    demand(unequal, exact),
    demand(lambda case, got: f"right, but what is captured has {got['bytes']:,} bytes in its arrays, and x alone has "
                             f"{case['x'].nbytes:,}: are the data in it? They are on the disk already, and of a real "
                             "run many times larger than all else", lambda case, got:
           got["bytes"] < 8 * (8 * case["x"].shape[1] + len(case["x"])) + 1),
]
