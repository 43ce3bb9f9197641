"""From a Kernel and arrays to a running kernel, on CuPy's current stream.

Triton's own launcher wants torch, or takes the default stream instead of CuPy's; so machine code is loaded with CuPy's
Module and started by CuPy's Function. What is asked of CUDA stands in CupyDriver, so that tests can put a recording one
in its place and compare each launch with the PTX.
"""

import numpy as np

from .. import ledger
from ..backend import module_of

# NumPy's name of a dtype -> Triton's.
TYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
         "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "uint16": "u16", "uint32": "u32",
         "uint64": "u64", "bool": "i1"}
NUMBERS = {"i32": np.int32, "i64": np.int64, "fp32": np.float32, "fp64": np.float64}
NULL = np.uint64(0)
PLAIN_SHARED = 48 * 1024        # bytes of shared memory that a program gets unasked
CLEARED, TIMES = 64 << 20, 8    # bytes, more than an L2 cache holds, and how often they are cleared: see milliseconds


def cdiv(n, unit):
    """n / unit, rounded up. (Triton's own, called from Python, takes 100 times as long.)"""
    return -(-n // unit)


def next_power_of_2(n):
    """The smallest power of two from n up."""
    return 1 << max(0, n - 1).bit_length()


def empty(shape, dtype, like):
    """An uninitialised array on `like`'s device: where kernels' outputs come from. Tests fill it with NaN."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype) if on_numpy is None else on_numpy.empty(shape, dtype)
    cupy, device = module_of(like), like.data.device_id
    if device == cupy.cuda.runtime.getDevice():
        return cupy.empty(shape, dtype)
    with cupy.cuda.Device(device):
        return cupy.empty(shape, dtype)


def contiguous(x):
    """The array itself, or a C-contiguous copy: for entries that the engine calls, whose arrays may be views."""
    return x if x.flags.c_contiguous else module_of(x).ascontiguousarray(x)


class CupyDriver:
    """What a launch asks of CUDA, by CuPy."""

    def __init__(self):
        import cupy
        from cupy.cuda.function import CPointer
        from cupy_backends.cuda.api import driver
        self.cupy, self.driver, self.pointer = cupy, driver, CPointer

    def current(self):
        """The number of the current device."""
        return self.cupy.cuda.runtime.getDevice()

    def using(self, device):
        """A context in which another device is the current one."""
        return self.cupy.cuda.Device(device)

    def capability(self, device):
        """Its compute capability: 90 for 9.0."""
        return int(self.cupy.cuda.Device(device).compute_capability)

    def name(self, device):
        """What the device is called, e.g. "NVIDIA H200"."""
        return self.cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()

    def milliseconds(self, run):
        """How long what run() launches takes on the GPU, by events on the current stream.

        The GPU clears memory first, for more than 100 µs: it is busy until the host has asked for it all, whose time
        the events would measure else, and nothing that run() reads is left in the L2 cache."""
        begin, end, cleared = self.cupy.cuda.Event(), self.cupy.cuda.Event(), self.cupy.empty(CLEARED, np.uint8)
        for _ in range(TIMES):
            cleared.data.memset_async(0, CLEARED)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(begin, end)

    def packed(self, numbers):
        """(what a function takes, the memory it points to) of NumPy's numbers. CuPy takes the numbers, too, and makes
        the same of them at every launch: with 20 of them that takes longer than all else."""
        memory = [np.array(number) for number in numbers]
        return tuple(self.pointer(number.ctypes.data) for number in memory), memory

    def load(self, binary, device):
        """Load machine code on the current device: function(grid, block, args, shared_mem) on the current stream."""
        if binary.shared > PLAIN_SHARED:
            runtime = self.cupy.cuda.runtime
            most = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
            if binary.shared > most:
                raise RuntimeError(f"kernel {binary.name} needs {binary.shared:,} bytes of shared memory per program, "
                                   f"the device has {most:,}: take smaller blocks or fewer stages")
        module = self.cupy.cuda.function.Module()
        module.load(binary.cubin)
        function = module.get_function(binary.name)     # it keeps the module loaded
        if binary.shared > PLAIN_SHARED:
            self.driver.funcSetAttribute(
                function.ptr, self.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, binary.shared)
        return function


_driver = None      # made when first needed
on_numpy = None     # what runs a kernel on NumPy arrays, if not Triton's interpreter: see emulator


def driver():
    """The CupyDriver, or what a test has put in its place."""
    global _driver
    if _driver is None:
        _driver = CupyDriver()
    return _driver


def capability(x):
    """The compute capability, 90 for 9.0, of the GPU that an array is on; of NumPy's the emulated one, or 90."""
    if isinstance(x, np.ndarray):
        return getattr(on_numpy, "capability", 90)
    return driver().capability(x.data.device_id)


def launch(kernel, grid, args, options):
    """Start a kernel: see Kernel.__call__."""
    if len(args) != len(kernel.signature):
        raise TypeError(f"kernel {kernel.name} takes {len(kernel.signature)} arguments "
                        f"({', '.join(kernel.signature)}), got {len(args)}")
    device, arrays, specifics = described(kernel, args)
    if 0 in grid:
        return
    if device is None:
        if on_numpy is None:
            from .interpret import interpret as run
        else:
            run = on_numpy
        run(kernel, grid, args, options)
    else:
        cuda = driver()
        if device == cuda.current():
            start(kernel, cuda, device, grid, args, options, arrays, specifics)
        else:
            with cuda.using(device):
                start(kernel, cuda, device, grid, args, options, arrays, specifics)
    ledger.launch(kernel.name)


def described(kernel, args):
    """(device, arrays, specifics) of a call: where its arrays are, by number, None for NumPy's; those that CuPy is
    given; and per pointer what the code depends on: type and alignment. TypeError or ValueError where an argument isn't
    usable as it is. (A launch is short: what it costs is this Python.)"""
    device, arrays, specifics = -1, [], []
    for (name, strided), a in zip(kernel.pointers, args, strict=False):     # behind the pointers come the numbers
        if a is None:
            specifics.append(None)
            continue
        flags = getattr(a, "flags", None)
        if flags is None:
            raise TypeError(f"kernel {kernel.name}: {name} must be an array, it is a {type(a).__name__}")
        if not (strided or flags.c_contiguous):
            raise ValueError(f"kernel {kernel.name}: {name} of shape {a.shape} has strides {a.strides}; it must be "
                             "C-contiguous (ascontiguousarray copies it)")
        if isinstance(a, np.ndarray):
            here = None
        else:
            memory = a.data
            here = memory.device_id
            arrays.append(a)            # CuPy passes its address
            specifics.append((a.dtype, memory.ptr % 16 == 0))
        if here != device != -1:
            raise ValueError(f"kernel {kernel.name}: its arrays must be on one device, they are on "
                             f"{places(kernel, args)}")
        device = here
    return device, arrays, specifics


def places(kernel, args):
    """{pointer: where its array is}, for people."""
    return {name: "the CPU" if isinstance(a, np.ndarray) else f"cuda:{a.device.id}"
            for name, a in zip(kernel.signature, args, strict=True) if hasattr(a, "flags")}


MANY = 10_000       # sets of numbers that are kept packed
_packed = {}        # (kernel, numbers, its floats as text) -> what `packed` gives
_functions = {}     # (kernel, types and alignment, options, device) -> (function, block, scratch, shared memory)


def packed(kernel, cuda, numbers):
    """(a call's numbers as the driver wants them, per number whether it is a multiple of 16 that the code depends on,
    memory to be kept for the time of the call). A training step asks with the same numbers again and again."""
    key = kernel, numbers, *[repr(numbers[i]) for i in kernel.floats]       # 0.0 == -0.0
    found = _packed.get(key)
    if found is None:
        if len(_packed) >= MANY:
            _packed.clear()
        # A bare Python float would go as a double, an int as 64 bits.
        given, memory = cuda.packed([kind(a) for (kind, _), a in zip(kernel.numbers, numbers, strict=True)])
        found = _packed[key] = given, tuple(
            divisible and a % 16 == 0 for (_, divisible), a in zip(kernel.numbers, numbers, strict=True)), memory
    return found


def start(kernel, cuda, device, grid, args, options, arrays, specifics):
    """Launch on the current device, which holds the arrays."""
    numbers, multiples, memory = packed(kernel, cuda, args[len(kernel.pointers):])
    key = kernel, (*specifics, *multiples), tuple(options.items()), device
    loaded = _functions.get(key)
    if loaded is None:
        loaded = _functions[key] = prepare(kernel, cuda, device, args, key[1], options)
    function, block, (scratch, _), shared = loaded
    if len(grid) > 1 and max(grid[1:]) > 65535 or grid[0] >= 2 ** 31:
        raise ValueError(f"kernel {kernel.name}: a grid of {grid}; CUDA takes up to 2³¹ - 1, 65,535 and 65,535")
    function(tuple(grid), block, (*arrays, *numbers, *scratch), shared_mem=shared)


def prepare(kernel, cuda, device, args, specifics, options):
    """What a launch with arguments of these types and alignments needs: the function on the device, how many threads,
    Triton's scratch pointers, bytes of shared memory."""
    from .build import build
    types, divisible = {}, []
    for (name, kind), a, special in zip(kernel.signature.items(), args, specifics, strict=True):
        types[name] = pointer_type(kernel, name, a) if kind[0] == "*" else kind
        if special is True or isinstance(special, tuple) and special[1]:
            divisible.append(name)
    binary = build(kernel, types, divisible, options, cuda.capability(device))
    return cuda.load(binary, device), (32 * binary.warps, 1, 1), cuda.packed([NULL] * binary.scratch), binary.shared


def pointer_type(kernel, name, array):
    """Triton's type of a pointer to the array's elements; None for None. TypeError where the kernel takes another."""
    if array is None:
        return None
    asked, have = kernel.signature[name], f"*{TYPES.get(array.dtype.name)}"
    if have == "*None" or asked not in ("*", have):
        raise TypeError(f"kernel {kernel.name}: {name} has dtype {array.dtype}; it takes {asked[1:] or list(TYPES)}")
    return have
