# 08.4: all losses are summed in one message at the end
import numpy as np


def train(comm, parameters, x, y, rows, lr, broadcast_parameters, average_gradients):
    w, b = parameters
    broadcast_parameters(comm, (w, b))
    losses = np.zeros((len(rows), 2))
    for step, mine in enumerate(rows):
        inputs = x[mine]
        error = inputs @ w + b - y[mine]
        losses[step] = np.sum(error * error) / 2, len(mine)
        grads = [np.einsum("ni,no->io", inputs, error), np.sum(error, axis=0)]
        if len(mine):
            grads = [grad / len(mine) for grad in grads]
        average_gradients(comm, grads, len(mine))
        np.subtract(w, lr * grads[0], out=w)
        b[:] -= lr * grads[1]
    comm.all_reduce(losses)
    return (losses[:, 0] / losses[:, 1]).tolist()
