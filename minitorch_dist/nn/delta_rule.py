"""The delta rule: what stands under a key is replaced, not added to. Its states, stretch by stretch and part by part.

    S_t = a_t (I - b_t k_t k_tᵀ) S_{t-1} + b_t k_t v_tᵀ
    y_t = S_tᵀ q_t

S_{t-1}ᵀ k_t is what the state says to a key so far. With u_t = b_t (v_t - a_t S_{t-1}ᵀ k_t), what is wanted less that,

    S_t = a_t S_{t-1} + k_t u_tᵀ

is linear attention (states.py) to u in the place of v. Within a stretch, with S before it and D as there, each u takes
those before it out again, which is a system of equations, lower triangular, with ones on the diagonal:

    (I + N) U = b V - (b ∘ D_{·,before}) K S        N_ts = b_t D_ts k_tᵀ k_s for s < t, else 0
    U = U₀ - W S

U₀ and W = (I + N)⁻¹ (b ∘ D_{·,before}) K are made in all stretches at once; then two products with S for each in turn.
All of it is linear in S, too: a part of a sequence before which a rank doesn't know S yet
(parallel/context/linear_context.py) begins with [I | 0] in its place, and what comes out is what S will be multiplied
by, beside what is added.

Sources: Schlag et al. 2021, "Linear transformers are secretly fast weight programmers" (the rule); Yang et al. 2024,
"Parallelizing linear transformers with the delta rule over sequence length" (stretches: U₀ and W, after Bischof & Van
Loan's WY); Yang, Kautz, Hatamizadeh 2024, "Gated delta networks" (with a_t).
"""

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import module_of, xp
from .states import Part, Recurrence, in_stretches, left, numbers_in_stretches, stretches, with_before


def inverse(n):
    """(I + n)⁻¹ of matrices n (…, m, size, size) that are 0 on the diagonal and above it, in log2(size) steps:

        ⎡A   ⎤⁻¹   ⎡   A⁻¹         ⎤
        ⎣C  B⎦   = ⎣-B⁻¹ C A⁻¹  B⁻¹⎦      A and B side by side, as twice as many matrices of half the size

    The same is Π (I + (-n)^(2^i)), with fewer lines; but where keys are alike, powers of n have entries as large as
    binomial coefficients, 10¹⁸ for 64 positions, whose sum is 1. Here no entry is larger than the inverse's own.
    """
    size = n.shape[-1]
    if size <= 2:       # n n = 0
        points = xp.arange(size, like=lower(n))
        return ops.where(points[:, None] == points, 1.0, -n)
    if size % 2:
        return inverse(ops.pad(n, [*[(0, 0)] * (len(n.shape) - 2), (0, 1), (0, 1)]))[..., :size, :size]
    half = size // 2
    both = inverse(ops.concatenate([n[..., :half, :half], n[..., half:, half:]], -3))
    a, b = ops.split(both, 2, -3)
    corner = -ops.matmul(ops.matmul(b, n[..., half:, :half]), a)
    top = ops.pad(a, [*[(0, 0)] * (len(n.shape) - 1), (0, half)])
    return ops.concatenate([top, ops.concatenate([corner, b], -1)], -2)


