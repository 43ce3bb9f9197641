"""Schedules that repeat a pattern, and hold what one has chosen.

    for row in dates(BLOCKS["v-min"], 2):       # a rank's slots for the first micro-batch; each holds a step
        print(row)

    {('F', 0): 0, ('F', 3): 3, ('I', 3): 4, ('I', 0): 7, ('W', 3): 5, ('W', 0): 8}
    {('F', 1): 1, ('F', 2): 2, ('I', 2): 5, ('I', 1): 6, ('W', 2): 9, ('W', 1): 10}

Every further micro-batch does the same six slots later: three steps in each of a rank's two stages. How long a rank
holds something of a micro-batch, from F to W, divided by this interval, is how many it holds at once: short ways
through the ranks save memory, long ones leave no bubble. In a V each rank has a long hold and a short one, of the same
sum everywhere.

Source: Qi, Wan, Amar and Lin 2024, "Pipeline parallelism with controllable memory", of which are this view, the method
and the slots of V-Half and V-Min.
"""

from itertools import accumulate, count
from typing import NamedTuple

from .schedule_steps import (
    FORWARD,
    HOLDS,
    INPUT,
    WEIGHT,
    Step,
    check_sizes,
    looping,
    most_held,
    needs,
    placement_of,
    results,
    v_shaped,
)


class Block(NamedTuple):
    """A pattern, by its ways through the ranks: forward and backward, or in a V there, back, there and back.

    slots    on each way, from a stage's step to the next stage's
    turns    in a V, from the end of a way to the beginning of the next, forward and backward. Between these it is the
             shortest after which no two steps of a rank meet
    """

    slots: tuple
    turns: tuple = ()


BLOCKS = {"zb-v": Block((4, 2, 4, 2), (3, 3)), "v-half": Block((2, 1, 2, 1), (1, 2)),
          "v-min": Block((1, 1, 1, 1), (1, 1))}     # two stages per rank, placed as a V


def of_block(block, ranks, micro_batches):
    """A schedule for so many ranks: the block for each micro-batch, squeezed."""
    check_sizes(ranks, micro_batches)
    return squeezed(repeated(block, ranks, micro_batches))


def interval_of(block):
    """How many slots later the next micro-batch follows: three steps for each of a rank's stages."""
    return 3 * (len(block.slots) // 2)


def dates(block, ranks):
    """[{(kind, stage): slot}] by rank, of the first micro-batch: F and I as the block says, each W in the next slot
    that the rank has free in every interval. ValueError for a block whose steps meet, or that is none."""
    if (len(block.slots), len(block.turns)) not in ((2, 0), (4, 2)) or min(block.slots + block.turns) < 1:
        raise ValueError(f"a block has two ways and no turns, or as a V four ways and two turns, each of a slot at "
                         f"least; got {block}")
    interval, stages = interval_of(block), ranks * len(block.slots) // 2
    path = [(FORWARD, s) for s in range(stages)] + [(INPUT, s) for s in reversed(range(stages))]
    for turn in range(1, interval + 1):
        slot = dict(zip(path, _along(block, turn, ranks), strict=True))
        rows = [{step: slot[step] for step in path if step[1] in own} for own in _placement(block, ranks)]
        if all(len({at % interval for at in row.values()}) == len(row) for row in rows):
            return [row | _weights(row, interval) for row in rows]
    raise ValueError(f"{block} on {ranks} ranks: steps of a rank fall into one slot of the {interval} of an interval, "
                     "however long the turn from forward to backward: take other slots or turns")


def _placement(block, ranks):
    return v_shaped(ranks) if len(block.slots) == 4 else looping(ranks)


def _along(block, turn, ranks):
    """The slots of the first micro-batch's F and I, in their order; turn: between the two."""
    half = len(block.turns) // 2
    turns = [0, *block.turns[:half], turn, *block.turns[half:]]
    return accumulate(gap for first, between in zip(turns, block.slots, strict=True)
                      for gap in (first, *[between] * (ranks - 1)))


def _weights(row, interval):
    """{(WEIGHT, stage): slot} of a rank, from those of its F and I."""
    taken, found = {at % interval for at in row.values()}, {}
    for (kind, stage), at in row.items():
        if kind == INPUT:
            found[WEIGHT, stage] = next(free for free in count(at + 1) if free % interval not in taken)
            taken.add(found[WEIGHT, stage] % interval)
    return found


def repeated(block, ranks, micro_batches):
    """The schedule that it makes, before it is squeezed: for each micro-batch the same, an interval later."""
    later = [k * interval_of(block) for k in range(micro_batches)]
    return [[Step(kind, k, stage) for _, kind, k, stage in
             sorted((at + later[k], kind, k, stage) for (kind, stage), at in row.items() for k in range(micro_batches))]
            for row in dates(block, ranks)]


def squeezed(schedule):
    """A schedule of F, I and W with no more memory, and less waiting where they take equally long: slot by slot each
    rank does the first of its steps for which everything is there, and room. Behind a rank's last F all W come last.
    ValueError where the ranks would wait for each other for ever."""
    room, last = max(most_held(row)[2] for row in schedule), max(map(max, placement_of(schedule)))
    rest, made, done, held = [list(row) for row in schedule], [[] for _ in schedule], set(), [0] * len(schedule)
    while any(rest):
        places = [_first(row, done, last, room - held[rank]) for rank, row in enumerate(rest)]
        if places == [None] * len(schedule):
            raise ValueError("the ranks of this schedule wait for each other: " + ", ".join(
                f"rank {rank} before {row[0]}" for rank, row in enumerate(rest) if row))
        for rank, place in enumerate(places):
            if place is not None:
                step = rest[rank].pop(place)
                made[rank].append(step)
                done.update(results(step))
                held[rank] += sum(HOLDS[step.kind])
                if step.kind == FORWARD and all(other.kind != FORWARD for other in rest[rank]):
                    rest[rank].sort(key=lambda other: other.kind == WEIGHT)
    return made


def _first(row, done, last, room):
    """The place of the first step that can be done now and leaves what it overtakes its room; None: there is none."""
    held = most = 0
    seen = set()
    for place, step in enumerate(row):
        if (step.kind, step.stage) not in seen:     # the next micro-batch of the same would come no sooner
            seen.add((step.kind, step.stage))
            if most + sum(HOLDS[step.kind]) <= room and all(need in done for need in needs(step, last)):
                return place
        held += sum(HOLDS[step.kind])
        most = max(most, held)
    return None
