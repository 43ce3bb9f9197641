"""From a Kernel to machine code: Triton's compiler for one GPU type, needing neither a GPU nor torch; kept on disk.

    ttir    what the Python function says, on whole blocks
    ttgir   the same with a layout: which thread of which warp holds which element
    llir    LLVM's code of one thread
    ptx     NVIDIA's portable assembler
    cubin   machine code for exactly one compute capability (its listing is called SASS)
"""

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 2      # of the files in the cache
NOT_PROVIDED = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
PTX_TYPES = {"i1": "u8", "i8": "u8", "u8": "u8", "i16": "u16", "i32": "u32", "u32": "u32", "i64": "u64", "u64": "u64",
             "fp32": "f32", "fp64": "f64"}


@dataclass(frozen=True)
class Binary:
    """Machine code and what its launch must know.

    name    of the function in the cubin
    types   of its parameters in order, pointers left out (None) not among them
    scratch how many pointers Triton adds behind them; null is what they get
    shared  bytes of shared memory per program
    warps   of 32 threads, per program
    """

    name: str
    types: tuple
    scratch: int
    shared: int
    warps: int
    cubin: bytes


def cache_folder():
    """Where machine code is kept: minitorch_dist/kernels in XDG_CACHE_HOME, else in the system's own cache folder."""
    home = Path.home()
    usual = {"darwin": home / "Library" / "Caches",
             "win32": Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")}
    caches = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, home / ".cache")
    return Path(caches).absolute() / "minitorch_dist" / "kernels"


def write_atomically(path, text):
    """Many ranks may write the same file at once: each writes its own, and the last rename wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def compile_triton(kernel, types, divisible, options, capability):
    """Triton's own compiled kernel, with all stages in `.asm`, for compute capability 90 (say).

    types      {parameter: "*fp32", "i32", …, or None for a pointer left out}
    divisible  the parameters that are multiples of 16
    options    constexprs, num_warps, num_stages that differ from the record's
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    class Source(ASTSource):
        def hash(self):
            """What Triton keeps names the files of its lines, its own key doesn't: another copy of this project, moved
            or deleted since, would be what the counts of --count quote."""
            return hashlib.sha256(repr((super().hash(), *folders)).encode()).hexdigest()

    folders = kernel.fn.fn.__code__.co_filename, str(Path(__file__).parent)
    constexprs, warps, stages = kernel.settings(options)
    left_out = {name: None for name, kind in types.items() if kind is None}
    signature = {name: types.get(name) or "constexpr" for name in kernel.fn.arg_names}
    places = {(kernel.fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = Source(kernel.fn, signature, {**constexprs, **left_out}, places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={
        "num_warps": warps, "num_stages": stages, "enable_fp_fusion": kernel.fp_fusion})


def ptx_parameters(ptx, name):
    """The types of a PTX function's parameters, in order: ["u64", "u32", …]."""
    header = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.S)
    return re.findall(r"\.param\s+\.(\w+)", header[1])


def checked(kernel, types, compiled):
    """The Binary of what Triton has compiled, after a look at what its launch must provide.

    RuntimeError where that is more than a launch through CuPy gives: another order or type of parameters, scratch
    memory, clusters, cooperative grids.
    """
    meta = compiled.metadata
    types = tuple(kind for kind in types.values() if kind is not None)
    have = ptx_parameters(compiled.asm["ptx"], meta.name)
    want = ["u64" if kind[0] == "*" else PTX_TYPES[kind] for kind in types]
    more = have[len(want):]
    if have[:len(want)] != want or set(more) - {"u64"} or len(more) > 4:
        raise RuntimeError(f"kernel {kernel.name}: its PTX takes {have}, the launch would give {want} and scratch")
    asks = {name: value for name in NOT_PROVIDED if (value := getattr(meta, name, 0))}
    if asks or meta.num_ctas != 1:
        raise RuntimeError(f"kernel {kernel.name} asks for {asks or f'clusters of {meta.num_ctas}'}, which launch.py "
                           "doesn't provide")
    return Binary(meta.name, types, len(more), meta.shared, meta.num_warps, bytes(compiled.asm["cubin"]))


def key(kernel, types, divisible, options, capability):
    """A name for the machine code, equal only where source, types, constants, GPU and Triton are."""
    import triton
    parts = (FORMAT, triton.__version__, kernel.fn.cache_key, kernel.name, list(types.items()), sorted(divisible),
             sorted((name, str(value)) for name, value in kernel.settings(options)[0].items()),
             kernel.settings(options)[1:], kernel.fp_fusion, capability)
    name = re.sub(r"[^a-z0-9_]+", "_", kernel.name)[:60]        # of a file; a compiled kernel names all of its ops
    return f"{name}-sm{capability}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def build(kernel, types, divisible, options, capability):
    """The Binary for one compute capability: from the cache on disk, else compiled and put there."""
    path = cache_folder() / f"{key(kernel, types, divisible, options, capability)}.json"
    if binary := read(path):
        return binary
    binary = checked(kernel, types, compile_triton(kernel, types, divisible, options, capability))
    try:
        write(path, binary)
    except OSError as error:
        warnings.warn(f"compiled kernels can't be kept in {path.parent} ({error}): every run compiles them anew. "
                      "XDG_CACHE_HOME names another place", stacklevel=2)
    return binary


def write(path, binary):
    """Put machine code into the cache, in a third of its bytes."""
    facts = asdict(binary) | {"cubin": base64.b64encode(zlib.compress(binary.cubin)).decode(),
                              "sha256": hashlib.sha256(binary.cubin).hexdigest()}
    write_atomically(path, json.dumps(facts))


def read(path):
    """What `write` put there; None where there is nothing, or nothing whole."""
    try:
        facts = json.loads(path.read_text())
        cubin = zlib.decompress(base64.b64decode(facts.pop("cubin")))
        if facts.pop("sha256") == hashlib.sha256(cubin).hexdigest():
            return Binary(**facts | {"types": tuple(facts["types"]), "cubin": cubin})
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        pass
    return None
