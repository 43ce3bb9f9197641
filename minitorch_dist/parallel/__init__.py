"""Parallel training, built from comm and autodiff alone."""

from .data_parallel import DistributedDataParallel
from .exact import BinaryCounter

__all__ = ["BinaryCounter", "DistributedDataParallel"]