def _read(q, k, v, logs, rates, documents=None, state=None, ends=True):
    """(y (batch, heads, time, out), the state (batch, heads, size, out) at the end; None unless ends), of what the
    functions below take. A state with more columns than values: these are the last ones, the others get nothing."""
    batch, heads, time, size = q.shape
    count, length = stretches(time, size)
    q, k, v, logs, rates = (in_stretches(x, count, length) for x in (q, k, v, logs, ops.expand_dims(rates, -1)))
    table = left(logs, numbers_in_stretches(documents, count, length))
    points = xp.arange(length, like=lower(logs))
    turned, written = ops.swapaxes(k, -1, -2), k * rates
    n = ops.where(points[:, None] > points, ops.matmul(written, turned) * table[..., 1:], 0.0)
    solve = inverse(n)
    u, before = ops.matmul(solve, v * rates), None
    if state is not None:
        more = state.shape[-1] - v.shape[-1]
        u = ops.pad(u, [*[(0, 0)] * 4, (more, 0)]) if more else u
        state = ops.expand_dims(state, 2)
    if state is not None or count > 1 or ends:
        w = ops.matmul(solve, written * table[..., :1])
        behind = ops.swapaxes(k * ops.expand_dims(table[..., -1, 1:], -1), -1, -2)
        u, before, state = _in_turn(u, w, behind, table[..., -1:, :1], state, ends)
    y = ops.matmul(ops.matmul(q, turned) * table[..., 1:], u)
    if before is not None:
        y = y + ops.matmul(q * table[..., :1], before)
    y = ops.reshape(y, (batch, heads, count * length, y.shape[-1]))[:, :, :time]
    return y, ops.squeeze(state, 2) if ends else None


def _in_turn(u, w, behind, kept, state, ends):
    """(U, the states (batch, heads, count, size, out) before the stretches, None if there was nothing before any; the
    state at the end, if ends), of what the module's head calls U₀ and W, of keys as they are left at each stretch's
    end, turned, and of what is left there of the state before it, (batch, heads, count, 1, 1)."""
    found, before, last = [], [], u.shape[2] - 1
    in_turn = zip(*(ops.split(x, last + 1, 2) for x in (u, w, behind, kept)), strict=True)
    for i, (new, taken, keys, each) in enumerate(in_turn):
        before.append(state)
        # (For backward a view of one stretch would keep them all.)
        found.append(new * 1.0 if state is None else new - ops.matmul(taken, state))
        if i < last or ends:
            added = ops.matmul(keys, found[-1])
            state = added if state is None else each * state + added
    if before[0] is not None:
        before = ops.concatenate(before, 2)
    else:
        before = ops.pad(ops.concatenate(before[1:], 2), [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)]) if last else None
    return ops.concatenate(found, 2), before, state


def delta_rule(q, k, v, logs, rates, documents=None):
    """y (batch, heads, time, out).

    q, k       (batch, heads, time, size); nothing is scaled here. k of unit length: where rate · |k|² is above 2 a
               state would grow
    v          (batch, heads, time, out)
    logs       (batch, heads, time), 0 or less: the log of what each position keeps of what was there before it, a
    rates      (batch, heads, time), from 0 to 1: how much of what stands under its key each position replaces, b
    documents  None, or integers (batch, time): nothing is seen of another document
    """
    return _read(q, k, v, logs, rates, with_before(documents, (q.shape[0], q.shape[2])), ends=False)[0]


def read_on(q, k, v, logs, rates, state=None):
    """(y, the state (batch, heads, size, out) at the end), with such a state before the first position, or (None) with
    nothing."""
    return _read(q, k, v, logs, rates, state=state)


def part_of(q, k, v, logs, rates, documents=None):
    """The Part of these; documents: numbers (batch, time + 1), of the position before, and of these."""
    batch, heads, _, size = q.shape
    eye = module_of(lower(q)).eye(size, size + v.shape[-1], dtype=logs.dtype)
    y, end = _read(q, k, v, logs, rates, documents, xp.broadcast_to(eye, (batch, heads, *eye.shape)))
    return Part(y[..., size:], y[..., :size], end[..., size:], end[..., :size])


def before(states, kept, documents=None):
    """See states.Recurrence. Where a document ends in a part, `kept` is 0 already."""
    states, kept = (ops.split(x, x.shape[2], 2) for x in (states, kept))
    found = [states[0]]
    for state, each in zip(states[1:-1], kept[1:-1], strict=True):
        found.append(state + ops.matmul(each, found[-1]))
    return ops.pad(ops.concatenate(found, 2), [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)])


DELTA_RULE = Recurrence(delta_rule, read_on, part_of, before)
