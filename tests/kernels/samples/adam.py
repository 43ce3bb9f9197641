"""The fused update, on models of one to many parameters in one or two flat buffers; the second has another group."""

import numpy as np

from minitorch_dist.backend import as_dtype
from minitorch_dist.kernels import adam

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


def sample(n, *more, dtype="float32", label="", amsgrad=False, scale=1.0, inf=0.0, master=False, **flags):
    """STEPS updates of parameters of n, *more elements, whose gradients are the given ones times 1, 2, …"""
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
        parameters = []
        for x, g in zip(args[:len(sizes)], args[len(sizes):], strict=True):
            slot = {"p": flat(x, padded(x.size)), "g": flat(g, padded(x.size))}
            if master:
                slot["master"] = slot["p"]
                slot["p"] = flat(x.astype(dtype), padded(x.size))
            slot |= {name: flat(module.zeros(0, np.float32), padded(x.size)) for name in ("m", "v")}
            if amsgrad:
                slot["largest"] = flat(module.zeros(0, np.float32), padded(x.size))
            parameters.append(slot)
        update = adam.Update(parameters, [0] * len(sizes), amsgrad=amsgrad, **flags)
        numbers = [None if x is None else module.asarray([x], np.float32) for x in (scale, inf)]
        for _ in range(STEPS):
            update([GROUPS[k % 2] for k in range(len(sizes))], *numbers)
        assert update.counts() == [0 if inf else STEPS] * len(sizes)
        out = []
        for x, slot in zip(args, parameters, strict=False):
            for name in ("p", "master", "m", "v", "largest"):
                if name in slot:
                    assert not (slot[name][x.size:] != 0).any()
                    out.append(slot[name][:x.size])
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
            out += [*([p] if master else []), p, m, v] + ([largest] if amsgrad else [])
        return tuple(out)

    return Sample("adam", n, entry, definition, (*values, *grads), label)


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
]
