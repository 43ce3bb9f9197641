"""Puts the emulated CUDA under a real CuPy: its wheel for CUDA 12 on Linux, x86-64.

The CUDA runtime is linked into one of its modules: over the beginning of each of its functions, which the table of
symbols finds, a jump to a Python function is written. So it is with CUB, of which a module of CuPy's has machine code.
The driver and other libraries are made of such jumps.
"""

import atexit
import ctypes
import importlib.util
import os
import struct
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from minitorch_dist.kernels import build

from . import cuda, libraries, nccl
from .symbols import symbols

PAGE, ANYTHING = 4096, 7        # PROT_READ | PROT_WRITE | PROT_EXEC


def runtime_of(path):
    """{name: offset} of the functions of the CUDA runtime that is linked into a module."""
    return {name: offset for name, offset in symbols(path, 2).items() if offset and name.startswith("cuda")
            and name[4:5].isupper() and not name.endswith(("_ptsz", "_ptds"))}


def redirect(path, functions):
    """These functions of a module, {name: offset}, jump to ours."""
    ctypes.CDLL(path)
    with open("/proc/self/maps") as maps:
        base = next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(path))
    protect = ctypes.CDLL(None).mprotect
    for name, offset in functions.items():
        at = base + offset
        if protect(ctypes.c_void_p(at // PAGE * PAGE), ctypes.c_size_t(2 * PAGE), ANYTHING):
            raise OSError(f"mprotect of {name} failed")
        target = ctypes.cast(cuda.as_c(name), ctypes.c_void_p).value
        ctypes.memmove(at, b"\x48\xb8" + struct.pack("<Q", target) + b"\xff\xe0", 12)       # mov rax, target; jmp rax
        # CuPy calls them to the very end, when there is no Python left: xor eax, eax; ret.
        atexit.register(ctypes.memmove, at, b"\x31\xc0\xc3", 3)


def install():
    """Before CuPy is imported."""
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy is imported already: install() must come first")
    os.environ["CUPY_COMPILE_WITH_PTX"] = "1"       # the emulator reads PTX, not machine code
    if cuda.IDLE:
        os.environ["CUPY_ACCELERATORS"] = ""        # CUB's functions here would take the host's time
    # Where CuPy knows of a compiler, which it doesn't start, other reductions are CUB's, too: made from its headers.
    os.environ.setdefault("NVCC", "nvcc")
    libraries.jumps("libcuda.so.1", [name for name in cuda.API if name[:2] == "cu" and name[2].isupper()])
    folder = Path(importlib.util.find_spec("cupy_backends").origin).parent
    runtime, cub = (str(next(place)) for place in (
        folder.glob("cuda/api/runtime.*.so"), folder.with_name("cupy").glob("cuda/cub.*.so")))
    redirect(runtime, runtime_of(runtime))
    redirect(cub, {name: offset for name, offset in symbols(cub, 11).items() if name in cuda.API})
    loaded = {name: libraries.load(name, next(folder.glob(f"cuda/libs/{name}.*.so"))) for name in libraries.LIBRARIES}
    sys.modules["cupy.cuda.thrust"] = libraries.Thrust()
    atexit.register(nccl.leave)
    import cuda.pathfinder as pathfinder  # what CuPy finds NVIDIA's libraries with
    find = pathfinder.load_nvidia_dynamic_lib
    pathfinder.load_nvidia_dynamic_lib = lambda name: (
        SimpleNamespace(_handle_uint=loaded[name]._handle) if name in loaded else find(name))
    load_ptx()


def load_ptx():
    """Triton's kernels, too, are loaded as PTX, which is kept apart from machine code. That is made as well, for a real
    GPU to find, where MACHINE_CODE is set: Triton has compiled it anyway."""
    build_it, machine_code, lock = build.build, (build.FORMAT, build.checked), threading.Lock()
    ptx = "PTX", lambda kernel, types, compiled: replace(
        machine_code[1](kernel, types, compiled), cubin=compiled.asm["ptx"].encode() + b"\0")

    def both(*what):
        with lock:
            for build.FORMAT, build.checked in (machine_code, ptx):
                binary = build_it(*what)
        return binary
    build.FORMAT, build.checked = ptx
    if os.environ.get("MACHINE_CODE"):
        build.build = both
