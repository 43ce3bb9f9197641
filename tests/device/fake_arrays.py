"""The part of the stand-in that is cupy.ndarray: arrays that behave as CuPy's do, their numbers kept by NumPy; ufuncs
and operators on them; and what runs now, or when a graph is launched."""

import inspect
from collections import Counter
from numbers import Integral
from types import SimpleNamespace

import numpy as np

from minitorch_dist.backend import is_bfloat16, is_floating
from minitorch_dist.comm.device import cuda_aware

from . import api
from .fake_cuda import Device, current, events, recorded, refuse_while_recording

SCALARS = (bool, int, float, np.generic)
API = api.stored()
ADDED_AT = ("int32", "int64", "float16", "float32", "float64", "uint32", "uint64")
FUNCTIONS = {}          # name -> function, for NumPy's of the same name: fake_cupy.py fills it
transfers = Counter()
launches = Counter()    # ufuncs, methods and functions, by name


def signature(parameters):
    return inspect.signature(eval(f"lambda {parameters}: None"))


# ---------------------------------------------------------------- arrays

def refuse_numpy(value):
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")


def bare(value):
    """The NumPy array under one of ours, on the current GPU; numbers as they are; TypeError for anything else."""
    if isinstance(value, ndarray):
        if value.device.id != current():
            raise ValueError(f"The device where the array resides ({value.device.id}) is different from the current "
                             f"device ({current()}). Peer access is unavailable between these devices.")
        return value.host
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def ours(result, base=None):
    """A NumPy result as an array of ours; numbers become 0-d arrays."""
    return ndarray(np.asarray(result), current(), base)


def launched(compute, out=None, views=()):
    """compute()'s result, now or at each launch of the graph that is being recorded.

    out    what compute writes into, where it gives nothing new
    views  arrays into which the result may be a view: then there is nothing to compute
    """
    graph = recorded()
    if graph is None:
        return compute()
    if out is not None:
        graph.held.append(out)
        graph.work.append(compute)
        return out
    result = np.asarray(compute())
    if not any(np.may_share_memory(result, x) for x in views):
        result = np.array(result)       # numbers too are somewhere
        graph.work.append(lambda: np.copyto(result, compute()))
        result.fill(np.nan if result.dtype.kind == "f" else 0)
    graph.held.append(result)
    return result


class Pointer(int):
    """An address that knows its GPU."""

    def __new__(cls, address, device):
        self = super().__new__(cls, address)
        self.device = device
        return self

    def __add__(self, offset):
        if not isinstance(offset, Integral):
            return NotImplemented               # an array of addresses is NumPy's
        return Pointer(int(self) + int(offset), self.device)


