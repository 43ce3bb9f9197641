# 05.3: of a parameter without axes nothing is remembered
class SGD:
    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.velocities = [0 * p for p in parameters]

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        for p, v, g in zip(self.parameters, self.velocities, grads, strict=True):
            v *= self.momentum
            v += g
            p -= lr * v
