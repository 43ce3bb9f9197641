"""Pipeline schedules, as values: for each rank, the list of what it does, in order.

    print(drawn(one_forward_one_backward(3, 5)))

    rank 0  0 1 2 . . . . 0 0 3 1 1 4 2 2 . 3 3 . 4 4       a digit: this micro-batch, forward one cell,
    …                                                       backward two; a point: the rank waits (the bubble)

What the steps are, and which rank has which stages: schedule_steps.py. Those that repeat one pattern, zb_v, v_half and
v_min, are made in schedule_blocks.py; DualPipeV, whose ranks do two steps at a time, in schedule_dual.py. In the others
a rank's list is written as phases, (how many times, what): [(2, "F"), (3, "FB")] is F0 F1 F2 B0 F3 B1 F4 B2 … Each
letter takes the next step of its kind, and none where there is none left.

    print(drawn(one_forward_one_backward(2, 2, slices=3)))

    rank 0  0.0 0.1 0.2 1.0 ... ... 0.2 0.2 1.1 0.1 0.1 1.2 0.0 0.0 ... 1.2 1.2 1.1 1.1 1.0 1.0
    rank 1  ... 0.0 0.1 0.2 0.2 0.2 1.0 0.1 0.1 1.1 0.0 0.0 1.2 1.2 1.2 1.1 1.1 1.0 1.0 ... ...

Micro-batches may come in s slices of their sequences (slices.py). Forwards go through them in order, backwards from the
last to the first; so s - 1 forwards more come before the first backward. Where all slices take equally long, ranks wait
as if there were m·s micro-batches (of zb_h1 where (m-1)·s ≥ p-1, of zb_h2 twice that), and hold as many slices more.
"""

from itertools import islice
from typing import NamedTuple

from ...autodiff import input_first
from .schedule_blocks import BLOCKS, of_block
from .schedule_dual import dual_pipe_v
from .schedule_steps import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Overlapped,
    Step,
    check_sizes,
    combined,
    looping,
    most_held,
    needs,
    placement_of,
    results,
    slices_of,
)

NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: input_first.INPUT, WEIGHT: input_first.WEIGHTS}


class Played(NamedTuple):
    """A schedule in time.

    spans     spans[rank]: (begin, end, Step), in order; those of a combined step share its time as they would alone
    end       when the last rank is through
    bubble    the share of all ranks' time in which they wait
    period    the longest time from a rank's first step to its last. Where ranks go on to the next batch without waiting
              for each other, batches follow at this distance
    steady_bubble  the bubble then: the share of `period` in which a rank waits, the mean over the ranks
    live      by rank: the greatest number of micro-batches (of one stage), or of their slices, whose activations it
              holds at once, from F to B or I
    waiting   by rank: the greatest number of those that wait for W at once, for which it holds what W needs
    held      by rank: the greatest number of both together
    """

    spans: list
    end: float
    bubble: float
    period: float
    steady_bubble: float
    live: list
    waiting: list
    held: list


# ---------------------------------------------------------------- schedules

def gpipe(ranks, micro_batches, slices=1):
    """All forwards, then all backwards. Bubble (p-1)/(m·s+p-1); every rank holds m micro-batches.

    Sources: Huang et al. 2019, "GPipe"; with slices, Li et al. 2021, "TeraPipe".
    """
    check_sizes(ranks, micro_batches, slices)
    m = micro_batches
    return [_row([(m * slices, "F"), (m * slices, "B")], m, rank, slices) for rank in range(ranks)]


def one_forward_one_backward(ranks, micro_batches, slices=1):
    """1F1B: as soon as a backward can be done, it is. The bubble of GPipe, but rank r holds min(m, p-r) micro-batches;
    where they come in s slices, min(m·s, p-r + s-1) of these.

    Sources: Narayanan et al. 2019, "PipeDream" (here with the flush of 2021's "Memory-efficient pipeline-parallel DNN
    training": all of a batch sees the same weights); with slices, Sun et al. 2024, "Seq1F1B".
    """
    check_sizes(ranks, micro_batches, slices)
    m = micro_batches
    return [_row([(ranks - rank + slices - 2, "F"), (m * slices, "FB")], m, rank, slices) for rank in range(ranks)]


