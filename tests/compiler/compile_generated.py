"""Compile kernels that mt.compile makes for compute capability 9.0, without a GPU; prints a JSON line for each.

A process of its own, because Triton either interprets or compiles: python -m tests.compiler.compile_generated
"""

import json
import re

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.compiler.gpu import GpuKernel
from minitorch_dist.kernels import show
from minitorch_dist.kernels.build import checked, compile_triton
from minitorch_dist.kernels.launch import TYPES

WIDE = re.compile(r"\.v4\.[bf]32|\.v2\.[bf]64")      # 128 bits
RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def residual(x, y, weight, bias, w):
    """The bias and residual sum of a block, and the norm behind it."""
    s = x + (y + bias)
    return mt.gelu(mt.layer_norm(s, 256, weight, bias), approximate="tanh") * w, s


PROGRAMS = {
    "residual": (residual, normal(512, 256), normal(512, 256), normal(256), normal(256), normal(256)),
    "gelu": (mt.gelu, normal(64, 2048, dtype=np.float64)),
    "softmax": (mt.softmax, normal(256, 1024)),
    "wide softmax": (mt.softmax, normal(4, 8192, dtype=np.float64)),
    "ragged softmax": (mt.softmax, normal(33, 1025)),
    "long softmax": (mt.softmax, normal(8, 16384)),
    "rms norm": (lambda x, w: mt.rms_norm(x, 4096, w), normal(16, 4096), normal(4096)),
    "ragged numbers": (lambda x: mt.sum(mt.where(x > 0, mt.astype(x > 1, np.int32) * x ** 3, mt.log1p(mt.exp(x)))),
                       normal(7, 11)),
    "turned": (lambda x, y: mt.tanh(x.T) * y, normal(512, 256), normal(256, 512)),
    "dropout": (nn.Dropout(0.3), normal(64, 256)),
}


def contiguous(shape):
    """Strides in elements."""
    return tuple(int(np.prod(shape[i + 1:])) for i in range(len(shape)))


for program, (function, *arrays) in PROGRAMS.items():
    made = mt.compile(function, emit="c")
    outs = made(*(mt.tensor(a, requires_grad=True) for a in arrays))
    (outs[0] if isinstance(outs, tuple) else outs).sum().backward()
    assert not made.breaks, made.breaks
    variant = (made.compiled if isinstance(made, nn.Module) else made).variants[0]
    found = [(p, k) for p in (variant.forward_program, variant.backward_program) for k in p.schedule.kernels]
    for number, (_, kernel) in enumerate(found):
        gpu = GpuKernel(kernel, [contiguous(v.shape) for v in kernel.inputs], np.empty(0))
        types = {f"in{i}": f"*{TYPES[v.dtype.name]}" for i, v in enumerate(kernel.inputs)}
        types |= {name: f"*{TYPES[np.dtype(dtype).name]}" for name, _, dtype in gpu.writer.parameters}
        code = compile_triton(gpu.record, types, list(types), {}, 90)
        binary = checked(gpu.record, types, code)
        ptx = code.asm["ptx"]
        print(json.dumps({"name": f"{program} {number}", "wide": len(WIDE.findall(ptx)),
                          "quotients": sorted(set(re.findall(r"\b(?:div|sqrt)\.(rn|full|approx|rz)", ptx))),
                          "contracted": ptx.count("fma."), "stack": show.usage(binary.cubin)["stack"],
                          "shared": binary.shared}), flush=True)
