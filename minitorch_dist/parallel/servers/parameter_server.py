"""The parameter server: some ranks keep the parameters, the others compute gradients.

    workers    2        3        4          each has samples, and a copy of the model
               |\\      /|\\      /|
               | \\____/_|_\\____/ |          push: a gradient's blocks;  pull: the parameters' blocks
               | /    \\ | /    \\ |
    servers    0 [ψ/2]     1 [ψ/2]          each keeps a block of the parameters, and an optimizer for it

    def sgd(parameters):
        return optim.SGD(parameters, lr=0.1)

    with ParameterServer(model, sgd, world, servers=2) as ps:           # on all ranks
        for batch in loader.epoch(0) if ps.is_worker else ():           # loader: rank=ps.index, size=len(ps.workers)
            ps.zero_grad()
            (cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count).backward()
            ps.step()                                                   # push, then pull
    # servers serve until all workers have left the block; then every rank's model has the final values

In sync mode a step ends when all workers have pushed: gradients are added along the tree of exact mode, in rank order,
so that the curve is DistributedDataParallel's, to the last bit with its micro-shards. In async mode each push is
applied when it comes, to parameters that others may have moved since they were pulled: its *staleness* is the number of
updates in between. max_staleness=s (stale synchronous parallel) holds a worker back that is more than s pushes ahead of
the slowest: with s=0 all go on together, and of W workers that push and pull at every step none is ever staler than
(W-1)(2s+1). It is the answer that waits, never the server.

Sources: Dean et al. 2012, "Large scale distributed deep networks" (DistBelief: Downpour SGD, n_fetch, n_push, Adagrad,
sharded servers); Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server"; Li
et al. 2014, "Scaling distributed machine learning with the parameter server".
"""

from collections import Counter
from math import inf

import numpy as np

from ... import comm as communication
from ...autodiff.primitive import lower
from ...autodiff.tensor import Tensor
from ...autodiff.writes import wrote
from ...backend import is_whole, to, to_device_of
from ...comm.reduction import cut
from ...divergence import Diverged
from ...flat import ALIGN, layout
from .. import batch_norm
from ..same_model import broadcast, check_same_model
from ..wrapping import check_alone
from .parameter_shard import Request, Shard
from .rpc import Rpc
from .rref import portable

MODES = ("sync", "async")
SHARD = "shard"         # the name under which servers keep theirs


