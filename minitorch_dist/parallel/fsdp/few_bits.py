"""What fully_shard sends in 8 and 4 bits: ZeRO++.

    model = fully_shard(gpt, mesh["node", "gpu"], reshard_after_forward=mesh["gpu"],
                        mp_policy=MixedPrecisionPolicy(param_encoding=Blocks(8), reduce_encoding=Blocks(4)))

    pieces    float32 ──round──── all-gather, 8 bits ──── the same values on all ranks, the one they are of, too
    gradients whole ──round──── all-to-all, 4 bits ──── sums, float32 ──round──── all-to-all, 4 bits ──── sums, float32
                                of a node's ranks                                 of one of each node

Steps are taken from pieces that are never rounded. A gradient is rounded once, or, where reshard_after_forward has made
groups, once in each of two steps: within them to 1/g of all elements, which alone go on from group to group. What goes
to other nodes, of ψ elements of 16 bits, per node (X of them) and step:

                              forward    backward    gradients
    stage 3                   2ψ         2ψ          2ψ              · (X-1)/X
    all that is above         1ψ         0           ψ/2             and scales, 4 bytes per 256 elements

A message is a row of bytes for each share that it has: the codes, then the scales. What neighbours keep until backward
is 1/g of the message that has come, so that they have the same values again. Source: Wang et al. 2023, "ZeRO++:
extremely efficient collective communication for giant model training", 3.1 (weights), 3.3 (gradients).
"""

from ...backend import device_of, module_of, xp, zeros
from ...ledger import keep, open_ledgers
from ..encodings import from_rows, row_bytes, rows_of_bytes


def encoded(encoding, values):
    """A row, uint8, of float32 or 16-bit values (n,)."""
    return rows_of_bytes(values[None], encoding)[0]


def decoded(encoding, row, count):
    """float32 (count,): the values."""
    return from_rows(row[None], encoding, (count,), xp.dtype(xp.float32))[0]


class SumOfRounded:
    """The sum over all ranks of `grads` (ranks · n,), made in float32 of what each has rounded: begins to put this
    rank's part of it into `out` (n,), float32. wait() until it is there. What is not finite makes its block NaN.

    grid  the Grid of the ranks; where it has groups of neighbours, their sums are rounded again on the way to others
    """

    def __init__(self, grid, out, grads, encoding, what):
        self.out, self.encoding, self.what = out, encoding, what
        near = grid.near
        comm, self.then = (grid.shards, None) if near is None else (near.shards, near.replicas)
        self._post(comm, grads.reshape(-1, comm.size, out.size))

    def _post(self, comm, values):
        """Begin to send values[i, j], for all i, to rank j."""
        module, groups = module_of(values), len(values)
        leaving = module.empty((comm.size, groups, row_bytes(self.encoding, self.out.size)), xp.uint8)
        for i in range(groups):
            for j in range(comm.size):
                leaving[j, i] = encoded(self.encoding, values[i, j])
        self.parts = module.empty_like(leaving)
        for each in (leaving, self.parts) if open_ledgers else ():
            keep(each, "buffer")
        self.work = comm.all_to_all(self.parts, leaving, async_op=True, what=self.what)

    def wait(self):
        self.work.wait()
        n = self.out.size
        sums = zeros((self.parts.shape[1], n), xp.float32, device_of(self.out))
        for rows in self.parts:         # of each rank, in their order
            for total, row in zip(sums, rows, strict=True):
                total += decoded(self.encoding, row, n)
        self.work = self.parts = None
        if self.then is None:
            self.out[...] = sums[0]
        else:
            comm, self.then = self.then, None
            self._post(comm, sums[None])
            self.wait()
