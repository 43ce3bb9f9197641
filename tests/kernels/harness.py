"""What every kernel is put through: samples, poisoned outputs with guarded margins, strided inputs."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import backend, kernels
from minitorch_dist.backend import as_dtype, is_floating
from minitorch_dist.kernels import launch
from minitorch_dist.kernels.interpret import interpret

SIZES = (1, 31, 1025)       # that each kernel's samples must have, as the extent its blocks run over
MARGIN = 64                 # elements before and behind each output that nobody may write
# ‖got - wanted‖ / ‖wanted‖ that rounding the results alone explains, a few times over.
TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 8e-3}


@dataclass
class Sample:
    """A call of a kernel's entry that can be compared with its definition.

    kernels     names of the kernels that the call starts, e.g. "add" or "norm_forward norm_backward"
    size        the extent that its blocks run over; each kernel needs samples of SIZES
    entry       entry(*args) -> array or tuple of arrays (None where a result is left out)
    definition  definition(*args) -> the same in NumPy; it gets floating arguments in float64
    args        arrays, numbers, None
    label       tells samples of one size apart
    tolerance   relative norm, per result; default: by the dtype of the result
    in_place    whether entry changes its arguments, and returns them
    """

    kernels: str
    size: int
    entry: object
    definition: object
    args: tuple
    label: str = ""
    tolerance: float | None = None
    in_place: bool = False
    names: tuple = field(init=False)

    def __post_init__(self):
        self.names = tuple(self.kernels.split())

    @property
    def id(self):
        return "-".join(filter(None, (*self.names, str(self.size), self.label)))


def samples():
    """Every sample of every kernel module: SAMPLES in samples/<module>.py."""
    import importlib
    return [s for module in kernels.MODULES for s in importlib.import_module(f"{__package__}.samples.{module}").SAMPLES]


def random(*shape, dtype="float32", seed=0):
    """Normal numbers of a dtype."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(as_dtype(dtype))


def exact(x):
    """An argument or result as the definition sees it: floating arrays in float64."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) and is_floating(x.dtype) else x


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def poison(dtype):
    """What no kernel would write by chance: NaN, or the largest integer."""
    return np.nan if is_floating(as_dtype(dtype)) else np.iinfo(dtype).max if np.dtype(dtype).kind in "iu" else True


class Guard:
    """In launch.empty's place: outputs full of poison with margins of it before and behind, where `like` is."""

    def __init__(self):
        self.made = []

    def __call__(self, shape, dtype, like):
        size = int(np.prod(shape))
        whole = backend.module_of(like).asarray(np.full(size + 2 * MARGIN, poison(dtype), dtype))   # NumPy's NaN
        self.made.append((whole, size))
        return whole[MARGIN:MARGIN + size].reshape(shape)

    def check(self):
        """No margin has been written to."""
        for whole, size in self.made:
            for margin in (whole[:MARGIN], whole[MARGIN + size:]):
                untouched = np.full(MARGIN, poison(whole.dtype), whole.dtype)
                np.testing.assert_array_equal(backend.to(margin, "cpu").view(np.uint8), untouched.view(np.uint8))


def guarded(monkeypatch):
    """Put a Guard in launch.empty's place."""
    guard = Guard()
    monkeypatch.setattr(launch, "empty", guard)
    return guard


@contextmanager
def on_stand_in(**libraries):
    """The stand-in for CuPy, with kernels on. A launch interprets on the numbers behind its arrays, at once or when the
    graph that is being recorded is launched. What a kernel is to fill is NaN before."""
    from ..device.fake_cupy import cupy, installed, launched, ndarray

    def start(kernel, driver, device, grid, args, options, *more):
        def run():
            interpret(kernel, grid, [a.host if isinstance(a, ndarray) else a for a in args], options)
        launched(run, out=args)

    def empty(shape, dtype, like):
        out = cupy.empty(shape, dtype)
        out.fill(poison(dtype))
        return out
    with pytest.MonkeyPatch.context() as patch, installed(**libraries) as module, kernels.enable():
        patch.setattr(launch, "start", start)
        patch.setattr(launch, "empty", empty)
        patch.setattr(launch, "_driver", SimpleNamespace(
            current=lambda: 0, using=lambda device: nullcontext(), capability=lambda device: 90))
        patch.setattr(kernels, "interpreting", lambda: False)       # so that arrays not NumPy's are taken
        yield module


def compare(sample, got, wanted):
    """Every result by its relative norm, and NaN only where the definition has it."""
    got, wanted = as_tuple(got), as_tuple(wanted)
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        if w is None:
            assert g is None
            continue
        tolerance = TOLERANCE.get(g.dtype.name, 0.0) if sample.tolerance is None else sample.tolerance
        g, w = exact(g), np.asarray(w)
        assert g.shape == w.shape
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w), err_msg=f"{sample.id}: places that were not written")
        error, scale = np.linalg.norm((g - w).ravel()), np.linalg.norm(w.ravel())
        assert error <= tolerance * max(scale, 1e-30), f"{sample.id}: relative error {error / scale:.2e} > {tolerance}"


def copied(args):
    return tuple(a.copy() if isinstance(a, np.ndarray) else a for a in args)


def strided(array):
    """The same values, every second element of a larger array."""
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), poison(array.dtype), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]
