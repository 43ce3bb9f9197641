"""Writing a checkpoint: every rank its share, and a name when all of it is on disk."""

import errno
import json
import os
import shutil
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from ..backend import STORED, dtype_code, to
from ..comm.together import gathered, together
from ..launch_env import launched_rank
from .index import INDEX, Index, key, number
from .layout import buffer_names, piece_of, state_of


def save(path, model, optimizer=None, facts=None, comm=None):
    """Write a checkpoint at `path`, a folder that must not exist. Collective.

    model      a Module or a list of a pipeline's chunks, see layouts
    optimizer  of this model's parameters, or None
    facts      what else is to be kept: {name: what JSON can hold}; rank 0's count
    comm       the Communicator of all ranks that have a part of the model (default: one process)

    Buffers are rank 0's, or the first rank's that has them: others may have moved theirs alone. Raises OSError on all
    ranks, if a rank can't write, and ValueError, where ranks that should hold the same values don't; then there is
    nothing at `path`.
    """
    path, rank = Path(path), comm.rank if comm else 0
    partial = path.with_name(f".{path.name}.partial{of_group(comm)}")
    arrays, about = state_of(model, optimizer)
    together(comm, lambda: check_savable(arrays, facts or {}))
    arrays = cut_alike(comm, arrays)
    buffers = {f"model.{name}" for name in buffer_names(model)}
    index = Index.planned(gathered(comm, described(arrays)), first=set().union(*gathered(comm, buffers)))
    index.optimizer, index.facts = merged(gathered(comm, about)), facts or {}
    check_alike(comm, {name: array for name, array in arrays.items()
                       if name.startswith("model.") and name not in buffers})
    together(comm, lambda: begin(path, partial) if rank == 0 else None)
    file = f"rank-{rank}.safetensors"
    mine = {key(name, box): (array, box, place) for name, (layout, array) in arrays.items()
            for box, place in layout.pieces if index.writer(name, box) == file}
    try:
        index.files = dict(gathered(comm, (file, together(comm, lambda: write(partial / file, blocks(mine))))))
        together(comm, lambda: publish(partial, path, index) if rank == 0 else None)
    except OSError:
        if rank == 0:       # the room is wanted by others, perhaps
            shutil.rmtree(partial, ignore_errors=True)
        raise


def cut_alike(comm, arrays):
    """The same {name: (Layout, array)}, with ranges of elements that end wherever another rank's do: so that what
    several ranks hold are the same pieces. (Beside tensor parallelism's unequal parts fully_shard's pieces of a
    parameter begin and end elsewhere on each of its ranks.)"""
    ends = defaultdict(set)
    for theirs in gathered(comm, {name: layout.ends() for name, (layout, _) in arrays.items()}):
        for name, own in theirs.items():
            ends[name] |= own
    return {name: (layout.cut_at(ends[name]), array) for name, (layout, array) in arrays.items()}


def described(arrays):
    """What Index.planned must know of a rank's {name: (Layout, array)}: [(name, whole shape, dtype, [box])]."""
    return [(name, layout.shape, dtype_code(array.dtype), [box for box, _ in layout.pieces])
            for name, (layout, array) in arrays.items()]


def of_group(comm):
    """What tells the groups of a program's ranks apart: where by mistake several save at one path, neither may write
    into the other's folder. Empty for that of rank 0."""
    first = comm.world_ranks[0] if comm else launched_rank()
    return f"-{first}" if first else ""


def check_savable(arrays, facts):
    """ValueError for what a checkpoint can't hold."""
    if odd := [f"{name} ({array.dtype})" for name, (_, array) in arrays.items() if array.dtype.name not in STORED]:
        raise ValueError(f"a checkpoint can't hold {', '.join(odd)}; it can {', '.join(STORED)}")
    for name, value in facts.items():
        try:
            json.dumps({name: value}, default=number)
        except (TypeError, ValueError) as error:
            raise ValueError(f"save: the fact {name}={value!r} is nothing that JSON can hold: {error}") from None


