"""Microseconds per op on (4, 4) float32 arrays, where an engine's own cost is all there is. One pinned core.

    python benchmarks/op_overhead.py

Each program is a chain of 200 ops. "forward" records for backward (and lets go of the record again), "no grad" does
not; "both" is forward and backward. Ours runs with all its safety on. A chain of 10,000 ops must cost as much per op.
"""

from _harness import Report, compare, installed, named, one_core

one_core()

import numpy as np  # noqa: E402

import minitorch_dist as mt  # noqa: E402

SHORT, LONG = 200, 10_000
AIMS = {"forward": 2.0, "both": 6.0, "no grad": 1.0}    # µs per op on a core of 2.5 GHz, for these two programs:
AIMED_AT = ("mul, add", "tanh")
RIVAL_AIM = 1.6         # times torch eager, forward and backward
LONG_AIM = 1.25         # times the short chain's cost per op (its tape no longer fits into the cache)


def mul_add(lib, x, w, n):
    for _ in range(n // 2):
        x = x * w + w
    return x


def tanh(lib, x, w, n):
    for _ in range(n):
        x = lib.tanh(x)
    return x


def matmul(lib, x, w, n):
    for _ in range(n):
        x = x @ w
    return x


def center(lib, x, w, n):
    for _ in range(n // 2):
        x = x - x.sum(1, keepdims=True)
    return x


def slices(lib, x, w, n):
    for _ in range(n):
        x = x[0:4]
    return x


def rows(lib, x, w, n):
    for _ in range(n):
        x = x[lib.rows]
    return x


PROGRAMS = {"mul, add": mul_add, "tanh": tanh, "matmul": matmul, "x - x.sum(1, keepdims=True)": center,
            "x[0:4]": slices, "x[integer array]": rows}


class Numpy:
    """Bare NumPy: no tape, so it has one pass only."""

    tanh, rows = staticmethod(np.tanh), np.arange(4)

    @staticmethod
    def passes(program, n):
        x, w = start()
        return {"no grad": lambda: program(Numpy, x, w, n)}


class Ours:
    """This library."""

    tanh, rows = staticmethod(mt.tanh), np.arange(4)

    @staticmethod
    def passes(program, n):
        x, w = (mt.tensor(a, requires_grad=True) for a in start())
        cotangent = start()[0]

        def both():
            x.grad = w.grad = None
            program(Ours, x, w, n).backward(cotangent)

        def no_grad():
            with mt.no_grad():
                program(Ours, x, w, n)
        return {"forward": lambda: program(Ours, x, w, n), "both": both, "no grad": no_grad}


def torch_eager():
    """torch, as it comes."""
    import torch
    torch.set_num_threads(1)

    class Torch:
        tanh, rows = staticmethod(torch.tanh), torch.arange(4)

        @staticmethod
        def passes(program, n):
            x, w = (torch.tensor(a, requires_grad=True) for a in start())
            cotangent = torch.tensor(start()[0])

            def both():
                x.grad = w.grad = None
                program(Torch, x, w, n).backward(cotangent)

            def no_grad():
                with torch.no_grad():
                    program(Torch, x, w, n)
            return {"forward": lambda: program(Torch, x, w, n), "both": both, "no grad": no_grad}
    return Torch


def start():
    """(x, w) that no chain drives into infinities or denormal numbers, which cost more: rows of x add up to exactly 0,
    those of w to 1."""
    return np.tile(np.array([0.5, -0.5, 0.25, -0.25], np.float32), (4, 1)), np.full((4, 4), 0.25, np.float32)


def measure(libraries, n, rounds):
    """{program: {(library, pass): µs per op}}, best of many, everything in turns."""
    runs = {(name, library, kind): run for name, program in PROGRAMS.items() for library, made in libraries.items()
            for kind, run in made.passes(program, n).items()}
    table = {name: {} for name in PROGRAMS}
    for (name, library, kind), seconds in compare(runs, rounds, turn=0.01).items():
        table[name][library, kind] = 1e6 * seconds.best / n
    return table


def main():
    report = Report("op_overhead", "Cost of one op on 4×4 arrays (`op_overhead.py`)")
    libraries = {"ours": Ours, "numpy": Numpy}
    if installed(report.skipped, "torch"):
        libraries["torch"] = torch_eager()
    short, long = measure(libraries, SHORT, 80), measure({"ours": Ours}, LONG, 20)

    columns = [(library, kind) for kind in AIMS for library in libraries if (library, kind) in short["tanh"]]
    report.table(f"µs per op, chains of {SHORT}", [
        {"program": name, **{f"{kind}: {library}": f"{us[library, kind]:.2f}" for library, kind in columns}}
        for name, us in short.items()])
    report.table(f"ours: a chain of {LONG:,} against one of {SHORT}, µs per op", [
        {"program": name, **{f"{kind}, {n:,}": f"{us[name]['ours', kind]:.2f}" for kind in ("forward", "both")
                             for n, us in ((SHORT, short), (LONG, long))}} for name in PROGRAMS])

    for kind, aim in AIMS.items():
        worst = max(short[name]["ours", kind] for name in AIMED_AT)
        report.aim(f"{' and '.join(AIMED_AT)}, {kind}", f"≤ {aim:g} µs at 2.5 GHz", f"{worst:.2f} µs", worst <= aim)
    if "torch" in libraries:
        worst = min(short[name]["torch", "both"] / short[name]["ours", "both"] for name in AIMED_AT)
        report.aim(f"{' and '.join(AIMED_AT)}, both, against torch eager", f"≥ {RIVAL_AIM} × faster",
                   f"{worst:.2f} ×", worst >= RIVAL_AIM)
    worst = max(long[name]["ours", "both"] / short[name]["ours", "both"] for name in PROGRAMS)
    report.aim(f"{LONG:,} ops against {SHORT}, per op", f"≤ {LONG_AIM} ×", f"{worst:.2f} ×", worst <= LONG_AIM)
    report.save()


if __name__ == "__main__":
    named(__doc__)
    main()
