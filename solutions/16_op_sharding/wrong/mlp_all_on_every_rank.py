# 16.2: right, but nothing is sent
import numpy as np


def f(comm, x):
    return x


def f_backward(comm, ct):
    total = ct.copy()
    comm.all_reduce(total)
    return total


def g(comm, x):
    total = x.copy()
    comm.all_reduce(total)
    return total


def g_backward(comm, ct):
    return ct


class ParallelMLP:
    def __init__(self, comm, params, cut):
        self.comm, self.cut, self.whole = comm, cut, params
        placements = {"A": "S1", "a": "S0", "B": "S0", "b": "R"}
        self.params = {name: cut(x, placements[name], comm.size)[comm.rank] for name, x in params.items()}

    def forward(self, x):
        A, a, B, b = (self.whole[name] for name in "AaBb")
        h = np.tanh(x @ A + a)
        return h @ B + b, (x, h)

    def backward(self, kept, dy):
        (x, h), A, B = kept, self.whole["A"], self.whole["B"]
        dz = dy @ B.T * (1 - h ** 2)
        mine = self.cut(np.arange(h.shape[1]), "S0", self.comm.size)[self.comm.rank]
        grads = {"A": x.T @ dz[:, mine], "a": dz[:, mine].sum(0), "B": h[:, mine].T @ dy, "b": dy.sum(0)}
        return dz @ A.T, grads