def interleaved(ranks, micro_batches, chunks, slices=1):
    """1F1B of several stages per rank: the bubble is that of 1F1B divided by `chunks`, (p-1)/(v·m·s+p-1), for v times
    the messages. The number of ranks must divide m·s. Source: Narayanan et al. 2021, "Efficient large-scale language
    model training on GPU clusters using Megatron-LM".
    """
    check_sizes(ranks, micro_batches, slices)
    if chunks < 1:
        raise ValueError(f"interleaved: chunks is {chunks}; it must be at least 1")
    if chunks == 1:
        return one_forward_one_backward(ranks, micro_batches, slices)
    if micro_batches * slices % ranks:
        raise ValueError(f"interleaved: {ranks} ranks must divide the {micro_batches} micro-batches"
                         + f", or their {micro_batches * slices} slices" * (slices > 1))
    forth, back = _pieces(micro_batches, slices)
    groups, rows = range(0, len(forth), ranks), []
    # Groups of `ranks` pieces go through the first chunk, then through the second, …
    order = [(k, c, j) for g in groups for c in range(chunks) for k, j in forth[g:g + ranks]]
    again = [(k, c, j) for g in groups for c in reversed(range(chunks)) for k, j in back[g:g + ranks]]
    place = {piece: i for i, piece in enumerate(order)}
    ahead = max(place[piece] - i for i, piece in enumerate(again))      # (chunks - 1) · ranks, without slices
    for rank, stages in enumerate(looping(ranks, chunks)):
        steps = {kind: [Step(kind, k, stages[c], j) for k, c, j in pieces]
                 for kind, pieces in ((FORWARD, order), (BACKWARD, again))}
        rows.append(_phases([(2 * (ranks - rank - 1) + ahead, "F"), (len(order), "FB")], steps))
    return rows


def zb_h1(ranks, micro_batches, slices=1):
    """ZB-H1: 1F1B whose rank r leaves r weight gradients for later. What others wait for comes earlier, and W fills the
    end, where 1F1B waits. With times T_F, T_I, T_W the ranks wait for

        (p-1)·(T_F + T_I - T_W)  each, of 1F1B's (p-1)·(T_F + T_I + T_W)        where T_W ≤ T_I ≤ T_F and m ≥ p
        (p-1)·(T_F + max(0, T_I - T_W)) + max(0, p-m)·min(T_I, T_W)             where T_I ≤ T_F, any m
        (p-1)·max(T_I, T_F + max(0, T_I - T_W))                                 at any times, where m ≥ p

    A rank holds min(m, p-r) micro-batches as in 1F1B, and what min(m, r+1) weight gradients need: of no more than
    min(m, p) micro-batches together. Source: Qi et al. 2023, "Zero bubble pipeline parallelism".
    """
    check_sizes(ranks, micro_batches, slices)
    m = micro_batches
    return [_row([(ranks - rank + slices - 2, "F"), (rank, "FI"), (m * slices, "FIW")], m, rank, slices)
            for rank in range(ranks)]


def zb_h2(ranks, micro_batches, slices=1):
    """ZB-H2: twice as many forwards ahead, and twice as many weight gradients late, as in ZB-H1. Each rank is at work
    from its first step to its last, if T_F = T_I = T_W and m ≥ 2p-1, and rank r begins and ends r·T_F after rank 0:

        waiting within `period`     (p-1)·(T_F + T_I - 2·T_W)                   where T_W ≤ T_I ≤ T_F and m ≥ 2p-1

    Rank r holds min(m, 2(p-r)-1) micro-batches, and what min(m, 2r+1) weight gradients need: of no more than 2p-1
    together, about twice ZB-H1's. Pipeline says what the next batch waits for here. Source: Qi et al. 2023.
    """
    check_sizes(ranks, micro_batches, slices)
    m = micro_batches
    return [_row([(2 * (ranks - rank - 1) + slices - 1, "F"), (2 * rank, "FI"), (m * slices, "FIW")], m, rank, slices)
            for rank in range(ranks)]


def zb_v(ranks, micro_batches):
    """ZB-V: two stages per rank, placed as a V, so that the rank that ends the forward pass begins backward at once.
    With T_F = T_I = T_W and m ≥ 2p-1 each rank is at work from its first step to its last, as in ZB-H2, and holds no
    more than 2p halves, p micro-batches, W's included: 1F1B's memory, on every rank.

    The turn of the V sends nothing. Sources: Qi et al. 2023; and 2024, "Pipeline parallelism with controllable memory".
    """
    return of_block(BLOCKS["zb-v"], ranks, micro_batches)


def v_half(ranks, micro_batches):
    """V-Half: a V as zb_v's, with about half its memory: every rank holds 2·⌊(p+2)/2⌋ halves of a micro-batch, W's
    included. With T_F = T_I = T_W of a half, where 1F1B's ranks wait for 6(p-1)·T_F, these wait for about half of it:

        (3p-7)·T_F for even p, ⌊(13p-17)/4⌋·T_F for odd p       where p ≥ 3 and m ≥ 2p

    At other times its ranks wait at the ends alone, as long as T_W + 2·T_I ≥ 2·T_F and T_W + 2·T_F ≥ 2·T_I. Source: Qi
    et al. 2024; the two formulas are what play() gives up to p = 33.
    """
    return of_block(BLOCKS["v-half"], ranks, micro_batches)


