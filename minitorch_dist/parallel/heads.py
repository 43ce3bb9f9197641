"""Which part of an attention a rank has where its heads are divided (tensor_parallel.py)."""

import numpy as np

from ..data.loader import share
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear


def share_of_heads(attention, comm, **options):
    """A MultiHeadAttention's attributes, cut by heads: every rank keeps its share of the queries' and of the keys'."""
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
    if heads % comm.size or kv_heads % comm.size:
        raise ValueError(f"tensor parallel: {comm.size} ranks must divide the {heads} heads and {kv_heads} kv_heads of "
                         "MultiHeadAttention")

    def features(first, count):
        """Of this rank's share of so many heads, which begin with head `first` of queries, keys and values."""
        lo, hi = share(count, comm.rank, comm.size)
        return np.arange((first + lo) * size, (first + hi) * size)
    queries = features(0, heads)
    rows = np.concatenate([queries, features(heads, kv_heads), features(heads + kv_heads, kv_heads)])
    return {"qkv": ColumnParallelLinear(attention.qkv, comm, rows, **options),
            "out": RowParallelLinear(attention.out, comm, queries, **options),
            "heads": heads // comm.size, "kv_heads": kv_heads // comm.size}
