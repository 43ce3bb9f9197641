"""What workers that train by themselves have in common, and how it moves: the other half of diloco.py.

    params   | θ: the common values of when the workers met last              | pad
    grads    | n_k (θ - θ_k), then Σ n_k (θ - θ_k) / n: the outer gradient    | n_0 n_1 … | pad

One FlatBuffer per fragment. Behind the gradients stands a number per worker: each writes how many samples it has had
since the fragment was sent last, and 0 for the others, so that the sum tells all of them everybody's;
or, in their place, why it has nothing to add: LOST or APART.
"""

import numpy as np

from ...autodiff.tensor import Tensor
from ...autodiff.writes import wrote
from ...backend import module_of, to, to_device_of
from ...comm.reduction import cut
from ...divergence import Diverged
from ...flat import FlatBuffer
from ...ledger import keep, open_ledgers
from ...optim.settings import check_elementwise
from ..data_parallel import DistributedDataParallel
from ..encodings import Channel
from ..fsdp.fully_sharded import FullySharded
from ..fsdp.grouping import default_units, group

AUTHOR = "DiLoCo"
LOST, APART = -1, -2    # in the place of a worker's samples: its values aren't finite; its ranks count otherwise

# pattern -> which of the units of a model are the k-th of n fragments
PATTERNS = {
    "sequential": lambda units, k, n: units[slice(*cut(len(units), k, n))],
    "strided": lambda units, k, n: units[k::n],
}


