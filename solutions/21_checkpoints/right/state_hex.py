# 21.2: arrays as bytes in hexadecimal, numbers as text: lists of unlike things
import numpy as np

BATCH, ACCUMULATE, PATIENCE = 4, 2, 1
LARGEST = 60.0


class Run:
    def __init__(self, x, y, seed):
        self.x, self.y = x, y
        self.shuffler, self.dropout = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self.order, self.at, self.total = self.shuffler.permutation(len(x)), 0, 0.0
        self.weights = self.dropout.normal(0, 1, x.shape[1])
        self.mean = self.weights.copy()
        self.grad, self.batches = np.zeros_like(self.weights), 0
        self.m, self.v, self.updates = np.zeros_like(self.weights), np.zeros_like(self.weights), 0
        self.rate, self.best, self.bad = 0.1, np.inf, 0
        self.scale, self.good = 8.0, 0

    def step(self):
        rows = self.order[self.at:self.at + BATCH]
        x = self.x[rows] * (self.dropout.random((len(rows), self.x.shape[1])) < 0.8) / 0.8
        error = x @ self.weights - self.y[rows]
        loss = float(np.mean(error ** 2))
        self.grad += self.scale * 2 * x.T @ error / len(rows) / ACCUMULATE
        self.batches += 1
        if self.batches == ACCUMULATE:
            self.update()
        self.at, self.total = self.at + len(rows), self.total + loss
        if self.at == len(self.x):
            self.end_epoch()
        return loss

    def update(self):
        if np.abs(self.grad).max() > LARGEST:
            self.scale, self.good = self.scale / 2, 0
        else:
            g = self.grad / self.scale
            self.updates += 1
            self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g ** 2
            self.weights -= (self.rate * self.m / (1 - 0.9 ** self.updates)
                             / (np.sqrt(self.v / (1 - 0.95 ** self.updates)) + 1e-8))
            self.mean = 0.9 * self.mean + 0.1 * self.weights
            self.good += 1
            if self.good == 3:
                self.scale, self.good = self.scale * 2, 0
        self.grad, self.batches = np.zeros_like(self.grad), 0

    def end_epoch(self):
        if self.total < self.best:
            self.best, self.bad = self.total, 0
        else:
            self.bad += 1
            if self.bad > PATIENCE:
                self.rate, self.bad = self.rate / 2, 0
        self.order, self.at, self.total = self.shuffler.permutation(len(self.x)), 0, 0.0


def text(value):
    if isinstance(value, np.random.Generator):
        return ["rng", value.bit_generator.state]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]
    return ["float", float(value).hex()] if isinstance(value, float) else ["int", int(value)]


def capture(run):
    return {name: text(value) for name, value in sorted(run.__dict__.items()) if name not in ("x", "y")}


def restore(run, state):
    for name, (kind, *rest) in state.items():
        if kind == "rng":
            getattr(run, name).bit_generator.state = rest[0]
        elif kind == "array":
            dtype, shape, data = rest
            setattr(run, name, np.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy())
        else:
            setattr(run, name, float.fromhex(rest[0]) if kind == "float" else rest[0])