class ndarray:
    """A NumPy array that nobody takes for one."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, host, device, base=None):
        self.host, self.device_id, self.base = host, device, base

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    T = property(lambda self: self.transpose())
    device = property(lambda self: Device(self.device_id))
    data = property(lambda self: SimpleNamespace(ptr=Pointer(self.host.__array_interface__["data"][0], self.device_id),
                                                 device_id=self.device_id))
    flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous,
                                                  f_contiguous=self.host.flags.f_contiguous,
                                                  owndata=self.base is None))

    @property
    def __cuda_array_interface__(self):
        """What MPI asks for. Where it isn't built for GPUs it would read their memory as the host's."""
        if not cuda_aware():
            raise TypeError("MPI was handed an array on a GPU without MINITORCH_CUDA_AWARE=1")
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "data": (self.data.ptr, False)}

    def __array__(self, dtype=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy "
                        "array explicitly.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method not in ("__call__", "at") or ufunc.__name__ not in (*API["ufuncs"], "matmul"):
            return NotImplemented
        if "out" in kwargs:
            kwargs["out"], = kwargs["out"]
        values = (*inputs, kwargs["out"]) if "out" in kwargs else inputs
        if not all(isinstance(v, (ndarray, np.ndarray, *SCALARS)) for v in values):
            return NotImplemented       # np.add.at with a tuple for an index too; cupy.add.at takes it
        if method == "at":
            return add_at(ufunc, *inputs)
        return run_ufunc(ufunc, *inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        function = FUNCTIONS.get(func.__name__) if func.__module__ == "numpy" else None
        if function is None or not all(t in (ndarray, np.ndarray) for t in types):
            return NotImplemented
        return function(*args, **kwargs)

    # ------------------------------------------------------------ elements

    def __getitem__(self, index):
        place = plain_index(index, self.shape)
        return ours(launched(lambda: self.host[place()], views=[self.host]), self)

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if not isinstance(value, ndarray):
            value = value.item() if isinstance(value, np.ndarray) else value
            if not isinstance(value, SCALARS):
                raise TypeError(f"fill can't take a {type(value)}")
        target, place, value = bare(self), plain_index(index, self.shape), bare(value)
        launched(lambda: target.__setitem__(place(), value), out=target)

    def __len__(self):
        return len(self.host)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        if self.size != 1:
            raise ValueError("The truth value of an array with more than one element is ambiguous.")
        return bool(self.get())

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def __repr__(self):
        return f"cuda:{self.device_id} {self.host!r}"

    # ------------------------------------------------------------ copies

    def get(self, stream=None, order="C", out=None, blocking=True):
        refuse_while_recording()
        transfers["down"] += 1
        if out is None:
            return np.array(self.host, order=order)
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"{self.dtype}{self.shape} can't be copied to {type(out)}")
        np.copyto(out, self.host)
        return out

    def set(self, arr, stream=None):
        if type(arr) is not np.ndarray or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"{type(arr)} can't be copied to {self.dtype}{self.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        refuse_while_recording()
        transfers["up"] += 1
        np.copyto(self.host, arr)

    def item(self):
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def tobytes(self, order="C"):
        return self.get().tobytes()

    def copy(self, order="C"):
        if self.device_id != current():
            events.append(("copy", self.device_id, current(), self.flags.c_contiguous))
        return ours(launched(lambda: np.array(self.host, order=order)))     # from another GPU as well

    def take(self, indices, axis=None, out=None):
        flat = self.reshape(-1) if axis is None else self
        return flat[(slice(None),) * ((axis or 0) % flat.ndim) + (indices,)]

    def __deepcopy__(self, memo):
        return self.copy()


def sum_in_16_bits(x, arguments):
    """CuPy has CUB add up float16, in float16: here one after the other."""
    axis, out = arguments.get("axis"), arguments.get("out")
    axes = np.lib.array_utils.normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim)
    lines = np.moveaxis(x, axes, range(len(axes))).reshape(-1, *(e for i, e in enumerate(x.shape) if i not in axes))
    total = np.add.accumulate(lines, axis=0)[-1] if len(lines) else np.zeros(lines.shape[1:], x.dtype)
    if arguments.get("keepdims"):
        total = np.expand_dims(total, axes)
    if out is None:
        return np.asarray(total)
    bare(out)[...] = total
    return bare(out)


def method(name, parameters):
    """One of NumPy's methods, with CuPy's arguments only."""
    known = signature(f"self, {parameters}")

    def call(self, *args, **kwargs):
        given = known.bind(self, *args, **kwargs)
        kwargs = {k: bare(v) if isinstance(v, ndarray) else v for k, v in given.kwargs.items()}
        if name == "transpose" and given.args[1:] == ((),):
            given = known.bind(self)
        host = np.asarray(bare(self))

        def compute():
            if name == "sum" and host.dtype == np.float16 and given.arguments.get("dtype") in (None, np.float16):
                return sum_in_16_bits(host, given.arguments)
            return np.asarray(getattr(host, name)(*given.args[1:], **kwargs))
        result = launched(compute, host if name == "fill" else kwargs.get("out"), [host])
        if name == "astype" and result is self.host:
            return self
        return ours(result, self if np.may_share_memory(result, self.host) else None)
    call.__name__ = name
    return call


for _name, _parameters in API["methods"].items():
    if _name not in vars(ndarray):
        setattr(ndarray, _name, method(_name, _parameters))


def plain_index(index, shape):
    """A function that gives an index for NumPy that does what CuPy does: places out of range are taken modulo the
    extent."""
    parts, axis, found = index if isinstance(index, tuple) else (index,), 0, []
    used = sum(p.ndim if getattr(p, "dtype", None) == np.bool_ else p is not None and p is not Ellipsis for p in parts)
    if used > len(shape):
        raise IndexError(f"too many indices for array: array is {len(shape)}-dimensional, but {used} were indexed")
    for part in parts:
        if isinstance(part, (list, np.ndarray)):
            transfers["implicit"] += 1
            part = ours(np.asarray(part))
        if isinstance(part, ndarray):
            if part.dtype.kind not in "biu":
                raise IndexError(f"arrays used as indices must be of integer or boolean type, not {part.dtype}")
            part = bare(part)
            if part.dtype.kind == "b":
                refuse_while_recording()
                transfers["down"] += 1      # how many are true
                axis += part.ndim
            else:
                part, axis = (part, max(shape[axis], 1)), axis + 1
        elif part is Ellipsis:
            axis += len(shape) - used
        elif part is not None:
            axis += 1
        found.append(part)
    return lambda: tuple(within(*part) if isinstance(part, tuple) else part for part in found)


def within(places, extent):
    """Places modulo an extent that their own dtype need not hold."""
    return places % extent if places.dtype.itemsize > 2 else places.astype(np.int32) % extent


# ---------------------------------------------------------------- ufuncs and operators

def run_ufunc(ufunc, *args, out=None, dtype=None, casting="same_kind"):
    launches[ufunc.__name__] += 1
    if len(args) > ufunc.nin:
        if ufunc is np.matmul:
            raise TypeError("matmul of CuPy takes its `out` by name")
        *args, out = args
    if ufunc is np.matmul and max(a.ndim for a in args if isinstance(a, ndarray)) > 2:
        launches["matmul of many"] += 1     # one of CuPy's copies its operands, and makes three tables of addresses
    if ufunc is np.matmul and any(isinstance(a, ndarray) and a.device_id != current() for a in args):
        # CuPy doesn't look at the devices; the kernel, later, fails at an address that isn't its GPU's.
        args = [ours(np.full_like(a.host, np.nan)) for a in args]
    values = [bare(a) for a in args]
    if ufunc is np.matmul and not all(isinstance(a, ndarray) for a in args):
        raise TypeError("matmul takes arrays")
    if ufunc is np.matmul and is_floating(args[0].dtype):
        refuse_cublas()
    if ufunc is np.matmul and all(is_bfloat16(a.dtype) for a in args):
        refuse_bfloat16("a product of many matrices", *(a for a in args if a.ndim > 2))
        ufunc = product_in_bfloat16
    if out is not None:
        if not isinstance(out, ndarray):
            raise TypeError(f"out must be a cupy.ndarray, not {type(out)}")
        target = bare(out)
        launched(lambda: ufunc(*values, out=target, dtype=dtype, casting=casting), out=target)
        return out
    return ours(launched(lambda: ufunc(*values, dtype=dtype, casting=casting)))


def product_in_bfloat16(x, y, out=None, **options):
    """NumPy's own product of bfloat16 is float32."""
    if out is None:
        return np.matmul(x, y).astype(x.dtype)
    out[...] = np.matmul(x, y)
    return out


