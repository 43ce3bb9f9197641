"""Which rank is slow? In step with the others all take as long as the slowest, and the sum of it tells nothing.

    watch = Stragglers(world, every=50)
    for batch in batches:
        …                                   # a step
        if (report := watch.step()) and report.slow:
            print(report)

A rank's time goes into computing, or into waiting in calls of its communicators (the additions there included). Where
one rank computes for longer, it is the others that wait: so the ranks tell each other both, every so many steps, as
medians of these steps. What counts is the time from the end of one step to the end of the next, the loading of data
too; not what happens once in a while, as an evaluation. On a GPU, which works while the host goes on, it is the host's.
"""

import time
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from ..backend import is_whole
from ..comm.state import state
from ..optim.settings import check_settings
from ..tables import aligned

FACTOR = 1.3        # times the median of the others: slow


class Report(NamedTuple):
    """What the ranks have told each other.

    steps      that the medians are of
    computing  seconds per step of each rank; waiting, too
    slow       {rank: how many times the median of the others it computes}, of those that are slow
    """

    steps: int
    computing: list
    waiting: list
    slow: dict

    def __str__(self):
        """A table, and a line for each slow rank."""
        rows = [(f"median of {self.steps} steps, ms", "computing", "waiting")]
        rows += [(f"rank {rank}", f"{1e3 * computing:.2f}", f"{1e3 * waiting:.2f}")
                 for rank, (computing, waiting) in enumerate(zip(self.computing, self.waiting, strict=True))]
        return "\n".join([*aligned(rows), *(f"rank {rank} is slow: it computes {times:.2f} times as long as the median "
                                            "of the others, who wait for it" for rank, times in self.slow.items())])


class Stragglers:
    """Each rank's time of computing and of waiting, told to all ranks every so many steps.

    comm    the ranks that are in step
    every   steps
    factor  from how many times the median of the others on a rank is slow
    peers   the Communicator of those with the same work, of comm's, in each of which ranks are compared (default: comm;
            a pipeline's stages take their time, and those who share its samples should take the same). Collective

    From its making on, this process's waits are timed. One at a time. ValueError for every or factor that would never
    tell anything, or always.
    """

    def __init__(self, comm, every, factor=FACTOR, peers=None):
        check_settings(every=(every, is_whole(every) and every > 0, "a whole number of steps, 1 or more"),
                       factor=(factor, 1 <= factor < inf, "at least 1, and finite"))
        self.comm, self.every, self.factor = comm, every, factor
        self.groups = [range(comm.size)] if peers is None else _groups(comm, peers)
        self.computing, self.waiting = [], []
        self.begin()

    def begin(self):
        """The next step begins only now: what was before is no part of it."""
        self.since, state.waited = time.perf_counter(), 0.0

    def step(self):
        """A step is done: a Report after each `every` of them, else None. Collective then: 16 bytes of each rank."""
        now, waited = time.perf_counter(), state.waited
        self.waiting.append(waited)
        self.computing.append(now - self.since - waited)
        report = self._gathered() if len(self.computing) == self.every else None
        self.begin()
        return report

    def _gathered(self):
        mine = np.array([median(self.computing), median(self.waiting)])
        everyone = np.empty((self.comm.size, 2))
        self.comm.all_gather(everyone, mine)
        self.computing, self.waiting = [], []
        computing, waiting = everyone.T.tolist()
        return Report(self.every, computing, waiting, {
            group[i]: times for group in self.groups
            for i, times in slow([computing[rank] for rank in group], self.factor).items()})


def _groups(comm, peers):
    """[its ranks in comm] of each group that comm is divided into. Collective."""
    place = {rank: i for i, rank in enumerate(comm.world_ranks)}
    return sorted({tuple(place[rank] for rank in ranks) for ranks in comm.all_gather_object(peers.world_ranks)})


def slow(computing, factor=FACTOR):
    """{rank: how many times the median of the others it takes}, where that is more than the factor."""
    others = [median(computing[:i] + computing[i + 1:]) if len(computing) > 1 else seconds
              for i, seconds in enumerate(computing)]
    return {rank: mine / theirs for rank, (mine, theirs) in enumerate(zip(computing, others, strict=True))
            if mine > factor * theirs > 0}
