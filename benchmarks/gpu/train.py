"""A whole training step on the GPU: an MLP, LeNet and two GPTs, beside torch eager and torch.compile; kernels per step.
Ours and torch.compile's also as a CUDA graph, which the host asks for by one call; ours by mt.compile, too.

    python benchmarks/gpu/train.py          # needs an NVIDIA GPU with CuPy and Triton; torch is a rival, if it is there
    python benchmarks/gpu/train.py gpt      # of mlp, lenet, gpt, gpt2 those that are named: a result of its own
    python benchmarks/gpu/train.py --quick  # small models, few steps: whether they run; kept in results/quick/

A step is forward, cross-entropy, backward and AdamW in float32 (torch's convolutions too: no TF32), with the batch on
the device already and the loss left there. A caption counts the launches of our own kernels, by the ledger.
"""

import time

from _gpu import QUICK, asked, attempt, free, gpu, report_of, rival
from _harness import text_table

NAMES = ("mlp", "lenet", "gpt", "gpt2")
OURS, GRAPH, PLAIN = "ours", "ours, as a CUDA graph", "ours, CuPy's kernels alone"
FUSED, BOTH = "ours, mt.compile", "ours, mt.compile, as a CUDA graph"
VARIANTS = {PLAIN: {"kernels": False}, OURS: {}, GRAPH: {"graph": True}, FUSED: {"compiled": True},
            BOTH: {"graph": True, "compiled": True}}
EAGER = "torch eager"
# What torch.compile is asked for. GPT-2 is compiled once only: that takes minutes, and the step waits for the GPU.
COMPILED = {"torch.compile": {}, "torch.compile, as a CUDA graph": {"mode": "reduce-overhead"}}
AIMS = {"gpt": (GRAPH, 1.0), "gpt2": (OURS, 1.0)}     # times torch eager's speed
ROUNDS, TURN, MOST = (1, 0.0, 1) if QUICK else (15, 0.1, 20)     # turns, seconds of one, calls in one
APART = 1e-2        # losses of the first steps that differ by more come from different programs
MLP, BATCH = ((784, 32, 10), 4) if QUICK else ((784, 2048, 2048, 10), 512)


