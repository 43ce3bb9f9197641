"""What your compiled kernels ask of a GPU's memory, counted on an emulated one: no GPU needed, only Triton.

    python exercises/13_triton/count.py            # yours where they have passed, else ours
    python exercises/13_triton/count.py --ours     # ours

A warp, 32 threads, gets memory in sectors of 32 bytes: of each it moves the whole, whatever it needs of it. What it
asks for again may still lie in a cache; "at least" counts each sector once.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"      # compile, don't interpret; Triton asks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from exercises.frame.child import load_module  # noqa: E402

ELEMENTS, ROWS, COLUMNS = 8192, 16, 1000
bench = load_module(Path(__file__).with_name("bench.py"), "bench")


def calls(modules):
    """(what is called, how many elements it works on, the call) in turn."""
    from minitorch_dist.kernels.emulator import aligned
    rng = np.random.default_rng(0)

    def normal(*shape):
        return aligned(rng.standard_normal(shape, np.float32))
    x, y, out = normal(ELEMENTS), normal(ELEMENTS), normal(ELEMENTS)
    every_second = normal(2 * ELEMENTS)[::2]
    yield "add", ELEMENTS, lambda: modules["add"].add(x, y, out)
    yield "add, x is a[::2]", ELEMENTS, lambda: modules["add"].add(every_second, y, out)
    rows, made = normal(ROWS, COLUMNS), normal(ROWS, COLUMNS)
    yield "softmax", rows.size, lambda: modules["softmax"].softmax(rows, made)
    p, g = normal(ELEMENTS), normal(ELEMENTS)
    yours = modules["adam"].Adam(p, g, [ELEMENTS // 3, ELEMENTS], [0.0, 0.01])
    for name, state in vars(yours).items():         # where CuPy's arrays would begin
        if isinstance(state, np.ndarray):
            setattr(yours, name, aligned(state))
    yield "adam", ELEMENTS, yours.step


def counted(modules):
    """[row of the table]: per call what its launches ask for, per element."""
    from minitorch_dist.kernels.emulator import Emulator, emulated
    emulator = Emulator(90)
    for name, elements, call in calls(modules):
        with emulated(emulator) as launches:
            before = len(launches)
            call()
        mine = launches[before:]
        asked, moved = (sum(getattr(one.access(f"global {way}"), what) for one in mine for way in ("load", "store"))
                        for what in ("bytes", "units"))
        least = sum(sum(one.read.values()) + sum(one.written.values()) for one in mine)
        issued = sum(sum(one.instructions.values()) for one in mine)
        yield (name, str(len(mine)), f"{asked / elements:.2f}", f"{32 * moved / elements:.2f}",
               f"{100 * asked / (32 * moved):.0f} %", f"{least / elements:.2f}", f"{issued:,}")


def main(argv):
    """Count and print; one sentence where that can't be."""
    try:
        import triton  # noqa: F401
    except ImportError:
        print("triton is not installed (on Linux: pip install triton)")
        return 1
    from minitorch_dist.tables import aligned
    bench.by_cupy()
    modules, whose = bench.answers("ours" if "--ours" in argv else "mine")
    print("Per element, on an emulated GPU of compute capability 9.0; the kernels are "
          + ", ".join(f"{name}: {'yours' if one == 'mine' else 'ours'}" for name, one in whose.items()) + "\n")
    head = ("", "launches", "bytes asked for", "bytes of sectors", "used", "at least", "instructions of warps")
    print(*aligned([head, *counted(modules)]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
