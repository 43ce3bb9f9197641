# 16.2: the tanh that the last forward has left on self
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
        self.comm = comm
        placements = {"A": "S1", "a": "S0", "B": "S0", "b": "R"}
        self.params = {name: cut(x, placements[name], comm.size)[comm.rank] for name, x in params.items()}

    def forward(self, x):
        p = self.params
        self.h = np.tanh(f(self.comm, x) @ p["A"] + p["a"])
        return g(self.comm, self.h @ p["B"]) + p["b"], x

    def backward(self, kept, dy):
        x, h, p = kept, self.h, self.params
        dy = g_backward(self.comm, dy)
        dh = dy @ p["B"].T * (1 - h ** 2)
        grads = {"A": x.T @ dh, "a": dh.sum(0), "B": h.T @ dy, "b": dy.sum(0)}
        return f_backward(self.comm, dh @ p["A"].T), grads
