"""Work that all ranks do at once, and fail at together."""

from .index import CheckpointError, Index


def gathered(comm, value):
    """[every rank's value]."""
    return comm.all_gather_object(value) if comm else [value]


def together(comm, work):
    """work() on every rank. If it raises on some, all ranks raise the first one's error, once all are through."""
    result, problem = None, None
    try:
        result = work()
    except (OSError, ValueError, MemoryError) as error:
        problem = error
    problems = [error for error in gathered(comm, problem) if error is not None]
    if problems:
        raise problems[0]
    return result


def index_of(comm, path):
    """The Index of the checkpoint at `path`. CheckpointError on all ranks where one finds none, or another one than the
    others do."""
    index = together(comm, lambda: Index.read(path))
    found = gathered(comm, (str(path), index.crc32))
    if other := [rank for rank, (_, crc32) in enumerate(found) if crc32 != found[0][1]]:
        raise CheckpointError(f"rank 0 finds another checkpoint at {found[0][0]} than rank {other[0]} at "
                              f"{found[other[0]][0]}: give all ranks the same one, in a folder that all nodes share")
    return index
