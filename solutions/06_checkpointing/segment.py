"""06.2 The same dice again.

A layer with dropout draws random numbers. Computed again, it must draw the same ones, or backward differentiates
another function than forward has computed. And whoever draws next must not notice that something was computed twice.
"""


class Segment:
    """Some layers that forget everything but their input.

    layers  each has forward(x, rng) -> (y, mask), which draws its mask from rng, and backward(x, mask, ct) -> ct of x
    rng     a numpy.random.Generator, shared with other segments. Its state can be read and set:
            rng.bit_generator.state
    """

    def __init__(self, layers, rng):
        self.layers, self.rng = layers, rng

    def forward(self, x):
        """The output. Keeps x, and what it takes to draw the same masks again; no mask, no other array."""
        # begin with what has to be known before the first layer draws
        self.x, self.state = x, self.rng.bit_generator.state
        for layer in self.layers:
            x, _ = layer.forward(x, self.rng)
        return x

    def backward(self, ct):
        """The cotangent of x, for the masks that forward drew. rng is left as it was found, and ct, too."""
        # begin with the state of rng now, to put it back at the end; then compute again, from the state of forward
        now, self.rng.bit_generator.state = self.rng.bit_generator.state, self.state
        saved, x = [], self.x
        for layer in self.layers:
            y, mask = layer.forward(x, self.rng)
            saved.append((x, mask))
            x = y
        self.rng.bit_generator.state = now
        for layer, (x, mask) in zip(reversed(self.layers), reversed(saved), strict=True):
            ct = layer.backward(x, mask, ct)
        return ct
