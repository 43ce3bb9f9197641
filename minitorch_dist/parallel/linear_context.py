"""Linear attention (nn/states.py) over ranks that have a part of each sequence.

    rank 0           rank 1           rank 2           rank 3
    part 0           part 1           part 2           part 3         each by itself, with nothing before it
      S₀               S₁               S₂               S₃           what it leaves behind: one matrix of each head
      └────────────────┴──── all_gather ┴────────────────┘
      -                S₀            a₁S₀ + S₁    a₂(a₁S₀ + S₁) + S₂   what stands before it: two products more

A ring of keys and values sends what is in proportion to the length; here it is

    elements sent per rank, forward, and as many backward        (N - 1) · batch · heads · (size² + 1)

of any length, in one message, with as much work on all ranks if each has a part in one piece; in a zigzag, for the sake
of other blocks, each has two, and sends two matrices.

Sources: Sun et al. 2024, "Linear attention sequence parallelism"; Sun et al. 2025, "LASP-2" (all ranks at once).
"""

from ..autodiff import ops
from ..autodiff.ops.shape import inverse
from ..backend import xp
from ..nn.states import carried, in_order, part_of
from .collectives import all_gather
from .ring_attention import TIME, chunks, positions


def linear_attention(q, k, v, logs, comm, layout="contiguous", documents=None):
    """nn/states.py's linear_attention of this rank's positions, of sequences that comm's ranks have in such a layout.

    q, k, v, logs  as there, of this rank's positions
    documents      None, or int64 (batch, N · time), those of the whole sequences
    Collective. ValueError where a rank's chunks can't be equally long.
    """
    own, ranks = chunks(comm.rank, comm.size, layout), comm.size
    time, odd = divmod(q.shape[TIME], len(own))
    if odd:
        positions(q.shape[TIME], comm.rank, ranks, layout)      # says why not
    if documents is not None:
        documents = in_order(documents, (q.shape[0], ranks * q.shape[TIME]))
    pieces = zip(*(ops.split(x, len(own), TIME) for x in (q, k, v, logs)), strict=True)
    parts = [part_of(*piece, _numbers(documents, chunk * time, time)) for chunk, piece in zip(own, pieces, strict=True)]
    states, logs = _in_order([_row(part) for part in parts], comm, layout, parts[0].state.shape)
    ends = None if documents is None else xp.concatenate(
        [documents[:, :1], documents[:, time - 1::time]], 1)[:, None]
    before, _ = carried(states, logs, ends)
    # Before the first part it is zeros: its rank too has to take part in backward.
    return ops.concatenate([part.behind(before[:, :, chunk])[0] for chunk, part in zip(own, parts, strict=True)], TIME)


def _numbers(documents, start, time):
    """Those of so many positions and of the one before, (batch, time + 1)."""
    if documents is None:
        return None
    return xp.concatenate([documents[:, max(0, start - 1):][:, :1], documents[:, start:start + time]], 1)


def _row(part):
    """A Part's state and log as one array (1, batch, heads, size · out + 1)."""
    batch, heads, size, out = part.state.shape
    return ops.concatenate([ops.reshape(part.state, (1, batch, heads, size * out)),
                            ops.reshape(part.log, (1, batch, heads, 1))], -1)


def _in_order(rows, comm, layout, shape):
    """All ranks' parts in the order of positions: states (batch, heads, parts, size, out), logs (batch, heads,
    parts)."""
    order = [chunk for rank in range(comm.size) for chunk in chunks(rank, comm.size, layout)]
    rows = all_gather(ops.concatenate(rows, 0), comm)[list(inverse(order))]
    rows = ops.transpose(rows, (1, 2, 0, 3))
    batch, heads, size, out = shape
    return ops.reshape(rows[..., :-1], (batch, heads, len(order), size, out)), rows[..., -1]
