"""Kernels as Triton functions: the op table, random programs and single kernels in Triton's interpreter, with tiles of
all shapes; and compiled for a GPU, without one."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import minitorch_dist as mt
from minitorch_dist import kernels, ledger
from minitorch_dist.compiler import gpu, triton_source
from tests.autodiff.samples import SAMPLES
from tests.kernels import PATIENCE
from tests.kernels.harness import guarded

from . import test_table
from .compare import identical, run
from .test_kernels import ONE_KERNEL, X
from .test_random_programs import hold

interpreted = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
ROOT = Path(__file__).parents[2]

# Tiles so small that everything sticks out of them, and all ways of adding up occur in small arrays.
GEOMETRIES = {"as on a GPU": {}, "long rows": {"WIDEST": 2, "STEP": 4, "TILE": 4},
              "stripes": {"PROGRAMS": 2, "TILE": 2}, "one program": {"PROGRAMS": 1, "TILE": 8},
              "long rows in stripes": {"PROGRAMS": 2, "WIDEST": 4, "STEP": 4, "TILE": 4}}
GEOMETRY = pytest.mark.parametrize("geometry", GEOMETRIES)


@pytest.fixture
def guard(monkeypatch):
    """What kernels write is full of NaN before, and nothing is written beside it."""
    guard = guarded(monkeypatch)
    yield guard
    guard.check()


def shaped(monkeypatch, geometry):
    for name, value in GEOMETRIES[geometry].items():
        monkeypatch.setattr(triton_source, name, value)


@interpreted
@pytest.mark.parametrize("dtype, geometry", [(np.float32, "as on a GPU"), (np.float64, "stripes")])
def test_the_op_table(dtype, geometry, monkeypatch, guard):
    shaped(monkeypatch, geometry)
    test_table.hold([(s.id, s.function, s.args) for s in SAMPLES if s.id not in test_table.BREAK], "triton", dtype)


@interpreted
@pytest.mark.parametrize("group, geometry", list(enumerate(GEOMETRIES)))
def test_random_programs(group, geometry, monkeypatch, guard):
    shaped(monkeypatch, geometry)
    hold(group, "triton", together=12 if geometry == "as on a GPU" else 5)


@interpreted
@GEOMETRY
def test_ops_without_a_derivative(geometry, monkeypatch, guard):
    shaped(monkeypatch, geometry)
    test_table.hold(list(test_table.constants()), "triton", np.float32)


def arithmetic(x, y, i, j):
    """What is rounded as IEEE asks gives NumPy's bits."""
    root = mt.sqrt(mt.absolute(x))
    return (x * y + x, x / y, root, 1.0 / root, mt.maximum(x, y), mt.minimum(y, x), mt.where(x > 0, x, -y), mt.relu(x),
            mt.sign(x), mt.floor(x), mt.ceil(y), x % y, mt.isfinite(x / y), mt.astype(x > y, np.int32), i + 3 * j,
            mt.astype(i, x.dtype) * y, mt.where(mt.isnan(x), 0.0, x), mt.logical_xor(x > 0, y > 0), x.T * 2.0,
            mt.where(x > 0, x, -0.0), x * -0.0, mt.square(x[::2]) - y[1::2], mt.astype(x, np.float64) - 0.1)


@interpreted
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arithmetic_to_the_last_bit(dtype, guard):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((2, 6, 37)).astype(dtype)
    x[0, :5], y[0, :6] = [0.0, -0.0, np.inf, np.nan, -np.inf], [1.0, 0.0, np.nan, 2.0, -0.0, 0.0]
    i, j = random.integers(-2 ** 40, 2 ** 40, (2, 6, 37))
    made = mt.compile(arithmetic, emit="triton")
    with np.errstate(all="ignore"):
        pairs = list(zip(made(x, y, i, j), arithmetic(x, y, i, j), strict=True))
    for found, expected in pairs:
        identical(np.asarray(found), np.asarray(expected))
    assert not made.breaks


