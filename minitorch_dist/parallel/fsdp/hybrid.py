"""Hybrid sharding (HSDP): a model's state is cut over some of the ranks, and every such group holds all of it.

    mesh = DeviceMesh(replicate=2, shard=3)                             replicate \\ shard   0  1  2
    model = fully_shard(gpt, mesh["replicate", "shard"],                0                    a  b  c
                        shard_over=mesh["shard"])                       1                    a  b  c

Parameters are gathered within a row, say the GPUs of a node, where links are fast. Gradients are reduce-scattered there
as well; then each part is summed down its column, and of ψ elements only ψ/S cross the slow links:

    axis        sent per rank and step, elements                  S ranks share a copy, R copies
    shard       2ψ or 3ψ · (S-1)/S, as the stage says
    replicate   2ψ/S · (R-1)/R

A rank of `comm` is replicate · S + shard: so exact mode's tree has whole subtrees in the rows. After the sums all
copies have the same bits, and each row makes norms, Muon's steps and the search for inf by itself. What depends on
samples goes over all ranks: BatchNorm's statistics, and who has used what.

One copy's ranks may be several nodes', too. Then a unit's values may come from all of them for forward, and for
backward from g neighbours alone, who have kept 1/g of them each ("hpZ"):

    mesh = DeviceMesh(node=2, gpu=4)
    model = fully_shard(gpt, mesh["node", "gpu"], reshard_after_forward=mesh["gpu"])        # or =4

    axis          sent per rank and step, elements                kept from forward to backward, elements
    node,gpu      2ψ · (N-1)/N: forward's gather, gradients       0
    gpu           ψ · (g-1)/g: backward's gather                  ψ/g

Experts that are divided over ranks (experts/moe.py) have a grid of their own. A share of them has its whole gradient
when those who hold the same have added up theirs, and it is these over whom it is cut:

    mesh = DeviceMesh(dp=2, ep=2)                               dp \\ ep   0         1
    parallelize_module(gpt, mesh["ep"], moe.plan_of(gpt))       0         A₀   b    C₀   d      A: half of the experts
    model = fully_shard(gpt, mesh["dp", "ep"])                  1         A₁   e    C₁   f      b d e f: all else

Sources: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2; Zhang et al. 2022, "MiCS"; Wang et al. 2023, "ZeRO++", 3.2.
"""

from typing import NamedTuple

from ...backend import zeros_like
from ...backend.wholes import is_whole
from ...comm import Communicator


class Grid(NamedTuple):
    """Who shares what: Communicators.

    everyone   all ranks that would hold the same; each has samples of its own
    shards     those over which one copy of the state is cut
    replicas   those that hold the same part of it; None where there is one copy
    over       where it is a share of stacks of experts: those with the others, equal ones in their order; None: whole
    near       the Grid of shards, cut into groups of neighbours, each of which keeps all values between forward and
               backward; None: none does
    """

    everyone: Communicator
    shards: Communicator
    replicas: Communicator | None
    over: Communicator | None = None
    near: "Grid | None" = None

    @property
    def shares(self):
        """How many there are."""
        return 1 if self.over is None else self.over.size

    def whole(self, shape):
        """The shape of all shares together, of that of one."""
        return tuple(shape) if self.over is None else (self.shares * shape[0], *shape[1:])

    def gather(self, mine):
        """(shares, …) on the model's first rank, of each share's first rank's `mine` (…); None on others. Called by
        those first ranks."""
        if self.over is None:
            return mine[None]
        found = zeros_like(mine, (self.shares, *mine.shape)) if self.over.rank == 0 else None
        self.over.gather(found, mine, dst=0)
        return found

    def scatter(self, mine, shares):
        """The other way: `mine` is written."""
        if self.over is None:
            mine[...] = shares[0]
        else:
            self.over.scatter(mine, shares, src=0)


class Grouping(NamedTuple):
    """An option that says who belongs together, for its errors: what a rank does with its group, a mesh of both."""

    does: str
    meshes: str


COPIES = Grouping("share its copy over", 'mesh["replicate", "shard"] and shard_over=mesh["shard"] of a '
                  "DeviceMesh(replicate=…, shard={})")
NEAR = Grouping("reshard over", 'mesh["node", "gpu"] and reshard_after_forward=mesh["gpu"] of '
                "a DeviceMesh(node=…, gpu={}), or the number alone")


def check_communicator(shard_over):
    """ValueError for what can't be a group of ranks."""
    if not isinstance(shard_over, Communicator | None):
        raise ValueError(f"fully_shard: shard_over is a {type(shard_over).__name__}, {str(shard_over)!r}; it must be "
                         'the Communicator of the ranks that share one copy, as mesh["shard"]')


