"""Buckets: gradients that travel together.

Backward reaches the last layer first. So parameters are cut into buckets in reverse order, and as soon as all gradients
of one are there it is posted, while backward goes on with the layers before:

    backward   |  layer 4  |  layer 3  |  layer 2  |  layer 1  |
    on the wire            | bucket 0  | bucket 1  | bucket 2  | bucket 3 |
"""

from operator import is_

from ..autodiff.writes import wrote
from ..backend import to, to_device_of, xp, zeros
from ..flat import FlatBuffer
from .exact import BinaryCounter, along_tree, check_by_source

MIB = 1 << 20
NO_GRADIENT = object()      # in the place of a sum that there is none of


def cut(parameters, first_bytes, cap_bytes):
    """Parameters, in the order in which their gradients come, cut into lists of one dtype each: the first of about
    first_bytes, the others of about cap_bytes. The first is small, so that communication begins early. Source: Li et
    al. 2020, "PyTorch Distributed"."""
    lists, size = [], 0
    for p in parameters:
        cap = min(first_bytes, cap_bytes) if len(lists) == 1 else cap_bytes
        if not lists or size >= cap or lists[-1][0].dtype != p.dtype:
            lists.append([])
            size = 0
        lists[-1].append(p)
        size += p.data.nbytes
    return lists


class Bucket:
    """A FlatBuffer whose gradients travel together.

    comm      the ranks that hold the same parameters; over: those that hold other shares of them (None: they are whole)
    index     its place in the order in which buckets are posted; its label says it in timelines
    names     {id of a parameter: what it is called}, for messages
    unsummed  whether the gradients stay each rank's own, and the counts alone are summed
    segments  where each parameter's gradient lies in `grads`
    grads     1-d array of all its gradients, zeros between them; at its end a count for each parameter: 1 where this
              rank has a gradient for it. Summed like the gradients, it says how many ranks have used it, without a call
              of its own.
    """

    def __init__(self, index, tensors, comm, over=None, names=None, unsummed=False):
        self.index, self.label, self.names, self.unsummed = index, f"bucket {index}", names or {}, unsummed
        for t in tensors:
            t.leaf.over, t.leaf.unsummed = over, comm if unsummed and comm.size > 1 else None
        self.flat = FlatBuffer(tensors, empty=comm.empty, spare=len(tensors))
        self.segments, self.grads = self.flat.segments, self.flat.grads
        self.tensors = self.leaves = list(tensors)      # the latter: what backward leaves gradients in
        self.missing = {id(t) for t in tensors}     # whose gradient has not arrived yet in this backward
        self.finish = None      # once posted: waits until `grads` is the sum over all ranks
        self.counter = BinaryCounter()
        self.used = [False] * len(tensors)      # by this rank, since they were handed out last
        self.comm, self.alone = comm, comm.size == 1
        self.own = ()           # the gradients as they were collected
        self.summed = [NO_GRADIENT] * len(tensors)      # as they were handed out last: sums over all ranks

    def start_over(self):
        """Expect the next backward."""
        self.missing = {id(leaf) for leaf in self.leaves}

    def forget(self):
        """Whatever was collected since the gradients were handed out last counts for nothing."""
        self.used = [False] * len(self.used)
        self.counter.forget()

    def collect(self):
        """Make `grads` hold this rank's own. RuntimeError where one is the last sum: it would be counted once per
        rank."""
        grads = [t.grad for t in self.tensors]
        if any(map(is_, grads, self.summed)):
            stale = [self.names.get(id(t), f"one of shape {t.shape}") for t, grad, summed in zip(
                self.tensors, grads, self.summed, strict=True) if grad is summed]
            raise RuntimeError(f"this backward added to gradients that are summed over the ranks already, of "
                               f"{', '.join(stale[:4])}{' …' * (len(stale) > 4)}, and would sum them again: call "
                               "zero_grad() of their model before it, or, to accumulate, run every backward but the "
                               "last inside no_sync()")
        arrived = self._arrived(grads)
        here = [grad is not None for grad in arrived]
        if all(here):
            self.used, self.flat.tail[...] = here, 1
        else:
            self.used = [a or b for a, b in zip(self.used, here, strict=True)]
            self.flat.tail[...] = to_device_of(xp.array(here, self.flat.dtype), self.flat.tail)
        self.flat.collect(fill_missing=True)
        self.own = [t.grad for t in self.tensors]
        if not all(map(is_, grads, self.own)) and any(
                grad is not None and grad.requires_grad for grad in arrived):
            raise RuntimeError("backward(create_graph=True): the sum over the ranks can't be differentiated again. Run "
                               "it inside no_sync()")

    def _arrived(self, grads):
        """What this backward has left of each parameter; grads: the parameters' own."""
        return grads

    def fold(self, last):
        """Exact mode: this micro-shard's gradients are a leaf of the tree by themselves. last: make `grads` the sum of
        this rank's, and begin to add it up over the ranks."""
        self.collect()
        self.counter.add(self._leaf())
        if last:
            self.grads[...] = self._total()
            self.finish = self.comm.all_reduce(self.grads, async_op=True, exact=True).wait
        else:
            self.flat.zero_grad()
            self.flat.forgotten.clear()
            wrote(self.grads, "the sum over micro-shards")

    def _leaf(self):
        return self.grads

    def _total(self):
        return self.counter.total()

    def users(self):
        """For each parameter how many ranks have used it, once `grads` is the sum."""
        # From a GPU the counts must be waited for: not where this rank knows them by itself.
        return self.used if self.alone else to(self.flat.tail, "cpu").tolist()

    def hand_out(self):
        """`grads` is the sum: every parameter that some rank has used has its gradient there, the others have none.

        RuntimeError where it isn't the sum of all ranks' gradients, or where a gradient isn't the one in `grads`.
        """
        self.remember()
        if not all(map(is_, self.own, self.summed)):
            raise RuntimeError(f"a hook has replaced .grad of a parameter of {self.label} after the bucket was posted, "
                               "and what it has put there isn't summed over the ranks: replace a gradient in a hook of "
                               "its own parameter (register_hook, register_post_accumulate_grad_hook)")
        for i, users in enumerate(self.users()):
            if users <= 0:
                if users:
                    raise RuntimeError("the backward of another rank has raised an exception, so that its gradients "
                                       "are missing in the sum: let all ranks skip the step, or none")
                self.tensors[i].grad, self.summed[i] = None, NO_GRADIENT
        self.used = [False] * len(self.used)

    def remember(self):
        """The gradients are sums now."""
        self.summed = [NO_GRADIENT if (grad := t.grad) is None else grad for t in self.tensors]

    def give_up(self, ranks):
        """Make `grads` say, in the place of gradients, that this rank has none for the others."""
        self.grads[...] = 0
        self.flat.tail[...] = -2 * ranks        # no counts can make up for it

    def unused(self):
        """The parameters that no rank used in the last step."""
        return [t for t, grad in zip(self.tensors, self.summed, strict=True) if grad is NO_GRADIENT]


