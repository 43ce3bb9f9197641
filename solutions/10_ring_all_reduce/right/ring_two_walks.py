# 10.3: two loops, posted receives, chunks rounded to the nearest
import numpy as np


class Ring:
    def __init__(self, comm, x):
        self.comm = comm
        edges = np.linspace(0, len(x), comm.size + 1).round().astype(int)
        self.parts = [x[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def turn(self, out, into):
        c = self.comm
        r = c.irecv(into, (c.rank - 1) % c.size)
        s = c.isend(out, (c.rank + 1) % c.size)
        r.wait(), s.wait()


def ring_all_reduce(comm, x, combine=np.add):
    if comm.size == 1:
        return x
    ring, n, r = Ring(comm, x), comm.size, comm.rank
    for step in range(n - 1):
        here = ring.parts[(r - 1 - step) % n]
        arrived = np.empty_like(here)
        ring.turn(ring.parts[(r - step) % n], arrived)
        here[:] = combine(arrived, here)
    for step in range(n - 1):
        arrived = np.empty_like(ring.parts[(r - step) % n])
        ring.turn(ring.parts[(r + 1 - step) % n], arrived)
        np.copyto(ring.parts[(r - step) % n], arrived)
    return x
