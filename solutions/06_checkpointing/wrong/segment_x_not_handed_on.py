# 06.2: every layer of a segment gets the segment's x
class Segment:

    def __init__(self, layers, rng):
        self.layers, self.rng = layers, rng

    def forward(self, x):
        self.x, self.state = x, self.rng.bit_generator.state
        for layer in self.layers:
            x, _ = layer.forward(x, self.rng)
        return x

    def backward(self, ct):
        now, self.rng.bit_generator.state = self.rng.bit_generator.state, self.state
        saved, x = [], self.x
        for layer in self.layers:
            y, mask = layer.forward(x, self.rng)
            saved.append((x, mask))
        self.rng.bit_generator.state = now
        for layer, (x, mask) in zip(reversed(self.layers), reversed(saved), strict=True):
            ct = layer.backward(x, mask, ct)
        return ct
