"""Pipeline schedules, as values: for each rank, the list of what it does, in order.

    print(drawn(one_forward_one_backward(3, 5)))

    rank 0  0 1 2 . . . . 0 0 3 1 1 4 2 2 . 3 3 . 4 4       a digit: this micro-batch, forward one cell,
    …                                                       backward two; a point: the rank waits (the bubble)

The layers are cut into stages, one after another; a Step is the forward or the backward pass of one micro-batch through
one of them. Which rank has which stages is a value as well, a placement:

    looping(4, 2)   [[0, 4], [1, 5], [2, 6], [3, 7]]    after the last rank comes the first again
    v_shaped(4)     [[0, 7], [1, 6], [2, 5], [3, 4]]    there and back: the first and the last stage share a rank

A backward pass may be cut in two, as in zb_h1. The kinds of steps, by torch's letters (the papers call I "B"):

    F   forward
    B   the whole backward pass, or else
    I   the gradient of the stage's input, which the stage before waits for, and later
    W   the gradients of its weights, which nobody waits for

A rank's list is written as phases, (how many times, what): [(2, "F"), (3, "FB")] is F0 F1 F2 B0 F3 B1 F4 B2 … Each
letter takes the next step of its kind, and none where there is none left; small letters are those of a second stage.
"""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..autodiff import input_first

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = "FBIW"
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: input_first.INPUT, WEIGHT: input_first.WEIGHTS}


class Step(NamedTuple):
    """kind "F", "B", "I" or "W", the micro-batch from 0, and the stage."""

    kind: str
    micro_batch: int
    stage: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


