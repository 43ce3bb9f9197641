"""What the answers of chapter 11 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when

from .clipping import (
    by_own,
    clip_case,
    clipped,
    each_unit,
    elements,
    full_parts_left_out,
    norm_of_all,
    padding_counted,
    real,
    squared,
    two_norm,
    up_to_an_empty_one,
    with_a_margin,
)
from .courses import (
    as_even_as_can_be,
    averaged,
    descended,
    every_nth,
    everywhere,
    last_of_its_size,
    neighbours_part,
    only_own_is_new,
    own_parts,
    padded,
    padding_between,
    parameters,
    share_of,
    stepped,
    summed,
    tail_left,
)

FLOAT = 8       # bytes
SLACK = 2048    # of small arrays (drive.held)


def ops(got, name):
    return [call for g in got for call in g.calls if call["op"] == name]


def finished(case, got):
    return all(call["end"] is not None for g in got for call in g.calls)


WAITS = "something was posted and never waited for: until wait() has returned, nobody knows what is in the array"


# ---------------------------------------------------------------- 11.1

def moments(case):
    return 2 * FLOAT * share_of(case[0]["x"].size, len(case))


def each_once(case, got):
    """A reduce-scatter and an all-gather of the padded length per step, and nothing else."""
    whole = FLOAT * len(case) * share_of(case[0]["x"].size, len(case))
    steps = len(case[0]["grads"])
    return all(sorted((c["op"], c["bytes"]) for c in g.calls) ==
               sorted([("all_gather", whole // len(case)), ("reduce_scatter", whole)] * steps) for g in got)


def counted_on(case, got):
    """Whether t begins with the steps of optimizers before this one, a few times as many as are taken here."""
    steps = len(case[0]["grads"])
    later = [stepped(case, clock=lambda t, done=done: t + done) for done in range(steps, 5 * steps, steps)]
    return any(all(np.allclose(g["xs"], xs, rtol=1e-9) for g in got) for xs in later)


class ShardedAdam(Check):
    exercise = "11.1"
    tolerance = 1e-12
    signatures = [
        when(WAITS, lambda case, got: not finished(case, got)),
        gives("x isn't changed: write into x itself, x[...] = … (x = … only gives the name to another array)",
              lambda case: everywhere([case[0]["x"]] * len(case[0]["grads"]), case)),
        gives(lambda case: f"the last {case[0]['x'].size % len(case)} of {case[0]['x'].size} elements are nobody's: "
                           "share is n / N rounded up, and the padding makes the rest of the division", tail_left),
        gives("only each rank's own part is new: the stepped parts were never collected from the others",
              lambda case: only_own_is_new(case, None)),
        gives("each rank has its own part's step, and of the others what they were before it: the parts were collected "
              "before they were stepped", lambda case: only_own_is_new(case, 1)),
        gives("the gradients aren't summed: each rank steps its part with its own gradient",
              lambda case: everywhere(stepped(case, own_parts), case)),
        gives("the gradients are averaged over the ranks, and are {ranks}.000 times too small: the sum was asked for "
              "(eps shows it)", lambda case: everywhere(stepped(case, averaged), case)),
        gives("the state begins anew in each step: m and v must live as long as the optimizer",
              lambda case: everywhere(stepped(case, remembered=lambda grads: grads[-1:]), case)),
        gives("the optimizer begins anew in each step: m, v and t must live as long as it does",
              lambda case: everywhere(stepped(case, remembered=lambda grads: grads[-1:], clock=lambda t: 1), case)),
        gives("m and v go on where another optimizer has stopped: they belong to the object (self), not to the class, "
              "the module or a default argument", lambda case: everywhere(
                  stepped(case, remembered=lambda grads: summed(case) + grads), case)),
        gives("t stays 1: the moments of step t are divided by 1−β₁ᵗ and 1−β₂ᵗ, and the steps aren't counted",
              lambda case: everywhere(stepped(case, clock=lambda t: 1), case)),
        gives("m and v are used as they are: without the division by 1−β₁ᵗ and 1−β₂ᵗ the first steps are wrong",
              lambda case: everywhere(stepped(case, corrected=False), case)),
        when("t, the number of the step, goes on where another optimizer has stopped: it belongs to the object (self), "
             "not to the class or the module", counted_on),
        gives("eps stands under the root: it is added to √v̂", lambda case: everywhere(
            stepped(case, below=lambda root, eps, grown: np.sqrt(root * root + eps)), case)),
        gives("eps is added to √v, before the division by √(1−β₂ᵗ): it is added to √v̂", lambda case: everywhere(
            stepped(case, below=lambda root, eps, grown: root + eps / grown), case)),
        gives("rank r steps another rank's part of x: part r begins at r · share, for the gradients and for x",
              lambda case: everywhere(stepped(case, put=neighbours_part), case)),
        gives("rank r steps the elements r, r+N, r+2N, …, but the collectives cut an array into stretches, one behind "
              "the other", lambda case: everywhere(stepped(case, put=every_nth), case)),
        gives("there is padding between the parameters: the parts differ by an element, each was padded for itself, "
              "and x[...] = whole[:n] takes the zeros along. Pad the end of the whole, then all parts are equally long",
              lambda case: everywhere(stepped(case, put=padding_between), case,
                                      parts=list(as_even_as_can_be(case[0]["x"], len(case))))),
    ]
    demands = [
        demand("x is right, by luck: something was posted and never waited for", finished),
        demand("right, but part() gives a view of x where there is nothing to pad: whoever steps it in place changes "
               "x. A new array was asked for", lambda case, got: not any(g["views"] for g in got)),
        demand("right, but the gradients are all-reduced: a rank needs the sum of its own part alone, and for that a "
               "reduce_scatter sends half as much", lambda case, got: not ops(got, "all_reduce")),
        demand("right, but a step sends more than it must: one reduce_scatter of the gradients and one all_gather of "
               "the stepped parts are all", each_once),
        demand(lambda case, got: f"right, but between two steps a rank keeps {max(g['kept'] for g in got)} bytes of "
                                 f"arrays beside x, where its part of m and v is {moments(case)}: the state of all "
                                 f"{case[0]['x'].size} parameters would be {2 * FLOAT * case[0]['x'].size}, and it "
                                 "must exist once, not once per rank",
               # The rank's part of the parameters or of the gradients may stay too.
               lambda case, got: case[0]["x"].size < 1000 or
               all(g["kept"] <= 1.5 * moments(case) + SLACK for g in got)),
    ]

    def cases(self, rng, ranks):
        found = []
        for n in (1999, 42, 4, 1):      # 42 / 2 is odd: round(n / N + 0.5) would go up to the next even number
            x = 3 * rng.standard_normal(n)
            case = {"x": x, "lr": 0.1, "betas": [0.8, 0.95], "eps": 0.25}
            found.append([case | {"grads": [0.5 + rng.standard_normal(n) for _ in range(4)]} for _ in range(ranks)])
        # A rank without samples has zeros; and where all ranks have them, the moments move x all the same.
        for step, idle in (1, found[1][:1]), (2, found[1]):
            for rank in idle:
                rank["grads"][step][:] = 0.0
        # Another optimizer of as many parameters, with the gradients of the one before.
        found.append([rank | {"x": 3 * rank["x"][::-1]} for rank in found[-1]])
        return found

    def truth(self, case):
        return everywhere(stepped(case), case, parts=list(padded(case[0]["x"], len(case))))


# ---------------------------------------------------------------- 11.2

def asked(case, got):
    """Whether the case is one whose numbers and calls are judged; the other is drawn."""
    return "whole" not in case[0]


def per_pass(case):
    """Forward and backward passes of one unit, in all."""
    return len(case[0]["xs"]) * len(case[0]["shapes"])


def gathers(case, got):
    return max(len(ops([g], "all_gather")) for g in got)


def sent(case, got):
    return [sum(g.sent.values()) for g in got]


def must_send(case):
    shares = sum(shard.size for shard in case[0]["shards"])
    return 3 * FLOAT * (len(case) - 1) * shares * len(case[0]["xs"])


def may_keep(case, rank):
    """Beside parameters, gradients and state: the units' inputs."""
    rows = case[rank]["xs"][-1].shape[0]
    return FLOAT * rows * sum(outputs for _, outputs in case[rank]["shapes"]) + 2 * SLACK


