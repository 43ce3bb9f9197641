"""CUDA's runtime and driver interface, as much of it as CuPy calls, in Python: a table of functions on the Gpus.

Source: NVIDIA, "CUDA Runtime API" and "CUDA Driver API", version 12.9.
"""

import ctypes
import os
import struct
import sys
import traceback

from . import idle
from .machine import (
    CAPABILITY,
    IDLE,
    NOT_READY,
    TOTAL,
    CudaError,
    Event,
    Function,
    Gpus,
    Graph,
    Module,
    Stream,
    function_of,
)

VERSION = 12090
NOT_SUPPORTED, UNKNOWN = 801, 999
POINTER, INT, UNSIGNED, SIZE, FLOAT = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_float)
KINDS = {"p": POINTER, "i": INT, "u": UNSIGNED, "z": SIZE, "l": ctypes.c_longlong}
NAME, UUID = b"Emulated GPU", b"minitorch_dist's"
# cudaDeviceGetAttribute: number -> value. What isn't here is refused.
ATTRIBUTES = {1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2 ** 31 - 1, 6: 65535, 7: 65535, 8: 48 << 10, 10: 32, 12: 65536,
              16: 4, 39: 2048, 75: CAPABILITY // 10, 76: CAPABILITY % 10, 81: 228 << 10, 97: 227 << 10, 115: 0}
# cudaDeviceProp of CUDA 12: (offset, format, values).
PROPERTIES = [(0, "256s", NAME), (256, "16s", UUID), (288, "QQii", TOTAL, 48 << 10, 65536, 32),
              (320, "iiiiiii", 1024, 1024, 1024, 64, 2 ** 31 - 1, 65535, 65535),
              (360, "ii", CAPABILITY // 10, CAPABILITY % 10), (388, "i", 4)]
PROPERTIES_SIZE = 1032

gpus = Gpus(int(os.environ.get("EMULATED_GPUS", 1)))
API = {}        # name -> (type of the result, types of the arguments, function)


def api(kinds, *names, result=INT):
    """Put a function into API under its CUDA names."""
    def keep(function):
        for name in names:
            API[name] = result, [KINDS[kind] for kind in kinds], function
        return function
    return keep


def put(where, kind, value):
    kind.from_address(where).value = value


# ---------------------------------------------------------------- devices

@api("p", "cudaDriverGetVersion", "cudaRuntimeGetVersion")
def version(out):
    put(out, INT, VERSION)


@api("p", "cudaGetDevice", "cuCtxGetDevice")
def get_device(out):
    put(out, INT, gpus.current)


@api("i", "cudaSetDevice")
def set_device(device):
    if not 0 <= device < gpus.count:
        raise CudaError(101, f"there is no device {device}")
    gpus.current = device


@api("p", "cudaGetDeviceCount")
def device_count(out):
    put(out, INT, gpus.count)


@api("pii", "cudaDeviceGetAttribute")
def attribute(out, what, device):
    put(out, INT, ATTRIBUTES[what])


@api("pi", "cudaGetDeviceProperties_v2")
def properties(out, device):
    ctypes.memset(out, 0, PROPERTIES_SIZE)
    for offset, form, *values in PROPERTIES:
        struct.pack_into(form, (ctypes.c_char * PROPERTIES_SIZE).from_address(out), offset, *values)
    UNSIGNED.from_address(out + 268).value += device        # another UUID each


@api("pii", "cudaDeviceCanAccessPeer")
def can_access_peer(out, device, peer):
    put(out, INT, 0)


@api("", "cudaDeviceSynchronize")
def device_synchronize():
    gpus.synchronize()


@api("p", "cuCtxGetCurrent")
def context(out):
    put(out, POINTER, 1 + gpus.current)


# ---------------------------------------------------------------- errors

@api("", "cudaGetLastError", "cudaPeekAtLastError")
def last_error():
    pass


TEXTS = {}      # status -> what keeps its text alive


def text_of(status):
    return ctypes.addressof(TEXTS.setdefault(status, ctypes.create_string_buffer(f"error {status}".encode())))


@api("i", "cudaGetErrorName", "cudaGetErrorString", result=POINTER)
def error_text(status):
    return text_of(status)


@api("ip", "cuGetErrorName", "cuGetErrorString")
def driver_error_text(status, out):
    put(out, POINTER, text_of(status))


# ---------------------------------------------------------------- memory

@api("pz", "cudaMalloc")
def malloc(out, size):
    put(out, POINTER, gpus.allocate(size))


@api("p", "cudaFree")
def free(address):
    if address:
        gpus.release(address)


@api("pzu", "cudaHostAlloc")
def host_alloc(out, size, flags):
    put(out, POINTER, gpus.allocate(size, pinned=True))


@api("p", "cudaFreeHost")
def free_host(address):
    gpus.release_pinned(address)


@api("pp", "cudaMemGetInfo")
def memory_info(free, total):
    put(free, SIZE, gpus.free())
    put(total, SIZE, TOTAL)


@api("ppzi", "cudaMemcpy")
def memcpy(to, source, size, kind):
    gpus.copy(to, source, size, waits=True)


@api("ppzip", "cudaMemcpyAsync")
def memcpy_async(to, source, size, kind, stream):
    gpus.copy(to, source, size, stream)


@api("pipizp", "cudaMemcpyPeerAsync")
def memcpy_peer_async(to, to_device, source, device, size, stream):
    gpus.copy(to, source, size, stream)


@api("piz", "cudaMemset")
def memset(to, value, size):
    gpus.fill(to, value, size, waits=True)


@api("pizp", "cudaMemsetAsync")
def memset_async(to, value, size, stream):
    gpus.fill(to, value, size, stream)


@api("pp", "cudaPointerGetAttributes")
def pointer_attributes(out, address):
    device = gpus.device_of(address)
    kind = 2 if device is not None else int(gpus.is_pinned(address))
    struct.pack_into("iiQQ", (ctypes.c_char * 24).from_address(out), 0, kind, device or 0, address, address)


# ---------------------------------------------------------------- streams, events, graphs

@api("p", "cudaStreamCreate")
def stream_create(out):
    put(out, POINTER, gpus.handle(Stream(device=gpus.current)))


@api("pu", "cudaStreamCreateWithFlags")
def stream_create_with_flags(out, flags):
    put(out, POINTER, gpus.handle(Stream(not flags & 1, gpus.current)))


@api("pui", "cudaStreamCreateWithPriority")
def stream_create_with_priority(out, flags, priority):
    stream_create_with_flags(out, flags)


@api("p", "cudaStreamDestroy")
def stream_destroy(stream):
    gpus.synchronize(stream)
    del gpus.handles[stream]


@api("p", "cudaStreamSynchronize")
def stream_synchronize(stream):
    gpus.synchronize(stream)


@api("p", "cudaStreamQuery")
def stream_query(stream):
    gpus.refuse_in_capture("asks for a stream's state", stream)
    return None if gpus.is_done(gpus.stream(stream), gpus.number) else NOT_READY


@api("ppu", "cudaStreamWaitEvent")
def stream_wait_event(stream, event, flags):
    gpus.wait_event(stream, event)


@api("pi", "cudaStreamBeginCapture")
def begin_capture(stream, mode):
    gpus.begin_capture(stream, relaxed=mode == 2)


@api("pp", "cudaStreamEndCapture")
def end_capture(stream, out):
    put(out, POINTER, None)
    put(out, POINTER, gpus.handle(gpus.end_capture(stream)))


@api("pp", "cudaStreamIsCapturing")
def is_capturing(stream, out):
    graph = gpus.stream(stream).graph
    put(out, INT, 0 if graph is None else 2 if graph.spoilt else 1)


@api("ppz", "cudaGraphInstantiate")
def instantiate(out, graph, flags):
    put(out, POINTER, gpus.handle(gpus.get(graph, Graph)))


@api("pp", "cudaGraphLaunch")
def graph_launch(graph, stream):
    gpus.start_graph(gpus.get(graph, Graph), stream)


@api("pp", "cudaGraphUpload")
def graph_upload(graph, stream):
    gpus.get(graph, Graph)


@api("p", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaEventDestroy", "cuModuleUnload")
def destroy(handle):
    del gpus.handles[handle]


@api("pu", "cudaEventCreateWithFlags")
def event_create(out, flags):
    put(out, POINTER, gpus.handle(Event(gpus.current)))


@api("pp", "cudaEventRecord")
def event_record(event, stream):
    gpus.record(event, stream)


@api("p", "cudaEventSynchronize")
def event_synchronize(event):
    gpus.synchronize_event(event)


@api("p", "cudaEventQuery")
def event_query(event):
    event = gpus.get(event, Event)
    return None if event.stream is None or gpus.is_done(event.stream, event.number) else NOT_READY


@api("ppp", "cudaEventElapsedTime")
def elapsed(out, begin, end):
    begin, end = gpus.get(begin, Event), gpus.get(end, Event)
    if begin.time is None or end.time is None:
        return NOT_READY
    put(out, FLOAT, 1e3 * (end.time - begin.time))
    return None


# ---------------------------------------------------------------- modules and kernels

@api("pp", "cuModuleLoadData")
def load_module(out, image):
    put(out, POINTER, gpus.handle(Module(ctypes.string_at(image).decode())))


@api("ppp", "cuModuleGetFunction")
def get_function(out, module, name):
    put(out, POINTER, gpus.handle(function_of(gpus.get(module, Module), ctypes.string_at(name).decode())))


@api("pip", "cuFuncGetAttribute")
def get_function_attribute(out, what, function):
    put(out, INT, gpus.get(function, Function).attributes.get(what, 0))


@api("pii", "cuFuncSetAttribute")
def set_function_attribute(function, what, value):
    gpus.get(function, Function).attributes[what] = value


@api("puuuuuuuppp", "cuLaunchKernel")
def launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
    function = gpus.get(function, Function)
    count = len(function.code.program.parameters)
    addresses = (POINTER * count).from_address(parameters) if count else ()
    gpus.launch(function, (gx, gy, gz), (bx, by, bz), shared, stream, addresses)


# ---------------------------------------------------------------- as C functions

kept = {}       # name -> the C function: they live as long as the process


def as_c(name):
    """A C function for a name of CUDA's. It tells CuPy its errors by a status, and their words on stderr."""
    if name in kept:
        return kept[name]
    if IDLE and idle.function(name):
        return idle.function(name)
    base = name if name in API else name.removesuffix("_v2")
    result, kinds, function = API.get(base, (INT, [], None))

    def run(*arguments):
        try:
            if function is None:
                raise CudaError(NOT_SUPPORTED, f"the emulated GPU has no {name}")
            with gpus.changed:
                status = function(*(0 if a is None else a for a in arguments))
            return 0 if status is None else status
        except CudaError as error:
            status, words = error.args
        except BaseException:       # a fault of the emulated GPU's own
            status, words = UNKNOWN, traceback.format_exc()
        print(f"{name}: {words}", file=sys.stderr, flush=True)
        TEXTS[status] = ctypes.create_string_buffer(words.encode())
        return status
    kept[name] = ctypes.CFUNCTYPE(result, *kinds)(run)
    return kept[name]
