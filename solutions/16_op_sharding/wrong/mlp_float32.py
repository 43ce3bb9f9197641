# 16.2: only the digits of float32
import numpy as np


def f(comm, x):
    return x


def f_backward(comm, ct):
    total = np.array(ct)
    comm.all_reduce(total)
    return total


def g(comm, x):
    total = np.array(x)
    comm.all_reduce(total)
    return total


def g_backward(comm, ct):
    return ct


class ParallelMLP:

    def __init__(self, comm, params, cut):
        where = {"A": "S1", "a": "S0", "B": "S0", "b": "R"}
        self.comm = comm
        self.params = {name: np.array(cut(params[name], p, comm.size)[comm.rank], np.float32) for name, p in where.items()}

    def forward(self, x):
        p = self.params
        x = f(self.comm, x)
        h = np.tanh(x @ p["A"] + p["a"])
        return g(self.comm, h @ p["B"]) + p["b"], (x, h)

    def backward(self, kept, dy):
        x, h = kept
        p = self.params
        db = dy.sum(0)
        ds = g_backward(self.comm, dy)
        dB = h.T @ ds
        dz = ds @ p["B"].T * (1 - h * h)
        return f_backward(self.comm, dz @ p["A"].T), {"A": x.T @ dz, "a": dz.sum(0), "B": dB, "b": db}