def keeps(got):
    """Of all ranks: what they hold beside parameters, gradients and state when the step is over."""
    return [int(g["stages"]["3"][-1][-1]) for g in got]


def too_much(case, got):
    size = max((inputs + 1) * outputs for inputs, outputs in case[0]["shapes"])
    return (f"right, but after a step a rank still holds {max(keeps(got))} bytes of arrays beside its shards and its "
            f"part of the gradients: the units' inputs are {may_keep(case, 0) - 2 * SLACK}, and a whole layer is "
            f"{FLOAT * size}, so that something of that size is kept: a copy of the parameters, or the whole gradient")


def still_there(case, got):
    if names := [name for g in got for name in g["names"]]:
        return (f"right, but a unit's parameters are never freed: after forward there is still {names[0]}. A view "
                "keeps all of the array alive that it lies in")
    return ("right, but a unit's parameters are never freed: what was gathered is still alive after forward or "
            "backward. Somebody holds it, or a view of it, which keeps all of it alive")


class Unit(Check):
    exercise = "11.2"
    tolerance = 1e-12
    signatures = [
        when(WAITS, lambda case, got: not finished(case, got)),
        gives("the gradients aren't summed: grad is this rank's part of its own samples' gradient, and the others' are "
              "lost", lambda case: descended(case, lambda owns, rank: owns[rank])),
        gives("the gradients are averaged: grad is {ranks}.000 times too small. The sum was asked for",
              lambda case: descended(case, lambda owns, rank: sum(owns) / len(owns))),
        gives("grad adds up from step to step: it is that of the last backward alone",
              lambda case: descended(case, adds_up=True)),
        gives("from the second step on the parameters are old: they were gathered, or copied, once, while the "
              "optimizer writes into shard", lambda case: descended(case, old=True)),
        gives("backward differentiates with another unit's parameters: what forward has gathered into a buffer that "
              "units share is overwritten by those behind. Gather again",
              lambda case: descended(case, backward=last_of_its_size)),
    ]
    demands = [
        demand("the numbers are right, by luck: something was posted and never waited for", finished),
        demand("right, but the gradients are all-reduced, whole, to every rank: a rank needs the sum of its own part "
               "alone, and for that a reduce_scatter sends half as much",
               lambda case, got: not asked(case, got) or not ops(got, "all_reduce")),
        demand(lambda case, got: f"right, but in {per_pass(case)} forward and {per_pass(case)} backward passes of "
                                 f"units only {gathers(case, got)} all-gathers: backward must gather again, for what "
                                 "it uses was kept since forward, and then all units are whole at once",
               lambda case, got: not asked(case, got) or gathers(case, got) >= 2 * per_pass(case)),
        demand(lambda case, got: f"right, but {gathers(case, got)} all-gathers: each of the {2 * per_pass(case)} "
                                 "passes of a unit needs one",
               lambda case, got: not asked(case, got) or gathers(case, got) == 2 * per_pass(case)),
        demand(still_there, lambda case, got: not asked(case, got) or not any(any(g["alive"]) for g in got)),
        demand("right, but a unit's parameters are here twice at a time",
               lambda case, got: not asked(case, got) or all(g["most"] <= 1 for g in got)),
        demand(lambda case, got: f"right, but a rank sends {max(sent(case, got))} bytes where "
                                 f"{must_send(case)} are enough: of each unit and step two all-gathers of the "
                                 "parameters and one reduce_scatter of the gradients",
               lambda case, got: not asked(case, got) or max(sent(case, got)) <= must_send(case)),
        demand("right, but a unit still holds what earlier passes of forward were given: it needs x of the last one "
               "alone, for backward", lambda case, got: not asked(case, got) or not any(g["xs held"] for g in got)),
        demand("right, but after backward a unit still holds a cotangent: nobody needs it any more, and in a deep "
               "network all of them together are as large as all activations",
               lambda case, got: not asked(case, got) or not any(g["cts held"] for g in got)),
        demand(too_much, lambda case, got: asked(case, got) or max(keeps(got)) <= may_keep(case, 0)),
    ]

    def cases(self, rng, ranks):
        found = []
        for shapes, rows in (([[6, 5], [5, 5], [5, 5], [5, 3]], (3, 4, 2)), ([[3, 4], [4, 1]], (2, 0, 3))):
            found.append(self.draw(rng, ranks, shapes, rows, steps=3))
        return [*found, self.draw(rng, ranks, [[40, 40]] * 4, (2, 2, 2), steps=1, drawn=True)]

    def draw(self, rng, ranks, shapes, rows, steps, drawn=False):
        whole = [rng.standard_normal((i + 1) * o) / np.sqrt(i) for i, o in shapes]
        shards = [padded(w, ranks) for w in whole]
        found = []
        for rank in range(ranks):
            found.append({"shapes": shapes, "shards": [s[rank] for s in shards], "lr": 0.2,
                          "xs": [rng.standard_normal((rows[rank], shapes[0][0])) for _ in range(steps)],
                          "cts": [rng.standard_normal((rows[rank], shapes[-1][1])) for _ in range(steps)]}
                         | ({"whole": whole} if drawn else {}))
        return found

    def truth(self, case):
        """As one process: all ranks' samples in one batch."""
        if "whole" in case[0]:
            return [{} for _ in case]
        together = {name: [np.concatenate(parts) for parts in zip(*(rank[name] for rank in case), strict=True)]
                    for name in ("xs", "cts")}
        alone = [case[0] | together | {"shards": [w[:(i + 1) * o] for w, (i, o) in
                                                  zip(parameters(case), case[0]["shapes"], strict=True)]}]
        return cut_again(case, descended(alone)[0])

    def picture(self, runs, path):
        from .drawing import stages
        case, got = runs[max(runs)][-1]
        return stages(got[0]["stages"], len(got), path)


