"""Random programs: elementwise ops, sums and maxima, broadcasting, reshapes, transposes, products over odd shapes."""

import numpy as np

import minitorch_dist as mt

EXTENTS = (1, 2, 3, 5, 7)
# Smooth and bounded, so that a rounding doesn't become a difference.
ONE = {"tanh": mt.tanh, "sigmoid": mt.sigmoid, "neg": mt.neg, "half": lambda x: x * 0.5, "plus": lambda x: 1.0 + x,
       "square": lambda x: mt.square(mt.tanh(x)), "exp": lambda x: mt.exp(mt.tanh(x)), "relu": mt.relu,
       "abs": mt.absolute, "log1p": lambda x: mt.log1p(mt.absolute(x)), "sin": mt.sin, "gelu": mt.gelu,
       "root": lambda x: mt.sqrt(mt.square(x) + 1.0), "clip": lambda x: mt.clip(x, -0.7, 0.9), "copy": lambda x: x / 1}
TWO = {"add": mt.add, "sub": mt.sub, "mul": mt.mul, "max": mt.maximum, "min": mt.minimum,
       "div": lambda x, y: x / (1.0 + mt.absolute(y)), "where": lambda x, y: mt.where(mt.greater(x, y), x, 0.3 * y)}


def broadcastable(a, b):
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


class Random:
    """A program of random ops: call it with arrays of `shapes`. It is the same for the same seed."""

    def __init__(self, seed, ops=12):
        self.r = np.random.default_rng(seed)
        first = tuple(self.choice(EXTENTS) for _ in range(self.choice((1, 2, 2, 3))))
        self.shapes = [first]
        for _ in range(self.choice((1, 2, 3))):     # others that broadcast with it
            cut = first[self.choice(range(len(first) + 1)):]
            self.shapes.append(tuple(self.choice((1, n)) for n in cut))
        self.known = list(self.shapes)      # the shape of each value
        self.ops = []                       # (function, numbers of its arguments)
        for _ in range(ops):
            self.extend()
        last = len(self.known) - 1
        self.wanted = sorted({last, last - 1, *self.r.choice(len(self.known), 2).tolist()})

    def choice(self, things):
        return things[int(self.r.integers(len(things)))]

    def late(self):
        """The number of a value, rather of a late one."""
        return len(self.known) - 1 - min(int(self.r.exponential(2.5)), len(self.known) - 1)

    def add(self, name, function, *numbers):
        shape = np.shape(function(*(np.ones(self.known[i]) for i in numbers)))
        if int(np.prod(shape)) <= 700:
            self.ops.append((name, function, numbers))
            self.known.append(shape)

    def extend(self):
        kind, x = self.choice(("one",) * 3 + ("two",) * 4 + ("reduce",) * 3 + ("shape",) * 2 + ("matmul",)), self.late()
        shape = self.known[x]
        if kind == "one":
            name = self.choice(list(ONE))
            self.add(name, ONE[name], x)
        elif kind == "two":
            others = [i for i, s in enumerate(self.known) if broadcastable(s, shape)]
            name, y = self.choice(list(TWO)), self.choice(others)
            self.add(name, TWO[name], *((x, y) if self.r.integers(2) else (y, x)))
        elif kind == "reduce" and shape:
            name, keep = self.choice(("sum", "max", "min", "mean", "softmax", "logsumexp")), bool(self.r.integers(2))
            axes = self.choice([None, 0, -1, len(shape) - 1, tuple(range(len(shape)))[-2:], (0, -1)[:len(shape)]])
            if name == "softmax":
                self.add(name, lambda v: mt.softmax(v, -1), x)
            else:
                self.add(name, lambda v: getattr(mt, name)(v, axes, keepdims=keep) * 0.5, x)
        elif kind == "shape":
            self.reshaping(x, shape)
        elif kind == "matmul" and len(shape) >= 2:
            others = [i for i, s in enumerate(self.known) if len(s) == 2 and s[0] == shape[-1]]
            if others:
                self.add("matmul", lambda v, w: mt.tanh(v @ w), x, self.choice(others))
            self.add("gram", lambda v: mt.tanh(v @ mt.swapaxes(v, -1, -2)), x)

    def reshaping(self, x, shape):
        name = self.choice(("transpose", "flat", "fold", "row", "broadcast", "slice", "join"))
        if name == "transpose":
            order = tuple(self.r.permutation(len(shape)).tolist())
            self.add(name, lambda v: mt.transpose(v, order), x)
        elif name == "flat":
            self.add(name, lambda v: mt.reshape(v, -1), x)
        elif name == "fold" and len(shape) > 1:
            self.add(name, lambda v: mt.reshape(v, (shape[0], -1)), x)
        elif name == "row":
            self.add(name, lambda v: mt.expand_dims(v, 0), x)
        elif name == "broadcast":
            self.add(name, lambda v: mt.broadcast_to(v, (3, *shape)), x)
        elif name == "slice" and shape and shape[-1] > 1:
            self.add(name, lambda v: v[..., ::-2], x)
        elif name == "join" and shape:
            self.add(name, lambda v: mt.concatenate([v, -v], 0), x)

    def __call__(self, *xs):
        values = list(xs)
        for _, function, numbers in self.ops:
            values.append(function(*(values[i] for i in numbers)))
        return [values[i] for i in self.wanted]

    def __repr__(self):
        lines = [f"{len(self.shapes) + i}: {name}{numbers} {self.known[len(self.shapes) + i]}"
                 for i, (name, _, numbers) in enumerate(self.ops)]
        return "\n".join([f"arguments {self.shapes}", *lines, f"return {self.wanted}"])
