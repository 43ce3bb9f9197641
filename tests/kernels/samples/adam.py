"""The fused update, on models of one to many parameters in one or two flat buffers; the second has another group."""

import numpy as np

from minitorch_dist.backend import as_dtype, device_of
from minitorch_dist.kernels import adam
from minitorch_dist.optim.adam import every_level
from minitorch_dist.optim.packed import Packed, arrays_of, values_of

from ..harness import SIZES, Sample, random

STEPS = 3
GROUPS = (1e-2, (0.9, 0.999), 1e-8, 0.1), (3e-3, (0.8, 0.99), 1e-6, 0.0)


def padded(n):
    return -(-n // 16) * 16


def aligned(size, dtype):
    """Zeros at a multiple of 16 bytes, wherever NumPy puts them."""
    raw = np.zeros(size * np.dtype(dtype).itemsize + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start:start + size * np.dtype(dtype).itemsize].view(dtype)


def flat(x, size):
    """An array as one stretch of a flat buffer: `size` elements with zeros behind."""
    module = np if isinstance(x, np.ndarray) else __import__("cupy")
    out = aligned(size, x.dtype) if module is np else module.zeros(size, x.dtype)
    out[:x.size] = x.ravel()
    return out


def rounded(x, signed):
    """What 8 bits make of an array, in its own dtype."""
    packed = Packed.full(x.size, 0, x.dtype, "cpu", signed)
    packed.pack(x)
    return packed.unpack()


def sample(n, *more, dtype="float32", label="", amsgrad=False, scale=1.0, inf=0.0, master=False, eight=False, **flags):
    """STEPS updates of parameters of n, *more elements; eight: with state of 8 bits."""
    sizes = n, *more
    values = [random(s, seed=k) for k, s in enumerate(sizes)]
    grads = [random(s, seed=50 + k) for k, s in enumerate(sizes)]
    dtype = as_dtype(dtype)
    if master:
        values = [x.astype(dtype).astype(np.float32) for x in values]
    if dtype.name == "bfloat16":        # gradients too
        grads = [g.astype(dtype) for g in grads]

    def entry(*args):
        module = np if isinstance(args[0], np.ndarray) else __import__("cupy")
        parameters, states = [], []
        for x, g in zip(args[:len(sizes)], args[len(sizes):], strict=True):
            slot = {"p": flat(x, padded(x.size)), "g": flat(g, padded(x.size))}
            if master:
                slot["master"] = slot["p"]
                slot["p"] = flat(x.astype(dtype), padded(x.size))
            state = {name: Packed.full(padded(x.size), 0, np.float32, device_of(x), name == "m") if eight else
                     flat(module.zeros(0, np.float32), padded(x.size))
                     for name in ("m", "v", "largest") if amsgrad or name != "largest"}
            states.append(state)
            for name, array in state.items():
                slot |= zip((name, f"{name}_scales"), arrays_of(array), strict=False)
            parameters.append(slot)
        levels = every_level(device_of(args[0])) if eight else None
        update = adam.Update(parameters, [0] * len(sizes), amsgrad=amsgrad, levels=levels, **flags)
        numbers = [None if x is None else module.asarray([x], np.float32) for x in (scale, inf)]
        for _ in range(STEPS):
            update([GROUPS[k % 2] for k in range(len(sizes))], *numbers)
        assert update.counts() == [0 if inf else STEPS] * len(sizes)
        out = []
        for x, slot, state in zip(args, parameters, states, strict=False):
            for array in (slot["p"], *([slot["master"]] if master else []), *map(values_of, state.values())):
                assert not (array[x.size:] != 0).any()
                out.append(array[:x.size])
        return tuple(out)

    def definition(*args):
        out = []
        for k, (p, g) in enumerate(zip(args[:len(sizes)], args[len(sizes):], strict=True)):
            m = v = np.zeros_like(p)
            largest = m if amsgrad else None
            lr, betas, eps, decay = GROUPS[k % 2]
            for t in range(1, STEPS + 1) if not inf else ():
                p, m, v, largest = adam.definition(p, g, m, v, largest, t, lr, betas, eps, decay,
                                                   grad_scale=scale or 1.0, **flags)
                if eight:
                    m, v = rounded(m, True), rounded(v, False)
                    largest = rounded(largest, False) if amsgrad else None
            out += [*([p] if master else []), p, m, v] + ([largest] if amsgrad else [])
        return tuple(out)

    # One number in some 10⁵ lies so near to a middle between levels that rounding decides.
    tolerance = 8e-3 if dtype.name == "bfloat16" else 2e-3
    return Sample("adam", n, entry, definition, (*values, *grads), label, tolerance if eight else None)


SAMPLES = [
    *(sample(n) for n in SIZES),
    sample(31, 1025, 7, 1, label="two groups"), sample(2500, 3, label="two programs"),
    sample(1025, 3, label="decoupled", decoupled=True),
    sample(1025, 3, label="amsgrad", amsgrad=True),
    sample(33, 5, label="maximize amsgrad decoupled", maximize=True, amsgrad=True, decoupled=True),
    sample(33, 5, label="scaled", scale=1024.0),
    sample(33, 5, label="no scaler", scale=None, inf=None),
    sample(1025, 3, label="skipped", inf=1.0),
    sample(1025, 40, label="bfloat16 with master", dtype="bfloat16", master=True, decoupled=True),
    sample(1025, 40, label="float16 with master", dtype="float16", master=True, amsgrad=True),
    *(sample(n, eight=True, label="8 bits") for n in (16, 48, 2064)),
    sample(2500, 3, 31, 1, label="8 bits, two groups", eight=True, decoupled=True, scale=None, inf=None),
    sample(1040, 3, label="8 bits, amsgrad maximize", eight=True, amsgrad=True, maximize=True, scale=1024.0),
    sample(1025, 40, label="8 bits, skipped", eight=True, inf=1.0),
    sample(1025, 40, label="8 bits, bfloat16 with master", eight=True, dtype="bfloat16", master=True, decoupled=True),
    sample(33, 40, label="8 bits, float16 with master", eight=True, dtype="float16", master=True, amsgrad=True),
]
