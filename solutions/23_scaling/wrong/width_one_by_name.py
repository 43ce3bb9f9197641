# 23.1: by its shapes, not by its name
from typing import NamedTuple

import numpy as np

LAYERS = "input", "hidden", "output"
BETAS, EPS = (0.9, 0.99), 1e-20


class Factors(NamedTuple):
    init: float = 1.0
    lr: float = 1.0
    output: float = 1.0


def multipliers(shapes, base):
    found = {}
    for name, shape in shapes.items():
        a, b = shape[0] / base[name][0], shape[-1] / base[name][-1]
        found[name] = Factors()
        if len(shape) == 2 and not name.startswith("input"):
            found[name] = Factors(a ** -0.5, 1 / a) if b != 1 else Factors(output=1 / a)
    return found


def layers(x, parameters, factors):
    found = []
    for name in LAYERS:
        x = factors[f"{name}.weight"].output * (x @ parameters[f"{name}.weight"]) + parameters[f"{name}.bias"]
        found.append(x)
        x = np.tanh(x)
    return found


def gradients(x, y, parameters, factors):
    values, grads = layers(x, parameters, factors), {}
    inputs = [x, *map(np.tanh, values[:-1])]
    grad = (values[-1] - y) / len(x)
    for name, value in zip(LAYERS[::-1], inputs[::-1], strict=True):
        weight, output = parameters[f"{name}.weight"], factors[f"{name}.weight"].output
        grads[f"{name}.weight"], grads[f"{name}.bias"] = output * (value.T @ grad), grad.sum(0)
        grad = output * (grad @ weight.T) * (1 - value ** 2)
    return grads


class Adam:
    def __init__(self, parameters):
        self.parameters, self.steps = parameters, 0
        self.m, self.v = ({name: np.zeros_like(p) for name, p in parameters.items()} for _ in range(2))

    def step(self, grads, lrs):
        self.steps += 1
        for name, p in self.parameters.items():
            self.m[name] = BETAS[0] * self.m[name] + (1 - BETAS[0]) * grads[name]
            self.v[name] = BETAS[1] * self.v[name] + (1 - BETAS[1]) * grads[name] ** 2
            m, v = self.m[name] / (1 - BETAS[0] ** self.steps), self.v[name] / (1 - BETAS[1] ** self.steps)
            p -= lrs[name] * m / (np.sqrt(v) + EPS)


def changes(normal, std, base, lr, batches):
    factors = multipliers({name: values.shape for name, values in normal.items()}, base)
    parameters = {name: std[name] * factors[name].init * values for name, values in normal.items()}
    before = layers(batches[0][0], parameters, factors)
    adam, lrs = Adam(parameters), {name: lr * factors[name].lr for name in parameters}
    for x, y in batches:
        adam.step(gradients(x, y, parameters, factors), lrs)
    after = layers(batches[0][0], parameters, factors)
    return [float(np.sqrt(np.mean((a - b) ** 2))) for b, a in zip(before, after, strict=True)]


def growth(widths, sizes):
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])
