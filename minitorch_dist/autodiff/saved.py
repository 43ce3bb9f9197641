"""What a node keeps for backward where that isn't a plain tuple: packed by hooks, or freed."""

import weakref
from typing import NamedTuple

from ..backend import byte_range, is_array, module_of, to_half
from .writes import log


class Packed:
    """A node's saved values under saved_tensors_hooks: arrays of one axis or more went through pack(), those in a tuple
    (what a fused op keeps) too. Of an array that pack() leaves where it is, and that is a cast of one that it takes
    elsewhere, the latter is kept: 16 bits of a weight that fully_shard gathers again anyway."""

    def __init__(self, saved, pack, unpack):
        self.unpack = unpack
        # (Elsewhere, it), (False, as it is), (tuple, parts) or (Recast, it)
        self.parts = self._packed_all(saved, pack, {})

    def _packed_all(self, values, pack, known):
        """known: {id of an array: what it became}; one that is kept twice is packed once."""
        parts = []
        for v in values:
            if v.__class__ is tuple and any(map(is_array, v)):
                parts.append((tuple, self._packed_all(v, pack, known)))
            elif not (is_array(v) and v.ndim):
                parts.append((False, v))
            else:
                if id(v) not in known:
                    known[id(v)] = self._packed(v, pack)
                parts.append(known[id(v)])
        return parts

    def _packed(self, array, pack):
        packed = pack(array)
        cast = Recast.of(array, pack) if packed is array else None
        return (Elsewhere, Elsewhere(packed, weakref.ref(owner_of(array)))) if cast is None else (Recast, cast)

    def open(self, node, wanted=None):
        """The saved values again. wanted: for which inputs' cotangents they are; None stands where one isn't read."""
        if wanted is None or not hasattr(node.primitive, "read"):       # a custom function looks after itself
            return self._opened(self.parts)
        return self._opened([part if read else NOTHING
                             for part, read in zip(self.parts, node.primitive.read(wanted), strict=True)])

    def elsewhere(self):
        """Of each saved value whether unpack() is called for it, which may cost something."""
        return [how is not False for how, _ in self.parts]

    def keep(self, read):
        """Forget the others."""
        self.parts = [part if r else NOTHING for part, r in zip(self.parts, read, strict=True)]

    def _opened(self, parts):
        return tuple([self._opened(v) if how is tuple else v.opened(self.unpack) if how else v for how, v in parts])


NOTHING = False, None


class Elsewhere(NamedTuple):
    """What pack() made of an array, and a weak reference to whose memory that was."""

    packed: object
    owner: object

    def opened(self, unpack):
        """The array again. In other memory than before: what was written there until now was written to something
        else."""
        array = unpack(self.packed)
        if is_array(array) and owner_of(array) is not self.owner():
            log.forget(array)
        return array


class Recast(NamedTuple):
    """A view of an array's cast, as what has been packed of the array: which bytes of the cast it looks at."""

    source: object
    dtype: object
    offset: int
    shape: tuple
    strides: tuple

    @classmethod
    def of(cls, array, pack):
        """For an array that looks into a cast, if pack() takes what that was made of elsewhere; else None."""
        owner = owner_of(array)
        low, source = (ref() for ref in _casts.get(id(owner), (_nothing, _nothing)))
        if low is not owner or source is None or not array.size:
            return None
        if not owner.flags.c_contiguous or min(array.strides) < 0:
            return None
        packed = pack(source)
        offset = byte_range(array)[0] - byte_range(owner)[0]
        return None if packed is source else cls(packed, array.dtype, offset, array.shape, array.strides)

    def opened(self, unpack):
        """The view again, of the array cast anew."""
        arrays = module_of(array := unpack(self.source))
        low = to_half(arrays.ascontiguousarray(array), self.dtype)
        log.forget(low)     # what was written to its addresses before was written to something else
        first = low.reshape(-1)[self.offset // low.itemsize:]
        return arrays.lib.stride_tricks.as_strided(first, self.shape, self.strides)


def owner_of(array):
    """The array whose memory this one looks into; itself, if it is its own."""
    while is_array(array.base):
        array = array.base
    return array


_casts = {}     # id of a cast's array -> weak references to it and to the array that it was made of


def _nothing():
    """What a reference to nothing gives."""


def note_cast(low, source):
    """Under saved_tensors_hooks: the array `low` is `source` in another dtype, which can be had again."""
    key = id(low)
    _casts[key] = weakref.ref(low, lambda _: _casts.pop(key, None)), weakref.ref(source)


class Freed:
    """What takes the place of a node's saved values when backward has used them."""

    def open(self, node, wanted=None):
        raise RuntimeError(f"backward through {node.primitive.name!r} a second time, but what it needs was freed "
                           "after the first: pass retain_graph=True to the first")


FREED = Freed()
