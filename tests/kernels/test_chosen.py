"""What is chosen where nothing has been measured, for usual and for odd sizes: machine code that keeps all in
registers, uses tensor cores where there are some, and loads 128 bits at a time. (test_compiled.py: every kernel's
examples.)

The entries are called with arrays that have addresses alone, and a driver that notes what they would start.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import kernels
from minitorch_dist.autodiff.ops.attention import ALL, CAUSAL
from minitorch_dist.backend import as_dtype
from minitorch_dist.kernels import bias_gelu, build, dropout, launch, matmul, norms
from minitorch_dist.kernels import flash_attention as flash
from minitorch_dist.kernels import softmax_cross_entropy as cross_entropy

from ..quick import asked
from . import PATIENCE
from .compile_all import spilled
from .recording import DeviceArray, RecordingDriver, fake_build

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
ROOT = Path(__file__).parents[2]
WIDE_COPIES = ("LDG.128", "LDGSTS.128")
ALIGNED = 256       # bytes, where CuPy's arrays begin


def array(dtype, *shape):
    size = int(np.prod(shape)) * (dtype := as_dtype(dtype)).itemsize
    memory = np.empty(size + ALIGNED, np.uint8)
    first = -memory.ctypes.data % ALIGNED
    return Shaped(np.ndarray(shape, dtype, memory[first:first + size]))


class Shaped(DeviceArray):
    """With what entries do to shapes."""

    def reshape(self, *shape):
        return Shaped(self.array.reshape(*shape))


def norm(dtype, rows, size):
    x, w = array(dtype, rows, size), array(dtype, size)
    _, kept = norms.layer_norm(x, w, w, 1, 1e-5)
    norms.layer_norm_pullback(x, (True,) * 3, x, w, 1, kept)


def attention(dtype, size, band):
    x = array(dtype, 2, 4, 128, size)
    _, kept = flash.flash_attention(x, x, x, band, 0.1)
    flash.flash_attention_gradient(x, x, x, x, band, 0.1, kept)


def losses(dtype, rows, classes):
    logits, labels = array(dtype, rows, classes), array("int64", rows)
    _, kept = cross_entropy.softmax_cross_entropy(logits, labels)
    cross_entropy.pullback(array(dtype, rows), (True,), logits, labels, None, kept)


def product(dtype, m, k, n, precision="ieee"):
    matmul.matmul(array(dtype, m, k), array(dtype, k, n), precision=precision)


# (name, compute capability, the call, those of its kernels that are looked at, instructions of which one is there)
CASES = [
    ("layer norm of 768", 90, lambda: norm("float32", 4096, 768), "norm norm_backward", WIDE_COPIES),
    ("layer norm of 1,500 in 16 bits", 90, lambda: norm("float16", 4096, 1500), "norm norm_backward", ()),
    ("layer norm of 3,000", 90, lambda: norm("float32", 4096, 3000), "norm norm_backward", ()),
    ("attention of heads of 128", 90, lambda: attention("float16", 128, CAUSAL),
     "flash_attention flash_attention_queries flash_attention_sources", ("HGMMA",)),
    ("attention, all to all, in bfloat16", 90, lambda: attention("bfloat16", 64, ALL),
     "flash_attention_queries flash_attention_sources", ("HGMMA",)),
    ("attention, all to all, in float32", 90, lambda: attention("float32", 64, ALL), "flash_attention_sources",
     WIDE_COPIES),
    ("attention in float32", 90, lambda: attention("float32", 64, CAUSAL),
     "flash_attention flash_attention_queries flash_attention_sources", ("HGMMA", "HMMA")),
    ("attention in float32", 80, lambda: attention("float32", 64, CAUSAL), "flash_attention", WIDE_COPIES),
    ("a large product", 90, lambda: product("float16", 4096, 1024, 4096), "matmul", ("HGMMA",)),
    ("a large product in tf32", 90, lambda: product("float32", 4096, 1024, 4096, "tf32"), "matmul", ("HGMMA",)),
    ("a large product", 80, lambda: product("bfloat16", 4096, 1024, 4096), "matmul", ("HMMA",)),
    ("a product in float32", 90, lambda: product("float32", 512, 1024, 768), "matmul", WIDE_COPIES),
    ("losses of 65 classes", 90, lambda: losses("float32", 1024, 65), "cross_entropy cross_entropy_backward", ()),
    ("losses of 50,304 classes in 16 bits", 80, lambda: losses("float16", 64, 50304),
     "cross_entropy cross_entropy_backward", WIDE_COPIES),
    ("gelu with a bias", 80, lambda: bias_gelu.bias_gelu(array("float16", 4096, 3072), array("float16", 3072), "tanh"),
     "bias_gelu", WIDE_COPIES),
    ("dropout in 16 bits", 90, lambda: dropout.dropout(array("bfloat16", 1 << 16), 0.1, 1 << 70), "dropout",
     WIDE_COPIES),
]


@pytest.fixture(scope="module")
def chosen(request, tmp_path_factory):
    """{(case, its compute capability): [(kernel, facts)]} of those cases that are tested."""
    folder, calls = tmp_path_factory.mktemp("chosen"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build", fake_build())
        patch.setattr(launch, "empty", lambda shape, dtype, like: array(dtype, *shape))
        tested = asked(request, "name", "capability")
        for name, capability, call, wanted, _ in [case for case in CASES if case[:2] in tested]:
            gpu = RecordingDriver(cc=capability)
            patch.setattr(launch, "_driver", gpu)
            patch.setattr(launch, "_functions", {})
            call()
            made = [binary.name for _, binary, *_ in gpu.calls if binary.name.kernel in wanted.split()]
            assert [v.kernel for v in made] == wanted.split()
            calls += [((name, capability), v) for v in made]
    calls.sort(key=lambda call: call[0][1])
    (folder / "asked").write_bytes(pickle.dumps([(v, capability) for (_, capability), v in calls]))
    done = subprocess.run([sys.executable, "-m", f"{__package__}.compile_all", folder / "asked"], cwd=ROOT,
                          env=os.environ | {"TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(folder)},
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = {}
    for (case, v), line in zip(calls, done.stdout.splitlines(), strict=True):
        found.setdefault(case, []).append((v.kernel, SimpleNamespace(**json.loads(line))))
    return found


@pytest.mark.parametrize("name, capability, instructions", [(name, cc, some) for name, cc, *_, some in CASES],
                         ids=lambda v: str(v) if not isinstance(v, tuple) else "")
def test_what_is_chosen_fits_the_machine(chosen, name, capability, instructions):
    for kernel, facts in chosen[name, capability]:
        room = spilled(name) if capability == 90 else 0
        assert facts.stack <= room and facts.local == 0, (kernel, facts)
        assert room or not {"LDL", "STL"} & set(facts.memory), (kernel, facts)
        assert not instructions or set(instructions) & set(facts.memory), (kernel, facts)
