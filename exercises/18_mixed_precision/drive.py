"""How the answers of this chapter are called."""

import tracemalloc
from contextlib import contextmanager

import numpy as np


def round_to(learner, inputs, run):
    """Both functions of the file; the signs apart, since -0.0 == 0.0."""
    x, *form = inputs["x"], inputs["exponent_bits"], inputs["mantissa_bits"]
    with np.errstate(all="ignore"):
        result = learner(x, *form)
    found = {"limits": run.module.limits(*form), "result": result, "x": x,
             "dtype": str(getattr(result, "dtype", type(result).__name__))}
    array = np.asarray(result)
    return found | ({"signs": np.signbit(array) & ~np.isnan(array)} if array.dtype.kind == "f" else {})


# ---------------------------------------------------------------- 18.2

class Optimizer:
    """What the learner's scaler sees of one."""

    def __init__(self):
        self.grads, self.used, self.again = [], None, 0

    def step(self):
        self.again += self.used is not None
        self.used = [np.array(g) for g in self.grads]


def GradScaler(learner, inputs, run):
    if "images" in inputs:
        return train_scaled(learner, inputs, run.comm)
    scaler, optimizer, loss = learner(run.comm, **inputs["settings"]), Optimizer(), 2.5
    found = {name: [] for name in ("scaled", "seen", "used", "scales", "refused", "dtypes", "made", "late")}
    for t, (grads, looked_at) in enumerate(zip(inputs["grads"], inputs["looked_at"], strict=True)):
        with np.errstate(all="ignore"):
            scaled = scaler.scale((np.float16 if inputs["half"] else np.float32)(loss))
            found["scaled"].append(float(scaled))
            found["made"] += [str(d) for d in [getattr(scaled, "dtype", np.float32)] if d != np.float32]
            factor = np.float32(found["scaled"][-1] / loss)
            optimizer.grads, optimizer.used = [(g * factor).astype(np.float16) for g in grads], None
            refused = clip(scaler, optimizer, again=t == 2, seen=found["seen"] if looked_at else []) \
                if inputs["clip"] else None
            if not looked_at:
                found["seen"].append(None)
            scaler.step(optimizer)
            if inputs["clip"] and t == 4:
                found["late"].append(refuses(scaler, optimizer))
            scaler.update()
        found["refused"].append(refused)
        found["used"].append(optimizer.used)
        found["dtypes"] += {str(g.dtype) for g in optimizer.used or []}
        found["scales"].append(float(scaler.get_scale()))
    return found | {"again": optimizer.again}


def refuses(scaler, optimizer):
    """Whether unscale_ raises RuntimeError."""
    try:
        scaler.unscale_(optimizer)
    except RuntimeError:
        return True
    return False


def clip(scaler, optimizer, again, seen):
    """As who clips does: unscale_, look, halve. Whether a second unscale_ raises RuntimeError; None if not tried."""
    scaler.unscale_(optimizer)
    refused = refuses(scaler, optimizer) if again else None
    seen.append([np.array(g) for g in optimizer.grads])
    optimizer.grads = [g * g.dtype.type(0.5) for g in optimizer.grads]
    return refused


# ---------------------------------------------------------------- a training in float16

def to_16(x):
    """Rounded to float16, in float32: what is computed is rounded, as it would be stored."""
    return x.astype(np.float16).astype(np.float32)


def to_bfloat16(x):
    """Rounded to bfloat16, in float32. (By Veltkamp's splitting, which is for numbers far from both ends.)"""
    wide = x * np.float32(2 ** 16 + 1)
    return wide - (wide - x)


def as_is(x):
    return x


def backward(parameters, images, labels, factor, low):
    """(the loss's sum, the gradients times factor) of a ReLU network with one hidden layer."""
    w, b, u, c = (low(p) for p in parameters)
    hidden = np.maximum(low(images @ w + b), 0)
    z = low(hidden @ u + c)
    z = z - z.max(axis=1, keepdims=True)
    exps = np.exp(z)
    p = exps / exps.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(np.maximum(p[rows, labels], 1e-30)).sum())
    p[rows, labels] -= 1
    ct = low(p * np.float32(factor))
    back = low(ct @ u.T * (hidden > 0))
    return loss, [low(images.T @ back), low(back.sum(axis=0)), low(hidden.T @ ct), low(ct.sum(axis=0))]


class Momentum(Optimizer):
    """SGD with momentum; the gradients are `times` too small."""

    def __init__(self, parameters, lr, times):
        super().__init__()
        self.parameters, self.lr, self.times = parameters, lr, np.float32(times)
        self.velocities = [np.zeros_like(p) for p in parameters]

    def step(self):
        for p, v, g in zip(self.parameters, self.velocities, self.grads, strict=True):
            v *= np.float32(0.9)
            v += np.float32(self.times) * g
            p -= np.float32(self.lr) * v
        self.used = True


def train_scaled(learner, inputs, comm):
    """The same training in float32 and in float16, which rank 0 does alone, and in float16 with the learner's scaler.
    """
    scaler = learner(comm, **inputs["settings"])
    found = {name: train(inputs, low)["losses"] for name, low in (("float32", as_is), ("float16", to_16))
             if comm.rank == 0}
    return found | train(inputs, to_16, scaler, comm)


