# 05.3: two optimizers share their velocities
class SGD:
    velocities = {}

    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            self.velocities[i] = self.momentum * self.velocities.get(i, 0.0) + g
            p -= lr * self.velocities[i]
