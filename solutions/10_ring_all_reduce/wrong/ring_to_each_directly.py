# 10.3: right, but that is no ring
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    n, r = comm.size, comm.rank
    cut = [slice(len(x) * i // n, len(x) * (i + 1) // n) for i in range(n)]
    mine = [x[cut[r]].copy() for _ in range(n)]
    for d in range(1, n):
        dst, src = (r + d) % n, (r - d) % n
        work = comm.isend(x[cut[dst]].copy(), dst)
        comm.recv(mine[src], src)
        work.wait()
    whole = mine[0]
    for other in mine[1:]:
        whole = combine(whole, other)
    x[cut[r]] = whole
    for d in range(1, n):
        dst, src = (r + d) % n, (r - d) % n
        work = comm.isend(whole, dst)
        comm.recv(x[cut[src]], src)
        work.wait()
