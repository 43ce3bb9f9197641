"""26.3 Its gradient: the weights are made again, block by block, twice.

With p = exp(score - lse) the weights, o = p v and ō the gradient by o:

    v̄ = pᵀ ō        D = Σ ō·o        s̄ = p (ō vᵀ - D) · scale        q̄ = s̄ k        k̄ = s̄ᵀ q

q̄ is a sum over keys, and k̄ and v̄ are sums over queries. A sum that belongs to one program needs no atomic addition, and
has the same bits on every run. So there are two kernels:

    queries_kernel      a block of queries walks along the keys that it sees        D, q̄
    sources_kernel      a block of keys walks along the queries that see it         k̄, v̄; it reads D
"""

import triton
import triton.language as tl


@triton.jit
def queries_kernel(q, k, v, out, lse, out_bar, q_bar, D, time, scale, step_head, step_time, SIZE: tl.constexpr,
                   QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    """What one program does: D and q_bar of QUERIES neighbouring queries of one head.

    step_head, step_time  from one head to the next, and from one position to the next, in elements, of all arrays with
                          features, which are neighbours; lse and D have a number per query, heads are `time` apart
    """
    raise NotImplementedError("begin with what these queries have: q, out_bar, lse and, of out, D, which is stored. "
                              "Then along the keys, as in 26.2, but p comes at once, of lse")


@triton.jit
def sources_kernel(q, k, v, lse, out_bar, k_bar, v_bar, D, time, scale, step_head, step_time, SIZE: tl.constexpr,
                   QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    """What one program does: k_bar and v_bar of SOURCES neighbouring keys of one head."""
    raise NotImplementedError("begin with these keys and values. By which query are they seen first? Then along the "
                              "queries to the end, and what lies behind the end must add nothing")


def attention_backward(q, k, v, out, lse, out_bar, q_bar, k_bar, v_bar, D, scale, block=(32, 32)):
    """Write the gradients by q, k and v into q_bar, k_bar and v_bar. Two launches.

    q … v_bar    float32 (heads, time, size), size a power of 2, 16 or more, all with the same strides: heads and
                 positions may be any distance apart, features are neighbours
    lse, D       float32 (heads, time), contiguous; D, a number per query that the first kernel writes for the second
    out, out_bar what forward gave (26.2, as lse), and the gradient by it
    scale        what q·k is multiplied by. A query sees the keys at its own position and before it
    block        (QUERIES, SOURCES) of the kernels: powers of 2, 16 or more
    """
    raise NotImplementedError("begin with the two grids, which count different blocks. The kernels run in the order "
                              "of their launches")
