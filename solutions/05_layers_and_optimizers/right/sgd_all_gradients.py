# 05.3: all gradients are kept, and the velocity is summed anew
class SGD:
    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.history = []

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        self.history.append([g.copy() for g in grads])
        for i, p in enumerate(self.parameters):
            p[...] = p - lr * sum(self.momentum ** age * old[i] for age, old in enumerate(self.history[::-1]))
