# 08.4: the parameters are averaged in every step
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
        loss, grads = loss_and_gradients(parameters, x[mine], y[mine])
        sums = np.array([loss * len(mine), len(mine)])
        comm.all_reduce(sums)
        losses.append(sums[0] / sums[1])
        average_gradients(comm, grads, len(mine))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter -= lr * grad
            comm.all_reduce(parameter, op="mean")
    return losses
