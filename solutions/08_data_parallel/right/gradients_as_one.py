# 08.3: gradients and count in one message
import numpy as np


def average_gradients(comm, grads, count):
    """One message: the weighted gradients end to end, and the count behind them."""
    both = np.concatenate([*(grad.reshape(-1) * count for grad in grads), [count]])
    comm.all_reduce(both)
    both = both[:-1] / both[-1]
    for grad in grads:
        grad[...], both = both[:grad.size].reshape(grad.shape), both[grad.size:]
