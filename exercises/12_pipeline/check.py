"""What the answers of chapter 12 are tried with, and the mistakes that are known."""

from itertools import pairwise

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.pictures import message_arrows

from . import reference, rules
from .timeline import draw_schedules

# ---------------------------------------------------------------- 12.1


class Schedules(Check):
    exercise = "12.1"
    demands = [demand(lambda case, got, name=name, rule=rule: rule(name, case, got[name]),
                      lambda case, got, name=name, rule=rule: rule(name, case, got[name]) is None)
               for name, found in rules.RULES.items() for rule in found]

    def cases(self, rng, ranks):
        fixed = [(4, 8), (3, 5), (2, 4), (4, 2), (1, 3), (5, 5), (3, 1), (6, 20), (1, 1)]
        drawn = [(int(rng.integers(2, 8)), int(rng.integers(1, 16))) for _ in range(4)]
        return [{"stages": stages, "micro_batches": count} for stages, count in fixed + drawn]

    def truth(self, case):
        return {}      # rules.py judges: more than one schedule is right

    def picture(self, runs, path):
        case, got = runs[1][0]
        return draw_schedules(got, path)


# ---------------------------------------------------------------- 12.2

def forwards(inputs):
    """The micro-batches in the order in which a rank's steps go forward: number of the forward → micro-batch."""
    return [k for kind, k in inputs["steps"] if kind == "F"]


def as_listed(case, got):
    """Whether all ranks have gone forward and back in turns as their steps say: else nobody knows which was which."""
    return all([kind for kind, *_ in rank["events"]] == [kind for kind, _ in inputs["steps"]]
               for inputs, rank in zip(case, got, strict=True))


def close(came, total):
    return abs(total - came) <= 1e-9 * (1 + abs(total))


def another_came(case, got):
    """(rank, kind, micro-batch, the one whose message came in its place), or None."""
    if not as_listed(case, got):
        return None
    right = reference.arrivals(case)
    for rank, outputs in enumerate(got):
        of = forwards(case[rank])
        for kind, number, came, *_ in outputs["events"]:
            near = [k for k, total in enumerate(right[kind][rank]) if close(came, total)]
            if near and of[number] not in near:
                return rank, kind, of[number], near[0]
    return None


def strange(case, got):
    """(rank, kind, [what came / what should have]) of the first arrivals, in the order in which stages depend on each
    other, that aren't what they should be; or None."""
    if not as_listed(case, got):
        return None
    right = reference.arrivals(case)
    for kind, ranks in (("F", range(len(case))), ("B", reversed(range(len(case))))):
        for rank in ranks:
            of = forwards(case[rank])
            pairs = [(came, right[kind][rank][of[number]]) for which, number, came, *_ in got[rank]["events"]
                     if which == kind]
            if not all(close(*pair) for pair in pairs):
                return rank, kind, [came / total for came, total in pairs]
    return None


def other_labels(case, got):
    """Whether the last stage begins its backwards with something else than a multiple of the loss's gradient."""
    rank, kind, ratios = strange(case, got)
    return (rank, kind) == (len(case) - 1, "B") and not np.allclose(ratios, ratios[0])


def not_what_was_sent(case, got):
    rank, kind, _ = strange(case, got)
    return (rank, kind) not in ((0, "F"), (len(case) - 1, "B"))


def unused(case, got):
    rank, kind, _ = strange(case, got)
    what, where = ("forward gets isn't what the stage before", "goes into it") if kind == "F" else \
        ("backward gets isn't what the stage behind", "is its dy")
    return (f"rank {rank}: what stage.{what} has sent. Is the array into which the message was received the one that "
            f"{where}, as it came?")


def swapped(case, got):
    rank, kind, expected, came = another_came(case, got)
    what, side, there = ("activation", "before", rank - 1) if kind == "F" else ("gradient", "behind", rank + 1)
    orders = [[k for step, k in case[one]["steps"] if step == kind] for one in (rank, there)]
    why = ("messages are sent and received in one order here, so an array was overwritten while its message was under "
           "way: it may not change before work.wait()" if orders[0] == orders[1] else f"the stage {side} it does them "
           "in another order, and messages without a tag of their own are received in the order in which they were "
           "sent. (If they have one: was the array overwritten before work.wait()?)")
    return f"rank {rank} has taken the {what} of micro-batch {came} for that of micro-batch {expected}: {why}"


def changed(name):
    return lambda case, got: any(array == name for rank in got for *_, array in rank["events"])


def other_context(case, got):
    """Whether a backward has gone through what another micro-batch has kept."""
    return as_listed(case, got) and any(
        forwards(inputs)[number] != k for inputs, rank in zip(case, got, strict=True)
        for (_, number, *_), (kind, k) in zip(rank["events"], inputs["steps"], strict=True) if kind == "B")


