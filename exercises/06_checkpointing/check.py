"""What the answers of chapter 6 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.pictures import COLORS, canvas, save

# ---------------------------------------------------------------- 06.1


def chain(weights, x, ct, masks=None):
    """(y, ct of x, gradients) of x -> mask · tanh(W x) -> …, everything stored."""
    masks = [1.0] * len(weights) if masks is None else masks
    inputs, outputs = [], []
    for w, mask in zip(weights, masks, strict=True):
        inputs.append(x)
        outputs.append(np.tanh(np.einsum("ij,j->i", w, x)))
        x = mask * outputs[-1]
    grads = []
    for w, mask, before, after in zip(weights[::-1], masks[::-1], inputs[::-1], outputs[::-1], strict=True):
        through = ct * mask * (1 - after ** 2)
        grads.insert(0, np.einsum("i,j->ij", through, before))
        ct = np.einsum("i,ij->j", through, w)
    return x, ct, grads


def draw_chain(rng, n):
    width = int(rng.integers(6, 10))        # one for all layers, so that a wrong input gives numbers, and no exception
    weights = [1.2 * rng.standard_normal((width, width)) / np.sqrt(width) for _ in range(n)]
    return weights, rng.standard_normal(width), rng.standard_normal(width)


def stored(case):
    y, ct, grads = chain(case["weights"], case["x"], case["ct"])
    return {"y": y, "ct_x": ct, "grads": grads}


def last_segment_only(case):
    """Backward goes through the last segment, and no further."""
    n, every = len(case["weights"]), case["every"]
    start = (n - 1) // every * every
    x = chain(case["weights"][:start], case["x"], case["ct"])[0]
    y, ct, grads = chain(case["weights"][start:], x, case["ct"])
    return {"y": y, "ct_x": ct, "grads": [np.zeros_like(w) for w in case["weights"][:start]] + grads}


def from_the_output(case):
    """Every segment is gone through with the cotangent of the network's output."""
    n, every = len(case["weights"]), case["every"]
    found, x = stored(case) | {"grads": []}, case["x"]
    for start in range(0, n, every):
        x, ct, grads = chain(case["weights"][start:start + every], x, case["ct"])
        found["grads"] += grads
        found["ct_x"] = ct if start == 0 else found["ct_x"]
    return found


def behind_the_full_ones(case, got):
    full = len(case["weights"]) // case["every"] * case["every"]
    return 0 < full < len(case["weights"]) and not any(got["backwards"][full:]) and all(got["backwards"][:full])


def often(case, got):
    return max(got["forwards"]) > 2


