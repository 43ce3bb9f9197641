"""Arrays and where they live."""

import ctypes
import sys
import warnings
from contextlib import contextmanager, nullcontext

import numpy as xp

from .dtypes import NAME
from .graphs import recording, refuse_in_graph

ARRAY_TYPES = (xp.ndarray, xp.generic)   # a NumPy reduction over all axes gives a scalar (np.generic), not an array


def keep_freed_memory():
    """Let this process keep the memory of freed arrays of up to 32 MiB for the next ones (Linux with glibc; elsewhere
    nothing). By default glibc hands large blocks back to the kernel, and every step of training faults its temporaries
    in again, page by page: LeNet's step takes twice as long on a virtual machine. Called on import."""
    trim_threshold, mmap_threshold = -1, -3     # names of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):       # another C library
            return
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


keep_freed_memory()


# ---------------------------------------------------------------- devices

DEVICE_ARRAYS = {}      # class of arrays on GPUs -> its module, as soon as CuPy is loaded; empty where there is none


def load_cupy():
    """The module cupy. RuntimeError, with what is missing, where it can't run."""
    if DEVICE_ARRAYS:
        return sys.modules["cupy"]
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"a GPU needs CuPy, which can't be imported ({error}): pip install "
                           "minitorch_dist[gpu-cuda13] or [gpu-cuda12], whichever the driver supports") from error
    if not cupy.cuda.is_available():
        raise RuntimeError("CuPy is installed, but finds no GPU: there is none, or no driver, or CUDA_VISIBLE_DEVICES "
                           "hides it; `nvidia-smi` and `python -m minitorch_dist doctor` show more")
    # Where GPUs can read each other's memory CuPy warns and goes on, with a result on the current one: an op on a
    # tensor of cuda:1 would come out on cuda:0.
    warnings.filterwarnings("error", message="The device where the array resides")
    DEVICE_ARRAYS[cupy.ndarray] = cupy
    return cupy


class Placeholder:
    """Base of what stands for an array, on the device `place`, that isn't computed yet (compiler/capture.py)."""

    __slots__ = ("place",)


def is_array(value):
    """True for arrays of any device; False for NumPy scalars, traced values and everything else."""
    return isinstance(value, (xp.ndarray, Placeholder)) or value.__class__ in DEVICE_ARRAYS \
        or hasattr(type(value), "__cuda_array_interface__")


def on_host(value):
    """Whether a raw value is NumPy's or Python's: asking for its elements needs no waiting for a GPU."""
    return isinstance(value, ARRAY_TYPES) or not is_array(value)


def module_of(array):
    """The module, numpy or cupy, that the array comes from; numpy, whose functions find their way, of values on a mesh.
    """
    if isinstance(array, Placeholder):
        return xp if array.place == "cpu" else array.module
    return DEVICE_ARRAYS.get(array.__class__) or (xp if on_host(array) else load_cupy())


def module_on(device):
    """The module, numpy or cupy, that makes arrays on a device: inside of `with on(device):`."""
    return xp if device == "cpu" else load_cupy()


def device_of(array):
    """The name of the device that a raw array lives on, or what keeps a place for one `stands_on` (nn/absent.py, values
    on a mesh); numbers live on the "cpu"."""
    if isinstance(array, Placeholder):
        return array.place
    return getattr(array, "stands_on", "cpu") if on_host(array) else f"cuda:{array.device.id}"


def names_device(target):
    """Whether what .to() was given names a device; otherwise it is a dtype."""
    return isinstance(target, str) and target not in xp.sctypeDict and target != NAME


def device_name(device):
    """A device as device_of writes it: "cuda" becomes the current one. ValueError for a name that is none, RuntimeError
    for a GPU that isn't there."""
    if device == "cpu":
        return device
    kind, _, number = str(device).partition(":")
    if kind != "cuda" or not (number.isdecimal() or str(device) == "cuda"):
        raise ValueError(f"device {device!r} is unknown: there are 'cpu', 'cuda' (the current GPU) and 'cuda:0', "
                         "'cuda:1', …")
    runtime = load_cupy().cuda.runtime
    if not number:
        return f"cuda:{runtime.getDevice()}"
    if int(number) >= (count := runtime.getDeviceCount()):
        raise RuntimeError(f"device {device!r}: this process sees {count} GPU{'s' * (count > 1)}, cuda:0"
                           + (f" to cuda:{count - 1}" if count > 1 else ""))
    return f"cuda:{int(number)}"


def on(device):
    """A context manager: inside of it, ops run on this GPU ("cpu": no change)."""
    name = device_name(device)
    return nullcontext() if name == "cpu" else load_cupy().cuda.Device(int(name[5:]))


def on_as_here(device):
    """As `on`, for another thread: with the stream, too, that is now this thread's current one on that device."""
    outer = on(device)
    if isinstance(outer, nullcontext):
        return outer
    with outer:
        stream = load_cupy().cuda.get_current_stream()

    @contextmanager
    def there():
        with on(device), stream:
            yield
    return there()


