"""What the GPU benchmarks share: whether there is a GPU, torch if it can use it, what --quick makes small, times, and
rows that fail alone."""

import gc
import importlib.metadata
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _harness import RESULTS, Report, installed, named, result  # noqa: E402

QUICK = "--quick" in sys.argv       # everything small, and once: whether it runs, not how fast
WARM_UP, REPEATS = (1, 1) if QUICK else (5, 30)
CALLS, TURNS = (2, 1) if QUICK else (100, 10)       # of in_a_row
GIB = 1 << 10 if QUICK else 1 << 28                 # floats of 32 bits
HEAD_START = 2      # copies of a GiB that the GPU makes before a run that is timed: about a millisecond


def asked(about, among=()):
    """What the command line names of `among`, all of it if nothing; see named."""
    return named(about, among, ("--quick",))


def gpu():
    """(cupy, the device's name with the versions that a figure depends on), or (None, None) after a line that says what
    is missing."""
    try:
        import cupy
        import triton  # noqa: F401
        reason = None if cupy.is_available() else "CuPy finds no GPU"
    except ImportError as error:
        reason = f"{error.name} is not installed"
    if reason:
        print(f"not yet measured: {reason}. python -m minitorch_dist doctor says what is missing")
        return None, None
    runtime = cupy.cuda.runtime
    driver = runtime.driverGetVersion()
    return cupy, (f"{runtime.getDeviceProperties(0)['name'].decode()} (driver for CUDA {driver // 1000}."
                  f"{driver % 1000 // 10}, CuPy {cupy.__version__}, Triton {importlib.metadata.version('triton')})")


def report_of(name, title, device, names=(), among=()):
    """A Report of all of a benchmark, or of the parts that were asked for, on this device: another one's stands beside
    it. One of --quick is kept apart, and so is one of an emulated GPU."""
    part = f" ({', '.join(names)})" if set(names) < set(among) else ""
    apart = QUICK or device.startswith("Emulated")
    card = re.sub("[^a-z0-9]+", "_", device.partition(" (")[0].lower())
    return Report(f"{result(name, names, among)}_{card}", f"{title}{part} on {device}",
                  RESULTS / "quick" if apart else RESULTS)


def rival(report):
    """torch, or None after a line that says why not: its wheel for CPUs alone is no rival."""
    if not installed(report.skipped, "torch"):
        return None
    import torch
    if not torch.cuda.is_available():
        report.skipped["torch"] = f"{torch.__version__} finds no GPU"
        print(f"skipped: torch {report.skipped['torch']}", flush=True)
        return None
    return torch


def attempt(row, measure):
    """The row with what measure() adds to it; where that fails, with the error, and the next is measured all the same.
    Printed at once: whoever ends the program before its table has the numbers."""
    try:
        row = row | measure()
    except Exception as error:
        row = row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200].rstrip(": ")}
    print("  " + ", ".join(f"{name} {value}".strip() for name, value in row.items()), flush=True)
    return row


def milliseconds(cupy, run):
    """The median time of run() on the GPU, by events, after a warm-up that may compile.

    The GPU copies some GiB before each, in about a millisecond: it is busy until the host has asked for the whole run,
    whose time is then that of its kernels. Nothing that the run reads is left in the L2 cache, of which half has yet to
    be written to memory: about what the run leaves so, too. (Behind a mere clearing it is all of it: 60 MB on an H200,
    some 30 more than Adam leaves, which at 10⁷ parameters moves 280.)"""
    times, source, copy = [], cupy.empty(GIB, cupy.float32), cupy.empty(GIB, cupy.float32)
    for turn in range(REPEATS + WARM_UP):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(HEAD_START):
            cupy.copyto(copy, source)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    return sorted(times)[len(times) // 2]


def in_a_row(cupy, run):
    """The best time of run() in ms when one call follows the other, as in training: the host's where it is slower."""
    best = float("inf")
    for turn in range(TURNS + 1):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        cupy.cuda.Device().synchronize()
        if turn:
            best = min(best, (time.perf_counter() - begin) / CALLS)
    return 1e3 * best


def copy_bandwidth(cupy):
    """GB/s of the device's own copy of 1 GiB, both ways counted."""
    x = cupy.ones(GIB, cupy.float32)
    y = cupy.empty_like(x)
    return 2 * x.nbytes / milliseconds(cupy, lambda: cupy.copyto(y, x)) / 1e6


def free(cupy, torch=None):
    """Hand cached device memory back, of cycles that Python has not yet come to, too: so that the next rival finds
    it."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if torch is not None:
        torch.cuda.empty_cache()