def kept_inside(case, got):
    """Some layer isn't run again whose output is no checkpoint. (In the last segment none need be.)"""
    n, every = len(case["weights"]), case["every"]
    return any(got["forwards"][i] < 2 for i in range((n - 1) // every * every) if (i + 1) % every)


def peak_of(n, every):
    """The checkpoints up to a segment, and its other inputs; at the largest moment. By walking through it."""
    most = 0
    for start in range(0, n, every):
        held = len(range(0, start + 1, every))
        most = max(most, held + min(every, n - start) - 1)
    return most


def needed(case):
    return peak_of(len(case["weights"]), case["every"])


def slack(case, got):
    """Beside what must be there, the output, and one array that is just being made, or still has a name."""
    return got["peak"] <= needed(case) + 3


def held(case, got):
    """The same of all arrays, copies too: NumPy keeps up to 7 small ones for those that come next."""
    return got["held"] <= needed(case) + 3 + 7


class Checkpointed(Check):
    exercise = "06.1"
    signatures = [
        when("the layers behind the last full segment are lost: the last segment may be shorter than the others",
             behind_the_full_ones),
        gives("only the last segment is gone through backward: its cotangent goes on into the segment before",
              last_segment_only),
        gives("each segment begins again with the cotangent of the output: it must go on where the one behind it ended",
              from_the_output),
        when("a layer is gone through backward more than once: its gradient is added up twice",
             lambda case, got: max(got["backwards"]) > 1),
        when("the output is right, but the layers meet inputs in backward that aren't theirs: check where a segment "
             "begins, and that its inputs are taken from the last to the first",
             lambda case, got: np.allclose(got["y"], stored(case)["y"]) and min(got["backwards"]) == 1),
    ]
    demands = [
        demand("right, but a layer's forward runs more than twice: compute a segment's inputs once, each from the one "
               "before", lambda case, got: not often(case, got)),
        demand(lambda case: f"right, but too much is alive at once: {len(case['weights'])} layers with a checkpoint "
                            f"every {case['every']} need {needed(case)} inputs; keep no other ones in forward, and "
                            "let go of a segment's when it is done", slack),
        demand(lambda case: f"right, but layers inside a segment run only once: of the inputs number 0, "
                            f"{case['every']}, {2 * case['every']}, … are kept, and the others computed again",
               lambda case, got: not kept_inside(case, got)),
        demand(lambda case, got: f"right, but too much is held, if only as copies: {got['held']:.0f} arrays, where "
                                 f"{len(case['weights'])} layers with a checkpoint every {case['every']} need "
                                 f"{needed(case)}", held),
    ]

    def cases(self, rng, ranks):
        found = []
        for n, every in ((64, 8), (13, 4), (12, 5), (5, 1), (6, 6), (3, 10), (17, 3), (1, 2)):
            weights, x, ct = draw_chain(rng, n)
            found.append({"weights": weights, "x": x, "ct": ct, "every": every})
        return found

    def truth(self, case):
        return stored(case)

    def picture(self, runs, path):
        case, got = runs[1][0]
        n, every = len(case["weights"]), case["every"]
        everything = [*range(1, n + 2), *range(n + 1, 0, -1)]
        figure, axes = canvas(size=(8.6, 4))
        axes.plot(everything, color=COLORS[5], lw=1.5, label=f"everything stored: {max(everything)}")
        axes.plot(got["course"], color=COLORS[1], lw=1.5, label=f"yours, a checkpoint every {every}: {got['peak']}")
        axes.set_ylabel("arrays alive")
        axes.set_xlabel("an array is made, or let go")
        axes.set_title(f"{n} layers, forward and backward", loc="left")
        axes.legend(frameon=False)
        save(figure, path)
        return f"{n} layers: at most {got['peak']} arrays alive instead of {max(everything)}, " \
               f"for {sum(got['forwards'])} forwards instead of {n}"


# ---------------------------------------------------------------- 06.2

def generator(case):
    return np.random.Generator(np.random.MT19937(case["seed"]))      # not that of default_rng: any may come


def dropout_steps(case):
    """Both steps with everything stored."""
    rng = generator(case)
    found = {"y": [], "ct_x": [], "grads": [np.zeros_like(w) for w in case["weights"]]}
    for x, ct in zip(case["xs"], case["cts"], strict=True):
        masks = [(rng.random(len(w)) < 0.75) / 0.75 for w in case["weights"]]
        y, ct, grads = chain(case["weights"], x, ct, masks)
        found["y"].append(y)
        found["ct_x"].append(ct)
        for total, g in zip(found["grads"], grads, strict=True):
            total += g
    return found | {"next": float(rng.random())}


def from_the_last_input(case):
    """The gradients if every segment goes back with its own masks, but from the x that the last one was given."""
    rng, size = generator(case), case["size"]
    found = dropout_steps(case) | {"ct_x": [], "grads": [np.zeros_like(w) for w in case["weights"]]}
    for x, ct in zip(case["xs"], case["cts"], strict=True):
        masks = [(rng.random(len(w)) < 0.75) / 0.75 for w in case["weights"]]
        starts = range(0, len(masks), size)
        x = chain(case["weights"][:starts[-1]], x, ct, masks[:starts[-1]])[0]
        for start in reversed(starts):
            own = slice(start, start + size)
            _, ct, grads = chain(case["weights"][own], x, ct, masks[own])
            for total, g in zip(found["grads"][own], grads, strict=True):
                total += g
        found["ct_x"].append(ct)
    return found


def gone_back(order=-1, saved="input"):
    """What comes out if every segment goes back through its layers in this order, with what is saved, an "input", an
    "output" or the segment's "first" input, for each one's input."""
    def outputs(case):
        rng, size = generator(case), case["size"]
        found = dropout_steps(case) | {"ct_x": [], "grads": [np.zeros_like(w) for w in case["weights"]]}
        for x, ct in zip(case["xs"], case["cts"], strict=True):
            steps, first = [], x
            for i, w in enumerate(case["weights"]):
                first, mask = x if i % size == 0 else first, (rng.random(len(w)) < 0.75) / 0.75
                y = mask * np.tanh(w @ x)
                steps.append((i, mask, {"input": x, "output": y, "first": first}[saved]))
                x = y
            for start in reversed(range(0, len(steps), size)):
                for i, mask, x in steps[start:start + size][::order]:
                    through = ct * mask * (1 - np.tanh(case["weights"][i] @ x) ** 2)
                    found["grads"][i] += np.outer(through, x)
                    ct = through @ case["weights"][i]
            found["ct_x"].append(ct)
        return found
    return outputs


def outputs_right(case, got):
    return all(np.allclose(a, b) for a, b in zip(got["y"], dropout_steps(case)["y"], strict=True))


def first_output_right(case, got):
    return np.allclose(got["y"][0], dropout_steps(case)["y"][0])


def first_step_right(case, got):
    return first_output_right(case, got) and np.allclose(got["ct_x"][0], dropout_steps(case)["ct_x"][0])


def only_next_wrong(case, got):
    right = dropout_steps(case)
    return outputs_right(case, got) and np.allclose(got["ct_x"][1], right["ct_x"][1]) and got["next"] != right["next"]


class SegmentCheck(Check):
    exercise = "06.2"
    signatures = [
        gives("backward computes again from the x of another segment: what forward keeps is kept for all segments, in "
              "the class or in a global name. Keep it on self", from_the_last_input),
        gives("a segment goes back through its layers from the first to the last: backward begins with the last one",
              gone_back(order=1)),
        gives("a layer goes back with its own output where it needs its input: (x, mask) is what belongs to it, and y "
              "to the next one", gone_back(saved="output")),
        gives("computed again, every layer of a segment gets the segment's x: it needs the output of the one before",
              gone_back(saved="first")),
        when("the gradients are right, but the generator isn't where it was before backward: whoever draws next gets "
             "numbers that were used already, or skips some", only_next_wrong),
        when("the first step is right, and then the generator is not where it should be: backward must leave rng as it "
             "found it, or the next step's masks are others",
             lambda case, got: first_step_right(case, got) and not outputs_right(case, got)),
        when("forward is right, and backward differentiates another function: computed again, the layers drew other "
             "masks. Set rng back to the state that it had before this segment's first layer",
             lambda case, got: first_output_right(case, got) and not got["same masks"][0]),
        when("forward is right, and backward isn't: rng must go back to the state that it had before the first layer "
             "of this very segment, in its last forward",
             lambda case, got: first_output_right(case, got) and not all(got["same masks"])),
        when("forward is right, and the masks are the same in backward, but what comes back isn't: from the last layer "
             "to the first, each goes back with its own input and mask, and with what the one behind it has given",
             first_output_right),
        when("forward doesn't draw its masks from rng as it stands: the output itself is another one",
             lambda case, got: not first_output_right(case, got)),
    ]
    demands = [
        demand("right, but masks or inputs are kept from forward to backward: keep x and the generator's state, and "
               "draw again", lambda case, got: max(got["kept"]) <= -(-len(case["weights"]) // case["size"]) + 1),
        demand("right, but a layer's forward runs more than twice per step",
               lambda case, got: max(got["forwards"]) <= 2 * len(case["xs"])),
        demand("right, but nothing is computed again in backward: then masks and inputs were kept, if only as copies",
               lambda case, got: min(got["forwards"]) == 2 * len(case["xs"])),
    ]

    def cases(self, rng, ranks):
        found = []
        for n, size in ((9, 3), (7, 2), (4, 4)):
            weights, x, ct = draw_chain(rng, n)
            steps = [(x, ct), (rng.standard_normal(x.shape), rng.standard_normal(ct.shape))]
            found.append({"weights": weights, "xs": [s[0] for s in steps], "cts": [s[1] for s in steps], "size": size,
                          "seed": int(rng.integers(10 ** 6))})
        return found

    def truth(self, case):
        return dropout_steps(case)


# ---------------------------------------------------------------- 06.3

MOST_LAYERS = 2450      # up to which the best length is nowhere further from the root: 57


def best(n, peak=peak_of, among=None, ties=-1):
    every = min(among or range(1, n + 1), key=lambda length: (peak(n, length), ties * length))
    return [every, peak(n, every)]


def by_formula(formula):
    """The answers of somebody who has another formula for the peak."""
    return lambda case: {"result": best(case["n"], formula),
                         "peaks": peaks(case, formula)}


def root(case):
    every = max(1, int(np.sqrt(case["n"])))
    return {"result": [every, peak_of(case["n"], every)], "peaks": peaks(case)}


def up_to_a_number(case, got):
    """The peaks are right, and the length is the best of those up to some number."""
    found, lowest = list(got["result"]), None
    for number in range(1, case["n"]):
        lowest = min(lowest or (case["n"] + 1,), (peak_of(case["n"], number), -number))
        if found == [-lowest[1], lowest[0]]:
            return got["peaks"] == peaks(case)
    return False


def peaks(case, peak=peak_of):
    return [peak(case["n"], every) for every in range(1, case["lengths"] + 1)]


class BestEvery(Check):
    exercise = "06.3"
    integers = ("result", "peaks")      # a length goes into range(), and inputs are counted
    signatures = [
        gives("the peaks are right, but the length n, one segment for all, wasn't looked at",
              lambda case: {"result": best(case["n"], among=range(1, case["n"]) if case["n"] > 1 else None),
                            "peaks": peaks(case)}),
        gives("a segment's first input is its checkpoint, and is counted twice",
              by_formula(lambda n, e: peak_of(n, e) + 1)),
        gives("the peaks are right; of several best lengths the longest was asked for",
              lambda case: {"result": best(case["n"], ties=1), "peaks": peaks(case)}),
        gives("the peaks are right, but the root of n isn't always the best length, only near it", root),
        when("the peaks are right, but the best length is looked for only up to some number, or near the root: from 1 "
             "to n was asked for, and n may be large", up_to_a_number),
        gives("the last segment is counted as if it were as long as the others: while a shorter one is gone through, "
              "fewer inputs are alive; and in the one before it, its checkpoint is gone",
              by_formula(lambda n, e: -(-n // e) + e - 1)),
        gives("the peaks are right, but only lengths that divide n are looked at: the last segment may be shorter than "
              "the others", lambda case: {"result": best(case["n"], among=[
                  every for every in range(1, case["n"] + 1) if case["n"] % every == 0]), "peaks": peaks(case)}),
        gives("the pair is the wrong way round: the length comes first, then its peak",
              lambda case: {"result": best(case["n"])[::-1], "peaks": peaks(case)}),
        gives("only the checkpoints are counted: a segment's other inputs are alive with them",
              by_formula(lambda n, e: -(-n // e))),
        gives("only a segment's inputs are counted: the checkpoints of those before it are alive with them",
              by_formula(lambda n, e: e)),
    ]

    def cases(self, rng, ranks):
        return [{"n": int(n), "lengths": int(n)} for n in (1, 2, 3, 10, 16, 64, 97, 450, *rng.integers(20, 90, 5))] + [
            {"n": MOST_LAYERS, "lengths": 0}]

    def truth(self, case):
        return {"result": best(case["n"]), "peaks": peaks(case)}
