"""Tokens on disk, for texts that don't fit into memory: written once, read row by row.

    with TokenWriter("web") as writer:                      # web/00000.npy, web/00001.npy, …
        for text in texts:
            writer.add(vocabulary.encode(text), end=vocabulary.end)
    stored = StoredTokens(["web"], length=1024, vocabulary=len(vocabulary))
    loader = Loader(stored, None, batch_size=512, shuffle="computed", rank=…, size=…)

A file is NumPy's own format, one axis of whole numbers, so that any tokenizer's numbers can be kept so, by np.save, and
looked at, by np.load. A row is `length` tokens and the one behind them:

    a file      The cat sat.|A dog ran off.|The e        | is the end of a document
    rows of 8   The cat |
                        sat.|A d|                        its first token was the target of the row before
                                og ran o|                rest: what doesn't fill a row

Nothing is read but what is asked for: of a global batch each rank reads its own rows, and an epoch that is entered in
its middle costs no more than one from its beginning.
"""

import os
import zlib
from pathlib import Path
from tokenize import TokenError

import numpy as np

from ..backend import whole
from .text import IGNORED

SHARD = 2**26       # tokens per file: 134 MB in 16 bits
SAMPLED = 4096      # bytes that a fingerprint looks at in one place
STORABLE = tuple(map(np.dtype, ("uint8", "uint16", "uint32", "int32", "int64")))


class TokenWriter:
    """Writes documents into numbered files of a folder, of some `shard` tokens each; a document stands in one file.

    folder   made where there is none; a ValueError where it has such files already
    dtype    what a token is kept as: uint16 for vocabularies up to 65,536

    A file has its name when all of it is on disk; where it can't be written, an OSError says which. Where the `with`
    block raises, what isn't written yet is left out.
    """

    def __init__(self, folder, dtype=np.uint16, shard=SHARD):
        self.folder, self.dtype, self.shard = Path(folder), np.dtype(dtype), whole("shard", shard)
        if self.dtype not in STORABLE or self.shard < 1:
            raise ValueError(f"TokenWriter: dtype={self.dtype}, shard={shard}; tokens are kept as one of "
                             f"{', '.join(map(str, STORABLE))}, 1 or more to a file")
        self.folder.mkdir(parents=True, exist_ok=True)
        if found := sorted(self.folder.glob("*.npy")):
            raise ValueError(f"{self.folder} has files of tokens already, {found[0].name} the first of {len(found)}: "
                             "take another folder, or delete them")
        self.files, self.tokens = 0, 0
        self._waiting, self._count = [], 0

    def add(self, tokens, end=None):
        """A document, whole numbers (time,); `end` is put behind it. ValueError for what the dtype can't hold."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or tokens.size and tokens.dtype.kind not in "iu":
            raise ValueError(f"TokenWriter: a document of {tokens.dtype} {tokens.shape}; it is integers (time,)")
        tokens = tokens if end is None else np.append(tokens, whole("end", end))
        limits = np.iinfo(self.dtype)
        if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise ValueError(f"TokenWriter: tokens from {tokens.min()} to {tokens.max()}; {self.dtype} has room for "
                             f"{limits.min} to {limits.max}: take another dtype")
        self._waiting.append(tokens.astype(self.dtype))
        self._count += len(tokens)
        if self._count >= self.shard:
            self._write()

    def close(self):
        """Write what is left."""
        if self._count:
            self._write()

    def _write(self):
        path = self.folder / f"{self.files:05}.npy"
        partial, tokens = path.with_suffix(".partial"), np.concatenate(self._waiting)
        try:
            with open(partial, "wb") as file:
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(tokens))
                file.write(tokens)      # np.save doesn't say why it can't
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            error.filename = str(path)  # of which writing says nothing
            raise
        finally:
            partial.unlink(missing_ok=True)
        self.files, self.tokens = self.files + 1, self.tokens + self._count
        self._waiting, self._count = [], 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, place):
        if kind is None:
            self.close()


class _File:
    """A file of tokens: where they begin, what they are, and how many."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            try:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, self.dtype = read(file)
            except (ValueError, SyntaxError, TokenError) as error:      # a damaged header is read as Python
                raise ValueError(f"{path} is no .npy file ({error}). Of bare numbers, as a .bin has them, make one: "
                                 "np.save(new, np.fromfile(old, np.uint16))") from None
            self.start = file.tell()
        if len(shape) != 1 or self.dtype.newbyteorder("=") not in STORABLE:
            raise ValueError(f"{path} holds {self.dtype} {shape}; tokens are one axis of "
                             f"{', '.join(map(str, STORABLE))}")
        self.tokens = shape[0]
        wanted = self.start + self.tokens * self.dtype.itemsize
        if self.size != wanted:
            raise ValueError(f"{path} is {'cut short' if self.size < wanted else 'too long'}: {self.size:,} bytes, and "
                             f"{self.tokens:,} tokens of {self.dtype} take {wanted:,}. Write it anew")

    def bytes_at(self, file, start, count):
        """So many bytes. ValueError where the file has become shorter."""
        found = os.pread(file, count, start)
        if len(found) != count:
            raise ValueError(f"{self.path}: bytes {start:,} to {start + count:,} are gone; the file had "
                             f"{self.size:,} when it was opened. Nobody may write it while it is read")
        return found


