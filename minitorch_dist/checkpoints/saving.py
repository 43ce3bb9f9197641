"""Saving a checkpoint: what is to be written, and by which rank."""

import json
import zlib
from collections import defaultdict
from pathlib import Path

from ..backend import STORED, dtype_code
from ..comm.together import gathered, together
from ..launch_env import launched_rank
from .index import Index, key, number
from .layout import buffer_names, piece_of, state_of
from .writing import Saving, begin, copied, on_host


def save(path, model, optimizer=None, facts=None, comm=None, async_op=False):
    """Write a checkpoint at `path`, a folder that must not exist. Collective.

    model      a Module or a list of a pipeline's chunks, see layouts
    optimizer  of this model's parameters, or None
    facts      what else is to be kept: {name: what JSON can hold}; rank 0's count
    comm       the Communicator of all ranks that have a part of the model (default: one process)
    async_op   return a Saving as soon as the values are copied, each rank's share in its host's memory: training goes
               on while a thread writes them

    Buffers are rank 0's, or the first rank's that has them: others may have moved theirs alone. Raises OSError on all
    ranks, if a rank can't write, and ValueError, where ranks that should hold the same values don't; then there is
    nothing at `path`. With async_op, Saving.wait raises what the thread met.
    """
    path, rank = Path(path), comm.rank if comm else 0
    partial = path.with_name(f".{path.name}.partial{of_group(comm)}")
    arrays, about = together(comm, lambda: state_of(model, optimizer))
    facts = together(comm, lambda: savable(arrays, facts or {}))
    arrays = cut_alike(comm, arrays)
    buffers = {f"model.{name}" for name in buffer_names(model)}
    index = Index.planned(gathered(comm, described(arrays)), first=set().union(*gathered(comm, buffers)))
    index.optimizer = merged(gathered(comm, about))
    index.facts = comm.broadcast_object(facts) if comm else facts
    check_alike(comm, {name: array for name, array in arrays.items()
                       if name.startswith("model.") and name not in buffers})
    file = f"rank-{rank}.safetensors"
    mine = {key(name, box): (array, box, place) for name, (layout, array) in arrays.items()
            for box, place in layout.pieces if index.writer(name, box) == file}
    if async_op:
        mine = together(comm, lambda: copied(mine))
    together(comm, lambda: begin(path, partial, comm) if rank == 0 else None)
    saving = Saving(path, partial, index, comm, mine)
    if async_op:
        saving.start()
        return saving
    saving.wait()
    return None


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


def savable(arrays, facts):
    """The facts as JSON has them, which nobody changes any more. ValueError for what a checkpoint can't hold."""
    if odd := [f"{name} ({array.dtype})" for name, (_, array) in arrays.items() if array.dtype.name not in STORED]:
        raise ValueError(f"a checkpoint can't hold {', '.join(odd)}; it can {', '.join(STORED)}")
    for name, (layout, array) in arrays.items():
        for box, place in layout.pieces:
            wanted, there = tuple(stop - start for start, stop in box), piece_of(array, place).shape
            if there != wanted:     # of an optimizer of one's own: the file couldn't be read
                raise ValueError(f"save: {name} of shape {tuple(array.shape)} isn't what own_shapes() or the parameter "
                                 f"says, {layout.shape}: at {list(box)} it has {there}")
    found = {}
    for name, value in facts.items():
        try:
            found |= json.loads(json.dumps({name: value}, default=number))
        except (TypeError, ValueError) as error:
            raise ValueError(f"save: the fact {name}={value!r} is nothing that JSON can hold: {error}") from None
    return found


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
