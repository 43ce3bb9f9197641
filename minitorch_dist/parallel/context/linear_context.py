"""Attention by states (nn/states.py, nn/delta_rule.py) over ranks that have a part of each sequence.

    rank 0           rank 1           rank 2           rank 3
    part 0           part 1           part 2           part 3         each by itself, with nothing before it
      S₀               S₁               S₂               S₃           what it leaves behind: one matrix of each head
      └────────────────┴──── all_gather ┴────────────────┘
      -                S₀            a₁S₀ + S₁    a₂(a₁S₀ + S₁) + S₂   what stands before it: two products more

A ring of keys and values sends what is in proportion to the length; here it is

    elements sent per rank, forward, and as many backward        (N - 1) · batch · heads · (size² + 1)

of any length, in one message, with as much work on all ranks if each has a part in one piece; in a zigzag, for the sake
of other blocks, each has two, and sends two matrices. By the delta rule what is left of S is not a number, but a
matrix, too:

                                                             (N - 1) · batch · heads · 2 size²

Sources: Sun et al. 2024, "Linear attention sequence parallelism"; Sun et al. 2025, "LASP-2" (all ranks at once).
"""

from math import prod

from ...autodiff import ops
from ...autodiff.ops.shape import inverse
from ...backend import xp
from ...nn.states import in_order
from ..collectives import all_gather
from .ring_attention import TIME, chunks, positions


def attention(recurrence, parts, comm, layout="contiguous", documents=None):
    """recurrence.attention of this rank's positions, of sequences that comm's ranks have in such a layout.

    recurrence  a states.Recurrence
    parts       what it takes of each position, (q, k, v, logs, …), of this rank's
    documents   None, or int64 (batch, N · time), those of the whole sequences
    Collective. ValueError where a rank's chunks can't be equally long.
    """
    own, ranks, q = chunks(comm.rank, comm.size, layout), comm.size, parts[0]
    time, odd = divmod(q.shape[TIME], len(own))
    if odd:
        positions(q.shape[TIME], comm.rank, ranks, layout)      # says why not
    if documents is not None:
        documents = in_order(documents, (q.shape[0], ranks * q.shape[TIME]))
    pieces = zip(*(ops.split(x, len(own), TIME) for x in parts), strict=True)
    parts = [recurrence.part_of(*piece, _numbers(documents, chunk * time, time))
             for chunk, piece in zip(own, pieces, strict=True)]
    states, kept = _in_order(parts, comm, layout)
    ends = None if documents is None else xp.concatenate(
        [documents[:, :1], documents[:, time - 1::time]], 1)[:, None]
    before = recurrence.before(states, kept, ends)
    # Before the first part it is zeros: its rank too has to take part in backward.
    return ops.concatenate([part.y + ops.matmul(part.reads, before[:, :, chunk])
                            for chunk, part in zip(own, parts, strict=True)], TIME)


def _numbers(documents, start, time):
    """Those of so many positions and of the one before, (batch, time + 1)."""
    if documents is None:
        return None
    return xp.concatenate([documents[:, max(0, start - 1):][:, :1], documents[:, start:start + time]], 1)


def _row(part):
    """A Part's state, and what it keeps, as one array (1, batch, heads, numbers)."""
    return ops.concatenate([ops.reshape(x, (1, *x.shape[:2], prod(x.shape[2:]))) for x in (part.state, part.kept)], -1)


def _in_order(own, comm, layout):
    """Of all ranks' Parts in the order of positions the states (batch, heads, parts, size, out), and what they keep,
    (batch, heads, parts, …)."""
    order = [chunk for rank in range(comm.size) for chunk in chunks(rank, comm.size, layout)]
    rows = all_gather(ops.concatenate([_row(part) for part in own], 0), comm)[list(inverse(order))]
    rows = ops.transpose(rows, (1, 2, 0, 3))
    (*most, size, out), kept = own[0].state.shape, own[0].kept.shape[2:]
    return (ops.reshape(rows[..., :size * out], (*most, len(order), size, out)),
            ops.reshape(rows[..., size * out:], (*most, len(order), *kept)))
