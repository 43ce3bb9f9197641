"""A whole training step on the GPU: an MLP, LeNet and two GPTs, beside torch eager and torch.compile; kernels per step.
Ours and torch.compile's also as a CUDA graph, which the host asks for by one call; ours by mt.compile, too.

    python benchmarks/gpu/train.py          # needs an NVIDIA GPU with CuPy and Triton; torch is a rival, if it is there
    python benchmarks/gpu/train.py gpt      # of mlp, lenet, gpt, gpt2 those that are named: a result of its own

A step is forward, cross-entropy, backward and AdamW in float32 (torch's convolutions too: no TF32), with the batch on
the device already and the loss left there. "launches" counts our own fused kernels, by the ledger.
"""

import sys
import time

from _gpu import free, gpu, named, rival
from _harness import Report
from _models import TITLES

NAMES = ("mlp", "lenet", "gpt", "gpt2")
OURS, GRAPH, PLAIN = "ours", "ours, as a CUDA graph", "ours, CuPy's kernels alone"
FUSED, BOTH = "ours, mt.compile", "ours, mt.compile, as a CUDA graph"
VARIANTS = {OURS: {}, GRAPH: {"graph": True}, FUSED: {"compiled": True}, BOTH: {"graph": True, "compiled": True}}
EAGER = "torch eager"
# What torch.compile is asked for. GPT-2 is compiled once only: that takes minutes, and the step waits for the GPU.
COMPILED = {"torch.compile": {}, "torch.compile, as a CUDA graph": {"mode": "reduce-overhead"}}
AIMS = {"gpt": (GRAPH, 1.0), "gpt2": (OURS, 1.0)}     # times torch eager's speed
ROUNDS, CALLS = 15, 20
MLP = (784, 2048, 2048, 10)


def mlp(batch=512):
    """(model, inputs, labels), as _models does for the others."""
    import numpy as np

    import minitorch_dist as mt
    from minitorch_dist import nn
    mt.manual_seed(0)
    layers = [layer for a, b in zip(MLP, MLP[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    draw = np.random.default_rng(0)
    return nn.Sequential(*layers[:-1]), draw.random((batch, MLP[0]), np.float32), draw.integers(0, MLP[-1], batch)


def parts(name):
    """(our model, inputs, labels) on the host."""
    import _models
    return mlp() if name == "mlp" else (_models.model_of(name), *_models.batch_of(name))


def ours(name, graph=False, compiled=False):
    """A step of ours; returns the loss, a Tensor on the device."""
    from minitorch_dist import backend, compile, cuda_graph, nn, optim
    model, x, labels = parts(name)
    model = model.to("cuda")
    x, labels = backend.to(x, "cuda"), backend.to(labels, "cuda")
    optimizer = optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)

    def loss_of(x, labels):
        return nn.cross_entropy(model(x), labels, reduction="sum") / labels.size
    loss_of = compile(loss_of) if compiled else loss_of

    def passes(x, labels):
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        return loss
    passes = cuda_graph(passes) if graph else passes

    def step():
        loss = passes(x, labels)
        optimizer.step()
        return loss
    return step


def theirs(torch, name, compiled=None):
    """A step of torch from the same weights; returns the loss, on the device. compiled: torch.compile's options."""
    import _models
    model, x, labels = parts(name)
    weights = {key: torch.from_numpy(value) for key, value in model.state_dict().items()}
    functional = torch.nn.functional
    if name == "mlp":
        layers = [layer for a, b in zip(MLP, MLP[1:], strict=False)
                  for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        rival = torch.nn.Sequential(*layers[:-1])
    else:
        rival = _models.torch_model(name, torch)
    rival.load_state_dict(weights)
    rival = rival.to("cuda")
    optimizer = torch.optim.AdamW(rival.parameters(), 1e-3, weight_decay=0.01, fused=True)
    x, labels = torch.from_numpy(x).to("cuda"), torch.from_numpy(labels).to("cuda")

    def loss_of(x, labels):
        out = rival(x)
        return functional.cross_entropy(out.reshape(-1, out.shape[-1]), labels.reshape(-1))
    loss_of = loss_of if compiled is None else torch.compile(loss_of, **compiled)

    def step():
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        return loss
    return step


def rivals(torch, name, report):
    """({who: step}, {who: its first losses}) of torch's that run here: torch.compile wants a C compiler and Python's
    headers, for one."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    steps, losses = {}, {}
    for who, compiled in {EAGER: None, **COMPILED}.items():
        if name == "gpt2" and compiled:
            continue
        try:
            step = theirs(torch, name, compiled)
            losses[who], steps[who] = first_losses(step), step
        except Exception as error:
            report.skipped[f"{who} on {name}"] = reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(f"skipped: {who} on {name}: {reason}", flush=True)
    return steps, losses


def first_losses(step):
    """The losses of five steps."""
    return [float(step().item()) for _ in range(5)]


def seconds(cupy, steps):
    """{who: (best seconds per step, those until the host had asked for it all)}, in turns; a turn ends when the device
    is done. Where the two are nearly equal, it is the host that the step waits for."""
    best = dict.fromkeys(steps, (float("inf"), 0.0))
    for turn in range(ROUNDS + 1):
        for who, step in steps.items():
            step()
            cupy.cuda.Device().synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                step()
            asked = time.perf_counter()
            cupy.cuda.Device().synchronize()
            if turn:
                best[who] = min(best[who], ((time.perf_counter() - begin) / CALLS, (asked - begin) / CALLS))
    return best


def main(names):
    """Measure and report; one line where there is no GPU."""
    if unknown := {*names} - {*NAMES}:
        raise SystemExit(f"train.py: no models {sorted(unknown)}; there are {', '.join(NAMES)}")
    cupy, device = gpu()
    if cupy is None:
        return
    from minitorch_dist import kernels, ledger
    report = Report("_".join(["gpu_train", *names]), named("Training steps", names, device))
    torch = rival(report)
    for name in names or NAMES:
        steps, losses = {who: ours(name, **options) for who, options in VARIANTS.items()}, {}
        if torch:
            theirs_too, losses = rivals(torch, name, report)
            steps |= theirs_too
        losses |= {who: first_losses(steps[who]) for who in VARIANTS}
        if max(abs(a - b) for values in losses.values() for a, b in zip(values, losses[OURS], strict=True)) > 1e-2:
            raise RuntimeError(f"{name}: the rivals compute something else: {losses}")
        counts = {}
        for who in (OURS, FUSED):
            with ledger.record() as book:
                steps[who]()
            counts[who] = book.launches.total()
        plain = ours(name)

        def without(plain=plain):
            with kernels.disable():
                return plain()
        steps[PLAIN] = without
        best = seconds(cupy, steps)
        title = TITLES.get(name, f"MLP {'-'.join(map(str, MLP))}, batch 512")
        base = EAGER if EAGER in best else PLAIN
        report.table(f"{title}; kernels of ours per step: {counts[OURS]}, by mt.compile {counts[FUSED]}", [
            {"step of": who, "ms": f"{1e3 * t:.3f}", "until all is asked for": f"{1e3 * asked:.3f}",
             f"× {base}": f"{best[base][0] / t:.2f}"} for who, (t, asked) in best.items()])
        if EAGER in best and name in AIMS:
            who, aim = AIMS[name]
            ratio = best[EAGER][0] / best[who][0]
            report.aim(f"{name}, {who}: times torch eager's speed", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
        steps.clear()
        free(cupy, torch)
        report.save()       # what is measured is kept, should the next one fail


if __name__ == "__main__":
    main(sys.argv[1:])
