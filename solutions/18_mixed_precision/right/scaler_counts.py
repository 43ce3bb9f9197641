# 18.2: how many are bad is summed, a new list, multiplied by the inverse
import numpy as np


class GradScaler:
    def __init__(self, comm, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.comm, self.options = comm, (growth_factor, backoff_factor, growth_interval)
        self.value = np.array(init_scale, dtype=np.float32)
        self.streak, self.state = 0, "ready"

    def get_scale(self):
        return self.value.item()

    def scale(self, loss):
        return self.value * np.asarray(loss, dtype=np.float32)

    def unscale_(self, optimizer):
        if self.state != "ready":
            raise RuntimeError("unscale_: call update first")
        whole = [np.asarray(g, np.float32) for g in optimizer.grads]
        inverse = np.float32(1.0 / self.get_scale())
        optimizer.grads = [g * inverse for g in whole]
        count = np.array([sum(int(np.count_nonzero(~np.isfinite(g))) for g in whole)], dtype=np.int64)
        self.comm.all_reduce(count, "sum")
        self.state = "overflow" if count[0] else "fine"

    def step(self, optimizer):
        if self.state == "ready":
            self.unscale_(optimizer)
        return optimizer.step() if self.state == "fine" else None

    def update(self):
        growth, backoff, interval = self.options
        state, self.state = self.state, "ready"
        if state == "overflow":
            self.value *= np.float32(backoff)
            self.streak = 0
            return
        self.streak += 1
        if self.streak >= interval:
            self.value *= np.float32(growth)
            self.streak = 0
