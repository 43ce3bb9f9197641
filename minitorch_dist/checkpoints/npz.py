"""Arrays in one file, NumPy's .npz: what a run leaves as its parameters."""

import zipfile
import zlib
from tokenize import TokenError

import numpy as np


def read_npz(path):
    """{name: array} of an .npz file. OSError where it can't be read; ValueError, naming it, where it is cut short,
    damaged or something else."""
    with open(path, "rb") as file:
        begin = file.read(2)
        if begin != b"PK":
            raise ValueError(f"{path} is no .npz file: " + (f"it begins with {begin!r}" if begin else "it is empty"))
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as found:
                return dict(found)
        except (ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error,
                SyntaxError, TokenError) as error:      # the last two: a damaged header, which NumPy reads as Python
            raise ValueError(f"{path} is damaged or cut short, or holds more than arrays: {error}") from error
