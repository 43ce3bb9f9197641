"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 28×28, uint8.

Source: LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition".
"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from . import download, idx

SHA256 = {   # of the four files as LeCun published them, gzipped
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MEAN, STD = 0.1307, 0.3081   # of all training pixels, scaled to 0..1
SIDE, CLASSES = 28, 10


class DataNotFound(FileNotFoundError):
    """The data set that was asked for is not here and could not be fetched; the message says what to do."""


# ---------------------------------------------------------------- where the files are

def spellings(name):
    """The names under which the file `name` is met: gzipped or unpacked, and with a dot as some unpackers write it."""
    plain = name.removesuffix(".gz")
    dotted = plain.replace("-idx", ".idx")
    return [plain + ".gz", plain, dotted + ".gz", dotted]


def find(folder):
    """The paths of the four files in `folder`, in the order of SHA256. Raises DataNotFound, naming what was sought.

    Nothing is compared with SHA256: a user's own files are as good as what is in them, and `arrays` checks that.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "there is no such folder"
        raise DataNotFound(f"No MNIST in {folder}: {what}. Give one that holds {', '.join(SHA256)}, "
                           f"gzipped or not.")
    found = [next((folder / s for s in spellings(name) if (folder / s).is_file()), None) for name in SHA256]
    missing = [" or ".join(spellings(name)) for name, path in zip(SHA256, found, strict=True) if path is None]
    if missing:
        raise DataNotFound(f"No complete MNIST in {folder}: {len(missing)} of its 4 files missing.\nLooked for\n    "
                           + "\n    ".join(missing) + "\nPut them there, or name another folder.")
    return found


def cache_folder():
    """Where downloads are kept: minitorch_dist/mnist in XDG_CACHE_HOME, else in the system's own cache folder."""
    home = Path.home()
    usual = {"darwin": home / "Library" / "Caches",
             "win32": Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")}
    caches = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, home / ".cache")
    return Path(caches).absolute() / "minitorch_dist" / "mnist"


def fetch(say=print):
    """The cache folder with the four files in it, downloaded where they are missing or damaged. For one rank alone.

    Raises DataNotFound with the reason.
    """
    folder = cache_folder()
    wanted = {name: sha256 for name, sha256 in SHA256.items() if _sha256(folder / name) != sha256}
    if wanted:
        try:
            download.fetch(wanted, folder, say=say)
        except download.DownloadError as error:
            raise DataNotFound(f"MNIST is neither in {folder} nor to be had from the network: {error}") from error
    return folder


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# ---------------------------------------------------------------- what is in them

def arrays(folder):
    """(train_images, train_labels, test_images, test_labels) from the files in `folder`.

    Images are float32 (n, 784), (pixel/255 − 0.1307) / 0.3081; labels are int64 (n,), 0 to 9.
    Raises DataNotFound (files missing) and idx.IdxError (files unsound).
    """
    train_images, train_labels, test_images, test_labels = find(folder)
    return *_pair(train_images, train_labels), *_pair(test_images, test_labels)


def _pair(image_path, label_path):
    images, labels = idx.read(image_path), idx.read(label_path)
    _check_images(image_path, images)
    _check_labels(label_path, labels)
    if len(images) != len(labels):
        raise idx.IdxError(f"{image_path} has {len(images):,} images, but {label_path} has {len(labels):,} labels: "
                           f"the two don't belong together. Fetch both from one source.")
    return normalise(images), labels.astype(np.int64)


def normalise(images):
    """uint8 (n, 28, 28) -> float32 (n, 784), (pixel/255 − 0.1307) / 0.3081."""
    result = images.reshape(len(images), -1).astype(np.float32)
    result /= 255   # in place: MNIST is 188 MB in float32, and every rank holds it
    result -= MEAN
    result /= STD
    return result


def _check_images(path, images):
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise idx.IdxError(f"{path} holds {images.dtype.name} of shape {images.shape}; expected uint8 images of shape "
                           f"(n, {SIDE}, {SIDE}). Is another file saved under this name?")
    if len(images) == 0:
        raise idx.IdxError(f"{path} holds no image at all. {idx.FETCH_AGAIN}")


def _check_labels(path, labels):
    if labels.dtype != np.uint8 or labels.ndim != 1:
        raise idx.IdxError(f"{path} holds {labels.dtype.name} of shape {labels.shape}; expected uint8 labels of shape "
                           f"(n,). Is another file saved under this name?")
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise idx.IdxError(f"{path} has {len(wrong):,} labels outside 0..{CLASSES - 1}, the first at index {wrong[0]}: "
                           f"{labels[wrong[0]]}. {idx.FETCH_AGAIN}")
