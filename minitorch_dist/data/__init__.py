"""Data: MNIST where it can be had, real handwriting that ships where it can't, tokens on disk, mixtures of sources, and
each rank's share of a batch."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..torch_names import of_module
from . import digits, idx, mnist
from .idx import IdxError
from .loader import Arrays, Batch, Loader, Shard
from .mixture import Mixture
from .mnist import DataNotFound
from .permutation import Permutation
from .reading_ahead import ahead
from .sampler import Sampler
from .tokens import StoredTokens, TokenWriter

__all__ = ["Arrays", "Batch", "DataNotFound", "Dataset", "IdxError", "Loader", "Mixture", "Permutation", "Sampler",
           "Shard", "StoredTokens", "TokenWriter", "ahead", "idx", "load"]

__getattr__ = of_module(__name__)

NAMES = ("auto", "mnist", "digits")
HOW_TO_GET_MNIST = ("To get MNIST: put its four files into a folder and pass --data-dir FOLDER or set "
                    "MINITORCH_DATA=FOLDER, or run again with a network.")


@dataclass(frozen=True)
class Dataset:
    """Images of handwritten digits, ready to train on.

    train_images, test_images   float32 (n, 784), C-contiguous, normalised (mnist.MEAN or digits.MEAN say how)
    train_labels, test_labels   int64 (n,), 0 to 9
    source                      a sentence for people: what it is and where it came from
    default_epochs, default_batch_size   what trains it well; the batch size is global
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str
    default_epochs: int
    default_batch_size: int


class Choice(NamedTuple):
    """What rank 0 decided, for all ranks: a data set and, for MNIST, its folder; or an error for all to raise."""

    name: str = ""
    folder: str = ""
    error: str = ""


def load(name="auto", data_dir=None, rank=0, broadcast=lambda obj: obj, say=print):
    """The data set `name` as a Dataset, the same on every rank. Collective.

    "mnist"   from `data_dir`, else the folder in the environment variable MINITORCH_DATA, else the cache, else a
              download. A folder that is named is the only place looked at; its files are checked for what they hold,
              not for their checksum, since they are the user's.
    "auto"    the same, but where no folder is named and nothing can be downloaded, the digits that ship.
    "digits"  the digits that ship.

    Rank 0 alone decides and downloads, and `broadcast(obj)`, which must hand its object to all ranks, tells the others;
    then each rank reads the files itself. `say` prints a line for people, on rank 0 only.
    Raises DataNotFound on every rank, saying what to do; IdxError for unsound files; ValueError for another name.
    """
    if name not in NAMES:
        folder = f" A folder of MNIST's files is load('mnist', data_dir={str(name)!r})." * (
            isinstance(name, os.PathLike) or isinstance(name, str) and os.path.isdir(name))
        raise ValueError(f"There is no data set {name!r}; there are {', '.join(map(repr, NAMES))}.{folder}")
    if name == "digits" and data_dir:
        raise ValueError(f"The digits ship with the package, but data_dir={str(data_dir)!r} names a folder. "
                         f"Leave it out, or ask for 'mnist'.")
    choice = broadcast(_choose(name, data_dir, say) if rank == 0 else None)
    if choice.error:
        raise DataNotFound(choice.error)
    return _read_mnist(Path(choice.folder), rank) if choice.name == "mnist" else _read_digits()


def _choose(name, data_dir, say):
    if name == "digits":
        return Choice("digits")
    named = data_dir or os.environ.get("MINITORCH_DATA")
    try:
        return Choice("mnist", str(_complete(named) if named else mnist.fetch(say)))
    except OSError as error:        # DataNotFound is one; a folder may also be one that can't be read
        if named:
            by = "data_dir" if data_dir else "the environment variable MINITORCH_DATA"
            return Choice(error=f"{error}\nThe folder was named by {by}, so no other place was tried.")
        if name == "mnist":
            return Choice(error=f"{error}\n{HOW_TO_GET_MNIST}")
        say(f"{error}\nTraining on the data set that ships instead: {digits.ABOUT}.\n{HOW_TO_GET_MNIST}")
        return Choice("digits")


def _complete(folder):
    """The folder as an absolute path, which means the same to ranks that started elsewhere."""
    try:
        folder = Path(folder).expanduser().absolute()
    except RuntimeError as error:       # ~somebody who isn't there
        raise DataNotFound(f"No MNIST in {folder}: {error}") from None
    mnist.find(folder)
    return folder


def _read_mnist(folder, rank):
    try:
        arrays = mnist.arrays(folder)
    except DataNotFound as error:
        raise DataNotFound(f"Rank {rank} on {socket.gethostname()} doesn't see the files that rank 0 found: {error}\n"
                           f"Every rank reads them itself: use a folder that all machines share.") from error
    source = f"MNIST, {len(arrays[1]):,} training and {len(arrays[3]):,} test images, from {folder}"
    return Dataset("mnist", *arrays, source, default_epochs=3, default_batch_size=128)


def _read_digits():
    return Dataset("digits", *digits.arrays(), digits.ABOUT, default_epochs=20, default_batch_size=64)
