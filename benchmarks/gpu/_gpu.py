"""What the GPU benchmarks share: whether there is a GPU, and times by events."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WARM_UP = 5


def gpu():
    """(cupy, the device's name), or (None, None) after a line that says what is missing."""
    try:
        import cupy
        reason = None if cupy.is_available() else "CuPy finds no GPU"
    except ImportError:
        reason = "CuPy is not installed"
    if reason:
        print(f"not yet measured: {reason}. python -m minitorch_dist doctor says what is missing")
        return None, None
    return cupy, cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()


def milliseconds(cupy, run, repeats=30):
    """The median time of run() on the GPU, by events, after a warm-up that may compile."""
    times = []
    for turn in range(repeats + WARM_UP):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    return sorted(times)[len(times) // 2]


def copy_bandwidth(cupy):
    """GB/s of the device's own copy of 1 GiB, both ways counted."""
    x = cupy.ones(1 << 28, cupy.float32)
    y = cupy.empty_like(x)
    return 2 * x.nbytes / milliseconds(cupy, lambda: cupy.copyto(y, x)) / 1e6


def free(cupy, torch=None):
    """Hand cached device memory back, so that the next rival finds it."""
    cupy.get_default_memory_pool().free_all_blocks()
    if torch is not None:
        torch.cuda.empty_cache()
