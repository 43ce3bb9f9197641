"""Reading a checkpoint into a model that may be cut in another way."""

import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from ..autodiff.writes import wrote
from ..backend import STORED, as_dtype, device_of, dtype_code, on, to_device_of
from ..comm.together import gathered, together
from ..parallel.fsdp.fully_sharded import FullySharded
from ..parallel.full_state import note_written
from .index import INDEX, CheckpointError, Index, key
from .layout import chunks_of, named_arrays, optimizer_names, piece_of, state_of


def load(path, model, optimizer=None, comm=None, verify=True):
    """Write the checkpoint at `path` into a model and its optimizer, however cut. Returns its facts. Collective.

    optimizer  None: the model alone is wanted
    verify     False: believe the files without reading all of them for their checksums

    A step that is under way is given up: gradients that are there, and what no_sync() or exact mode has added up, count
    for nothing afterwards. Raises CheckpointError on all ranks where a file is missing or damaged, or something doesn't
    fit; nothing is written then. RuntimeError inside gathered().
    """
    path, (rank, ranks) = Path(path), (comm.rank, comm.size) if comm else (0, 1)
    check_ungathered(model)
    index = index_of(comm, path)
    arrays, about = together(comm, lambda: state_of(model, optimizer))
    together(comm, lambda: check_fit(path, index, arrays, about))
    everybodys = gathered(comm, (set(arrays), about is not None))
    wanted, optimized = set().union(*(names for names, _ in everybodys)), any(has for _, has in everybodys)
    if unknown := sorted(n for n in index.arrays if n not in wanted and (optimized or n.startswith("model."))):
        raise CheckpointError(f"{path} has {few(unknown)}, which this model and optimizer don't")
    if verify:
        mine = list(index.files.items())[rank::ranks]
        together(comm, lambda: [check_file(path / name, facts) for name, facts in mine])
    values = together(comm, lambda: read_all(path, index, arrays))
    saved = None if optimizer is None else saved_state(optimizer_names(model, optimizer), index, values)
    together(comm, lambda: check_state(path, optimizer, saved))
    for chunk in chunks_of(model):
        (chunk.forget_step if getattr(chunk, "done", 0) else chunk.zero_grad)()
    write_model(model, values)
    if optimizer is not None:
        optimizer.load_state_dict(saved)
    return index.facts


def check_ungathered(model):
    """RuntimeError for a model that is inside gathered() in stage 3: its values there would stay the old ones."""
    for chunk in chunks_of(model):
        if isinstance(chunk, FullySharded) and chunk.values.held > chunk.keeping:
            raise RuntimeError("a checkpoint can't be loaded inside gathered(), whose values would stay as they were: "
                               "end that block before")


def check_fit(path, index, arrays, about):
    """CheckpointError unless all that this rank wants is there, in the same shape and dtype."""
    if about is not None and (index.optimizer is None or index.optimizer["class"] != about["class"]):
        there = "no optimizer" if index.optimizer is None else f"a {index.optimizer['class']}"
        raise CheckpointError(f"{path} is of {there}, this run has a {about['class']}")
    if missing := sorted(set(arrays) - set(index.arrays)):
        raise CheckpointError(f"{path} has no {few(missing)}")
    for name, (layout, array) in arrays.items():
        there = index.arrays[name]
        if (there["shape"], there["dtype"]) != (list(layout.shape), dtype_code(array.dtype)):
            raise CheckpointError(f"{path}: {name} is {there['dtype']} of shape {there['shape']}, this model's is "
                                  f"{dtype_code(array.dtype)} of shape {list(layout.shape)}")
    if about is None:
        return
    theirs = [set(group["names"]) for group in index.optimizer["groups"]]
    if len(theirs) != len(about["groups"]):
        raise CheckpointError(f"{path}: an optimizer of {len(theirs)} groups, this one has {len(about['groups'])}")
    for number, (group, names) in enumerate(zip(about["groups"], theirs, strict=True)):
        if strangers := [name for name in group["names"] if name not in names]:
            raise CheckpointError(f"{path}: {few(strangers)} of the optimizer's group {number} is in another one there")


