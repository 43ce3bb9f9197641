"""What the schedules of pipelines (schedules.py) are made of.

The layers are cut into stages, one after another; a Step is the forward or the backward pass of one micro-batch through
one of them. Which rank has which stages is a value as well, a placement:

    looping(4, 2)   [[0, 4], [1, 5], [2, 6], [3, 7]]    after the last rank comes the first again
    v_shaped(4)     [[0, 7], [1, 6], [2, 5], [3, 4]]    there and back: the first and the last stage share a rank

A backward pass may be cut in two, as in zb_h1. The kinds of steps, by torch's letters (the papers call I "B"):

    F   forward
    B   the whole backward pass, or else
    I   the gradient of the stage's input, which the stage before waits for, and later
    W   the gradients of its weights, which nobody waits for

A micro-batch's sequences may be cut into slices, of which each is a step's (slices.py). Then what a stage keeps of the
earlier ones is what the later ones look at: forwards go through the slices in order, backwards from the last one to the
first.

A forward may be Overlapped: then it and the next step of its row, a backward pass of another micro-batch, are done at
the same time, as one combined step, F&B (schedule_dual.py).
"""

from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = "FBIW"
# How many micro-batches more a rank then holds, whose activations it keeps, and who wait for W
HOLDS = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT: (-1, 1), WEIGHT: (0, -1)}


class Step(NamedTuple):
    """kind "F", "B", "I" or "W", the micro-batch from 0, the stage, and which slice of the sequences, from 0."""

    kind: str
    micro_batch: int
    stage: int
    slice: int = 0

    def __str__(self):
        return f"{self.kind}{self.micro_batch}{f'.{self.slice}' * (self.slice > 0)} of stage {self.stage}"


class Overlapped(Step):
    """The forward of a combined step; the next step of its row is the backward. Else it is an F like others."""

    __slots__ = ()

    def __str__(self):
        return f"{super().__str__()} together with"


def combined(row):
    """A rank's steps as tuples: those that are done at the same time, mostly one. ValueError for an Overlapped that
    isn't followed by a backward of something else."""
    found, rest = [], iter(row)
    for step in rest:
        if not isinstance(step, Overlapped):
            found.append((step,))
            continue
        other = next(rest, None)
        if step.kind != FORWARD or other is None or other.kind != BACKWARD or other[1:] == step[1:]:
            raise ValueError(f"{step} {'nothing' if other is None else other}: an F can be combined with the B of "
                             "another micro-batch or stage, which comes next in its row")
        found.append((step, other))
    return found


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


def slices_of(schedule):
    """How many slices a micro-batch is cut into."""
    return 1 + max((step.slice for row in schedule for step in row), default=0)


def makes(kind):
    """The kinds under which a step's results are known to those that need them: B's are I's and W's."""
    return (INPUT, WEIGHT) if kind == BACKWARD else (kind,)


def results(step):
    """The (kind, stage, micro-batch, slice) that others need of a step."""
    return [(kind, step.stage, step.micro_batch, step.slice) for kind in makes(step.kind)]


def needs(step, last, links=(), slices=1):
    """The (kind, stage, micro-batch, slice) that must be done before.

    last    the last stage
    links   (stage, a later one): pairs of which the first wants the second one's weight gradients before its own
    slices  of a micro-batch
    """
    kind, k, stage, j = step
    if kind == FORWARD:
        return [(FORWARD, stage - 1, k, j)] * (stage > 0) + [(FORWARD, stage, k, j - 1)] * (j > 0)
    found = [(WEIGHT, behind, k, j) for first, behind in links if first == stage and WEIGHT in makes(kind)]
    found += [(made, stage, k, j + 1) for made in makes(kind) if j + 1 < slices]
    if kind == WEIGHT:
        return [(INPUT, stage, k, j), *found]
    return [(FORWARD, stage, k, j), *found] + [(INPUT, stage + 1, k, j)] * (stage < last)


def most_held(row):
    """The greatest numbers of a rank's micro-batches, or slices, that are live, that wait for W, and of both."""
    live = waiting = 0
    most = 0, 0, 0
    for step in row:
        live, waiting = live + HOLDS[step.kind][0], waiting + HOLDS[step.kind][1]
        most = tuple(map(max, most, (live, waiting, live + waiting)))
    return most


def check_sizes(ranks, micro_batches, slices=1):
    """ValueError for a pipeline of nothing."""
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one rank and one micro-batch; got {ranks} and {micro_batches}")
    if slices < 1:
        raise ValueError(f"a pipeline's sequences come in one slice or more; got {slices}")
