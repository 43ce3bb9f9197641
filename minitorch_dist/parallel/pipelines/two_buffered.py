"""PipeDream-2BW: a pipeline that doesn't run empty between batches, for gradients that are a step late.

    two batches of four micro-batches; a backward takes two cells; | optimizer steps

    rank 0    0 1 . . 0 0 2 1 1 3 2 2 . 3 3|4 5 . . 4 4 6 5 5 7 6 6 . 7 7|      1F1B, which ends with a flush
    rank 1    . 0 0 0 1 1 1 2 2 2 3 3 3 . .|. 4 4 4 5 5 5 6 6 6 7 7 7 . .|

    rank 0    0 1 . . 0 0 2 1 1 3 2 2 4 3 3|5 4 4 6 5 5 7 6 6 . 7 7|            2BW
    rank 1    . 0 0 0 1 1 1 2 2 2 3 3 3|4 4 4 5 5 5 6 6 6 7 7 7|. .

A rank takes its optimizer step as soon as its own gradients of a batch are complete. By then micro-batches of the next
batch are under way, which have seen the weights before that step and need these for their backward. So each rank has
two versions of its weights (hence the name: two buffered weights), and all of them have the same two:

    W(t+1) = W(t) - step of the gradient of batch t at W(t-1)           W(-1) = W(0)

That is all that differs from a pipeline with a flush: a gradient is always that of the weights one step ago, on every
rank, in every micro-batch; one process that keeps W(t-1) beside W(t) gets the same numbers. What it costs depends on
the model, the rate and the momentum: learning rates that are just stable aren't with late gradients.

Of B batches of m micro-batches ranks wait for (p-1)/(B·m+p-1) of the time, instead of (p-1)/(m+p-1). A rank holds no
more than min(m, p-r) micro-batches, as in 1F1B, beside the second version. Nothing that takes all ranks together, such
as the norm of the whole gradient, can come between two batches. Large models are trained with the flush.

Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training".
"""

import zlib
from contextlib import contextmanager

import numpy as np

from ...autodiff.primitive import state
from ...backend import module_of, random_scope
from ...flat import flat_buffers
from ...optim.clip import tree_sum
from ..fsdp.fully_sharded import FullySharded
from . import documents
from .checks import check_statistics
from .pipeline import Pipeline
from .schedule_steps import FORWARD
from .schedules import one_forward_one_backward


class TwoVersions:
    """Of a chunk's parameters: those that the optimizer has made last, and the ones before.

    steps   how many steps have been taken since the first of these batches
    """

    def __init__(self, chunk):
        self.chunk = chunk
        self.begin()

    def begin(self):
        """The first of some batches: there is one version, of what is trained now."""
        self.params = [p for p in self.chunk.parameters() if p.requires_grad]
        self.flats, self.steps, self.before = flat_buffers(self.params), 0, None

    def step(self, optimizer):
        """Take an optimizer step, into the storage of the older version; the newer one becomes the older, and is left
        as it is, for what has it on its tape."""
        if (flats := flat_buffers(self.params)) != self.flats:      # DistributedDataParallel has cut its buckets anew
            self.flats, self.before = flats, None
        now = [flat.params for flat in self.flats]
        for flat, free in zip(self.flats, self.before or [module_of(a).empty_like(a) for a in now], strict=True):
            free[...] = flat.params
            flat.live_in(free)
        self.before = now
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    @contextmanager
    def of(self, batch):
        """Inside, the parameters are what they were when one step less had been taken than there are batches before
        this one."""
        if not 0 < batch == self.steps:     # else that is the newest version
            yield
            return
        now = [flat.params for flat in self.flats]
        self._live_in(self.before)
        try:
            yield
        finally:
            self._live_in(now)

    def _live_in(self, storage):
        for flat, array in zip(self.flats, storage, strict=True):
            flat.live_in(array)


def check_alike_inputs(inputs):
    """ValueError where batches without a pause between them would have messages of several shapes."""
    if len(kinds := sorted({f"{x.dtype}{['n', *x.shape[1:]]}".replace("'", "") for x in inputs})) > 1:
        raise ValueError(f"PipeDream2BW.train: inputs of {' and '.join(kinds)}: what stages send has one shape in all "
                         "batches of a call, give each kind a call of its own")


