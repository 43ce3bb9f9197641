"""Each kernel, forward and backward, beside torch: softmax cross-entropy, norms, attention, matrix products, the loss
of an output layer; and beside CuPy's unfused formulas, by the size from which it is faster: wins_from in
minitorch_dist/kernels/__init__.py.

    python benchmarks/gpu/kernels.py                # needs an NVIDIA GPU with CuPy and Triton; torch is a rival
    python benchmarks/gpu/kernels.py attention      # of fused, attention, products, loss, thresholds those that are
                                                    # named: into a result of its own
    python benchmarks/gpu/kernels.py --quick        # small, and once: whether it runs; kept in results/quick/

MINITORCH_AUTOTUNE=1 chooses each kernel's configuration by measuring first.
"""

from _gpu import QUICK, asked, attempt, copy_bandwidth, free, gpu, in_a_row, milliseconds, report_of, rival

TABLES = ("fused", "attention", "products", "loss", "thresholds")
AIMS = {"softmax cross-entropy": 1.0, "layer norm": 1.0}    # times torch's speed
LOGITS = (5, 67) if QUICK else (8192, 50257)
NORM = (5, 67) if QUICK else (16384, 4096)
ATTENTION = (1, 2, 33, 16) if QUICK else (4, 16, 2048, 64)       # batch, heads, time, size
WINDOW = 9 if QUICK else 256        # of these positions
HEAD = (5, 8, 67) if QUICK else (4096, 768, 50257)      # rows, features, classes: GPT-2's output layer
SIZES = (512, 1024) if QUICK else tuple(4 ** k for k in range(5, 13))       # elements of an op's first input
PRODUCTS = ((48, 16, 32),) if QUICK else ((4096, 4096, 4096), (8192, 1024, 4096))


def draw(cupy, shape, dtype):
    """Standard normal numbers on the device."""
    return cupy.random.default_rng(0).standard_normal(shape, cupy.float32).astype(dtype)


def as_torch(torch, array, grad=True):
    """A torch tensor in the same memory."""
    return torch.from_dlpack(array).requires_grad_(grad)


def cross_entropy(cupy, torch, dtype):
    """({who: run}, bytes that must move): logits twice read, once written, and rows of numbers."""
    from minitorch_dist.kernels import softmax_cross_entropy as kernel
    rows, classes = LOGITS
    logits, ct = draw(cupy, LOGITS, dtype), draw(cupy, rows, dtype)
    labels = cupy.random.default_rng(1).integers(0, classes, rows)

    def ours():
        _, kept = kernel.softmax_cross_entropy(logits, labels)
        kernel.pullback(ct, (True,), logits, labels, None, kept)
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


def attention(cupy, torch, dtype, precision=None, window=None):
    """Causal; the second number is the floating-point operations: 4·b·h·t²·d forward, 2.5 times that backward, half of
    it masked, or all but a window; the third how far from exact forward is. torch has several implementations: the one
    that it chooses, and cuDNN's, which it leaves out."""
    from minitorch_dist.autodiff.ops.attention import band_of
    from minitorch_dist.kernels import flash_attention as kernel
    band = band_of(True, window)
    q, k, v, ct = (draw(cupy, ATTENTION, dtype) for _ in range(4))
    scale = ATTENTION[3] ** -0.5

    def ours():
        out, kept = kernel.flash_attention(q, k, v, band, scale, precision=precision)
        kernel.flash_attention_gradient(ct, q, k, v, band, scale, kept, precision=precision)
        return out
    runs = {"ours": ours}
    if torch:
        leaves = [as_torch(torch, a) for a in (q, k, v)]
        c = as_torch(torch, ct, False)

        def theirs():
            torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True), leaves, c)

        def cudnn():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                theirs()
        runs |= {"torch": theirs} | ({"torch, cuDNN": cudnn} if dtype == "float16" else {})
    batch, heads, time, size = ATTENTION
    exact = one_head(cupy, *(x[-1, -1].astype(cupy.float64) for x in (q, k, v)), scale, window or time)
    off = cupy.linalg.norm(ours()[-1, -1] - exact) / cupy.linalg.norm(exact)
    pairs = time ** 2 / 2 if window is None else window * time - window ** 2 / 2
    return runs, 4 * batch * heads * pairs * size * 3.5, {"off": f"{float(off):.1e}"}


