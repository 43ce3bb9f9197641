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

Sources: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2; Zhang et al. 2022, "MiCS".
"""

from typing import NamedTuple

from ..comm import Communicator


class Grid(NamedTuple):
    """Who shares what: Communicators.

    everyone   all ranks; each has samples of its own
    shards     those over which one copy of the state is cut
    replicas   those that hold the same part of it; None where there is one copy
    """

    everyone: Communicator
    shards: Communicator
    replicas: Communicator | None


def check_communicator(shard_over):
    """ValueError for what can't be a group of ranks."""
    if not isinstance(shard_over, Communicator | None):
        raise ValueError(f"fully_shard: shard_over is a {type(shard_over).__name__}, {str(shard_over)!r}; it must be "
                         'the Communicator of the ranks that share one copy, as mesh["shard"]')


def grid(comm, shard_over):
    """The Grid of comm's ranks, of which those in shard_over (None: all) share a copy. ValueError on all ranks unless
    shard_over is S neighbours of comm's ranks everywhere, r·S … r·S + S - 1 in their order. Collective, but for None.
    """
    if shard_over is None:
        return Grid(comm, comm, None)
    size = shard_over.size
    for rank, own in enumerate(comm.all_gather_object((shard_over.name, list(shard_over.world_ranks)))):
        first = rank - rank % size
        wanted = list(comm.world_ranks[first:first + size])
        if own[1] != wanted:
            raise ValueError(f"fully_shard: rank {rank} of {comm.name!r} is to share its copy over {own[0]!r}, ranks "
                             f"{own[1]} of the world; with {size} of the ranks {list(comm.world_ranks)} it would be "
                             f"{wanted}. Groups of neighbours, all of one size, must make up comm: give "
                             'mesh["replicate", "shard"] and shard_over=mesh["shard"] of a '
                             f"DeviceMesh(replicate=…, shard={size})")
    if size == comm.size:
        return Grid(comm, shard_over, None)
    same = list(comm.world_ranks[shard_over.rank::size])
    axis = next((axis for axis in comm.axes.values() if list(axis.world_ranks) == same), None)
    return Grid(comm, shard_over, axis or comm.split(shard_over.rank, name=f"{comm.name} but {shard_over.name}"))
