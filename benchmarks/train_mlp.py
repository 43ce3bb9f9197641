"""Samples per second of a whole training step on one pinned core: ours, the rivals, and the bare matrix products.

    python benchmarks/train_mlp.py [small] [middle] [wide]

A step is forward, softmax cross-entropy, backward and Adam, in float32. "numpy by hand" is the same step written out
for this one model, its Adam in twelve passes without a temporary, or plainly as the formulas stand; "bare products"
are only the matrix products in it: what NumPy's BLAS leaves to nobody.
"""

import sys

from _harness import Report, compare, installed, one_core

one_core()

import _mlp  # noqa: E402

AIMS = {"small": 0.95, "middle": 1.1, "wide": 1.1}      # of NumPy by hand
ROUNDS = {"small": 80, "middle": 80, "wide": 12}
STEPS_COMPARED = 5


def alternatives(name, report):
    """{what: a function that makes one step}; who isn't installed or doesn't run is noted as skipped."""
    widths, _ = _mlp.MODELS[name]
    x, labels = _mlp.batch_of(name)
    steps = {"ours": _mlp.ours(_mlp.our_model(widths), x, labels)}
    if installed(report.skipped, "torch"):
        steps["torch eager"] = _mlp.torch_step(_mlp.torch_model(widths), x, labels)
        steps["torch, fused Adam"] = _mlp.torch_step(_mlp.torch_model(widths), x, labels, fused=True)
        if "torch.compile" not in report.skipped:
            steps["torch.compile"] = _mlp.torch_step(_mlp.torch_model(widths), x, labels, compiled=True)
    if installed(report.skipped, "jax"):
        steps["jax.jit"] = _mlp.jax_step(widths, x, labels)
    steps["numpy by hand"] = _mlp.numpy_step(widths, x, labels)
    steps["numpy by hand, plain Adam"] = _mlp.numpy_step(widths, x, labels, _mlp.adam_plain)
    agree(steps, report)
    steps["bare products"] = _mlp.products(widths, x)
    return steps


def agree(steps, report):
    """Raise unless all make the same first steps; drop torch.compile where it can't build."""
    losses = {}
    for what in list(steps):
        try:
            losses[what] = [steps[what]() for _ in range(STEPS_COMPARED)]
        except Exception as error:
            if what != "torch.compile":
                raise
            report.skipped[what] = reason = str(error).strip().splitlines()[0][:200]
            print(f"skipped: torch.compile can't build here: {reason}", flush=True)
            del steps[what]
    for what, values in losses.items():
        worst = max(abs(a - b) for a, b in zip(values, losses["numpy by hand"], strict=True))
        if worst > 1e-3:
            raise RuntimeError(f"{what} computes something else than numpy by hand: losses {values} against "
                               f"{losses['numpy by hand']}")


def main(names):
    report = Report("train_mlp", "One training step on one core (`train_mlp.py`)")
    for name in names:
        seconds = compare(alternatives(name, report), rounds=ROUNDS[name], turn=0.03)
        batch = _mlp.MODELS[name][1]
        hand = seconds["numpy by hand"].best
        report.table(_mlp.title(name), [
            {"step of": what, "samples/s": f"{batch / s.best:,.0f}", "median": f"{batch / s.median:,.0f}",
             "ms": f"{1e3 * s.best:.2f}", "× numpy by hand": f"{hand / s.best:.2f}"} for what, s in seconds.items()])
        ratio = hand / seconds["ours"].best
        plain = seconds["numpy by hand, plain Adam"].best / seconds["ours"].best
        for what, got in (("numpy by hand", ratio), ("numpy by hand, plain Adam", plain)):
            report.aim(f"{name}: ours against {what}", f"≥ {AIMS[name]:.2f} ×", f"{got:.2f} ×", got >= AIMS[name])
    report.save()


if __name__ == "__main__":
    main(_mlp.chosen(sys.argv[1:], _mlp.MODELS))
