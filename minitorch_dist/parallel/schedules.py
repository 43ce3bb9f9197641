"""Pipeline schedules, as values: for each rank, the list of what it does, in order.

    print(drawn(one_forward_one_backward(3, 5)))

    rank 0  0 1 2 . . 0 0 . 3 1 1 . 4 2 2 . . 3 3 . . 4 4       a digit: this micro-batch, forward one cell,
    …                                                           backward two; a point: the rank waits (the bubble)

A Step is the forward or the backward pass of one micro-batch through one chunk of the layers. The layers are cut into
ranks × chunks virtual stages, of which chunk c of rank r is number c·ranks + r: with one chunk, rank r is stage r.
"""

from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Step(NamedTuple):
    """kind "F" or "B", the micro-batch from 0, and the rank's chunk."""

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
    live      by rank: the greatest number of micro-batches (of one chunk) whose activations it holds at once
    """

    spans: list
    end: float
    bubble: float
    live: list


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


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved}


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
    return 1 + max(step.chunk for row in schedule for step in row)


def play(schedule, forward=1.0, backward=2.0, send=0.0):
    """A Played: every rank does its steps in order, each as soon as what it needs is there.

    forward, backward   time of a step, of one virtual stage
    send                time from the end of a step until the next stage has its result; the sender goes on meanwhile
    ValueError where the ranks would wait for each other for ever, or a step is missing, doubled or of no stage.
    """
    ranks, chunks, took = len(schedule), chunks_of(schedule), {FORWARD: forward, BACKWARD: backward}
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
                free[rank] = done[step.kind, stage, step.micro_batch] = begin + took[step.kind]
                spans[rank].append((begin, free[rank], step))
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [f"rank {rank} before {row[at[rank]]}" for rank, row in enumerate(schedule) if at[rank] < len(row)]
            raise ValueError(f"the ranks of this schedule wait for each other: {', '.join(stuck)}")
    end = max(free)
    busy = sum(e - b for row in spans for b, e, _ in row)
    return Played(spans, end, 1 - busy / (ranks * end), [_most_live(row) for row in schedule])


def _needs(step, stage, last):
    """The (kind, stage, micro-batch) that must be done before."""
    k = step.micro_batch
    if step.kind == FORWARD:
        return [(FORWARD, stage - 1, k)] if stage else []
    return [(FORWARD, stage, k)] + ([(BACKWARD, stage + 1, k)] if stage < last else [])


def _check_complete(schedule, chunks):
    wanted = {Step(kind, step.micro_batch, c) for step in schedule[0] for kind in "FB" for c in range(chunks)}
    for rank, row in enumerate(schedule):
        if len(row) != len(set(row)) or set(row) != wanted:
            wrong = sorted(str(step) for step in set(row) ^ wanted) or sorted(str(s) for s in row if row.count(s) > 1)
            raise ValueError(f"rank {rank} of this schedule doesn't do every forward and backward once: "
                             f"{', '.join(wrong)}")


def _most_live(row):
    live = most = 0
    for step in row:
        live += 1 if step.kind == FORWARD else -1
        most = max(most, live)
    return most


def drawn(schedule, forward=1, backward=2):
    """The schedule as text, a cell per unit of time: the micro-batch's number, or a point where a rank waits."""
    played, width = play(schedule, forward, backward), len(str(max(s.micro_batch for row in schedule for s in row)))
    lines = []
    for rank, spans in enumerate(played.spans):
        cells = ["." * width] * int(played.end)
        for begin, end, step in spans:
            cells[int(begin):int(end)] = [f"{step.micro_batch:>{width}}"] * int(end - begin)
        lines.append(f"rank {rank}  {' '.join(cells)}")
    return "\n".join(lines)


def add_command(commands):
    """`minitorch-dist pipeline`: a schedule as a picture, with its bubble and what each rank holds."""
    p = commands.add_parser("pipeline", help="draw a pipeline's schedule: who works when, on what")
    p.add_argument("schedule", choices=list(SCHEDULES))
    p.add_argument("--ranks", type=int, default=4, help="ranks along the pipeline (default: 4)")
    p.add_argument("--micro-batches", type=int, default=8, help="pieces of the batch (default: 8)")
    p.add_argument("--chunks", type=int, default=2, help="of layers, per rank, in interleaved (default: 2)")
    p.set_defaults(run=_show)


def _show(args):
    numbers = (args.ranks, args.micro_batches) + ((args.chunks,) if args.schedule == "interleaved" else ())
    try:
        schedule = SCHEDULES[args.schedule](*numbers)
    except ValueError as error:
        print(f"minitorch-dist pipeline: {error}")
        return 2
    played = play(schedule)
    print(drawn(schedule))
    print(f"\nA backward takes two cells, a forward one. The ranks wait for {100 * played.bubble:.1f} % of the time "
          "(the bubble).")
    print(f"Micro-batches whose activations a rank holds at once: {', '.join(map(str, played.live))}.")
    return 0
