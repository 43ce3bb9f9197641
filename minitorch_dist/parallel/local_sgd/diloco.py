"""DiLoCo: workers that train by themselves, and meet every H steps. Data parallelism for slow links.

    worker 0   θ ─ AdamW ─ AdamW ─ … ─ θ₀ ┐                          ┌ θ ─ AdamW ─ …
    worker 1   θ ─ AdamW ─ AdamW ─ … ─ θ₁ ┤  Δ = Σ n_k/n (θ - θ_k)   ├ θ ─ AdamW ─ …
    worker 2   θ ─ AdamW ─ AdamW ─ … ─ θ₂ ┘  θ ← Nesterov(θ, Δ)      └ θ ─ AdamW ─ …
               |------ H steps -------|       one all-reduce

    model = nn.GPT(vocabulary=65, length=64)                # a worker of one rank
    inner = optim.AdamW(model.parameters(), 1e-3)
    diloco = DiLoCo(model, inner, world, every=100)
    for inputs, labels in batches_of_this_worker:
        diloco.zero_grad()
        cross_entropy(model(inputs), labels).backward()     # the mean over the worker's own batch
        diloco.step(len(labels))
    diloco.finish()

With every=1, SGD inside and SGD(lr=1) outside that is data parallelism; with more steps it sends 1/H of its bytes. A
worker may be several ranks, which share its work by DistributedDataParallel or fully_shard, over fast links:

    mesh = comm.DeviceMesh(workers=2, dp=4)
    model = fully_shard(model, mesh["dp"], stage=1)         # with DDP each rank would send all of it
    diloco = DiLoCo(model, optim.AdamW(model.parameters(), 1e-3), mesh["workers"], every=100)

Streaming: fragments of the model are sent at different steps of a round, which needs less at a time; with overlap=τ
they are on their way while τ more inner steps are made; and outer gradients are rounded to few bits.

Sources: Stich 2019, "Local SGD converges fast and communicates little"; Douillard et al. 2023, "DiLoCo: distributed
low-communication training of language models" (AdamW inside, Nesterov's momentum outside); Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication" (fragments, overlap, merging, E3M0). Weights by samples are federated
averaging's (federated.py); how E3M0 is scaled and rounded is this project's choice (parallel/encodings.py).
"""

import math
from contextlib import contextmanager
from functools import partial

from ... import comm as communication
from ... import ledger
from ...autodiff.primitive import lower
from ...autodiff.writes import wrote
from ...backend import number, to, to_device_of, xp
from ...comm.reduction import is_power_of_two
from ...comm.together import together
from ...nn.module import Module
from ...optim import SGD
from ...optim.settings import check_saved_optimizer
from .. import batch_norm
from ..encodings import Whole
from ..fsdp.fully_sharded import FullySharded
from ..same_model import broadcast, check_same_model
from ..wrapping import annotated
from .fragments import AUTHOR, PATTERNS, Fragment, encoded, fragments_of, in_full, ranks_inside, timetable
from .inner import by_parameter, check_inner, own_shapes, restore, settings_of, with_prefix


