# 06.2: forward doesn't draw its masks from rng
import numpy as np


class Segment:
    def __init__(self, layers, rng):
        self.layers, self.rng = layers, rng

    def forward(self, x):
        self.x = x
        self.rng = np.random.default_rng(0)
        for layer in self.layers:
            x, _ = layer.forward(x, self.rng)
        return x

    def backward(self, ct):
        self.rng = np.random.default_rng(0)
        saved, x = [], self.x
        for layer in self.layers:
            y, mask = layer.forward(x, self.rng)
            saved.append((x, mask))
            x = y
        for layer, (x, mask) in zip(reversed(self.layers), reversed(saved)):
            ct = layer.backward(x, mask, ct)
        return ct
