# 10.3: the ring goes the other way, one buffer, received in place
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    n, r = comm.size, comm.rank
    parts = np.array_split(x, n)
    buffer = np.empty(len(parts[0]), x.dtype)

    def swap(out, into):
        work = comm.isend(out.copy(), (r - 1) % n)
        comm.recv(into, (r + 1) % n)
        work.wait()

    for k in range(1, n):
        target = parts[(r + k) % n]
        swap(parts[(r + k - 1) % n], buffer[:len(target)])
        combine(buffer[:len(target)], target, out=target)
    for k in range(n - 1):
        swap(parts[(r - 1 + k) % n], parts[(r + k) % n])
