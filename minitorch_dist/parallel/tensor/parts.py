"""Which part of a parameter a rank has, of one that tensor parallelism has cut: what a leaf knows of it.

Who wants the whole of it (optim/matrices.py, compress/low_precision.py) asks here which rank has which rows, or
columns.
"""

import weakref

import numpy as np

_cut = weakref.WeakKeyDictionary()      # {Communicator: how many parameters have been cut over it}


class Part:
    """Which part of a parameter a rank has. number: of those that were cut over comm; the others as in _Part.parts."""

    def __init__(self, comm, axis, indices, extent):
        self.comm, self.axis, self.indices, self.extent, self.everyones = comm, axis, indices, extent, None
        self.number = _cut[comm] = _cut.get(comm, 0) + 1

    def of_ranks(self):
        """indices_of_ranks. Collective, when it is first asked."""
        if self.everyones is None:
            self.everyones = indices_of_ranks(self.comm, self.indices, self.extent, self.number)
        return self.everyones


def indices_of_ranks(comm, indices, extent, number=None):
    """[the indices that each rank has], of `extent` along an axis. Collective: ValueError on all ranks where they mean
    another number, of a parameter, or don't have each index once."""
    found = comm.all_gather_object((number, extent, indices))
    if other := {pair[:2] for pair in found} - {found[0][:2]}:
        raise ValueError(f"the ranks of {comm.name!r} have parts of different parameters: rank 0's is number "
                         f"{found[0][0]} that was cut over them, of {found[0][1]} rows or columns, others' is "
                         f"{sorted(other)[0]}: cut the same model, in the same order, on all of them")
    times = np.bincount(np.concatenate([each for *_, each in found]), minlength=extent)
    if (times != 1).any():
        first = int(np.flatnonzero(times != 1)[0])
        raise ValueError(f"the ranks of {comm.name!r} have parts of {extent} rows or columns, but number {first} is on "
                         f"{times[first]} of them: each must be on one")
    return [each for *_, each in found]


def check_products(caller, layers):
    """ValueError where another product is to stand in ops.linear's place in layers, {path: layer}, that make theirs in
    parts."""
    if cut := [path for path, layer in layers.items() if getattr(layer, "tp_comm_overlap", False)]:
        raise ValueError(f"{caller}: {', '.join(cut[:4])}: products that hide messages (tp_comm_overlap) are those of "
                         "ops.linear, and no others can be had: cut the model without tp_comm_overlap")