def use(device):
    """Make this the GPU on which this thread's ops run from now on ("cpu": no change). Returns the device's name."""
    name = device_name(device)
    if name != "cpu":
        load_cupy().cuda.Device(int(name[5:])).use()
    return name


def to(array, device):
    """A raw array on a device; itself, where it is there already.

    On its way up it goes through CuPy's pool of pinned memory, so that the program doesn't wait; on its way down the
    program waits for the array, and the checks that were put off (see refuse) speak.
    """
    name, here = device_name(device), device_of(array)
    if name == here:
        return array
    if hasattr(array, "stands_on"):
        return array.to(name)
    refuse_in_graph(f"a copy from {here} to {name}")
    if name == "cpu":
        with on(here):
            settle()
            return array.get()
    if here == "cpu":
        with on(name):
            return load_cupy().asarray(array)
    # CuPy orders the copy among the work of its own GPU alone: the array must be there before, and may go after.
    with on(here):
        array = load_cupy().ascontiguousarray(array)
        finish()
    with on(name):
        moved = array.copy()
        finish()
    return moved


def finish():
    """Wait until the current GPU has done what its current stream holds."""
    load_cupy().cuda.get_current_stream().synchronize()


def to_device_of(array, like):
    """A raw array on the device of another."""
    where = device_of(like)
    return array if where == "cpu" and on_host(array) else to(array, where)


def check_devices(name, values, error=None):
    """Raise RuntimeError if an op's raw values live on several devices, or on a GPU that isn't the current one."""
    arrays = [v for v in values if is_array(v)]
    devices = {device_of(a) for a in arrays}
    if devices <= {"cpu"} or devices == {current := device_name("cuda")}:
        return
    described = " and ".join(f"{list(a.shape)} on {device_of(a)}" for a in arrays)
    if len(devices) > 1:
        raise RuntimeError(f"{name}: arrays of different devices, {described}: move them to one with "
                           f".to({max(devices)!r})") from error
    where, = devices
    raise RuntimeError(f"{name}: {described}, but the current GPU is {current}: call backend.use({where!r}), or "
                       f"work inside `with backend.on({where!r}):`") from error


def zeros(shape, dtype, device="cpu"):
    """A raw array of zeros on a device."""
    with on(device):
        return module_on(device).zeros(shape, dtype)


def zeros_like(array, shape=None, dtype=None):
    """Zeros of the given shape and dtype (default: the array's own) on the array's device."""
    return module_of(array).zeros(array.shape if shape is None else shape, dtype or array.dtype)


def byte_range(array):
    """(first, last+1) address that the array's elements touch; None for scalars and empty arrays. Each GPU's addresses
    are shifted out of the others' way."""
    if not hasattr(array, "strides") or isinstance(array, xp.generic) or array.size == 0:
        return None
    if isinstance(array, xp.ndarray):
        if array.flags.c_contiguous:        # three times faster than asking NumPy, and nearly always so
            first = array.__array_interface__["data"][0]
            return first, first + array.nbytes
        return xp.lib.array_utils.byte_bounds(array)
    first = last = array.data.ptr + (array.data.device_id + 1 << 64)
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


def memory_info():
    """{device: {"used", "held", "free", "total"}} in bytes, of every GPU that this process sees: in arrays, in CuPy's
    pool (arrays and what it keeps for new ones), and the device's own. Empty where no GPU is in use."""
    if not DEVICE_ARRAYS:
        return {}
    cupy, info = load_cupy(), {}
    for i in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(i) as device:
            pool, (free, total) = cupy.get_default_memory_pool(), device.mem_info
            info[f"cuda:{i}"] = {"used": pool.used_bytes(), "held": pool.total_bytes(), "free": free, "total": total}
    return info


# ---------------------------------------------------------------- checks of values on a GPU

put_off = []    # [(0-d bool array, error)]: checks whose answers nobody has waited for yet
MOST = 256      # more are not kept


def refuse(bad, error):
    """Raise `error` if `bad`, a 0-d bool, is true: at once on the host. The answer of a GPU would have to be waited
    for, so there the error comes as soon as any value is brought to the host (item(), cpu(), …)."""
    if not on_host(bad):
        if recording.graph is not None:
            recording.graph.check(bad, error)
            return
        put_off.append((bad, error))
        if len(put_off) > MOST:
            settle()
    elif bad:
        raise error


def settle():
    """Wait for the checks that were put off, and raise the first error."""
    while put_off:
        here = device_of(put_off[0][0])
        checks = [check for check in put_off if device_of(check[0]) == here]
        put_off[:] = [check for check in put_off if device_of(check[0]) != here]
        with on(here):
            answers = load_cupy().stack([bad for bad, _ in checks]).get()
        for bad, (_, error) in zip(answers, checks, strict=True):
            if bad:
                raise error
