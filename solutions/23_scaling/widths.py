"""23.1 A learning rate for every width.

The learning rate was found on a narrow model, base. So that it is right for a wide one as well, three things of each
parameter depend on how many times its sides have grown: a layer is

    output · (x @ weight) + bias

with a constant, `output`; its first values are normal, of the standard deviation init · base's; and Adam's learning
rate for it is lr · base's.
"""

from typing import NamedTuple

import numpy as np

LAYERS = "input", "hidden", "output"
BETAS, EPS = (0.9, 0.99), 1e-20      # gradients get smaller with the width, and eps doesn't: so it is tiny here


class Factors(NamedTuple):
    """Of one parameter, beside base: of its first values, of its learning rate, and of the product with it."""

    init: float = 1.0
    lr: float = 1.0
    output: float = 1.0


def multipliers(shapes, base):
    """{name: Factors} that µP has for Adam; all are 1 where nothing has grown. The output of a vector stays 1.

    shapes, base  {name: shape} of the wide model, and of base: (fan_in, fan_out) of a matrix, (n,) of a vector. Both
                  have the same names, in any order. What a parameter is, is seen by which of its sides have grown, not
                  by its name; a matrix may have grown by one factor on this side, by another on that

    The paper's table 8 and its table 3 put the factors of some at different places; either will do, since only
    init · output and lr · output can be told from outside.
    """
    # begin with one matrix: by how much has fan_in grown? For x of n equally large numbers, how does x @ W grow with n
    # where W's values are independent of x, and how where a step of Adam has made them, in line with x?
    found = {}
    for name, shape in shapes.items():
        grown = [wide / narrow for wide, narrow in zip(shape, base[name], strict=True)]
        found[name] = Factors()
        if len(shape) == 2 and grown[0] != 1:
            hidden = grown[1] != 1
            found[name] = Factors(grown[0] ** -0.5, 1 / grown[0], 1.0) if hidden else Factors(output=1 / grown[0])
    return found


def layers(x, parameters, factors):
    """[what each layer gives, before tanh] of a net of three, for x of (samples, inputs)."""
    found = []
    for name in LAYERS:
        x = factors[f"{name}.weight"].output * (x @ parameters[f"{name}.weight"]) + parameters[f"{name}.bias"]
        found.append(x)
        x = np.tanh(x)
    return found


def gradients(x, y, parameters, factors):
    """{name: gradient} of half the squared distance between outputs and y, summed over outputs, mean over samples."""
    values, grads = layers(x, parameters, factors), {}
    inputs = [x, *map(np.tanh, values[:-1])]
    grad = (values[-1] - y) / len(x)
    for name, value in zip(LAYERS[::-1], inputs[::-1], strict=True):
        weight, output = parameters[f"{name}.weight"], factors[f"{name}.weight"].output
        grads[f"{name}.weight"], grads[f"{name}.bias"] = output * (value.T @ grad), grad.sum(0)
        grad = output * (grad @ weight.T) * (1 - value ** 2)
    return grads


class Adam:
    """Chapter 5's, with a learning rate for each parameter."""

    def __init__(self, parameters):
        self.parameters, self.steps = parameters, 0
        self.m, self.v = ({name: np.zeros_like(p) for name, p in parameters.items()} for _ in range(2))

    def step(self, grads, lrs):
        """In place; grads, lrs: {name: array}, {name: number}."""
        self.steps += 1
        for name, p in self.parameters.items():
            self.m[name] = BETAS[0] * self.m[name] + (1 - BETAS[0]) * grads[name]
            self.v[name] = BETAS[1] * self.v[name] + (1 - BETAS[1]) * grads[name] ** 2
            m, v = self.m[name] / (1 - BETAS[0] ** self.steps), self.v[name] / (1 - BETAS[1] ** self.steps)
            p -= lrs[name] * m / (np.sqrt(v) + EPS)


def changes(normal, std, base, lr, batches):
    """[of each layer: how far a few steps have moved what it gives], the root of the mean square of all its numbers.

    normal   {name: array of standard normal numbers, of the wide model's shape}: times the right number these are the
             first values. They come back as they were
    std, lr  {name: the standard deviation of base's first values}, and base's learning rate
    base     {name: shape}
    batches  [(x, y)], one for each step of Adam. What moves is what layers gives for the first batch's x

    multipliers, layers, gradients, Adam are above.
    """
    # begin with the first values, and what the layers give for the first x before there was any step
    factors = multipliers({name: values.shape for name, values in normal.items()}, base)
    parameters = {name: std[name] * factors[name].init * values for name, values in normal.items()}
    before = layers(batches[0][0], parameters, factors)
    adam, lrs = Adam(parameters), {name: lr * factors[name].lr for name in parameters}
    for x, y in batches:
        adam.step(gradients(x, y, parameters, factors), lrs)
    after = layers(batches[0][0], parameters, factors)
    return [float(np.sqrt(np.mean((a - b) ** 2))) for b, a in zip(before, after, strict=True)]


def growth(widths, sizes):
    """The power p with which sizes grow: that of the line through log(size) over log(width), by least squares."""
    # begin with what a power of the width is on logarithmic axes
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])
