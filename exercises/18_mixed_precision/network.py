"""The digits that ship, and the gradients of a network that has learned to read them."""

import functools

import numpy as np

SIZES = (64, 64, 32, 10)
STEPS, BATCH, SHOWN, LR = 150, 64, 512, 0.1


@functools.cache
def digits():
    """(images [n, 64] float32 in 0 … 1, labels), 8 · 8 pixels."""
    from minitorch_dist.data.digits import PATH, TRAIN
    with np.load(PATH, allow_pickle=False) as file:
        images = file["images"].reshape(len(file["images"]), 64).astype(np.float32) / 16
        return images[:TRAIN], file["labels"].astype(np.int64)[:TRAIN]


def initial(rng, sizes):
    """[weight, bias, weight, …] of a ReLU network, float32."""
    return [array for inputs, outputs in zip(sizes, sizes[1:], strict=False) for array in
            ((np.sqrt(2 / inputs) * rng.standard_normal((inputs, outputs))).astype(np.float32),
             np.zeros(outputs, np.float32))]


def backward(parameters, images, labels):
    """(the gradients by the parameters, those by what comes out of each layer before ReLU), of the mean cross-entropy.
    """
    xs, layers = [images], len(parameters) // 2
    for at in range(layers):
        z = xs[-1] @ parameters[2 * at] + parameters[2 * at + 1]
        xs.append(np.maximum(z, 0) if at < layers - 1 else z)
    exps = np.exp(z - z.max(axis=1, keepdims=True))
    ct = exps / exps.sum(axis=1, keepdims=True)
    ct[np.arange(len(labels)), labels] -= 1
    ct, grads, cts = ct / np.float32(len(labels)), [], []
    for at in reversed(range(layers)):
        grads[:0], cts[:0] = [xs[at].T @ ct, ct.sum(axis=0)], [ct]
        ct = ct @ parameters[2 * at].T * (xs[at] > 0)
    return grads, cts


@functools.cache
def gradients():
    """The gradients by the first layer's activations that aren't 0, of 512 digits, after 150 steps; float32."""
    images, labels = digits()
    rng = np.random.default_rng(18)
    parameters = initial(rng, SIZES)
    velocity = [np.zeros_like(p) for p in parameters]
    for _ in range(STEPS):
        rows = rng.integers(len(images), size=BATCH)
        for p, v, g in zip(parameters, velocity, backward(parameters, images[rows], labels[rows])[0], strict=True):
            v *= 0.9
            v += g
            p -= LR * v
    first = backward(parameters, images[:SHOWN], labels[:SHOWN])[1][0].ravel()
    return first[first != 0]


def training(rng, steps=40, batch=64):
    """A rank's case of 18.2 in which the learner's scaler trains a network.

    Gradients are those of a global batch of 2²² samples, as large as those of language models, of which each that is
    here stands for 2¹⁶: the loss is divided by 2²², and the optimizer multiplies by 2¹⁶.
    """
    images, labels = digits()
    return {"images": images, "labels": labels, "parameters": initial(rng, (64, 32, 10)), "lr": 0.1, "count": 2 ** 22,
            "batches": [rng.permutation(len(images))[:batch] for _ in range(steps)],
            "settings": {"init_scale": 2.0 ** 38, "growth_interval": 8}}


def fine_steps(rng, steps=80, batch=32):
    """The case of 18.3 in which the learner's optimizer trains a network, in steps of 0.0005."""
    images, labels = digits()
    return {"images": images, "labels": labels, "parameters": initial(rng, (64, 32, 10)), "lr": 5e-4,
            "batches": [rng.permutation(len(images))[:batch] for _ in range(steps)]}
