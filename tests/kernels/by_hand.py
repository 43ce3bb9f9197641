"""PTX written by hand, for the emulated GPU."""

from minitorch_dist.kernels.emulator import execute
from minitorch_dist.kernels.emulator.machine import Code
from minitorch_dist.kernels.emulator.ptx import parse


def run(body, threads=32, grid=(1,), shared=0, **arrays):
    """Run PTX with an address parameter per array: %x0 … hold them, %lane the thread's number, %at 4 times that."""
    parameters = ", ".join(f".param .u64 {name}" for name in arrays)
    loads = "\n".join(f"ld.param.u64 %x{i}, [{name}];" for i, name in enumerate(arrays))
    text = (f".extern .shared .align 16 .b8 memory[]; .visible .entry k({parameters}) {{ .reg .pred %p<9>;"
            ".reg .b16 %h<9>; .reg .b32 %r<30>; .reg .b32 %lane;"
            f".reg .b64 %x<30>; .reg .b64 %at; .reg .b64 %d<9>; {loads}"
            f"mov.u32 %lane, %tid.x; mul.wide.u32 %at, %lane, 4; {body} ret; }}")
    return execute(Code(parse(text)), grid, threads, arrays, shared)