def one_head(cupy, q, k, v, scale, window):
    """Causal attention as it is defined."""
    sees = cupy.tri(len(q), dtype=bool) & ~cupy.tri(len(q), k=-window, dtype=bool)
    scores = cupy.where(sees, q @ k.T * scale, -cupy.inf)
    weights = cupy.exp(scores - scores.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True)


def product(cupy, torch, dtype, sizes, precision):
    """One matrix product; the second number is its operations. CuPy's is cuBLAS, as torch's."""
    from minitorch_dist.kernels import matmul as kernel
    m, n, k = sizes
    a, b = draw(cupy, (m, k), dtype), draw(cupy, (k, n), dtype)
    runs = {"ours": lambda: kernel.matmul(a, b, precision=precision)}
    if torch:
        x, y = as_torch(torch, a, False), as_torch(torch, b, False)
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        runs["torch"] = lambda: x @ y
    return runs, 2 * m * n * k


def output_layer(cupy, torch, dtype, tiled):
    """A product and its loss, by tiles or of all logits; the second number is the operations of three products, the
    third the bytes of the tape."""
    import minitorch_dist as mt
    from minitorch_dist import ledger, nn
    rows, width, classes = HEAD
    arrays = [draw(cupy, (n, width), dtype) / 16 for n in (rows, classes)]
    labels = cupy.random.default_rng(1).integers(0, classes, rows)
    leaves = [mt.tensor(a, requires_grad=True) for a in arrays]

    def loss():
        return nn.linear_cross_entropy(*leaves, labels) if tiled else nn.cross_entropy(mt.linear(*leaves), labels)

    def ours():
        loss().backward()
        for leaf in leaves:
            leaf.grad = None
    runs = {"ours": ours}
    if torch:
        x, weight = (as_torch(torch, a) for a in arrays)
        y, functional = as_torch(torch, labels, False), torch.nn.functional
        runs["torch"] = lambda: torch.autograd.grad(functional.cross_entropy(functional.linear(x, weight), y),
                                                    (x, weight))
    with ledger.record(memory=True) as book:
        kept = loss()
        held = book.live["activation"]
    del kept
    return runs, 6 * rows * width * classes, {"kept, MB": f"{held / 1e6:.1f}"}


