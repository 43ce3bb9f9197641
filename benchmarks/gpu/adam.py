"""Fused Adam in GB/s, beside the device's own copy and torch's Adam, and on the tensors of two models.

    python benchmarks/gpu/adam.py       # needs an NVIDIA GPU with CuPy and Triton; torch is a rival, if it is there
"""

from _gpu import copy_bandwidth, free, gpu, in_a_row, milliseconds, rival
from _harness import Report

BYTES = 28      # per float32 parameter: read p, g, m, v, write p, m, v
SIZES = tuple(10 ** k for k in range(5, 10))


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
    """The parameters' sizes of the MNIST network and of a GPT of 10.8 million parameters."""
    from minitorch_dist import nn
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    gpt = nn.GPT(vocabulary=256, length=256, layers=6, heads=6, dim=384)
    return {"MNIST network": [p.size for p in mlp.parameters()], "GPT": [p.size for p in gpt.parameters()]}


def main():
    """Measure and report; one line where there is no GPU."""
    cupy, name = gpu()
    if cupy is None:
        return
    report = Report("gpu_adam", f"Fused Adam on {name}")
    torch, rivals = rival(report), {}
    if torch:
        rivals = {"torch fused": {"fused": True}, "torch foreach": {"foreach": True}, "torch plain": {"foreach": False}}
    copy = copy_bandwidth(cupy)
    cases = {f"{size:,} parameters": [size] for size in SIZES} | model_sizes()
    rows = []
    for case, sizes in cases.items():
        if sum(sizes) * 4 * 8 > cupy.cuda.Device().mem_info[0]:
            continue
        measure = milliseconds if len(sizes) == 1 else in_a_row     # many small tensors are a matter of the host
        ms = {"ours": measure(cupy, ours(cupy, sizes))}
        free(cupy)
        for who, how in rivals.items():
            ms[who] = measure(cupy, theirs(torch, sizes, **how))
            torch.cuda.empty_cache()
        rate = sum(sizes) * BYTES / ms["ours"] / 1e6
        rows.append({"case": case, "tensors": len(sizes), "GB/s": f"{rate:,.0f}", "of copy": f"{rate / copy:.2f}",
                     **{f"µs {who}": f"{1e3 * t:,.1f}" for who, t in ms.items()}})
        if len(sizes) == 1 and sum(sizes) >= 10 ** 7:
            report.aim(f"{case}: share of copy bandwidth", "≥ 0.9", f"{rate / copy:.2f}", rate / copy >= 0.9)
        if rivals:
            ratio, aim = ms["torch fused"] / ms["ours"], 1.0 if len(sizes) == 1 else 2.0
            report.aim(f"{case}: times torch's fused", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
    report.table(f"{name}: copy {copy:,.0f} GB/s; {BYTES} bytes per parameter", rows)
    report.save()


if __name__ == "__main__":
    main()
