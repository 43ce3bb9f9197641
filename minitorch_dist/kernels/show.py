"""`python -m minitorch_dist kernels`: the kernels there are, and each stage of the way from Python to machine code."""

import re
import subprocess
import sys
from pathlib import Path

from . import MODULES, OPS, installed, interpreting, load, table
from .kernel import BELOW_80

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")


def compiled(kernel, example, capability):
    """Triton's compiled kernel for one of kernel.examples, pointers and divisible numbers being multiples of 16."""
    from .build import compile_triton
    types, options = kernel.example(example, capability)
    return compile_triton(kernel, types, divisible(kernel, types), options, capability)


def divisible(kernel, types):
    """The parameters that are multiples of 16 in the usual case."""
    return [name for name, kind in types.items() if kind and (kind[0] == "*" or name in kernel.divisible)]


def tools():
    """The folder of NVIDIA's programs in Triton's wheel."""
    import triton
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def capabilities():
    """The compute capabilities that can be compiled for: [75, 80, …]."""
    text = "".join(subprocess.run([program, "--help"], capture_output=True, text=True).stdout
                   for program in sorted(tools().glob("ptxas*")))
    return sorted({int(number) for number in re.findall(r"\bsm_(\d+)", text)})


def listing(cubin, tool="cuobjdump", flag="-sass"):
    """What one of the disassemblers in Triton's wheel says about machine code."""
    import tempfile
    program = tools() / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, flag, file.name], capture_output=True, text=True, check=True).stdout


def stage(kernel, example, capability, name):
    """One stage as text."""
    asm = compiled(kernel, example, capability).asm
    if name != "sass":
        return asm[name]
    # Each instruction's line ends in its encoding, and a line of encoding alone follows.
    lines = [re.sub(r"\s*/\* 0x[0-9a-f]+ \*/\s*$", "", line) for line in listing(asm["cubin"]).splitlines()]
    return "\n".join(line for line in lines if line.strip())


def usage(cubin):
    """{"registers": per thread, "stack": bytes per thread, "local": bytes of local memory} of machine code."""
    text = listing(cubin, flag="-res-usage")
    return {name: int(re.search(rf"{key}:(\d+)", text)[1])
            for name, key in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL"))}


def costs(kernel, capability):
    """What a small call of the kernel's module costs on an emulated GPU: of each launch the sums, and of this kernel's
    the lines of Python that ask for it."""
    from .emulator.calls import CALLS, counted
    module = next(name for name in MODULES if kernel in load(name).KERNELS)
    lines = [f"{module} on sm_{capability}, emulated: {CALLS[module][0]}"]
    for counts in counted(module, capability):
        lines += ["", *counts.sums(capability), *([""] + counts.by_line() if counts.kernel == kernel.name else [])]
    return "\n".join(lines)


def describe(example):
    """An example in a few words: "bf16, MASTER=True, no found_inf"."""
    words = [str(example["*"])] if "*" in example else []
    words += [f"no {name}" if value is None else f"{name}={value}" for name, value in example.items()
              if name not in ("*", BELOW_80)]
    return ", ".join(words) or "as recorded"


def overview():
    """The list of kernels, and which ops of the op table they serve."""
    lines = []
    for kernel in table().values():
        module = sys.modules[kernel.fn.__module__]
        lines.append(f"{kernel.name}  ({module.__name__.rpartition('.')[2]}.py: {module.__doc__.splitlines()[0]})")
        lines += [f"    --example {i}: {describe(example)}" for i, example in enumerate(kernel.examples)]
    for op, entry in OPS.items():
        lines.append(f"op {op}: served by {entry.module}.py from {entry.wins_from:,} elements up, of "
                     f"{', '.join(entry.dtypes)}")
    return "\n".join(lines)


def refused(args):
    """(status, words): 2 where what is asked for can't be, 1 where this machine can't show it, (0, "") otherwise."""
    if args.kernel is None and (args.count or args.show):
        return 2, f"{'--count' if args.count else f'--show {args.show}'}: of which kernel? (without it: a list)"
    if not installed():
        return 1, ("Triton is not installed, so none can be shown; there are the modules "
                   f"{', '.join(MODULES)}. pip install triton (Linux)")
    if interpreting():
        return 1, "TRITON_INTERPRET is set, and an interpreted kernel has no stages: unset it"
    if args.kernel is None:
        return 0, ""
    if args.kernel not in (kernels := table()):
        return 2, f"there is no kernel {args.kernel!r}, but {', '.join(kernels)}"
    if not 0 <= args.example < (examples := len(kernels[args.kernel].examples)):
        return 2, f"{args.kernel} has the examples 0 to {examples - 1}, and no {args.example}"
    if args.cc not in (known := capabilities()):
        return 2, (f"--cc {args.cc} is no compute capability that Triton's assembler knows: "
                   f"{', '.join(map(str, known))}")
    return 0, ""


def run(args):
    """Print the list, or one stage of one kernel, or what it costs. Returns the exit status."""
    status, words = refused(args)
    if words:
        print(f"kernels: {words}", file=sys.stderr)
        return status
    if args.kernel is None:
        print(overview())
        return 0
    kernel = table()[args.kernel]
    from .emulator import EmulationError, Unknown
    try:
        text = (costs(kernel, args.cc) if args.count else
                stage(kernel, kernel.examples[args.example], args.cc, args.show or STAGES[0]))
    except (EmulationError, Unknown) as error:
        print(f"kernels: {args.kernel} on sm_{args.cc}: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def add_command(commands):
    """Add `kernels` to the subparsers of the command line."""
    parser = commands.add_parser("kernels", help="GPU kernels, and each stage from Python to machine code")
    parser.add_argument("kernel", nargs="?", help="one of those that are listed without it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", choices=STAGES, help=f"which stage (default: {STAGES[0]})")
    what.add_argument("--count", action="store_true", help="run its PTX on an emulated GPU, each access checked, and "
                      "count bytes, sectors, bank conflicts and instructions, line by line")
    parser.add_argument("--cc", type=int, default=90, help="compute capability, 90 for 9.0 (default: %(default)s)")
    parser.add_argument("--example", type=int, default=0, help="which of its examples (default: the first)")
    parser.set_defaults(run=run)
