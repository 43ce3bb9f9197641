"""A stand-in for CuPy on a machine without a GPU: arrays that behave as CuPy's do, their numbers kept by NumPy.

    with installed() as cupy:
        x = mt.tensor([1.0, 2.0], device="cuda")

What it is for is to refuse what CuPy refuses, so that code which passes here runs on a GPU:

- only the functions, methods and arguments of cupy_api.json exist, which is taken from a real CuPy (api.py);
- an array mixed with one of NumPy raises TypeError, and so does NumPy asking for its elements;
- reductions give 0-d arrays; an index out of range is taken modulo the extent; add.at knows few dtypes;
- ops run on the current one of two GPUs, and raise on the other one's arrays;
- while a stream is recorded into a graph nothing is computed: results are NaN (integers 0) until the graph is launched,
  and what would wait for the GPU raises.

Every copy between host and GPU is counted in `transfers`: "up" and "down" by name, and "implicit", which CuPy makes
without being asked, for indices and in einsum.
"""

import functools
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np

from .fake_arrays import (
    API,
    FUNCTIONS,
    add_at,
    bare,
    launched,
    launches,
    ndarray,
    ours,
    refuse_bfloat16,
    refuse_cublas,
    refuse_numpy,
    run_ufunc,
    signature,
    transfers,
)
from .fake_cuda import Device, cuda, current, events, refuse_while_recording

# ---------------------------------------------------------------- functions

def translated(value):
    """Arguments for NumPy's function of the same name: our arrays by theirs, also in lists; NumPy's are refused."""
    refuse_numpy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(translated(v) for v in value)
    return bare(value) if isinstance(value, ndarray) else value


def function(name, parameters):
    """NumPy's function of this name, with CuPy's arguments, on our arrays only."""
    known, numpys = signature(parameters), getattr(np, name, None)

    def call(*args, **kwargs):
        given = known.bind(*args, **kwargs)
        if name in ("concatenate", "stack") and not all(isinstance(a, ndarray) for a in given.arguments["tup"]):
            raise TypeError("Only cupy arrays can be concatenated")
        if name in ("concatenate", "stack") and len(given.arguments["tup"]) > 8:    # their addresses are copied up
            refuse_while_recording()
        if name in ("argsort", "sort", "cumsum", "cumprod"):
            refuse_bfloat16(name, given.args[0])
        if name in ("argsort", "sort"):     # Thrust's wait for the GPU: cupy/cupy issue 9126
            refuse_while_recording()
        if name == "argsort" and given.arguments.get("kind") not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        out = given.arguments.get("out")
        plain, named = translated(given.args), translated_dict(given.kwargs)
        if name == "split":
            return [ours(part, args[0]) for part in numpys(*plain, **named)]
        first = [plain[0]] if plain and isinstance(plain[0], np.ndarray) else []
        result = launched(lambda: numpys(*plain, **named), None if out is None else bare(out), first)
        return ours(result) if out is None else out
    call.__name__ = name
    return call


def translated_dict(arguments):
    return {k: translated(v) for k, v in arguments.items()}


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if isinstance(obj, ndarray):
        same = obj.device_id == current() and (dtype is None or dtype == obj.dtype)
        return obj if same and not copy else ours(launched(lambda: np.array(obj.host, dtype, order=order)))
    host = np.array(obj, dtype, order=order)
    if host.ndim:       # a number is an argument of the kernel that fills
        refuse_while_recording()
        transfers["up"] += 1
    return ours(launched(lambda: host))


def where(condition, x=None, y=None):
    refuse_numpy(condition)
    condition, x, y = np.asarray(bare(condition.astype("?", copy=False))), bare(x), bare(y)
    return ours(launched(lambda: np.where(condition, x, y)))


def copyto(dst, src, casting="same_kind", where=None):
    if isinstance(src, np.ndarray) and src.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    target, source, here = bare(dst), bare(src), True if where is None else bare(where)
    launched(lambda: np.copyto(target, source, casting, where=here), out=target)