def train(inputs, low, scaler=None, comm=None):
    """The mean loss of every step, the factors, and which steps were left out. With comm: the ranks share a batch."""
    parameters = [p.copy() for p in inputs["parameters"]]
    sgd = Momentum(parameters, inputs["lr"], inputs["count"] / len(inputs["batches"][0]))
    losses, factors, left_out = [], [], []
    for batch in inputs["batches"]:
        rows = batch[comm.rank::comm.size] if comm else batch
        factor = float(scaler.scale(np.float32(1))) if scaler else 1.0
        with np.errstate(all="ignore"):
            loss, grads = backward(parameters, inputs["images"][rows], inputs["labels"][rows],
                                   factor / inputs["count"], low)
            flat = np.concatenate([np.ravel(g) for g in grads] + [[loss]]).astype(np.float32)
            if comm:
                comm.all_reduce(flat)
            pieces = np.split(flat[:-1], np.cumsum([p.size for p in parameters])[:-1])
            kept = np.float16 if low is to_16 else np.float32
            sgd.grads = [g.reshape(p.shape).astype(kept) for g, p in zip(pieces, parameters, strict=True)]
            sgd.used = None
            if scaler:
                scaler.step(sgd)
                scaler.update()
            else:
                sgd.step()
        losses.append(float(flat[-1]) / len(batch))
        factors.append(factor)
        left_out.append(sgd.used is None)
    return {"losses": losses, "factors": factors, "left_out": left_out}


# ---------------------------------------------------------------- 18.3

@contextmanager
def traced():
    """Inside, NumPy's memory is counted by what it was asked for: whoever holds it, and wherever."""
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


def held():
    """Bytes of the arrays that were made inside traced() and are alive."""
    of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([of_numpy]).traces)


def MixedAdam(learner, inputs, run):
    if "images" in inputs:
        return train_mixed(learner, inputs)
    if "elements" in inputs:
        return {"held": held_by(learner, inputs["elements"])}
    values = [value.copy() for value in inputs["values"]]
    settings = inputs["settings"] | {"betas": tuple(inputs["settings"]["betas"])}
    optimizer = learner(values, **settings)
    model = list(optimizer.params)
    found = {"params": [], "masters": [], "apart": []}
    with np.errstate(all="ignore"):
        for grads, scale in zip(inputs["grads"], inputs["scales"], strict=True):
            optimizer.step(grads, scale)
            masters = optimizer.masters
            found["params"].append([p.astype(np.float64) for p in model])
            found["masters"].append([m.astype(np.float64) for m in masters])
            found["apart"].append(sum(int((~np.isclose(p, m.astype(np.float16), 0, 0, equal_nan=True)).sum())
                                      for p, m in zip(model, masters, strict=True)))
    return found | {"values": values, "grads": inputs["grads"], "moved": [
        sum(a is not b for a, b in zip(model, optimizer.params, strict=True))],
        "dtypes": [str(x[0].dtype) for x in (optimizer.params, optimizer.masters)],
        "halves": sum(getattr(x, "dtype", None) == np.float16 and all(x is not p for p in optimizer.params)
                      for kept in getattr(optimizer, "__dict__", {}).values()
                      for x in (kept if isinstance(kept, list | tuple) else ()))}


def held_by(learner, elements):
    """Bytes per parameter that an optimizer holds after two steps."""
    values = [np.ones(elements, np.float32)]
    with traced():
        optimizer = learner(values)
        for scale in (4.0, 2.0):
            optimizer.step([np.ones(elements, np.float16)], scale)
        found = held() / elements
    del optimizer
    return found


class Alone:
    """Adam whose parameters are all there is, rounded by `low` after each step. It counts the updates that are lost."""

    def __init__(self, values, lr, low):
        self.params, self.lr, self.low, self.t = [low(value.copy()) for value in values], lr, low, 0
        self.means = [[np.zeros_like(value), np.zeros_like(value)] for value in values]
        self.lost = []

    def step(self, grads, scale):
        self.t += 1
        lost = total = 0
        for p, (m, v), g in zip(self.params, self.means, grads, strict=True):
            g = g.astype(np.float32) / np.float32(scale)
            m += np.float32(0.1) * (g - m)
            v += np.float32(0.001) * (g * g - v)
            update = self.lr * (m / (1 - 0.9 ** self.t)) / (np.sqrt(v / (1 - 0.999 ** self.t)) + 1e-8)
            new = self.low(p - update)
            lost, total = lost + int(((new == p) & (update != 0)).sum()), total + int((update != 0).sum())
            p[...] = new
        self.lost.append(lost / max(total, 1))


def train_mixed(learner, inputs):
    """The same training with parameters of each format alone, and with the learner's optimizer."""
    found = {}
    for name, low in (("float32", as_is), ("float16", to_16), ("bfloat16", to_bfloat16), ("mine", None)):
        optimizer = Alone(inputs["parameters"], inputs["lr"], low) if low else \
            learner(inputs["parameters"], lr=inputs["lr"])
        params, scale, losses = list(optimizer.params), 1024.0, []
        for rows in inputs["batches"]:
            loss, grads = backward([p.astype(np.float32) for p in params], inputs["images"][rows],
                                   inputs["labels"][rows], scale / len(rows), as_is)
            optimizer.step([g.astype(np.float16) for g in grads], scale)
            losses.append(loss / len(rows))
        found[name] = {"losses": losses, "lost": optimizer.lost if low else []}
    return found
