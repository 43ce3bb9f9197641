"""Fused Adam in GB/s, beside the device's own copy and torch's Adam, and on the tensors of two models.

    python benchmarks/gpu/adam.py           # needs an NVIDIA GPU with CuPy and Triton; torch is a rival, if it is there
    python benchmarks/gpu/adam.py --quick   # all of it small, and once: whether it runs; kept in results/quick/
"""

from _gpu import QUICK, asked, attempt, copy_bandwidth, free, gpu, in_a_row, milliseconds, report_of, rival

BYTES = 28      # per float32 parameter: read p, g, m, v, write p, m, v
HELD = 32       # torch's plain Adam holds as much again as p, g, m, v
SIZES = (1000, 10_000) if QUICK else tuple(10 ** k for k in range(5, 10))
GPT = {"vocabulary": 256, "length": 256, "layers": 6, "heads": 6, "dim": 384} if not QUICK else {
    "vocabulary": 16, "length": 16, "layers": 2, "heads": 2, "dim": 16}
RIVALS = {"torch fused": {"fused": True}, "torch foreach": {"foreach": True}, "torch plain": {"foreach": False}}


def ours(cupy, sizes):
    """A step of our Adam on float32 parameters of these sizes: one launch."""
    from minitorch_dist import optim
    from minitorch_dist.autodiff.tensor import Tensor
    params = [Tensor(cupy.ones(size, cupy.float32)).requires_grad_() for size in sizes]
    for p in params:
        p.grad = Tensor(cupy.ones(p.shape, cupy.float32))
    return optim.Adam(params).step


def theirs(torch, sizes, **how):
    """torch's Adam of one implementation on the same sizes; torch and CuPy share the default stream."""
    params = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in sizes]
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.Adam(params, **how).step


def model_sizes():
    """The parameters' sizes of the MNIST network and of a GPT, of 10.8 million parameters."""
    from minitorch_dist import nn
    hidden = 16 if QUICK else 512
    mlp = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return {"MNIST network": [p.size for p in mlp.parameters()], "GPT": [p.size for p in nn.GPT(**GPT).parameters()]}


def times(cupy, torch, sizes):
    """{who: milliseconds of a step}; MemoryError where the device has too little memory left."""
    free(cupy, torch)
    wanted, left = HELD * sum(sizes), cupy.cuda.Device().mem_info[0]
    if wanted > left:
        raise MemoryError(f"{wanted / 1e9:.0f} GB are needed, {left / 1e9:.0f} are free")
    measure = milliseconds if len(sizes) == 1 else in_a_row     # many small tensors are a matter of the host
    ms = {"ours": measure(cupy, ours(cupy, sizes))}
    free(cupy)
    for who, how in RIVALS.items() if torch else ():
        ms[who] = measure(cupy, theirs(torch, sizes, **how))
        torch.cuda.empty_cache()
    return ms


def main():
    """Measure and report; one line where there is no GPU."""
    asked(__doc__)
    cupy, name = gpu()
    if cupy is None:
        return
    report = report_of("gpu_adam", "Fused Adam", name)
    torch, copy, rows = rival(report), copy_bandwidth(cupy), []
    cases = {f"{size:,} parameters": [size] for size in SIZES} | model_sizes()
    for case, sizes in cases.items():
        def measured(case=case, sizes=sizes):
            ms = times(cupy, torch, sizes)
            rate = sum(sizes) * BYTES / ms["ours"] / 1e6
            if len(sizes) == 1 and sum(sizes) >= 10 ** 7:
                report.aim(f"{case}: share of copy bandwidth", "≥ 0.9", f"{rate / copy:.2f}", rate / copy >= 0.9)
            if torch:
                ratio, aim = ms["torch fused"] / ms["ours"], 1.0 if len(sizes) == 1 else 2.0
                report.aim(f"{case}: times torch's fused", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
            return {"GB/s": f"{rate:,.0f}", "of copy": f"{rate / copy:.2f}",
                    **{f"µs {who}": f"{1e3 * t:,.1f}" for who, t in ms.items()}}
        rows.append(attempt({"case": case, "tensors": len(sizes)}, measured))
    report.table(f"{name}: copy {copy:,.0f} GB/s; {BYTES} bytes per parameter", rows)
    report.save()


if __name__ == "__main__":
    main()