def unstepped(got):
    """The ranks whose optimizer hasn't stepped."""
    return [rank for rank, outputs in enumerate(got) if outputs["optimizer_steps"] == 0]


def in_order(case, got):
    """Whether each rank has done its steps as they were listed."""
    return all([[kind, forwards(inputs)[number]] for kind, number, *_ in rank["events"]] == inputs["steps"]
               for inputs, rank in zip(case, got, strict=True))


def neighbours(case, rank):
    return (rank > 0) + (rank < len(case) - 1)


def count(case):
    return sum(reference.sizes(case))


def micro(case):
    return len(reference.sizes(case))


def at_every_stage(case):
    """The gradient is divided once more whenever it has gone through a stage."""
    n = count(case)
    return reference.weighted(case, lambda k, rank: n ** -float(len(case) - rank)) if len(case) > 1 else None


def one_of(which):
    """Hypothesis: of all gradients only one micro-batch's counts on each rank, the first or last that went back."""
    def outputs(case):
        chosen = [[k for kind, k in inputs["steps"] if kind == "B"][which] for inputs in case]
        return reference.weighted(case, lambda k, rank: (k == chosen[rank]) / count(case), lambda k: 1 / count(case))
    return outputs


def outputs_of_a_sample(case):
    return len(case[-1]["bias"])


def only_losses(case, got):
    """Whether nothing is wrong but what the ranks before the last return."""
    right = reference.whole(case)
    return all(np.allclose(a, b) for rank, other in zip(got, right, strict=True)
               for a, b in zip(rank["grads"], other["grads"], strict=True)) \
        and np.allclose(got[-1]["mean_loss"], right[-1]["mean_loss"]) \
        and any(rank["mean_loss"] is not None for rank in got[:-1])


def told(case):
    """What the sizes of the micro-batches are, in words."""
    return f"the micro-batches hold {', '.join(map(str, reference.sizes(case)))} samples"


