"""A million numbers through one op after another, forward and both passes, on one pinned core; beside torch eager, of
which each result is compared first. Where ours is slower, NumPy goes over memory more than once, or makes what torch
doesn't: mt.compile is what fuses such passes (compiled.py).

    python benchmarks/ops.py [GROUP …]
"""

import math

from _harness import Report, compare, installed, named, one_core, result

one_core()

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402
from minitorch_dist import nn  # noqa: E402

SIZE = 1024                             # of rows and of columns
AIM = 1.0                               # times torch's time, the geometric mean over both passes of all ops
ROUNDS, CLOSE = 12, 2e-3
DRAW = np.random.default_rng(0)
ROWS = DRAW.integers(0, SIZE, 2 * SIZE)
TOKENS, LABELS = DRAW.integers(0, SIZE, (32, 64)), DRAW.integers(0, SIZE, SIZE)


def floats(*shape):
    return DRAW.standard_normal(shape, np.float32)


X, IMAGES, TABLE = floats(SIZE, SIZE), floats(16, 32, 45, 45), floats(SIZE, 256)
ABOVE_0 = np.abs(X) + np.float32(0.1)
OTHER, ROW, TIMES = floats(SIZE, SIZE), floats(SIZE), np.ones(SIZE, np.float32)
KERNEL, EACH = floats(32, 32, 3, 3), floats(32, 1, 3, 3)
SEEN = X > 0.3

# {group: {op: (its input, ours of x, torch's of torch, its functional, and x)}}. Constants are NumPy arrays in both.
OPS = {
    "elementwise": {
        "exp": (X, lambda x: mt.exp(x), lambda t, f, x: t.exp(x)),
        "log": (ABOVE_0, lambda x: mt.log(x), lambda t, f, x: t.log(x)),
        "sqrt": (ABOVE_0, lambda x: mt.sqrt(x), lambda t, f, x: t.sqrt(x)),
        "tanh": (X, lambda x: mt.tanh(x), lambda t, f, x: t.tanh(x)),
        "sigmoid": (X, lambda x: mt.sigmoid(x), lambda t, f, x: t.sigmoid(x)),
        "relu": (X, lambda x: mt.relu(x), lambda t, f, x: t.relu(x)),
        "gelu": (X, lambda x: mt.gelu(x), lambda t, f, x: f.gelu(x)),
        "sin": (X, lambda x: mt.sin(x), lambda t, f, x: t.sin(x)),
        "x ** 3": (X, lambda x: x ** 3, lambda t, f, x: x ** 3),
        "x * row": (X, lambda x: x * ROW, lambda t, f, x: x * t.from_numpy(ROW)),
        "maximum": (X, lambda x: mt.maximum(x, OTHER), lambda t, f, x: t.maximum(x, t.from_numpy(OTHER))),
        "where": (X, lambda x: mt.where(SEEN, x, 0.0), lambda t, f, x: t.where(t.from_numpy(SEEN), x, 0.0)),
        "clip": (X, lambda x: mt.clip(x, -0.5, 0.5), lambda t, f, x: t.clamp(x, -0.5, 0.5)),
    },
    "sums": {
        "sum of columns": (X, lambda x: mt.sum(x, 0), lambda t, f, x: x.sum(0)),
        "sum of rows": (X, lambda x: mt.sum(x, 1), lambda t, f, x: x.sum(1)),
        "var": (X, lambda x: mt.var(x, 1), lambda t, f, x: x.var(1, unbiased=False)),
        "max": (X, lambda x: mt.max(x, 1), lambda t, f, x: x.amax(1)),
        "logsumexp": (X, lambda x: mt.logsumexp(x, 1), lambda t, f, x: t.logsumexp(x, 1)),
        "cumsum": (X, lambda x: mt.cumsum(x, 1), lambda t, f, x: x.cumsum(1)),
        "softmax": (X, lambda x: mt.softmax(x), lambda t, f, x: f.softmax(x, -1)),
        "cross-entropy": (X, lambda x: nn.cross_entropy(x, LABELS),
                          lambda t, f, x: f.cross_entropy(x, t.from_numpy(LABELS))),
        "layer norm": (X, lambda x: mt.layer_norm(x, (SIZE,), TIMES, ROW),
                       lambda t, f, x: f.layer_norm(x, (SIZE,), t.from_numpy(TIMES), t.from_numpy(ROW))),
        "rms norm": (X, lambda x: mt.rms_norm(x, (SIZE,), TIMES),
                     lambda t, f, x: f.rms_norm(x, (SIZE,), t.from_numpy(TIMES), 1e-6)),
    },
    "places": {
        "sort": (X, lambda x: mt.sort(x, 1), lambda t, f, x: t.sort(x, dim=1, stable=True)[0]),
        "topk, 8": (X, lambda x: mt.topk(x, 8, 1)[0], lambda t, f, x: x.topk(8, 1)[0]),
        "x[rows]": (X, lambda x: x[ROWS], lambda t, f, x: x[t.from_numpy(ROWS)]),
        "embedding": (TABLE, lambda x: mt.embedding(TOKENS, x), lambda t, f, x: f.embedding(t.from_numpy(TOKENS), x)),
        "x[::2, 1:]": (X, lambda x: x[::2, 1:] + 0, lambda t, f, x: x[::2, 1:] + 0),
        "concatenate": (X, lambda x: mt.concatenate([x, x], 1), lambda t, f, x: t.cat([x, x], 1)),
        "transpose": (X, lambda x: mt.transpose(x) + 0, lambda t, f, x: x.T + 0),
        "pad": (X, lambda x: mt.pad(x, [(1, 1), (2, 2)]), lambda t, f, x: f.pad(x, (2, 2, 1, 1))),
    },
    "products": {
        "x @ w": (X, lambda x: x @ OTHER, lambda t, f, x: x @ t.from_numpy(OTHER)),
        "conv2d, 3×3": (IMAGES, lambda x: mt.conv2d(x, KERNEL, padding=1),
                        lambda t, f, x: f.conv2d(x, t.from_numpy(KERNEL), padding=1)),
        "conv2d, stride 2": (IMAGES, lambda x: mt.conv2d(x, KERNEL, stride=2),
                             lambda t, f, x: f.conv2d(x, t.from_numpy(KERNEL), stride=2)),
        "conv2d, depthwise": (IMAGES, lambda x: mt.conv2d(x, EACH, padding=1, groups=32),
                              lambda t, f, x: f.conv2d(x, t.from_numpy(EACH), padding=1, groups=32)),
        "max_pool2d, 3": (IMAGES, lambda x: mt.max_pool2d(x, 3), lambda t, f, x: f.max_pool2d(x, 3)),
        "avg_pool2d, 3": (IMAGES, lambda x: mt.avg_pool2d(x, 3), lambda t, f, x: f.avg_pool2d(x, 3)),
    },
}