class ParameterServer:
    """A module whose parameters are kept by some ranks, and trained by the others. Collective.

    module         built alike on all ranks (checked: ValueError with the first difference); rank 0's values are
                   broadcast. Its parameters that require grad must be of one dtype. With exact mode's micro-shards:
                   on workers wrap it before, in DistributedDataParallel(module, world.split(world.rank), exact=True,
                   micro_shards=8 // len(workers))
    optimizer      optimizer([(name, its piece here, 1-d), …]) -> an Optimizer, on servers, whose pieces lie where the
                   module is; one whose update of an element depends on that element alone (SGD, Adam, Adagrad …), so
                   that any cut gives the same
    comm           the Communicator (default: the world's). A process alone is server and worker
    servers        ranks 0 to servers-1 serve, the others work
    mode           "sync" or "async"
    max_staleness  async: s, pushes that a worker may be ahead of the slowest; None: any number
    n_fetch        async: pull at every n_fetch-th step only, and
    n_push         push, at every n_push-th step and at the end, the sum of the gradients since the last
    local_lr       between two pulls, move the copy by -local_lr · gradient (Downpour's α)
    clock          a comm.link.VirtualClock on each rank: requests are served in the order of the workers' times (then
                   of ranks) instead of as they come. Workers let their time pass by clock.sleep(seconds)
    orders         async: serve requests in these orders, a list of workers' ranks per server, as the `orders` of an
                   earlier run: it repeats itself to the last bit

    ValueError on all ranks for settings that don't fit, Diverged at a worker for a gradient that isn't finite. Once a
    step a worker pushes and pulls the parameters, each padded to 16 elements; the ledger counts that under "send" of
    the axis "rpc", and what goes with it under "envelope": some 400 bytes per request, and 200 per answer.
    A block each, one at a time. An error that leaves it on one rank is raised on the others too, as a RuntimeError;
    Diverged as itself.
    After the block, on all ranks: `history`, the servers' lists of Push; `orders`; `version`, the number of updates of
    server 0's block; and the model has the final values.
    """

    entered = False     # whether this process is in a block

    def __init__(self, module, optimizer, comm=None, servers=1, mode="sync", max_staleness=None, n_fetch=1, n_push=1,
                 local_lr=0.0, clock=None, orders=None):
        self.comm = comm if comm is not None else communication.world()
        check_alone(module, "ParameterServer")
        settings = {"servers": servers, "mode": mode, "max_staleness": max_staleness, "n_fetch": n_fetch,
                    "n_push": n_push, "local_lr": local_lr}
        check_same_model(module, self.comm, "ParameterServer", **settings, virtual=clock is not None, orders=orders)
        _check_settings(**settings, orders=orders)
        self.servers, self.workers = roles(self.comm.size, servers)
        self.is_server, self.is_worker = (self.comm.rank in ranks for ranks in (self.servers, self.workers))
        self.index = self.workers.index(self.comm.rank) if self.is_worker else None
        self.module, self.clock, self.local_lr = module, clock, local_lr
        self.sync, self.n_fetch, self.n_push = mode == "sync", int(n_fetch), int(n_push)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._lay_out(named, module)
        self.rpc = Rpc(self.comm)
        failed = None
        if self.is_server:
            lo, hi = self.blocks[self.servers.index(self.comm.rank)]
            order = None if orders is None else orders[self.comm.rank]
            kept = pieces(named, self.segments, lo, hi, self.values)
            try:
                self.shard = Shard(kept, (lo, hi), optimizer, self.workers, mode, max_staleness, clock is not None,
                                   order)
                self.rpc.register(SHARD, self.shard)
            except Exception as error:      # of `optimizer`, which runs here alone
                failed = portable(error)
        # Nobody goes on before all have come here: a call may not come before what it is for.
        if failures := [error for error in self.comm.all_gather_object(failed) if error is not None]:
            self.rpc.shutdown()
            raise failures[0]
        self.shards = [self.rpc.rref(rank, SHARD) for rank in self.servers]
        self.steps, self.versions = 0, [0] * len(self.servers)
        self.accrued = np.zeros_like(self.values)
        self.unused = set(range(len(named)))        # since the last push

    def _lay_out(self, named, module):
        """The parameters as one array, whose values are rank 0's, and the servers' blocks of it."""
        if not named or len({p.dtype for _, p in named}) > 1:
            raise ValueError("ParameterServer: the parameters that require grad must be of one dtype, and at least "
                             f"one; got {sorted({str(p.dtype) for _, p in named})}")
        if found := batch_norm.layers(module):
            raise ValueError(f"ParameterServer: the model has {len(found)} BatchNorm, whose statistics no server "
                             "keeps: use LayerNorm, or DistributedDataParallel")
        self.names, self.segments = [name for name, _ in named], layout(p for _, p in named)[0]
        size = self.segments[-1].end
        self.blocks = [cut(size, s, len(self.servers), ALIGN) for s in range(len(self.servers))]
        if empty := [s for s, (lo, hi) in zip(self.servers, self.blocks, strict=True) if lo == hi]:
            raise ValueError(f"ParameterServer: {size} elements, cut every {ALIGN}, leave nothing for server "
                             f"{empty[0]}: take fewer than servers={len(self.servers)}")
        self.values = np.zeros(size, named[0][1].dtype)
        for s in self.segments:
            self.values[s.start:s.stop] = to(s.tensor.data, "cpu").reshape(-1)
        self.comm.broadcast(self.values)
        self._show_values()
        trained = {id(p) for _, p in named}
        for name, values in (*module.named_parameters(), *module.named_buffers()):
            if id(values) not in trained:
                broadcast(self.comm, lower(values), name)

    # ------------------------------------------------------------ a worker

    def zero_grad(self):
        """Forget all gradients."""
        for s in self.segments:
            s.tensor.grad = None

    def step(self):
        """Push what backward has left, and pull, or what n_push and n_fetch say of it. Returns when this worker may go
        on."""
        if not self.is_worker:
            raise RuntimeError(f"ParameterServer: rank {self.comm.rank} is a server, and step() is for the workers, "
                               f"ranks {self.workers}")
        gradients = self._gradients()
        self.steps += 1
        for number, gradient in gradients.items():
            s = self.segments[number]
            if number in self.unused:
                self.accrued[s.start:s.stop] = gradient
            else:
                self.accrued[s.start:s.stop] += gradient
        self.unused -= set(gradients)
        push, pull = self.steps % self.n_push == 0, self.steps % self.n_fetch == 0
        if self.local_lr and not pull:
            self._local_step()
        if push or pull:
            self._ask(push, pull)

    def _gradients(self):
        """{number of a segment: its gradient, 1-d, on the host}. Diverged for one that isn't finite: before the first
        message, so that no server has taken its part."""
        found = {}
        for number, (name, s) in enumerate(zip(self.names, self.segments, strict=True)):
            if s.tensor.grad is not None:
                found[number] = gradient = to(s.tensor.grad.data, "cpu").reshape(-1)
                if (bad := gradient[~np.isfinite(gradient)]).size:
                    raise Diverged(f"ParameterServer: rank {self.comm.rank} has a gradient of {name!r} of which "
                                   f"{bad.size} of {gradient.size} values aren't finite, the first {bad[0]}; nothing "
                                   "was pushed. Lower the learning rate, or look for it with detect_anomaly")
        return found

    def _local_step(self):
        for s in self.segments:
            if s.tensor.grad is not None:
                p = s.tensor.data
                p -= self.local_lr * s.tensor.grad.data
                wrote(p, "ParameterServer.step")

    def _ask(self, push=False, pull=False, leaves=False):
        """One request to each server, all of them sent before the first answer is waited for. Where servers fail, the
        others have taken their part all the same: the first error is raised, and what was pushed is gone."""
        now, unused, answers = self.clock() if self.clock else 0.0, frozenset(self.unused), []
        failed = None
        for shard, (lo, hi), version in zip(self.shards, self.blocks, self.versions, strict=True):
            answers.append(shard.rpc_async().ask(Request(
                self.comm.rank, now, version, self.accrued[lo:hi] if push else None, unused, pull, leaves)))
        for i, ((lo, hi), answer) in enumerate(zip(self.blocks, answers, strict=True)):
            try:
                version, then, values = answer.wait()
            except Exception as error:
                failed = failed or error
                continue
            if pull:
                self.versions[i], self.values[lo:hi] = version, values
            if self.clock:
                self.clock.sleep(max(0.0, then - self.clock()))
        if push:
            self.accrued[...] = 0
            self.unused = set(range(len(self.segments)))
        if pull:
            self._show_values()
        if failed is not None:
            raise failed

    def _show_values(self):
        for s in self.segments:
            p = s.tensor.data
            p[...] = to_device_of(self.values[s.start:s.stop].reshape(p.shape), p)
            wrote(p, "a pull from the parameter servers")

    @property
    def version(self):
        """Updates that this rank's copy has seen, of server 0's block."""
        return self.versions[0]

    # ------------------------------------------------------------ the end

    def __enter__(self):
        if ParameterServer.entered and self.comm.size > 1:
            raise RuntimeError("ParameterServer: a block in another one's block would wait for ever, for servers serve "
                               "one at a time: make one ParameterServer of a module that has both models")
        if self.rpc.is_over:
            raise RuntimeError("ParameterServer: its block has ended, and nobody serves any more: make another one of "
                               "the module")
        ParameterServer.entered = True
        return self

    def __exit__(self, kind, error, trace):
        ParameterServer.entered = False
        if kind is not None:
            self.rpc.abandon(error)
            return
        failed = None               # to be raised when all ranks have the final values
        for leave in (self._leave, self.rpc.shutdown):
            try:
                leave()
            except Exception as caught:
                if self.rpc.broken is not None:     # another rank doesn't come
                    raise
                failed = failed or caught
        kept = [(self.shard.version, self.shard.history, self.shard.order)] if self.is_server else None
        kept = [self.comm.broadcast_object(kept, src)[0] for src in self.servers]
        self.versions, self.history, self.orders = (list(values) for values in zip(*kept, strict=True))
        for src, (lo, hi) in zip(self.servers, self.blocks, strict=True):
            if src == self.comm.rank:
                self.values[lo:hi] = self.shard.values()
            self.comm.broadcast(self.values[lo:hi], src)
        self._show_values()
        if failed is not None:
            raise failed

    def _leave(self):
        if self.is_worker:
            self._ask(push=self.steps % self.n_push > 0, leaves=True)

    def staleness(self):
        """{staleness: number of pushes} over all servers, after the block."""
        return dict(sorted(Counter(push.staleness for pushes in self.history for push in pushes).items()))