class Played(NamedTuple):
    """A schedule in time.

    spans     spans[rank]: (begin, end, Step), in order
    end       when the last rank is through
    bubble    the share of all ranks' time in which they wait
    period    the longest time from a rank's first step to its last. Where ranks go on to the next batch without waiting
              for each other, batches follow at this distance
    steady_bubble  the bubble then: the share of `period` in which a rank waits, the mean over the ranks
    live      by rank: the greatest number of micro-batches (of one stage) whose activations it holds at once, from F to
              B or I
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


# ---------------------------------------------------------------- placements

def looping(ranks, chunks=1):
    """[[stage]] by rank: rank r has stages r, r + ranks, r + 2·ranks …"""
    return [list(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def v_shaped(ranks):
    """[[stage]] by rank: rank r has stages r and 2·ranks - 1 - r."""
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def placement_of(schedule):
    """[[stage]] by rank, as the schedule's steps say. ValueError unless they are 0, 1, …, each has one rank, and each
    rank one at least."""
    stages = [sorted({step.stage for step in row}) for row in schedule]
    if not stages or not all(stages) or sorted(sum(stages, [])) != list(range(sum(map(len, stages)))):
        raise ValueError("a schedule's stages are 0, 1, …, one at least per rank and each on one rank; by rank this "
                         f"one has {stages}")
    return stages


# ---------------------------------------------------------------- schedules

def gpipe(ranks, micro_batches):
    """All forwards, then all backwards. Bubble (p-1)/(m+p-1); every rank holds m micro-batches.

    Source: Huang et al. 2019, "GPipe".
    """
    _check(ranks, micro_batches)
    m = micro_batches
    return [_row([(m, "F"), (m, "B")], m, rank) for rank in range(ranks)]


def one_forward_one_backward(ranks, micro_batches):
    """1F1B: as soon as a backward can be done, it is. The bubble of GPipe, but rank r holds min(m, p-r) micro-batches.

    Source: Narayanan et al. 2019, "PipeDream" (here with the flush of 2021's "Memory-efficient pipeline-parallel DNN
    training": all of a batch sees the same weights).
    """
    _check(ranks, micro_batches)
    m = micro_batches
    return [_row([(ranks - rank - 1, "F"), (m, "FB")], m, rank) for rank in range(ranks)]


def interleaved(ranks, micro_batches, chunks):
    """1F1B of several stages per rank: the bubble is that of 1F1B divided by `chunks`, (p-1)/(v·m+p-1), for v times the
    messages. The number of ranks must divide m. Source: Narayanan et al. 2021, "Efficient large-scale language model
    training on GPU clusters using Megatron-LM".
    """
    _check(ranks, micro_batches)
    if chunks < 1:
        raise ValueError(f"interleaved: chunks is {chunks}; it must be at least 1")
    if chunks == 1:
        return one_forward_one_backward(ranks, micro_batches)
    if micro_batches % ranks:
        raise ValueError(f"interleaved: {ranks} ranks must divide the {micro_batches} micro-batches")
    groups, rows = range(0, micro_batches, ranks), []
    for rank, stages in enumerate(looping(ranks, chunks)):
        # Groups of `ranks` micro-batches go through the first stage, then through the second, …
        steps = {FORWARD: [Step(FORWARD, g + k, s) for g in groups for s in stages for k in range(ranks)],
                 BACKWARD: [Step(BACKWARD, g + k, s) for g in groups for s in stages[::-1] for k in range(ranks)]}
        rows.append(_phases([(2 * (ranks - rank - 1) + (chunks - 1) * ranks, "F"), (micro_batches * chunks, "FB")],
                            steps))
    return rows


def zb_h1(ranks, micro_batches):
    """ZB-H1: 1F1B whose rank r leaves r weight gradients for later. What others wait for comes earlier, and W fills the
    end, where 1F1B waits. With times T_F, T_I, T_W the ranks wait for

        (p-1)·(T_F + T_I - T_W)  each, of 1F1B's (p-1)·(T_F + T_I + T_W)        where T_W ≤ T_I ≤ T_F and m ≥ p
        (p-1)·(T_F + max(0, T_I - T_W)) + max(0, p-m)·min(T_I, T_W)             where T_I ≤ T_F, any m
        (p-1)·max(T_I, T_F + max(0, T_I - T_W))                                 at any times, where m ≥ p

    A rank holds min(m, p-r) micro-batches as in 1F1B, and what min(m, r+1) weight gradients need: of no more than
    min(m, p) micro-batches together. Source: Qi et al. 2023, "Zero bubble pipeline parallelism".
    """
    _check(ranks, micro_batches)
    m = micro_batches
    return [_row([(ranks - rank - 1, "F"), (rank, "FI"), (m, "FIW")], m, rank) for rank in range(ranks)]


def zb_h2(ranks, micro_batches):
    """ZB-H2: twice as many forwards ahead, and twice as many weight gradients late, as in ZB-H1. Each rank is at work
    from its first step to its last, if T_F = T_I = T_W and m ≥ 2p-1, and rank r begins and ends r·T_F after rank 0:

        waiting within `period`     (p-1)·(T_F + T_I - 2·T_W)                   where T_W ≤ T_I ≤ T_F and m ≥ 2p-1

    Rank r holds min(m, 2(p-r)-1) micro-batches, and what min(m, 2r+1) weight gradients need: of no more than 2p-1
    together, about twice ZB-H1's. What the next batch waits for here: Pipeline. Source: Qi et al. 2023.
    """
    _check(ranks, micro_batches)
    m = micro_batches
    return [_row([(2 * (ranks - rank - 1), "F"), (2 * rank, "FI"), (m, "FIW")], m, rank) for rank in range(ranks)]


def zb_v(ranks, micro_batches):
    """ZB-V: two stages per rank, placed as a V, so that the rank that ends the forward pass begins backward at once.
    With T_F = T_I = T_W and m ≥ 2p-1 each rank is at work from its first step to its last, as in ZB-H2, and holds no
    more than 2p halves, p micro-batches, W's included: 1F1B's memory, on every rank.

    The turn of the V sends nothing. Sources: Qi et al. 2023; and 2024, "Pipeline parallelism with controllable memory".
    """
    _check(ranks, micro_batches)
    m, rows = micro_batches, []
    for rank, stages in enumerate(v_shaped(ranks)):
        up = ranks - rank
        rows.append(_row([(2 * up - 1, "F"), (rank, "fF"), (up, "fiw"),         # the first come back to this rank
                          (max(0, m - ranks), "FIWfiw"),
                          (rank, "Ii"), (up, "IW"), (m, "w"), (m, "W")], m, *stages))
    return rows


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zb-h1": zb_h1,
             "zb-h2": zb_h2, "zb-v": zb_v}


def schedule_of(name, ranks, micro_batches, chunks=1):
    """One of SCHEDULES by its name; chunks: the stages per rank, of interleaved."""
    return SCHEDULES[name](ranks, micro_batches, *([chunks] if name == "interleaved" else []))


def _row(phases, micro_batches, *stages):
    """A rank's steps: large letters are of its first stage, small ones of its second."""
    steps = {}
    for stage, case in zip(stages, (str.upper, str.lower), strict=False):
        steps |= {case(kind): [Step(kind, k, stage) for k in range(micro_batches)] for kind in KINDS}
    return _phases(phases, steps)


def _phases(phases, steps):
    """[Step] of [(times, letters)], each letter the next of steps[letter]."""
    rest = {letter: iter(queue) for letter, queue in steps.items()}
    return [step for times, letters in phases for _ in range(times) for letter in letters
            for step in islice(rest[letter], 1)]


def _check(ranks, micro_batches):
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one rank and one micro-batch; got {ranks} and {micro_batches}")


# ---------------------------------------------------------------- in time

def play(schedule, forward=1.0, backward=2.0, send=0.0, weight=None):
    """A Played: every rank does its steps in order, each as soon as what it needs is there.

    forward, backward   time of a step, of one stage
    send                time from the end of a step until the next stage has its result; the sender goes on meanwhile
    weight              W's part of the time of backward (default: half); I's is the rest
    ValueError where the ranks would wait for each other for ever, or a step is missing, doubled or of no stage.
    """
    ranks, placement = len(schedule), placement_of(schedule)
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    weight = backward / 2 if weight is None else weight
    if not 0 <= weight <= backward:
        raise ValueError(f"play: W's time {weight} must lie between 0 and that of backward, {backward}")
    took = {FORWARD: forward, BACKWARD: backward, INPUT: backward - weight, WEIGHT: weight}
    _check_complete(schedule, placement)
    done, free, at, spans = {}, [0.0] * ranks, [0] * ranks, [[] for _ in schedule]
    while any(at[rank] < len(row) for rank, row in enumerate(schedule)):
        moved = False
        for rank, row in enumerate(schedule):
            while at[rank] < len(row):
                step = row[at[rank]]
                needs = _needs(step, last=len(rank_of) - 1)
                if any(need not in done for need in needs):
                    break
                ready = [done[need] + (0.0 if rank_of[need[1]] == rank else send) for need in needs]
                begin = max([free[rank], *ready])
                free[rank] = done[_makes(step.kind), step.stage, step.micro_batch] = begin + took[step.kind]
                spans[rank].append((begin, free[rank], step))
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [f"rank {rank} before {row[at[rank]]}" for rank, row in enumerate(schedule) if at[rank] < len(row)]
            raise ValueError(f"the ranks of this schedule wait for each other: {', '.join(stuck)}")
    end = max(free)
    period = max(row[-1][1] - row[0][0] for row in spans)
    busy = sum(e - b for row in spans for b, e, _ in row) / ranks
    return Played(spans, end, 1 - busy / end, period, 1 - busy / period,
                  *map(list, zip(*map(_most_held, schedule), strict=True)))


def _makes(kind):
    """The kind under which a step's result is known to those that need it: B's input gradient is I's."""
    return INPUT if kind == BACKWARD else kind


def _needs(step, last):
    """The (kind, stage, micro-batch) that must be done before; last: the last stage."""
    k, stage = step.micro_batch, step.stage
    if step.kind == FORWARD:
        return [(FORWARD, stage - 1, k)] if stage else []
    if step.kind == WEIGHT:
        return [(INPUT, stage, k)]
    return [(FORWARD, stage, k)] + ([(INPUT, stage + 1, k)] if stage < last else [])


def _check_complete(schedule, placement):
    micro_batches = {step.micro_batch for step in schedule[0]}
    if micro_batches != set(range(len(micro_batches))):
        raise ValueError(f"a schedule's micro-batches are 0, 1, …; this one has {sorted(micro_batches)}")
    if odd := sorted({step.kind for row in schedule for step in row} - set(KINDS)):
        raise ValueError(f"a schedule's steps are of kinds {', '.join(KINDS)}; this one has {', '.join(map(str, odd))}")
    for rank, row in enumerate(schedule):
        # Where backward is cut in two for a micro-batch, both of its parts must be there, and the whole must not.
        cut = {(step.micro_batch, step.stage) for step in row if step.kind in (INPUT, WEIGHT)}
        wanted = {Step(kind, k, s) for k in micro_batches for s in placement[rank]
                  for kind in (FORWARD, *((INPUT, WEIGHT) if (k, s) in cut else (BACKWARD,)))}
        if len(row) != len(set(row)) or set(row) != wanted:
            wrong = sorted(str(step) for step in set(row) ^ wanted) or sorted(str(s) for s in row if row.count(s) > 1)
            raise ValueError(f"rank {rank} of this schedule doesn't do every forward and backward once: "
                             f"{', '.join(wrong)}")


def _most_held(row):
    """The greatest numbers of a rank's micro-batches that are live, that wait for W, and of both."""
    live = waiting = 0
    most = 0, 0, 0
    for step in row:
        live += {FORWARD: 1, BACKWARD: -1, INPUT: -1, WEIGHT: 0}[step.kind]
        waiting += {INPUT: 1, WEIGHT: -1}.get(step.kind, 0)
        most = tuple(map(max, most, (live, waiting, live + waiting)))
    return most


def label(step, stages):
    """A step as a few letters, "F0"; in small letters that of the second of a rank's stages, "f0", and with a prime
    more that of each further one, "f0'"."""
    chunk = stages.index(step.stage)
    kind = step.kind.lower() if chunk else step.kind
    return f"{kind}{step.micro_batch}" + "'" * (chunk - 1)


def drawn(schedule, forward=1, backward=2, weight=1):
    """The schedule as text, a cell per unit of time: the micro-batch's number, or points where a rank waits. Where
    backward is cut in two, or ranks have several stages, each number has its step's letter (label)."""
    played, placement = play(schedule, forward, backward, weight=weight), placement_of(schedule)
    lettered = len(sum(placement, [])) > len(schedule) or any(step.kind == WEIGHT for row in schedule for step in row)
    rows = [[(begin, end, label(step, stages)[not lettered:]) for begin, end, step in spans]
            for spans, stages in zip(played.spans, placement, strict=True)]
    size, lines = max(len(text) for row in rows for *_, text in row), []
    for rank, row in enumerate(rows):
        cells = ["." * size] * int(played.end)
        for begin, end, text in row:
            cells[int(begin):int(end)] = [text.rjust(size)] * int(end - begin)
        lines.append(f"rank {rank}  {' '.join(cells)}")
    return "\n".join(lines)


def add_command(commands, draw):
    """`minitorch-dist pipeline`: a schedule as a picture, with its bubble and what each rank holds. draw(played, path,
    title) makes the one for --out."""
    p = commands.add_parser("pipeline", help="draw a pipeline's schedule: who works when, on what")
    p.add_argument("schedule", choices=list(SCHEDULES))
    p.add_argument("--ranks", type=int, default=4, help="ranks along the pipeline (default: 4)")
    p.add_argument("--micro-batches", type=int, default=8, help="pieces of the batch (default: 8)")
    p.add_argument("--chunks", type=int, default=2, help="of layers, per rank, in interleaved (default: 2)")
    p.add_argument("--out", help="draw it into this file as well, e.g. schedule.png")
    p.set_defaults(run=_show, draw=draw)


def _show(args):
    try:
        schedule = schedule_of(args.schedule, args.ranks, args.micro_batches, args.chunks)
    except ValueError as error:
        print(f"minitorch-dist pipeline: {error}")
        return 2
    played = play(schedule)
    print("\n".join([drawn(schedule), "", *_told(played, placement_of(schedule))]))
    if args.out:
        try:
            if not Path(args.out).suffix:
                raise ValueError(f"--out {args.out} needs an ending, as in schedule.png")
            args.draw(played, args.out, f"{args.schedule}: {args.ranks} ranks, {args.micro_batches} micro-batches")
        except (ValueError, OSError) as error:
            print(f"minitorch-dist pipeline: {error}")
            return 2
        print(f"drawn: {args.out}")
    return 0


def _told(played, placement):
    """What a drawing doesn't say of itself, as lines."""
    cut, halves = any(played.waiting), len(placement[0]) > 1
    what = "Micro-batches of one stage" if halves else "Micro-batches"
    lines = ["F: a forward; I: the gradient of a stage's input; W: those of its weights. Each takes a cell." if cut else
             "A backward takes two cells, a forward one."]
    if halves:
        lines.append(f"Stages by rank: {'; '.join(', '.join(map(str, row)) for row in placement)}. Large letters are "
                     "of the first ones.")
    lines.append(f"The ranks wait for {100 * played.bubble:.1f} % of the time (the bubble).")
    if played.period < played.end:
        lines.append("If none waited for the others before it began the next batch: for "
                     f"{100 * played.steady_bubble:.1f} %.")
    lines.append(f"{what} whose activations a rank holds at once: {', '.join(map(str, played.live))}.")
    if cut:
        lines.append(f"{what} whose W is still to come: {', '.join(map(str, played.waiting))}; together with those "
                     f"above at most {', '.join(map(str, played.held))} at once.")
    return lines