def may_share_memory(a, b, max_work=None):
    return np.may_share_memory(bare(a), bare(b))


def broadcast_to(array, shape):
    strides = (0,) * (len(shape) - array.ndim) + tuple(
        0 if e == 1 else s for e, s in zip(array.shape, array.strides, strict=True))
    np.broadcast_shapes(array.shape, shape)
    return ours(np.lib.stride_tricks.as_strided(bare(array), shape, strides), array)


def einsum(subscripts, *operands, dtype=None, optimize=False):
    if len(operands) > 1:
        refuse_cublas()
    refuse_bfloat16("einsum", *operands)
    transfers["implicit"] += sum(isinstance(x, np.ndarray) for x in operands)      # it takes arrays of the host, too
    operands = [x if isinstance(x, np.ndarray) else bare(x) for x in operands]
    return ours(launched(lambda: np.einsum(subscripts, *operands, dtype=dtype, optimize=optimize), views=operands[:1]))


SPECIAL = {
    "array": array, "where": where, "copyto": copyto, "may_share_memory": may_share_memory, "einsum": einsum,
    "broadcast_to": broadcast_to,
    "asarray": lambda a, dtype=None, order=None, *, copy=None, blocking=False: array(a, dtype, False, order or "K"),
    "ascontiguousarray": lambda a, dtype=None: array(a, dtype, False) if a.flags.c_contiguous else a.copy(),
    "asnumpy": lambda a, stream=None, order="C", out=None, *, blocking=True: a.get(order=order, out=out),
    "get_array_module": lambda *args: cupy if any(isinstance(a, ndarray) for a in args) else np,
    "result_type": lambda *values: np.result_type(*[v.dtype if isinstance(v, ndarray) else v for v in values]),
    "get_default_memory_pool": lambda: SimpleNamespace(used_bytes=lambda: 4096, total_bytes=lambda: 8192),
}
FUNCTIONS.update((name, SPECIAL.get(name) or function(name, text)) for name, text in API["functions"].items())


# ---------------------------------------------------------------- modules

def as_strided(x, shape=None, strides=None):
    return ours(np.lib.stride_tricks.as_strided(bare(x), shape, strides), x)


def _module():
    top = ModuleType("cupy")
    top.__path__ = []
    vars(top).update(FUNCTIONS, ndarray=ndarray, cuda=cuda, __version__="stand-in",
                     linalg=SimpleNamespace(qr=lambda a, mode="reduced": tuple(map(ours, np.linalg.qr(bare(a), mode)))),
                     lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided)))
    for name in (*API["ufuncs"], "matmul"):
        setattr(top, name, functools.partial(run_ufunc, getattr(np, name)))
    top.add.at = functools.partial(add_at, np.add)
    return top


cupy = _module()
STAND_INS = f"{__package__}.fake_"      # what a library is to the library; their counters are no state of a program's


@contextmanager
def installed(**modules):
    """Let `import cupy` find the stand-in, and the library think that there are GPUs. modules: further ones, like
    nccl, to be found under cupy.cuda."""
    from minitorch_dist import backend, kernels, surroundings
    names = {"cupy": cupy, "cupy.cuda": cuda, **{f"cupy.cuda.{name}": m for name, m in modules.items()}}
    before = {name: sys.modules.get(name) for name in names}
    known, of_library = dict(backend.DEVICE_ARRAYS), surroundings.of_library
    backend.DEVICE_ARRAYS.clear()
    surroundings.of_library = lambda module: module.startswith(STAND_INS) or of_library(module)
    sys.modules.update(names)
    vars(cuda).update(modules)
    for log in (transfers, launches, events):
        log.clear()
    Device(0).use()
    try:
        with kernels.disable():
            yield cupy
    finally:
        surroundings.of_library = of_library
        backend.DEVICE_ARRAYS.clear()
        backend.DEVICE_ARRAYS.update(known)
        backend.put_off.clear()
        for name in modules:
            delattr(cuda, name)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


