"""08.4 One curve.

A small regression, y ≈ x·w + b, trained by all ranks together. With the same global batches the parameters are those
of a single process, to within rounding, on any number of ranks. That is the test of data parallelism, and the loss
alone doesn't prove it.
"""

import numpy as np


def loss_and_gradients(parameters, x, y):
    """The mean over the rows of ½|x·w + b − y|², and its gradients [by w, by b]. Without rows: 0 and zeros."""
    w, b = parameters
    error = x @ w + b - y
    count = max(len(x), 1)
    return 0.5 * (error ** 2).sum() / count, [x.T @ error / count, error.sum(0) / count]


def train(comm, parameters, x, y, rows, lr, broadcast_parameters, average_gradients):
    """Train the parameters in place, one step per entry of rows; the losses.

    The parameters are sent around once, at the start: with the same steps they stay alike.

    comm        the Communicator
    parameters  [w, b], float64, of shapes (inputs, outputs) and (outputs,); at first different on every rank
    x, y        the whole data set, the same on all ranks
    rows        for each step the rows of x that are this rank's (what your shard gave); on some ranks there may be none
    lr          learning rate: parameter ← parameter − lr · gradient
    broadcast_parameters, average_gradients    yours, of 08.2 and 08.3

    Returns for each step the loss of the global batch before the update: the mean over the samples of all ranks. Every
    rank returns the same numbers.
    """
    raise NotImplementedError("begin with the same parameters on all ranks; then per step: own rows, own gradients, "
                              "average, update")
