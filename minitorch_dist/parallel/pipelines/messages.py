"""What a pipeline's stages send each other: outputs forward, gradients of inputs backward, of a micro-batch each."""

import numpy as np

from ...backend import as_dtype, dtype_code, module_of, to
from .schedule_steps import BACKWARD, FORWARD

SPEC_BYTES = 128


class Messages:
    """Of one rank.

    comm           the Communicator along the pipeline
    places         {stage: (its rank, its place among that rank's chunks)}
    pieces         of a batch: its micro-batches, or their slices
    device         where this rank's stages are
    slices         of each micro-batch
    tags           how many tags they take, from 0 on

    Before a stage's first message of a kind of batch goes another one, of what its input looks like, in each slice.
    """

    def __init__(self, comm, places, pieces, device, slices=1):
        self.comm, self.places, self.pieces, self.device, self.slices = comm, places, pieces, device, slices
        self.tags = (2 * pieces + slices) * len(places)
        self.specs, self.told = {}, set()   # (chunk, slice): (dtype, shape of a sample); (stages, slices) that know it
        self.kind = None        # of the batches for which they have been told
        self.sends, self.here = [], {}

    def begin(self, kind):
        """A batch of this kind: of another than the last one's, stages are told anew what their inputs look like."""
        if kind != self.kind:
            self.specs, self.told, self.kind = {}, set(), kind
        self.sends, self.here = [], {}

    def finish(self):
        """All that was sent has arrived."""
        for work in self.sends:
            work.wait()
        self.sends = []

    def _tag(self, kind, stage, k):
        """Of what is for a stage: each message of a batch to a rank has its own."""
        return (self.places[stage][1] * 2 + (kind == BACKWARD)) * self.pieces + k

    def _tag_of_spec(self, stage, k):
        """It goes with whichever micro-batch comes first."""
        return 2 * len(self.places) * self.pieces + self.places[stage][1] * self.slices + k % self.slices

    def send(self, kind, stage, k, array):
        """Post an array to a stage; one of this rank's own finds it here."""
        array, (dst, _) = module_of(array).ascontiguousarray(array), self.places[stage]
        if dst == self.comm.rank:
            self.here[kind, stage, k] = array
            return
        self.sends = [work for work in self.sends if not work.is_completed()]
        if kind == FORWARD and (stage, k % self.slices) not in self.told:
            self.told.add((stage, k % self.slices))
            text = f"{dtype_code(array.dtype)} {' '.join(map(str, array.shape[1:]))}".encode()
            spec = np.frombuffer(text.ljust(SPEC_BYTES), np.uint8).copy()
            self.sends.append(self.comm.isend(spec, dst, self._tag_of_spec(stage, k)))
        self.sends.append(self.comm.isend(array, dst, self._tag(kind, stage, k)))

    def receive(self, kind, stage, k, samples, like=None):
        """What the neighbour has for this stage: so many samples, or an array like this one."""
        src, _ = self.places[stage + (1 if kind == BACKWARD else -1)]
        if src == self.comm.rank:
            return self.here.pop((kind, stage, k))
        if like is None:
            place = self.places[stage][1], k % self.slices
            if place not in self.specs:
                spec = np.empty(SPEC_BYTES, np.uint8)
                self.comm.recv(spec, src, self._tag_of_spec(stage, k))
                dtype, *shape = spec.tobytes().decode().split()
                self.specs[place] = as_dtype(dtype), tuple(map(int, shape))
            dtype, shape = self.specs[place]
            array = to(np.empty((samples, *shape), dtype), self.device)
        else:
            array = module_of(like).empty(like.shape, like.dtype)
        self.comm.recv(array, src, self._tag(kind, stage, k))
        return array
