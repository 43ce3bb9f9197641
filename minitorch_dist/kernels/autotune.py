"""The autotuner: the fastest of a kernel's configurations, timed by CuPy events, remembered per device and size.

It answers {} (the record's own settings) unless MINITORCH_AUTOTUNE=1. Two configurations of a matrix product add in
different orders, so that two ranks that tune apart would no longer compute the same bits; whoever tunes knows that.
What has been measured stays on disk: kernel, configurations, types, bucket of sizes, device's name.
"""

import hashlib
import json
import os
import statistics

import numpy as np

from .build import cache_folder, write_atomically
from .launch import driver

WARM_UPS, REPEATS = 3, 10
_known = {}     # key -> the best configuration


def tuning():
    """Whether configurations are measured."""
    return os.environ.get("MINITORCH_AUTOTUNE", "0") == "1"


def bucket(sizes):
    """Sizes that share a configuration: each rounded up to a power of two."""
    return tuple(1 << max(0, int(size) - 1).bit_length() for size in sizes)


def best(kernel, sizes, like, run):
    """The options to launch a kernel with: one of kernel.configs, or {}.

    sizes  what the choice depends on, e.g. (m, n, k)
    like   an array of the call: its dtype, and on which device
    run    run(options) launches once. It must not change what later calls read

    A configuration that can't run here (too much shared memory) is passed over; RuntimeError if that is all of them.
    """
    if not kernel.configs or isinstance(like, np.ndarray) or not tuning():
        return {}
    cuda = driver()
    name = cuda.name(like.device.id)
    facts = kernel.name, [sorted(c.items()) for c in kernel.configs], str(like.dtype), bucket(sizes), name
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    if key not in _known:
        path = cache_folder() / f"tuned-{kernel.name}-{key}.json"
        _known[key] = recall(path, kernel) or measure(kernel, run, cuda.milliseconds, path, facts)
    return _known[key]


def recall(path, kernel):
    """What an earlier run has found, or None."""
    try:
        options = json.loads(path.read_text())["best"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return options if options in kernel.configs else None


def measure(kernel, run, milliseconds, path, facts):
    """Time every configuration, write down all times, and return the best."""
    times, reasons = {}, []
    for i, options in enumerate(kernel.configs):
        try:
            for _ in range(WARM_UPS):
                run(options)
            times[i] = statistics.median(milliseconds(lambda o=options: run(o)) for _ in range(REPEATS))
        except RuntimeError as error:
            reasons.append(str(error))
    if not times:
        raise RuntimeError(f"kernel {kernel.name}: none of its configurations runs here: {'; '.join(reasons)}")
    winner = kernel.configs[min(times, key=times.get)]
    table = [{**kernel.configs[i], "ms": ms} for i, ms in times.items()]
    try:
        write_atomically(path, json.dumps({"best": winner, "facts": repr(facts), "measured": table}, indent=1))
    except OSError:
        pass        # measured again next time
    return winner
