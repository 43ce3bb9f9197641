# 24.2: generate: right when it is called first
from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    vocabulary: int
    length: int
    layers: int
    heads: int
    dim: int


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


class Model:
    def __init__(self, sizes, parameters):
        self.sizes, self.parameters = sizes, parameters

    def embed(self, tokens, positions):
        return self.parameters["tokens"][tokens] + self.parameters["positions"][positions]

    def project(self, layer, x):
        batch, time, dim = x.shape
        both = norm(x) @ self.parameters[f"{layer}.qkv"]
        return both.reshape(batch, time, 3, self.sizes.heads, -1).transpose(2, 0, 3, 1, 4)

    def onward(self, layer, x, found):
        x = x + found.transpose(0, 2, 1, 3).reshape(x.shape) @ self.parameters[f"{layer}.out"]
        return x + np.maximum(norm(x) @ self.parameters[f"{layer}.up"], 0) @ self.parameters[f"{layer}.down"]

    def logits(self, x):
        return norm(x) @ self.parameters["tokens"].T


def attention(q, k, v, mask):
    scores = np.where(mask, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def forward(model, tokens):
    time = tokens.shape[1]
    x = model.embed(tokens, np.arange(time))
    for layer in range(model.sizes.layers):
        x = model.onward(layer, x, attention(*model.project(layer, x), np.tri(time, dtype=bool)))
    return model.logits(x)


class Cache:
    def __init__(self, model, batch):
        sizes = model.sizes
        room = (2, sizes.layers, batch, sizes.heads, sizes.length, sizes.dim // sizes.heads)
        self.model, self.past = model, 0
        self.keys, self.values = np.empty(room)

    def read(self, tokens):
        model, past = self.model, self.past
        self.past += tokens.shape[1]
        x = model.embed(tokens, np.arange(past, self.past))
        mask = np.tri(tokens.shape[1], self.past, past, dtype=bool)
        for layer in range(len(self.keys)):
            q, k, v = model.project(layer, x)
            self.keys[layer, :, :, past:self.past] = k
            self.values[layer, :, :, past:self.past] = v
            kept = (each[layer, :, :, :self.past] for each in (self.keys, self.values))
            x = model.onward(layer, x, attention(q, *kept, mask))
        return self.model.logits(x)


def generate(model, tokens, count, pick):
    if not hasattr(model, "cache"):
        model.cache = Cache(model, len(tokens))
    cache, new = model.cache, tokens
    for _ in range(count):
        new = pick(cache.read(new)[:, -1])[:, None]
        tokens = np.concatenate([tokens, new], 1)
    return tokens


def operations(sizes, past, new):
    matrices = 12 * sizes.layers * sizes.dim ** 2 + sizes.dim * sizes.vocabulary
    return 2 * new * (matrices + 2 * sizes.layers * sizes.dim * (past + new))


def to_write(sizes, time, count, kept):
    if kept:
        return operations(sizes, 0, time) + sum(operations(sizes, time + i, 1) for i in range(count - 1))
    return sum(operations(sizes, 0, time + i) for i in range(count))


def nbytes(sizes, batch, time, itemsize):
    return 2 * sizes.layers * batch * time * sizes.dim * itemsize
