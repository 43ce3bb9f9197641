"""Parallel training, built from comm and autodiff alone."""

from ..torch_names import of_module
from .data_parallel import DistributedDataParallel
from .exact import BinaryCounter
from .fsdp.fully_sharded import FullySharded, fully_shard
from .fsdp.mixed_precision import MixedPrecisionPolicy
from .fsdp.units import ShardedParameterError
from .full_state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict

__getattr__ = of_module(__name__)
__all__ = ["BinaryCounter", "DistributedDataParallel", "FullySharded", "MixedPrecisionPolicy", "ShardedParameterError",
           "full_optimizer_state_dict", "full_state_dict", "fully_shard", "load_full_optimizer_state_dict"]
