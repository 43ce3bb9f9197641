# 11.2: inputs on a stack, one function around both passes, grad in one array
import numpy as np


class Unit:
    def __init__(self, comm, layer, shard):
        self.comm, self.layer, self.shard, self.grad = comm, layer, shard, None
        self.inputs = []

    def with_all(self, use, *args):
        buffer = np.empty((self.comm.size, self.shard.size)).reshape(-1)
        self.comm.all_gather(buffer, self.shard)
        try:
            return use(buffer[:self.layer.size], *args)
        finally:
            del buffer

    def forward(self, x):
        self.inputs.append(x)
        return self.with_all(self.layer.forward, x)

    def backward(self, ct):
        dx, grad = self.with_all(self.layer.backward, self.inputs.pop(), ct)
        if self.grad is None:
            self.grad = np.zeros(len(self.shard))
        self.comm.reduce_scatter(self.grad, np.pad(grad, (0, self.comm.size * self.shard.size - grad.size)))
        return dx
