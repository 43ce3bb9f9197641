"""Tensor parallelism, which cuts matrices, and sequence parallelism, which cuts what lies between them.

Read tensor_parallel.py first, then sequence_parallel.py; collective_matmul.py hides its messages behind products.
"""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "tensor_parallel": ["ColumnParallelLinear", "RowParallelLinear", "full_state_dict", "load_full_state_dict",
                        "parallelize_module", "parts_of", "plan_of"],
    "vocabulary": ["vocab_parallel_cross_entropy"],
})
