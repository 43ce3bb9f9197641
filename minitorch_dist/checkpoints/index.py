"""The index of a checkpoint: what there is, and which file has it."""

import json
import re
import zlib
from math import prod
from pathlib import Path

import numpy as np

from ..backend import STORED, as_dtype

VERSION = 2         # of 1 the index has no crc32 of its own
INDEX = "index.json"
PARTS = "facts", "optimizer", "files", "arrays"
FILE = re.compile(r"rank-\d+\.safetensors")      # in the checkpoint's own folder, wherever its index comes from
DTYPES = {"bfloat16", *(np.dtype(name).newbyteorder(order).str for name in STORED if name != "bfloat16"
                        for order in "<>")}     # "<f4" and so on
FLAT_LIST = re.compile(r"""\[\n\s* (?: (?:[-+.\w]+ | \[[^][\n]*\]) ,?\n\s* )+ \]""", re.X)   # no string has \n


class CheckpointError(ValueError):
    """A checkpoint that can't be read, or doesn't fit."""


class Index:
    """The index of a checkpoint, which is a file of JSON, of these four with a CRC-32 of them.

    arrays     {name: {"shape", "dtype", "pieces": [{"file", "box"}]}}; the box as in Layout
    files      {file: {"bytes", "crc32"}}
    optimizer  None, or {"class", "steps": {parameter: updates}, "groups": [{"names", "settings"}]}
    facts      what the caller has given
    crc32      of the file that it was read from
    """

    crc32 = None

    def __init__(self, arrays, files=None, optimizer=None, facts=None):
        self.arrays, self.files, self.optimizer, self.facts = arrays, files, optimizer, facts
        self.writers = {key(name, piece["box"]): piece["file"] for name, array in arrays.items()
                        for piece in array["pieces"]}
        if len(self.writers) < sum(len(array["pieces"]) for array in arrays.values()):
            raise ValueError("two pieces have one name: an array is called as another one's piece, name[begin:end]")

    @classmethod
    def planned(cls, everybodys, first=()):
        """Who writes what. everybodys: [[(name, whole shape, dtype, [box])]] per rank. The greatest pieces are dealt
        out first, each to the one of its holders that has the least to write so far; those of the names in `first` to
        the first. ValueError where the pieces of an array aren't the whole of it, or ranks mean different arrays by a
        name."""
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
        weight = {piece: size(piece[1]) * as_dtype(arrays[piece[0]]["dtype"]).itemsize for piece in holders}
        for name, box in sorted(holders, key=lambda piece: (-weight[piece], piece)):
            rank = min(holders[name, box][:1 if name in first else None], key=lambda r: load[r])
            load[rank] += weight[name, box]
            arrays[name]["pieces"].append({"file": f"rank-{rank}.safetensors", "box": [list(side) for side in box]})
        for name, array in arrays.items():
            array["pieces"].sort(key=lambda piece: piece["box"])
            if not covers([piece["box"] for piece in array["pieces"]], array["shape"]):
                raise ValueError(f"the ranks hold {array['pieces']} of {name} {array['shape']}, which is not each of "
                                 "its elements once: is the communicator that of all ranks that have a part of it?")
        return cls(arrays)

    def writer(self, name, box):
        """Which file holds the piece."""
        return self.writers[key(name, box)]

    def text(self):
        """As JSON."""
        parts = {name: getattr(self, name) for name in PARTS}
        text = json.dumps({"version": VERSION, "crc32": crc32_of(parts), **parts}, indent=1, default=number)
        for _ in range(2):      # a list of numbers, and a list of such lists, on one line
            text = FLAT_LIST.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
        return text + "\n"

    @classmethod
    def read(cls, path):
        """The index of the checkpoint at `path`. CheckpointError where there is none that this program knows."""
        try:
            text = (Path(path) / INDEX).read_bytes()
            found = json.loads(text)
            if found["version"] not in (1, VERSION):
                raise CheckpointError(f"{path}: a checkpoint of version {found['version']}; this program reads "
                                      f"1 and {VERSION}")
            if found["version"] > 1 and (crc32 := crc32_of(found)) != found["crc32"]:
                raise CheckpointError(f"{path}/{INDEX} has changed since it was written: the CRC-32 of what it says is "
                                      f"{crc32:08x}, not {found['crc32']:08x}")
            return cls(found["arrays"], found["files"], found["optimizer"], found["facts"]).checked(zlib.crc32(text))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no checkpoint here: it has no {INDEX}") from None
        except OSError as error:
            raise CheckpointError(f"{path}/{INDEX} can't be read: {error.strerror}") from None
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}/{INDEX} is damaged: {type(error).__name__}: {error}") from None

    def checked(self, crc32):
        """self, if each array is in pieces that are all of it, in files that are there: what is read is defined then,
        and nothing is read elsewhere. ValueError, KeyError, TypeError or AttributeError where not."""
        if strange := [file for file in self.files if not FILE.fullmatch(file)]:
            raise ValueError(f"it names {strange[0]!r}, which is no file of a checkpoint")
        for name, array in self.arrays.items():
            if strange := [piece["file"] for piece in array["pieces"] if piece["file"] not in self.files]:
                raise ValueError(f"{name} is said to be in {strange[0]!r}, which is not among the files")
            if not covers([piece["box"] for piece in array["pieces"]], array["shape"]):
                raise ValueError(f"the pieces of {name} are not each of its elements once")
            if array["dtype"] not in DTYPES:    # NumPy makes something of many a text, and takes some for a program
                raise ValueError(f"{name} is said to be of {array['dtype']!r}, which no file of a checkpoint holds")
            as_dtype(array["dtype"])
        for name, file in self.files.items():
            if not (isinstance(file["bytes"], int) and isinstance(file["crc32"], int)):
                raise ValueError(f"the bytes and the crc32 of {name} are no whole numbers")
        if self.optimizer is not None and not isinstance(self.optimizer["class"], str):
            raise ValueError(f"it has state of {self.optimizer['class']!r}, which is no optimizer's name")
        for group in self.optimizer["groups"] if self.optimizer is not None else ():
            if unknown := [name for name in group["names"] if not isinstance(self.optimizer["steps"][name], int)]:
                raise ValueError(f"how often {unknown[0]} was updated is no number")
            group["settings"].items()
        self.facts.items()
        self.crc32 = crc32
        return self