def cut_again(case, one):
    """The outputs of one process that had everything, as the ranks have them."""
    ends = np.cumsum([rank["xs"][0].shape[0] for rank in case])[:-1]
    rows = {name: [np.split(values, ends) for values in one[name]] for name in ("ys", "cts")}
    parts = {name: [[padded(values, len(case)) for values in step] for step in one[name]]
             for name in ("grads", "shards")}
    return [{name: [step[rank] for step in steps] for name, steps in rows.items()}
            | {name: [[unit[rank] for unit in step] for step in steps] for name, steps in parts.items()}
            for rank in range(len(case))]


# ---------------------------------------------------------------- 11.3

class Clip(Check):
    exercise = "11.3"
    tolerance = 1e-12
    same_bits = ("norm",)
    signatures = [
        when("the norm has the digits of float32 only: the sum of squares was one on the way. The parts are float64",
             lambda case, got: all(g["norm"] == float(np.float32(g["norm"])) != norm_of_all(case)(0) for g in got)),
        gives("a gradient that is hardly longer than max_norm isn't scaled: at most max_norm was asked for, without a "
              "margin", lambda case: clipped(case, norm_of_all(case), with_a_margin)),
        gives("each rank compares the norm of its own parts with max_norm: the gradient's is to be compared, so that "
              "all scale or none does", lambda case: by_own(case, decides=True)),
        gives("the norm is everybody's, but each rank's factor is of its own parts: one factor for all",
              lambda case: by_own(case, divides=True)),
        gives("each rank goes by the norm of its own parts: the gradient's length is that of all ranks' parts together",
              lambda case: clipped(case, lambda rank: two_norm(real(case[rank])))),
        gives("the ranks' norms are added up: lengths don't add, their squares do",
              lambda case: clipped(case, norm_of_all(case, lambda rank: two_norm(real(rank)), float))),
        gives("the parts' norms are added up: lengths don't add, their squares do", lambda case: clipped(
            case, norm_of_all(case, lambda rank: sum(np.linalg.norm(p) for p in real(rank)), float))),
        when("what stands behind a part may be nan, and 0 · nan is nan: leave it out of the sum, by p[:n], rather than "
             "multiply it by 0", lambda case, got: any(np.isnan(p).any() for rank in case for p in rank["parts"])),
        *(gives("the padding is counted: only the first sizes[i] elements of parts[i] are the gradient's", way)
          for way in (padding_counted, lambda case: padding_counted(case, lambda norm, most: min(most / norm, 1.0)))),
        gives("that is the largest element, not the length: the root of the sum of squares was asked for",
              lambda case: clipped(case, lambda rank: max(
                  float(np.abs(p).max(initial=0)) for other in case for p in real(other)))),
        gives("that is the square of the norm: the root is missing",
              lambda case: clipped(case, norm_of_all(case, root=float))),
        gives("the squares are averaged over the ranks: the norm is √{ranks} times too small",
              lambda case: clipped(case, norm_of_all(case, root=lambda total: np.sqrt(total / len(case))))),
        gives("the square of the norm is compared with max_norm: so gradients that aren't too long are scaled",
              lambda case: clipped(case, norm_of_all(case), squared)),
        when("a max_norm of 0 is taken for none: `if max_norm and …` asks whether it is true, and 0 isn't. Then all of "
             "the gradient becomes 0", lambda case, got: case[0]["max_norm"] == 0),
        gives("a gradient shorter than max_norm was made longer: it stays as it is",
              lambda case: clipped(case, norm_of_all(case), lambda norm, most: most / norm if norm else 1.0)),
        gives("the ranks' norms are averaged: lengths don't add, their squares do", lambda case: clipped(
            case, norm_of_all(case, lambda rank: two_norm(real(rank)), lambda total: total / len(case)))),
        gives("that is the sum of all |g|, the 1-norm: the root of the sum of squares was asked for",
              lambda case: clipped(case, norm_of_all(case, lambda rank: sum(abs(p).sum() for p in real(rank)), float))),
        gives("the squares are averaged over the elements: the gradient's length is the root of their sum",
              lambda case: clipped(case, norm_of_all(case, root=lambda total: np.sqrt(total / elements(case))))),
        gives("each element is clipped by itself, to ± max_norm: the gradient's direction changes. One factor for all",
              lambda case: [{"norm": norm_of_all(case)(0), "clipped": [np.clip(p, -r["max_norm"], r["max_norm"])
                                                                       for p in real(r)]} for r in case]),
        gives("the gradient ends with length 1: the factor is max_norm / norm, not 1 / norm", lambda case: clipped(
            case, norm_of_all(case), lambda norm, most: 1 / norm if norm > most else 1.0)),
        gives("each unit is clipped by itself, to max_norm: the gradient is all units together, and its direction "
              "changes. One factor for all", each_unit),
        gives("1e-6 is added to the norm before dividing (PyTorch does it): the gradient ends a little shorter than "
              "max_norm, and nothing needs it, since nothing is divided where the norm is 0", lambda case: clipped(
                  case, norm_of_all(case), lambda norm, most: min(1.0, most / (norm + 1e-6)))),
        gives("the parts behind an empty one aren't scaled: a rank may have nothing of one unit, and something of the "
              "next", up_to_an_empty_one),
        *(gives("parts without padding are left out: p[:-k] is nothing at all where k is 0. p[:n] is right for all of "
                "them", lambda case, scaled=scaled: full_parts_left_out(case, scaled)) for scaled in (True, False)),
        gives("each part is clipped by itself: the gradient's direction changes. One factor for all",
              lambda case: [{"norm": norm_of_all(case)(0), "clipped": [
                  p * min(1.0, r["max_norm"] / (two_norm([p]) or 1.0)) for p in real(r)]} for r in case]),
        gives("the gradient isn't changed: write into the arrays of parts, p *= … or p[:n] *= … (p = p * … gives the "
              "name to another array)", lambda case: clipped(case, norm_of_all(case), lambda norm, most: 1.0)),
        gives("only the last unit is counted: the parts' squares are added up", lambda case: clipped(
            case, norm_of_all(case, lambda rank: two_norm(real(rank)[-1:]) ** 2))),
        gives("the gradient is right, but the norm before clipping was asked for, for the log: that is the one after",
              lambda case: [answer | {"norm": min(answer["norm"], case[0]["max_norm"])}
                            for answer in clipped(case, norm_of_all(case))]),
    ]
    demands = [
        demand(lambda case, got: f"right, but {len(got[0].calls)} messages of {sum(c['bytes'] for c in got[0].calls)} "
                                 "bytes in all: one number per rank is enough, added up over the parts first",
               lambda case, got: all([c["bytes"] for c in g.calls] == [FLOAT] for g in got)),
    ]

    def cases(self, rng, ranks):
        # Of the second the length is below max_norm, its square above; of the sixth each rank's is below; of the eighth
        # it is hardly above. What never was written may stand behind a part.
        return [clip_case(rng, ranks, *how) for how in (
            ([(3, 0, 6), (5, 7, 4)], 7.0, lambda length: 1.5),
            ([(9, 2, 5), (4, 8, 1)], 5.0, lambda length: 1.25 * length),
            ([(6, 0, 0), (1, 0, 0)], 2.5, lambda length: 0.75),
            ([(2, 3, 1)], 0.0, lambda length: 1.0),
            ([(3, 1, 2)], 0.5, lambda length: 1.25 * length),
            ([(4, 2, 5), (1, 3, 2)], 3.0, lambda length: 0.85 * length),
            ([(2, 4, 1)], 1.5, lambda length: 0.0),
            ([(3, 2, 4)], 0.5, lambda length: (1 - 1e-9) * length),
            ([(4, 1, 3), (2, 5, 2)], 2.0, lambda length: 0.5 * length, np.nan))]

    def truth(self, case):
        length = np.sqrt(np.sum(np.concatenate([p for rank in case for p in real(rank)]) ** 2))
        return clipped(case, lambda rank: float(length))
