# 21.2: then the run writes into the state
import numpy as np

BATCH, ACCUMULATE, PATIENCE = 4, 2, 1
LARGEST = 60.0        # of a scaled gradient: more overflows, as in float16


class Run:

    def __init__(self, x, y, seed):
        self.x, self.y = x, y
        self.shuffler, self.dropout = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self.order, self.at, self.total = self.shuffler.permutation(len(x)), 0, 0.0     # of this epoch
        self.weights = self.dropout.normal(0, 1, x.shape[1])
        self.mean = self.weights.copy()                                                 # over time
        self.grad, self.batches = np.zeros_like(self.weights), 0                        # accumulated until now
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
            self.scale, self.good = self.scale / 2, 0       # and the update is left out
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


ARRAYS = ["order", "weights", "mean", "grad", "m", "v"]
NUMBERS = ["at", "total", "batches", "updates", "rate", "best", "bad", "scale", "good"]
STREAMS = ["shuffler", "dropout"]


def capture(run):
    state = {name: getattr(run, name).copy() for name in ARRAYS}
    state.update({name: getattr(run, name) for name in NUMBERS})
    state.update({name: getattr(run, name).bit_generator.state for name in STREAMS})
    return state


def restore(run, state):
    for name in ARRAYS:
        setattr(run, name, state[name])
    for name in NUMBERS:
        setattr(run, name, state[name])
    for name in STREAMS:
        getattr(run, name).bit_generator.state = state[name]
