"""A mesh on paper: one process is rank 0 of as many as one likes.

    mesh = paper_mesh(dp=2, tp=4)
    print(explain(lambda: model(split(x, 0, mesh["dp"]))))      # what rank 0 of 8 would do and send

The others aren't there: what they would have sent is zeros. So layouts, shapes and the ledger's counts are those of a
run, values are not.
"""

from math import prod

from ...comm.communicator import Communicator
from ...comm.local import LocalEngine
from ...comm.mesh import DeviceMesh


class PaperEngine(LocalEngine):
    """Nothing travels; what others would have sent is zeros."""

    def reduce_scatter(self, out, x, op, async_op):
        out[...] = 0

    def all_gather(self, out, x, async_op):
        out[...] = 0

    def all_to_all(self, out, x, send_counts, recv_counts, async_op):
        out[...] = 0


class PaperCommunicator(Communicator):
    """Rank 0 of the ranks of a mesh of these axes, along some of them. axes: {name: size}, the slowest first."""

    def __init__(self, axes, name="world"):
        super().__init__(PaperEngine(), name)
        self.mesh_axes, ranks = axes, [0]
        for axis in axes if name == "world" else name.split(","):
            stride = prod(list(axes.values())[list(axes).index(axis) + 1:])
            ranks = [rank + stride * i for rank in ranks for i in range(axes[axis])]
        self.size, self.world_ranks = len(ranks), ranks

    def split(self, color, key=None, name=None):
        return PaperCommunicator(self.mesh_axes, name)

    def all_gather_object(self, obj):
        return [obj] * self.size


def paper_mesh(**axes):
    """A DeviceMesh of ranks that aren't there: name=size, the slowest first. ValueError for sizes below 1."""
    if strange := {axis: n for axis, n in axes.items() if type(n) is not int or n < 1}:
        raise ValueError(f"paper_mesh: sizes {strange}: on paper each axis has a number of ranks, 1 or more")
    return DeviceMesh(PaperCommunicator(axes), **axes)


def is_paper(mesh):
    """Whether nobody is there."""
    return isinstance(mesh.world, PaperCommunicator)
