"""Python objects between ranks: pickled, they travel as bytes over the calls for arrays."""

import pickle

import numpy as np

from . import check
from .mpi import INTERNAL_TAG


class Objects:
    """The calls of a Communicator that take any object that can be pickled."""

    def broadcast_object(self, obj, src=0):
        """Rank src's object, on all ranks; what the others pass is ignored."""
        check.rank("broadcast_object", "src", src, self.size)
        data = _pickled(obj) if self.rank == src else None
        length = np.array([0 if data is None else data.size])
        self.broadcast(length, src)
        if data is None:
            data = np.empty(length[0], np.uint8)
        self.broadcast(data, src)
        return obj if self.rank == src else pickle.loads(data)

    def gather_object(self, obj, dst=0):
        """The list of all ranks' objects, in rank order, on rank dst; None on the others."""
        check.rank("gather_object", "dst", dst, self.size)
        data = _pickled(obj)
        lengths = self._all_lengths(data)
        if self.rank != dst:
            self._send("send", data, dst, INTERNAL_TAG)
            return None
        objects = []
        for rank, length in enumerate(lengths):
            theirs = data if rank == dst else np.empty(length, np.uint8)
            if rank != dst:
                self._recv("recv", theirs, rank, INTERNAL_TAG)
            objects.append(pickle.loads(theirs))
        return objects

    def all_gather_object(self, obj):
        """The list of all ranks' objects, in rank order, on all ranks."""
        data = _pickled(obj)
        lengths = self._all_lengths(data)
        padded = np.zeros(max(lengths), np.uint8)
        padded[:data.size] = data
        everything = np.empty((self.size, padded.size), np.uint8)
        self.all_gather(everything, padded)
        return [pickle.loads(row[:length]) for row, length in zip(everything, lengths, strict=True)]

    def _all_lengths(self, data):
        lengths = np.empty(self.size, np.int64)
        self.all_gather(lengths, np.array([data.size], np.int64))
        return [int(length) for length in lengths]

    def scatter_object(self, objects, src=0):
        """This rank's one of the `size` objects that rank src passes; what the others pass is ignored."""
        check.rank("scatter_object", "src", src, self.size)
        if self.rank == src and len(objects) != self.size:
            raise ValueError(f"scatter_object: {len(objects)} objects for {self.size} ranks; pass one for each")
        data = [_pickled(obj) for obj in objects] if self.rank == src else []
        length = np.empty(1, np.int64)
        self.scatter(length, np.array([each.size for each in data]) if data else None, src)
        if self.rank != src:
            mine = np.empty(length[0], np.uint8)
            self._recv("recv", mine, src, INTERNAL_TAG)
            return pickle.loads(mine)
        for rank, each in enumerate(data):
            if rank != src:
                self._send("send", each, rank, INTERNAL_TAG)
        return objects[src]


def _pickled(obj):
    return np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8)
