"""What the host pays for an op on a GPU, and for a step of training: the Python between two launches, for which a GPU
waits where its kernels are short. Measured without one: with a real CuPy, on an emulated GPU that computes nothing, in
no time (tests/device/emulated/idle.py). What a driver takes for a launch comes on top.

    python benchmarks/host.py

It needs CuPy for CUDA 12, Triton and a C compiler (make test-emulated installs the first two). A step is forward,
cross-entropy, backward and AdamW, as in gpu/train.py. As a CUDA graph, the host asks once for all of it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from _harness import Report, compare, named

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

ROWS, SIZE, HEADS = 64, 128, 4
STEPS = ("mlp", "lenet", "gpt")
AIM = 2.0       # times CuPy's own time, of a forward that is one launch of CuPy's


def ops():
    """{op: (CuPy's own call or None, ours)}; ours records for backward."""
    import cupy

    import minitorch_dist as mt
    x, w, b = cupy.ones((ROWS, SIZE), "f4"), cupy.ones((SIZE, SIZE), "f4"), cupy.ones(SIZE, "f4")
    heads = mt.tensor(cupy.ones((4, HEADS, 16, 32), "f4"), requires_grad=True)
    labels = cupy.zeros(ROWS, "i8")
    tx, tw, tb = (mt.tensor(a, requires_grad=True) for a in (x, w, b))
    return {
        "x + x": (lambda: x + x, lambda: tx + tx),
        "tanh(x)": (lambda: cupy.tanh(x), lambda: mt.tanh(tx)),
        "x @ w": (lambda: x @ w, lambda: tx @ tw),
        "x.sum(0)": (lambda: x.sum(0), lambda: tx.sum(0)),
        "x.reshape": (lambda: x.reshape(-1), lambda: tx.reshape(-1)),
        "x w + b": (lambda: cupy.add(x @ w, b), lambda: mt.linear(tx, tw, tb)),
        "gelu": (None, lambda: mt.gelu(tx, "tanh")),
        "layer norm": (None, lambda: mt.layer_norm(tx, SIZE, tb, tb)),
        "attention": (None, lambda: mt.scaled_dot_product_attention(heads, heads, heads, is_causal=True)),
        "softmax cross-entropy": (None, lambda: mt.softmax_cross_entropy(tx, labels)),
    }


def both(forward):
    """A function that makes an op's forward and backward, from cotangents that are there."""
    import minitorch_dist as mt
    out = forward()
    cotangent = mt.tensor(out.data)

    def passes():
        forward().backward(cotangent)
    return passes


def main():
    named(__doc__)
    if missing := [name for name in ("cupy", "triton") if importlib.util.find_spec(name) is None]:
        print(f"not measured: without {' and '.join(missing)}")
        return
    if not os.environ.get("IDLE_GPU"):
        again = [sys.executable, "-m", "tests.device.emulated", "--idle", __file__]
        raise SystemExit(subprocess.run(again, cwd=Path(__file__).parents[1]).returncode)
    measure()


def measure():
    """Print and keep the tables."""
    import train

    from tests.device.emulated.idle import requests
    report = Report("host", "What a GPU's host pays (`host.py`)")
    table = ops()
    runs = {("CuPy", name): theirs for name, (theirs, _) in table.items() if theirs}
    runs |= {("forward", name): ours for name, (_, ours) in table.items()}
    runs |= {("both", name): both(ours) for name, (_, ours) in table.items()}
    took = {key: 1e6 * seconds.best for key, seconds in compare(runs).items()}

    def asked(run):
        """How many kernels and products a call asks for."""
        before = requests()
        run()
        return requests() - before
    report.table(f"µs per op, {ROWS} rows of {SIZE}, float32", [{
        "op": name, "CuPy, bare": f"{took['CuPy', name]:.1f}" if theirs else "",
        "forward": f"{took['forward', name]:.1f}", "launches": asked(ours),
        "both passes": f"{took['both', name]:.1f}", "of both": asked(runs["both", name]),
    } for name, (theirs, ours) in table.items()])
    steps = {name: train.ours(name) for name in STEPS}
    found = compare(steps, rounds=20, turn=0.1)
    report.table("a training step", [{
        "step of": name, "ms": f"{1e3 * found[name].best:.2f}", "median": f"{1e3 * found[name].median:.2f}",
        "kernels and products": (count := asked(step)), "µs each": f"{1e6 * found[name].best / count:.1f}",
    } for name, step in steps.items()])
    ratios = {name: took["forward", name] / took["CuPy", name] for name, (theirs, ours) in table.items()
              if theirs and asked(ours)}
    worst = max(ratios, key=ratios.get)
    report.aim(f"forward against bare CuPy, the worst ({worst})", f"≤ {AIM} ×", f"{ratios[worst]:.2f} ×",
               ratios[worst] <= AIM)
    report.save()


if __name__ == "__main__":
    main()
