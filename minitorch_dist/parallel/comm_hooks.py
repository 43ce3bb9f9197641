"""How a bucket's gradients are summed over the ranks: communication hooks.

    model.register_comm_hook(fp16_compress)
    model.register_comm_hook(PowerSGD(rank=2))

A hook is called as hook(comm, bucket) as soon as the bucket's gradients are complete, in the same order on all ranks.
It posts what it can and returns a function; that is called at the end of backward, again in order, and must leave the
sum over all ranks in `bucket.grads`, with the same bits on every rank.

                    bytes that a rank sends for M bytes of float32, N ranks
    all_reduce      2(N-1)/N · M
    fp16_compress   2(N-1)/N · M/2
    PowerSGD(r)     2(N-1)/N · 4·r·(n + m) for each n × m matrix that this makes smaller
    OneBit          (N-1) · (M/32 + 4 for each parameter)
    TopK(share)     (N-1) · 2·share·M

(optim.Dion sends as little as PowerSGD, in its step, and leaves nothing out of the sum: these are `unsummed`.)

Sums of signs are no signs, and of a few elements more than these: the last two are sent by everybody to everybody, and
grow with N.
"""

import math
from weakref import WeakKeyDictionary

import numpy as np

from ..backend import device_of, module_of, to
from ..flat import joined


def all_reduce(comm, bucket):
    """Sum the gradients as they are: what happens without a hook."""
    return comm.all_reduce(bucket.grads, async_op=True).wait


def counts_alone(comm, bucket):
    """Leave each rank its own gradients, and sum how many have some: of parameters whose optimizer adds up what it
    needs of them, as optim.Dion does."""
    return comm.all_reduce(bucket.flat.tail, async_op=True).wait


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