def measure(cupy, torch, report, title, unit, cases):
    """One table: cases are (name, a function that gives {who: run}, bytes or operations, and more columns or none)."""
    rows = []
    for name, make in cases:
        def measured(name=name, make=make):
            free(cupy, torch)
            runs, amount, *more = make()
            ms, row = {"ours": milliseconds(cupy, runs.pop("ours"))}, dict(*more)
            for who, run in runs.items():
                try:
                    ms[who] = milliseconds(cupy, run)
                except RuntimeError as error:       # a rival that isn't there for this case
                    row[f"{who} ms"] = str(error).splitlines()[0][:60]
            row |= {f"{who} ms": f"{t:.3f}" for who, t in ms.items()} | {unit: f"{amount / ms['ours'] / 1e6:,.0f}"}
            if len(ms) == 1:
                return row
            ratio = min(t for who, t in ms.items() if who != "ours") / ms["ours"]
            aim = next((least for kind, least in AIMS.items() if name.startswith(kind)), None)
            if aim:
                report.aim(f"{name}: times torch's speed", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
            return row | {"× torch's best": f"{ratio:.2f}"}
        rows.append(attempt({"": name}, measured))
    report.table(title, rows)


def steps_of_ops(cupy, size):
    """{op of kernels.OPS: its forward and backward, as models call it, on a first input of `size` float32 elements}."""
    import minitorch_dist as mt
    width = 64
    rows = size // width
    x, y, z = (mt.tensor(draw(cupy, (rows, width), "float32"), requires_grad=True) for _ in range(3))
    square = mt.tensor(draw(cupy, (width, width), "float32"), requires_grad=True)
    vector = mt.tensor(draw(cupy, width, "float32"), requires_grad=True)
    labels = cupy.zeros(rows, cupy.int64)
    heads = [t.detach().reshape(-1, 1, min(rows, 128), width).requires_grad_() for t in (x, y, z)]
    calls = {"softmax_cross_entropy": ((x,), lambda: mt.softmax_cross_entropy(x, labels)),
             "linear_cross_entropy": ((x, square), lambda: mt.linear_cross_entropy(x, square, labels)),
             "layer_norm": ((x, vector), lambda: mt.layer_norm(x, width, vector, vector)),
             "rms_norm": ((x, vector), lambda: mt.rms_norm(x, width, vector)),
             "gelu": ((x,), lambda: mt.gelu(x, "tanh")),
             "linear_gelu": ((x, square, vector), lambda: mt.linear_gelu(x, square, vector, "tanh")),
             "swiglu": ((x, y), lambda: mt.swiglu(x, y)),
             "attention": (heads, lambda: mt.scaled_dot_product_attention(*heads, is_causal=True))}

    def step(leaves, call):
        y = call()
        y.backward(mt.ones(*y.shape, device="cuda"))
        for leaf in leaves:
            leaf.grad = None
    return {op: lambda leaves=leaves, call=call: step(leaves, call) for op, (leaves, call) in calls.items()}


def thresholds(cupy, torch, report):
    """How many times as fast as CuPy's formulas each op's kernels are, by size, calls in a row as in training."""
    from minitorch_dist import kernels

    def ratio(op, size):
        step = steps_of_ops(cupy, size)[op]
        fused = in_a_row(cupy, step)
        with kernels.disable():
            return in_a_row(cupy, step) / fused

    def measured(op):
        free(cupy, torch)
        ratios = {size: ratio(op, size) for size in SIZES}
        won = [size for size in SIZES if all(ratios[larger] >= 1 for larger in SIZES if larger >= size)]
        wins = f"{won[0]:,}" if won else "never"
        return {f"{size:,}": f"{r:.2f}" for size, r in ratios.items()} | {"wins from": wins}
    rows = []
    for op, entry in kernels.OPS.items():
        rows.append(attempt({"op": op, "wins_from now": f"{entry.wins_from:,}"}, lambda op=op: measured(op)))
    report.table("times CuPy's speed, forward and backward, by the elements of the first input, float32", rows)


def main():
    """Measure and report; one line where there is no GPU."""
    names = asked(__doc__, TABLES)
    cupy, device = gpu()
    if cupy is None:
        return
    report = report_of("gpu_kernels", "Kernels", device, names, TABLES)
    torch = rival(report)
    copy = copy_bandwidth(cupy)
    kinds = (("softmax cross-entropy", cross_entropy), ("layer norm", layer_norm))
    tables = {      # name -> (title, unit, cases)
        "fused": (f"forward and backward; a copy runs at {copy:,.0f} GB/s", "GB/s", [
            (f"{kind}, {dtype}", lambda make=make, dtype=dtype: make(cupy, torch, dtype))
            for kind, make in kinds for dtype in ("float32", "float16")]),
        "attention": (f"causal attention {ATTENTION}, forward and backward", "GFLOP/s", [
            *((f"attention, {dtype}", lambda dtype=dtype: attention(cupy, torch, dtype))
              for dtype in ("float16", "float32")),
            ("attention, float32 by its own instructions", lambda: attention(cupy, None, "float32", "ieee")),
            (f"attention, float16, a window of {WINDOW}", lambda: attention(cupy, None, "float16", window=WINDOW))]),
        "products": ("matrix products", "GFLOP/s", [
            (f"{'×'.join(map(str, sizes))}, {dtype} {precision}",
             lambda sizes=sizes, dtype=dtype, precision=precision: product(cupy, torch, dtype, sizes, precision))
            for sizes in PRODUCTS
            for dtype, precision in (("float16", "ieee"), ("float32", "tf32"), ("float32", "ieee"))]),
        "loss": (f"the loss of {HEAD[0]:,} rows of {HEAD[1]} features, {HEAD[2]:,} classes, both ways", "GFLOP/s", [
            (f"{way}, {dtype}", lambda dtype=dtype, tiled=tiled: output_layer(cupy, torch, dtype, tiled))
            for dtype in ("float32", "float16") for way, tiled in (("by tiles", True), ("all logits", False))])}
    for name in names:
        thresholds(cupy, torch, report) if name == "thresholds" else measure(cupy, torch, report, *tables[name])
        report.save()       # what is measured is kept, should the next one fail


if __name__ == "__main__":
    main()
