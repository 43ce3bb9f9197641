"""Fused Adam in GB/s, beside the device's own copy and torch's Adam, and on the tensors of two models; and with state
of 8 bits, beside that of 32.

    python benchmarks/gpu/adam.py           # needs an NVIDIA GPU with CuPy and Triton; torch is a rival, if it is there
    python benchmarks/gpu/adam.py --quick   # all of it small, and once: whether it runs; kept in results/quick/
"""

from functools import partial

from _gpu import QUICK, asked, attempt, copy_bandwidth, free, gpu, in_a_row, milliseconds, report_of, rival

BYTES = 28      # per float32 parameter: read p, g, m, v, write p, m, v
BYTES_8 = 17    # with state of 8 bits: of m and v each a code and a 16th of a scale are read, and written
HELD = 32       # torch's plain Adam holds as much again as p, g, m, v
SIZES = (1000, 10_000) if QUICK else tuple(10 ** k for k in range(5, 10))
GPT = {"vocabulary": 256, "length": 256, "layers": 6, "heads": 6, "dim": 384} if not QUICK else {
    "vocabulary": 16, "length": 16, "layers": 2, "heads": 2, "dim": 16}
RIVALS = {"torch fused": {"fused": True}, "torch foreach": {"foreach": True}, "torch plain": {"foreach": False}}


def ours(cupy, sizes, **options):
    """A step of our Adam on float32 parameters of these sizes: one launch."""
    from minitorch_dist import optim
    from minitorch_dist.autodiff.tensor import Tensor
    params = [Tensor(cupy.ones(size, cupy.float32)).requires_grad_() for size in sizes]
    for p in params:
        p.grad = Tensor(cupy.sin(cupy.arange(p.size, dtype=cupy.float32)))      # codes of all kinds
    return optim.Adam(params, **options).step


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


def timer(sizes):
    """What measures a step: of many small tensors it is a matter of the host."""
    return milliseconds if len(sizes) == 1 else in_a_row


def times(cupy, torch, sizes):
    """{who: milliseconds of a step}; MemoryError where the device has too little memory left."""
    free(cupy, torch)
    wanted, left = HELD * sum(sizes), cupy.cuda.Device().mem_info[0]
    if wanted > left:
        raise MemoryError(f"{wanted / 1e9:.0f} GB are needed, {left / 1e9:.0f} are free")
    measure = timer(sizes)
    ms = {"ours": measure(cupy, ours(cupy, sizes))}
    for who, how in RIVALS.items() if torch else ():
        free(cupy, torch)
        ms[who] = measure(cupy, theirs(torch, sizes, **how))
    return ms


def beside_torch(report, case, sizes, cupy, torch, copy):
    """A row of the first table."""
    ms = times(cupy, torch, sizes)
    rate = sum(sizes) * BYTES / ms["ours"] / 1e6
    if len(sizes) == 1 and sum(sizes) >= 10 ** 7:
        report.aim(f"{case}: share of copy bandwidth", "≥ 0.9", f"{rate / copy:.2f}", rate / copy >= 0.9)
    if torch:
        ratio, aim = ms["torch fused"] / ms["ours"], 1.0 if len(sizes) == 1 else 2.0
        report.aim(f"{case}: times torch's fused", f"≥ {aim}", f"{ratio:.2f}", ratio >= aim)
    return {"GB/s": f"{rate:,.0f}", "of copy": f"{rate / copy:.2f}",
            **{f"µs {who}": f"{1e3 * t:,.1f}" for who, t in ms.items()}}


def of_8_bits(report, case, sizes, cupy, torch, copy):
    """A row of the second: its own bytes per second, and the times of both."""
    ms = {}
    for bits in (8, 32):
        free(cupy, torch)
        ms[bits] = timer(sizes)(cupy, ours(cupy, sizes, state_bits=bits))
    rate, ratio = sum(sizes) * BYTES_8 / ms[8] / 1e6, ms[32] / ms[8]
    if len(sizes) == 1 and sum(sizes) >= 10 ** 7:
        report.aim(f"{case}: 8 bits, times 32 bits", "≥ 1.0", f"{ratio:.2f}", ratio >= 1)
    return {"GB/s": f"{rate:,.0f}", "of copy": f"{rate / copy:.2f}",
            **{f"µs {bits} bits": f"{1e3 * t:,.1f}" for bits, t in ms.items()}}


def main():
    """Measure and report; one line where there is no GPU."""
    asked(__doc__)
    cupy, name = gpu()
    if cupy is None:
        return
    report = report_of("gpu_adam", "Fused Adam", name)
    torch, copy = rival(report), copy_bandwidth(cupy)
    cases = {f"{size:,} parameters": [size] for size in SIZES} | model_sizes()
    for row, what in ((beside_torch, f"copy {copy:,.0f} GB/s; {BYTES} bytes per parameter"),
                      (of_8_bits, f"state of 8 bits, {BYTES_8} bytes per parameter")):
        rows = [attempt({"case": case, "tensors": len(sizes)}, partial(row, report, case, sizes, cupy, torch, copy))
                for case, sizes in cases.items()]
        report.table(f"{name}: {what}", rows)
        report.save()       # what is measured is kept, should the next one fail


if __name__ == "__main__":
    main()
