# 06.2: masks or inputs are kept
class Segment:
    def __init__(self, layers, rng):
        self.layers, self.rng = layers, rng

    def forward(self, x):
        self.saved = []
        for layer in self.layers:
            y, mask = layer.forward(x, self.rng)
            self.saved.append((x, mask))
            x = y
        return x

    def backward(self, ct):
        saved = self.saved
        for layer, (x, mask) in zip(reversed(self.layers), reversed(saved)):
            ct = layer.backward(x, mask, ct)
        return ct
