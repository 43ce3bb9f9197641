"""mt.compile on one pinned core: chains of ops beside eager, torch, torch.compile and jax.jit; training steps; how long
compiling takes.

    python benchmarks/compiled.py [chains] [steps]
"""

import os
import tempfile
import time

from _harness import Report, compare, installed, named, one_core, result

one_core()

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import nn, optim  # noqa: E402

PARTS = ("chains", "steps")
ROWS, COLUMNS = 2048, 2048
AIMS = {"gelu(x·w + b), written out": 2.0, "layer norm": 2.0, "gpt": 1.0, "lenet": 1.0}
ROUNDS = 20


# ---------------------------------------------------------------- chains: the same lines for every library

def gelu(lib, x, w, b):
    u = x * w + b
    return 0.5 * u * (1 + lib.tanh(0.7978845608 * (u + 0.044715 * u * u * u)))


def layer_norm(lib, x, w, b):
    m = x.mean(-1, keepdims=True)
    d = x - m
    return d / lib.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * w + b


def softmax(lib, x, w, b):
    e = lib.exp(x - lib.amax(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True) * w + b


CHAINS = {"gelu(x·w + b), written out": gelu, "layer norm": layer_norm, "softmax": softmax}


class Ours:
    """Our names as the chains call them."""

    tanh, exp, sqrt = staticmethod(mt.tanh), staticmethod(mt.exp), staticmethod(mt.sqrt)

    @staticmethod
    def amax(x, axis, keepdims):
        return mt.max(x, axis, keepdims)


def inputs():
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape).astype(np.float32) for shape in ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))]


def passes(f, backward):
    """Ours: a call of f, and its backward pass."""
    values = [mt.tensor(x, requires_grad=backward) for x in inputs()]
    ct = mt.ones((ROWS, COLUMNS))

    def run():
        y = f(*values)
        if backward:
            for v in values:
                v.grad = None
            y.backward(ct)
        return y
    return run


def of_torch(chain, backward, compiled):
    """The same in torch."""
    import torch
    torch.set_num_threads(1)

    def f(x, w, b):
        return chain(torch, x, w, b)
    f = torch.compile(f) if compiled else f
    values = [torch.from_numpy(x).requires_grad_(backward) for x in inputs()]
    ct = torch.ones(ROWS, COLUMNS)

    def run():
        y = f(*values)
        if backward:
            for v in values:
                v.grad = None
            y.backward(ct)
        return y
    return run


def of_jax(chain, backward):
    """The same by jax.jit."""
    import jax
    values = [jax.numpy.asarray(x) for x in inputs()]
    ct = jax.numpy.ones((ROWS, COLUMNS), np.float32)

    def both(*values):
        y, pull = jax.vjp(lambda x, w, b: chain(jax.numpy, x, w, b), *values)
        return y, pull(ct)
    f = jax.jit(both if backward else lambda x, w, b: chain(jax.numpy, x, w, b))
    return lambda: jax.block_until_ready(f(*values))


def chains(report):
    for backward in (False, True):
        rows = []
        for name, chain in CHAINS.items():
            def f(x, w, b, chain=chain):
                return chain(Ours, x, w, b)
            runs = {"eager": passes(f, backward), "compiled": passes(mt.compile(f, emit="c"), backward),
                    "compiled, tiles": passes(mt.compile(f, emit="numpy"), backward)}
            if installed(report.skipped, "torch"):
                runs["torch"] = of_torch(chain, backward, False)
                if "torch.compile" not in report.skipped:
                    try:
                        runs["torch.compile"] = of_torch(chain, backward, True)
                        runs["torch.compile"]()
                    except Exception as error:      # it needs a C++ compiler and Python's headers
                        report.skipped["torch.compile"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                        del runs["torch.compile"]
            if installed(report.skipped, "jax"):
                runs["jax.jit"] = of_jax(chain, backward)
            seconds = compare(runs, rounds=ROUNDS)
            rows.append({f"{ROWS}×{COLUMNS} float32": name} | {
                who: f"{1e3 * s.best:.2f} ms" for who, s in seconds.items()} | {
                "× eager": f"{seconds['eager'].best / seconds['compiled'].best:.1f}"})
            if name in AIMS and backward:
                ratio = seconds["eager"].best / seconds["compiled"].best
                report.aim(f"{name}, both passes: compiled against eager", f"≥ {AIMS[name]} ×", f"{ratio:.1f} ×",
                           ratio >= AIMS[name])
        report.table("forward and backward" if backward else "forward", rows)


# ---------------------------------------------------------------- training steps

def step_of(name, compiled):
    """A training step of _models' model."""
    import _models
    model, (x, labels) = _models.model_of(name), _models.batch_of(name)
    optimizer = optim.AdamW(model.parameters(), _models.LR, weight_decay=_models.DECAY)

    def loss_of(x, labels):
        return nn.cross_entropy(model(x), labels, reduction="sum") / labels.size
    if compiled:
        loss_of = mt.compile(loss_of, emit="c")
        mt.compile(optimizer, emit="c")

    def step():
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def torch_compiled(name):
    """A training step of torch.compile."""
    import _models
    import torch
    torch.set_num_threads(1)
    model = _models.torch_model(name, torch)
    optimizer = torch.optim.AdamW(model.parameters(), _models.LR, weight_decay=_models.DECAY)
    x, labels = (torch.from_numpy(a) for a in _models.batch_of(name))

    @torch.compile
    def loss_of(x, labels):
        return torch.nn.functional.cross_entropy(model(x).flatten(0, -2), labels.flatten())

    def step():
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def steps(report):
    import _models
    rows, times = [], []
    for name in ("lenet", "gpt"):
        runs = {"eager": step_of(name, False), "compiled": step_of(name, True)}
        with tempfile.TemporaryDirectory() as folder:       # nothing is there that was compiled before
            before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), folder
            seconds = []
            for _ in range(2):      # in an empty cache, and again
                fresh, start = step_of(name, True), time.perf_counter()
                fresh()
                seconds.append(time.perf_counter() - start)
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
        times.append({"first step of": _models.title(name), "with gcc": f"{seconds[0]:.2f} s",
                      "from the cache on disk": f"{seconds[1]:.2f} s"})
        if installed(report.skipped, "torch"):
            runs["torch eager"] = _models.theirs(name)
            if "torch.compile" not in report.skipped:
                runs["torch.compile"] = torch_compiled(name)
                runs["torch.compile"]()
        taken = compare(runs, rounds=ROUNDS)
        rows.append({"training step, AdamW": _models.title(name)} | {
            who: f"{1e3 * s.best:.1f} ms" for who, s in taken.items()} | {
            "× eager": f"{taken['eager'].best / taken['compiled'].best:.2f}"})
        ratio = taken["eager"].best / taken["compiled"].best
        report.aim(f"{name}: compiled against eager", f"≥ {AIMS[name]} ×", f"{ratio:.2f} ×", ratio >= AIMS[name])
    report.table("training steps", rows)
    report.table("compiling", times)


def main(names):
    report = Report(result("compiled", names, PARTS), "Compiled against eager on one core (`compiled.py`)")
    for name in names:
        {"chains": chains, "steps": steps}[name](report)
    report.save()


if __name__ == "__main__":
    main(named(__doc__, PARTS))