def group_size(reshard, stage):
    """How many ranks reshard_after_forward's groups have, or None, or a bool: as it was given. ValueError for what it
    can't be."""
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if not (isinstance(reshard, Communicator) or is_whole(reshard)):
        raise ValueError(f"fully_shard: reshard_after_forward is a {type(reshard).__name__}, {str(reshard)!r}; it must "
                         "be True, False, a number of neighbours among the ranks, or their Communicator, as "
                         'mesh["gpu"]')
    size = reshard.size if isinstance(reshard, Communicator) else int(reshard)
    if stage < 3:
        raise ValueError(f"fully_shard: stage={stage}, reshard_after_forward over {size} ranks: parameters are cut in "
                         "stage 3 only")
    return size


def with_near(grid, reshard, size):
    """The grid with `near`, from reshard_after_forward and its group_size. ValueError on all ranks unless the groups
    are more than one neighbour each, and make up the shards. Collective, but for a bool or None."""
    if size is None or isinstance(size, bool):
        return grid
    shards = grid.shards
    if size < 2 or shards.size % size:
        raise ValueError(f"fully_shard: reshard_after_forward over {size} of the {shards.size} ranks that share a "
                         f"copy: it must be a divisor of {shards.size} above 1; False keeps whole values, True cuts "
                         "them over all of these")
    if size == shards.size:
        return grid
    if not isinstance(reshard, Communicator):
        reshard = shards.split(shards.rank // size, name=f"{shards.name} by {size}")
    return grid._replace(near=grid_of(shards, reshard, NEAR))


def grid_of(comm, inner, what=COPIES):
    """The Grid of comm's ranks, of which those in `inner` (None: all) share a copy. ValueError on all ranks unless
    inner is S neighbours of comm's ranks everywhere, r·S … r·S + S - 1 in their order. Collective, but for None.
    """
    if inner is None:
        return Grid(comm, comm, None)
    size = inner.size
    for rank, own in enumerate(comm.all_gather_object((inner.name, list(inner.world_ranks)))):
        wanted = neighbours(comm.world_ranks, rank, size)
        if own[1] != wanted:
            raise ValueError(f"fully_shard: rank {rank} of {comm.name!r} is to {what.does} {own[0]!r}, ranks "
                             f"{own[1]} of the world; with {size} of the ranks {list(comm.world_ranks)} it would be "
                             f"{wanted}. Groups of neighbours, all of one size, must make up comm: give "
                             f"{what.meshes.format(size)}")
    if size == comm.size:
        return Grid(comm, inner, None)
    same = list(comm.world_ranks[inner.rank::size])
    axis = next((axis for axis in comm.axes.values() if list(axis.world_ranks) == same), None)
    return Grid(comm, inner, axis or comm.split(inner.rank, name=f"{comm.name} but {inner.name}"))


def neighbours(ranks, place, size):
    """The `size` of these ranks that the one at a place is in, if they are cut into such groups in their order."""
    first = place - place % size
    return list(ranks[first:first + size])


def grid_of_share(grid, same, over):
    """The Grid of what is divided over the ranks of `over`, so that those of `same` have the same share: each copy that
    grid has is cut over these of its ranks. ValueError on all ranks unless the axes are those of one mesh. Collective.
    """
    shards = same if grid.replicas is None else \
        grid.shards.split(over.rank, name=f"{grid.shards.name} but {over.name}")
    ranks = grid.everyone.world_ranks       # of over's, those without samples of their own are not among them
    everybodys = grid.everyone.all_gather_object([[rank for rank in comm.world_ranks if rank in ranks]
                                                  for comm in (over, same, shards)])
    size, first = len(everybodys[0][2]), everybodys[0][0]
    for rank, (others, alike, own) in zip(ranks, everybodys, strict=True):
        wanted = neighbours(alike, alike.index(rank), size)
        if own != wanted or len(own) != size or (rank == alike[0]) != (rank in first) or first[0] != ranks[0]:
            raise ValueError(f"fully_shard: of {grid.everyone.name!r}, ranks {list(ranks)} of the world, rank {rank} "
                             f"shares stacks of experts with {others}, has the same share as {alike}, and would share "
                             f"its copy of that with {own}; these groups are no axes of one mesh: give mesh"
                             '["dp", "ep"], and where there is a shard_over, make it a multiple of ep\'s ranks, or a '
                             "divisor of them")
    return grid_of(same, None if grid.replicas is None else shards)._replace(over=over)
