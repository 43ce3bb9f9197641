"""Arrays, their devices, and the seeded random streams.

`xp` is NumPy. Its ufuncs and functions carry themselves to CuPy when an
argument is a CuPy array (NEP 13 and NEP 18), so an op is written once. Only a
function that makes an array out of nothing must ask `module_of(x)` where.

A device is named by a string: "cpu", "cuda:0", "cuda:1", …; "cuda" is the GPU
that is current (the first, unless `use` says otherwise). CuPy runs an op on the
current GPU, wherever its arrays are, so a process works on one GPU at a time:
`use("cuda:1")`, or `with on("cuda:1"):` for a while. CuPy is imported by the
first who names a GPU.
"""

import numpy as xp

from .devices import (
    ARRAY_TYPES,
    DEVICE_ARRAYS,
    MOST,
    Placeholder,
    byte_range,
    check_devices,
    device_name,
    device_of,
    finish,
    is_array,
    keep_freed_memory,
    load_cupy,
    memory_info,
    module_of,
    module_on,
    names_device,
    on,
    on_as_here,
    on_host,
    put_off,
    refuse,
    settle,
    to,
    to_device_of,
    use,
    zeros,
    zeros_like,
)
from .dtypes import (
    STORED,
    as_dtype,
    dtype_code,
    finfo,
    is_bfloat16,
    is_floating,
    is_short,
    load_bfloat16,
    of_one_dtype,
    result_type,
    weak,
)
from .graphs import Recording, assign, recording, refuse_in_graph
from .halves import to_float32, to_half
from .orders import argsort, candidates
from .passes import TILE, by_tiles, choose, running_sum
from .products import add_up, adds_in_float32, in_float32, is_half, matmul, products_made_by
from .streams import (
    Draw,
    RandomState,
    Scope,
    generator,
    manual_seed,
    next_stream,
    normal_rows,
    random_by_sample,
    random_draws,
    random_restore,
    random_rows,
    random_scope,
    random_snapshot,
    random_state,
    stream,
    stream_key,
    uniform_of_draws,
)
from .wholes import is_whole, number, whole, wholes

__all__ = [
    "ARRAY_TYPES", "DEVICE_ARRAYS", "MOST", "STORED", "Draw", "Placeholder", "RandomState", "Recording", "Scope",
    "add_up", "adds_in_float32", "argsort", "as_dtype", "assign", "byte_range", "candidates", "check_devices",
    "device_name", "device_of", "dtype_code", "finfo", "finish", "generator", "in_float32", "is_array", "is_bfloat16",
    "is_floating", "is_half", "is_short", "keep_freed_memory", "load_bfloat16", "load_cupy", "manual_seed",
    "matmul", "memory_info", "module_of", "module_on", "names_device", "next_stream", "normal_rows", "of_one_dtype",
    "on", "on_as_here", "on_host", "products_made_by", "put_off", "random_by_sample", "random_draws",
    "random_restore", "random_rows", "random_scope", "random_snapshot", "random_state", "recording", "refuse",
    "refuse_in_graph", "result_type", "settle", "stream", "stream_key", "to", "to_device_of", "to_float32",
    "to_half", "uniform_of_draws", "use", "weak", "xp", "zeros", "zeros_like",
]
