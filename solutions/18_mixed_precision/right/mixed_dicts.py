# 18.3: a dict of arrays per parameter; the corrections of both means in the factors
import numpy as np


class MixedAdam:
    def __init__(self, values, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.state = [{"master": value.copy(), "p": value.astype(np.float16), "m": 0 * value, "v": 0 * value}
                      for value in values]
        self.t, self.settings = 0, (lr, betas, eps)

    @property
    def params(self):
        return [of["p"] for of in self.state]

    @property
    def masters(self):
        return [of["master"] for of in self.state]

    def step(self, grads, scale):
        lr, (beta1, beta2), eps = self.settings
        self.t += 1
        grown = np.sqrt(1 - beta2 ** self.t)
        for of, grad in zip(self.state, grads, strict=True):
            g = np.divide(grad, scale, dtype=np.float32)
            of["m"] += (1 - beta1) * (g - of["m"])
            of["v"] *= beta2
            of["v"] += (1 - beta2) * np.square(g)
            of["master"] -= lr * grown / (1 - beta1 ** self.t) * of["m"] / (np.sqrt(of["v"]) + eps * grown)
            of["p"][...] = of["master"]