class BucketBySource(Bucket):
    """Exact mode's, of parameters that get their gradients by Sources: what each source leaves is a leaf of the tree.

    leaves     those that backward leaves gradients in, one per parameter: (sources, *shape)
    by_source  their gradients, (sources, elements of `grads`)
    """

    def __init__(self, index, tensors, comm, over, names, leaves):
        super().__init__(index, tensors, comm, over, names)
        self.leaves = leaves
        self.by_source = zeros((leaves[0].shape[0], self.flat.size), self.flat.dtype, self.flat.device)
        for leaf, s in zip(leaves, self.segments, strict=True):
            leaf.leaf.grad_view = self.by_source[:, s.start:s.stop].reshape(leaf.shape)
        self.start_over()

    def start_over(self):
        super().start_over()
        for leaf in self.leaves:
            leaf.grad = None

    def _arrived(self, grads):
        check_by_source(self.tensors, grads)
        return [leaf.grad for leaf in self.leaves]

    def _leaf(self):
        for leaf in self.leaves:
            grad, view = leaf.grad, leaf.leaf.grad_view
            if grad is None:
                view[...] = 0
            elif grad.data is not view:
                view[...] = grad.data
        end = self.segments[-1].end
        self.by_source[0, end:end + len(self.flat.tail)] = self.flat.tail
        return self.by_source

    def _total(self):
        return along_tree(self.counter.total())
