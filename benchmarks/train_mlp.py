"""Samples per second of a whole training step on one pinned core: ours, the rivals, and the bare matrix products.

    python benchmarks/train_mlp.py [small] [middle] [wide]

A step is forward, softmax cross-entropy, backward and Adam, in float32. "numpy by hand" is the same step written out
for this one model, its Adam as the formulas stand, or in twelve passes without a temporary; "bare products" are only
the matrix products in it: what NumPy's BLAS leaves to nobody. Every rival runs in a process of its own, with nothing of
ours in it: importing us tells the allocator to keep freed memory, which makes NumPy's temporaries cheap. What a rival
would gain from that is shown too ("with our allocator settings").
"""

import sys

from _harness import Elsewhere, Report, compare, installed, named, one_core, result, serve

one_core()

import _mlp  # noqa: E402

AIMS = {"small": 0.95, "middle": 1.1, "wide": 1.1}      # of NumPy by hand
ROUNDS = {"small": 80, "middle": 80, "wide": 12}
STEPS_COMPARED = 5
HAND, IN_PLACE = "numpy by hand", "numpy by hand, in place"
KEPT = f"{IN_PLACE}, with our allocator settings"

STEPS = {   # what -> (the package it needs, function of widths, inputs, labels that returns a step)
    "torch eager": ("torch", lambda w, x, y: _mlp.torch_step(_mlp.torch_model(w), x, y)),
    "torch, fused Adam": ("torch", lambda w, x, y: _mlp.torch_step(_mlp.torch_model(w), x, y, fused=True)),
    "torch.compile": ("torch", lambda w, x, y: _mlp.torch_step(_mlp.torch_model(w), x, y, compiled=True)),
    "jax.jit": ("jax", _mlp.jax_step),
    HAND: ("numpy", lambda w, x, y: _mlp.numpy_step(w, x, y, _mlp.adam_plain)),
    IN_PLACE: ("numpy", _mlp.numpy_step),
    "bare products": ("numpy", lambda w, x, y: _mlp.products(w, x)),
}


def make(what, name):
    """The step of one rival."""
    return STEPS[what][1](_mlp.MODELS[name][0], *_mlp.batch_of(name))


def alternatives(name, report):
    """{what: a function that makes one step}; who isn't installed or doesn't run is noted as skipped."""
    widths, _ = _mlp.MODELS[name]
    steps = {what: _mlp.ours(_mlp.our_model(widths), *_mlp.batch_of(name), compiled=compiled)
             for what, compiled in (("ours", False), ("ours, mt.compile", True))}
    for what, (package, _) in STEPS.items():
        if installed(report.skipped, package) and what not in report.skipped:
            steps[what] = Elsewhere([sys.executable, __file__, "--serve", what, name])
    steps[KEPT] = make(IN_PLACE, name)
    agree({what: step for what, step in steps.items() if what != "bare products"}, steps, report)
    return steps


def agree(trained, steps, report):
    """Raise unless all make the same first steps; drop torch.compile from `steps` where it can't build."""
    losses = {}
    for what, step in trained.items():
        try:
            losses[what] = [step() for _ in range(STEPS_COMPARED)]
        except Exception as error:
            if what != "torch.compile":
                raise
            report.skipped[what] = reason = str(error).strip().splitlines()[0][:200]
            print(f"skipped: torch.compile can't build here: {reason}", flush=True)
            del steps[what]
    for what, values in losses.items():
        worst = max(abs(a - b) for a, b in zip(values, losses[HAND], strict=True))
        if worst > 1e-3:
            raise RuntimeError(f"{what} computes something else than numpy by hand: losses {values} against "
                               f"{losses[HAND]}")


def main(names):
    report = Report(result("train_mlp", names, _mlp.MODELS), "One training step on one core (`train_mlp.py`)")
    for name in names:
        seconds = compare(alternatives(name, report), rounds=ROUNDS[name], turn=0.03)
        batch = _mlp.MODELS[name][1]
        hand = seconds[HAND].best
        report.table(_mlp.title(name), [
            {"step of": what, "samples/s": f"{batch / s.best:,.0f}", "median": f"{batch / s.median:,.0f}",
             "ms": f"{1e3 * s.best:.2f}", "× numpy by hand": f"{hand / s.best:.2f}"} for what, s in seconds.items()])
        got = hand / seconds["ours"].best
        report.aim(f"{name}: ours against {HAND}", f"≥ {AIMS[name]:.2f} ×", f"{got:.2f} ×", got >= AIMS[name])
    report.save()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(make(*sys.argv[2:]))
    else:
        main(named(__doc__, _mlp.MODELS))
