"""Gossip: each rank trains by itself, and averages with a few neighbours. Nothing is summed over all ranks.

    x_i ← x_i - η g_i(x_i)              the inner optimizer's step, on the rank's own batch
    x_i ← x_i + Σ_j W_ij (x_j - x_i)    j: the neighbours of this meeting

    model = nn.mlp((64, 64))                                # the whole model, on each rank
    inner = optim.SGD(model.parameters(), 0.1)
    gossip = Gossip(model, inner, world, topology=topologies.ring(world.size))
    for inputs, labels in batches_of_this_rank:
        gossip.zero_grad()
        cross_entropy(model(inputs), labels).backward()     # the mean over the rank's own batch
        gossip.step()
    gossip.finish()                                         # now all ranks have the mean of all

W's columns sum to 1, so the mean of all ranks' values moves by the mean of their steps, whatever the graph is; how far
the ranks are from it (consensus()) depends on the graph. By the complete one it is data parallelism, for SGD with
momentum or without. With overlap=1 what is sent after a step is taken after the next, and travels while forward and
backward run:

    x_i ← Σ_j W_ij x_j - η g_i(x_i)     D-PSGD

A rank waits for its neighbours, which wait for theirs: one that is late for once holds up those who are near.

Sources: Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms? A case study for
decentralized parallel stochastic gradient descent" (overlap=1; the other order: Chen, Sayed 2012, "Diffusion adaptation
strategies for distributed optimization and learning over networks"); Koloskova et al. 2020, "A unified theory of
decentralized SGD with changing topology and local updates" (every). The graphs: topologies.py.
"""

import math
from contextlib import contextmanager

import numpy as np

from ... import comm as communication
from ... import ledger
from ...autodiff.primitive import lower
from ...autodiff.writes import wrote
from ...backend import module_of, to, to_device_of, xp, zeros_like
from ...comm.together import together
from ...divergence import Diverged
from ...optim.settings import check_saved_optimizer
from ..batch_norm import layers
from ..same_model import broadcast, check_same_model
from ..wrapping import ReducingModule, check_alone
from .inner import by_parameter, check_inner, own_shapes, restore, settings_of, with_prefix
from .topologies import Topology

AUTHOR = "Gossip"
TAG = 4711      # of all its messages: between two ranks they arrive in the order in which they were sent