class ErrorFeedback:
    """What a rank has left out of its gradients, by parameter's leaf, and adds to the next ones: nothing is lost, but
    late. Of a model that is gone nothing is kept, which another one's parameters could be given.

    scaler  the GradScaler that scales the loss, where there is one: what is kept must follow when its factor changes
    """

    def __init__(self, scaler=None):
        self.scaler = scaler
        self.left_out = WeakKeyDictionary()     # what was left out here, divided by the scaler's factor

    @property
    def factor(self):
        """Of the loss, and so of the gradients."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def wanted(self, grads, s, factor):
        """The gradient of a segment and what was left out before, (n,), a new array."""
        own, left_out = grads[s.start:s.stop], self.left_out.get(s.tensor.leaf)
        return own.copy() if left_out is None else own + left_out * factor

    def leave_out(self, s, rest, finite, factor):
        """Keep what wasn't sent, (n,). Where the step isn't `finite`, a 0-d bool that is alike on all ranks, what was
        left out before stays."""
        before = self.left_out.get(s.tensor.leaf, 0.0)
        self.left_out[s.tensor.leaf] = module_of(rest).where(finite, rest * (1 / factor), before).astype(rest.dtype)


class PowerSGD(ErrorFeedback):
    """Send each matrix of gradients as the product of two thin ones, found by one step of power iteration.

    For the n × m gradient M_w of rank w, with what was left out last time added to it:

        P = Σ_w M_w Q         all-reduced, n·r numbers; then its columns are made orthonormal
        Q = Σ_w M_wᵀ P        all-reduced, m·r numbers; also where the next step begins
        Σ_w M_w ≈ P Qᵀ        on all ranks, and  M_w - P Pᵀ M_w  is kept for the next step (error feedback)

    rank    r. Vectors, and matrices that would not become smaller, are summed as they are
    scaler  see ErrorFeedback

    A step whose gradient is inf or NaN on some rank leaves what is kept as it was. Source: Vogels et al. 2019,
    "PowerSGD: practical low-rank gradient compression for distributed optimization".
    """

    def __init__(self, rank=1, seed=0, scaler=None):
        if rank < 1:
            raise ValueError(f"PowerSGD: rank={rank} must be at least 1")
        super().__init__(scaler)
        self.rank, self.seed = rank, seed
        self.q, self.steps = WeakKeyDictionary(), WeakKeyDictionary()   # by leaf: the next Q, and how many were drawn

    def __call__(self, comm, bucket):
        xp, thin, rest, end = module_of(bucket.grads), [], [], 0
        for s in sorted(bucket.segments, key=lambda s: s.start):
            shape = _matrix(s.tensor.shape)
            if sum(shape) * self.rank < math.prod(shape):
                thin.append((s, shape))
                rest.append(slice(end, s.start))
                end = s.stop
        rest.append(slice(end, bucket.grads.size))
        factor = self.factor
        matrices = [self.wanted(bucket.grads, s, factor).reshape(shape) for s, shape in thin]
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
            used = _used(bucket)
            for (s, _), m, p, q, sent in zip(thin, matrices, ps, qs, own, strict=True):
                if id(s.tensor) in used:
                    finite = xp.isfinite(q).all()
                    self.leave_out(s, (m - sent).reshape(-1), finite, factor)
                    self.q[s.tensor.leaf] = xp.where(finite, self._alive(s, q), self.q[s.tensor.leaf])
                    bucket.grads[s.start:s.stop] = (p @ q.T).reshape(-1)
        return finish

    def _alive(self, s, q):
        """Q for the next step. A column of zeros would find nothing for ever: it is drawn anew, alike on all ranks."""
        norms = (q * q).sum(axis=0)
        fresh = self._draw(s, q, self.steps.get(s.tensor.leaf, 0) + 1)
        return module_of(q).where(norms > 1e-14 * norms.max() + 1e-38, q, fresh)

    def _draw(self, s, like, step):
        self.steps[s.tensor.leaf] = step
        draw = np.random.default_rng([self.seed, s.start, like.shape[0], step])
        return to(draw.standard_normal((like.shape[0], self.rank)).astype(like.dtype), device_of(like))

    def _q(self, s, m):
        if s.tensor.leaf not in self.q:
            self.q[s.tensor.leaf] = self._draw(s, m.T, 0)
        return self.q[s.tensor.leaf]


class Gathered(ErrorFeedback):
    """A hook whose messages can't be summed on the way: everybody's go to everybody, and are added up in the order of
    ranks. A subclass says what stands for the gradients of several parameters, arrays (n₀,), (n₁,), …

    pack(parts)             a few arrays, of the same shapes on all ranks: the message
    unpack(message, sizes)  the gradients that it stands for, (n₀ + n₁ + …,)
    """

    def __call__(self, comm, bucket):
        xp, grads, factor = module_of(bucket.grads), bucket.grads, self.factor
        segments = sorted((s for s in bucket.segments if s.stop > s.start), key=lambda s: s.start)
        parts = [self.wanted(grads, s, factor) for s in segments]
        sizes = [part.size for part in parts]
        message = self.pack(parts) if parts else ()
        everybodys = [xp.empty((comm.size, *a.shape), a.dtype) for a in message]
        rest = grads[segments[-1].stop if segments else 0:]       # who has used what, and padding
        posted = [comm.all_gather(out, a, async_op=True) for out, a in zip(everybodys, message, strict=True)]
        posted.append(comm.all_reduce(rest, async_op=True))

        def finish():
            for work in posted:
                work.wait()
            total = sum(self.unpack(sent, sizes) for sent in zip(*everybodys, strict=True)) if parts else ()
            left, used, at = self.unpack(message, sizes) if parts else (), _used(bucket), 0
            for s, part in zip(segments, parts, strict=True):
                here = slice(at, at := at + part.size)
                if id(s.tensor) in used:
                    grads[s.start:s.stop] = total[here]
                    self.leave_out(s, part - left[here], xp.isfinite(total[here]).all(), factor)
        return finish


class OneBit(Gathered):
    """Send each number's sign, one bit, and the mean of |v| of each parameter's numbers: ±mean with these signs is
    nearest to v by the sum of squares. What that leaves out is most of it, and is added to the next gradient.

    scaler  see ErrorFeedback

    A step whose gradient is inf or NaN on some rank is NaN on all, and leaves what is kept as it was. Sources: Seide et
    al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
    DNNs"; Karimireddy et al. 2019, "Error feedback fixes SignSGD" (the scale).
    """

    def pack(self, parts):
        xp = module_of(parts[0])
        return xp.stack([xp.absolute(part).mean() for part in parts]), xp.packbits(xp.concatenate(parts) >= 0)

    def unpack(self, message, sizes):
        scales, bits = message
        xp = module_of(scales)
        scales = xp.repeat(scales, sizes)
        return xp.where(xp.unpackbits(bits)[:scales.size] != 0, scales, -scales)


class TopK(Gathered):
    """Send the elements of each parameter's gradient that are largest in magnitude, with their places; the others wait,
    and grow, until their turn comes.

    share   how many of a parameter's elements: above 0, up to 1; one at least
    scaler  see ErrorFeedback

    A step whose gradient is inf or NaN on some rank is so on all, and leaves what is kept as it was. Sources: Aji &
    Heafield 2017, "Sparse communication for distributed gradient descent"; Stich et al. 2018, "Sparsified SGD with
    memory"; Lin et al. 2018, "Deep gradient compression", which has momentum's part in it, too.
    """

    def __init__(self, share=0.01, scaler=None):
        if not 0 < share <= 1:
            raise ValueError(f"TopK: share={share} must be above 0, and 1 at most")
        super().__init__(scaler)
        self.share = share

    def pack(self, parts):
        xp, places, at = module_of(parts[0]), [], 0
        for part in parts:
            least = part.size - math.ceil(self.share * part.size)       # so many of them stay
            places.append(at + xp.argpartition(xp.absolute(part), least)[least:])        # NaN counts as the largest
            at += part.size
        places = xp.concatenate(places)
        return xp.concatenate(parts)[places], places.astype(np.int32 if at < 2 ** 31 else np.int64)

    def unpack(self, message, sizes):
        values, places = message
        found = module_of(values).zeros(sum(sizes), values.dtype)
        found[places] = values
        return found


def _used(bucket):
    """The ids of the parameters that some rank has used, once the counts are summed. Of others nobody gets a gradient,
    or not all have sent theirs."""
    return {id(s.tensor) for s, users in zip(bucket.segments, bucket.users(), strict=True) if users > 0}


def _matrix(shape):
    """A parameter's shape as rows × columns; (1, n) for a vector."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _all_reduce_together(comm, arrays):
    """Post one all-reduce for all the arrays, which are exchanged for views of what is summed."""
    if not arrays:
        return []
    flat, arrays[:] = joined(arrays)
    return [comm.all_reduce(flat, async_op=True)]