def timetable(every, fragments=1, overlap=0):
    """[(step after which it is sent, step after which it is taken)] of each fragment's first round, counted from 1.
    Each is sent again `every` steps later.

        timetable(6, 3, overlap=1)      fragment 0   · S T · · · · S T · · ·        [(2, 3), (4, 5), (6, 7)]
                                        fragment 1   · · · S T · · · · S T ·
                                        fragment 2   · · · · · S T · · · · S
    """
    sent = [(k + 1) * every // fragments for k in range(fragments)]
    return [(step, step + overlap) for step in sent]


def fragments_of(model, fragments, pattern):
    """[[(name, this rank's tensor)]] of the parameters that are trained, per fragment: units, as of fully_shard, stay
    together. ValueError where there are too few."""
    if isinstance(model, FullySharded):
        units = [list(zip(unit.names, unit.pieces, strict=True)) for unit in model.trained]
    else:
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        units = [named for _, _, named in group(inside, default_units(inside), caller="DiLoCo", called=False)]
    if len(units) < fragments:
        raise ValueError(f"DiLoCo: fragments={fragments} of a model of {len(units)} units (the modules in its "
                         "outermost Sequentials or ModuleLists, and the rest): take fewer")
    return [[(name, p) for named in PATTERNS[pattern](units, k, fragments) for name, p in named if p.requires_grad]
            for k in range(fragments)]


def outer_step(optimizer, gradients):
    """One step by an outer gradient: how far the values lie from the mean of where workers, or clients, have come from
    them. gradients: [(leaf, array of its shape and dtype)]. Source: Reddi et al. 2021, "Adaptive federated
    optimization"."""
    for leaf, gradient in gradients:
        leaf.grad = gradient
    optimizer.step()
    for leaf, _ in gradients:
        leaf.grad = None


def ranks_inside(model):
    """[Communicator] of the ranks that train this model together: those of its wrapper, then those that hold parts of
    its tensors."""
    parts = [m.comm for m in model.modules() if getattr(type(m), "is_part", False)]
    comms = dict.fromkeys([getattr(model, "comm", None), *parts])
    return [comm for comm in comms if comm is not None and comm.size > 1]


class Fragment:
    """Parameters that are sent together.

    index, due  its number, and the step of a round after which it is sent
    named       [(name, this worker's tensor)], of one dtype
    comm        the Communicator of the workers
    inside      ranks_inside of the model
    outer       outer([(name, leaf)]) -> the Optimizer of the common values

    samples     that this worker has had since it was sent last, which was after step `sent`, and that its values are
                still of: none when the common ones take their place
    pending     it has been sent, and not been taken yet
    under_way   what waits for it, until it has been waited for
    counts      then: everybody's samples
    """

    def __init__(self, index, due, named, comm, inside, outer):
        self.index, self.due, self.label, self.comm, self.inside = index, due, f"fragment {index}", comm, inside
        self.names, self.local = [name for name, _ in named], [p for _, p in named]
        self.leaves = [Tensor(p.data.copy()).requires_grad_() for p in self.local]
        self.flat = FlatBuffer(self.leaves, empty=comm.empty, spare=comm.size)
        comm.broadcast(self.flat.params, src=0)
        wrote(self.flat.params, AUTHOR)
        self.optimizer = outer(list(zip(self.names, self.leaves, strict=True)))
        check_elementwise(self.optimizer, AUTHOR)
        self.samples, self.sent, self.pending, self.under_way, self.counts = 0.0, 0, False, None, []
        self.show()

    def show(self, mix=1.0):
        """Let the worker's values be (1 - mix) · its own + mix · the common ones."""
        for s, p in zip(self.flat.segments, self.local, strict=True):
            common = self.flat.params[s.start:s.stop].reshape(p.shape)
            p.data[...] = common if mix == 1 else (1 - mix) * p.data + mix * common
            wrote(p.data, AUTHOR)

    def post(self, step, send):
        """Send this worker's difference, by send(fragment) -> a function that waits."""
        flat = self.flat
        for s, p in zip(flat.segments, self.local, strict=True):
            flat.grads[s.start:s.stop] = flat.params[s.start:s.stop] - p.data.reshape(-1)
        flat.grads *= self.samples
        said = self._said(bool(module_of(flat.grads).isfinite(flat.grads).all()))
        if said in (LOST, APART):
            flat.grads[...] = 0
        flat.tail[...] = 0
        flat.tail[self.comm.rank] = said
        self.sent, self.samples, self.pending = step, 0.0, True
        self.under_way = send(self)
        wrote(flat.grads, AUTHOR)

    def _said(self, finite):
        """The samples of this worker, LOST or APART: the same on all of its ranks, each of which meets other ranks of
        the other workers."""
        seen = np.array([self.samples, -self.samples, not finite], np.float64)
        for comm in self.inside:
            comm.all_reduce(seen, op="max")
        most, least, lost = seen[0], -seen[1], seen[2]
        if most != least:
            return APART
        return LOST if lost else self.samples

    def settle(self):
        """Have the sum, and everybody's samples."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way()
            self.counts = to(self.flat.tail, "cpu").tolist()
            self.flat.tail[...] = 0
            wrote(self.flat.grads, AUTHOR)

    def take(self, mix, needed=True):
        """Move the common values by the mean over all samples, and show them to the worker. Diverged, on all workers,
        where one sent inf or NaN, ValueError where its ranks disagree, or where none has had a sample: then nothing is
        moved. Not needed: without samples nothing is moved, and nothing wrong."""
        self.settle()
        self.pending = False
        if apart := [str(worker) for worker, n in enumerate(self.counts) if n == APART]:
            raise ValueError(f"DiLoCo: up to step {self.sent} the ranks of worker{'s' * (len(apart) > 1)} "
                             f"{', '.join(apart)} have given step() other counts than each other for {self.label}; the "
                             "common values are those from before. Give it the samples of the whole worker on each of "
                             "its ranks")
        if lost := [str(worker) for worker, n in enumerate(self.counts) if n == LOST]:
            raise Diverged(f"DiLoCo: after step {self.sent} worker{'s' * (len(lost) > 1)} {', '.join(lost)} sent "
                           f"{self.label} with values that aren't finite; the common values are those from before. "
                           "Lower the inner learning rate, clip gradients, or look for it with detect_anomaly")
        if not (total := sum(self.counts)) and needed:
            raise ValueError(f"DiLoCo: up to step {self.sent} no worker has had a sample since {self.label} was sent "
                             "last: give step() the number of this worker's")
        if total:
            self.flat.grads /= total
            wrote(self.flat.grads, AUTHOR)
            outer_step(self.optimizer, [(leaf, leaf.leaf.grad_view) for leaf in self.leaves])
        self.show(mix)
        if mix == 1:
            self.samples = 0.0


# ---------------------------------------------------------------- how differences travel

def in_full(exact):
    """send(fragment): all-reduce the numbers as they are; exact: along the balanced tree in rank order."""
    def send(fragment):
        return fragment.comm.all_reduce(fragment.flat.grads, async_op=True, exact=exact).wait
    return send


def encoded(encoding, seed):
    """send(fragment): each worker sends its message (parallel/encodings.py) to all others, and adds up what all have
    sent, in the order of the workers: the same bits everywhere, and one rounding per worker."""
    def send(fragment):
        comm, flat = fragment.comm, fragment.flat
        segments = dict(zip(fragment.names, flat.segments, strict=True))
        shapes = {name: s.tensor.shape for name, s in segments.items()}

        def channel(worker):
            return Channel(encoding, shapes, flat.dtype, ("diloco", seed, fragment.index, fragment.sent, worker))
        grads = to(flat.grads, "cpu")
        messages = channel(comm.rank).encode({name: grads[s.start:s.stop].reshape(s.tensor.shape)
                                              for name, s in segments.items()})
        samples = np.array([to(flat.tail, "cpu")[comm.rank]])
        mine = packed([*(part for message in messages.values() for part in message), samples])
        everybodys = np.empty((comm.size, mine.size), np.uint8)
        if open_ledgers:
            keep(everybodys, "buffer")
        work = comm.all_gather(everybodys, mine, async_op=True, what=fragment.label)

        def finish():
            work.wait()
            total, counts = np.zeros_like(grads), np.zeros(comm.size, flat.dtype)
            for worker, row in enumerate(everybodys):
                theirs, row = unpacked(row, messages)
                for name, update in channel(worker).decode(theirs).items():
                    total[segments[name].start:segments[name].stop] += update.reshape(-1)
                counts[worker] = row.view(flat.dtype)[0]
            flat.grads[...] = to_device_of(total, flat.grads)
            flat.tail[...] = to_device_of(counts, flat.grads)
        return finish
    return send


def packed(arrays):
    """Their bytes, one array after another."""
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])


def unpacked(row, like):
    """({name: message} of the arrays that `like` has, 1-d; what is left of the bytes)."""
    found = {}
    for name, message in like.items():
        found[name] = []
        for part in message:
            here, row = row[:part.nbytes].copy(), row[part.nbytes:]
            found[name].append(here.view(part.dtype))
    return found, row
