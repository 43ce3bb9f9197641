"""The index of a checkpoint: what there is, and which file has it."""

import json
import re
from math import prod
from pathlib import Path

import numpy as np

VERSION = 1
INDEX = "index.json"
FLAT_LIST = re.compile(r"""\[\s+ (?: (?:[-+.\w]+ | \[[^][\n]*\]) ,?\s+ )+ \]""", re.X)


class CheckpointError(ValueError):
    """A checkpoint that can't be read, or doesn't fit."""


class Index:
    """The index of a checkpoint, which is a file of JSON.

    arrays     {name: {"shape", "dtype", "pieces": [{"file", "box"}]}}; the box as in Layout
    files      {file: {"bytes", "crc32"}}
    optimizer  None, or {"class", "steps": {parameter: updates}, "groups": [{"names", "settings"}]}
    facts      what the caller has given
    """

    def __init__(self, arrays, files=None, optimizer=None, facts=None):
        self.arrays, self.files, self.optimizer, self.facts = arrays, files, optimizer, facts
        self.writers = {key(name, piece["box"]): piece["file"] for name, array in arrays.items()
                        for piece in array["pieces"]}

    @classmethod
    def planned(cls, everybodys):
        """Who writes what. everybodys: [[(name, whole shape, dtype, [box])]] per rank. The greatest pieces are dealt
        out first, each to the one of its holders that has the least to write so far. ValueError where the pieces of an
        array aren't the whole of it, or ranks mean different arrays by a name."""
        arrays, holders = {}, {}
        for rank, held in enumerate(everybodys):
            for name, shape, dtype, boxes in held:
                kind = arrays.setdefault(name, {"shape": list(shape), "dtype": dtype, "pieces": []})
                if (kind["shape"], kind["dtype"]) != (list(shape), dtype):
                    raise ValueError(f"{name} is {kind['dtype']} of shape {kind['shape']} on one rank, {dtype} of "
                                     f"shape {list(shape)} on rank {rank}")
                for box in boxes:
                    if size(box) or not prod(shape):
                        holders.setdefault((name, box), []).append(rank)
        load = [0] * len(everybodys)
        weight = {piece: size(piece[1]) * np.dtype(arrays[piece[0]]["dtype"]).itemsize for piece in holders}
        for name, box in sorted(holders, key=lambda piece: (-weight[piece], piece)):
            rank = min(holders[name, box], key=lambda r: load[r])
            load[rank] += weight[name, box]
            arrays[name]["pieces"].append({"file": f"rank-{rank}.safetensors", "box": [list(side) for side in box]})
        for name, array in arrays.items():
            array["pieces"].sort(key=lambda piece: piece["box"])
            if sum(size(piece["box"]) for piece in array["pieces"]) != prod(array["shape"]):
                raise ValueError(f"the ranks hold {array['pieces']} of {name} {array['shape']}, which is not each of "
                                 "its elements once")
        return cls(arrays)

    def writer(self, name, box):
        """Which file holds the piece."""
        return self.writers[key(name, box)]

    def text(self):
        """As JSON."""
        text = json.dumps({"version": VERSION, "facts": self.facts, "optimizer": self.optimizer, "files": self.files,
                           "arrays": self.arrays}, indent=1)
        for _ in range(2):      # a list of numbers, and a list of such lists, on one line
            text = FLAT_LIST.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
        return text + "\n"

    @classmethod
    def read(cls, path):
        """The index of the checkpoint at `path`. CheckpointError where there is none that this program knows."""
        try:
            found = json.loads((Path(path) / INDEX).read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise CheckpointError(f"{path}: a checkpoint of version {found['version']}; this program reads "
                                      f"{VERSION}")
            return cls(found["arrays"], found["files"], found["optimizer"], found["facts"])
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no checkpoint here: it has no {INDEX}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}/{INDEX} is damaged: {type(error).__name__}: {error}") from None


def key(name, box):
    """What a piece is called in its file: the array's name; where it begins later than that, the box as well."""
    return name if all(start == 0 for start, _ in box) else f"{name}[{','.join(f'{a}:{b}' for a, b in box)}]"


def size(box):
    """How many elements it has."""
    return prod(stop - start for start, stop in box)