def crc32_of(found):
    """Of what an index says, however its text is laid out."""
    return zlib.crc32(json.dumps([found[name] for name in PARTS], default=number).encode())


def number(value):
    """What JSON writes of what it doesn't know: NumPy's numbers. TypeError for the rest."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"JSON can't hold a {type(value).__name__}")


def covers(boxes, shape):
    """Whether the boxes, which count axes or else elements, hold each element of an array of this shape once."""
    full = [prod(shape)] if any(len(box) != len(shape) for box in boxes) else shape
    if not all(len(box) == len(full) and all(0 <= start <= stop <= extent for (start, stop), extent
                                             in zip(box, full, strict=True)) for box in boxes):
        return False
    boxes = [box for box in boxes if size(box)] if prod(shape) else boxes[:1]
    if sum(size(box) for box in boxes) != prod(shape) or not boxes:
        return False
    sides = np.array(boxes).reshape(len(boxes), len(full), 2)
    common = np.maximum(sides[:, None, :, 0], sides[:, :, 0]) < np.minimum(sides[:, None, :, 1], sides[:, :, 1])
    return len(boxes) == 1 or common.all(-1).sum() == len(boxes)      # each with itself alone


def key(name, box):
    """What a piece is called in its file: the array's name; where it begins later than that, the box as well."""
    return name if all(start == 0 for start, _ in box) else f"{name}[{','.join(f'{a}:{b}' for a, b in box)}]"


def size(box):
    """How many elements it has."""
    return prod(stop - start for start, stop in box)