def passes(op, leaf, cotangent, nothing_kept):
    """(forward, both passes) as functions without arguments, of ours or torch's."""
    def forward():
        with nothing_kept():
            op(leaf)

    def both():
        leaf.grad = None
        op(leaf).backward(cotangent)
    return forward, both


def check(name, what, ours, theirs):
    """RuntimeError where they compute different things."""
    off = np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max())
    if ours.shape != theirs.shape or not off < CLOSE:
        raise RuntimeError(f"{name}: ours and torch's {what} differ: {ours.shape}, {theirs.shape}, by {off:.1e}")


def measured(name, array, op, rival, torch):
    """{column: Seconds} of an op; torch: the module, or None."""
    leaf = mt.tensor(array.copy(), requires_grad=True)
    y = op(leaf).numpy()
    ct = DRAW.standard_normal(y.shape, np.float32)
    calls = dict(zip(("forward", "both"), passes(op, leaf, mt.tensor(ct), mt.no_grad), strict=True))
    if torch is not None:
        other = torch.from_numpy(array.copy()).requires_grad_()

        def theirs(x):
            return rival(torch, torch.nn.functional, x)
        ct = torch.from_numpy(ct)
        calls |= dict(zip(("torch, forward", "torch, both"), passes(theirs, other, ct, torch.no_grad), strict=True))
        check(name, "results", y, theirs(other).detach().numpy())
        calls["both"]()
        calls["torch, both"]()
        check(name, "gradients", leaf.grad.numpy(), other.grad.numpy())
    return compare(calls, rounds=ROUNDS, turn=0.01)


def main(groups):
    report = Report(result("ops", groups, OPS), "A million numbers through one op (`ops.py`)")
    torch, ratios = None, []
    if installed(report.skipped, "torch"):
        import torch
        torch.set_num_threads(1)
    for group in groups:
        rows = []
        for name, (array, op, rival) in OPS[group].items():
            took = measured(name, array, op, rival, torch)
            row = {"op": name}
            for what in ("forward", "both"):
                row |= {f"{what}, ms": f"{1e3 * took[what].best:.2f}"}
                if torch is not None:
                    ratios.append((took[what].best / took[f"torch, {what}"].best, what, name))
                    row |= {f"torch's {what}": f"{1e3 * took[f'torch, {what}'].best:.2f}",
                            f"× {what}": f"{ratios[-1][0]:.2f}"}
            rows.append(row)
        report.table(group, rows)
    both = [ratio for ratio, what, _ in ratios if what == "both"]
    if both:
        mean = math.exp(sum(map(math.log, both)) / len(both))
        report.aim(f"both passes against torch eager, geometric mean of {len(both)} ops", f"≤ {AIM} ×", f"{mean:.2f} ×",
                   mean <= AIM)
    report.save()


if __name__ == "__main__":
    main(named(__doc__, OPS))
