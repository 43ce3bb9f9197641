"""Sparse storage: what a pruned model weighs when the zeros are left out.

    bitmask   a bit per element says whether it is there; then the values      size/8 + kept · itemsize bytes
    2:4       of every 4 neighbours 2 values, and of each its place, 2 bits    size/2 · (itemsize + 1/4) bytes
    dense     all values                                                       size · itemsize bytes

    packed = sparse.pack_all(model.state_dict(), masks)         # {name: Packed}
    sparse.save("pruned.safetensors", packed)
    model.load_state_dict(sparse.unpack_all(sparse.load("pruned.safetensors")))

Source: Mishra et al. 2021 for 2:4; the format of the files is safetensors.
"""

import json
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ..checkpoints.writing import write
from ..parallel.encodings import from_bits, to_bits
from .prune import grouped, ungrouped


@dataclass(frozen=True)
class Packed:
    """An array without its zeros.

    shape   of the whole
    values  those that are there, 1-d
    places  uint8: for "bitmask" and "n:m" the packed bits that say where; None for "dense"
    kind    "dense", "bitmask" or "n:m", n and m being numbers
    """

    kind: str
    shape: tuple
    values: np.ndarray
    places: np.ndarray | None = None

    @property
    def nbytes(self):
        """Bytes of values and places."""
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)

    def mask(self):
        """Which elements are there: bool of `shape`."""
        if self.kind == "dense":
            return np.ones(self.shape, bool)
        if self.kind == "bitmask":
            return np.unpackbits(self.places, count=prod(self.shape)).astype(bool).reshape(self.shape)
        n, m = map(int, self.kind.split(":"))
        places = from_bits(self.places, self.values.size, _bits(m)).reshape(-1, n)
        keep = np.zeros((len(places), m), bool)
        np.put_along_axis(keep, places, True, axis=1)
        moved = (self.shape[0], *self.shape[2:], self.shape[1] // m, m)
        return np.ascontiguousarray(ungrouped(keep.reshape(moved)))

    def unpack(self):
        """The whole array."""
        out = np.zeros(self.shape, self.values.dtype)
        if self.kind in ("dense", "bitmask"):
            out[self.mask()] = self.values.reshape(-1)
            return out
        m = int(self.kind.split(":")[1])
        keep, moved = grouped(self.mask(), m), grouped(out, m).copy()
        moved[keep] = self.values
        return np.ascontiguousarray(ungrouped(moved))


def pack(array, mask=None, n_of_m=None):
    """The Packed of a NumPy array.

    mask    bool of its shape; None: dense
    n_of_m  (n, m): the mask is one of prune.n_of_m(…, n, m), and places are stored, not a bit per element

    ValueError where values under the mask aren't zero, which would be lost, or the mask is no n of m.
    """
    array = np.asarray(array)
    if mask is None:
        return Packed("dense", array.shape, array.reshape(-1).copy())
    if mask.shape != array.shape or mask.dtype != bool:
        raise ValueError(f"pack: an array of shape {array.shape} and a mask, {mask.dtype}, of shape {mask.shape}: they "
                         "must have one shape, the mask be bool")
    if lost := np.count_nonzero(array[~mask]):
        raise ValueError(f"pack: {lost:,} of the {np.count_nonzero(~mask):,} values under the mask aren't zero, and "
                         "would be lost: call Pruning(model, masks) first")
    if n_of_m is None:
        return Packed("bitmask", array.shape, array[mask], np.packbits(mask))
    n, m = n_of_m
    if array.ndim < 2 or array.shape[1] % m or (grouped(mask, m).sum(-1) != n).any():
        raise ValueError(f"pack: the mask of shape {mask.shape} doesn't keep {n} of every {m} along axis 1")
    keep = grouped(mask, m)
    return Packed(f"{n}:{m}", array.shape, grouped(array, m)[keep], to_bits(np.nonzero(keep)[-1], _bits(m)))


def _bits(m):
    """Bits that a place among m takes."""
    return (m - 1).bit_length()


def pack_all(state, masks, n_of_m=None):
    """{name: Packed} of a state dict: what has a mask without its zeros, the rest dense."""
    if unknown := sorted(set(masks) - set(state)):
        raise ValueError(f"pack_all: masks for {', '.join(unknown)}, which the state doesn't have; it has "
                         f"{', '.join(state)}")
    return {name: pack(value, masks.get(name), n_of_m if name in masks else None) for name, value in state.items()}


def unpack_all(packed):
    """The state dict of {name: Packed}."""
    return {name: p.unpack() for name, p in packed.items()}


def nbytes(packed):
    """Bytes of all values and places of {name: Packed}."""
    return sum(p.nbytes for p in packed.values())


def save(path, packed):
    """Write {name: Packed} as a file of safetensors. A file that is there stays until the new one is complete."""
    from safetensors.numpy import save as to_bytes
    path, tensors = Path(path), {}
    for name, p in packed.items():
        tensors[f"{name}|values"] = p.values
        if p.places is not None:
            tensors[f"{name}|places"] = p.places
    kinds = json.dumps({name: [p.kind, list(p.shape)] for name, p in packed.items()})
    partial = path.with_name(path.name + ".partial")
    write(partial, [to_bytes(tensors, {"packed": kinds, "crc32": _crc32(kinds, tensors)})])
    partial.replace(path)


def load(path):
    """What save has written. ValueError where the file is something else, or damaged: a bit is enough."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "numpy") as file:
            facts, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        kinds = facts["packed"]
        if "crc32" not in facts:
            raise ValueError(f"{path} has no CRC-32, and nobody knows whether it has changed: an older version has "
                             "written it; pack the model and save it anew")
        if facts["crc32"] != _crc32(kinds, tensors):
            raise ValueError(f"{path} has changed since it was written, its CRC-32 is another one: write it anew")
        return {name: Packed(kind, tuple(shape), tensors[f"{name}|values"], tensors.get(f"{name}|places"))
                for name, (kind, shape) in json.loads(kinds).items()}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is no file of a pruned model, or damaged: {error}") from None


def _crc32(kinds, tensors):
    """Of all that a file says, as text: names, dtypes and shapes, too."""
    found = zlib.crc32(kinds.encode())
    for name, array in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), found)
    return f"{found:08x}"
