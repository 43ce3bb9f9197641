# 06.2: the masks are the same in backward, but what comes back isn't
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
            x = y
        self.rng.bit_generator.state = now
        for layer, (x, mask) in zip(reversed(self.layers), reversed(saved), strict=True):
            back = layer.backward(x, mask, ct)
        return back
