# 18.2: a step is taken in which some gradient was inf or NaN
import numpy as np


class GradScaler:
    def __init__(self, comm, init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.comm, self.growth_interval = comm, growth_interval
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.factor, self.clean, self.found = init_scale, 0, None

    def get_scale(self):
        return self.factor

    def scale(self, loss):
        return np.float32(loss) * np.float32(self.factor)

    def unscale_(self, optimizer):
        if self.found is not None:
            raise RuntimeError("unscale_ was called twice since the last update: the gradients are divided already")
        bad = np.zeros(1)
        for i, grad in enumerate(optimizer.grads):
            if not np.isfinite(grad).all():
                bad[0] = 1
            optimizer.grads[i] = grad.astype(np.float32) / np.float32(self.factor)
        self.comm.all_reduce(bad, "max")
        self.found = bad[0] > 0

    def step(self, optimizer):
        if self.found is None:
            self.unscale_(optimizer)
        if self.found:
            optimizer.grads = [0 * g for g in optimizer.grads]
        optimizer.step()

    def update(self):
        if self.found:
            self.factor, self.clean = self.factor * self.backoff_factor, 0
        else:
            self.clean += 1
            if self.clean == self.growth_interval:
                self.factor, self.clean = self.factor * self.growth_factor, 0
        self.found = None
