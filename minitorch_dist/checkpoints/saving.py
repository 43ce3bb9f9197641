"""Writing a checkpoint: every rank its share, and a name when all of it is on disk."""

import os
import shutil
import zlib
from pathlib import Path

import numpy as np

from ..backend import to
from .index import INDEX, Index, key
from .layout import piece_of, state_of
from .together import gathered, together


def save(path, model, optimizer=None, facts=None, comm=None):
    """Write a checkpoint at `path`, a folder that must not exist. Collective.

    model      a Module or a list of a pipeline's chunks, see layouts
    optimizer  of this model's parameters, or None
    facts      what else is to be kept: {name: what JSON can hold}; rank 0's count
    comm       the Communicator of all ranks that have a part of the model (default: one process)

    Raises OSError on all ranks, if a rank can't write; then there is nothing at `path`.
    """
    from safetensors.numpy import save as packed
    path, rank = Path(path), comm.rank if comm else 0
    partial = path.with_name(f".{path.name}.partial")
    arrays, about = state_of(model, optimizer)
    everybodys = gathered(comm, [(name, layout.shape, array.dtype.str, [box for box, _ in layout.pieces])
                                 for name, (layout, array) in arrays.items()])
    index = Index.planned(everybodys)
    index.optimizer, index.facts = merged(gathered(comm, about)), facts or {}
    together(comm, lambda: begin(path, partial) if rank == 0 else None)
    file, mine = f"rank-{rank}.safetensors", {}
    for name, (layout, array) in arrays.items():
        for box, place in layout.pieces:
            if index.writer(name, box) == file:
                values = np.ascontiguousarray(to(piece_of(array, layout, place), "cpu"))
                mine[key(name, box)] = values.reshape([stop - start for start, stop in box])
    data = packed(mine)
    index.files = dict(gathered(comm, (file, {"bytes": len(data), "crc32": zlib.crc32(data)})))
    try:
        together(comm, lambda: write(partial / file, data))
        together(comm, lambda: publish(partial, path, index) if rank == 0 else None)
    except OSError:
        if rank == 0:       # the room is wanted by others, perhaps
            shutil.rmtree(partial, ignore_errors=True)
        raise


def begin(path, partial):
    """Make room, and take away what a save that was broken off has left."""
    if path.exists():
        raise FileExistsError(17, "there is a checkpoint already", str(path))
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def write(path, data):
    """A file that is on disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(partial, path, index):
    """All ranks' files are on disk: give them their index, and the folder its name."""
    for name, facts in index.files.items():
        size = (partial / name).stat().st_size if (partial / name).is_file() else None
        if size != facts["bytes"]:
            raise OSError(5, f"{name} has {size} of {facts['bytes']} bytes when seen from rank 0: the folder must be "
                             "one that all nodes share", str(partial))
    write(partial / INDEX, index.text().encode())
    sync(partial)
    os.rename(partial, path)
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
