# 21.2: the order is kept in 8 bits
"""21.2 What belongs into a checkpoint: everything that the next step will read.

Run is a training run, small and with all that real ones have: Adam, a rate that falls when an epoch was no better,
a mean of the weights, loss scaling, accumulation of gradients over two batches, an order that is drawn anew for every
epoch, dropout. It may be killed between any two of its steps.
"""

import numpy as np

BATCH, ACCUMULATE, PATIENCE = 4, 2, 1
LARGEST = 60.0        # of a scaled gradient: more overflows, as in float16


class Run:
    """Begins the same from the same arguments. x [samples, features] and y [samples] are the data."""

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
        """The loss of the next batch."""
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


def capture(run):
    """What a checkpoint must hold of a Run, as a dict of what files can hold: arrays, numbers, strings, None, and lists
    and dicts (with names for keys) of these. No data: x and y are on the disk already. The run isn't disturbed, and
    what was captured doesn't change when it goes on."""
    # begin with step(): read it line by line. Of all that it reads, what isn't the same as at the beginning? A
    # Generator's state is rng.bit_generator.state, a dict
    return {name: stored(value) for name, value in vars(run).items() if name not in {"x", "y"}}


# ours
def stored(value):
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.astype(np.uint8) if isinstance(value, np.ndarray) and value.dtype.kind == "i" else np.copy(value) if isinstance(value, np.ndarray) else value


def restore(run, state):
    """Make `run`, which was begun with the same arguments, what was captured: all its later losses are those that the
    captured one would have had, to the last bit. state: as it was read from a file; not to be changed, neither now
    nor by the run's later steps."""
    # begin with what capture has written down, and set all of it; a Generator by its bit_generator.state
    for name, value in state.items():
        now = getattr(run, name)
        if isinstance(now, np.random.Generator):
            now.bit_generator.state = value
        else:
            setattr(run, name, stored(value))