def roles(size, servers):
    """(the servers' ranks, the workers') of `size` ranks. ValueError where nobody is left."""
    if size == 1 and servers == 1:
        return [0], [0]
    if not 1 <= servers < size or not is_whole(servers):
        raise ValueError(f"ParameterServer: servers={servers} of {size} ranks; at least 1 serves, and at least 1 works")
    return list(range(servers)), list(range(servers, size))


def pieces(named, segments, lo, hi, values):
    """[(number of the segment, name, leaf)] of what elements lo to hi of the layout have of each parameter, 1-d, on the
    first one's device: a GPU's optimizer rounds otherwise than the host's, and is to give the bits of one on a GPU."""
    found, device = [], named[0][1].device
    for number, ((name, _), s) in enumerate(zip(named, segments, strict=True)):
        start, stop = max(s.start, lo), min(s.stop, hi)
        if start < stop:
            piece = to(values[start:stop].copy(), device)
            found.append((number, name, Tensor(piece).requires_grad_()))
    return found


def _check_settings(servers, mode, max_staleness, n_fetch, n_push, local_lr, orders):
    if mode not in MODES:
        raise ValueError(f"ParameterServer: mode={mode!r}; one of {', '.join(MODES)}")
    only_async = {"max_staleness": (max_staleness, None), "n_fetch": (n_fetch, 1), "n_push": (n_push, 1),
                  "local_lr": (local_lr, 0.0), "orders": (orders, None)}
    for name, (value, default) in only_async.items():
        if mode == "sync" and value != default:
            raise ValueError(f"ParameterServer: {name}={value} is for mode='async'; in sync mode all workers push and "
                             "pull at every step")
    counted = [n_fetch, n_push, *([] if max_staleness is None else [max_staleness])]
    if not all(map(is_whole, counted)) or min(n_fetch, n_push) < 1 or counted[-1] < 0:
        raise ValueError(f"ParameterServer: n_fetch={n_fetch} and n_push={n_push} must be at least 1, "
                         f"max_staleness={max_staleness} at least 0, or None: whole numbers")
    if not 0 <= local_lr < inf:
        raise ValueError(f"ParameterServer: local_lr={local_lr} must be at least 0, and finite")
    if orders is not None and len(orders) != servers:
        raise ValueError(f"ParameterServer: {len(orders)} orders for {servers} servers; a list of ranks for each")