class RunSchedule(Check):
    exercise = "12.2"
    signatures = [
        when("stage.step was never called: the gradients are complete, and the parameters are what they were",
             lambda case, got: all(rank["optimizer_steps"] == 0 for rank in got)),
        when(lambda case, got: f"stage.step was never called on rank {', '.join(map(str, unstepped(got)))}: every rank "
                               "has layers of its own to step", lambda case, got: unstepped(got)),
        when(lambda case: f"the optimizer has stepped {micro(case)} times, after every micro-batch: the later ones go "
                          "through other parameters than the first. Add the gradients up, and step once, at the end",
             lambda case, got: micro(case) > 1 and all(rank["optimizer_steps"] == micro(case) for rank in got)),
        when("x was overwritten while it was kept: all micro-batches are received into one array, and what forward has "
             "kept of the earlier ones is that array. Receive each into a new one",
             changed("x")),
        when("y was overwritten while it was kept: the backward pass needs it, so the gradient that comes back is "
             "received into an array of its own, np.empty_like(y), and y stays as it is", changed("y")),
        when("irecv only posts the array: what comes is in it after work.wait(), and not before",
             lambda case, got: any(call["op"] == "irecv" and call["end"] is None for rank in got
                                   for call in rank.calls)),
        when(lambda case, got: f"stage.step gets {len(got[0]['grads'])} arrays, and the stage has "
                               f"{len(reference.whole(case)[0]['grads'])} parameters: + joins two lists. Add their "
                               "arrays, pair by pair", lambda case, got: micro(case) > 1 and all(
             len(rank["grads"]) == micro(case) * len(right["grads"])
             for rank, right in zip(got, reference.whole(case), strict=True))),
        when("a backward goes through what the forward of another micro-batch has kept",
             other_context),
        when(swapped, lambda case, got: another_came(case, got) is not None),
        gives("not divided: the loss function gives sums, and the mean over the batch's samples was asked for",
              lambda case: reference.weighted(case, lambda k, rank: 1.0)),
        gives(lambda case: "divided by the number of micro-batches: loss gives the sum over their samples, so it is "
                           f"the batch's samples that divide it, {count(case)} here",
              lambda case: reference.weighted(case, lambda k, rank: 1 / micro(case))),
        gives(lambda case: f"divided as if all micro-batches were as long as the first: {told(case)}",
              lambda case: reference.weighted(case, lambda k, rank: 1 / micro(case) / reference.sizes(case)[0])),
        gives(lambda case: f"divided by the samples of the first micro-batch, {reference.sizes(case)[0]}: the mean is "
                           f"over those of the whole batch, {count(case)}",
              lambda case: reference.weighted(case, lambda k, rank: 1 / reference.sizes(case)[0])),
        gives(lambda case: f"divided by the numbers in y: a sample has {outputs_of_a_sample(case)}, but one loss, the "
                           f"sum of all. The mean is over the batch's {count(case)} samples",
              lambda case: reference.weighted(case, lambda k, rank: 1 / count(case) / outputs_of_a_sample(case))),
        gives("each micro-batch is divided by its own samples, and the means are added up: the gradient is about as "
              "many times too large as there are micro-batches. Divide by the samples of the whole batch",
              lambda case: reference.weighted(case, lambda k, rank: 1 / reference.sizes(case)[k])),
        gives(lambda case: f"a mean of means: {told(case)}, and each micro-batch counts alike. Every sample must: "
                           "divide all sums by the samples of the whole batch",
              lambda case: reference.weighted(case, lambda k, rank: 1 / reference.sizes(case)[k] / micro(case))),
        gives("divided twice: by the samples of the whole batch, and then by the number of micro-batches. Their sums "
              "simply add up",
              lambda case: reference.weighted(case, lambda k, rank: 1 / count(case) / micro(case))),
        gives(lambda case: f"divided as if all micro-batches were as long as the last: {told(case)}",
              lambda case: reference.weighted(case, lambda k, rank: 1 / micro(case) / reference.sizes(case)[-1])),
        gives("divided again at every stage: the gradient that arrives from the stage behind is divided already; "
              "only the last stage, which begins with the loss, divides", at_every_stage),
        gives("divided twice by the samples of the batch: the gradient by y is divided already, and what comes of it "
              "is, too", lambda case: reference.weighted(case, lambda k, rank: count(case) ** -2.0,
                                                         lambda k: 1 / count(case))),
        gives("only the gradients of the micro-batch that went back last are left: those of the others were "
              "overwritten, where they should add up", one_of(-1)),
        gives("the loss of the last micro-batch only: those of the others are part of the mean too",
              lambda case: reference.weighted(case, lambda k, rank: 1 / count(case),
                                              lambda k: (k == forwards(case[-1])[-1]) / count(case))),
        gives("the loss of the last micro-batch only, divided by its own samples: the mean is over all of the batch",
              lambda case: reference.weighted(case, lambda k, rank: 1 / count(case), lambda k:
                                              (k == forwards(case[-1])[-1]) / reference.sizes(case)[k])),
        gives("the loss of the first micro-batch only: those of the others are part of the mean too",
              lambda case: reference.weighted(case, lambda k, rank: 1 / count(case),
                                              lambda k: (k == forwards(case[-1])[0]) / count(case))),
        when("right, but for what the ranks before the last return: only the last one sees the loss, and the others "
             "return None", only_losses),
        gives("only the gradients of the micro-batch that went back first count: the others' are never added",
              one_of(0)),
        when("a micro-batch's loss is asked for with other labels than its own: batch[k] is (x, labels) of micro-batch "
             "k, on all ranks", other_labels),
        when(unused, not_what_was_sent),
    ]
    demands = [
        demand("right, but not in the order of the schedule: `steps` says what this rank does, and when", in_order),
        demand("a posted message is never waited for: MPI may still be reading from the array when you are through",
               lambda case, got: all(call["end"] is not None for rank in got for call in rank.calls)),
        demand("right, but what forward has kept is never let go: after the backward of its micro-batch nobody needs "
               "it, and 1F1B is there to hold little",
               lambda case, got: all(used <= 1 for rank in got for _, _, _, used, _ in rank["events"])),
        demand("right, but the list `steps`, or `batch`, isn't what it was: they are the caller's, who runs the next "
               "batch by the same schedule", lambda case, got: all(rank["lists kept"] for rank in got)),
        demand("right, but with more messages than needed: one per micro-batch to each neighbour, and one from it",
               lambda case, got: all(len(rank.calls) == 2 * micro(case) * neighbours(case, r)
                                     for r, rank in enumerate(got))),
    ]

    def cases(self, rng, ranks):
        small = [5, 4, 6, 3] if ranks > 2 else [5, 4, 3][:ranks + 1]
        wide = [3, *[16] * (ranks - 1), 2]
        return [reference.draw(rng, small, [4, 4, 4], "GPipe", reference.all_then_all(ranks, 3)),
                reference.draw(rng, small, [5, 5, 5, 2], "1F1B", reference.by_turns(ranks, 4)),
                reference.draw(rng, small, [2], "1F1B", reference.by_turns(ranks, 1)),
                # no MPI library copies 320,000 bytes aside: who sends without posting waits
                reference.draw(rng, wide, [2600, 2600, 2501], "1F1B", reference.by_turns(ranks, 3)),
                reference.draw(rng, wide[::-1], [2600] * 4, "in other orders",
                               reference.all_then_all(ranks, 4, turn=1))]

    def truth(self, case):
        return reference.whole(case)

    def picture(self, runs, path):
        ranks = max(runs)
        return message_arrows(runs[ranks][1][1], path, lambda message: int(message.dst < message.src),
                              {0: "activations", 1: "gradients"}) + ", of one batch in four micro-batches, by 1F1B"