def mlp():
    """(model, inputs, labels), as _models does for the others."""
    import numpy as np

    import minitorch_dist as mt
    from minitorch_dist import nn
    mt.manual_seed(0)
    layers = [layer for a, b in zip(MLP, MLP[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    draw = np.random.default_rng(0)
    return nn.Sequential(*layers[:-1]), draw.random((BATCH, MLP[0]), np.float32), draw.integers(0, MLP[-1], BATCH)


def parts(name):
    """(our model, inputs, labels) on the host."""
    import _models
    return mlp() if name == "mlp" else (_models.model_of(name), *_models.batch_of(name))


def ours(name, graph=False, compiled=False, kernels=True):
    """A step of ours; returns the loss, a Tensor on the device."""
    from contextlib import nullcontext

    from minitorch_dist import backend, compile, cuda_graph, nn, optim
    from minitorch_dist.kernels import disable
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
        with nullcontext() if kernels else disable():
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


def makers(torch, name):
    """{who: a function that makes its step}: first the one whose losses are the measure of the others'."""
    found = {who: lambda options=options: ours(name, **options) for who, options in VARIANTS.items()}
    if torch is None:
        return found
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.compiler.reset()      # the models before count against its limit of compilations, beyond which it runs eager
    compiled = {} if name == "gpt2" else COMPILED
    return ({EAGER: lambda: theirs(torch, name)} | found
            | {who: lambda options=options: theirs(torch, name, options) for who, options in compiled.items()})


def first_losses(step):
    """The losses of five steps."""
    return [float(step().item()) for _ in range(5)]


def prepared(makers, known):
    """({who: step}, rows that say how long each took to its fifth loss, compiling included, or why it isn't there:
    torch.compile wants a C compiler and Python's headers, for one). known: losses of the steps so far, the measure
    first; these are added."""
    steps, rows = {}, []
    for who, make in makers.items():
        def ready(who=who, make=make):
            begin = time.perf_counter()
            step = make()
            losses = first_losses(step)
            known.append(losses)
            if not max(abs(a - b) for a, b in zip(losses, known[0], strict=True)) <= APART:
                raise ArithmeticError(f"its losses {losses} should be {known[0]}")
            steps[who] = step
            return {"s to the 5th": f"{time.perf_counter() - begin:.1f}"}
        rows.append(attempt({"step of": who}, ready))
    return steps, rows


def seconds(cupy, steps):
    """{who: (best seconds per step, those until the host had asked for it all)}, in turns; a turn ends when the device
    is done. Where the two are nearly equal, it is the host that the step waits for."""
    def turn(step, calls):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        host = time.perf_counter() - begin
        cupy.cuda.Device().synchronize()
        return (time.perf_counter() - begin) / calls, host / calls
    calls = {who: max(1, min(MOST, round(TURN / turn(step, 1)[0]))) for who, step in steps.items()}
    best = dict.fromkeys(steps, (float("inf"), 0.0))
    for _ in range(ROUNDS):
        for who, step in steps.items():
            step()
            best[who] = min(best[who], turn(step, calls[who]))
    return best


def complete(rows, best):
    """Put the times into the rows of those that have some."""
    base = EAGER if EAGER in best else PLAIN
    for row in rows:
        if row["step of"] in best:
            each, host = best[row["step of"]]
            row |= {"ms": f"{1e3 * each:.3f}", "until all is asked for": f"{1e3 * host:.3f}"}
            if base in best:
                row[f"× {base}"] = f"{best[base][0] / each:.2f}"


def kernels_of(steps):
    """How many of our own kernels a step launches, for a caption."""
    from minitorch_dist import ledger
    counts = []
    for who in (OURS, FUSED):
        if who in steps:
            with ledger.record() as book:
                steps[who]()
            counts.append(f"{who}: {book.launches.total()}")
    return "; ".join(counts)


def measure(cupy, torch, report, name):
    """One model's table. What torch compiles, which takes longest and may take too long, comes last, beside torch eager
    once more: the rest is kept by then."""
    import _models
    title = f"MLP {'-'.join(map(str, MLP))}, batch {BATCH}" if name == "mlp" else _models.title(name)
    print(f"\n{title}", flush=True)
    soon, known = makers(torch, name), []
    late = {who: soon.pop(who) for who in COMPILED if who in soon}
    steps, rows = prepared(soon, known)
    best = seconds(cupy, steps)
    complete(rows, best)
    report.table(f"{title}; kernels of ours per step: {kernels_of(steps)}", rows)
    who, aim = AIMS.get(name, (None, None))
    if EAGER in best and who in best:
        ratio = best[EAGER][0] / best[who][0]
        report.aim(f"{name}, {who}: times torch eager's speed", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
    if late:
        report.save()
        compiled, more = prepared(late, known)
        complete(more, seconds(cupy, {who: steps[who] for who in (EAGER,) if who in steps} | compiled))
        rows += more        # they are the table's
        print(f"\n{text_table(rows)}", flush=True)


def main():
    """Measure and report; one line where there is no GPU."""
    names = asked(__doc__, NAMES)
    cupy, device = gpu()
    if cupy is None:
        return
    if QUICK:
        import _models
        _models.shrink()
    report = report_of("gpu_train", "Training steps", device, names, NAMES)
    torch = rival(report)
    for name in names:
        def measured(name=name):
            free(cupy, torch)
            measure(cupy, torch, report, name)
            return {}
        row = attempt({"model": name}, measured)
        if "error" in row:
            report.table(name, [row])
        report.save()       # what is measured is kept, should the next one fail


if __name__ == "__main__":
    main()
