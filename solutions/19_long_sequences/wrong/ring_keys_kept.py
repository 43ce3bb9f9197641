# 19.3: keys and values don't go round again
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
        comm, seen, met = self.comm, None, []
        here = np.concatenate([k, v], -1)
        for step in range(comm.size):
            met.append(here)
            if step < comm.size - 1:
                arriving, *works = self.post(here)
            source = (comm.rank - step) % comm.size
            seen = self.attention(q, here[..., :k.shape[-1]], here[..., k.shape[-1]:], self.at[comm.rank],
                                  self.at[source], seen)
            if step < comm.size - 1:
                for work in works:
                    work.wait()
                here = arriving
        return seen[0], (q, k, v, *seen, met)

    def backward(self, kept, dout):
        q, k, v, out, lse, met = kept
        size, dq, grads = k.shape[-1], np.zeros_like(q), np.zeros_like(met[0])
        for step, here in enumerate(met):
            source = (self.comm.rank - step) % self.comm.size
            more, dk, dv = self.attention_backward(q, here[..., :size], here[..., size:], self.at[self.comm.rank],
                                                   self.at[source], out, lse, dout)
            dq += more
            grads += np.concatenate([dk, dv], -1)
            if self.comm.size > 1:
                arriving, *works = self.post(grads)
                for work in works:
                    work.wait()
                grads = arriving
        return dq, grads[..., :size], grads[..., size:]
