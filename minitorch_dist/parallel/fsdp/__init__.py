"""ZeRO and FSDP: parameters, gradients and the optimizer's state cut over the ranks, and what of it travels.

Read zero.py first, which is all of it on paper, then fully_sharded.py, units.py and gathering.py.
"""

from .fully_sharded import FullySharded, fully_shard
from .mixed_precision import MixedPrecisionPolicy
from .units import ShardedParameterError

__all__ = ["FullySharded", "MixedPrecisionPolicy", "ShardedParameterError", "fully_shard"]
