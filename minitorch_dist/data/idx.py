"""The IDX file format, in which MNIST is published.

    byte 0-1   zero
    byte 2     code of the element type: 0x08 uint8 … 0x0E float64
    byte 3     number of dimensions, d
    then       d sizes, 4 bytes each, most significant byte first
    then       the elements in C order, most significant byte first

Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section on file formats.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

GZIP_START = b"\x1f\x8b"
DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
FETCH_AGAIN = "Delete the file and fetch it again."


class IdxError(ValueError):
    """A file is no sound IDX file, or holds something other than what it should."""


def read(path):
    """The array in the IDX file `path`, gzipped or plain, in the machine's byte order.

    Whether the file is gzipped is told from its first two bytes: browsers unpack downloads and keep the name.
    Raises IdxError (wrong magic number, unknown element type, impossible sizes, damaged gzip, too few or too many
    bytes) and OSError (no such file, not readable).
    """
    content = _unpacked(path)
    dtype, shape, start = _header(path, content)
    expected, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if found != expected:
        trouble = "is cut short" if found < expected else "has bytes after its end"
        raise IdxError(f"{path} {trouble}: its header announces {_times(shape)} {dtype.name} elements "
                       f"= {expected:,} bytes, and {found:,} bytes follow. {FETCH_AGAIN}")
    try:
        return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
    except ValueError as error:     # too many axes, or too long ones beside one of 0
        raise IdxError(f"{path} has a damaged header: no array has the sizes {_times(shape)} ({error}). "
                       f"{FETCH_AGAIN}") from error


def _unpacked(path):
    content = Path(path).read_bytes()
    if not content.startswith(GZIP_START):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise IdxError(f"{path} is a damaged or cut-short gzip file of {len(content):,} bytes ({error}). "
                       f"{FETCH_AGAIN}") from error


def _header(path, content):
    """(dtype, shape, offset of the first element)."""
    if len(content) < 4 or content[:2] != b"\0\0":
        raise IdxError(f"{path} is no IDX file: expected a magic number that starts with two zero bytes, found "
                       f"{content[:4]!r}. A web page saved under this name looks like this too. {FETCH_AGAIN}")
    code, dimensions = content[2], content[3]
    if code not in DTYPES:
        known = ", ".join(f"0x{known:02x} {np.dtype(name).name}" for known, name in DTYPES.items())
        raise IdxError(f"{path} has the element type code 0x{code:02x}; IDX knows {known}. {FETCH_AGAIN}")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise IdxError(f"{path} is cut short: a header of {dimensions} dimensions takes {start} bytes, "
                       f"the file has {len(content)}. {FETCH_AGAIN}")
    return np.dtype(DTYPES[code]), struct.unpack_from(f">{dimensions}I", content, 4), start


def _times(shape):
    return "×".join(map(str, shape)) or "1"
