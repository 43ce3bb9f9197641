"""Each kernel, forward and backward, beside CuPy's unfused formulas and torch: softmax cross-entropy, norms, attention,
matrix products.

    python benchmarks/gpu/kernels.py                # needs an NVIDIA GPU with CuPy and Triton; torch is a rival
    python benchmarks/gpu/kernels.py attention      # of fused, attention, products those that are named: into a result
                                                    # of its own

MINITORCH_AUTOTUNE=1 chooses each kernel's configuration by measuring first.
"""

import sys

from _gpu import copy_bandwidth, free, gpu, milliseconds, named, rival
from _harness import Report

TABLES = ("fused", "attention", "products")
AIMS = {"softmax cross-entropy": 1.0, "layer norm": 1.0}    # times torch's speed
ROWS, CLASSES = 8192, 50257
NORM = (16384, 4096)
ATTENTION = (4, 16, 2048, 64)       # batch, heads, time, size
PRODUCTS = ((4096, 4096, 4096), (8192, 1024, 4096))


def draw(cupy, shape, dtype):
    """Standard normal numbers on the device."""
    return cupy.random.default_rng(0).standard_normal(shape, "float32").astype(dtype)


def as_torch(torch, array, grad=True):
    """A torch tensor in the same memory."""
    return torch.from_dlpack(array).requires_grad_(grad)


def cross_entropy(cupy, torch, dtype):
    """({who: run}, bytes that must move): logits twice read, once written, and rows of numbers."""
    from minitorch_dist.kernels import softmax_cross_entropy as kernel
    logits, ct = draw(cupy, (ROWS, CLASSES), dtype), draw(cupy, ROWS, dtype)
    labels = cupy.random.default_rng(1).integers(0, CLASSES, ROWS)

    def ours():
        _, kept = kernel.softmax_cross_entropy(logits, labels)
        kernel.pullback(ct, (True,), logits, labels, kept)
    runs = {"ours": ours}
    if torch:
        x, y, c = as_torch(torch, logits), as_torch(torch, labels, False), as_torch(torch, ct, False)
        runs["torch"] = lambda: torch.autograd.grad(torch.nn.functional.cross_entropy(x, y, reduction="none"), x, c)
    return runs, 3 * logits.nbytes


def layer_norm(cupy, torch, dtype):
    """As cross_entropy: x read twice, y and its cotangent, and the cotangent of x."""
    from minitorch_dist.kernels import norms
    x, ct = draw(cupy, NORM, dtype), draw(cupy, NORM, dtype)
    weight, bias = draw(cupy, NORM[1], dtype), draw(cupy, NORM[1], dtype)

    def ours():
        _, kept = norms.layer_norm(x, weight, bias, 1, 1e-5)
        norms.layer_norm_pullback(ct, (True, True, True), x, weight, 1, kept)
    runs = {"ours": ours}
    if torch:
        leaves = [as_torch(torch, a) for a in (x, weight, bias)]
        c = as_torch(torch, ct, False)
        runs["torch"] = lambda: torch.autograd.grad(
            torch.nn.functional.layer_norm(leaves[0], NORM[1:], *leaves[1:]), leaves, c)
    return runs, 5 * x.nbytes


def attention(cupy, torch, dtype):
    """Causal; the second number is the floating-point operations: 4·b·h·t²·d forward, 2.5 times that backward, half of
    it masked."""
    from minitorch_dist.kernels import flash_attention as kernel
    q, k, v, ct = (draw(cupy, ATTENTION, dtype) for _ in range(4))
    scale = ATTENTION[3] ** -0.5

    def ours():
        _, kept = kernel.flash_attention(q, k, v, True, scale)
        kernel.flash_attention_gradient(ct, q, k, v, True, scale, kept)
    runs = {"ours": ours}
    if torch:
        leaves = [as_torch(torch, a) for a in (q, k, v)]
        c = as_torch(torch, ct, False)
        runs["torch"] = lambda: torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True), leaves, c)
    batch, heads, time, size = ATTENTION
    return runs, 4 * batch * heads * time ** 2 * size * 3.5 / 2


def product(cupy, torch, dtype, sizes, precision):
    """One matrix product; the second number is its operations. CuPy's is cuBLAS, as torch's."""
    from minitorch_dist.kernels import matmul as kernel
    m, n, k = sizes
    a, b = draw(cupy, (m, k), dtype), draw(cupy, (k, n), dtype)
    runs = {"ours": lambda: kernel.matmul(a, b, precision=precision)}
    if torch:
        x, y = as_torch(torch, a, False), as_torch(torch, b, False)

        def theirs():
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            return x @ y
        runs["torch"] = theirs
    return runs, 2 * m * n * k


def measure(cupy, torch, report, title, unit, cases):
    """One table: cases are (name, {who: run}, bytes or operations)."""
    rows = []
    for name, make in cases:
        runs, amount = make()
        ms = {who: milliseconds(cupy, run) for who, run in runs.items()}
        row = {"": name, **{f"{who} ms": f"{t:.3f}" for who, t in ms.items()}}
        row[unit] = f"{amount / ms['ours'] / 1e6:,.0f}"
        if "torch" in ms:
            ratio = ms["torch"] / ms["ours"]
            row["× torch"] = f"{ratio:.2f}"
            aim = next((least for kind, least in AIMS.items() if name.startswith(kind)), None)
            if aim:
                report.aim(f"{name}: times torch's speed", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
        rows.append(row)
        runs.clear()
        free(cupy, torch)
    report.table(title, rows)


def main(names):
    """Measure and report; one line where there is no GPU."""
    if unknown := {*names} - {*TABLES}:
        raise SystemExit(f"kernels.py: no tables {sorted(unknown)}; there are {', '.join(TABLES)}")
    cupy, device = gpu()
    if cupy is None:
        return
    report = Report("_".join(["gpu_kernels", *names]), named("Kernels", names, device))
    torch = rival(report)
    copy = copy_bandwidth(cupy)
    kinds = (("softmax cross-entropy", cross_entropy), ("layer norm", layer_norm))
    tables = {      # name -> (title, unit, cases)
        "fused": (f"forward and backward; a copy runs at {copy:,.0f} GB/s", "GB/s", [
            (f"{kind}, {dtype}", lambda make=make, dtype=dtype: make(cupy, torch, dtype))
            for kind, make in kinds for dtype in ("float32", "float16")]),
        "attention": (f"causal attention {ATTENTION}, forward and backward", "GFLOP/s", [
            (f"attention, {dtype}", lambda dtype=dtype: attention(cupy, torch, dtype))
            for dtype in ("float16", "float32")]),
        "products": ("matrix products", "GFLOP/s", [
            (f"{'×'.join(map(str, sizes))}, {dtype} {precision}",
             lambda sizes=sizes, dtype=dtype, precision=precision: product(cupy, torch, dtype, sizes, precision))
            for sizes in PRODUCTS
            for dtype, precision in (("float16", "ieee"), ("float32", "tf32"), ("float32", "ieee"))])}
    for name in names or TABLES:
        measure(cupy, torch, report, *tables[name])
        report.save()       # what is measured is kept, should the next one fail


if __name__ == "__main__":
    main(sys.argv[1:])
