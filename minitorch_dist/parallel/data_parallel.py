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

from .. import ledger
from ..autodiff.reverse import at_end_of_backward, one_pass
from ..autodiff.writes import wrote
from ..backend import xp
from . import comm_hooks
from .buckets import MIB, Bucket, BucketBySource, cut
from .join import Join
from .same_model import broadcast, check_same_model
from .wrapping import ReducingModule, check_reducible, held_apart


class DistributedDataParallel(ReducingModule):
    """A module whose gradients are those of the global batch on every rank after each backward.

    module             built alike on all ranks (checked: ValueError with the first difference); rank 0's values are
                       broadcast. Frozen parameters stay out of all that follows
    comm               the Communicator (default: the world's)
    bucket_cap_mb      bytes (MiB) of gradients per all-reduce; first_bucket_mb for the first
    broadcast_buffers  before each forward in training, buffers become rank 0's (BatchNorm's don't need it: its
                       statistics are those of the global batch, see batch_norm.py)
    exact              sums equal to the last bit on 1, 2, 4 … micro_shards ranks: call backward once per
                       micro-shard, micro_shards/ranks times a step; the last one leaves the sum. Buffers are then
                       broadcast once, at the beginning. To leave a step half-way, call
                       forget_step(). Dropout must be keyed by sample: forward inside of backend.random_scope
    unsummed           parameters of the module whose gradients stay each rank's own, for an optimizer that adds up what
                       it needs of them (optim.Dion); of these the ranks only tell each other who has used them.
                       ValueError for others, and in exact mode

    Each bucket is posted from the gradient hook that completes it, in order, and waited for at the end of backward.
    After the first backward the buckets are cut anew, in the order in which rank 0's gradients came (exact mode keeps
    the first cut). A parameter that some rank has not used counts as zeros there; one that nobody has used gets no
    gradient, as in a program of one process, and stands in `unused_parameters`. The wrapper adds nothing to parameter
    names. Call zero_grad() before each step: a second backward onto sums raises RuntimeError. Wrap a model when it is
    complete: one whose parameters or modules have been exchanged since raises RuntimeError in forward. It is wrapped
    once, and neither copied nor pickled with its wrapper: `module` can be. Experts that are divided over some of the
    ranks (experts/moe.py) have their gradients summed over those that hold the same; all of these ranks must be in
    `comm`.
    """

    def __init__(self, module, comm=None, bucket_cap_mb=25, first_bucket_mb=1, broadcast_buffers=True, exact=False,
                 micro_shards=8, unsummed=()):
        super().__init__("DistributedDataParallel", module, comm, exact, micro_shards)
        self.apart = held_apart(module, self.comm, "DistributedDataParallel")
        self.unsummed = {id(p) for p in unsummed}
        check_same_model(module, self.comm, apart=self.apart, bucket_cap_mb=bucket_cap_mb,
                         first_bucket_mb=first_bucket_mb, broadcast_buffers=broadcast_buffers, exact=exact,
                         micro_shards=micro_shards, unsummed=self._names_of_unsummed())
        check_reducible(module, "DistributedDataParallel", ", and register fp16_compress to halve what is sent")
        self.under_way = None       # whether the backward under way, or one that has raised, reduces
        self.comm_hook = comm_hooks.all_reduce
        self.caps = first_bucket_mb * MIB, bucket_cap_mb * MIB
        self.names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters_in_order = tuple(p for p in module.parameters() if p.requires_grad)
        self._fill_buckets(self._cut(self.parameters_in_order[::-1]))
        self.arrivals = None if exact or len(self.buckets) == 1 else []     # until the buckets have been cut anew
        for p in self.parameters_in_order:
            self.leaf_of.get(id(p), p).register_post_accumulate_grad_hook(self.hook)
        for bucket in self.buckets:
            broadcast(bucket.comm, bucket.flat.params)
        self._look_after_the_rest(broadcast_buffers, lambda tensor: self.apart.get(id(tensor), (self.comm,))[0])

    @property
    def unused_parameters(self):
        """The names of the parameters that no rank used in the last step."""
        return [self.names[id(p)] for bucket in self.buckets for p in bucket.unused()]

    def forward(self, *inputs, **options):
        if self.exact and self.under_way is not None and not self._in_backward():
            self._forget(reducing=False)    # what a backward that raised has left, before this takes its statistics
        self._forward_begins()
        with ledger.spanning("compute", "forward"):
            return self.module(*inputs, **options)

    def join(self, update):
        """For ranks with unequal numbers of batches: those that run out first go on to take part with zeros.

            def update():               # all that follows a backward
                optimizer.step()
                schedule.step()

            with model.join(update) as count:
                for x, labels in batches_of_this_rank:
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x), labels, reduction="sum") / count(len(x))
                    loss.backward()
                    update()

        count(n) tells all ranks that this step has n samples here, and returns the GLOBAL number. A rank whose loop
        has ended calls update() after each of the others' steps, so that parameters and optimizers stay the same
        everywhere. Nothing else inside may talk to other ranks.
        """
        return Join(self, update)

    def register_comm_hook(self, hook):
        """Reduce gradients by hook(comm, bucket) -> finish (see comm_hooks.py) from now on, on all ranks alike."""
        if self.exact:
            raise RuntimeError("register_comm_hook in exact mode: its sums go along one tree, to the last bit")
        self.comm_hook = hook

    def forget_step(self):
        """Exact mode: give up the step under way, whose backward passes so far then count for nothing."""
        self._forget(reducing=bool(self.under_way))
        self.zero_grad()

    def __reduce_ex__(self, protocol):
        raise TypeError("a DistributedDataParallel can't be copied or pickled: its buckets and hooks belong to these "
                        "parameters and these ranks. Copy model.module, or save model.state_dict()")

    # ------------------------------------------------------------ what backward triggers

    def _gradient_ready(self, tensor):
        """A leaf's gradient is complete: strike it off, and post the buckets that it completes."""
        if at_end_of_backward(self.at_end):
            self._pass_begins()
        if self.arrivals is not None and self.sync:
            self.arrivals.append(tensor)
        if tensor.leaf.hooks[-1] is not self.hook:
            self._come_last(tensor.leaf)
            return
        bucket = self.bucket_of[id(tensor)]
        bucket.missing.discard(id(tensor))
        if self.sync and not self.exact:
            self._post_complete_buckets()

    def _pass_begins(self):
        if self.under_way is not None:
            self._forget(self.under_way)
        self.under_way = self.sync
        if self.done and any(bucket.flat.forgotten for bucket in self.buckets):
            raise self._zeroed_half_way()

    def _post_complete_buckets(self):
        # Strictly in order, so that all ranks post the same sequence.
        while self.posted < len(self.buckets) and not self.buckets[self.posted].missing:
            self._post(self.buckets[self.posted])
            self.posted += 1

    def _post_rest(self):
        while self.posted < len(self.buckets):
            self._post(self.buckets[self.posted])
            self.posted += 1

    def _post(self, bucket):
        bucket.collect()
        if ledger.open_ledgers:
            ledger.event("post", bucket.label)
        with ledger.labelled(bucket.label):
            bucket.finish = self._hooked(bucket)

    def _hooked(self, bucket):
        finish = (comm_hooks.counts_alone if bucket.unsummed else self.comm_hook)(bucket.comm, bucket)
        if not callable(finish):
            raise TypeError(f"a communication hook has returned a {type(finish).__name__}: it returns a function that "
                            "waits until the sum is in bucket.grads, as work.wait of work = comm.all_reduce("
                            "bucket.grads, async_op=True)")
        return finish

    def _backward_done(self):
        """The backward pass is through: complete what unused parameters have left open, and wait."""
        if self.exact:
            self._fold_micro_shard()
        elif self.sync:
            self._post_rest()
            self._finish()
            if self.arrivals is not None:
                self._cut_anew()
        self._start_over()
        self.under_way = None

    def _forget(self, reducing):
        """Clear away what a pass that raised has left. All ranks have met an exception in it, perhaps each somewhere
        else: so each posts the rest of its buckets, and all have posted the same. (A rank that has met none finds the
        mark of give_up.) In exact mode, where a pass posts nothing before its end, the step begins anew."""
        if reducing and not self.exact:
            new = [bucket.grads.copy() for bucket in self.buckets]      # the first gradient of the next is there
            for bucket in self.buckets[self.posted:]:
                bucket.give_up(self.comm.size)
                bucket.finish = self._hooked(bucket)
            for bucket, grads in zip(self.buckets, new, strict=True):
                if bucket.finish is not None:       # it had been waited for when the exception came
                    bucket.finish()
                bucket.finish = None
                bucket.grads[...] = grads
        self._start_over()
        self.under_way = None
        for bucket in self.buckets:
            bucket.forget()
        if self.exact:
            self.done = 0
            self.statistics.forget()

    def _finish(self):
        for bucket in self.buckets:
            with ledger.labelled(bucket.label):
                bucket.finish()
            bucket.finish = None
            bucket.hand_out()
            wrote(bucket.grads, "the all-reduce of gradients")

    def _start_over(self):
        self.posted = 0
        if self.arrivals:
            self.arrivals.clear()
        for bucket in self.buckets:
            bucket.start_over()

    def backward_without_gradients(self):
        """A backward pass that reaches no parameter here: this rank's zeros, for those that wait for them."""
        with one_pass("backward"):
            at_end_of_backward(self.at_end)
            self._pass_begins()

    def step_without_data(self):
        """Take part in one backward of the others, with zeros."""
        for p in self.parameters_in_order:
            p.grad = None
        self._start_over()
        self._backward_done()

    def _fold_micro_shard(self):
        self.done += 1
        last = self.done == self.passes
        for bucket in self.buckets:
            bucket.fold(last)
        self.statistics.fold(last)
        if last:
            self.done = 0
            self._finish()

    # ------------------------------------------------------------ buckets

    def _names_of_unsummed(self):
        """ValueError for what isn't to be had, or is no parameter to be trained here."""
        names = {id(p): name for name, p in self.module.named_parameters() if p.requires_grad}
        if strangers := len(self.unsummed - set(names)):
            raise ValueError(f"DistributedDataParallel: {strangers} of the unsummed parameters are none of the module "
                             "that require grad")
        if self.unsummed and self.exact:
            raise ValueError("DistributedDataParallel: unsummed parameters in exact mode, whose sums go along one tree "
                             "over all ranks' gradients: leave one of the two out")
        if divided := [names[key] for key in self.apart if key in self.unsummed]:
            raise ValueError(f"DistributedDataParallel: {divided[0]} is divided over ranks, and can't be unsummed")
        return sorted(names[key] for key in self.unsummed)

    def _cut(self, parameters):
        """Parameters cut into buckets, each of what the same ranks hold, by when their last gradient comes."""
        place = {id(p): i for i, p in enumerate(parameters)}
        groups = {}
        for p in parameters:
            groups.setdefault((self.apart.get(id(p)), id(p) in self.unsummed), []).append(p)
        lists = [tensors for group in groups.values() for tensors in cut(group, *self.caps)]
        return sorted(lists, key=lambda tensors: place[id(tensors[-1])])

    def _bucket(self, index, tensors):
        ranks = self.apart.get(id(tensors[0]), (self.comm, None))
        leaves = self.leaves_of(tensors)
        about = (index, tensors, *ranks, self.names)
        if leaves is not None:
            return BucketBySource(*about, leaves)
        return Bucket(*about, unsummed=id(tensors[0]) in self.unsummed)

    def _fill_buckets(self, lists):
        self.buckets = [self._bucket(i, tensors) for i, tensors in enumerate(lists)]
        self.bucket_of = {id(leaf): b for b in self.buckets for leaf in b.leaves}
        self.posted = 0

    def _cut_anew(self):
        """Cut the buckets in the order in which rank 0's gradients came; its unused parameters come last."""
        place = {id(p): i for i, p in enumerate(self.parameters_in_order)}
        order = xp.array([place[id(p)] for p in self.arrivals], xp.int64)
        order = xp.concatenate([order, xp.setdiff1d(xp.arange(len(place)), order)[::-1]])
        self.arrivals = None
        self.comm.broadcast(order, src=0)
        lists = self._cut([self.parameters_in_order[i] for i in order])
        if [set(map(id, tensors)) for tensors in lists] != [{id(s.tensor) for s in b.segments} for b in self.buckets]:
            self._fill_buckets(lists)
            for bucket in self.buckets:
                bucket.remember()
