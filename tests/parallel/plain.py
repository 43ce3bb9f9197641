"""The same little training in plain NumPy float64, by hand: forward, closed-form gradient, SGD. Nothing of the library.

Model: x (n, 7) -> W0 (11, 7), b0 -> tanh -> W1 (5, 11), b1 -> softmax cross-entropy, mean over the global batch.
"""

import numpy as np

SAMPLES, FEATURES, HIDDEN, CLASSES = 53, 7, 11, 5


def dataset():
    """(inputs float64 (53, 7), labels (53,)): 53 = 4 · 12 + 5, so that an epoch of batches of 12 ends with one of 5."""
    random = np.random.default_rng(17)
    return random.standard_normal((SAMPLES, FEATURES)), random.integers(0, CLASSES, SAMPLES)


def initial(seed=1):
    """[W0, b0, W1, b1]."""
    random = np.random.default_rng(seed)
    shapes = [(HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
    return [random.standard_normal(shape) / np.sqrt(shape[-1]) for shape in shapes]


def loss_and_gradient(params, x, labels, count):
    """Σ over the samples of -log p[label], and its gradient by every parameter, both divided by count."""
    w0, b0, w1, b1 = params
    h = np.tanh(x @ w0.T + b0)
    z = h @ w1.T + b1
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(x)), labels]).sum() / count
    dz = (p - np.eye(CLASSES)[labels]) / count
    dh = (dz @ w1) * (1 - h * h)
    return loss, [dh.T @ x, dh.sum(axis=0), dz.T @ h, dz.sum(axis=0)]


def train(batches, lr, momentum, clip=None):
    """SGD over the given batches of indices: (losses, parameters)."""
    x, labels = dataset()
    params = initial()
    moving = [np.zeros_like(p) for p in params]
    losses = []
    for rows in batches:
        loss, grads = loss_and_gradient(params, x[rows], labels[rows], len(rows))
        losses.append(loss)
        norm = np.sqrt(sum((g * g).sum() for g in grads))
        scale = clip / (norm + 1e-6) if clip is not None and norm > clip else 1.0
        moving = [momentum * m + scale * g for m, g in zip(moving, grads, strict=True)]
        params = [p - lr * m for p, m in zip(params, moving, strict=True)]
    return losses, params