def v_min(ranks, micro_batches):
    """V-Min: with about a third, 2·⌊(p+4)/3⌋ halves. The ranks wait for about two thirds of what 1F1B's do:

        (4p-5)·T_F, and (4p-7)·T_F where 3 divides p            where p ≥ 3, m ≥ 2p and T_F = T_I = T_W

    Its steps follow close on each other: where T_F, T_I and T_W differ, it waits for more, in every interval. Source:
    Qi et al. 2024; the formulas as above.
    """
    return of_block(BLOCKS["v-min"], ranks, micro_batches)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zb-h1": zb_h1,
             "zb-h2": zb_h2, "zb-v": zb_v, "v-half": v_half, "v-min": v_min, "dualpipev": dual_pipe_v}
V_SHAPED = (*BLOCKS, "dualpipev")       # with two stages per rank
SLICED = tuple(name for name in SCHEDULES if name not in V_SHAPED)      # whose sequences may come in slices
DRAWABLE = 50_000       # steps, about, of what is drawn or planned: half a minute at most


def check_drawable(name, ranks, micro_batches, chunks=1, slices=1):
    """ValueError for a schedule that is too large to be drawn or planned: its lists, and the time that playing them
    takes, grow with the product."""
    stages = 2 if name in V_SHAPED else chunks if name == "interleaved" else 1
    pieces = micro_batches * max(1, slices)
    if min(ranks, micro_batches) > 0 and (size := ranks * stages * (ranks + pieces)) > DRAWABLE:
        what = "micro-batches" if slices == 1 else "slices"
        raise ValueError(f"{name} of {ranks:,} ranks with {stages:,} stage{'s' * (stages > 1)} each and "
                         f"{pieces:,} {what}: ranks · stages · (ranks + {what}) is {size:,}, and "
                         f"what is played step by step has at most {DRAWABLE:,}: take fewer")


