# 16.2: einsum, parts copied, what is kept is a dict
import numpy as np


def f(comm, x):
    return np.array(x)


def g(comm, x):
    x = np.ascontiguousarray(x) + 0.0
    comm.all_reduce(x)
    return x


def f_backward(comm, ct):
    return g(comm, ct)


def g_backward(comm, ct):
    return f(comm, ct)


class ParallelMLP:
    def __init__(self, comm, params, cut):
        self.comm = comm
        mine = {"A": cut(params["A"], "S1", comm.size), "a": cut(params["a"], "S0", comm.size),
                "B": cut(params["B"], "S0", comm.size)}
        self.params = {name: np.array(parts[comm.rank]) for name, parts in mine.items()}
        self.params["b"] = np.array(params["b"])

    def forward(self, x):
        p = self.params
        hidden = np.tanh(np.einsum("ni,ih->nh", f(self.comm, x), p["A"]) + p["a"][None])
        y = g(self.comm, np.einsum("nh,ho->no", hidden, p["B"]))
        y += p["b"]
        return y, {"x": x.copy(), "hidden": hidden}

    def backward(self, kept, dy):
        hidden, p = kept["hidden"], self.params
        ct = g_backward(self.comm, dy)
        dz = np.einsum("no,ho->nh", ct, p["B"])
        dz -= dz * hidden * hidden
        grads = {"b": np.einsum("no->o", dy), "B": np.einsum("nh,no->ho", hidden, ct),
                 "a": np.einsum("nh->h", dz), "A": np.einsum("ni,nh->ih", kept["x"], dz)}
        return f_backward(self.comm, np.einsum("nh,ih->ni", dz, p["A"])), grads
