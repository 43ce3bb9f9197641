"""Every kernel in Triton's interpreter against its definition in float64: poisoned outputs, odd sizes."""

import numpy as np
import pytest

from minitorch_dist import kernels, ledger
from minitorch_dist.kernels import kernel

from . import harness

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
SAMPLES = harness.samples()


def of_each_form(samples):
    """The first of those whose arguments differ in sizes and numbers alone: what becomes of strides is settled before
    the launch, by dtypes, axes and the order of elements in memory."""
    def form(a):
        return (a.dtype, a.ndim, a.flags.c_contiguous) if isinstance(a, np.ndarray) else type(a)

    def has_strides(a):
        return not isinstance(a, np.ndarray) or a.size > a.shape[-1] > 1 or a.ndim == 1 and a.size > 1
    kept = {}
    for s in samples:
        if s.size <= 100 and all(map(has_strides, s.args)):
            kept.setdefault((s.names, *map(form, s.args)), s)
    return list(kept.values())


STRIDED = of_each_form(SAMPLES)


@pytest.mark.parametrize("sample", [pytest.param(s, marks=[pytest.mark.thorough] * ("large tiles" in s.id))
                                    for s in SAMPLES], ids=lambda s: s.id)
def test_as_defined(sample, monkeypatch):
    guard = harness.guarded(monkeypatch)
    wanted = sample.definition(*map(harness.exact, harness.copied(sample.args)))
    args = harness.copied(sample.args)
    with ledger.record() as book:
        got = sample.entry(*args)
    assert set(book.launches) == set(sample.names)
    guard.check()
    harness.compare(sample, got, wanted)
    if not sample.in_place:
        for before, after in zip(sample.args, args, strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("sample", STRIDED, ids=lambda s: s.id)
def test_strided_inputs_are_refused_or_right(sample, monkeypatch):
    wanted = sample.definition(*map(harness.exact, harness.copied(sample.args)))
    for i, a in enumerate(sample.args):
        if not isinstance(a, np.ndarray):
            continue
        harness.guarded(monkeypatch)
        args = harness.copied(sample.args)
        try:
            got = sample.entry(*args[:i], harness.strided(args[i]), *args[i + 1:])
        except ValueError as error:
            assert "stride" in str(error) or "contiguous" in str(error)
        else:
            harness.compare(sample, got, wanted)


def test_every_kernel_has_samples_of_every_size():
    have = {name: {s.size for s in SAMPLES if name in s.names} for name in kernels.table()}
    assert not {name: sizes for name, sizes in have.items() if not sizes.issuperset(harness.SIZES)}
    assert set().union(*(s.names for s in SAMPLES)) == set(have)
    assert set().union(*(s.names for s in STRIDED)) == set(have) - {"philox_uniform"}      # which reads no array


def test_every_kernel_has_samples_that_a_gpu_loads_128_bits_at_a_time(monkeypatch):
    """All of its lengths are multiples of 16 there, for which a GPU has other code."""
    seen = set()

    def look(kernel, grid, args, options):
        if all(a % 16 == 0 for name, a in zip(kernel.signature, args, strict=True) if name in kernel.divisible):
            seen.add(kernel.name)
    monkeypatch.setattr(kernel, "launch", look)
    lengths = {name for name, one in kernels.table().items() if one.divisible}
    for sample in SAMPLES:
        if lengths.issuperset(sample.names):
            sample.entry(*harness.copied(sample.args))
    assert seen == lengths


@pytest.mark.parametrize("low, high", [(0, 0), (2, 2), (5, 3), (-1, -1)])
def test_of_no_number_in_range_all_are_outside(low, high):
    """The index of an axis without elements; what is let through is still none of them."""
    module = kernels.load("outside")
    for dtype in ("int64", "uint8"):
        for other in (None, 2):
            for values in ([low % 7], [2, 2], [0, 1, 2, 6]):
                numbers = np.array(values, dtype)
                assert module.outside(numbers, low, high, other) == module.definition(numbers, low, high, other)