class PipeDream2BW(Pipeline):
    """This rank's stage of a model whose ranks don't wait for each other between batches.

    chunk          its module: plain, or DistributedDataParallel
    comm           the Communicator along the pipeline
    optimizer      of the chunk's parameters; None where it has none to train
    micro_batches  that a rank's batches are cut into, comm.size or more: then no more than two versions are under way
    Collective. ValueError for what doesn't go with it: exact mode, whose sums are another order's; fully_shard, which
    gathers once a step; parameters of several stages, whose gradients would come together in each step.
    """

    def __init__(self, chunk, comm, optimizer, micro_batches):
        if micro_batches < comm.size:
            raise ValueError(f"PipeDream2BW: {micro_batches} micro-batches on {comm.size} ranks: more than two batches "
                             f"could be under way at once, and two versions are kept; take {comm.size} or more")
        super().__init__([chunk], comm, one_forward_one_backward(comm.size, micro_batches))
        said = ["exact mode"] * self.exact + ["fully_shard"] * isinstance(chunk, FullySharded) + [
            f"parameters that several stages have, as {name}" for name in sorted(self.ties.names)]
        if said := [each for part in comm.all_gather_object(said) for each in part]:
            raise ValueError(f"PipeDream2BW doesn't go with {said[0]}: a step is taken on each rank as soon as its own "
                             "gradients are there. Take Pipeline")
        self.optimizer = optimizer
        self.versions = TwoVersions(chunk)

    def train(self, batches, loss_sum, *, seed, step, units=1, micro_shards=8, over=None, scheduler=None,
              packed=False):
        """Train on these batches, without a pause between them, but for filling and emptying the pipeline once.
        Returns the mean loss of each, at the weights that it has seen: a list of floats, everywhere.

        batches     a list of a Loader's. At its end no gradient is under way, and there is one version of the weights,
                    which the next call begins with: the place to evaluate, to save, to look at losses
        step        number of the first batch, of which random numbers depend
        scheduler   of the learning rate: takes a step after each of the optimizer's
        loss_sum, seed, units, micro_shards, over, packed     as in Pipeline.run, with the same errors; and a ValueError
                    for inputs of several shapes, but for the number of samples, or dtypes
        """
        batches = list(batches)
        if not batches:
            return []
        self._begin_all(batches, loss_sum, packed, over)
        if self.optimizer is not None:
            self.optimizer.zero_grad()      # what somebody's own backward has left would be of the first batch
        m, self.kept, self.halves, self.statistics, self.scaler = self.micro_batches, {}, {}, {}, None
        self.left = [m]
        self.versions.begin()
        for kind, k, stage, _ in one_forward_one_backward(self.comm.size, m * len(batches))[self.comm.rank]:
            (b, k), count = divmod(k, m), batches[k // m].count
            with self.versions.of(b):       # backward, too: what is checkpointed runs forward once more
                if kind == FORWARD:
                    self.shards, self.scale = self.cut[b], 1 / (count * units)
                    with random_scope(seed, step + b, count, self.shards[k].rows, micro_shards):
                        self._forward(stage, 0, k)
                else:
                    self._weight_gradients(kind, stage, 0, k)
            if not self.left[0]:
                self.left = [m]
                self.versions.step(self.optimizer)
                if scheduler is not None:
                    scheduler.step()
        self.messages.finish()
        self.versions.before = None
        return self._losses_of_all(batches, units, over)

    def _begin_all(self, batches, loss_sum, packed, over):
        """Before anything is sent: that all ranks have the same rows, and none an error."""
        if self.under_way:
            raise RuntimeError("an earlier train() of this pipeline has raised, and what it has sent is still on its "
                               "way: it would be taken for these batches'. Start again from a checkpoint")
        said, problem = None, None
        try:
            self._check_frozen()
            self._check_loss("train", loss_sum)
            check_statistics(self.chunks, over, self.exact)
            check_alike_inputs([batch.inputs for batch in batches])
            self.cut, self.packed = [self._shards_of(batch) for batch in batches], packed
            rows = [f"{shards[0].rows[0]} to {shards[-1].rows[1]} of {batch.count}, "
                    + documents.told(self.chunks, batch.inputs, packed, self.reads)
                    for shards, batch in zip(self.cut, batches, strict=True)]
            said = (f"{len(batches)} batches, rows {rows[0]} the first, crc32 of all "
                    f"{zlib.crc32(' '.join(rows).encode()):08x}")
        except (RuntimeError, TypeError, ValueError) as error:
            said, problem = str(error), error
        self.comm.agree("PipeDream2BW.train", detail=said)
        if problem is not None:
            raise problem
        self.under_way, self.at_end, self.sums = "train", loss_sum, []
        self.ties.begin()
        first = self.cut[0][0].inputs
        self.messages.begin(("train", state.autocast and state.autocast.dtype, first.dtype, first.shape[1:]))

    def _losses_of_all(self, batches, units, over):
        """The batches' mean losses, which the last stage knows, on all ranks."""
        m, losses = self.micro_batches, np.zeros(len(batches))
        if self.sums:
            losses[:] = [tree_sum(self.sums[i * m:(i + 1) * m]) for i in range(len(batches))]
        self.comm.broadcast(losses, self.places[self.last][0])
        if over is not None:
            over.all_reduce(losses)
        self.under_way = self.shards = self.cut = None
        return (losses / [batch.count * units for batch in batches]).tolist()