def refuse_bfloat16(what, *arrays):
    """As CuPy 14.2 does, in one way or another."""
    if any(is_bfloat16(a.dtype) for a in arrays):
        raise TypeError(f"CuPy knows no {what} of bfloat16")


def refuse_cublas():
    refuse_while_recording(NotImplementedError("calling cuBLAS API during stream capture is currently unsupported"))


def add_at(ufunc, a, indices, b):
    launches["add.at"] += 1
    if ufunc is not np.add:
        raise NotImplementedError(f"{ufunc.__name__}.at")
    if a.dtype.name not in ADDED_AT:
        raise TypeError(f"cupy.add.at only supports {', '.join(ADDED_AT)} as data type")
    target, places, values = bare(a), plain_index(indices, a.shape), bare(b)
    launched(lambda: np.add.at(target, places(), values), out=target)


def operator(ufunc, swapped=False, inplace=False):
    def operate(self, other):
        if getattr(type(other), "__array_ufunc__", False) is None:
            return NotImplemented
        refuse_numpy(other)
        return run_ufunc(ufunc, *((other, self) if swapped else (self, other)), out=self if inplace else None)
    return operate


for _name, _ufunc in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "pow": np.power,
                      "mod": np.remainder, "floordiv": np.floor_divide, "matmul": np.matmul, "and": np.bitwise_and,
                      "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
    setattr(ndarray, f"__{_name}__", operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", operator(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", operator(_ufunc, inplace=True))
for _name, _ufunc in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
                      "ne": np.not_equal}.items():
    setattr(ndarray, f"__{_name}__", operator(_ufunc))
for _name, _ufunc in {"neg": np.negative, "abs": np.absolute, "invert": np.invert}.items():
    setattr(ndarray, f"__{_name}__", lambda self, _ufunc=_ufunc: run_ufunc(_ufunc, self))
