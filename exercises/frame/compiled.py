"""A chapter's kernels compiled: started by CuPy, or on an emulated GPU, whose memory's work is counted.

Who imports this has set TRITON_INTERPRET=0 before.
"""

from pathlib import Path

from .answers import Answers
from .child import load_module
from .course import Course


def answers(chapter, which):
    """({file's name without .py: its module}, {the same: whose it is}): which is "mine", where it has passed, or
    "ours"."""
    course = Course()
    chosen = {Path(e.file).stem: Answers(course).choose(e, which) for e in course.find(chapter)}
    return ({name: load_module(path, f"answer_{name}") for name, (path, _) in chosen.items()},
            {name: whose for name, (_, whose) in chosen.items()})


def by_cupy():
    """Let kernel[grid](…) take CuPy arrays: Triton's own launcher wants torch, the library's starts kernels by CuPy."""
    from triton.runtime.jit import JITFunction

    from minitorch_dist.kernels.kernel import Kernel
    records = {}

    def run(self, *args, grid, warmup, **more):
        given = dict(zip(self.arg_names, args, strict=False)) | more
        is_constant = {p.name: p.is_constexpr for p in self.params}
        options = {name: value for name, value in given.items() if is_constant.get(name, True)}
        values = {name: given[name] for name in self.arg_names if not is_constant[name]}
        # As Triton does it: a number that is 1 is known when the kernel is compiled, for instance a stride.
        ones = {name: 1 for name, value in values.items() if isinstance(value, int) and value == 1}
        values = {name: value for name, value in values.items() if name not in ones}
        kinds = {name: "i32" if isinstance(value, int) else "fp32" if isinstance(value, float) else "*"
                 for name, value in values.items()}
        constants = ones | {name: None for name, constant in is_constant.items() if constant}
        key = self, tuple(kinds.items()), tuple(constants)
        if key not in records:
            numbers = tuple(name for name, kind in kinds.items() if kind == "i32")
            arrays = tuple(name for name, kind in kinds.items() if kind == "*")
            records[key] = Kernel(self.__name__, self, kinds, constants, divisible=numbers, strided=arrays)
        records[key](grid, *values.values(), **options)
    JITFunction.run = run


def counted(calls):
    """[row of the table]: of each (what is called, how many elements it works on, the call) what its launches ask for,
    per element."""
    from minitorch_dist.kernels.emulator import Emulator, emulated
    emulator = Emulator(90)
    for name, elements, call in calls:
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


def count(chapter, calls, per, ours=False):
    """Count and print; one sentence where that can't be. calls: of the answers' modules; per: what "per element" is."""
    try:
        import triton  # noqa: F401
    except ImportError:
        print("triton is not installed (on Linux: pip install triton)")
        return 1
    from minitorch_dist.tables import aligned
    by_cupy()
    modules, whose = answers(chapter, "ours" if ours else "mine")
    print(f"{per}, on an emulated GPU of compute capability 9.0; the kernels are "
          + ", ".join(f"{name}: {'yours' if one == 'mine' else 'ours'}" for name, one in whose.items()) + "\n")
    head = ("", "launches", "bytes asked for", "bytes of sectors", "used", "at least", "instructions of warps")
    print(*aligned([head, *counted(calls(modules))]), sep="\n")
    return 0
