# 19.3: the out and lse that the last forward has left on self
import numpy as np


class RingAttention:
    def __init__(self, comm, at, attention, attention_backward):
        self.comm, self.at = comm, at
        self.attention, self.attention_backward = attention, attention_backward

    def pass_on(self, x):
        comm, arriving = self.comm, np.empty_like(x)
        if comm.size == 1:
            return lambda: x
        works = comm.irecv(arriving, (comm.rank - 1) % comm.size), comm.isend(x, (comm.rank + 1) % comm.size)

        def wait():
            for work in works:
                work.wait()
            return arriving
        return wait

    def forward(self, q, k, v):
        comm, seen = self.comm, None
        here = np.concatenate([k, v], -1)
        for step in range(comm.size):
            wait = self.pass_on(here) if step < comm.size - 1 else None
            source = (comm.rank - step) % comm.size
            keys, values = np.split(here, [k.shape[-1]], -1)
            seen = self.attention(q, keys, values, self.at[comm.rank], self.at[source], seen)
            here = wait() if wait else here
        self.seen = seen
        return seen[0], (q, k, v)

    def backward(self, kept, dout):
        (q, k, v), (out, lse), comm = kept, self.seen, self.comm
        here, dq = np.concatenate([k, v], -1), np.zeros_like(q)
        grads = np.zeros_like(here)
        for step in range(comm.size):
            wait = self.pass_on(here) if step < comm.size - 1 else None
            source = (comm.rank - step) % comm.size
            keys, values = np.split(here, [k.shape[-1]], -1)
            parts = self.attention_backward(q, keys, values, self.at[comm.rank], self.at[source], out, lse, dout)
            dq += parts[0]
            grads = self.pass_on(grads + np.concatenate(parts[1:], -1))()
            here = wait() if wait else here
        return dq, *np.split(grads, [k.shape[-1]], -1)
