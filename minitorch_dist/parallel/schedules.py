"""Pipeline schedules, as values: for each rank, the list of what it does, in order.

    print(drawn(one_forward_one_backward(3, 5)))

    rank 0  0 1 2 . . 0 0 . 3 1 1 . 4 2 2 . . 3 3 . . 4 4       a digit: this micro-batch, forward one cell,
    …                                                           backward two; a point: the rank waits (the bubble)

A Step is the forward or the backward pass of one micro-batch through one chunk of the layers. The layers are cut into
ranks × chunks virtual stages, of which chunk c of rank r is number c·ranks + r: with one chunk, rank r is stage r.

A backward pass may be cut in two, as in zb_h1. The kinds of steps, by torch's letters (the paper calls I "B"):

    F   forward
    B   the whole backward pass, or else
    I   the gradient of the stage's input, which the stage before waits for, and later
    W   the gradients of its weights, which nobody waits for
"""

from pathlib import Path
from typing import NamedTuple

from ..autodiff import input_first

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = "FBIW"
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: input_first.INPUT, WEIGHT: input_first.WEIGHTS}


class Step(NamedTuple):
    """kind "F", "B", "I" or "W", the micro-batch from 0, and the rank's chunk."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self):
        return f"{self.kind}{self.micro_batch}" + (f"'{self.chunk}" if self.chunk else "")


class Played(NamedTuple):
    """A schedule in time.

    spans     spans[rank]: (begin, end, Step), in order
    end       when the last rank is through
    bubble    the share of all ranks' time in which they wait
    live      by rank: the greatest number of micro-batches (of one chunk) whose activations it holds at once, from F to
              B or I
    waiting   by rank: the greatest number of those that wait for W at once, for which it holds what W needs
    held      by rank: the greatest number of both together
    """

    spans: list
    end: float
    bubble: float
    live: list
    waiting: list
    held: list


def gpipe(ranks, micro_batches):
    """All forwards, then all backwards. Bubble (p-1)/(m+p-1); every rank holds m micro-batches.

    Source: Huang et al. 2019, "GPipe".
    """
    _check(ranks, micro_batches)
    every = range(micro_batches)
    return [[Step(FORWARD, k) for k in every] + [Step(BACKWARD, k) for k in every] for _ in range(ranks)]


def one_forward_one_backward(ranks, micro_batches):
    """1F1B: as soon as a backward can be done, it is. The bubble of GPipe, but rank r holds min(m, p-r) micro-batches.

    Source: Narayanan et al. 2019, "PipeDream" (here with the flush of 2021's "Memory-efficient pipeline-parallel DNN
    training": all of a batch sees the same weights).
    """
    _check(ranks, micro_batches)
    every, rows = range(micro_batches), []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - rank - 1)
        rows.append(_alternate([Step(FORWARD, k) for k in every], [Step(BACKWARD, k) for k in every], ahead))
    return rows


def interleaved(ranks, micro_batches, chunks):
    """1F1B of several chunks per rank: the bubble is that of 1F1B divided by `chunks`, (p-1)/(v·m+p-1), for v times the
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
    groups = range(0, micro_batches, ranks)
    # Groups of `ranks` micro-batches go through the first chunk, then through the second, …
    forwards = [Step(FORWARD, g + k, c) for g in groups for c in range(chunks) for k in range(ranks)]
    backwards = [Step(BACKWARD, g + k, c) for g in groups for c in reversed(range(chunks)) for k in range(ranks)]
    rows = []
    for rank in range(ranks):
        ahead = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        rows.append(_alternate(forwards, backwards, ahead))
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
    rows = []
    for rank, row in enumerate(one_forward_one_backward(ranks, micro_batches)):
        steps = []
        for kind, k, _ in row:
            steps.append(Step(FORWARD if kind == FORWARD else INPUT, k))
            if kind == BACKWARD and k >= rank:
                steps.append(Step(WEIGHT, k - rank))
        rows.append(steps + [Step(WEIGHT, k) for k in range(max(0, micro_batches - rank), micro_batches)])
    return rows


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zb-h1": zb_h1}


def _alternate(forwards, backwards, ahead):
    """`ahead` forwards, then a forward and a backward by turns, then the backwards that are left."""
    steady = len(forwards) - ahead
    pairs = [step for pair in zip(forwards[ahead:], backwards[:steady], strict=True) for step in pair]
    return forwards[:ahead] + pairs + backwards[steady:]


def _check(ranks, micro_batches):
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one rank and one micro-batch; got {ranks} and {micro_batches}")


def chunks_of(schedule):
    """How many chunks each rank has."""
    return 1 + max((step.chunk for row in schedule for step in row), default=0)


def play(schedule, forward=1.0, backward=2.0, send=0.0, weight=None):
    """A Played: every rank does its steps in order, each as soon as what it needs is there.

    forward, backward   time of a step, of one virtual stage
    send                time from the end of a step until the next stage has its result; the sender goes on meanwhile
    weight              W's part of the time of backward (default: half); I's is the rest
    ValueError where the ranks would wait for each other for ever, or a step is missing, doubled or of no stage.
    """
    ranks, chunks = len(schedule), chunks_of(schedule)
    weight = backward / 2 if weight is None else weight
    if not 0 <= weight <= backward:
        raise ValueError(f"play: W's time {weight} must lie between 0 and that of backward, {backward}")
    took = {FORWARD: forward, BACKWARD: backward, INPUT: backward - weight, WEIGHT: weight}
    last = ranks * chunks - 1
    _check_complete(schedule, chunks)
    done, free, at, spans = {}, [0.0] * ranks, [0] * ranks, [[] for _ in schedule]
    while any(at[rank] < len(row) for rank, row in enumerate(schedule)):
        moved = False
        for rank, row in enumerate(schedule):
            while at[rank] < len(row):
                step = row[at[rank]]
                stage = step.chunk * ranks + rank
                needs = _needs(step, stage, last)
                if any(need not in done for need in needs):
                    break
                ready = [done[need] + (send if (need[1] - stage) % ranks else 0.0) for need in needs]
                begin = max([free[rank], *ready])
                free[rank] = done[_makes(step.kind), stage, step.micro_batch] = begin + took[step.kind]
                spans[rank].append((begin, free[rank], step))
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [f"rank {rank} before {row[at[rank]]}" for rank, row in enumerate(schedule) if at[rank] < len(row)]
            raise ValueError(f"the ranks of this schedule wait for each other: {', '.join(stuck)}")
    end = max(free)
    busy = sum(e - b for row in spans for b, e, _ in row)
    return Played(spans, end, 1 - busy / (ranks * end), *map(list, zip(*map(_most_held, schedule), strict=True)))


def _makes(kind):
    """The kind under which a step's result is known to those that need it: B's input gradient is I's."""
    return INPUT if kind == BACKWARD else kind


def _needs(step, stage, last):
    """The (kind, stage, micro-batch) that must be done before."""
    k = step.micro_batch
    if step.kind == FORWARD:
        return [(FORWARD, stage - 1, k)] if stage else []
    if step.kind == WEIGHT:
        return [(INPUT, stage, k)]
    return [(FORWARD, stage, k)] + ([(INPUT, stage + 1, k)] if stage < last else [])


def _check_complete(schedule, chunks):
    micro_batches = {step.micro_batch for step in schedule[0]}
    if not micro_batches or micro_batches != set(range(len(micro_batches))):
        raise ValueError(f"a schedule's micro-batches are 0, 1, …; this one has {sorted(micro_batches) or 'none'}")
    if odd := sorted({step.kind for row in schedule for step in row} - set(KINDS)):
        raise ValueError(f"a schedule's steps are of kinds {', '.join(KINDS)}; this one has {', '.join(map(str, odd))}")
    for rank, row in enumerate(schedule):
        # Where backward is cut in two for a micro-batch, both of its parts must be there, and the whole must not.
        cut = {(step.micro_batch, step.chunk) for step in row if step.kind in (INPUT, WEIGHT)}
        wanted = {Step(kind, k, c) for k in micro_batches for c in range(chunks)
                  for kind in (FORWARD, *((INPUT, WEIGHT) if (k, c) in cut else (BACKWARD,)))}
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


def drawn(schedule, forward=1, backward=2, weight=1):
    """The schedule as text, a cell per unit of time: the micro-batch's number, or points where a rank waits. Where
    backward is cut in two, each number has its step's letter."""
    played = play(schedule, forward, backward, weight=weight)
    lettered = any(step.kind == WEIGHT for row in schedule for step in row)
    size = len(str(max(s.micro_batch for row in schedule for s in row)))
    lines = []
    for rank, spans in enumerate(played.spans):
        cells = ["." * (size + lettered)] * int(played.end)
        for begin, end, step in spans:
            cell = step.kind * lettered + str(step.micro_batch)
            cells[int(begin):int(end)] = [cell.rjust(size + lettered)] * int(end - begin)
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
    numbers = (args.ranks, args.micro_batches) + ((args.chunks,) if args.schedule == "interleaved" else ())
    try:
        schedule = SCHEDULES[args.schedule](*numbers)
    except ValueError as error:
        print(f"minitorch-dist pipeline: {error}")
        return 2
    played = play(schedule)
    print(drawn(schedule))
    if any(played.waiting):
        cells = "F: a forward; I: the gradient of a stage's input; W: those of its weights. Each takes a cell."
    else:
        cells = "A backward takes two cells, a forward one."
    print(f"\n{cells} The ranks wait for {100 * played.bubble:.1f} % of the time (the bubble).")
    print(f"Micro-batches whose activations a rank holds at once: {', '.join(map(str, played.live))}.")
    if any(played.waiting):
        print(f"Micro-batches whose W is still to come: {', '.join(map(str, played.waiting))}; together with those "
              f"above at most {', '.join(map(str, played.held))} at once.")
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
