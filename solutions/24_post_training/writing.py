"""24.2 Writing, with keys and values kept.

A model that writes works out what may come next, takes one, and reads it. Anew each time, that is a forward of all
tokens for every token. But a position's keys and values depend on no later one. Whoever keeps them reads each token
once:

    tokens given     5 9 2 7            read together; each layer keeps 4 keys and 4 values
    then per token           3          one position is worked on; it looks at the 4 that are kept, and at itself
                               8        …
"""

from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Of a GPT. length: how many positions it has; in each layer are matrices of dim · dim for queries, keys, values
    and for what attention gives, and then dim · 4 dim and 4 dim · dim."""

    vocabulary: int
    length: int
    layers: int
    heads: int
    dim: int


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


class Model:
    """A GPT, in pieces. Each of them works on every position by itself; only `attention`, below, looks at others.

    sizes       Sizes
    parameters  {name: array}
    """

    def __init__(self, sizes, parameters):
        self.sizes, self.parameters = sizes, parameters

    def embed(self, tokens, positions):
        """(batch, time, dim), of tokens (batch, time) at positions (time,), which count from 0."""
        return self.parameters["tokens"][tokens] + self.parameters["positions"][positions]

    def project(self, layer, x):
        """Queries, keys, values of x (batch, time, dim): three arrays (batch, heads, time, dim / heads)."""
        batch, time, dim = x.shape
        both = norm(x) @ self.parameters[f"{layer}.qkv"]
        return both.reshape(batch, time, 3, self.sizes.heads, -1).transpose(2, 0, 3, 1, 4)

    def onward(self, layer, x, found):
        """What the next layer gets: x (batch, time, dim) and what attention has found, (batch, heads, time, …)."""
        x = x + found.transpose(0, 2, 1, 3).reshape(x.shape) @ self.parameters[f"{layer}.out"]
        return x + np.maximum(norm(x) @ self.parameters[f"{layer}.up"], 0) @ self.parameters[f"{layer}.down"]

    def logits(self, x):
        """(batch, time, vocabulary)."""
        return norm(x) @ self.parameters["tokens"].T


def attention(q, k, v, mask):
    """What queries (batch, heads, new, size) find at keys and values (batch, heads, time, size). mask: bool
    (new, time), True where a query may look."""
    scores = np.where(mask, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def forward(model, tokens):
    """(batch, time, vocabulary): the logits of all tokens, with nothing kept."""
    time = tokens.shape[1]
    x = model.embed(tokens, np.arange(time))
    for layer in range(model.sizes.layers):
        x = model.onward(layer, x, attention(*model.project(layer, x), np.tri(time, dtype=bool)))
    return model.logits(x)


class Cache:
    """The keys and values of what a model has read; of `batch` rows, up to model.sizes.length positions."""

    def __init__(self, model, batch):
        # begin with what must be kept: of which layers, for how many positions? And how many have been read
        sizes = model.sizes
        room = (2, sizes.layers, batch, sizes.heads, sizes.length, sizes.dim // sizes.heads)
        self.model, self.past = model, 0
        self.keys, self.values = np.empty(room)

    def read(self, tokens):
        """(batch, new, vocabulary): the logits of tokens (batch, new), which stand behind all that have been read.

        They are those that forward(model, all tokens) has for these positions, but only these are worked on. The first
        call may have many tokens, and so may any later one.
        """
        # begin with forward. At which positions are these tokens, which keys does attention get, and which of them may
        # each of these tokens look at?
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
    """(batch, time + count): tokens (batch, time), and `count` ≥ 1 more that the model writes.

    pick  pick(logits (batch, vocabulary)) -> (batch,), the next tokens; called once for each new position, in order

    Each position is worked on once, and that of the last token not at all: time + count - 1 may be model.sizes.length.
    """
    # begin with the first call of read: what does it get? And which of the logits that it gives say what comes next?
    cache, new = Cache(model, len(tokens)), tokens
    for _ in range(count):
        new = pick(cache.read(new)[:, -1])[:, None]
        tokens = np.concatenate([tokens, new], 1)
    return tokens


def operations(sizes, past, new):
    """Multiplications and as many additions, per row, of reading `new` tokens after `past` others: an int.

    Those of products of matrices only. Queries meet the keys, and weights the values, of all past + new positions, also
    those that the mask takes away. The logits are worked out for all `new` ones.
    """
    # begin with one position and one matrix of n · m: how many numbers are multiplied, how many added?
    matrices = 12 * sizes.layers * sizes.dim ** 2 + sizes.dim * sizes.vocabulary
    return 2 * new * (matrices + 2 * sizes.layers * sizes.dim * (past + new))


def to_write(sizes, time, count, kept):
    """Operations, per row, of writing `count` ≥ 1 tokens after `time` given ones; kept: with a Cache, or by a forward
    of all tokens for each."""
    # begin with count = 1: is there any difference?
    if kept:
        return operations(sizes, 0, time) + sum(operations(sizes, time + i, 1) for i in range(count - 1))
    return sum(operations(sizes, 0, time + i) for i in range(count))


def nbytes(sizes, batch, time, itemsize):
    """Bytes of the keys and values of `time` positions in `batch` rows, of numbers of itemsize bytes."""
    # begin with one position in one layer
    return 2 * sizes.layers * batch * time * sizes.dim * itemsize
