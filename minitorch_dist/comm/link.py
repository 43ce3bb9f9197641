"""A simulated link: what would this program's steps take on a slower network?

    clock = VirtualClock()
    with clock.running():                                       # spans are timed by it
        world.hooks.append(SimulatedLink(latency=1e-5, bandwidth=1e9, clock=clock))
        …

The operations are real, so are their order and their data; only the time they take is made up.
"""

import time
from collections import defaultdict, deque
from contextlib import contextmanager

from .. import ledger


class VirtualClock:
    """Time that passes only where somebody says so: for computations of a known length, to the last digit."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time

    def sleep(self, seconds):
        """Let time pass."""
        self.time += seconds

    @contextmanager
    def running(self):
        """Inside, the ledger's spans are timed by this clock."""
        outer, ledger.clock = ledger.clock, self
        try:
            yield self
        finally:
            ledger.clock = outer


class RealClock:
    """The computer's own."""

    __call__ = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class SimulatedLink:
    """A hook for Communicator.hooks that lets each operation take latency + bytes/bandwidth, one after the other.

    latency    seconds per operation
    bandwidth  bytes per second that a rank can send; how many it sends is the ledger's count
    clock      RealClock (the default: whoever waits sleeps) or VirtualClock

    An operation is due when the link has done all that was posted before it, and then it; waiting for it takes until
    then. Each rank has a link of its own, as if all had posted at the same time.
    """

    def __init__(self, latency, bandwidth, clock=None):
        if not (latency >= 0 and bandwidth > 0):
            raise ValueError(f"SimulatedLink: latency={latency} seconds and bandwidth={bandwidth} bytes per second; "
                             "the one is at least 0, the other more")
        self.latency, self.bandwidth = latency, bandwidth
        self.clock = RealClock() if clock is None else clock
        self.free = 0.0                     # when the link has done all that was posted
        self.due = defaultdict(deque)       # (operation, array) -> when each of those under way arrives

    def before(self, op, x, peer):
        """An operation is posted: it joins the queue."""
        self.last = op, id(x)
        self.free = max(self.free, self.clock()) + self.latency
        self.due[self.last].append(self.free)

    def sent(self, op, nbytes):
        """So many bytes of it must pass."""
        self.free += nbytes / self.bandwidth
        self.due[self.last][-1] = self.free

    def after(self, op, x, peer):
        """It has been waited for: time passes until it is due. One that was posted before the link was there is."""
        if (op, id(x)) not in self.due:
            return
        waiting = self.due[op, id(x)]
        late = waiting.popleft() - self.clock()
        if not waiting:
            del self.due[op, id(x)]
        if late > 0:
            self.clock.sleep(late)