def check_alike(comm, arrays):
    """ValueError on all ranks where some hold other values of the same piece of a parameter: then it isn't the same
    model, or isn't the same any more."""
    if comm is None or comm.size == 1:
        return
    mine, values = {}, {}
    for name, (layout, array) in arrays.items():
        for box, place in layout.pieces:
            mine[name, box] = zlib.crc32(on_host(piece_of(array, place)))
    for rank, theirs in enumerate(gathered(comm, mine)):
        for (name, box), crc32 in theirs.items():
            if values.setdefault((name, box), (rank, crc32))[1] != crc32:
                raise ValueError(f"{name} has other values on rank {rank} than on rank {values[name, box][0]}: a "
                                 "checkpoint would hold some of each. Either these are two parameters by one name, or "
                                 "the ranks don't train one model (DistributedDataParallel, fully_shard)")


def on_host(array):
    """Its elements, one after another in C order, little-endian, as bytes."""
    array = np.ascontiguousarray(to(array, "cpu")).reshape(-1)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def begin(path, partial):
    """Make room, and take away what a save that was broken off has left."""
    if path.exists():
        raise there_already(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def there_already(path):
    return FileExistsError(errno.EEXIST, "there is a checkpoint already", str(path))


def blocks(pieces):
    """The bytes of a file of safetensors with pieces {key: (array, box, place)}: a header, then the arrays one by
    one."""
    order = sorted(pieces.items(), key=lambda piece: -piece[1][0].dtype.itemsize)     # so that all are aligned
    header, at = {}, 0
    for name, (array, box, _) in order:
        shape = [stop - start for start, stop in box]
        end = at + int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
        header[name] = {"dtype": STORED[array.dtype.name], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (array, _, place) in order:
        yield on_host(piece_of(array, place))


def write(path, blocks):
    """A file that is on disk when this returns: {"bytes", "crc32"}."""
    count, crc32 = 0, 0
    try:
        with open(path, "wb") as file:
            for block in blocks:
                file.write(block)
                count, crc32 = count + len(block), zlib.crc32(block, crc32)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:    # writing says nothing of the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    return {"bytes": count, "crc32": crc32}


def publish(partial, path, index):
    """All ranks' files are on disk: give them their index, and the folder its name."""
    for name, facts in index.files.items():
        size = (partial / name).stat().st_size if (partial / name).is_file() else None
        if size != facts["bytes"]:
            raise OSError(errno.EIO, f"{name} has {size} of {facts['bytes']} bytes when seen from rank 0: the folder "
                                     "must be one that all nodes share", str(partial))
    write(partial / INDEX, [index.text().encode()])
    sync(partial)
    try:
        os.rename(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):      # since begin(): another group of ranks
            raise there_already(path) from None
        raise
    sync(path.parent)


def sync(folder):
    """Have a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def merged(parts):
    """The optimizer's facts of all ranks as one (None: a rank has none, say of a stage without parameters); ValueError
    where ranks that are to agree don't."""
    parts = {rank: part for rank, part in enumerate(parts) if part is not None}
    if not parts:
        return None
    first, found = min(parts), {"steps": {}}
    found |= {"class": parts[first]["class"],
              "groups": [{"names": [], "settings": group["settings"]} for group in parts[first]["groups"]]}
    for rank, part in parts.items():
        if part["class"] != found["class"]:
            raise ValueError(f"rank {rank} has a {part['class']}, rank {first} a {found['class']}")
        if [g["settings"] for g in part["groups"]] != [g["settings"] for g in found["groups"]]:
            raise ValueError(f"the optimizers' groups have other settings on rank {rank} than on rank {first}: "
                             f"{part['groups']} and {parts[first]['groups']}")
        for name, steps in part["steps"].items():
            if found["steps"].setdefault(name, steps) != steps:
                raise ValueError(f"{name} was updated {steps} times on rank {rank}, {found['steps'][name]} times on "
                                 "others")
        for ours, theirs in zip(found["groups"], part["groups"], strict=True):
            ours["names"] += [name for name in theirs["names"] if name not in ours["names"]]
    return found
