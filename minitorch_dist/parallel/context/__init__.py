"""Context parallelism: sequences cut over the ranks, by a ring of keys and values, or by all-to-alls.

Read context.py first, then ring_attention.py; linear_context.py passes on states of a fixed size instead.
"""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "context": ["context_parallel", "cut_sequence", "join_sequence"],
})
