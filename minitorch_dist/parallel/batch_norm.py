"""Batch norm in data-parallel training: the statistics, and the running ones, don't depend on the number of ranks.

Usually they are those of the global batch: each layer adds its sums up over the ranks in forward, and their gradients
in backward. In exact mode a micro-shard is a batch of its own, so that forward needs no other rank; the running
statistics move once a step by the mean over the micro-shards, which is added up along the tree of the gradients.
"""

from ..backend import to_device_of, xp
from ..nn.moe import MoE
from ..nn.norm import BatchNorm
from .exact import BinaryCounter


def synchronise(module, comm):
    """Let every BatchNorm of the module normalise by the statistics of all ranks' rows."""
    if comm.size == 1 or not layers(module):
        return
    from . import collectives  # enters them into the op table: only where they are used
    for layer in layers(module):
        layer.reduce = OverRanks(comm, collectives)


class OverRanks:
    """A layer's `reduce`. A copy of the layer, deep or pickled, has none."""

    def __init__(self, comm, collectives):
        self.comm, self.collectives = comm, collectives

    def __call__(self, x):
        # One sum, which each rank then goes its own way with: their gradients are summed too.
        return self.collectives.copy_to(self.collectives.reduce_from(x, self.comm), self.comm)

    def __reduce__(self):
        return type(None), ()


def other_buffers(module):
    """The names of the buffers that nobody keeps alike on all ranks: those of BatchNorm are, and experts' biases
    (experts/expert_bias.py)."""
    kept = {id(b) for m in module.modules() if isinstance(m, (BatchNorm, MoE)) for b in m._buffers.values()}
    return [name for name, b in module.named_buffers() if id(b) not in kept]


def layers(module):
    """The module's BatchNorms, each once."""
    return [m for m in module.modules() if isinstance(m, BatchNorm)]


class MicroShardStatistics:
    """Exact mode's running statistics of all BatchNorms of a module, one vector per micro-shard:

        | mean, variance, 1 of the first layer | … of the second | …      zeros where a layer met no sample
    """

    def __init__(self, module, comm):
        self.layers, self.comm, self.counter = layers(module), comm, BinaryCounter()
        ends = [0]
        for layer in self.layers:
            ends.append(ends[-1] + 2 * layer.num_features + 1)
            layer.move = Taken(self)
        self.places = {id(layer): slice(*ends[i:i + 2]) for i, layer in enumerate(self.layers)}
        self.vector = xp.zeros(ends[-1], xp.float64)
        if self.layers:     # beside the statistics themselves
            self.vector = to_device_of(self.vector, self.layers[0].running_mean)

    def take(self, layer, mean, var):
        """The statistics of a layer's batch."""
        part = self.vector[self.places[id(layer)]]
        n = layer.num_features
        part[:n] += mean
        part[n:-1] += var
        part[-1] += 1

    def exchange(self, vector=None):
        """Go on with `vector` (default: zeros); returns what has been taken so far. For those who run other
        micro-shards forward before this one's backward."""
        taken, self.vector = self.vector, xp.zeros_like(self.vector) if vector is None else vector
        return taken

    def forget(self):
        """Begin the step anew."""
        self.counter.forget()
        self.vector[...] = 0

    def fold(self, last):
        """A micro-shard is through; after this rank's last one of the step, move the running statistics."""
        if not self.layers:
            return
        self.counter.add(self.vector)
        self.vector[...] = 0
        if last:
            total = self.counter.total().copy()
            self.comm.all_reduce(total, exact=True)
            for layer in self.layers:
                part, n = total[self.places[id(layer)]], layer.num_features
                count = float(part[-1])
                if count:
                    layer.moved(*((s / count).astype(layer.running_mean.dtype) for s in (part[:n], part[n:-1])))


class Taken:
    """A layer's `move`. A copy of the layer, deep or pickled, moves its running statistics by itself."""

    batch = ("; in exact mode each micro-shard is a batch of its own: give batches of 2 · micro_shards samples or "
             "more, and drop_last=True to the Loader")

    def __init__(self, statistics):
        self.statistics = statistics

    def __call__(self, layer, mean, var):
        self.statistics.take(layer, mean, var)

    def __reduce__(self):
        return getattr, (BatchNorm, "moved")
