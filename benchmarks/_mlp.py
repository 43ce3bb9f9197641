"""One training step of a multi-layer perceptron, ours and the rivals': forward, cross-entropy, backward, Adam.

Each maker takes the widths and a batch and returns a function without arguments that makes one step and returns
its loss. All start from the same weights, so that their losses can be compared before anything is timed. Importing
this file loads NumPy alone, so that a rival's process holds nothing of ours.
"""

import numpy as np

# name: (widths, samples of the global batch)
MODELS = {
    "small": ((784, 128, 64, 10), 128),
    "middle": ((784, 512, 512, 10), 128),
    "wide": ((784, 2048, 2048, 10), 512),
}
LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


def title(name):
    """'middle: 784-512-512-10, batch 128'."""
    widths, batch = MODELS[name]
    return f"{name}: {'-'.join(map(str, widths))}, batch {batch}"


def batch_of(name):
    """(inputs, labels) of the model's batch, made up."""
    widths, batch = MODELS[name]
    draw = np.random.default_rng(0)
    return draw.random((batch, widths[0]), np.float32), draw.integers(0, widths[-1], batch)


def weights(widths):
    """[(weight (out, in), bias)], He-initialised: what everybody starts from."""
    draw = np.random.default_rng(1)
    return [((draw.standard_normal((out, inside)) * np.sqrt(2 / inside)).astype(np.float32),
             np.zeros(out, np.float32)) for inside, out in zip(widths, widths[1:], strict=False)]


# ---------------------------------------------------------------- ours

def our_model(widths):
    """An nn.Sequential with the common weights."""
    import minitorch_dist as mt
    from minitorch_dist import nn
    layers = []
    for w, b in weights(widths):
        layer = nn.Linear(w.shape[1], w.shape[0])
        with mt.no_grad():
            layer.weight[...] = w
            layer.bias[...] = b
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def ours(model, x, labels, count=None, compiled=False):
    """A step of ours. `count`: samples in the GLOBAL batch, where this is a part of it; compiled: by mt.compile."""
    import minitorch_dist as mt
    from minitorch_dist import nn, optim
    optimizer = optim.Adam(model.parameters(), LR)
    model, optimizer = map(mt.compile, (model, optimizer)) if compiled else (model, optimizer)
    count = count or len(labels)

    def step():
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(x), labels, reduction="sum") / count
        loss.backward()
        optimizer.step()
        return loss.item()
    x = mt.from_numpy(x)
    return step


# ---------------------------------------------------------------- torch

def torch_model(widths):
    """The same as a torch.nn.Sequential."""
    import torch
    torch.set_num_threads(1)
    layers = []
    for w, b in weights(widths):
        layer = torch.nn.Linear(w.shape[1], w.shape[0])
        layer.load_state_dict({"weight": torch.from_numpy(w), "bias": torch.from_numpy(b)})
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def torch_step(model, x, labels, fused=None, compiled=False):
    """A step of torch, eager or with the forward and backward pass compiled."""
    import torch
    optimizer = torch.optim.Adam(model.parameters(), LR, fused=fused)
    x, labels = torch.from_numpy(x), torch.from_numpy(labels)

    def loss_of(x, labels):
        return torch.nn.functional.cross_entropy(model(x), labels)
    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step():
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


# ---------------------------------------------------------------- jax

def jax_step(widths, x, labels):
    """A step of jax: all of it in one jitted function that may reuse its arguments' memory."""
    from functools import partial

    import jax
    import jax.numpy as jnp

    def loss_of(params, x, labels):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w.T + b)
        w, b = params[-1]
        logits = jax.nn.log_softmax(x @ w.T + b)
        return -logits[jnp.arange(len(labels)), labels].mean()

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def advance(params, m, v, t, x, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, x, labels)
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, grads)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, grads)
        correction = jnp.sqrt(1 - BETA2 ** t)
        rate = LR * correction / (1 - BETA1 ** t)
        params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPS * correction), params, m, v)
        return params, m, v, t + 1, loss

    params = jax.tree.map(jnp.array, weights(widths))
    state = [params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.float32(1)]
    x, labels = jnp.asarray(x), jnp.asarray(labels)

    def step():
        *state[:], loss = advance(*state, x, labels)
        return float(loss)
    return step


# ---------------------------------------------------------------- NumPy by hand

def adam_in_place(p, g, m, v, s, t):
    """One parameter's Adam without a temporary: twelve passes, each with out=."""
    correction = (1 - BETA2 ** t) ** 0.5
    m *= BETA1
    np.multiply(g, 1 - BETA1, out=s)
    m += s
    v *= BETA2
    np.multiply(g, g, out=s)
    s *= 1 - BETA2
    v += s
    np.sqrt(v, out=s)
    s += EPS * correction
    np.divide(m, s, out=s)
    s *= LR * correction / (1 - BETA1 ** t)
    p -= s


def adam_plain(p, g, m, v, s, t):
    """One parameter's Adam as the formulas stand in the paper, with the temporaries that they make."""
    m[...] = BETA1 * m + (1 - BETA1) * g
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    p -= LR * (m / (1 - BETA1 ** t)) / (np.sqrt(v / (1 - BETA2 ** t)) + EPS)


def numpy_step(widths, x, labels, adam=adam_in_place, count=None, reduce=lambda grads: None):
    """A step as a good engineer writes it for this one model: no framework, in place where that's natural.

    count: samples in the GLOBAL batch, where this is a part of it; reduce(grads): sums them over the ranks, in place.
    """
    count = count or len(labels)
    params = [array for pair in weights(widths) for array in pair]
    m, v, scratch = ([np.zeros_like(p) for p in params] for _ in range(3))
    rows, last = np.arange(len(labels)), len(widths) - 2
    t = 0

    def step():
        nonlocal t
        inputs = [x]                            # of each layer
        for i in range(last + 1):
            z = inputs[i] @ params[2 * i].T
            z += params[2 * i + 1]
            inputs.append(np.maximum(z, 0, out=z) if i < last else z)
        g = inputs.pop()
        g -= g.max(axis=1, keepdims=True)
        right = g[rows, labels]
        np.exp(g, out=g)
        total = g.sum(axis=1, keepdims=True)
        loss = (np.log(total[:, 0]) - right).sum() / count
        g /= total
        g[rows, labels] -= 1
        g /= count
        grads = [None] * len(params)
        for i in reversed(range(last + 1)):
            grads[2 * i] = g.T @ inputs[i]
            grads[2 * i + 1] = g.sum(axis=0)
            if i:
                g = g @ params[2 * i]
                g *= inputs[i] > 0
        reduce(grads)
        t += 1
        for p, g, m_, v_, s in zip(params, grads, m, v, scratch, strict=True):
            adam(p, g, m_, v_, s, t)
        return float(loss)
    return step


def products(widths, x):
    """The matrix products of forward and backward alone, into memory that is there already: the floor."""
    ws = [w for w, _ in weights(widths)]
    n = len(x)
    inputs = [x] + [np.ones((n, w.shape[0]), np.float32) for w in ws]
    cotangents = [np.ones_like(a) for a in inputs]
    grads = [np.empty_like(w) for w in ws]

    def step():
        for i, w in enumerate(ws):
            np.matmul(inputs[i], w.T, out=inputs[i + 1])
        for i in reversed(range(len(ws))):
            np.matmul(cotangents[i + 1].T, inputs[i], out=grads[i])
            if i:
                np.matmul(cotangents[i + 1], ws[i], out=cotangents[i])
                cotangents[i].fill(1e-3)        # else they grow without bound from step to step
    return step
