"""The IDX reader against bytes written here by hand, and one damaged file per error."""

import gzip
import struct

import numpy as np
import pytest

from minitorch_dist.data import idx

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array):
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def image_stack():
    return np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7)


def saved(tmp_path, content, name="some-idx"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_element_type_gzipped_or_not(tmp_path, dtype, pack):
    array = np.array([[1, 2, 100], [7, 0, 3]]).astype(dtype)
    if dtype == "int32":
        array[0, 0] = 0x01020304   # tells the byte order
    got = idx.read(saved(tmp_path, pack(idx_bytes(array))))
    assert got.dtype == np.dtype(dtype) and got.dtype.isnative
    assert got.flags.writeable and got.flags.c_contiguous
    np.testing.assert_array_equal(got, array)


def test_a_scalar_and_an_empty_array(tmp_path):
    assert idx.read(saved(tmp_path, b"\0\0\x08\x00\x05")) == 5
    assert idx.read(saved(tmp_path, idx_bytes(np.zeros((0, 28, 28), np.uint8)))).shape == (0, 28, 28)


SOUND = idx_bytes(image_stack())
DAMAGED = {
    "wrong magic": (b"<!DOCTYPE html>", ["expected a magic number", "<!DO"]),
    "empty file": (b"", ["expected a magic number", "b''"]),
    "unknown element type": (b"\0\0\x0a" + SOUND[3:], ["0x0a", "0x08 uint8"]),
    "cut in the header": (SOUND[:9], ["16 bytes", "has 9"]),
    "cut in the elements": (SOUND[:-1], ["cut short", "3×5×7", "105 bytes", "104 bytes follow"]),
    "bytes after the end": (SOUND + b"\0", ["bytes after its end", "105 bytes", "106 bytes follow"]),
    "sizes beyond memory": (b"\0\0\x08\x03" + b"\xff" * 12, ["cut short", "0 bytes follow"]),
    "sizes that multiply to 0": (b"\0\0\x08\x03" + b"\0" * 4 + b"\xff" * 8, ["damaged header", "0×4294967295"]),
    "more axes than arrays have": (b"\0\0\x08\x64" + b"\0\0\0\1" * 100 + b"5", ["damaged header", "1×1×1"]),
    "gzip cut short": (gzip.compress(SOUND)[:-9], ["cut-short gzip"]),
    "gzip with a flipped bit": (gzip.compress(SOUND)[:-5] + b"\x55" + gzip.compress(SOUND)[-4:], ["damaged", "gzip"]),
    "gzip with a broken block": (gzip.compress(SOUND)[:10] + b"\xff" * 30, ["damaged", "gzip"]),
    "gzip of nothing": (idx.GZIP_START, ["gzip"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_with_what_was_found_and_what_to_do(tmp_path, case):
    content, words = DAMAGED[case]
    path = saved(tmp_path, content)
    with pytest.raises(idx.IdxError) as caught:
        idx.read(path)
    for word in [str(path), *words, "Delete the file and fetch it again"]:
        assert word in str(caught.value)


def test_an_idx_error_is_a_value_error_and_a_missing_file_is_not(tmp_path):
    assert issubclass(idx.IdxError, ValueError)
    with pytest.raises(FileNotFoundError):
        idx.read(tmp_path / "none")