class StoredTokens:
    """Rows of tokens that lie in files: a data set for a Loader, or a part of a Mixture.

    paths        files, or folders of which all *.npy are taken, in the order of their names
    length       tokens per row
    vocabulary   how many there are; a ValueError names the file and the place of one that is none
    end          the token at the end of documents; then inputs are packed rows (data/packing.py), in which no document
                 looks into another, and after an end there is no target (IGNORED). None: rows are bare tokens
    read_bytes   what has been read so far
    FileNotFoundError, or a ValueError that names the file, where one isn't there, is cut short or no file of tokens;
    ValueError where none has a row.
    """

    def __init__(self, paths, length, vocabulary=None, end=None):
        self.length, self.vocabulary, self.end, self.read_bytes = whole("length", length), vocabulary, end, 0
        if self.length < 1:
            raise ValueError(f"StoredTokens: length={length}; rows have 1 token or more")
        self.files = [_File(path) for path in _files(paths)]
        # Rows bounds[i] to bounds[i + 1] lie in file i.
        self.bounds = np.cumsum([0, *(max(0, file.tokens - 1) // self.length for file in self.files)])
        if not len(self):
            raise ValueError(f"{len(self.files)} files with {self.tokens:,} tokens have no row of {length} and the one "
                             "behind it: take a shorter length")

    def __len__(self):
        """Rows."""
        return int(self.bounds[-1])

    @property
    def tokens(self):
        """How many there are in the files, those that don't fill a row with them."""
        return sum(file.tokens for file in self.files)

    def read(self, indices):
        """(inputs, targets) of these rows, both int64: (n, length), inputs of documents (n, length, 2)."""
        indices = np.asarray(indices)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"there are rows 0 to {len(self) - 1}, got {indices}")
        both = np.empty((len(indices), self.length + 1), np.int64)
        places = np.searchsorted(self.bounds, indices, side="right") - 1
        for i in np.unique(places):
            self._read(self.files[i], both, np.flatnonzero(places == i), indices - self.bounds[i])
        inputs, targets = both[:, :-1], both[:, 1:]
        if self.end is None:
            return inputs.copy(), targets.copy()        # in C order, as all batches are
        ends = inputs == self.end
        documents = np.cumsum(ends, 1) - ends       # an end is of the document that it ends
        return np.stack([inputs, documents], 2), np.where(ends, IGNORED, targets)

    def _read(self, file, into, rows, numbers):
        size, count = file.dtype.itemsize, (self.length + 1) * file.dtype.itemsize
        with open(file.path, "rb", buffering=0) as opened:
            for row in rows:
                start = file.start + int(numbers[row]) * self.length * size
                into[row] = np.frombuffer(file.bytes_at(opened.fileno(), start, count), file.dtype)
        self.read_bytes += count * len(rows)
        if self.vocabulary is not None and len(bad := np.argwhere((into[rows] < 0) | (into[rows] >= self.vocabulary))):
            row, place = rows[bad[0][0]], int(bad[0][1])
            raise ValueError(f"{file.path} has token {into[row, place]} at place "
                             f"{int(numbers[row]) * self.length + place:,}, and the vocabulary has 0 to "
                             f"{self.vocabulary - 1}: was it written by another tokenizer?")

    def fingerprint(self):
        """An int that other tokens would change: of the files' lengths, types, and what stands at their beginnings,
        middles and ends. So a run knows its data again without reading it all."""
        found = 0
        for file in self.files:
            found = zlib.crc32(f"{file.dtype.str} {file.tokens}".encode(), found)
            total = file.size - file.start
            with open(file.path, "rb", buffering=0) as opened:
                for start in sorted({0, max(0, (total - SAMPLED) // 2), max(0, total - SAMPLED)}):
                    found = zlib.crc32(file.bytes_at(opened.fileno(), file.start + start,
                                                     min(SAMPLED, total - start)), found)
        return found


def _files(paths):
    """The files that these paths name."""
    paths, found = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)], []
    for path in paths:
        inside = sorted(path.glob("*.npy")) if path.is_dir() else [path]
        if not inside:
            raise FileNotFoundError(f"{path} has no *.npy: no files of tokens")
        found += inside
    if not found:
        raise ValueError("StoredTokens: no paths")
    return found
