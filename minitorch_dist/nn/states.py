"""The states of gated linear attention: position by position, stretch by stretch, part by part.

    S_t = a_t S_{t-1} + k_t v_tᵀ
    y_t = S_tᵀ q_t

is T small products in a row. So a sequence is cut into stretches of positions, and what reaches from s to t is a table,
D_ts = a_{s+1} · … · a_t:

    within a stretch      Y = (Q Kᵀ ∘ D) V
    from those before     Y + (Q ∘ D_{·,before}) S
    to those behind       S' = D_{end,before} S + (K ∘ D_{end,·})ᵀ V

Stretches are to each other what positions are, and so are the parts of a sequence that ranks have
(parallel/context/linear_context.py): `left` makes the table of each, `carried` is for the latter two. Another rule by
which states go on is in delta_rule.py: a Recurrence is what layers, caches and ranks know of a rule. Source: Dao & Gu
2024, "Transformers are SSMs", 6.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from ..autodiff import ops
from ..autodiff.ops.attention import numbered
from ..autodiff.primitive import lower
from ..backend import xp

SHORTEST = 16       # positions of a stretch at least


def stretches(time, size):
    """(how many stretches, of how many positions each) so many positions are cut into; the last one may want some.

    About as many positions as a key has features: then both of what a stretch takes, products of its positions with
    each other and with states, cost the same.
    """
    count = max(1, -(-time // max(size, SHORTEST)))
    return count, max(1, -(-time // count))


def in_stretches(x, count, length):
    """(batch, heads, time, …) -> (batch, heads, count, length, …); what the last one wants is 0, which keeps all, and
    adds nothing."""
    missing = count * length - x.shape[2]
    x = ops.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (len(x.shape) - 3)]) if missing else x
    return ops.reshape(x, (*x.shape[:2], count, length, *x.shape[3:]))


def numbers_in_stretches(documents, count, length):
    """Numbers (batch, time + 1), of the position before and of these, as (batch, 1, count, length + 1), of the one
    before each stretch and of its own; None: None."""
    if documents is None:
        return None
    index = xp.arange(count, like=documents)[:, None] * length + xp.arange(length + 1, like=documents)
    return documents[:, xp.minimum(index, documents.shape[1] - 1)][:, None]


def left(logs, documents=None):
    """What is left behind each of n steps of what stood at each of n + 1 points, the first of them before all steps:
    (…, n) -> (…, n, n + 1), exp of the sum of the logs of the steps between, 0 of what comes later.

    Sums of stretches, each added up from its own start: differences of sums from the beginning would have lost their
    digits where much is forgotten. documents: numbers (…, n + 1) of the points; nothing is left of another document.
    """
    n = logs.shape[-1]
    points = xp.arange(n + 1, like=lower(logs))
    earlier = points[1:, None] > points
    sums = ops.cumsum(ops.where(earlier, ops.expand_dims(logs, -1), 0.0), -2)
    there = points[1:, None] >= points
    if documents is not None:
        there = there & (documents[..., 1:, None] == documents[..., None, :])
    return ops.exp(ops.where(there, sums, -inf))


def carried(states, logs, documents=None):
    """States of n stretches in a row, put together.

    states     (batch, heads, n, size, out): what each leaves behind by itself
    logs       (batch, heads, n): the log of what each leaves of what came before
    documents  None, or (batch, 1, n + 1): the numbers of those at the beginning, and at each stretch's end
    Returns what stands before each of them and behind the last, with nothing before the first, (batch, heads, n + 1,
    size, out), and what is left there of what does stand before the first, (batch, heads, n + 1).
    """
    table = left(logs, documents)
    rows = ops.reshape(states, (*states.shape[:3], states.shape[3] * states.shape[4]))
    found = ops.reshape(ops.matmul(table[..., 1:], rows), states.shape)
    first = [(0, 0), (0, 0), (1, 0)]
    return ops.pad(found, [*first, (0, 0), (0, 0)]), ops.pad(table[..., 0], first, constant_values=1)


class Part(NamedTuple):
    """What a part of a sequence is by itself.

    y      (batch, heads, time, out): what its queries find in it
    reads  (batch, heads, time, size): its queries, for what stands before it, S: then y + reads @ S is all they find
    state  (batch, heads, size, out): what it leaves behind
    kept   (batch, heads): the log of what it leaves of S, where no document ends in it; (batch, heads, size, size) of
           the delta rule: the matrix that S is multiplied by
    """

    y: object
    reads: object
    state: object
    kept: object


class Recurrence(NamedTuple):
    """How states go on; `given` are q, k, v, logs, and what else the rule takes of each position and head.

    attention  (*given, documents=None) -> y, of whole sequences
    read_on    (*given, state=None) -> (y, the state behind them), with such a state before them
    part_of    (*given, documents=None) -> Part, with nothing before it; documents: numbers (batch, time + 1)
    before     (states, kept, documents=None) -> what stands before each of n Parts in a row, (batch, heads, n or more,
               size, out): of their states (batch, heads, n, size, out), and of what they keep, (batch, heads, n, …);
               documents as `carried` has them
    """

    attention: Callable
    read_on: Callable
    part_of: Callable
    before: Callable


def part_of(q, k, v, logs, documents=None, ends=True):
    """The Part of queries and keys (batch, heads, time, size), values (batch, heads, time, out) and logs (batch, heads,
    time) of what is kept. documents: numbers (batch, time + 1), of the position before, and of these. ends: whether
    more is wanted than y."""
    batch, heads, time, size = q.shape
    count, length = stretches(time, size)

    q, k, v, logs = (in_stretches(x, count, length) for x in (q, k, v, logs))
    documents = numbers_in_stretches(documents, count, length)
    table = left(logs, documents)
    y = ops.matmul(ops.matmul(q, ops.swapaxes(k, -1, -2)) * table[..., 1:], v)
    state = reads = None
    if count > 1 or ends:
        reads = q * table[..., :1]
        states = ops.matmul(ops.swapaxes(k * ops.expand_dims(table[..., -1, 1:], -1), -1, -2), v)
        logs, state = ops.sum(logs, -1), states[:, :, -1]
    if count > 1:
        last = None if documents is None else xp.concatenate([documents[..., 0], documents[..., -1:, -1]], -1)
        states, kept = carried(states, logs, last)
        y, state = y + ops.matmul(reads, states[:, :, :-1]), states[:, :, -1]
        reads = reads * ops.reshape(kept[..., :-1], (batch, heads, count, 1, 1))
    y, reads = (x if x is None else ops.reshape(x, (batch, heads, count * length, x.shape[-1]))[:, :, :time]
                for x in (y, reads))
    return Part(y, reads, state, ops.sum(logs, -1) if ends else None)


def in_order(documents, shape):
    """int64 of this shape, (batch, time): documents numbered as they come. (A number that comes again is another
    document: what was forgotten between the two doesn't come back.)"""
    documents = numbered(documents, shape)
    return xp.concatenate([documents[:, :1] * 0, xp.cumsum(documents[:, 1:] != documents[:, :-1], 1)], 1)


def with_before(documents, shape):
    """in_order's numbers (batch, time + 1) of whole sequences: before the first position stands its own. Of none None.
    """
    if documents is None:
        return None
    documents = in_order(documents, shape)
    return xp.concatenate([documents[:, :1], documents], 1) if documents.size else None


def linear_attention(q, k, v, logs, documents=None):
    """y (batch, heads, time, out).

    q, k       (batch, heads, time, size); nothing is scaled here
    v          (batch, heads, time, out)
    logs       (batch, heads, time), 0 or less: the log of what each position keeps of what was there before it
    documents  None, or integers (batch, time): nothing is seen of another document
    """
    return part_of(q, k, v, logs, with_before(documents, (q.shape[0], q.shape[2])), ends=False).y


def read_on(q, k, v, logs, state=None):
    """(y, the state (batch, heads, size, out) at the end), with such a state before the first position, or (None) with
    nothing."""
    part = part_of(q, k, v, logs)
    if state is None:
        return part.y, part.state
    kept = ops.reshape(ops.exp(part.kept), (*part.kept.shape, 1, 1))
    return part.y + ops.matmul(part.reads, state), part.state + kept * state


def before(states, kept, documents=None):
    """See Recurrence."""
    return carried(states, kept, documents)[0]


LINEAR_ATTENTION = Recurrence(linear_attention, read_on, part_of, before)
