"""A small GPT in NumPy, all positions at once: what packed rows are tried with, and what is read from a cache."""

import numpy as np


def parameters(rng, vocabulary, length, layers, dim):
    """{name: array} of 24.2's Model, not small: attention is to make a difference."""
    found = {"tokens": rng.standard_normal((vocabulary, dim)), "positions": rng.standard_normal((length, dim))}
    for layer in range(layers):
        for name, shape in {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)
                            }.items():
            found[f"{layer}.{name}"] = 1.5 * rng.standard_normal(shape) / np.sqrt(shape[0])
    return found


def normed(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5)


def logits(p, heads, tokens, positions=None, visible=None):
    """(batch, time, vocabulary): of tokens (batch, time) at positions of that shape; visible (batch, time, time)."""
    batch, time = tokens.shape
    x = p["tokens"][tokens] + p["positions"][np.arange(time) if positions is None else positions]
    hidden = ~(np.tri(time, dtype=bool)[None] if visible is None else visible)
    for layer in range(sum(name.endswith(".qkv") for name in p)):
        q, k, v = (each.reshape(batch, time, heads, -1) for each in np.split(normed(x) @ p[f"{layer}.qkv"], 3, -1))
        scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
        scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(x.shape) @ p[f"{layer}.out"]
        x = x + np.maximum(normed(x) @ p[f"{layer}.up"], 0) @ p[f"{layer}.down"]
    return normed(x) @ p["tokens"].T


def losses(scores, targets):
    """(batch, time): of each target, 0 where it is -100."""
    top = scores.max(-1, keepdims=True)
    log_probs = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
    found = -np.take_along_axis(log_probs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets == -100, 0.0, found)
