"""Parameters where they come to lie: padded to 16 elements each, and to blocks of 4,096, by the library's own code."""

from math import prod
from types import SimpleNamespace

from ..flat import ALIGN, BLOCK, layout, round_up
from ..parallel.buckets import MIB, cut

FIRST, CAP = 1, 25      # DistributedDataParallel's first_bucket_mb and bucket_cap_mb


def _stand_in(shape, itemsize):
    """Of a tensor, what layouts ask for."""
    return SimpleNamespace(data=SimpleNamespace(size=prod(shape), nbytes=prod(shape) * itemsize), dtype=itemsize)


def buckets(shapes, itemsize):
    """(elements, with its counts of users; how many parameters) of each of DistributedDataParallel's buckets; shapes in
    the order in which gradients come, by which it cuts them after the first step."""
    lists = cut([_stand_in(shape, itemsize) for shape in shapes], FIRST * MIB, CAP * MIB) if shapes else []
    return [(layout(tensors, len(tensors))[1], len(tensors)) for tensors in lists]


def unit(shapes, ranks, trained=True):
    """Elements of a unit (parallel/fsdp/units.py), a multiple of ranks · 4,096; if it is frozen, of ranks · 16."""
    end = layout([_stand_in(shape, 0) for shape in shapes])[0][-1].end
    return ranks * round_up(-(-end // ranks), BLOCK if trained else ALIGN)


def stepped(shapes):
    """Elements that an optimizer runs over: the parameters, each padded to 16, without what fills the last block."""
    return sum(round_up(prod(shape), ALIGN) for shape in shapes)