def check_state(path, optimizer, saved):
    """CheckpointError for settings that the optimizer can't have."""
    try:
        if optimizer is not None:
            optimizer.check_state(saved)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def few(names):
    """The first of some names, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_file(path, facts):
    """CheckpointError unless the file is what was written."""
    crc, count, block = 0, 0, memoryview(bytearray(1 << 18))
    try:
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(block):
                crc, count = zlib.crc32(block[:n], crc), count + n
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    if count != facts["bytes"]:
        raise CheckpointError(f"{path} has {count:,} of {facts['bytes']:,} bytes: it was cut off; take an earlier "
                              f"checkpoint (the newest is that before when {path.parent} is deleted)")
    if crc != facts["crc32"]:
        raise CheckpointError(f"{path} has changed since it was written: its CRC-32 is {crc:08x}, it should be "
                              f"{facts['crc32']:08x}; take an earlier checkpoint (the newest is that before when "
                              f"{path.parent} is deleted)")


def read_all(path, index, arrays):
    """{name: this rank's part of it, a NumPy array of the shape of what it has}."""
    reader = Reader(path, index)
    found = {}
    for name, (layout, array) in arrays.items():
        values = found[name] = np.empty(array.shape, array.dtype)
        for box, place in layout.pieces:
            piece_of(values, place)[...] = reader.read(name, box)
    return found


class Reader:
    """Reads boxes of a checkpoint's arrays out of its files. verify: checks each file when it is first needed."""

    def __init__(self, path, index, verify=False):
        self.path, self.index, self.verify, self.files = path, index, verify, {}
        self.all = None, None       # (name, values) of an array that was read as a whole, the last one

    def read(self, name, box):
        """The elements of a box, of its shape. Where boxes count axes here and elements there, all of the array is
        read, once for boxes that are asked for one after another."""
        from safetensors import SafetensorError
        kind = self.index.arrays[name]
        if any(len(piece["box"]) != len(box) for piece in kind["pieces"]):
            pieces, shape = kind["pieces"], kind["shape"]
            if self.all[0] != name:
                self.all = name, self.read(name, [(0, e) for e in shape] if len(pieces[0]["box"]) == len(shape)
                                           else [(0, prod(shape))])
            flat = len(box) != len(shape)
            return self.all[1].reshape(-1 if flat else shape)[tuple(slice(*side) for side in box)]
        values = np.empty([stop - start for start, stop in box], as_dtype(kind["dtype"]))
        for piece in kind["pieces"]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece["box"], strict=True)]
            if all(start < stop for start, stop in common) or not box:
                try:
                    file, entry = self._file(piece["file"]), key(name, piece["box"])
                    part = file.get_slice(entry)
                    there, shape = f"{part.get_dtype()} {part.get_shape()}", [b - a for a, b in piece["box"]]
                    if there != (said := f"{STORED[values.dtype.name]} {shape}"):
                        raise CheckpointError(f"{self.path / piece['file']} has {entry} of {there}, and {INDEX} says "
                                              f"{said}: one of them is damaged")
                    values[shifted(common, box)] = (part[shifted(common, piece["box"])] if box
                                                    else file.get_tensor(entry))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{self.path / piece['file']} can't be read: {error}") from None
        return values

    def _file(self, name):
        from safetensors import safe_open
        if name not in self.files:
            if self.verify:
                check_file(self.path / name, self.index.files[name])
            self.files[name] = safe_open(self.path / name, "numpy")
        return self.files[name]


class StoredValues(Mapping):
    """{name: array} of the parameters and buffers of the model that the checkpoint at `path` is of, each read when it
    is asked for, whole, however the model was cut. CheckpointError where there is none, or a file is damaged.

    verify  False: believe the files without reading all of them for their checksums
    """

    def __init__(self, path, verify=True):
        self.reader = Reader(Path(path), Index.read(path), verify)
        self.shapes = {name[len("model."):]: array["shape"] for name, array in self.reader.index.arrays.items()
                       if name.startswith("model.")}

    def __getitem__(self, name):
        return self.reader.read(f"model.{name}", [(0, extent) for extent in self.shapes[name]])

    def __contains__(self, name):
        return name in self.shapes      # Mapping's own would read it

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self):
        return len(self.shapes)


def shifted(box, origin):
    """The index of a box in what begins at another box's start."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, origin, strict=True))


def write_model(model, values):
    """Write {model.name: this rank's part}."""
    for name, array in named_arrays(model):
        with on(device_of(array)):
            array[...] = to_device_of(values[f"model.{name}"], array)
        wrote(array, "loading a checkpoint")
    for chunk in chunks_of(model):
        if isinstance(chunk, FullySharded):
            chunk.stale = True      # stages 1 and 2: what was gathered from the other ranks
            note_written(chunk, "loading a checkpoint")


def saved_state(groups, index, values):
    """What optimizer.load_state_dict takes: the settings, the counts of updates, and {optimizer.state.name: this rank's
    part}. groups: the parameters' names."""
    names = [name for group in groups for name in group]
    state = {name: {} for name in names}
    for entry, array in values.items():
        what, _, rest = entry.partition(".")
        if what == "optimizer":
            kind, _, name = rest.partition(".")
            state[name][kind] = array
    return {
        "class": index.optimizer["class"], "sizes": [len(group) for group in groups],
        "groups": [{k: tuple(v) if isinstance(v, list) else v for k, v in group["settings"].items()}
                   for group in index.optimizer["groups"]],
        "steps": [index.optimizer["steps"][name] for name in names],
        "state": [state[name] for name in names]}


def index_of(comm, path):
    """The Index of the checkpoint at `path`. CheckpointError on all ranks where one finds none, or another one than the
    others do."""
    index = together(comm, lambda: Index.read(path))
    found = gathered(comm, (str(path), index.crc32))
    if other := [rank for rank, (_, crc32) in enumerate(found) if crc32 != found[0][1]]:
        raise CheckpointError(f"rank 0 finds another checkpoint at {found[0][0]} than rank {other[0]} at "
                              f"{found[other[0]][0]}: give all ranks the same one, in a folder that all nodes share")
    return index
