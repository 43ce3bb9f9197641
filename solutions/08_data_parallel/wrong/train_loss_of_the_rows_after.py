# 08.4: the training is right, but the loss is of after the update
import numpy as np


def loss_and_gradients(parameters, x, y):
    w, b = parameters
    error = x @ w + b - y
    count = max(len(x), 1)
    return 0.5 * (error ** 2).sum() / count, [x.T @ error / count, error.sum(0) / count]


def train(comm, parameters, x, y, rows, lr, broadcast_parameters, average_gradients):
    broadcast_parameters(comm, parameters)
    losses = []
    for mine in rows:
        _, grads = loss_and_gradients(parameters, x[mine], y[mine])
        average_gradients(comm, grads, len(mine))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter -= lr * grad
        loss = np.array([loss_and_gradients(parameters, x[mine], y[mine])[0]])
        average_gradients(comm, [loss], len(mine))
        losses.append(loss[0])
    return losses
