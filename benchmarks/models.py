"""One training step of LeNet and of a small GPT on one pinned core, beside torch eager; where our time goes; memory.

    python benchmarks/models.py [lenet] [gpt]
"""

import time

from _harness import Report, child, compare, installed, named, one_core, resident, result

one_core()

import numpy  # noqa: E402


class Watch:
    """numpy.matmul with a clock, in its place before the library is loaded."""

    def __init__(self, matmul):
        self.matmul, self.on, self.seconds = matmul, False, 0.0

    def __call__(self, *args, **options):
        if not self.on:
            return self.matmul(*args, **options)
        start = time.perf_counter()
        out = self.matmul(*args, **options)
        self.seconds += time.perf_counter() - start
        return out


AIMS = {"lenet": 0.8, "gpt": 0.55}      # of torch eager
ROUNDS = {"lenet": 60, "gpt": 25}
PROFILED_STEPS = 20
MEMORY_STEPS = 5


def profile(name, seconds):
    """Rows (part, ms, share) of one step of ours; `seconds` is what all of it takes."""
    watch = numpy.matmul = Watch(numpy.matmul)
    import _models
    step, _, update = _models.ours(name)
    _, empty, _ = _models.ours(name, batch=0)
    for function in (step, empty):
        function()

    def best(function):
        times = []
        for _ in range(PROFILED_STEPS):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)
    products = []
    watch.on = True
    for _ in range(PROFILED_STEPS):
        watch.seconds = 0.0
        step()
        products.append(watch.seconds)
    watch.on = False
    parts = {"matrix products": min(products), "Python and calls (the passes over an empty batch)": best(empty),
             "optimizer": best(update)}
    parts["the rest of NumPy: elementwise, copies, windows"] = seconds - sum(parts.values())
    return [{"part": part, "ms": f"{1e3 * s:.2f}", "share": f"{100 * s / seconds:.0f} %"} for part, s in parts.items()]


def peak_bytes(name, who):
    """(the most resident memory after some steps, how much of it came after the imports), of a process of its own."""
    import _models
    if who == "torch eager":
        import torch  # noqa: F401
    before = resident()
    step = _models.theirs(name) if who == "torch eager" else _models.ours(name)[0]
    for _ in range(MEMORY_STEPS):
        step()
    return resident(), resident() - before


def main(names):
    import _models
    report = Report(result("models", names, AIMS), "One training step of LeNet and a GPT on one core (`models.py`)")
    for name in names:
        steps = {"ours": _models.ours(name)[0]}
        if installed(report.skipped, "torch"):
            steps["torch eager"] = _models.theirs(name)
        losses = {who: [step() for _ in range(5)] for who, step in steps.items()}
        worst = max(abs(a - b) for values in losses.values() for a, b in zip(values, losses["ours"], strict=True))
        if worst > 1e-3:
            raise RuntimeError(f"{name}: ours and torch compute different things: {losses}")
        seconds = compare(steps, rounds=ROUNDS[name])
        ours = seconds["ours"].best
        memory = {who: child("models", "peak_bytes", name, who) for who in steps}
        rival = seconds.get("torch eager", seconds["ours"]).best
        report.table(_models.title(name), [
            {"step of": who, "ms": f"{1e3 * s.best:.1f}", "median": f"{1e3 * s.median:.1f}",
             "× torch's speed": f"{rival / s.best:.2f}", "peak MB": f"{memory[who][0] / 1e6:.0f}",
             "beyond the imports, MB": f"{memory[who][1] / 1e6:.0f}"} for who, s in seconds.items()])
        report.table(f"where ours goes: {name}", child("models", "profile", name, ours))
        if "torch eager" in seconds:
            report.aim(f"{name}: ours against torch eager", f"≥ {AIMS[name]} ×", f"{rival / ours:.2f} ×",
                       rival / ours >= AIMS[name])
    report.save()


if __name__ == "__main__":
    main(named(__doc__, AIMS))