# ---------------------------------------------------------------- 12.3

def least(case):
    """The least cost of the most costly stage: the smallest limit under which stages filled one after another do."""
    costs = case["costs"]
    limits = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    for limit in limits:
        if limit >= max(costs) and filled(costs, limit) <= case["stages"]:
            return limit


def filled(costs, limit):
    stages, held = 1, 0
    for cost in costs:
        if held + cost > limit:
            stages, held = stages + 1, 0
        held += cost
    return stages


def together(got):
    return [i for stage in got["result"] for i in stage]


def most(case, got):
    return max(sum(case["costs"][i] for i in stage) for stage in got["result"])


def shown(case, got):
    """The cut, in costs."""
    return " | ".join(" ".join(str(case["costs"][i]) for i in stage) for stage in got["result"])


def alike(case, got):
    """Stages of equally many layers."""
    return len({len(stage) for stage in got["result"]}) == 1


def overfull_last(case, got):
    *others, last = (sum(case["costs"][i] for i in stage) for stage in got["result"])
    return others and last > 1.5 * max(others)


def too_costly(case, got):
    """Why a cut isn't the best."""
    why = "look at every place where a stage may begin"
    if alike(case, got):
        why = "stages of equally many layers aren't stages of equal weight"
    elif overfull_last(case, got):
        why = "what the stages before didn't take is left to the last one"
    return (f"the most costly stage costs {most(case, got)}, and {least(case)} is possible: {why} (yours: "
            f"{shown(case, got)})")


class CutLayers(Check):
    exercise = "12.3"
    demands = [
        demand(lambda case, got: f"the result must be a list with a list of layer numbers per stage; for "
                                 f"{len(case['costs'])} layers and {case['stages']} stages it is "
                                 f"{str(got['result'])[:60]}", lambda case, got: isinstance(got["result"], list)),
        demand(lambda case, got: f"{len(case['costs'])} layers in {case['stages']} stages: yours have the layers "
                                 f"{sorted(together(got))}. Each must be there once",
               lambda case, got: sorted(together(got)) == list(range(len(case["costs"])))),
        demand(lambda case, got: f"the layers' order is changed: {together(got)}. A stage takes what the one before it "
                                 "makes, so it is a stretch of the model, and the stretches follow each other",
               lambda case, got: all(a < b for a, b in pairwise(together(got)))),
        demand(lambda case, got: f"a stage is empty: {shown(case, got)} in {case['stages']} stages. Its rank would "
                                 "hand on what it gets, and make the pipeline longer",
               lambda case, got: all(got["result"])),
        demand(lambda case, got: f"{len(got['result'])} stages, where {case['stages']} were asked for: each rank "
                                 "has one",
               lambda case, got: len(got["result"]) == case["stages"]),
        demand(too_costly, lambda case, got: most(case, got) <= least(case) * (1 + 1e-9)),
    ]

    def cases(self, rng, ranks):
        fixed = [([1, 1, 1, 1, 1, 1, 9, 9], 4), ([4, 3, 2, 6, 1, 1, 5], 3), ([9, 1, 1, 1], 3), ([2, 2, 2, 2, 2], 2),
                 ([7, 7, 1, 1, 1, 6], 2), ([5], 1), ([3, 8, 2], 1), ([3, 8, 2], 3), ([1, 20, 1, 1, 1, 1], 4)]
        drawn = [(rng.integers(1, 30, int(rng.integers(6, 18))).tolist(), int(rng.integers(2, 7))) for _ in range(12)]
        free = [([5, 0, 3, 0, 0, 4, 0], 3), ([0, 0, 7, 0], 4)]      # layers without parameters
        # Stages more alike, by squares, by distances from the mean, by halving, and all wait for a more costly one.
        unlike = [([1, 9, 1, 2, 6], 3), ([5, 8, 3, 3, 2, 3, 4], 3)]
        seconds = [((rng.integers(1, 100, 9) / 4096).tolist(), 4) for _ in range(2)]
        near = [10 ** 7 + more for more in (0, 3, 1, 3, 0)]     # the second best is hardly worse
        return [{"costs": costs, "stages": stages} for costs, stages in fixed + unlike + drawn + free
                + seconds + [(near, 3), ([cost / 2 ** 40 for cost in near], 3)]
                + [(rng.integers(1, 100, 40).tolist(), 8)]]

    def truth(self, case):
        return {}      # several cuts may be equally good
