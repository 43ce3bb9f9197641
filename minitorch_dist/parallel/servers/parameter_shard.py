"""What a parameter server keeps, and in which order it serves: the other half of parameter_server.py."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...autodiff.tensor import Tensor
from ...backend import on_host, to, to_device_of
from ...comm.reduction import tree_reduce
from ...flat import FlatBuffer
from ...optim.settings import check_elementwise
from .rpc import Future


class Push(NamedTuple):
    """What a server notes of a push.

    worker     rank
    version    updates that the parameters had seen when it was applied
    staleness  those among them that the worker's copy had not
    time       seconds, of the workers' VirtualClocks or since the ParameterServer was made
    """

    worker: int
    version: int
    staleness: int
    time: float


@dataclass(eq=False)
class Request:
    """What a worker asks a server for: to take a gradient, or None; to answer with the parameters; to let it go."""

    worker: int
    time: float
    version: int        # of the worker's copy
    gradient: object
    unused: frozenset   # numbers of the segments that it has no gradient for
    pull: bool
    leaves: bool = False
    clock: int = 0      # pushes of this worker up to here
    answer: object = None


class Shard:
    """What a server keeps: a block of the parameters, their optimizer, and the workers' requests.

    A request waits in `requests` for its turn; when it is served its gradient is taken, and its answer waits in `held`
    until the worker may go on.
    """

    def __init__(self, pieces, block, optimizer, workers, mode, max_staleness, by_time, order):
        self.numbers = [number for number, _, _ in pieces]      # of the segments in the whole layout
        self.block, self.size = block, block[1] - block[0]
        self.flat = FlatBuffer([piece for _, _, piece in pieces])
        self.optimizer = optimizer([(name, piece) for _, name, piece in pieces])
        check_elementwise(self.optimizer, "ParameterServer")
        self.sync, self.max_staleness = mode == "sync", max_staleness
        self.by_time, self.given = by_time, order
        self.clocks = dict.fromkeys(workers, 0)     # worker -> its pushes; of those that haven't left
        self.left, self.began, self.time = [], time.perf_counter(), 0.0
        self.requests, self.held, self.round = [], [], {}
        self.version, self.history, self.order = 0, [], []

    def values(self):
        """A copy of the parameters, as one array of the host in the layout's order."""
        values = self.flat.params[:self.size]
        return values.copy() if on_host(values) else to(values, "cpu")

    def ask(self, request):
        """Take a worker's request; a Future of (version, time, parameters or None). ValueError for a gradient of
        another shape or dtype than the block."""
        self._check(request)
        request.answer = Future()
        self.requests.append(request)
        turn = request
        try:
            while (turn := self._turn()) is not None:
                self.requests.remove(turn)
                self._serve(turn)
        except Exception as error:      # of the optimizer, for instance: nobody will be served any more
            self._fail([*self.requests, *self.held, turn], error)
        return request.answer

    def _check(self, r):
        lo, hi = self.block
        if r.gradient is None:
            return
        if r.gradient.shape != (self.size,) or r.gradient.dtype != self.flat.dtype:
            raise ValueError(f"rank {r.worker} pushes {r.gradient.dtype}{list(r.gradient.shape)}, and this server "
                             f"keeps elements {lo} to {hi - 1} of the parameters, {self.flat.dtype}[{self.size}]")
        if self.sync and self.left:
            raise RuntimeError(self._uneven())

    def _uneven(self):
        return (f"worker {self.left[0]} has left after {self.version} steps, and others go on: in sync mode all "
                "workers take equally many steps (data.Loader cuts evenly), in async mode they needn't")

    def _turn(self):
        """The request to be served now; None: one that hasn't come."""
        if self.given is not None and len(self.order) < len(self.given):
            worker = self.given[len(self.order)]
            if worker not in self.clocks or any(r.worker == worker for r in self.held):
                raise RuntimeError(f"orders: request {len(self.order)} is to be worker {worker}'s, which has left, or "
                                   "is held back, or is none: they are of another run. Workers here: "
                                   f"{list(self.clocks)}, held back: {[r.worker for r in self.held]}")
            return next((r for r in self.requests if r.worker == worker), None)
        if self.by_time:
            if len(self.requests) + len(self.held) < len(self.clocks):      # somebody computes, and may come earlier
                return None
            return min(self.requests, key=lambda r: (r.time, r.worker), default=None)
        return self.requests[0] if self.requests else None

    def _serve(self, r):
        self.order.append(r.worker)
        self.time = max(self.time, r.time) if self.by_time else time.perf_counter() - self.began
        if r.gradient is not None:
            self.clocks[r.worker] += 1
            self.history.append(Push(r.worker, self.version, self.version - r.version, self.time))
            self._take(r)
        r.clock = self.clocks[r.worker]
        self.held.append(r)
        if r.leaves:
            del self.clocks[r.worker]
            self.left.append(r.worker)
            if self.sync:       # all others that push are a step ahead: those in the round, and those not served yet
                pushing = [*self.round.values(), *(w for w in self.requests if w.gradient is not None)]
                self._fail(pushing, RuntimeError(self._uneven()))
                self.round = {}
        for waiting in [w for w in self.held if self._may_go(w)]:
            self.held.remove(waiting)
            # of a copy: others may be served before the answer leaves
            waiting.answer.set_result((self.version, self.time, self.values() if waiting.pull else None))

    def _may_go(self, r):
        if r.leaves:
            return True
        if self.sync:
            return self.version >= r.clock
        return self.max_staleness is None or r.clock - min(self.clocks.values()) <= self.max_staleness

    def _fail(self, requests, error):
        """Answer these, each once, by an exception."""
        for r in {id(r): r for r in requests}.values():
            if not r.answer.is_completed():
                r.answer.set_exception(error)
        self.requests = [r for r in self.requests if not r.answer.is_completed()]
        self.held = [r for r in self.held if not r.answer.is_completed()]

    def _take(self, r):
        """Apply a gradient; in sync mode the sum of all workers', when the last is there."""
        if not self.sync:
            self._update(r.gradient, r.unused)
            return
        self.round[r.worker] = r
        if len(self.round) == len(self.clocks):
            pushed = [self.round[worker] for worker in sorted(self.round)]
            between = [np.empty_like(r.gradient) for _ in range((len(pushed) - 1).bit_length())]
            total = tree_reduce([p.gradient for p in pushed], np.add, pushed[0].gradient, between)
            self.round = {}
            self._update(total, frozenset.intersection(*(p.unused for p in pushed)))

    def _update(self, gradient, unused):
        for number, s in zip(self.numbers, self.flat.segments, strict=True):
            view = s.tensor.leaf.grad_view
            view[...] = to_device_of(gradient[s.start:s.stop], view)
            s.tensor.grad = None if number in unused else Tensor(view)
        self.optimizer.step()
        self.version += 1