class Gossip:
    """Trains a model by ranks that average with their neighbours.

    model     built alike on all ranks (checked; rank 0's values are broadcast), of one dtype, float32 or float64, and
              whole on each: not wrapped, nor cut
    inner     an Optimizer of all its parameters(), the rank's own; its state stays there
    comm      the Communicator (default: the world's)
    topology  a Topology of comm.size ranks (topologies.py)
    every     H, steps from one meeting to the next
    overlap   τ, steps from sending values to taking those that came, at most every; what is added then is
              Σ_j W_ij (x_j - x_i) of the values that were sent

    Each rank's batch counts as much as another's: where they aren't of one size, divide the sum over the rank's samples
    by the global number / N. All ranks make equally many steps. Frozen parameters and buffers are rank 0's once, then
    the rank's own. BatchNorm normalises by the rank's own batch; its running statistics aren't sent, and average() and
    finish() make them the mean over the ranks, as they do with parameters.

    At a meeting a rank sends one array of all elements that are trained to each of its neighbours, and nothing else. It
    holds 2 of these, and one for each rank that sends to it. A rank that sends inf or NaN is found by those that take
    it, and by itself: a Diverged on these, which keep their own values, names it. GradScaler, clipping, autocast and
    schedules are the inner optimizer's affair.

    ValueError on all ranks for settings that don't fit, or that aren't the same everywhere.
    """

    def __init__(self, model, inner, comm=None, *, topology, every=1, overlap=0):
        self.comm = communication.world() if comm is None else comm
        self.model, self.inner, self.topology, self.every, self.overlap = model, inner, topology, every, overlap
        self.settings = {"topology": repr(topology), "every": every, "overlap": overlap}
        together(self.comm, self._check)
        check_same_model(model, self.comm, AUTHOR, inner=settings_of(inner), **self.settings)
        self.every, self.overlap = int(every), int(overlap)
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            broadcast(self.comm, lower(values), name)
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.statistics = [(layer, name) for layer in layers(model) for name in layer._buffers]
        self.sent, self.change = self._values(), zeros_like(self._values())     # x_i; Σ_j W_ij (x_j - x_i)
        self.inbox = [zeros_like(self.sent) for _ in range(max(len(self._taken(k)) for k in range(topology.period)))]
        self.steps = self.meetings = 0
        self.pending = None     # the step after which those were sent that haven't been taken
        self.works = None       # of messages that haven't been waited for
        self.own = None         # inside average(): the rank's own arrays

    def _check(self):
        size = self.comm.size
        if not isinstance(self.topology, Topology) or self.topology.size != size:
            raise ValueError(f"Gossip: topology={self.topology!r} for the {size} ranks of {self.comm.name!r}; a "
                             f"Topology of as many, as topologies.ring({size})")
        if not 1 <= self.every < math.inf or self.every != int(self.every):
            raise ValueError(f"Gossip: every={self.every}; a whole number of steps, at least 1")
        if not 0 <= self.overlap <= self.every or self.overlap != int(self.overlap):
            raise ValueError(f"Gossip: overlap={self.overlap}; a whole number of steps, at least 0 and at most "
                             f"every={self.every}, so that what was sent is taken before more is")
        check_alone(self.model, AUTHOR)
        for path, m in self.model.named_modules():
            if isinstance(m, ReducingModule) or getattr(type(m), "is_part", False):
                raise ValueError(f"Gossip: {path or 'the model'} is a {type(m).__name__}, wrapped or cut for ranks "
                                 "that train together: Gossip wants a model that each rank has whole, for itself")
        check_inner(self.inner, self.model, AUTHOR)

    # ------------------------------------------------------------ training

    def zero_grad(self):
        """Forget all gradients."""
        self.inner.zero_grad()

    def step(self, scaler=None, after=None):
        """The inner optimizer's step, and what is due after it. All ranks call it equally often.

        scaler  the GradScaler of this rank, which makes the inner step, or leaves it out
        after   called after that, before anything is sent: for what writes to weights after each step
        """
        self._check_own("Gossip.step")
        if scaler is None:
            self.inner.step()
        else:
            scaler.step(self.inner)
        if after is not None:
            after()
        self.steps += 1
        if self.pending is not None and self.steps == self.pending + self.overlap:
            self._take()
        if self.steps % self.every == 0:
            self._post()
            if not self.overlap:
                self._take()

    def _taken(self, meeting):
        return self.topology.takes(meeting, self.comm.rank)

    def _post(self):
        for array in (self.sent, self.change, *self.inbox) if ledger.open_ledgers else ():
            ledger.keep(array, "buffer")
        self._values(self.sent)
        with ledger.labelled(f"meeting {self.meetings}"):
            self.works = [self.comm.irecv(array, j, TAG)
                          for (j, _), array in zip(self._taken(self.meetings), self.inbox, strict=False)]
            self.works += [self.comm.isend(self.sent, i, TAG)
                           for i in self.topology.sends(self.meetings, self.comm.rank)]
        self.pending, self.meetings = self.steps, self.meetings + 1

    def _settle(self):
        """Wait for what is under way, and work out what comes of it."""
        if self.works is None:
            return
        works, self.works = self.works, None
        for work in works:
            work.wait()
        self.change[...] = 0
        for (_, weight), theirs in zip(self._taken(self.meetings - 1), self.inbox, strict=False):
            theirs -= self.sent
            theirs *= weight
            self.change += theirs

    def _take(self):
        self._settle()
        step, self.pending = self.pending, None
        if not _finite(self.change):
            lost = [self.comm.rank] if not _finite(self.sent) else [
                j for (j, _), theirs in zip(self._taken(self.meetings - 1), self.inbox, strict=False)
                if not _finite(theirs)]
            raise Diverged(f"Gossip: rank {self.comm.rank} takes nothing of what was sent after step {step}, when rank "
                           f"{', '.join(map(str, lost))} had values that aren't finite. Lower the learning rate, clip "
                           "gradients, or look for it with detect_anomaly")
        for p, change in self._pieces(self.change):
            p.data[...] += change
            wrote(p.data, AUTHOR)

    def finish(self):
        """All ranks have the mean of all ranks' values. What is on its way is waited for, and left: it moves no mean.
        Collective."""
        self._check_own("Gossip.finish")
        self._settle()
        self.pending = None
        self._show(self._mean())

    # ------------------------------------------------------------ all ranks' values

    def consensus(self):
        """√(1/N Σ_i ‖x_i - x̄‖²), a float: how far the ranks' parameters are from their mean. Collective: an all-reduce
        of all elements, and one of a number."""
        away, mean = self._values(), self._values()
        self.comm.all_reduce(mean, op="mean")
        away -= mean
        square = np.array([float(away @ away)])
        self.comm.all_reduce(square, op="mean")
        return math.sqrt(square[0])

    @contextmanager
    def average(self):
        """Inside, the model has the mean of all ranks' values as they are now, to be evaluated, or saved:

            with gossip.average():
                checkpoints.save(step, model, gossip)

        Collective. Afterwards it has this rank's own again. RuntimeError inside another one.
        """
        self._check_own("Gossip.average")
        mean, self.own = self._mean(), self._arrays()
        try:
            self._show(mean)
            yield self.model
        finally:
            own, self.own = self.own, None
            self._show(own)

    def _check_own(self, what):
        if self.own is not None:
            raise RuntimeError(f"{what} inside average(), whose values aren't this rank's: end that block before")

    def _pieces(self, flat):
        """(parameter, what is its in a 1-d array of all elements), one after the other."""
        at = 0
        for p in self.params:
            yield p, flat[at:at + p.size].reshape(p.shape)
            at += p.size

    def _values(self, flat=None):
        """The parameters' values, 1-d: a new array, or in `flat`."""
        flat = zeros_like(self.params[0].data, sum(p.size for p in self.params)) if flat is None else flat
        for p, piece in self._pieces(flat):
            piece[...] = p.data
        return flat

    def _arrays(self):
        """[the parameters' values, 1-d; each of BatchNorm's statistics], copies."""
        return [self._values(), *(lower(layer._buffers[name]).copy() for layer, name in self.statistics)]

    def _mean(self):
        """The same, of all ranks."""
        arrays = self._arrays()
        for array in arrays:
            self.comm.all_reduce(array, op="mean")
        return arrays

    def _show(self, arrays):
        """Let the model have these values."""
        places = [p.data for p in self.params] + [lower(layer._buffers[name]) for layer, name in self.statistics]
        values = [piece for _, piece in self._pieces(arrays[0])] + arrays[1:]
        for array, new in zip(places, values, strict=True):
            array[...] = new
            wrote(array, AUTHOR)

    # ------------------------------------------------------------ as an optimizer, for checkpoints

    @property
    def param_groups(self):
        """One, of all parameters, whose settings are what a checkpoint must know beside arrays."""
        return [{"params": self.params, "gossip": self.settings}]

    def state_dict(self, copy=True):
        """As Optimizer.state_dict, of every parameter: this rank's values and the inner optimizer's state under its
        number; with overlap, what is to be added. Collective. What is on its way is waited for, and taken at its time:
        saving changes no curve."""
        self._settle()
        inner, (values, *statistics) = by_parameter(self.inner, copy), self.own or self._arrays()
        state = {id(p): {f"{self._mine}{name}": array for name, array in inner[id(p)][1].items()} for p in self.params}
        for kind, flat in {"values": values, "change": self.change}.items():
            for p, piece in self._pieces(flat) if kind == "values" or self.overlap else ():
                state[id(p)][f"{self._mine}{kind}"] = xp.array(to(piece, "cpu")) if copy else piece
        mine = {"settings": settings_of(self.inner), "updates": [inner[id(p)][0] for p in self.params],
                "statistics": [to(array, "cpu").tolist() for array in statistics]}
        facts = {"gossip": self.settings, "steps": self.steps, "meetings": self.meetings, "pending": self.pending,
                 "ranks": self.comm.all_gather_object(mine)}
        return {"class": type(self).__name__, "groups": [facts], "sizes": [len(self.params)],
                "steps": [self.steps] * len(self.params), "state": [state[id(p)] for p in self.params]}

    @property
    def _mine(self):
        return f"rank-{self.comm.rank}-"

    def own_shapes(self):
        """[{name: shape}] of the inner optimizer's state that isn't of its parameter's shape."""
        return own_shapes(self.inner, self.params, self._mine)

    def check_state(self, saved):
        """ValueError unless load_state_dict can take it."""
        check_saved_optimizer(saved, type(self).__name__)
        facts, = saved["groups"]
        if len(facts["ranks"]) != self.comm.size or len(saved["state"]) != len(self.params):
            raise ValueError(f"Gossip: the saved state is of {len(facts['ranks'])} ranks and {len(saved['state'])} "
                             f"parameters, this run has {self.comm.size} and {len(self.params)}")
        if other := [f"{k}={facts['gossip'].get(k)!r} (now {v!r})" for k, v in self.settings.items()
                     if facts["gossip"].get(k) != v]:
            raise ValueError(f"Gossip: the saved state is of a run with {', '.join(other)}")

    def load_state_dict(self, saved):
        """Go on from what state_dict gave, with as many ranks. Collective."""
        self._check_own("Gossip.load_state_dict")
        self.check_state(saved)
        self._settle()      # what this run has sent, and nobody takes
        (facts,), own = saved["groups"], [with_prefix(self._mine, arrays) for arrays in saved["state"]]
        mine = facts["ranks"][self.comm.rank]
        restore(self.inner, AUTHOR, mine["settings"], {
            id(p): (updates, with_prefix("", arrays, but=("values", "change")))
            for p, updates, arrays in zip(self.params, mine["updates"], own, strict=True)})
        values = self._values()
        for kind, flat in (("values", values), ("change", self.change)):
            for (_, piece), arrays in zip(self._pieces(flat), own, strict=True) if kind in own[0] else ():
                piece[...] = to_device_of(arrays[kind], piece)
        self._show([values, *(to_device_of(np.array(each, values.dtype), values) for each in mine["statistics"])])
        self.steps, self.meetings, self.pending = facts["steps"], facts["meetings"], facts["pending"]


def _finite(array):
    return bool(module_of(array).isfinite(array).all())
