# 19.3: the last one's gradients are right
import numpy as np


class RingAttention:

    def __init__(self, comm, at, attention, attention_backward):
        self.comm, self.at = comm, at
        self.attention, self.attention_backward = attention, attention_backward

    def forward(self, q, k, v):
        comm = self.comm
        N, r = comm.size, comm.rank
        right, left = (r + 1) % N, (r - 1) % N
        kv = np.concatenate([k, v], axis=2)
        size = k.shape[2]
        found = None
        for s in range(N):
            works = []
            if s < N - 1:
                coming = np.empty_like(kv)
                works = [comm.isend(kv, right), comm.irecv(coming, left)]
            owner = (r - s) % N
            found = self.attention(q, kv[..., :size], kv[..., size:], self.at[r], self.at[owner], found)
            for w in works:
                w.wait()
            if works:
                kv = coming
        self.lse = found[1]
        return found[0], (q, k, v, *found)

    def backward(self, kept, dout):
        q, k, v, out, lse = kept
        lse = self.lse
        comm = self.comm
        N, r = comm.size, comm.rank
        right, left = (r + 1) % N, (r - 1) % N
        kv = np.concatenate([k, v], axis=2)
        size = k.shape[2]
        dq = np.zeros_like(q)
        grads = np.zeros_like(kv)
        for s in range(N):
            works = []
            if s < N - 1:
                coming = np.empty_like(kv)
                works = [comm.isend(kv, right), comm.irecv(coming, left)]
            owner = (r - s) % N
            a, b, c = self.attention_backward(q, kv[..., :size], kv[..., size:], self.at[r], self.at[owner], out, lse, dout)
            dq += a
            grads = grads + np.concatenate([b, c], axis=2)
            if N > 1:
                came = np.empty_like(grads)
                works += [comm.isend(grads, right), comm.irecv(came, left)]
            for w in works:
                w.wait()
            if s < N - 1:
                kv = coming
            if N > 1:
                grads = came
        return dq, grads[..., :size].copy(), grads[..., size:].copy()
