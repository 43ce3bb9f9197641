"""One training step of LeNet and of a small GPT, ours and torch's: forward, cross-entropy, backward, AdamW.

Each maker returns a function without arguments that makes one step and returns its loss. Both start from the same
weights, so that their losses can be compared before anything is timed.
"""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn, optim

LR, DECAY = 1e-3, 0.01
GPT = {"vocabulary": 65, "length": 64, "layers": 4, "heads": 4, "dim": 128}
TITLES = {"lenet": "LeNet, batch 64", "gpt": "GPT: 4 layers, d = 128, T = 64, batch 16"}


def model_of(name):
    """Ours, from a fixed seed."""
    mt.manual_seed(0)
    return nn.lenet() if name == "lenet" else nn.GPT(**GPT)


def batch_of(name, batch=None):
    """(inputs, labels), made up."""
    draw = np.random.default_rng(0)
    if name == "lenet":
        n = 64 if batch is None else batch
        return draw.random((n, 784), np.float32), draw.integers(0, 10, n)
    n = 16 if batch is None else batch
    return draw.integers(0, 65, (2, n, GPT["length"]))


def ours(name, batch=None):
    """(a step of ours, the same without the optimizer)."""
    model, (x, labels) = model_of(name), batch_of(name, batch)
    optimizer = optim.AdamW(model.parameters(), LR, weight_decay=DECAY)

    def passes():
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(x), labels, reduction="sum") / max(1, labels.size)
        loss.backward()
        return loss

    def step():
        loss = passes()
        optimizer.step()
        return loss.item()
    return step, passes


def theirs(name):
    """A step of torch eager."""
    import torch
    torch.set_num_threads(1)
    functional = torch.nn.functional
    model = (_lenet if name == "lenet" else _gpt)(torch, functional)
    ours = {key: torch.from_numpy(value) for key, value in model_of(name).state_dict().items()}
    model.load_state_dict(ours)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY)
    x, labels = (torch.from_numpy(a) for a in batch_of(name))

    def step():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def _lenet(torch, functional):
    class Images(torch.nn.Module):
        def forward(self, x):
            return x.reshape(-1, 1, 28, 28)
    t = torch.nn
    return t.Sequential(Images(), t.Conv2d(1, 6, 5, padding=2), t.ReLU(), t.MaxPool2d(2), t.Conv2d(6, 16, 5), t.ReLU(),
                        t.MaxPool2d(2), t.Flatten(), t.Linear(400, 120), t.ReLU(), t.Linear(120, 84), t.ReLU(),
                        t.Linear(84, 10))


def _gpt(torch, functional):
    heads, dim = GPT["heads"], GPT["dim"]

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

        def forward(self, x):
            batch, time, _ = x.shape
            q, k, v = self.qkv(x).reshape(batch, time, 3 * heads, -1).transpose(1, 2).split(heads, 1)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(batch, time, dim))

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attention, self.norm2 = torch.nn.LayerNorm(dim), Attention(), torch.nn.LayerNorm(dim)
            self.mlp = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim), torch.nn.GELU("tanh"),
                                           torch.nn.Linear(4 * dim, dim))

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(GPT["vocabulary"], dim)
            self.position = torch.nn.Embedding(GPT["length"], dim)
            self.blocks = torch.nn.Sequential(*(Block() for _ in range(GPT["layers"])))
            self.norm = torch.nn.LayerNorm(dim)

        def forward(self, tokens):
            x = self.embed(tokens) + self.position.weight[:tokens.shape[1]]
            return functional.linear(self.norm(self.blocks(x)), self.embed.weight)
    return Model()
