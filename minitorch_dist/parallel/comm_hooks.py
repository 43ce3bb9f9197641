"""How a bucket's gradients are summed over the ranks: communication hooks.

    model.register_comm_hook(fp16_compress)
    model.register_comm_hook(PowerSGD(rank=2))

A hook is called as hook(comm, bucket) as soon as the bucket's gradients are complete, in the same order on all ranks.
It posts what it can and returns a function; that is called at the end of backward, again in order, and must leave the
sum over all ranks in `bucket.grads`, with the same bits on every rank.

                    bytes that a rank sends for M bytes of float32, N ranks
    all_reduce      2(N-1)/N · M
    fp16_compress    (N-1)/N · M
    PowerSGD(r)     2(N-1)/N · 4·r·(n + m) for each n × m matrix that this makes smaller
"""

import math

import numpy as np

from ..backend import device_of, module_of, to


def all_reduce(comm, bucket):
    """Sum the gradients as they are: what happens without a hook."""
    return comm.all_reduce(bucket.grads, async_op=True).wait


def fp16_compress(comm, bucket):
    """float16 on the wire, sums in float32: half the bytes.

    Each rank sends every other its part of the gradients in float16, adds up its own part in float32, and sends the
    rounded sum to all. What is beyond float16's range (65,504) becomes inf, and stays it.

    Source: after torch's fp16_compress_hook, which adds up in float16 too.
    """
    grads, size, xp = bucket.grads, comm.size, module_of(bucket.grads)
    part = -(-grads.size // size)
    sent, got = xp.zeros(part * size, np.float16), xp.empty(part * size, np.float16)
    with np.errstate(over="ignore"):    # the inf is there for everybody to see
        sent[:grads.size] = grads
    posted = comm.all_to_all(got, sent, async_op=True)

    def finish():
        posted.wait()
        with np.errstate(over="ignore"):
            total = got.reshape(size, part).sum(axis=0, dtype=np.float32).astype(np.float16)
        comm.all_gather(sent, total)
        grads[...] = sent[:grads.size]
    return finish


class PowerSGD:
    """Send each matrix of gradients as the product of two thin ones, found by one step of power iteration.

    For the n × m gradient M_w of rank w, with what was left out last time added to it:

        P = Σ_w M_w Q         all-reduced, n·r numbers; then its columns are made orthonormal
        Q = Σ_w M_wᵀ P        all-reduced, m·r numbers; also where the next step begins
        Σ_w M_w ≈ P Qᵀ        on all ranks, and  M_w - P Pᵀ M_w  is kept for the next step (error feedback)

    rank    r. Vectors, and matrices that would not become smaller, are summed as they are
    scaler  the GradScaler that scales the loss, where there is one: what is kept must follow when its factor changes

    A step whose gradient is inf or NaN on some rank leaves what is kept as it was. Source: Vogels et al. 2019,
    "PowerSGD: practical low-rank gradient compression for distributed optimization".
    """

    def __init__(self, rank=1, seed=0, scaler=None):
        if rank < 1:
            raise ValueError(f"PowerSGD: rank={rank} must be at least 1")
        self.rank, self.seed, self.scaler = rank, seed, scaler
        # By parameter: the next step's Q, what the last step left out here (divided by the scaler's factor), and how
        # many Qs were drawn.
        self.q, self.left_out, self.steps = {}, {}, {}

    def __call__(self, comm, bucket):
        xp, thin, rest, end = module_of(bucket.grads), [], [], 0
        for s in sorted(bucket.segments, key=lambda s: s.start):
            shape = _matrix(s.tensor.shape)
            if sum(shape) * self.rank < math.prod(shape):
                thin.append((s, shape))
                rest.append(slice(end, s.start))
                end = s.stop
        rest.append(slice(end, bucket.grads.size))
        factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        matrices = [self._with_left_out(bucket.grads, s, shape, factor) for s, shape in thin]
        ps = [m @ self._q(s, m) for (s, _), m in zip(thin, matrices, strict=True)]
        plain = [bucket.grads[part] for part in rest]
        posted = [*_all_reduce_together(comm, plain), *_all_reduce_together(comm, ps)]

        def finish():
            for work in posted:
                work.wait()
            for part, summed in zip(rest, plain, strict=True):
                bucket.grads[part] = summed
            for i, p in enumerate(ps):
                ps[i] = xp.linalg.qr(p)[0]
            qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
            own = [p @ q.T for p, q in zip(ps, qs, strict=True)]
            for work in _all_reduce_together(comm, qs):
                work.wait()
            used = {id(s.tensor) for s, users in zip(bucket.segments, bucket.users(), strict=True) if users > 0}
            for (s, _), m, p, q, sent in zip(thin, matrices, ps, qs, own, strict=True):
                if id(s.tensor) in used:        # otherwise nobody gets this gradient, or not all have sent theirs
                    finite, before = xp.isfinite(q).all(), self.left_out.get(id(s.tensor), 0.0)     # alike on all ranks
                    self.left_out[id(s.tensor)] = xp.where(finite, (m - sent) * (1 / factor), before).astype(m.dtype)
                    self.q[id(s.tensor)] = xp.where(finite, self._alive(s, q), self.q[id(s.tensor)])
                    bucket.grads[s.start:s.stop] = (p @ q.T).reshape(-1)
        return finish

    def _alive(self, s, q):
        """Q for the next step. A column of zeros would find nothing for ever: it is drawn anew, alike on all ranks."""
        norms = (q * q).sum(axis=0)
        fresh = self._draw(s, q, self.steps.get(id(s.tensor), 0) + 1)
        return module_of(q).where(norms > 1e-14 * norms.max() + 1e-38, q, fresh)

    def _draw(self, s, like, step):
        self.steps[id(s.tensor)] = step
        draw = np.random.default_rng([self.seed, s.start, like.shape[0], step])
        return to(draw.standard_normal((like.shape[0], self.rank)).astype(like.dtype), device_of(like))

    def _with_left_out(self, grads, s, shape, factor):
        matrix = grads[s.start:s.stop].reshape(shape)
        left_out = self.left_out.get(id(s.tensor))
        return matrix.copy() if left_out is None else matrix + left_out * factor

    def _q(self, s, m):
        if id(s.tensor) not in self.q:
            self.q[id(s.tensor)] = self._draw(s, m.T, 0)
        return self.q[id(s.tensor)]


def _matrix(shape):
    """A parameter's shape as rows × columns; (1, n) for a vector."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _all_reduce_together(comm, arrays):
    """Post one all-reduce for all the arrays, which are exchanged for views of what is summed."""
    if not arrays:
        return []
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    at = 0
    for i, a in enumerate(arrays):
        arrays[i] = flat[at:at + a.size].reshape(a.shape)
        at += a.size
    return [comm.all_reduce(flat, async_op=True)]