def nesterov(params):
    """The outer optimizer of the paper."""
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Trains a model by workers that meet every H steps.

    model      this worker's, built alike on all ranks (checked; rank 0's values are broadcast), of one dtype; it may be
               a DistributedDataParallel or fully_shard model of this worker's ranks, or have parts of tensors on them
    inner      an Optimizer of all its parameters(), the worker's own; its state stays there
    comm       the Communicator of the ranks that are, each in its worker, what this one is here (default: the world's,
               for workers of one rank each)
    every      H, steps from one meeting to the next
    outer      outer([(name, leaf)]) -> an Optimizer of the common values of a fragment, one whose update of an element
               depends on that element alone; its gradient is Σ n_k/n (θ - θ_k)
    fragments  P, parts of the model that are sent at different steps of a round: see timetable
    pattern    "strided": units k, k + P, … are fragment k; "sequential": neighbours are
    overlap    τ, inner steps from sending a fragment to taking what has come of it, below every
    mix        what a worker has then: (1 - mix) · its own values + mix · the common ones. 1 forgets what it has done
               meanwhile, and on how many samples; 0.5 is the mean of both
    encoding   of the differences: None (as they are), Sketch or E3M0 of parallel/encodings.py
    exact      add differences up along the balanced tree of exact mode, for a power of two of workers
    seed       of the encoding's random rounding

    A worker's weight is the samples that it has told step() of: no mean of means. All workers make equally many steps,
    whatever they have. Frozen parameters and buffers are rank 0's once, then the worker's own; BatchNorm is refused.

    A worker that diverges, so that values which it sends are inf or NaN, is found when they are taken: a ValueError on
    all ranks of all workers names it, and the common values stay as they were. So is one whose ranks have told step()
    of other samples. GradScaler, clipping, autocast and schedules are the inner optimizer's affair.

    ValueError on all ranks for settings that don't fit, or that aren't the same everywhere. What is held beside the
    worker's own training is the common values, a buffer to send and the outer optimizer's state: the ledger counts that
    as "optimizer". A rank sends 2(W-1)/W · (its elements, each parameter padded to 16, each fragment with W numbers for
    samples to 4,096) per round of W workers, encoded (W-1) times its message, and nothing in between. Ranks
    of one worker compare three numbers before a fragment is sent.
    """

    def __init__(self, model, inner, comm=None, *, every, outer=nesterov, fragments=1, pattern="strided", overlap=0,
                 mix=1.0, encoding=None, exact=False, seed=0):
        self.comm = communication.world() if comm is None else comm
        self.model, self.inner, self.inside = model, inner, ranks_inside(model)
        self.settings = {"every": every, "fragments": fragments, "pattern": pattern, "overlap": overlap, "mix": mix,
                         "encoding": repr(encoding), "exact": exact, "seed": seed}
        self._check_alike(inner=settings_of(inner), **self.settings)
        _check_settings(every, fragments, pattern, overlap, mix, encoding)
        every, fragments, overlap, mix = int(every), int(fragments), int(overlap), number(mix)
        if exact and not is_power_of_two(self.comm.size):
            raise ValueError("DiLoCo: exact=True adds up along a balanced binary tree, for a power of two of workers, "
                             f"not {self.comm.size}")
        self.every, self.overlap, self.mix = every, overlap, mix
        self.send = in_full(exact) if encoding is None else encoded(encoding, seed)
        self._check_model()
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if id(values) not in trained:
                broadcast(self.comm, lower(values), name)
        self.fragments = [Fragment(k, due, named, self.comm, self.inside, outer) for k, ((due, _), named) in enumerate(
            zip(timetable(every, fragments), fragments_of(model, fragments, pattern), strict=True))]
        self._check_alike(outer=[settings_of(f.optimizer) for f in self.fragments])
        self.steps = 0
        self.own = None     # inside common(): {id of a parameter: the worker's values}
        self._written()

    def _check_alike(self, **settings):
        """ValueError on all ranks of all workers where some have another model, or other settings."""
        same = partial(check_same_model, wrapper="DiLoCo", **settings)
        self._together(lambda: same(self.model, self.comm))
        for comm in self.inside:    # whoever has cut the model has looked at it
            self._together(partial(same, Module(), comm))

    def _together(self, work):
        """work() on all ranks of this worker: where it raises on some, it does on all."""
        for comm in self.inside:
            work = partial(together, comm, work)
        work()

    def _check_model(self):
        model = self.model
        for inside in self.inside:
            if len(shared := sorted({*inside.world_ranks} & {*self.comm.world_ranks})) > 1:
                raise ValueError(f"DiLoCo: the model is shared by ranks {shared}, which are workers of their own: wrap "
                                 'or cut it over the ranks of one worker, as in mesh["dp"] beside mesh["workers"]')
        if found := list(annotated(model)):
            raise ValueError(f"DiLoCo: {', '.join(found[:4])} of this model lies on a mesh "
                             "(parallel/sharding/annotate.py), and has no part that could be averaged alone: cut the "
                             "model by parallelize_module or fully_shard")
        if found := batch_norm.layers(model):
            raise ValueError(f"DiLoCo: the model has {len(found)} BatchNorm, whose statistics nobody averages: take "
                             "LayerNorm")
        check_inner(self.inner, model, AUTHOR)

    # ------------------------------------------------------------ training

    def zero_grad(self):
        """Forget all gradients."""
        self.inner.zero_grad()

    def step(self, count, scaler=None, after=None):
        """The inner optimizer's step, and what is due after it. All workers call it equally often.

        count   how many samples (or tokens) this worker's loss was the mean over, the same on all of its ranks; 0 for a
                worker that has none left
        scaler  the GradScaler of this worker, which makes the inner step, or leaves it out
        after   called after that, before anything is sent: for what writes to weights after each step. Of a model that
                was pruned before DiLoCo was made, by the same masks on all workers, the common values stay so:

                    diloco.step(len(labels), after=pruning.apply)
        """
        self._check_own("DiLoCo.step")
        if not 0 <= count < math.inf:
            raise ValueError(f"DiLoCo.step: count={count}; the samples that the loss was the mean over, at least 0")
        if scaler is None:
            self.inner.step()
        else:
            scaler.step(self.inner)
        if after is not None:
            after()
        self.steps += 1
        for f in self.fragments:
            f.samples += float(count)
            if ledger.open_ledgers:
                ledger.keep(f.flat.params, "optimizer")
                ledger.keep(f.flat.grads, "optimizer")
        for f in self.fragments:
            if (self.steps - f.due) % self.every == 0:
                self._post(f)
        for f in self.fragments:
            if f.pending and self.steps == f.sent + self.overlap:
                self._take(f, self.mix)

    def finish(self):
        """Meet once more: what is on its way is taken, steps that were made since (and that mix=1 hasn't forgotten) are
        averaged, and every worker has the common values; where nobody has had a sample they stay. Collective."""
        self._check_own("DiLoCo.finish")
        for f in self.fragments:
            forgets = f.pending and self.mix == 1       # then all have the common values already
            if f.pending:
                self._take(f, self.mix, needed=False)
            if f.sent < self.steps and not forgets:
                self._post(f)
                self._take(f, 1.0, needed=False)
            f.show()
        self._written()

    def _check_own(self, what):
        if self.own is not None:
            raise RuntimeError(f"{what} inside common(), whose values aren't this worker's: end that block before")

    def _post(self, f):
        if ledger.open_ledgers:
            ledger.event("post", f.label)
        with ledger.labelled(f.label):
            f.post(self.steps, self.send)

    def _take(self, f, mix, needed=True):
        if ledger.open_ledgers:
            ledger.event("take", f.label)
        with ledger.labelled(f.label):
            f.take(mix, needed)
        self._written()

    def _written(self):
        """Let stages 1 and 2 of fully_shard gather the parameters anew."""
        for m in self.model.modules():
            if isinstance(m, FullySharded):
                m.stale = True

    @contextmanager
    def common(self):
        """Inside, the model has the common values of all fragments as they are now, to be evaluated, or saved:

            with diloco.common():
                checkpoints.save(step, model, diloco)

        On all ranks alike for fully_shard. Afterwards it has this worker's own again. RuntimeError inside another one,
        and inside gathered() of stage 3, whose values would stay this worker's.
        """
        if self.own is not None:
            raise RuntimeError("DiLoCo.common inside common(): the model has these values already")
        if any(m.values.held > m.keeping for m in self.model.modules() if isinstance(m, FullySharded)):
            raise RuntimeError("DiLoCo.common inside gathered(), whose values would stay this worker's own: end that "
                               "block before, and open it inside common()")
        self.own = {id(p): p.data.copy() for f in self.fragments for p in f.local}
        try:
            for f in self.fragments:
                f.show()
            self._written()
            yield self.model
        finally:
            own, self.own = self.own, None
            for p in (p for f in self.fragments for p in f.local):
                p.data[...] = own[id(p)]
                wrote(p.data, AUTHOR)
            self._written()

    # ------------------------------------------------------------ as an optimizer, for checkpoints

    @property
    def param_groups(self):
        """One, of all parameters, whose settings are what a checkpoint must know beside arrays."""
        return [{"params": [p for f in self.fragments for p in f.local], "round": self.settings}]

    def state_dict(self, copy=True):
        """As Optimizer.state_dict, of every parameter: the common value and the outer optimizer's state, the values and
        the inner optimizer's state of this worker under its number; with overlap, the sum that was sent. Collective.
        What is on its way is waited for, and taken at its time: saving changes no curve."""
        for f in self.fragments:
            f.settle()
        inner, outer = by_parameter(self.inner, copy), {}
        for f in self.fragments:
            found = by_parameter(f.optimizer, copy)
            outer |= {id(p): found[id(leaf)] for p, leaf in zip(f.local, f.leaves, strict=True)}
        state = []
        for f in self.fragments:
            for p, s in zip(f.local, f.flat.segments, strict=True):
                arrays = {"common": f.flat.params[s.start:s.stop].reshape(p.shape),
                          f"{self._mine}values": p.data if self.own is None else self.own[id(p)]}
                if self.overlap:
                    arrays["sum"] = f.flat.grads[s.start:s.stop].reshape(p.shape)
                arrays = {name: xp.array(to(array, "cpu")) if copy else array for name, array in arrays.items()}
                state.append(arrays | {f"outer-{name}": array for name, array in outer[id(p)][1].items()}
                             | {f"{self._mine}{name}": array for name, array in inner[id(p)][1].items()})
        params = self.param_groups[0]["params"]
        mine = {"settings": settings_of(self.inner), "samples": [f.samples for f in self.fragments],
                "updates": [inner[id(p)][0] for p in params]}
        settings = {"round": self.settings, "steps": self.steps, "workers": self.comm.all_gather_object(mine),
                    "fragments": [{"sent": f.sent, "pending": f.pending, "counts": f.counts,
                                   "settings": settings_of(f.optimizer)} for f in self.fragments]}
        return {"class": type(self).__name__, "groups": [settings], "sizes": [len(params)],
                "steps": [outer[id(p)][0] for p in params], "state": state}

    @property
    def _mine(self):
        return f"worker-{self.comm.rank}-"

    def own_shapes(self):
        """[{name: shape}] of the inner optimizer's state that isn't of its parameter's shape; of the outer none is."""
        return own_shapes(self.inner, self.param_groups[0]["params"], self._mine)

    def check_state(self, saved):
        """ValueError unless load_state_dict can take it."""
        check_saved_optimizer(saved, type(self).__name__)
        (settings,), params = saved["groups"], self.param_groups[0]["params"]
        if other := [f"{k}={settings['round'].get(k)!r} (now {v!r})" for k, v in self.settings.items()
                     if settings["round"].get(k) != v]:
            raise ValueError(f"DiLoCo: the saved state is of a run with {', '.join(other)}")
        if len(settings["workers"]) != self.comm.size or len(saved["state"]) != len(params):
            raise ValueError(f"DiLoCo: the saved state is of {len(settings['workers'])} workers and "
                             f"{len(saved['state'])} parameters, this run has {self.comm.size} and {len(params)}")

    def load_state_dict(self, saved):
        """Go on from what state_dict gave, with as many workers; the ranks of each may be others. Collective."""
        self._check_own("DiLoCo.load_state_dict")
        self.check_state(saved)
        settings, = saved["groups"]
        mine, params = settings["workers"][self.comm.rank], self.param_groups[0]["params"]
        entries = zip(saved["state"], saved["steps"], mine["updates"], strict=True)
        of = {id(p): entry for p, entry in zip(params, entries, strict=True)}
        restore(self.inner, AUTHOR, mine["settings"], {
            key: (updates, with_prefix(self._mine, arrays, but=["values"]))
            for key, (arrays, _, updates) in of.items()})
        self.steps = settings["steps"]
        for f, samples, there in zip(self.fragments, mine["samples"], settings["fragments"], strict=True):
            f.settle()      # what this run has sent, and nobody takes
            restore(f.optimizer, AUTHOR, there["settings"], {
                id(leaf): (of[id(p)][1], with_prefix("outer-", of[id(p)][0]))
                for p, leaf in zip(f.local, f.leaves, strict=True)})
            for p, s in zip(f.local, f.flat.segments, strict=True):
                arrays = {name: to_device_of(array, p.data) for name, array in of[id(p)][0].items()}
                p.data[...] = arrays[f"{self._mine}values"]
                f.flat.params[s.start:s.stop] = arrays["common"].reshape(-1)
                if self.overlap:
                    f.flat.grads[s.start:s.stop] = arrays["sum"].reshape(-1)
                wrote(p.data, AUTHOR)
            wrote(f.flat.params, AUTHOR)
            f.samples, f.sent, f.pending, f.counts = samples, there["sent"], there["pending"], there["counts"]
        self._written()


def _check_settings(every, fragments, pattern, overlap, mix, encoding):
    if not 1 <= every < math.inf or every != int(every):
        raise ValueError(f"DiLoCo: every={every}; a whole number of steps, at least 1")
    if not 1 <= fragments <= every or fragments != int(fragments):
        raise ValueError(f"DiLoCo: fragments={fragments}, of which each has a step of its own in a round of "
                         f"every={every}: a whole number, at least 1, at most that")
    if pattern not in PATTERNS:
        raise ValueError(f"DiLoCo: pattern={pattern!r}; one of {', '.join(PATTERNS)}")
    if not 0 <= overlap < every or overlap != int(overlap):
        raise ValueError(f"DiLoCo: overlap={overlap}; a whole number of steps, at least 0 and below every={every}, so "
                         "that a fragment is taken before it is sent again")
    if not 0 < mix <= 1:
        raise ValueError(f"DiLoCo: mix={mix}; the share of the common values, above 0 and at most 1")
    if encoding is not None and type(encoding).project is not Whole.project:        # as Subspace, or one's own
        raise ValueError(f"DiLoCo: {encoding} is for updates that training has kept in its subspace, which inner "
                         "optimizers don't: take Sketch or E3M0")
