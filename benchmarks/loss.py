"""The loss of a language model's output layer, forward and backward, on one pinned core: by tiles of the vocabulary,
whose logits never exist as a whole, and of all logits; beside torch's linear and cross_entropy. Time and memory.

    python benchmarks/loss.py
"""

from _harness import Report, child, compare, forget_peak, installed, named, one_core, resident

one_core()

import numpy as np  # noqa: E402

SIZES = {"8,192 classes": (1024, 256, 8192), "GPT-2's 50,257": (512, 256, 50257),
         "LLaMA 3's 128,256": (256, 256, 128256)}
AIMS = {"time": 4 / 3, "torch": 1.0, "memory": 1 / 3}     # of what whole logits take: four products for three
ROUNDS = 5


def arrays(name):
    """(x, weight, labels)."""
    rows, width, classes = SIZES[name]
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, width), np.float32) for n in (rows, classes))
    weight /= 16
    return x, weight, rng.integers(0, classes, rows)


def ours(name, tiled):
    """A function that makes the loss and both gradients, and returns the loss."""
    import minitorch_dist as mt
    from minitorch_dist import nn
    x, weight, labels = arrays(name)
    x, weight = (mt.tensor(a, requires_grad=True) for a in (x, weight))

    def run():
        x.grad = weight.grad = None
        loss = nn.linear_cross_entropy(x, weight, labels) if tiled else nn.cross_entropy(mt.linear(x, weight), labels)
        loss.backward()
        return loss.item()
    return run


def theirs(name):
    """The same in torch."""
    import torch
    torch.set_num_threads(1)
    x, weight, labels = map(torch.from_numpy, arrays(name))
    x.requires_grad_()
    weight.requires_grad_()

    def run():
        x.grad = weight.grad = None
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), labels)
        loss.backward()
        return loss.item()
    return run


WAYS = {"by tiles": lambda name: ours(name, True), "all logits": lambda name: ours(name, False), "torch": theirs}


def peak_bytes(name, way):
    """The most memory of some passes, beyond the imports, inputs and gradients, of a process of its own."""
    run = WAYS[way](name)
    rows, width, classes = SIZES[name]
    forget_peak()
    before = resident()
    for _ in range(3):
        run()
    return resident() - before - 4 * width * (rows + classes)


def main():
    """Print and save."""
    named(__doc__)
    report = Report("loss", "The loss of an output layer by tiles of its vocabulary (`loss.py`)")
    ways = [way for way in WAYS if way != "torch" or installed(report.skipped, "torch")]
    for name, (rows, width, classes) in SIZES.items():
        calls = {way: WAYS[way](name) for way in ways}
        losses = [call() for call in calls.values()]
        if max(losses) - min(losses) > 1e-4:
            raise RuntimeError(f"{name}: the ways compute different things: {losses}")
        seconds = compare(calls, rounds=ROUNDS)
        memory = {way: child("loss", "peak_bytes", name, way) for way in ways}
        whole = seconds["all logits"].best
        report.table(f"{name}: {rows} rows of {width} features; {4e-6 * rows * classes:.0f} MB of logits in float32", [
            {"loss": way, "ms": f"{1e3 * s.best:.0f}", "× the time of all logits": f"{s.best / whole:.2f}",
             "memory beyond gradients, MB": f"{memory[way] / 1e6:.0f}"} for way, s in seconds.items()])
        took, needs = seconds["by tiles"].best / whole, memory["by tiles"] / memory["all logits"]
        report.aim(f"{name}: time by tiles, of that of all logits", f"≤ {AIMS['time']:.2f}", f"{took:.2f}",
                   took <= AIMS["time"])
        if "torch" in seconds:
            beside = seconds["by tiles"].best / seconds["torch"].best
            report.aim(f"{name}: time by tiles, of torch's of all logits", f"≤ {AIMS['torch']:.2f}",
                       f"{beside:.2f}", beside <= AIMS["torch"])
        report.aim(f"{name}: memory, of that of all logits", f"≤ {AIMS['memory']:.2f}", f"{needs:.2f}",
                   needs <= AIMS["memory"])
    report.save()


if __name__ == "__main__":
    main()
