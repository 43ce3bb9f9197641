"""Your kernels in GB/s on a GPU, beside the library's, torch's, and the device's own copy.

    python exercises/13_triton/bench.py            # yours where they have passed, else ours
    python exercises/13_triton/bench.py --ours     # ours

Needs an NVIDIA GPU, CuPy and Triton; torch is a rival if it is there. Says so where one is missing.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"      # compile, don't interpret; Triton asks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from exercises.frame.compiled import answers, by_cupy  # noqa: E402
from exercises.frame.course import Course  # noqa: E402
from exercises.frame.pictures import COLORS, canvas, save  # noqa: E402

ELEMENTS = 1 << 26                  # 256 MiB per array: no cache holds it
COLUMNS = 1000                      # of the softmax: no power of 2
BYTES = {"add": 12, "softmax": 8, "adam": 28}      # per element, at least
REPEATS, WARM_UP = 30, 5


def missing():
    """What there is not, or None."""
    for package, why in (("triton", "on Linux: pip install triton"), ("cupy", "pip install 'cupy-cuda13x[ctk]'")):
        try:
            __import__(package)
        except ImportError:
            return f"{package} is not installed ({why})"
    import cupy
    return None if cupy.is_available() else "CuPy finds no NVIDIA GPU"


# ---------------------------------------------------------------- what is measured

def runs(cupy, modules, torch):
    """{kernel: {who: (function that works on the GPU, what it has made, what that should be)}}."""
    def normal(*shape):
        return cupy.random.standard_normal(shape, dtype=cupy.float32)
    from minitorch_dist.kernels import adam
    from minitorch_dist.kernels import add as library
    x, y, out = normal(ELEMENTS), normal(ELEMENTS), cupy.empty(ELEMENTS, cupy.float32)
    yield "add", {"you": (lambda: modules["add"].add(x, y, out), lambda: out, lambda: x + y),
                  "the library": (lambda: library.add(x, y), None, None),
                  **({"torch": (torch_add(torch, x, y), None, None)} if torch else {})}
    rows = x[:ELEMENTS // COLUMNS * COLUMNS].reshape(-1, COLUMNS)
    made = out[:rows.size].reshape(rows.shape)
    yield "softmax", {"you": (lambda: modules["softmax"].softmax(rows, made), lambda: made, lambda: plain(cupy, rows)),
                      "CuPy, pass by pass": (lambda: plain(cupy, rows), None, None),
                      **({"torch": (torch_softmax(torch, rows), None, None)} if torch else {})}
    p, g = x, y
    yours = modules["adam"].Adam(p, g, [ELEMENTS // 3, ELEMENTS], [0.0, 0.01])
    state = {name: cupy.zeros(ELEMENTS, cupy.float32) for name in ("p", "g", "m", "v")}
    update = adam.Update([state], [0], decoupled=True)
    yield "adam", {"you": (yours.step, lambda: p[:1000], lambda: first_step(cupy, p[:1000], g[:1000])),
                   "the library": (lambda: update([(1e-3, (0.9, 0.999), 1e-8, 0.01)]), None, None),
                   **({"torch fused": (torch_adam(torch), None, None)} if torch else {})}


def plain(cupy, x):
    e = cupy.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def first_step(cupy, p, g):
    """p after Adam's first step without decay: then m̂ is g, and v̂ its square."""
    return p - 1e-3 * g / (cupy.abs(g) + 1e-8)


def torch_add(torch, x, y):
    x, y = torch.as_tensor(x, device="cuda"), torch.as_tensor(y, device="cuda")
    return lambda: x + y


def torch_softmax(torch, rows):
    rows = torch.as_tensor(rows, device="cuda")
    return lambda: torch.softmax(rows, dim=1)


def torch_adam(torch):
    p = torch.nn.Parameter(torch.ones(ELEMENTS, device="cuda"))
    p.grad = torch.ones_like(p)
    return torch.optim.AdamW([p], fused=True).step


def milliseconds(cupy, run):
    """The median time of run() on the GPU, by events: a launch returns at once, so the host's clock sees nothing."""
    times = []
    for turn in range(WARM_UP + REPEATS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    return float(np.median(times))


# ---------------------------------------------------------------- the table and the picture

def measure(cupy, which):
    """{kernel: {who: GB/s}}. A kernel of yours that computes something else is named, and not measured."""
    modules, whose = answers("13", which)
    try:
        import torch
        torch = torch if torch.cuda.is_available() else None
    except ImportError:
        torch = None
    print("torch is not here: nothing of it is measured\n" if torch is None else "", end="")
    x = cupy.ones(ELEMENTS, cupy.float32)
    y = cupy.empty_like(x)
    found = {"copy": {"the device's own": 2 * x.nbytes / milliseconds(cupy, lambda: cupy.copyto(y, x)) / 1e6}}
    for kernel, alternatives in runs(cupy, modules, torch):
        found[kernel] = {}
        for who, (run, made, right) in alternatives.items():
            if made is not None:
                expected = right().copy()
                run()
                if not cupy.allclose(made(), expected, rtol=1e-4, atol=1e-6):
                    print(f"{kernel}: your kernel computes something else on this GPU: not measured")
                    continue
            name = {"you": "yours" if whose[kernel] == "mine" else "the course's"}.get(who, who)
            found[kernel][name] = BYTES[kernel] * ELEMENTS / milliseconds(cupy, run) / 1e6
    return found


def draw(found, device, path):
    """Bars of GB/s."""
    rows = [(f"{kernel}: {who}", rate, who) for kernel, rates in found.items() for who, rate in rates.items()]
    figure, axes = canvas(size=(8.6, 0.8 + 0.36 * len(rows)))
    axes.barh([name for name, _, _ in rows], [rate for _, rate, _ in rows],
              color=[COLORS[1] if who in ("yours", "the course's") else "#bcd4e6" for _, _, who in rows])
    for i, (_, rate, _) in enumerate(rows):
        axes.text(rate, i, f" {rate:,.0f}", va="center")
    axes.axvline(found["copy"]["the device's own"], color=COLORS[0], lw=1)
    axes.set(xlabel=f"GB/s on {device}, of the bytes that must be moved; the line is a copy")
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    save(figure, path)


def main(argv):
    """Measure and draw; one sentence where that can't be."""
    if reason := missing():
        print(f"There is no GPU to measure on: {reason}.\nThe check runs in Triton's interpreter and needs none; it "
              "draws the bytes that your kernels move, which is what the time on a GPU follows.")
        return 1
    import cupy
    by_cupy()
    found = measure(cupy, "ours" if "--ours" in argv else "mine")
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    for kernel, rates in found.items():
        for who, rate in rates.items():
            print(f"{kernel:8} {who:20} {rate:8,.0f} GB/s")
    path = Course().mine / "13_triton" / "pictures" / "bandwidth.png"
    draw(found, device, path)
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
