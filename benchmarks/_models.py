"""One training step of LeNet and of two GPTs, ours and torch's: forward, cross-entropy, backward, AdamW.

Each maker returns a function without arguments that makes one step and returns its loss. Both start from the same
weights, so that their losses can be compared before anything is timed.
"""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn, optim

LR, DECAY = 1e-3, 0.01
# A small one, which a GPU finishes faster than its host can ask for it, and GPT-2's size (Radford et al. 2019; the
# vocabulary is rounded up to a multiple of 64).
GPTS = {"gpt": {"vocabulary": 65, "length": 64, "layers": 4, "heads": 4, "dim": 128},
        "gpt2": {"vocabulary": 50304, "length": 512, "layers": 12, "heads": 12, "dim": 768}}
BATCHES = {"lenet": 64, "gpt": 16, "gpt2": 8}


def shrink():
    """Make the GPTs and all batches small: for a run that shows only whether everything works."""
    BATCHES.update(dict.fromkeys(BATCHES, 2))
    for size in GPTS.values():
        size.update(vocabulary=65, length=16, layers=1, heads=2, dim=32)


def title(name):
    """The model and its batch, for people."""
    if name == "lenet":
        return f"LeNet, batch {BATCHES[name]}"
    size = GPTS[name]
    return f"GPT: {size['layers']} layers, d = {size['dim']}, T = {size['length']}, batch {BATCHES[name]}"


def model_of(name):
    """Ours, from a fixed seed."""
    mt.manual_seed(0)
    return nn.lenet() if name == "lenet" else nn.GPT(**GPTS[name])


def batch_of(name, batch=None):
    """(inputs, labels), made up."""
    draw = np.random.default_rng(0)
    n = BATCHES[name] if batch is None else batch
    if name == "lenet":
        return draw.random((n, 784), np.float32), draw.integers(0, 10, n)
    return draw.integers(0, GPTS[name]["vocabulary"], (2, n, GPTS[name]["length"]))


def ours(name, batch=None):
    """(a step of ours, its passes forward and backward, its optimizer's update by the gradients that are there)."""
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
    return step, passes, optimizer.step


def theirs(name):
    """A step of torch eager."""
    import torch
    torch.set_num_threads(1)
    functional = torch.nn.functional
    model = torch_model(name, torch)
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


def torch_model(name, torch):
    """The same model in torch, its parameters named alike."""
    functional = torch.nn.functional
    return _lenet(torch) if name == "lenet" else _gpt(torch, functional, **GPTS[name])


def _lenet(torch):
    class Images(torch.nn.Module):
        def forward(self, x):
            return x.reshape(-1, 1, 28, 28)
    t = torch.nn
    return t.Sequential(Images(), t.Conv2d(1, 6, 5, padding=2), t.ReLU(), t.MaxPool2d(2), t.Conv2d(6, 16, 5), t.ReLU(),
                        t.MaxPool2d(2), t.Flatten(), t.Linear(400, 120), t.ReLU(), t.Linear(120, 84), t.ReLU(),
                        t.Linear(84, 10))


def _gpt(torch, functional, vocabulary, length, layers, heads, dim):
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
            self.embed = torch.nn.Embedding(vocabulary, dim)
            self.position = torch.nn.Embedding(length, dim)
            self.blocks = torch.nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = torch.nn.LayerNorm(dim)

        def forward(self, tokens):
            x = self.embed(tokens) + self.position.weight[:tokens.shape[1]]
            return functional.linear(self.norm(self.blocks(x)), self.embed.weight)
    return Model()
