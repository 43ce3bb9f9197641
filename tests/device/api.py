"""What of CuPy the stand-in may have: names and signatures, taken from a real CuPy once.

    python -m tests.device.api      # writes cupy_api.json anew; CuPy must be installed, a GPU is not needed

CuPy is written in Cython, whose functions give their signature in the first line of their docstrings.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

FILE = Path(__file__).parent / "cupy_api.json"

FUNCTIONS = """
    all any arange argpartition argsort array asarray ascontiguousarray asnumpy broadcast_to concatenate copyto cumprod
    einsum empty empty_like eye flip full get_array_module get_default_memory_pool may_share_memory ones ones_like
    packbits repeat result_type searchsorted sort split stack sum take_along_axis tri unpackbits where zeros zeros_like
""".split()
UFUNCS = """
    absolute add bitwise_and bitwise_or bitwise_xor ceil copysign cos divide equal exp expm1 floor floor_divide greater
    greater_equal invert isfinite isnan less less_equal log log1p logical_and logical_not logical_or logical_xor maximum
    minimum multiply negative not_equal power remainder sign sin sqrt square subtract tanh
""".split()
METHODS = """
    all any argmax argmin astype copy cumsum fill get item max mean min prod ravel repeat reshape set std sum swapaxes
    take tobytes tolist transpose view
""".split()
OTHERS = {      # module or class -> names that must be there
    "cupy": ["matmul"],
    "cupy.linalg": ["qr"],
    "cupy.lib.stride_tricks": ["as_strided"],
    "cupy.ndarray": ["T", "__cuda_array_interface__", "base", "data", "device", "dtype", "flags", "itemsize", "nbytes",
                     "ndim", "shape", "size", "strides"],
    "cupy.cuda": ["Device", "Event", "Stream", "alloc_pinned_memory", "get_current_stream", "is_available", "runtime"],
    "cupy.cuda.Device": ["id", "mem_info", "use"],
    "cupy.cuda.Stream": ["record", "synchronize", "wait_event"],
    "cupy.cuda.Event": ["done"],
    "cupy.cuda.runtime": ["getDevice", "getDeviceCount", "getDeviceProperties"],
    "cupy.cuda.MemoryPool": ["total_bytes", "used_bytes"],
}


def parameters(thing):
    """The parameters of a function as text that Python can read: types left out, defaults that are no literals None."""
    first = (thing.__doc__ or "").split("\n")[0]
    if match := re.match(r"[\w.]+\((.*)\)", first):
        listed = [p.split("=") for p in match[1].split(", ") if p not in ("self", "")]
        return ", ".join("=".join([p[0].split()[-1], *p[1:]]) for p in listed)
    listed, star = [], False
    for p in inspect.signature(thing).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            listed.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        plain = p.default is None or isinstance(p.default, (bool, int, float, str, tuple))
        default = "" if p.default is p.empty else f"={p.default!r}" if plain else "=None"
        listed.append(stars + p.name + default)
    return ", ".join(listed)


def find(path):
    """cupy.cuda.Device -> that class."""
    module, rest = path, []
    while True:
        try:
            thing = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        thing = getattr(thing, name)
    return thing


def describe():
    """The table, from the CuPy that is installed."""
    import cupy
    missing = [f"{path}.{name}" for path, names in OTHERS.items() for name in names if not hasattr(find(path), name)]
    assert not missing, f"CuPy {cupy.__version__} has no {missing}"
    return {"functions": {name: parameters(getattr(cupy, name)) for name in FUNCTIONS},
            "ufuncs": {name: getattr(cupy, name).types for name in UFUNCS},
            "methods": {name: parameters(getattr(cupy.ndarray, name)) for name in METHODS}}


def stored():
    """The table as it was written."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(json.dumps(describe(), indent=1) + "\n", encoding="utf-8")