def schedule_of(name, ranks, micro_batches, chunks=1, slices=1):
    """One of SCHEDULES by its name; chunks: the stages per rank, of interleaved; slices: of each micro-batch, of those
    in SLICED. ValueError for another name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown: take one of {', '.join(SCHEDULES)}")
    if slices != 1 and name not in SLICED:
        raise ValueError(f"schedule {name!r} has no slices, and {slices} are wanted: leave them out, or take one of "
                         f"{', '.join(SLICED)}")
    return SCHEDULES[name](ranks, micro_batches, *([chunks] if name == "interleaved" else []),
                           **({} if slices == 1 else {"slices": slices}))


def _pieces(micro_batches, slices):
    """All (micro-batch, slice), in the order of forwards, and in that of backwards."""
    return ([(k, j) for k in range(micro_batches) for j in order] for order in (range(slices), range(slices)[::-1]))


def _row(phases, micro_batches, stage, slices):
    """The steps of a rank that has one stage."""
    forth, back = _pieces(micro_batches, slices)
    return _phases(phases, {kind: [Step(kind, k, stage, j) for k, j in (forth if kind == FORWARD else back)]
                            for kind in KINDS})


def _phases(phases, steps):
    """[Step] of [(times, letters)], each letter the next of steps[letter]."""
    rest = {letter: iter(queue) for letter, queue in steps.items()}
    return [step for times, letters in phases for _ in range(times) for letter in letters
            for step in islice(rest[letter], 1)]


# ---------------------------------------------------------------- in time

def play(schedule, forward=1.0, backward=2.0, send=0.0, weight=None, both=None, links=()):
    """A Played: every rank does its steps in order, each as soon as what it needs is there.

    forward, backward   time of a step, of one stage
    send                time from the end of a step until the next stage has its result; the sender goes on meanwhile
    weight              W's part of the time of backward (default: half); I's is the rest
    both                time of a combined step, which begins when everything for its two halves is there, and after
                        which the results of both are (default: forward + backward, so that nothing is hidden)
    links               as needs takes them
    ValueError where the ranks would wait for each other for ever, or a step is missing, doubled or of no stage.
    """
    ranks, placement, slices = len(schedule), placement_of(schedule), slices_of(schedule)
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    weight = backward / 2 if weight is None else weight
    if not 0 <= weight <= backward:
        raise ValueError(f"play: W's time {weight} must lie between 0 and that of backward, {backward}")
    took = {FORWARD: forward, BACKWARD: backward, INPUT: backward - weight, WEIGHT: weight}
    share = 1.0 if both is None else both / (forward + backward)
    _check_complete(schedule, placement)
    rows = [*map(combined, schedule)]
    done, free, at, spans = {}, [0.0] * ranks, [0] * ranks, [[] for _ in schedule]
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                steps = row[at[rank]]
                wanted = [need for step in steps for need in needs(step, len(rank_of) - 1, links, slices)]
                if any(need not in done for need in wanted):
                    break
                ready = [done[need] + (0.0 if rank_of[need[1]] == rank else send) for need in wanted]
                free[rank] = max([free[rank], *ready])
                for step in steps:
                    begin = free[rank]
                    free[rank] += took[step.kind] * (share if len(steps) > 1 else 1.0)
                    spans[rank].append((begin, free[rank], step))
                done |= {result: free[rank] for step in steps for result in results(step)}
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [f"rank {rank} before {' '.join(map(str, row[at[rank]]))}" for rank, row in enumerate(rows)
                     if at[rank] < len(row)]
            raise ValueError(f"the ranks of this schedule wait for each other: {', '.join(stuck)}")
    end = max(free)
    period = max(row[-1][1] - row[0][0] for row in spans)
    busy = sum(e - b for row in spans for b, e, _ in row) / ranks
    return Played(spans, end, 1 - busy / end, period, 1 - busy / period,
                  *map(list, zip(*map(most_held, schedule), strict=True)))


def _check_complete(schedule, placement):
    for what, place in (("micro-batches", 1), ("slices", 3)):
        found = {step[place] for step in schedule[0]}
        if found != set(range(len(found))):
            raise ValueError(f"a schedule's {what} are 0, 1, …; this one has {sorted(found)}")
    pieces = {(step.micro_batch, step.slice) for step in schedule[0]}
    if odd := sorted({step.kind for row in schedule for step in row} - set(KINDS)):
        raise ValueError(f"a schedule's steps are of kinds {', '.join(KINDS)}; this one has {', '.join(map(str, odd))}")
    for rank, row in enumerate(schedule):
        # Where backward is cut in two for a micro-batch, both of its parts must be there, and the whole must not.
        cut = {step[1:] for step in row if step.kind in (INPUT, WEIGHT)}
        wanted = {Step(kind, k, s, j) for k, j in pieces for s in placement[rank]
                  for kind in (FORWARD, *((INPUT, WEIGHT) if (k, s, j) in cut else (BACKWARD,)))}
        if len(row) != len(set(row)) or set(row) != wanted:
            wrong = sorted(str(step) for step in set(row) ^ wanted) or sorted(str(s) for s in row if row.count(s) > 1)
            raise ValueError(f"rank {rank} of this schedule doesn't do every forward and backward once: "
                             f"{', '.join(wrong)}")


def label(step, stages, slices=1):
    """A step as a few letters, "F0", or "F0.2" of a slice; in small letters that of the second of a rank's stages,
    "f0", and with a prime more that of each further one, "f0'"."""
    chunk = stages.index(step.stage)
    kind = step.kind.lower() if chunk else step.kind
    return f"{kind}{step.micro_batch}" + f".{step.slice}" * (slices > 1) + "'" * (chunk - 1)


def drawn(schedule, forward=1, backward=2, weight=1, both=None):
    """The schedule as text, a cell per unit of time: the micro-batch's number, and its slice's behind a point where it
    has several, or points where a rank waits. Where
    backward is cut in two, or ranks have several stages, each number has its step's letter (label). A combined step's
    cells are joined by "&"."""
    played, placement = play(schedule, forward, backward, weight=weight, both=both), placement_of(schedule)
    lettered = len(sum(placement, [])) > len(schedule) or any(step.kind == WEIGHT for row in schedule for step in row)
    slices, lines = slices_of(schedule), []
    size = max(len(label(step, own, slices)[not lettered:])
               for row, own in zip(schedule, placement, strict=True) for step in row)
    for rank, (spans, own) in enumerate(zip(played.spans, placement, strict=True)):
        cells, gaps, joined = ["." * size] * round(played.end), [" "] * round(played.end), False
        for begin, end, step in spans:
            first, last, joins = round(begin), round(end), isinstance(step, Overlapped)
            cells[first:last] = [label(step, own, slices)[not lettered:].rjust(size)] * (last - first)
            if joins or joined:     # with the next of this step's cells, and of its F's last with its B's first
                gaps[first:last - 1 + joins] = ["&"] * (last - 1 + joins - first)
            joined = joins
        lines.append(f"rank {rank}  {''.join(map(''.join, zip(cells, gaps, strict=True))).rstrip()}")
    return "\n".join(lines)