@interpreted
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "gelu", "sums"])
def test_one_launch_and_one_for_sums_over_rows(name, guard):
    """A chain is one launch; sums over the rows of several programs take one more, all that are alike."""
    function, args, _ = ONE_KERNEL[name]
    made = mt.compile(function, emit="triton")
    run(made, args)
    leaves = [mt.tensor(a, requires_grad=True) for a in args]
    with ledger.record() as forward:
        y = made(*leaves)
    with ledger.record() as backward:
        y.backward(mt.tensor(np.ones(y.shape)))
    sums = len(args) > 1        # gradients of a weight and a bias
    assert forward.launches.total() == 1 + (name == "sums")
    assert backward.launches.total() == 1 + sums and backward.launches["column_sums"] == sums


@interpreted
def test_a_nan_is_the_maximum_of_its_row(guard):
    x = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]], np.float32)
    made = mt.compile(lambda x: (mt.max(x, 1), mt.min(x * 1.0, axis=1)), emit="triton")
    for found, expected in zip(made(x), (x.max(axis=1), x.min(axis=1)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_places_beyond_31_bits_have_64():
    class Kernel:
        name, nodes, inputs, outputs, roles, reshaped = "none", [], {}, [], {}, {}

        def __init__(self, rows, columns):
            self.rows, self.columns, self.size = rows, columns, rows * columns
    assert "int64" not in triton_source.Writer(Kernel(2 ** 14, 2 ** 16), []).text
    for rows, columns in ((2 ** 15, 2 ** 16), (1, 3 * 10 ** 9)):        # from the program's number on
        assert "program = tl.program_id(0).to(tl.int64)" in triton_source.Writer(Kernel(rows, columns), []).text


@interpreted
def test_sums_of_too_many_numbers_are_made_in_parts(monkeypatch, guard):
    monkeypatch.setattr(gpu, "LIMIT", 100)
    x = np.random.default_rng(0).standard_normal((23, 12))
    first, second = gpu.summed(x, (None, None))
    np.testing.assert_allclose(np.concatenate([first, second]), x.sum(axis=0), rtol=1e-13)


def test_on_the_host_it_wants_the_interpreter(monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", lambda: False)
    made = mt.compile(mt.softmax, emit="triton")
    with pytest.warns(UserWarning, match="runs uncompiled: emit='triton' and the arguments are on the cpu"):
        np.testing.assert_array_equal(np.asarray(made(X)), np.asarray(mt.softmax(X)))


def test_without_triton(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs Triton: pip install triton"):
        mt.compile(mt.softmax, emit="triton")


@pytest.fixture(scope="module")
def compiled():
    """{name: facts} of compile_generated.py."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-m", f"{__package__}.compile_generated"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return {facts.pop("name"): facts for facts in map(json.loads, done.stdout.splitlines())}


def test_each_is_compiled_for_a_gpu(compiled):
    """For sm_90: nothing spilled, 128 bits at a time where rows are whole multiples of that, and Triton's own check of
    the parameters."""
    assert len(compiled) >= 12
    for name, facts in compiled.items():
        assert facts["stack"] == 0, f"{name} keeps registers in memory"
        assert facts["wide"] > 0 or "ragged" in name or "numbers" in name, f"{name}: {facts}"


def test_quotients_and_roots_are_rounded_and_nothing_is_contracted(compiled):
    """What the interpreter can't show, for NumPy rounds anyway. (CUDA's exp and tanh are made of contracted sums.)"""
    for name, facts in compiled.items():
        assert set(facts["quotients"]) <= {"rn"}, name
    for name in ("rms norm 0", "rms norm 1"):
        assert compiled[name]["quotients"] == ["rn"] and compiled[name]["contracted"] == 0


def test_nothing_is_said_while_it_is_interpreted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kernels.interpreting():
            mt.compile(lambda x: mt.log(x) / x, emit="triton")(X)
