"""Data parallelism: every rank holds the model and works on its share of the batch; gradients are summed.

    model = DistributedDataParallel(model, comm.world())
    for batch in loader.epoch(e):
        for shard in batch.shards:
            loss = cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count
            loss.backward()             # the last one leaves the gradient of the global batch on every rank
        optimizer.step()

Gradients are SUMMED over ranks, and the loss is divided by the GLOBAL number of
samples: then an uneven last batch is exact. (torch averages over ranks instead,
which is right only while all ranks hold equally many samples.)
"""

from contextlib import contextmanager

from .. import comm as communication
from .. import ledger
from ..autodiff.primitive import lower
from ..autodiff.reverse import at_end_of_backward
from ..autodiff.writes import wrote
from ..flat import FlatBuffer
from ..nn.module import Module
from .batch_norm import MicroShardStatistics, synchronise
from .exact import BinaryCounter, check_shape

MIB = 1 << 20


def buckets(parameters, first_bytes, cap_bytes):
    """Parameters in reverse order, cut into lists of one dtype each: the first of about first_bytes, the others of
    about cap_bytes. Reverse, because backward reaches the last layer first; the first is small, so that
    communication begins early. Source: Li et al. 2020, "PyTorch Distributed"."""
    lists, size = [], 0
    for p in reversed(list(parameters)):
        cap = min(first_bytes, cap_bytes) if len(lists) == 1 else cap_bytes
        if not lists or size >= cap or lists[-1][0].dtype != p.dtype:
            lists.append([])
            size = 0
        lists[-1].append(p)
        size += p.data.nbytes
    return lists


class Bucket:
    """A FlatBuffer whose gradients travel together."""

    def __init__(self, index, tensors, comm):
        self.index = index
        self.flat = FlatBuffer(tensors, empty=comm.empty)
        self.missing = {id(t) for t in tensors}     # whose gradient has not arrived yet in this backward
        self.work = None
        self.counter = BinaryCounter()
        self.summed = ()    # the gradients as they were handed out last: sums over all ranks

    def reset(self):
        self.missing = {id(s.tensor) for s in self.flat.segments}
        if self.work is not None:
            self.work.wait()
        self.work = None

    def collect(self):
        """Make the flat gradients hold this rank's own. RuntimeError where one holds the last sum: it would be
        counted once per rank."""
        if any(s.tensor.grad is summed for s, summed in zip(self.flat.segments, self.summed, strict=False)
               if summed is not None):
            raise RuntimeError("this backward added to gradients that are summed over the ranks already, and would sum "
                               "them again: call zero_grad() before it, or, to accumulate, run every backward but the "
                               "last inside no_sync()")
        self.flat.collect(fill_missing=True)

    def hand_out(self):
        self.summed = [s.tensor.grad for s in self.flat.segments]


class DistributedDataParallel(Module):
    """A module whose gradients are those of the global batch on every rank after each backward.

    module         built alike on all ranks; rank 0's values are broadcast
    comm           the Communicator (default: the world's)
    bucket_cap_mb  bytes (MiB) of gradients per all-reduce; first_bucket_mb for the first
    exact          sums equal to the last bit on 1, 2, 4 … micro_shards ranks: call backward once per
                   micro-shard, micro_shards/ranks times a step; the last one leaves the sum

    Each bucket is posted from the gradient hook that completes it, in order,
    and waited for at the end of backward. Parameters that took no part get a
    gradient of zeros, so that ranks never disagree on what to reduce. The
    wrapper adds nothing to parameter names. Make the optimizer after it, and call
    zero_grad() before each step: a second backward onto sums raises RuntimeError.
    BatchNorm's statistics are those of the global batch (see batch_norm.py); other
    buffers are broadcast once, and then each rank's own.
    """

    def __init__(self, module, comm=None, bucket_cap_mb=25, first_bucket_mb=1, exact=False, micro_shards=8):
        super().__init__()
        self.add_module("", module)
        self.comm = comm if comm is not None else communication.world()
        self.exact = exact
        if exact:
            check_shape(micro_shards, self.comm.size)
        self.passes = micro_shards // self.comm.size if exact else 1     # backward passes per step
        self.done = 0
        self.sync = True
        self.buckets = [Bucket(i, tensors, self.comm) for i, tensors in
                        enumerate(buckets(module.parameters(), first_bucket_mb * MIB, bucket_cap_mb * MIB))]
        self.posted = 0
        self.bucket_of = {id(s.tensor): b for b in self.buckets for s in b.flat.segments}
        for bucket in self.buckets:
            self.comm.broadcast(bucket.flat.params, src=0)
            wrote(bucket.flat.params, "the broadcast of initial values")
            for s in bucket.flat.segments:
                s.tensor.register_post_accumulate_grad_hook(self._gradient_ready)
        for _, buffer in module.named_buffers():
            self.comm.broadcast(lower(buffer), src=0)
        self.statistics = MicroShardStatistics(module, self.comm) if exact else None
        if not exact:
            synchronise(module, self.comm)

    @property
    def module(self):
        """The wrapped module."""
        return self._modules[""]

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self):
        """Inside, backward only adds up local gradients; the next one outside reduces the sum."""
        if self.exact:
            raise RuntimeError("no_sync in exact mode: it accumulates micro-shards by itself")
        outer, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = outer

    # ------------------------------------------------------------ what backward triggers

    def _gradient_ready(self, tensor):
        """A leaf's gradient is complete: strike it off, and post the buckets that it completes."""
        if at_end_of_backward(self._backward_done):
            self._start_over()      # a pass that raised has left its marks
        bucket = self.bucket_of[id(tensor)]
        bucket.missing.discard(id(tensor))
        if self.sync and not self.exact:
            self._post_complete_buckets()

    def _post_complete_buckets(self):
        # Strictly in order, so that all ranks post the same sequence.
        while self.posted < len(self.buckets) and not self.buckets[self.posted].missing:
            self._post(self.buckets[self.posted])
            self.posted += 1

    def _post(self, bucket):
        bucket.collect()
        bucket.hand_out()
        if ledger.open_ledgers:
            ledger.event("post", f"bucket {bucket.index}")
        bucket.work = self.comm.all_reduce(bucket.flat.grads, async_op=True)

    def _backward_done(self):
        """The backward pass is through: complete what unused parameters have left open, and wait."""
        if self.exact:
            self._fold_micro_shard()
        elif self.sync:
            for bucket in self.buckets[self.posted:]:
                self._post(bucket)
            for bucket in self.buckets:
                bucket.work.wait()
                wrote(bucket.flat.grads, "the all-reduce of gradients")
        self._start_over()

    def _start_over(self):
        self.posted = 0
        for bucket in self.buckets:
            bucket.reset()

    def _fold_micro_shard(self):
        self.done += 1
        last = self.done == self.passes
        for bucket in self.buckets:
            bucket.collect()
            bucket.counter.add(bucket.flat.grads)
            if last:
                bucket.hand_out()
                bucket.flat.grads[...] = bucket.counter.total()
                bucket.work = self.comm.all_reduce(bucket.flat.grads, async_op=True, exact=True)
            else:
                bucket.flat.zero_grad()     # the next micro-shard's gradient is a leaf of the tree by itself
        self.statistics.fold(last)
        if last:
            self.done = 0
            for bucket in self.buckets:
                bucket.work.wait()
        for bucket in self.buckets:
            wrote(bucket.flat.grads, "the sum over micro-shards")
