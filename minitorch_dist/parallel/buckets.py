"""Buckets: gradients that travel together.

Backward reaches the last layer first. So parameters are cut into buckets in reverse order, and as soon as all gradients
of one are there it is posted, while backward goes on with the layers before:

    backward   |  layer 4  |  layer 3  |  layer 2  |  layer 1  |
    on the wire            | bucket 0  | bucket 1  | bucket 2  | bucket 3 |
"""

from ..backend import to, to_device_of, xp
from ..flat import FlatBuffer
from .exact import BinaryCounter

MIB = 1 << 20


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

    index     its place in the order in which buckets are posted; its label says it in timelines
    segments  where each parameter's gradient lies in `grads`
    grads     1-d array of all its gradients, zeros between them; at its end a count for each parameter: 1 where this
              rank has a gradient for it. Summed along, it says how many ranks have used it, at no call of its own.
    """

    def __init__(self, index, tensors, comm):
        self.index, self.label = index, f"bucket {index}"
        self.flat = FlatBuffer(tensors, empty=comm.empty, spare=len(tensors))
        self.segments, self.grads = self.flat.segments, self.flat.grads
        self.missing = {id(t) for t in tensors}     # whose gradient has not arrived yet in this backward
        self.finish = None      # once posted: waits until `grads` is the sum over all ranks
        self.counter = BinaryCounter()
        self.used = [False] * len(tensors)      # by this rank, since they were handed out last
        self.alone = comm.size == 1
        self.summed = ()        # the gradients as they were handed out last: sums over all ranks

    def start_over(self):
        """Expect the next backward."""
        self.missing = {id(s.tensor) for s in self.segments}

    def collect(self):
        """Make `grads` hold this rank's own. RuntimeError where one is the last sum: it would be counted once per
        rank."""
        grads = [s.tensor.grad for s in self.segments]
        if any(grad is summed for grad, summed in zip(grads, self.summed, strict=False) if summed is not None):
            raise RuntimeError("this backward added to gradients that are summed over the ranks already, and would sum "
                               "them again: call zero_grad() before it, or, to accumulate, run every backward but the "
                               "last inside no_sync()")
        here = [grad is not None for grad in grads]
        self.used = [a or b for a, b in zip(self.used, here, strict=True)]
        self.flat.tail[...] = 1 if all(here) else to_device_of(xp.array(here, self.flat.dtype), self.flat.tail)
        self.flat.collect(fill_missing=True)

    def users(self):
        """For each parameter how many ranks have used it, once `grads` is the sum."""
        # From a GPU the counts must be waited for: not where this rank knows them by itself.
        return self.used if self.alone else to(self.flat.tail, "cpu").tolist()

    def hand_out(self):
        """`grads` is the sum: every parameter that some rank has used has its gradient there, the others have none."""
        for s, users in zip(self.segments, self.users(), strict=True):
            if not users:
                s.tensor.grad = None
        self.used = [False] * len(self.used)
        self.flat.tail[...] = 0     # norms are taken of the whole buffer
        self.summed = [s.tensor.grad for s in self.segments]

    def unused(self):
        """The parameters that no rank used in the last step."""
        return [s.tensor for s, grad in zip(self.segments, self.summed, strict=True) if grad is None]
