# 16.2: the bias is in rank 0's addend; g is f's backward pass
import numpy as np


def f(comm, x):
    return x


def f_backward(comm, ct):
    out = np.empty(ct.shape, ct.dtype, order="C")
    out[:] = ct
    comm.all_reduce(out)
    return out


g = f_backward
g_backward = f


class ParallelMLP:
    def __init__(self, comm, params, cut):
        self.comm = comm
        self.params = {name: cut(params[name], placement, comm.size)[comm.rank]
                       for name, placement in zip("AaBb", ("S1", "S0", "S0", "R"), strict=True)}

    def forward(self, x):
        A, a, B, b = self.params.values()
        h = np.tanh((A.T @ x.T).T + a)
        own = h @ B
        if self.comm.rank == 0:
            own = own + b
        return g(self.comm, own), (x, h)

    def backward(self, kept, dy):
        x, h = kept
        A, _, B, _ = self.params.values()
        dz = (dy @ B.T) * (1 - h) * (1 + h)
        return f_backward(self.comm, dz @ A.T), {
            "A": x.T @ dz, "a": dz.T @ np.ones(len(x)), "B": h.T @ dy, "b": np.ones(len(x)) @ dy}
