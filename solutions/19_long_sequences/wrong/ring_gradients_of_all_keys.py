# 19.3: of all blocks are added into one array that stays
import numpy as np


class RingAttention:
    def __init__(self, comm, at, attention, attention_backward):
        self.comm, self.at = comm, at
        self.attention, self.attention_backward = attention, attention_backward
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def post(self, x):
        arriving = np.empty_like(x)
        return arriving, self.comm.irecv(arriving, self.left), self.comm.isend(x, self.right)

    def forward(self, q, k, v):
        comm, seen = self.comm, None
        here = np.concatenate([k, v], -1)
        for step in range(comm.size):
            last = step == comm.size - 1
            if not last:
                arriving, *works = self.post(here)
            source = (comm.rank - step) % comm.size
            keys, values = here[..., :k.shape[-1]], here[..., k.shape[-1]:]
            seen = self.attention(q, keys, values, self.at[comm.rank], self.at[source], seen)
            if not last:
                for work in works:
                    work.wait()
                here = arriving
        return seen[0], (q, k, v, seen[0], seen[1])

    def backward(self, kept, dout):
        q, k, v, out, lse = kept
        comm, size = self.comm, k.shape[-1]
        here, dq = np.concatenate([k, v], -1), np.zeros_like(q)
        grads = np.zeros_like(here)
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            more, dk, dv = self.attention_backward(q, here[..., :size], here[..., size:], self.at[comm.rank],
                                                   self.at[source], out, lse, dout)
            dq += more
            grads += np.concatenate([dk, dv], -1)
            if comm.size > 1:
                here = self.swap(here) if step < comm.size - 1 else here
        return dq, grads[..., :size], grads[..., size:]

    def swap(self, x):
        arriving, *works = self.post(x)
        for work in works:
            work.wait()
        return arriving
